"""A vLLM plugin that runs our models without an export. vLLM calls `register` when it starts."""

from typing import Any

from hf_memory.integrations.vllm.states import check
from hf_memory.modeling import FAMILIES

MODEL = f"{__name__}.model:MemoryForVLLM"


class ModelConfig:
    """Hooks that vLLM calls with the config before it creates a model."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Refuse a model whose states vLLM cannot store."""
        check(model_config.hf_config)

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Require a single process, and turn off CUDA graphs and prefix caching."""
        parallel = vllm_config.parallel_config
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if getattr(parallel, name) != 1:
                raise ValueError(f"{name} must be 1 for models of hf_memory in vLLM, got {getattr(parallel, name)}")
        vllm_config.model_config.enforce_eager = True  # the CPU groups sequences in each step
        vllm_config.cache_config.enable_prefix_caching = False


def register() -> None:
    """Register the causal language model of every family; vLLM imports the class when a model needs it."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    for family in FAMILIES:
        name = family.causal_lm.__name__
        ModelRegistry.register_model(name, MODEL)
        MODELS_CONFIG_MAP[name] = ModelConfig
