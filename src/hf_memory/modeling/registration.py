"""Registration of families with transformers and peft.

Where they have no registry for what is registered here, this module changes their tables, and no other module does.
transformers 5.23 and peft 0.21 need each of these changes; a comment says which later version will not, and a test in
tests/test_registration.py fails with it.
"""

import sys
from types import ModuleType
from typing import Literal, NamedTuple

from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
    configuration_utils,
)
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, STATIC_LAYER_TYPE_MAPPING

from hf_memory.cache import LAYER_TYPES, MemoryLayer, StaticMemoryLayer

# The Trainer reads the config of a checkpoint with transformers' base class, which refuses unknown names of layers. A
# version in which the Trainer uses AutoConfig, or the base class allows names of others, makes this unnecessary.
configuration_utils.ALLOWED_ATTN_LAYER_TYPES += LAYER_TYPES

# Cache layers register themselves by `_layer_type`, but for one type only, and with StaticCache only if they are a
# StaticLayer, whose keys and values a memory does not have. A version in which any layer can register with both caches
# for several types makes this unnecessary.
DYNAMIC_LAYER_TYPE_MAPPING.update(dict.fromkeys(LAYER_TYPES, MemoryLayer))
STATIC_LAYER_TYPE_MAPPING.update(dict.fromkeys(LAYER_TYPES, StaticMemoryLayer))

IMPORTED = (  # types of flash-linear-attention that `import_model` imports
    "linear_attn",
    "retnet",
    "gla",
    "delta_net",
    "gated_deltanet",
    "gated_deltanet2",
    "comba",
    "gated_deltaproduct",
    "kda",
    "mesa_net",
    "mamba3",
    "forgetting_transformer",
    "rwkv7",
)
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

    @classmethod
    def of(cls, module: ModuleType, name: str, **options) -> "Family":
        """The family whose classes in a module have names that begin with `name`."""
        parts = (
            "Config",
            "Model",
            "ForCausalLM",
            "ForSequenceClassification",
            "ForTokenClassification",
        )
        return cls(*(getattr(module, name + part) for part in parts), **options)


REGISTERED: dict[type[PreTrainedConfig], Family] = {}


def register(family: Family) -> Family:
    """Give a family's classes their config, register them with the Auto classes, and let saved folders name them."""
    AutoConfig.register(family.config.model_type, family.config)
    for name, auto_class in list(AUTO_CLASSES.items())[1:]:
        getattr(family, name).config_class = family.config
        auto_class.register(family.config, getattr(family, name))
    for name in AUTO_CLASSES:
        _name_in_transformers(getattr(family, name))
    REGISTERED[family.config] = family
    return family


def _name_in_transformers(cls: type) -> None:
    """Set a class as an attribute of the transformers module, where `transformers serve` looks for it.

    transformers replaces its module object while it is imported, and the server has the one from before. A version
    whose server finds the classes of a config by Auto classes makes this unnecessary.
    """
    server = sys.modules.get("transformers.cli.serving.model_manager")
    for module in (sys.modules["transformers"], getattr(server, "transformers", None)):
        if module is not None and not hasattr(module, cls.__name__):
            setattr(module, cls.__name__, cls)


class KnownToPeft(PreTrainedConfig):
    """For configs: peft's default target modules for LoRA.

    peft may be imported after this package, and importing it takes seconds, so it is told when it asks for the config
    as a dict, which it does first. A version with defaults for unknown models makes this unnecessary.
    """

    def to_dict(self) -> dict:
        """The config as a dict."""
        if peft := sys.modules.get("peft"):
            targets = peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
            targets.setdefault(self.model_type, ["q_proj", "k_proj", "v_proj", "o_proj"])
        return super().to_dict()


class OtherLibraryConfig(PreTrainedConfig):
    """Stands for the config of another library's model, which cannot be loaded but imported, and says so."""

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """Raise ValueError.

        Args:
            config_dict (`dict`): the content of config.json.
            kwargs (`dict`): not used.
        """
        raise ValueError(
            f"a model of type {cls.model_type!r} of flash-linear-attention must be imported before hf_memory can load "
            "it: hf_memory.conversion.import_model(FOLDER).save_pretrained(NEW_FOLDER)"
        )


def name_the_import(model_type: str) -> None:
    """Let the Auto classes say how a model of another library is imported, unless that library is here itself."""
    if model_type not in CONFIG_MAPPING:
        stand_in = type("OtherLibraryConfig", (OtherLibraryConfig,), {"model_type": model_type})
        AutoConfig.register(model_type, stand_in)
