"""The definition of the large-chunk memory, one token at a time, with inner gradients by autograd."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad
from torch.nn import functional as F

from hf_memory.ops.layout import repeat_heads
from hf_memory.ops.neural_memory.network import NORM_EPS, keep, orthogonal, pack, unpack
from hf_memory.ops.precision import in_float32
from hf_memory.ops.sample import Sample

Layers = tuple[Tensor, ...]  # W_1, W_2 and W_3 [..., d_in, d_out]


class LargeChunkState(NamedTuple):
    """The state of a memory; all zeros if it has read nothing. P is the number of weights of a head."""

    weights: Tensor  # [N, HV, P]: weights minus initial weights
    momentum: Tensor  # [N, HV, P]: S of the last complete chunk
    open_sum: Tensor  # [N, HV, P]: sum for the next S over the tokens of the incomplete chunk
    phase: Tensor  # [N] int64: number of tokens read of the incomplete chunk


class LargeChunkRule(NamedTuple):
    """The options of a memory that are constant over a call."""

    chunk_size: int
    step_size: float


def network(x: Tensor, weights: Layers) -> Tensor:
    """The output of the network for rows x [..., n, K]."""
    gate, up, down = weights
    return (F.silu(x @ gate) * (x @ up)) @ down


def learned(weights: Layers, total: Layers, initial: Layers, step_size: float) -> Layers:
    """The weights after a chunk whose sum S is `total`."""
    moved = (W + step_size * orthogonal(S) for W, S in zip(weights, total))
    return tuple(_length(I) * W / _length(W) for W, I in zip(moved, initial))


def _length(W: Tensor) -> Tensor:
    """The lengths of the columns of W."""
    return (W.square().sum(-2, keepdim=True) + NORM_EPS**2).sqrt()


def enter(state: LargeChunkState, initial: Layers) -> tuple[Layers, Layers, Layers]:
    """Weights, momentum and open sum, each of three [N, HV, d_in, d_out]; `initial` is [HV, d_in, d_out]."""
    weights, momentum, open_sum = (unpack(x, initial) for x in state[:3])
    return tuple(I + x for I, x in zip(initial, weights)), momentum, open_sum


def leave(
    weights: Layers, momentum: Layers, open_sum: Layers, phase: Tensor, initial: Layers
) -> LargeChunkState:
    """The inverse of `enter`."""
    moved = tuple(W - I for W, I in zip(weights, initial))
    return LargeChunkState(pack(moved), pack(momentum), pack(open_sum), phase)


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
) -> tuple[Tensor, LargeChunkState]:
    """The recurrence in the op's docstring."""
    q = repeat_heads(q, v.shape[2])
    k = repeat_heads(k, v.shape[2])
    chunk_size, step_size = rule
    A, S, total = enter(initial_state, weights)
    none = tuple(map(torch.zeros_like, S))
    phase = initial_state.phase
    outputs = []
    for t in range(q.shape[1]):
        real = torch.ones_like(phase, dtype=torch.bool) if mask is None else mask[:, t]
        o = network(q[:, t, :, None], A)[:, :, 0]
        outputs.append(o * real[:, None, None])
        g = _gradient(A, k[:, t, :, None], v[:, t, :, None], lr[:, t, :, None, None])
        share = momentum[:, t, :, None, None] / chunk_size
        total = keep(real, tuple(x + share * s + y for x, s, y in zip(total, S, g)), total)
        phase = (phase + real) % chunk_size
        is_full = real & (phase == 0)
        A = keep(is_full, learned(A, total, weights, step_size), A)
        S = keep(is_full, total, S)
        total = keep(is_full, none, total)
    return torch.stack(outputs, dim=1), leave(A, S, total, phase, weights)


def _gradient(weights: Layers, k: Tensor, v: Tensor, lr: Tensor) -> Layers:
    """The gradient of lr <f(k), v>."""
    return grad(lambda weights: (lr * network(k, weights) * v).sum())(weights)


def example(*, chunk_size: int = 32, width: int = 6, **sizes: Any) -> dict:
    """Valid random arguments; `sizes` are arguments of `Sample`."""
    s = Sample(**{"K": 8, **sizes})
    shapes = ((s.K, width), (s.K, width), (width, s.V))
    P = sum(d_in * d_out for d_in, d_out in shapes)
    phase = torch.arange(1, s.B + 1) % chunk_size
    open_sum = s.normal(s.B, s.HV, P) * (phase > 0)[:, None, None]
    moved = 0.1 * s.normal(s.B, s.HV, P)
    momentum = s.normal(s.B, s.HV, P)
    return s.arguments(
        {"q": s(s.H, s.K), "k": s.unit(s.H, s.K), "v": s(s.HV, s.V)},
        lr=s(s.HV).exp(),
        momentum=s(s.HV).sigmoid(),
        weights=tuple(s.normal(s.HV, *shape) * shape[0] ** -0.5 for shape in shapes),
        mask=torch.ones(s.B, s.T, dtype=torch.bool),
        initial_state=LargeChunkState(moved, momentum, open_sum, phase),
        chunk_size=chunk_size,
    )
