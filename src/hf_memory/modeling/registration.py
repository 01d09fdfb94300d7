"""How transformers finds the classes of a family, and what tests must know of it."""

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

# The Trainer reads the config of a checkpoint that it resumes from without our class, and checks the words of all.
configuration_utils.ALLOWED_ATTN_LAYER_TYPES += ("memory",)

AUTO_CLASSES = {
    "config": AutoConfig,
    "model": AutoModel,
    "causal_lm": AutoModelForCausalLM,
    "sequence_classifier": AutoModelForSequenceClassification,
    "token_classifier": AutoModelForTokenClassification,
}


class Family(NamedTuple):
    """One family's classes; the Auto class that finds each is in AUTO_CLASSES under the same name."""

    config: type[PreTrainedConfig]
    model: type[PreTrainedModel]
    causal_lm: type[PreTrainedModel]
    sequence_classifier: type[PreTrainedModel]
    token_classifier: type[PreTrainedModel]
    growth: Literal["fixed", "token"] = "fixed"  # of its memory with the past
    is_student: bool = True  # a Transformer can become it: its layers are a mixer and an MLP as in Llama


REGISTERED: dict[type[PreTrainedConfig], Family] = {}


def register(family: Family) -> Family:
    """Have the Auto classes find it, and saved folders name them."""
    AutoConfig.register(family.config.model_type, family.config)
    for name, auto_class in list(AUTO_CLASSES.items())[1:]:
        auto_class.register(family.config, getattr(family, name))
    for name in AUTO_CLASSES:
        _name_in_transformers(getattr(family, name))
    REGISTERED[family.config] = family
    return family


def _name_in_transformers(cls: type) -> None:
    """`transformers serve` looks there for the class that a config names.

    transformers replaces its module once while it is imported; the server holds the one from before.
    """
    server = sys.modules.get("transformers.cli.serving.model_manager")
    for module in (sys.modules["transformers"], getattr(server, "transformers", None)):
        if module is not None and not hasattr(module, cls.__name__):
            setattr(module, cls.__name__, cls)


def tell_peft(model_type: str) -> None:
    """What LoRA adapts where a user names nothing, once peft is there: to import it for this would take seconds."""
    if peft := sys.modules.get("peft"):
        targets = peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
        targets.setdefault(model_type, ["q_proj", "k_proj", "v_proj", "o_proj"])
