"""What the metadata of a GGUF file says of a model: each entry is read, has no effect, or is refused.

transformers reads sizes alone. What is absent has the default of llama.cpp, not that of a config.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Said = Mapping[str, Any]  # metadata of an architecture, without its name

READ = (
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.factor",
    "rope.scaling.type",
    "vocab_size",
)
NO_EFFECT = (  # whatever their values are
    "pooling_type",  # of embeddings of texts
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",  # without YaRN, which is refused
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_log_multiplier",
    "tensor_data_layout",
)
WITHOUT_EFFECT: dict[str, tuple] = {  # with these values
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (1.0,),
}
THETA = 10000.0  # of llama.cpp


class Architecture(NamedTuple):
    """An architecture of GGUF files.

    Attributes:
        read: keys of its metadata that are read besides READ.
        fields: makes fields of its config from the metadata besides sizes and RoPE.
        has_windows: whether it has windows of attention.
        has_parts: whether it can rotate a part of the channels of a head.
        scales_rope: whether a config can have a linear scaling of RoPE.
    """

    read: tuple[str, ...] = ()
    fields: Callable[[Said], dict[str, Any]] = lambda said: {}
    has_windows: bool = False
    has_parts: bool = False
    scales_rope: bool = True


def _gemma(said: Said, layers_of_27b: int) -> dict[str, Any]:
    """The scale of queries, which llama.cpp finds from the number of layers, and the pattern of windows."""
    is_27b = said["block_count"] == layers_of_27b
    width = said["embedding_length"] // said["attention.head_count"]
    return {"query_pre_attn_scalar": width if is_27b else _head_dim(said)} | _layer_types(said)


def _layer_types(said: Said) -> dict[str, Any]:
    """The pattern of layers with windows: every n-th layer is without one, or whether each layer has one."""
    pattern = said.get("attention.sliding_window_pattern")
    if pattern is None:
        return {}
    count = said["block_count"]
    in_window = [(i + 1) % pattern > 0 for i in range(count)] if type(pattern) is int else pattern
    if len(in_window) != count:
        raise ValueError(f"attention.sliding_window_pattern must have {count} entries")
    return {"layer_types": ["sliding_attention" if x else "full_attention" for x in in_window]}


def _gemma2(said: Said) -> dict[str, Any]:
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return _gemma(said, 46) | {name: said.get(name, usual) for name, usual in caps.items()}


def _gemma3(said: Said) -> dict[str, Any]:
    if not said.get("attention.sliding_window"):
        raise ValueError("attention.sliding_window must be given")
    return _gemma(said, 62) | {"final_logit_softcapping": said.get("final_logit_softcapping")}


PATTERN = ("attention.sliding_window_pattern",)
ARCHITECTURES = {
    "llama": Architecture(),
    "qwen2": Architecture(),
    "qwen3": Architecture(),
    "phi3": Architecture(has_windows=True, has_parts=True, scales_rope=False),
    "gemma2": Architecture(
        ("attn_logit_softcapping", "final_logit_softcapping", *PATTERN), _gemma2, has_windows=True
    ),
    "gemma3": Architecture(
        ("final_logit_softcapping", "rope.freq_base_swa", *PATTERN), _gemma3, has_windows=True
    ),
}


def refused(said: Said, architecture: str) -> str | None:
    """What of the metadata changes predictions and is not read, as `name=value`; None if there is nothing."""
    known = {*READ, *NO_EFFECT, *ARCHITECTURES[architecture].read}
    for name, value in said.items():
        is_of_layers = type(value) is list and name not in ARCHITECTURES[architecture].read
        if is_of_layers or (name not in known and value not in WITHOUT_EFFECT.get(name, ())):
            return f"{name}={value!r}"
    return _unusual(said, ARCHITECTURES[architecture])


def _unusual(said: Said, architecture: Architecture) -> str | None:
    """A value of what is read that a config of the architecture cannot have."""
    channels = _head_dim(said)
    length = said["context_length"]
    unusual = {"attention.value_length": said.get("attention.value_length", channels) != channels}
    if not architecture.has_parts:
        rotated = said.get("rope.dimension_count", channels)
        unusual["rope.dimension_count"] = rotated != channels
    if not architecture.has_windows:
        window = said.get("attention.sliding_window") or length
        unusual["attention.sliding_window"] = window < length
    if not architecture.scales_rope:
        unusual["rope.scaling.factor"] = _scaling(said) != 1
    if said.get("rope.scaling.type", "none") not in ("none", "linear"):
        unusual["rope.scaling.type"] = True
    return next((f"{name}={said.get(name)!r}" for name, is_so in unusual.items() if is_so), None)


def fields_of(said: Said, architecture: str) -> dict[str, Any]:
    """Fields of the config of a model, except for those that transformers reads, and RoPE."""
    kind = ARCHITECTURES[architecture]
    sizes = {
        "num_key_value_heads": said.get("attention.head_count_kv", said["attention.head_count"]),
        "head_dim": _head_dim(said),
    }
    window = said.get("attention.sliding_window")
    windows = {"sliding_window": window or None} if kind.has_windows and window is not None else {}
    return sizes | windows | kind.fields(said)


def ropes_of(said: Said, given: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of RoPE of a model, from those of a config."""
    if "full_attention" in given:
        theta = said.get("rope.freq_base_swa", THETA)
        local = {**given["sliding_attention"], "rope_type": "default", "rope_theta": theta}
        return {"full_attention": _rope(said), "sliding_attention": local}
    return _rope(said)


def _rope(said: Said) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": said.get("rope.freq_base", THETA)}
    if (factor := _scaling(said)) != 1:
        rope |= {"rope_type": "linear", "factor": factor}
    channels = _head_dim(said)
    if (rotated := said.get("rope.dimension_count", channels)) != channels:
        rope["partial_rotary_factor"] = rotated / channels
    return rope


def _scaling(said: Said) -> float:
    """The factor of a linear scaling of RoPE, which is the type if none is named; 1 for none."""
    if said.get("rope.scaling.type", "linear") != "linear":
        return 1.0
    return said.get("rope.scaling.factor") or said.get("rope.scale_linear") or 1.0


def _head_dim(said: Said) -> int:
    """Channels of a head."""
    heads = said["attention.head_count"]
    return said.get("attention.key_length") or said["embedding_length"] // heads
