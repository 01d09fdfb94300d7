"""The Transformers that can be converted, and how their configs and weights translate into ours."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_memory.modeling.any_model import COMMON_FIELDS, check_model, head_dim
from hf_memory.modeling.checks import check, check_type
from hf_memory.modeling.configuration import MemoryConfig

SHARED: tuple[str, ...] = (
    *COMMON_FIELDS,
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
SHARED += ("hidden_act", "rope_parameters", "attention_dropout")
ROPES = ("rope_parameters", "local_rope_parameters")


def _phi3_parts(config: PreTrainedConfig, name: str, x: Tensor) -> Mapping[str, Tensor]:
    queries, keys = (
        n * head_dim(config) for n in (config.num_attention_heads, config.num_key_value_heads)
    )
    if ".qkv_proj." in name:
        names = [name.replace("qkv_proj", part) for part in ("q_proj", "k_proj", "v_proj")]
        return dict(zip(names, x.split([queries, keys, keys])))
    if ".gate_up_proj." in name:
        return {
            name.replace("gate_up_proj", part): y
            for part, y in zip(("gate_proj", "up_proj"), x.chunk(2))
        }
    return {name: x}


def _gemma2(config: PreTrainedConfig) -> dict:
    if config.use_bidirectional_attention:
        raise ValueError(
            "use_bidirectional_attention must be false in a teacher, as memories are causal, got true"
        )
    return {"hidden_act": config.hidden_activation, "embedding_multiplier": config.hidden_size**0.5}


def _gemma2_parts(config: PreTrainedConfig, name: str, x: Tensor) -> Mapping[str, Tensor]:
    return {name: 1 + x if name.endswith("norm.weight") else x}  # its norms multiply by 1 + w


def _gemma3(config: PreTrainedConfig) -> dict:
    ropes = config.rope_parameters
    in_float32 = torch.tensor(config.hidden_size**0.5)
    return {
        **_gemma2(config),
        "embedding_multiplier": in_float32.item(),
        "rope_parameters": ropes["full_attention"],
        "local_rope_parameters": ropes["sliding_attention"],
        "local_rope_layers": [int(kind == "sliding_attention") for kind in config.layer_types],
    }


def _qwen3_moe(config: PreTrainedConfig) -> dict:
    number = config.num_hidden_layers
    dense = config.mlp_only_layers
    has_experts = [
        i not in dense and (i + 1) % config.decoder_sparse_step == 0 for i in range(number)
    ]
    return {"mlp_types": ["experts" if x else "mlp" for x in has_experts]}


class Teacher(NamedTuple):
    """A type of Transformer that can be converted, and how it differs from Llama.

    Attributes:
        model_type: its model type in transformers.
        same: fields that its config has as ours has them, besides SHARED.
        always: arguments of our config that are the same for all models of this type.
        others: makes further arguments of our config; raises ValueError for what ours does not support.
        parts: splits and renames a weight into weights with Llama's names.
        rotates_part: whether its class heeds `partial_rotary_factor` in RoPE of the default type.
    """

    model_type: str
    same: tuple[str, ...] = ()
    always: Mapping[str, Any] = {}
    others: Callable[[PreTrainedConfig], dict] = lambda config: {}
    parts: Callable[[PreTrainedConfig, str, Tensor], Mapping[str, Tensor]] = (
        lambda config, name, x: {name: x}
    )
    rotates_part: bool = False


QK_NORMS = {"use_qk_norm": True}
CAPS = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")
GRANITE = ("attention_bias", "mlp_bias", "embedding_multiplier", "residual_multiplier")
EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
TEACHERS = (
    Teacher("llama", ("attention_bias", "mlp_bias")),
    Teacher("mistral", ("sliding_window",)),
    Teacher("qwen2", ("sliding_window",), {"attention_bias": True}),
    Teacher("qwen3", ("sliding_window", "attention_bias"), QK_NORMS),
    Teacher("smollm3", ("sliding_window", "attention_bias", "mlp_bias", "no_rope_layers")),
    Teacher(
        "olmo2",
        ("attention_bias",),
        {"norm_placement": "post", "qk_norm_whole_width": True, **QK_NORMS},
    ),
    Teacher("phi3", ("sliding_window",), parts=_phi3_parts, rotates_part=True),
    Teacher(
        "gemma2",
        ("sliding_window", "attention_bias", *CAPS),
        {"norm_placement": "both"},
        _gemma2,
        _gemma2_parts,
    ),
    Teacher(
        "gemma3_text",
        ("sliding_window", "attention_bias", "query_pre_attn_scalar", "final_logit_softcapping"),
        {"norm_placement": "both", **QK_NORMS},
        _gemma3,
        _gemma2_parts,
    ),
    Teacher("ministral", ("sliding_window",)),
    Teacher(
        "granite",
        GRANITE,
        # whose root divides scores
        others=lambda config: {"query_pre_attn_scalar": config.attention_multiplier**-2},
        # not the head, which may be tied
        parts=lambda config, name, x: {
            name: x / config.logits_scaling if name == "model.norm.weight" else x
        },
    ),
    Teacher("qwen3_moe", ("sliding_window", "attention_bias", *EXPERTS), QK_NORMS, _qwen3_moe),
)


def find_teacher(config: PreTrainedConfig, argument: str = "teacher") -> Teacher:
    """The entry of TEACHERS for the config of a model that is given as an argument of this name.

    Raises:
        ValueError: if there is none, or if the weights are quantised.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"{argument} must not be quantised: load it in float32, bfloat16 or float16"
        )
    for teacher in TEACHERS:
        if teacher.model_type == config.model_type:
            return teacher
    supported = ", ".join(teacher.model_type for teacher in TEACHERS)
    raise ValueError(
        f"{argument} must be one of {supported}, got a model of type {config.model_type!r}"
    )


def check_teacher_config(argument: str, config: PreTrainedConfig) -> None:
    """Raise ValueError unless a config is of a Transformer in TEACHERS; the model is an argument of this name."""
    kind = config.model_type
    is_student = isinstance(config, MemoryConfig)
    check(not is_student, argument, "a Transformer: a student is not converted again", kind)
    find_teacher(config, argument)


def check_teacher(argument: str, model: Any) -> None:
    """Raise ValueError unless an argument of this name is a whole teacher, without adapters."""
    check_model(argument, model)
    name = type(model).__name__
    adapter = any(isinstance(x, BaseTunerLayer) for x in model.modules())
    merged = "merge them first (`model = model.merge_and_unload()`)"
    wanted = f"one without adapters: {merged}, or add them to the student"
    check(not adapter, argument, wanted, name)
    config: Any = getattr(model, "config", None)
    is_config = isinstance(config, PreTrainedConfig)
    check(is_config, argument, "a causal language model of transformers", name)
    check_teacher_config(argument, config)
    own_class: Any = AutoModelForCausalLM._model_mapping[type(config)]
    is_own = isinstance(model, own_class)
    wanted = f"a {own_class.__name__}, which the student computes as it does"
    check(is_own, argument, wanted, name)


def shared_options(config: PreTrainedConfig) -> dict:
    """Arguments that give a MemoryConfig the sizes and options of a teacher, except its layer types."""
    teacher = find_teacher(config)
    shared = {name: getattr(config, name) for name in SHARED if hasattr(config, name)}
    shared |= {name: getattr(config, name) for name in teacher.same}
    if "attention_bias" in teacher.same:
        shared["attention_output_bias"] = config.attention_bias
    shared |= {"head_dim": head_dim(config), **teacher.always, **teacher.others(config)}
    ropes = {name: shared[name] for name in ROPES if shared.get(name)}
    return shared | {name: _heeded(rope, teacher) for name, rope in ropes.items()}


def _heeded(rope: Mapping[str, Any], teacher: Teacher) -> dict[str, Any]:
    """What a teacher's class heeds of parameters of RoPE."""
    is_ignored = rope["rope_type"] == "default" and not teacher.rotates_part
    ignored = {"partial_rotary_factor"} if is_ignored else set()
    return {name: x for name, x in rope.items() if name not in ignored}


def has_two_ropes(config: PreTrainedConfig) -> bool:
    """Whether a teacher rotates texts beyond some length by other angles."""
    shared = shared_options(config)
    return any(_is_changing(shared[name]) for name in ROPES if shared.get(name))


def with_one_rope(shared: dict, config: PreTrainedConfig, positions: int | None = None) -> dict:
    """Shared options of a teacher whose rotation is the same for texts of any length.

    A memory keeps keys that were rotated, so it cannot go on with other angles. Those of LongRoPE change after the
    length that a teacher was first trained for. A student with positions up to this length has those of shorter texts,
    and one with more has those of longer texts for all (as in vLLM, by `max_model_len`).

    Args:
        shared: the options that `shared_options` gives.
        config: the teacher's config.
        positions: number of positions that the user wants; None: not said.

    Raises:
        ValueError: if the angles change among the teacher's positions and the user has not said how many the student
            needs, or wants more than the teacher has.
    """
    check_type("max_position_embeddings", positions, int | None)
    ropes = {name: shared[name] for name in ROPES if shared.get(name)}
    most = config.max_position_embeddings
    for name, rope in ropes.items():
        kind = rope["rope_type"]
        wanted = "one whose angles are the same in texts of any length"
        check(kind != "dynamic", f"rope_type of {name} of the teacher", wanted, kind)
        if not _is_changing(rope):
            continue
        first = rope["original_max_position_embeddings"]
        if positions is None and most > first:
            raise ValueError(
                f"max_position_embeddings must be given for a student of a teacher with LongRoPE, whose angles change "
                f"after {first} tokens, while a memory keeps keys of one kind: -o max_position_embeddings={first} for "
                f"its predictions in texts up to this length, or -o max_position_embeddings={most} for those in "
                "longer texts, with which shorter ones are predicted a little worse; got None"
            )
        asked = most if positions is None else positions
        check(asked <= most, "max_position_embeddings", f"at most the teacher's {most}", asked)
        factors = rope["long_factor" if asked > first else "short_factor"]
        changed = {
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": _attention_factor(config, rope),
        }
        shared = {**shared, name: {**rope, **changed}, "max_position_embeddings": asked}
    return shared


def rotates_alike(config: PreTrainedConfig, teacher: PreTrainedConfig, length: int) -> bool:
    """Whether a student rotates texts of so many tokens as its teacher does."""
    shared = shared_options(teacher)
    for name in ROPES:
        rope = shared.get(name)
        if rope is None or not _is_changing(rope):
            continue
        is_long = length > rope["original_max_position_embeddings"]
        factors = rope["long_factor" if is_long else "short_factor"]
        if getattr(config, name)["short_factor"] != factors:
            return False
    return True


def _is_changing(rope: Mapping[str, Any]) -> bool:
    return rope["rope_type"] == "longrope" and rope["short_factor"] != rope["long_factor"]


def _attention_factor(config: PreTrainedConfig, rope: Mapping[str, Any]) -> float:
    """What LongRoPE multiplies cosines and sines by, which depends on the teacher's number of positions."""
    config = copy.copy(config)
    config.rope_parameters = dict(rope)
    return ROPE_INIT_FUNCTIONS["longrope"](config)[1]
