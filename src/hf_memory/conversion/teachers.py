"""The Transformers that can be converted: what their configs say in the words of ours."""

from collections.abc import Callable
from typing import NamedTuple

from transformers import PreTrainedConfig

from hf_memory.evaluation.efficiency import head_dim

SHARED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "tie_word_embeddings",
    "rope_parameters",
    "attention_dropout",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "dtype",
)


class Teacher(NamedTuple):
    """One kind of Transformer: its model type, and what of its config has another name than in ours."""

    model_type: str
    options: Callable[[PreTrainedConfig], dict]


def _biases(config: PreTrainedConfig) -> dict:
    return {"attention_bias": config.attention_bias, "attention_output_bias": config.attention_bias}


def _llama(config: PreTrainedConfig) -> dict:
    return {**_biases(config), "mlp_bias": config.mlp_bias}


def _mistral(config: PreTrainedConfig) -> dict:
    return {"sliding_window": config.sliding_window}


def _qwen2(config: PreTrainedConfig) -> dict:
    return {"attention_bias": True, "sliding_window": config.sliding_window}


def _qwen3(config: PreTrainedConfig) -> dict:
    return {**_biases(config), "sliding_window": config.sliding_window, "use_qk_norm": True}


TEACHERS = (
    Teacher("llama", _llama),
    Teacher("mistral", _mistral),
    Teacher("qwen2", _qwen2),
    Teacher("qwen3", _qwen3),
)


def find_teacher(config: PreTrainedConfig) -> Teacher:
    """The entry of TEACHERS for a config.

    Raises:
        ValueError: if there is none, or if the weights are quantised.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError("teacher must not be quantised: load it in float32, bfloat16 or float16")
    for teacher in TEACHERS:
        if teacher.model_type == config.model_type:
            return teacher
    supported = ", ".join(teacher.model_type for teacher in TEACHERS)
    raise ValueError(f"teacher must be one of {supported}, got a model of type {config.model_type!r}")


def attention_types(config: PreTrainedConfig) -> list[str]:
    """`"full_attention"` or `"sliding_attention"` for each layer of a teacher."""
    if getattr(config, "layer_types", None):
        return list(config.layer_types)
    has_window = getattr(config, "sliding_window", None) is not None
    return ["sliding_attention" if has_window else "full_attention"] * config.num_hidden_layers


def shared_options(config: PreTrainedConfig) -> dict:
    """Arguments of a MemoryConfig that has the sizes and options of a teacher's config, but for its layer types."""
    teacher = find_teacher(config)
    shared = {name: getattr(config, name) for name in SHARED}
    return {**shared, "head_dim": head_dim(config), **teacher.options(config)}
