"""The gated network, its state, and what happens at the end of a chunk, which both forms share."""

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from hf_memory.ops.neural_memory.network import NORM_EPS, orthogonal, pack, unpack

Layers = tuple[Tensor, ...]  # W_1, W_2 and W_3 [..., d_in, d_out]


class LargeChunkState(NamedTuple):
    """Where a memory stands. All zeros is a memory that has read nothing; P is the number of weights of a head."""

    weights: Tensor  # [N, HV, P]: how far the weights are from the initial ones
    momentum: Tensor  # [N, HV, P]: S of the last chunk
    open_sum: Tensor  # [N, HV, P]: what S will be, of the tokens of the chunk that were read
    phase: Tensor  # [N] int64: tokens read since the chunk began


def network(x: Tensor, weights: Layers) -> Tensor:
    """What the memory says to rows x [..., n, K]."""
    gate, up, down = weights
    return (F.silu(x @ gate) * (x @ up)) @ down


def learned(weights: Layers, total: Layers, initial: Layers, step_size: float) -> Layers:
    """The weights after a chunk whose sum S is `total`."""
    moved = (W + step_size * orthogonal(S) for W, S in zip(weights, total))
    return tuple(_length(I) * W / _length(W) for W, I in zip(moved, initial))


def _length(W: Tensor) -> Tensor:
    """Of columns, which are what enters a channel."""
    return (W.square().sum(-2, keepdim=True) + NORM_EPS**2).sqrt()


def enter(state: LargeChunkState, initial: Layers) -> tuple[Layers, Layers, Layers]:
    """Weights, momentum and open sum, each of three [N, HV, d_in, d_out]; `initial` is [HV, d_in, d_out]."""
    weights, momentum, open_sum = (unpack(x, initial) for x in state[:3])
    return tuple(I + x for I, x in zip(initial, weights)), momentum, open_sum


def leave(weights: Layers, momentum: Layers, open_sum: Layers, phase: Tensor, initial: Layers) -> LargeChunkState:
    """The inverse of `enter`."""
    moved = tuple(W - I for W, I in zip(weights, initial))
    return LargeChunkState(pack(moved), pack(momentum), pack(open_sum), phase)
