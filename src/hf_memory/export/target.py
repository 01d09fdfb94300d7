"""What an export target is: an architecture of transformers that represents some of our models exactly."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor
from transformers import PreTrainedConfig

from hf_memory.export.parts import Weights, kept_layers
from hf_memory.modeling.any_model import COMMON_FIELDS
from hf_memory.modeling.configuration import MemoryConfig

FIELDS_OF_ALL_MODELS = {field.name for field in dataclasses.fields(PreTrainedConfig)}
FREE: tuple[str, ...] = (
    "num_hidden_layers",
    "layer_types",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
FREE += (
    "rope_parameters",
    "no_rope_layers",
    "query_pre_attn_scalar",
    "use_qk_norm",
    "attention_dropout",
)
FREE += (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
)
FREE += ("linear_conv_kernel_dim", "memory_qk_norm", "output_gate_low_rank_dim", "output_norm_eps")
FREE += ("use_cache", "mixer_backend")
FREE += (
    "sliding_window",
    "kept_block_size",
    "eviction",
)  # which no accepted layer uses, or no other than attention with a window
# what every target accepts
ANY = dict.fromkeys((*COMMON_FIELDS, *FREE)) | {"memory_rope": (False,)}
EACH_LAYER = (
    "full_attention_heads",
    "num_kept_tokens",
)  # lists of what each layer has, which may be nothing
# fields of a student that are as in its teacher, whatever the conversion
OF_TEACHERS = {
    "attention_bias",
    "attention_output_bias",
    "attn_logit_softcapping",
    "embedding_multiplier",
    "final_logit_softcapping",
    "hidden_act",
    "local_rope_layers",
    "mlp_bias",
    "mlp_types",
    "norm_placement",
    "qk_norm_whole_width",
    "residual_multiplier",
    "use_qk_norm",
}
REASONS = {  # why a target does not accept other values of a field
    "norm_placement": "norms are before mixer and MLP there",
    "hidden_act": "the memory and the MLP share one activation there",
    "memory_rope": "queries and keys of a memory are not rotated there",
    "output_gate": "the output gate has this activation there",
    "allow_negative_eigenvalues": "the write strength is at most 1 there",
    "num_sink_tokens": "heads with a window do not see the first tokens there, but may have sinks (attention_sinks)",
    "num_kept_tokens": "heads with a window see no other tokens there",
    "full_attention_heads": "all heads of a layer see as far there",
    "attention_bias": "memory layers have no biases there",
    "attention_output_bias": "memory layers have no biases there",
    "use_qk_norm": "attention has no q/k norm there",
    "gate": "the memory has this kind of decay there",
    "levels": "a head has one memory there",
    "cache_bits": "engines have options of their own for the bits of a cache, and this one is of no weight",
}


class Target(ABC):
    """An architecture: which of our models it represents, and how their weights translate.

    Attributes:
        name: its name for users.
        model_type: its name in transformers.
        family: the config class of the models.
        accepts: allowed values by field of the config, None: any; fields that are not named must have their defaults.
        names: parts of weight names that differ.
        file_names: parts of names that differ in published checkpoints.
        files: further files that some engines need, and their text.
        unsaved: ending of the names of zeros that are left out.
        layer_types: the names there of the layer types that fit.
        memory_name: the name there of the mixer in a memory layer.
        needs_attention: whether a model without attention layers gets one that adds zero.
        has_our_attention: whether its attention layers can be ours; if not, only models without attention fit.
        has_mlp: whether it has an MLP in every layer.
    """

    name: ClassVar[str]
    model_type: ClassVar[str]
    family: ClassVar[type[MemoryConfig]]
    accepts: ClassVar[Mapping[str, tuple | None]]
    names: ClassVar[Mapping[str, str]] = {}
    file_names: ClassVar[Mapping[str, str]] = {}
    files: ClassVar[Mapping[str, str]] = {}
    unsaved = "-"
    layer_types: ClassVar[Mapping[str, str]] = {
        "memory": "linear_attention",
        "full_attention": "full_attention",
    }
    memory_name: ClassVar[str]
    needs_attention = True
    has_our_attention = False
    has_mlp = True

    @abstractmethod
    def check(self, config: MemoryConfig) -> list[str]:
        """Further reasons why the target does not represent a model: words that follow "it needs "."""

    @abstractmethod
    def options(self, config: MemoryConfig) -> dict:
        """Arguments of the architecture's config, except the number and types of layers."""

    def fields(self, config: MemoryConfig, theirs: PreTrainedConfig) -> dict:
        """Further fields of config.json, which some engines need."""
        return {}

    @abstractmethod
    def engines(self, config: MemoryConfig) -> dict[str, str]:
        """Engines that have the architecture; for each, the reason why it cannot run this model, or ""."""

    def memory(self, config: MemoryConfig, mixer: Weights) -> dict[str, Tensor]:
        """The weights of a memory layer's mixer, from those of ours."""
        raise AssertionError("the target takes models without memory layers only")

    def attention(self, config: MemoryConfig, mixer: Weights) -> dict[str, Tensor]:
        """The weights of an attention layer's mixer, from those of ours."""
        raise AssertionError("the target takes models without attention layers only")

    def block(self, config: MemoryConfig, layer: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights of a whole layer, from translated weights of its mixer and ours of the rest."""
        return layer

    def top(self, outside: Weights) -> dict[str, Tensor]:
        """The weights outside the layers."""
        return dict(outside)

    def faults_by_field(self, config: MemoryConfig) -> dict[str, str]:
        """Fields of a config that this target does not have with their values, each with what it needs."""
        faults = {}
        for field in dataclasses.fields(self.family):
            accepted = self.accepts.get(field.name, (field.default,))
            if accepted is None or field.name in FIELDS_OF_ALL_MODELS:
                continue
            value = getattr(config, field.name, field.default)
            if value not in accepted and not _is_nothing(field.name, value):
                reason = f" ({REASONS[field.name]})" if field.name in REASONS else ""
                faults[field.name] = (
                    f"{field.name}={' or '.join(map(repr, accepted))}{reason}, got {value!r}"
                )
        return faults

    def has_shape(self, config: MemoryConfig) -> bool:
        """Whether all that a student has from its teacher, such as where norms are, is possible here."""
        return not OF_TEACHERS & self.faults_by_field(config).keys()

    def faults(self, config: MemoryConfig) -> list[str]:
        """Reasons why this target does not represent a model, each with what it needs and what the model has."""
        faults = list(self.faults_by_field(config).values())
        if "memory" in self.layer_types and config.has_memory_qk_norm:
            faults.append("memory_qk_norm=False (memories have no q/k norm there), got q/k norm")
        if others := sorted(set(config.layer_types) - set(self.layer_types)):
            only, got = (" and ".join(map(repr, kinds)) for kinds in (self.layer_types, others))
            faults.append(f"layer_types with only {only}, got {got}")
        if (kept := kept_layers(config)) and not self.has_our_attention:
            faults.append(
                f"layer_types all 'memory' (its attention differs from ours), got attention in {kept}"
            )
        if self.has_mlp and not config.intermediate_size:
            faults.append("intermediate_size above 0, got 0")
        return faults + self.check(config)


def _is_nothing(name: str, value: object) -> bool:
    """Whether a field of `EACH_LAYER` gives no layer anything."""
    return name in EACH_LAYER and isinstance(value, list) and not any(value)
