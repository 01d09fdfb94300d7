"""A vLLM plugin that runs our models without an export. vLLM calls `register` when it starts."""

import warnings
from typing import Any

from hf_memory.integrations.vllm.placement import (
    bits_of_engine,
    check,
    check_adapters,
    check_processes,
    divided,
    memory_layers,
)
from hf_memory.modeling import FAMILIES

MODEL = f"{__name__}.model"
ALONE = "HfMemoryAttentionForCausalLM"  # vLLM's name of any model that keeps nothing but keys and values


class ModelConfig:
    """Hooks that vLLM calls with the config before it creates a model."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Refuse a model whose states vLLM cannot store; one with keys and values alone has a class of its own."""
        check(model_config.hf_config)
        if not memory_layers(model_config.hf_config):
            names = model_config.hf_config.architectures = [ALONE]
            model_config._model_info, model_config._architecture = (
                model_config.registry.inspect_model_cls(names, model_config)
            )

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Refuse what the models cannot do, and with memories turn off what needs keys and values of each token."""
        parallel = vllm_config.parallel_config
        cache = vllm_config.cache_config
        model = vllm_config.model_config
        stages = parallel.pipeline_parallel_size
        if stages != 1:
            raise ValueError(
                f"pipeline_parallel_size must be 1 for models of hf_memory in vLLM, got {stages}"
            )
        if model.quantization is not None:
            raise ValueError(
                "quantization must be None for models of hf_memory in vLLM, whose weights stay as they are, "
                f"got {model.quantization!r}"
            )
        if vllm_config.lora_config is not None:
            check_adapters(model.hf_config)
        divided(model.hf_config, parallel.tensor_parallel_size)
        check_processes(model.hf_config, parallel.tensor_parallel_size)
        kinds = bits_of_engine(model.hf_config)
        if kinds and cache.cache_dtype == "auto":
            warnings.warn(
                f"vLLM stores keys and values of {' and '.join(kinds)} in the model's dtype, since it does not have "
                f"cache_bits={model.hf_config.cache_bits}. Its own option is kv_cache_dtype='fp8'",
                stacklevel=2,
            )
        if vllm_config.device_config.device_type == "cpu" and not cache.user_specified_block_size:
            cache.block_size = 32  # with its default of 128, windows take twice as much
            cache.user_specified_block_size = True
        if memory_layers(model.hf_config):
            if vllm_config.speculative_config is not None:
                raise ValueError(
                    "speculative_config must be None: a memory cannot forget tokens that are refused"
                )
            if cache.prefix_match_unit is not None:
                raise ValueError(
                    "prefix_match_unit must be None for a model with a memory, since vLLM can give a sequence a wrong "
                    f"state from a page that is partly filled, got {cache.prefix_match_unit}"
                )
            if vllm_config.device_config.device_type != "cpu":
                _capture_parts(vllm_config.compilation_config)
            return
        cache.sliding_window = None  # each layer has its own


def _capture_parts(compilation_config: Any) -> None:
    """Let CUDA graphs have what is between memories, which ask the host how many tokens each sequence has."""
    from vllm.config import CUDAGraphMode

    mode = compilation_config.cudagraph_mode
    if mode is None or mode.has_full_cudagraphs():
        compilation_config.cudagraph_mode = CUDAGraphMode.PIECEWISE


def register() -> None:
    """Register the causal language model of every family; vLLM imports the class when a model needs it."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    classes = {family.causal_lm.__name__: "MemoryForVLLM" for family in FAMILIES} | {
        ALONE: "AttentionForVLLM"
    }
    for name, kind in classes.items():
        ModelRegistry.register_model(name, f"{MODEL}:{kind}")
        MODELS_CONFIG_MAP[name] = ModelConfig
