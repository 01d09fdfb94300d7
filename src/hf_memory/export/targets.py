"""The table of export targets: architectures that inference engines have, and which models they represent exactly."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor
from transformers import PreTrainedConfig

from hf_memory.export import delta, mamba, qwen3_5
from hf_memory.export.parts import SIZES, Weights
from hf_memory.modeling.configuration import MemoryConfig
from hf_memory.modeling.delta_net import DeltaNetConfig
from hf_memory.modeling.gated_linear_attention import GatedLinearAttentionConfig

FIELDS_OF_ALL_MODELS = {field.name for field in dataclasses.fields(PreTrainedConfig)}
REASONS = {  # why a target does not accept other values of a field
    "norm_placement": "norms are before mixer and MLP there",
    "hidden_act": "the memory and the MLP share one activation there",
    "memory_rope": "queries and keys of a memory are not rotated there",
    "output_gate": "the output gate has this activation there",
    "allow_negative_eigenvalues": "the write strength is at most 1 there",
    "attention_bias": "memory layers have no biases there",
    "attention_output_bias": "memory layers have no biases there",
    "use_qk_norm": "attention has no q/k norm there",
    "gate": "the memory has this kind of decay there",
    "levels": "a head has one memory there",
}


def _no_attention(config: MemoryConfig, mixer: Weights) -> dict[str, Tensor]:
    raise AssertionError("the target takes models without attention layers only")


def _as_they_are(config: MemoryConfig, layer: dict[str, Tensor]) -> dict[str, Tensor]:
    return layer


class Target(NamedTuple):
    """An architecture of transformers: which of our models it represents, and how their weights translate."""

    name: str
    model_type: str
    family: type[MemoryConfig]
    accepts: Mapping[str, tuple | None]  # allowed values by field, None: any; other fields must have defaults
    check: Callable[..., list[str]]  # further conditions; words that follow "it needs "
    options: Callable[..., dict]  # arguments of its config, except the number and types of layers
    memory: Callable[..., dict[str, Tensor]]  # the weights of a memory layer
    engines: Callable[..., dict[str, str]]  # reasons why engines cannot run a model, by name; "" if they can
    attention: Callable[..., dict[str, Tensor]] = _no_attention
    block: Callable[..., dict[str, Tensor]] = _as_they_are  # the weights of a whole layer
    top: Callable[[Weights], Mapping[str, Tensor]] = dict  # the weights outside the layers
    fields: Callable[..., dict] = lambda config, theirs: {}  # more fields of config.json, which some engines need
    names: Mapping[str, str] = {}  # prefixes of weight names that differ
    file_names: Mapping[str, str] = {}  # parts of names that differ in published checkpoints
    files: Mapping[str, str] = {}  # more files, which some engines need, and their text
    unsaved: str = "-"  # ending of the names of zeros that are left out
    cache: str = "past_key_values"  # the name of the cache in its forward
    needs_attention: bool = True  # then a pure model gets an attention layer that adds zero

    def faults(self, config: MemoryConfig) -> list[str]:
        """Reasons why this target does not represent a model, each with what it needs and what the model has."""
        faults = []
        for field in dataclasses.fields(config):
            accepted = self.accepts.get(field.name, (field.default,))
            if accepted is None or field.name in FIELDS_OF_ALL_MODELS:
                continue
            value = getattr(config, field.name)
            if value not in accepted:
                reason = f" ({REASONS[field.name]})" if field.name in REASONS else ""
                faults.append(f"{field.name}={' or '.join(map(repr, accepted))}{reason}, got {value!r}")
        return faults + self.check(config)


ANY = dict.fromkeys(("use_qk_norm", "query_pre_attn_scalar", "output_gate_low_rank_dim"))
DELTA = {**SIZES, **ANY, "gate": ("scalar", "none"), "output_gate": ("silu",)}
KIMI = {**DELTA, "gate": ("vector", "scalar", "none"), "output_gate": ("sigmoid",)}
ANY_MAMBA = ("attention_bias", "attention_output_bias", "output_gate", "gate_low_rank_dim", "gate_logit_normalizer")
MAMBA = {**SIZES, **ANY, **dict.fromkeys(ANY_MAMBA), "gate": ("mamba2",)}

TARGETS = (
    Target(
        "qwen3_5",
        "qwen3_5_text",
        DeltaNetConfig,
        DELTA,
        qwen3_5.check,
        qwen3_5.options,
        qwen3_5.memory,
        qwen3_5.engines,
        attention=qwen3_5.attention,
        block=qwen3_5.block,
        top=qwen3_5.top,
        fields=qwen3_5.fields,
        files=qwen3_5.FILES,
        unsaved="self_attn.o_proj.bias",
    ),
    Target(
        "granite",
        "granitemoehybrid",
        GatedLinearAttentionConfig,
        {**MAMBA, "embedding_multiplier": None},
        mamba.check_granite,
        mamba.granite_options,
        mamba.granite_memory,
        mamba.engines,
        attention=mamba.granite_attention,
        block=mamba.granite_block,
        fields=mamba.granite_fields,
    ),
    Target(
        "mamba2",
        "mamba2",
        GatedLinearAttentionConfig,
        {**MAMBA, "intermediate_size": (0,)},
        mamba.check_mamba2,
        mamba.mamba2_options,
        mamba.mamba2_memory,
        mamba.engines,
        block=mamba.mamba2_block,
        fields=mamba.mamba2_fields,
        names={
            "model.embed_tokens.": "backbone.embeddings.",
            "model.layers.": "backbone.layers.",
            "model.norm.": "backbone.norm_f.",
        },
        cache="cache_params",
        needs_attention=False,
    ),
    Target(
        "olmo_hybrid",
        "olmo_hybrid",
        DeltaNetConfig,
        {**DELTA, "allow_negative_eigenvalues": None},
        delta.check_olmo_hybrid,
        delta.olmo_hybrid_options,
        delta.olmo_hybrid_memory,
        delta.olmo_hybrid_engines,
    ),
    Target(
        "bailing",
        "bailing_hybrid",
        DeltaNetConfig,
        KIMI,
        delta.check_bailing,
        delta.bailing_options,
        delta.bailing_memory,
        delta.bailing_engines,
        top=delta.untied,
        fields=delta.bailing_fields,
    ),
    Target(
        "kimi",
        "kimi_linear",
        DeltaNetConfig,
        KIMI,
        delta.check_kimi,
        delta.kimi_options,
        delta.kimi_memory,
        delta.kimi_engines,
        top=delta.untied,
        fields=delta.kimi_fields,
        file_names={".block_sparse_moe.": ".mlp."},  # for dense layers
    ),
)
NAMES = tuple(target.name for target in TARGETS)


def has_targets(config: MemoryConfig) -> bool:
    """Whether there are targets for the memory of this config."""
    return isinstance(config, DeltaNetConfig) or getattr(config, "gate", None) == "mamba2"


class NotExportable(ValueError):
    """Raised if no architecture of the inference engines represents a model exactly."""


def find_target(config: MemoryConfig, name: str = "auto") -> Target:
    """The target of a name, or the first that represents a model exactly.

    Raises:
        NotExportable: if the target, or no target, represents the model exactly; the message says which fields of the
            config differ.
        ValueError: if there is no target of that name, or it is for other families.
    """
    if name not in ("auto", *NAMES):
        raise ValueError(f"target must be one of auto, {', '.join(NAMES)}, got {name!r}")
    if not has_targets(config):
        gate = f" with gate={config.gate!r}" if hasattr(config, "gate") else ""
        raise NotExportable(
            f"no engine has the memory of {config.model_type}{gate}. Without export, vLLM runs it if hf_memory is "
            "installed too and the memory does not grow, and so do transformers and hf_memory.generate_stream"
        )
    of_family = [target for target in TARGETS if type(config) is target.family and name in ("auto", target.name)]
    if not of_family:
        family = next(target.family.model_type for target in TARGETS if target.name == name)
        raise ValueError(f"target {name} is for models of type {family}, got {config.model_type}")
    faults = {target.name: target.faults(config) for target in of_family}
    exact = [target for target in of_family if not faults[target.name]]
    if exact:
        return exact[0]
    nearest = sorted(faults, key=lambda name: len(faults[name]))
    needs = "; ".join(f"{name} needs {', and '.join(faults[name])}" for name in nearest)
    raise NotExportable(f"no target represents the model exactly: {needs}")
