"""The large-chunk memory in PyTorch: all tokens of a chunk at once, with explicit gradients."""

from typing import Any

import torch
from torch import Tensor

from hf_memory.ops.layout import repeat_heads
from hf_memory.ops.neural_memory.layout import arrange, layout_of, restore
from hf_memory.ops.neural_memory.network import ACTIVATIONS, keep
from hf_memory.ops.precision import in_float32
from hf_memory.ops.variants.large_chunk_memory.reference import (
    LargeChunkRule,
    LargeChunkState,
    Layers,
    enter,
    learned,
    leave,
    network,
)


@in_float32
def large_chunk_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lr: Tensor,
    momentum: Tensor,
    mask: Tensor | None,
    *,
    initial_state: LargeChunkState,
    weights: Layers,
    rule: LargeChunkRule,
    aligned: bool = False,
) -> tuple[Tensor, LargeChunkState]:
    """Same function as the reference; `aligned`: see `layout_of`."""
    B, T, HV = v.shape[:3]
    chunk_size, step_size = rule
    layout = layout_of(initial_state.phase, mask, T, chunk_size, aligned)
    arranged: Any = (
        arrange(x, layout) for x in (repeat_heads(q, HV), repeat_heads(k, HV), v, lr, momentum)
    )
    *rows, momentum = (x.unflatten(1, (B, HV)) for x in arranged)  # [NC, B, HV, C, ...]
    shares = momentum.sum(-1)[..., None, None] / chunk_size
    A, S, total = enter(initial_state, weights)
    none = tuple(map(torch.zeros_like, S))
    outputs = []
    for q, k, v, lr, share, is_full in zip(*rows, shares, layout.closed[1:]):
        outputs.append(network(q, A))
        total = tuple(
            x + share * s + g for x, s, g in zip(total, S, _gradient(A, k, lr[..., None] * v))
        )
        if is_full is True:
            A = learned(A, total, weights, step_size)
            S = total
            total = none
        elif is_full is not False and (torch.compiler.is_compiling() or is_full.any()):
            A = keep(is_full, learned(A, total, weights, step_size), A)
            S = keep(is_full, total, S)
            total = keep(is_full, none, total)
    return restore(torch.stack(outputs), T, mask, layout), leave(A, S, total, layout.phase, weights)


def _gradient(weights: Layers, k: Tensor, v: Tensor) -> Layers:
    """The gradient of sum <f(k), v>, for k [..., C, K] and v [..., C, V]."""
    gate, up, down = weights
    g = k @ gate
    u = k @ up
    s = ACTIVATIONS["silu"].value(g)
    d = v @ down.mT
    return k.mT @ ACTIVATIONS["silu"].backward(d * u, g), k.mT @ (d * s), (s * u).mT @ v
