"""The gated network, its state, and the update at the end of a chunk, for both implementations."""

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from hf_memory.ops.neural_memory.network import NORM_EPS, orthogonal, pack, unpack

Layers = tuple[Tensor, ...]  # W_1, W_2 and W_3 [..., d_in, d_out]


class LargeChunkState(NamedTuple):
    """The state of a memory; all zeros if it has read nothing. P is the number of weights of a head."""

    weights: Tensor  # [N, HV, P]: weights minus initial weights
    momentum: Tensor  # [N, HV, P]: S of the last complete chunk
    open_sum: Tensor  # [N, HV, P]: sum for the next S over the tokens of the incomplete chunk
    phase: Tensor  # [N] int64: number of tokens read of the incomplete chunk


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


def leave(weights: Layers, momentum: Layers, open_sum: Layers, phase: Tensor, initial: Layers) -> LargeChunkState:
    """The inverse of `enter`."""
    moved = tuple(W - I for W, I in zip(weights, initial))
    return LargeChunkState(pack(moved), pack(momentum), pack(open_sum), phase)
