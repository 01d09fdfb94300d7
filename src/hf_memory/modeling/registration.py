"""Registration of families with transformers' Auto classes."""

import sys
from typing import Literal, NamedTuple

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
    configuration_utils,
)

# The Trainer reads the config of a checkpoint with transformers' base class, which checks layer types.
configuration_utils.ALLOWED_ATTN_LAYER_TYPES += ("memory",)

AUTO_CLASSES = {
    "config": AutoConfig,
    "model": AutoModel,
    "causal_lm": AutoModelForCausalLM,
    "sequence_classifier": AutoModelForSequenceClassification,
    "token_classifier": AutoModelForTokenClassification,
}


class Family(NamedTuple):
    """The classes of a family; AUTO_CLASSES has the Auto class for each field."""

    config: type[PreTrainedConfig]
    model: type[PreTrainedModel]
    causal_lm: type[PreTrainedModel]
    sequence_classifier: type[PreTrainedModel]
    token_classifier: type[PreTrainedModel]
    growth: Literal["fixed", "token"] = "fixed"  # growth of its memory with the number of tokens
    is_student: bool = True  # whether a Transformer can be converted to it


REGISTERED: dict[type[PreTrainedConfig], Family] = {}


def register(family: Family) -> Family:
    """Register a family with the Auto classes, and let saved folders name its classes."""
    AutoConfig.register(family.config.model_type, family.config)
    for name, auto_class in list(AUTO_CLASSES.items())[1:]:
        auto_class.register(family.config, getattr(family, name))
    for name in AUTO_CLASSES:
        _name_in_transformers(getattr(family, name))
    REGISTERED[family.config] = family
    return family


def _name_in_transformers(cls: type) -> None:
    """Set a class as an attribute of the transformers module, where `transformers serve` looks for it.

    transformers replaces its module object while it is imported, and the server has the one from before.
    """
    server = sys.modules.get("transformers.cli.serving.model_manager")
    for module in (sys.modules["transformers"], getattr(server, "transformers", None)):
        if module is not None and not hasattr(module, cls.__name__):
            setattr(module, cls.__name__, cls)


def tell_peft(model_type: str) -> None:
    """Set peft's default target modules for LoRA, if peft was already imported: importing it takes seconds."""
    if peft := sys.modules.get("peft"):
        targets = peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
        targets.setdefault(model_type, ["q_proj", "k_proj", "v_proj", "o_proj"])
