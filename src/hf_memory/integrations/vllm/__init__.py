"""Our models inside vLLM as they are, those too that no architecture of its own equals. vLLM calls `register`."""

from typing import Any

from hf_memory.integrations.vllm.states import check
from hf_memory.modeling import FAMILIES

MODEL = f"{__name__}.model:MemoryForVLLM"


class ModelConfig:
    """What vLLM asks of a model's config before it makes the model."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Refuse what has no place in vLLM."""
        check(model_config.hf_config)

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """A whole model in one process, without graphs and without states kept of prefixes."""
        parallel = vllm_config.parallel_config
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if getattr(parallel, name) != 1:
                raise ValueError(f"{name} must be 1 for models of hf_memory in vLLM, got {getattr(parallel, name)}")
        vllm_config.model_config.enforce_eager = True  # what to read together is decided on the CPU, step by step
        vllm_config.cache_config.enable_prefix_caching = False


def register() -> None:
    """Tell vLLM of every family's class for text; it is imported when a model needs it."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    for family in FAMILIES:
        name = family.causal_lm.__name__
        ModelRegistry.register_model(name, MODEL)
        MODELS_CONFIG_MAP[name] = ModelConfig
