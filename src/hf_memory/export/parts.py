"""Parts that the targets share: checks, config options, and operations on the rows of heads."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.modeling.any_model import COMMON_FIELDS
from hf_memory.modeling.configuration import MemoryConfig
from hf_memory.modeling.delta_net import DeltaNetConfig

Weights = Mapping[str, Tensor]
NEVER = -30.0  # A_log and dt_bias of a memory without decay: e^-30 softplus(-30) is 1e-26


def shared_options(config: MemoryConfig) -> dict:
    """Arguments that have the same names in all targets."""
    return {name: getattr(config, name) for name in COMMON_FIELDS}


def delta_options(config: DeltaNetConfig) -> dict:
    """Sizes of the memory, as Qwen3.5 calls them."""
    query_heads, _, _, K, V = config.memory_heads
    return {
        "linear_num_key_heads": query_heads,
        "linear_num_value_heads": config.num_output_heads,
        "linear_key_head_dim": K,
        "linear_value_head_dim": V,
        "linear_conv_kernel_dim": config.linear_conv_kernel_dim or 4,
    }


def kept_layers(config: MemoryConfig) -> list[int]:
    """The numbers of the attention layers."""
    return [i for i, kind in enumerate(config.layer_types) if kind != "memory"]


def check_output_norm(config, eps: float) -> list[str]:
    """Reasons against targets whose output norm has a given epsilon."""
    ours = config.output_norm_eps or config.rms_norm_eps
    return [] if ours == eps else [f"output_norm_eps={eps:g}, got {ours:g}"]


def spread(config, mixer: Weights, *, key_heads: int) -> dict[str, Tensor]:
    """A memory's weights, with heads repeated so that there are `key_heads` query and key heads, and all value heads.

    Args:
        config: the model's config.
        mixer: the weights of one memory layer.
        key_heads: the number of query heads, or of output heads.
    """
    heads = dict(zip("qkv", config.memory_heads))
    wanted = {"q": key_heads, "k": key_heads, "v": config.num_output_heads}
    found = dict(mixer)
    for part in "qkv":
        for name in (
            f"{part}_proj.weight",
            f"{part}_proj.bias",
            f"{part}_conv1d.weight",
            f"{part}_conv1d.bias",
        ):
            if name in mixer:
                rows = mixer[name].unflatten(0, (heads[part], -1))
                found[name] = rows.repeat_interleave(
                    max(1, wanted[part] // heads[part]), 0
                ).flatten(0, 1)
        if f"{part}_conv1d.weight" not in found:
            rows = found[f"{part}_proj.weight"]
            found[f"{part}_conv1d.weight"] = F.one_hot(rows.new_full((len(rows),), 3).long(), 4).to(
                rows.dtype
            )
    return found


def joined(weights: Weights, order: str, kind: str) -> Tensor:
    """The rows of several projections one after the other, such as q, k and v for the order `"qkv"`."""
    return torch.cat([weights[f"{part}_{kind}"] for part in order])


def full_rank(mixer: Weights, name: str) -> Tensor:
    """A projection as one matrix, also if it is a product of two."""
    x = mixer[f"{name}.proj.weight"]
    down = mixer.get(f"{name}.down.weight")
    return x if down is None else (x.float() @ down.float()).to(x.dtype)


def pad_rows(x: Tensor, rows: int) -> Tensor:
    """Add rows of zeros at the end of a vector or matrix."""
    return F.pad(x, (0, 0) * (x.ndim - 1) + (0, rows - len(x)))


def decay_by_head(config, mixer: Weights) -> tuple[Tensor, Tensor, Tensor]:
    """A_log [HV], dt_bias [HV] and projection [HV, hidden_size] of a decay per head, or of no decay."""
    if config.gate == "none":
        never = torch.full((config.num_output_heads,), NEVER)
        return never, never.clone(), torch.zeros_like(mixer["b_proj.weight"])
    return mixer["decay.A_log"], mixer["decay.dt_bias"], mixer["decay.proj.weight"]


def attention_scale(config: MemoryConfig) -> float:
    """The factor by which attention multiplies scores."""
    return 1 / math.sqrt(config.query_pre_attn_scalar or config.head_dim)


def has_bias(config: MemoryConfig) -> bool:
    """Whether any projection of attention has a bias; most targets have one in all of them then."""
    return config.attention_bias or config.attention_output_bias


def our_attention(mixer: Weights, *, with_biases: bool) -> dict[str, Tensor]:
    """The weights of an attention layer like ours, also with biases of zero where we have none."""
    found = dict(mixer)
    for part in "qkvo" if with_biases else ():
        found.setdefault(f"{part}_proj.bias", torch.zeros_like(mixer[f"{part}_proj.weight"][:, 0]))
    return found


def rope_fault(config: MemoryConfig, *supported: str) -> str:
    """The reason why an engine that has these types of RoPE cannot rotate as a model does; empty if it can."""
    rope = config.rope_parameters["rope_type"]
    return "" if rope in supported else f"it has no rope of type {rope} for this architecture"


def interval(config: MemoryConfig) -> int | None:
    """n if exactly every n-th layer is attention, else None. A pure model gets one attention layer that adds zero."""
    kept = kept_layers(config)
    layers = config.num_hidden_layers
    if not kept:
        return layers + 1
    n = kept[0] + 1
    return n if kept == list(range(n - 1, layers, n)) else None
