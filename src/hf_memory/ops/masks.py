"""Who sees whom in attention: a few functions, joined by & and |. A pattern is one of them, or one line here."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Tokens(NamedTuple):
    """Columns of attention: which token of its sequence each is. Padding is no token, and is not counted."""

    position: Tensor  # [1 or B, T], from 0; negative where there is no token
    sequence: Tensor | None = None  # [1 or B, T], where several are packed: equal within one

    def map(self, change: Callable[[Tensor], Tensor]) -> "Tokens":
        """The same change of positions and sequences."""
        return Tokens(change(self.position), None if self.sequence is None else change(self.sequence))

    def of(self, columns: slice) -> "Tokens":
        """Some of the columns."""
        return self.map(lambda x: x[:, columns])


class Mask:
    """A function of the positions of query and key, elementwise and without branches."""

    def __init__(self, sees: Callable[[Tensor, Tensor], Tensor]):
        self.sees = sees

    def __and__(self, other: "Mask") -> "Mask":
        return Mask(lambda q, k: self.sees(q, k) & other.sees(q, k))

    def __or__(self, other: "Mask") -> "Mask":
        return Mask(lambda q, k: self.sees(q, k) | other.sees(q, k))

    def __invert__(self) -> "Mask":
        return Mask(lambda q, k: ~self.sees(q, k))


everything = Mask(lambda q, k: (q >= 0) & (k >= 0))
causal = Mask(lambda q, k: k <= q)
earlier = Mask(lambda q, k: k < q)


def window(tokens: int) -> Mask:
    """The last `tokens` tokens, the present one among them."""
    return Mask(lambda q, k: q - k < tokens)


def older(tokens: int) -> Mask:
    """What `window` does not see."""
    return Mask(lambda q, k: q - k >= tokens)


def sinks(tokens: int) -> Mask:
    """The first `tokens` tokens of a sequence."""
    return Mask(lambda q, k: k < tokens)


def own_block(size: int) -> Mask:
    """Tokens of the same block of `size`."""
    return Mask(lambda q, k: q // size == k // size)


def block_local(size: int) -> Mask:
    """The block of a token and the one before it. https://arxiv.org/abs/1802.05751."""
    return Mask(lambda q, k: q // size - k // size <= 1)


def segments(length: int, before: int) -> Mask:
    """Its own segment of `length` tokens, and so many before that."""
    return Mask(lambda q, k: k >= q // length * length - before)


def slots_before(length: int, before: int, reach: int) -> Mask:
    """Slots whose last token is one of the `reach` that are before what `segments` sees."""
    return Mask(lambda q, k: (k < q // length * length - before) & (k >= q // length * length - before - reach))


def strided(stride: int) -> Mask:
    """The last `stride` tokens, and each that is a multiple of it back. https://arxiv.org/abs/1904.10509."""
    return Mask(lambda q, k: (q - k <= stride) | ((q - k) % stride == 0))


def fixed(stride: int, summary: int) -> Mask:
    """Its own block, and the last `summary` tokens of every other. https://arxiv.org/abs/1904.10509."""
    return Mask(lambda q, k: (q // stride == k // stride) | (k % stride >= stride - summary))


def dilated(tokens: int, step: int) -> Mask:
    """So many tokens, each `step` before the other."""
    return Mask(lambda q, k: ((q - k) % step == 0) & (q - k < tokens * step))


def bigbird(size: int, blocks: int, seed: int) -> Mask:
    """Its own block and the one before, the first, and random ones between. https://arxiv.org/abs/2007.14062."""

    def sees(q: Tensor, k: Tensor) -> Tensor:
        ask, asked = q // size, k // size
        result = (ask - asked <= 1) | (asked == 0)
        for i in range(blocks):
            result = result | (asked == random_block(ask, i, seed))
        return result

    return Mask(sees)


def random_block(block: Tensor, i: int, seed: int) -> Tensor:
    """The i-th of the random blocks that a block sees, from 1 to two before it; -1 where there are none.

    A hash, so that neither a table nor a length is needed, and a cache finds the same.
    """
    x = block.long() * 0x9E3779B1 + (seed * 1000003 + i + 1) * 0x85EBCA6B
    for factor in (0x2C1B3C6D, 0x297A2D39):
        x = x & 0xFFFFFFFF
        x = ((x ^ (x >> 15)) * factor) & 0xFFFFFFFF
    x = x ^ (x >> 16)
    return torch.where(block > 2, 1 + x % (block - 2).clamp(min=1), -1)


def blockwise(size: int, shifts: Tensor) -> Mask:
    """One block: `shifts` [HQ, 1, 1] before its own, or the first. https://arxiv.org/abs/1911.02972."""
    return Mask(lambda q, k: k // size == (q // size - shifts.to(q.device)).clamp(min=0))


def count(mask: Tensor) -> Tensor:
    """Positions [B, T] of the tokens that a mask [B, T] keeps; -1 where it is zero."""
    mask = mask.long()
    return mask.cumsum(1) * mask - 1


def all_tokens(length: int, like: Tensor) -> Tokens:
    """One sequence without padding."""
    return Tokens(torch.arange(length, device=like.device)[None])


def packed(cu_seqlens: Tensor, length: int) -> Tokens:
    """Tokens of packed sequences, of the boundaries [N + 1]."""
    place = torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    sequence = torch.searchsorted(cu_seqlens, place, right=True)
    return Tokens((place - cu_seqlens[sequence - 1])[None], sequence[None])


def seen(mask: Mask, queries: Tokens, keys: Tokens) -> Tensor:
    """Which keys each query sees, [B, 1, T, S] bool: in its sequence; padding neither sees nor is seen."""
    q, k = queries.position[:, None, :, None], keys.position[:, None, None, :]
    result = mask.sees(q, k) & (k >= 0) & (q >= 0)
    if keys.sequence is not None and queries.sequence is not None:
        result = result & (queries.sequence[:, None, :, None] == keys.sequence[:, None, None, :])
    return result
