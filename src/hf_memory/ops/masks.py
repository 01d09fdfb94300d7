"""Masks of attention: functions that say which tokens a token sees, and that can be combined with & and |."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Tokens(NamedTuple):
    """Positions of tokens in their sequences, for queries or keys of attention. Padding has no position."""

    position: Tensor  # [1 or B, T], from 0; negative for padding
    sequence: Tensor | None = None  # [1 or B, T], number of the sequence if several are packed

    def map(self, change: Callable[[Tensor], Tensor]) -> "Tokens":
        """The same function applied to positions and numbers of sequences, such as one that chooses some columns."""
        return Tokens(
            change(self.position), None if self.sequence is None else change(self.sequence)
        )

    def of(self, columns: slice) -> "Tokens":
        """The tokens at these columns of T."""
        return self.map(lambda x: x[:, columns])


class Mask:
    """Whether a query sees a key: an elementwise function of their positions, without branches."""

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
    """The last `tokens` tokens, including the token itself."""
    return Mask(lambda q, k: q - k < tokens)


def older(tokens: int) -> Mask:
    """All tokens that `window` does not see."""
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
    """The token's segment of `length` tokens, and `before` tokens before this segment."""
    return Mask(lambda q, k: k >= q // length * length - before)


def slots_before(length: int, before: int, reach: int) -> Mask:
    """Slots whose last token is one of the `reach` tokens before those that `segments` sees."""
    return Mask(
        lambda q, k: (
            (k < q // length * length - before) & (k >= q // length * length - before - reach)
        )
    )


def multiples(stride: int) -> Mask:
    """Tokens at a distance that is a multiple of the stride, including the token itself."""
    return Mask(lambda q, k: (q - k) % stride == 0)


def block_ends(size: int, tokens: int) -> Mask:
    """The last `tokens` tokens of all blocks of `size`, and the token itself."""
    return Mask(lambda q, k: (k % size >= size - tokens) | (q == k))


def by_head(*masks: Mask) -> Mask:
    """One mask for each of the first heads; further heads begin again with the first mask (see `Blocks`)."""
    return Mask(lambda q, k: torch.cat([mask.sees(q, k) for mask in masks], 1))


def dilated(tokens: int, step: int) -> Mask:
    """The last `tokens` tokens at distances that are multiples of `step`."""
    return Mask(lambda q, k: ((q - k) % step == 0) & (q - k < tokens * step))


def bigbird(size: int, blocks: int, seed: int) -> Mask:
    """The token's block, the one before, the first, and random ones between these. https://arxiv.org/abs/2007.14062."""

    def sees(q: Tensor, k: Tensor) -> Tensor:
        q_block = q // size
        k_block = k // size
        is_seen = (q_block - k_block <= 1) | (k_block == 0)
        for i in range(blocks):
            is_seen = is_seen | (k_block == random_block(q_block, i, seed))
        return is_seen

    return Mask(sees)


def random_block(block: Tensor, i: int, seed: int) -> Tensor:
    """The i-th random block that a block sees, between the first block and the one before it; -1 if there is none.

    Computed by a hash, so that it needs no table and is the same with and without a cache.
    """
    x = block.long() * 0x9E3779B1 + (seed * 1000003 + i + 1) * 0x85EBCA6B
    for factor in (0x2C1B3C6D, 0x297A2D39):
        x = x & 0xFFFFFFFF
        x = ((x ^ (x >> 15)) * factor) & 0xFFFFFFFF
    x = x ^ (x >> 16)
    return torch.where(block > 2, 1 + x % (block - 2).clamp(min=1), -1)


def block_before(size: int, shift: int) -> Mask:
    """One block, `shift` blocks before the token's, or the first. https://arxiv.org/abs/1911.02972."""
    return Mask(lambda q, k: k // size == (q // size - shift).clamp(min=0))


def count(mask: Tensor) -> Tensor:
    """Positions [B, T] of tokens, counted where a mask [B, T] is not zero; -1 where it is zero."""
    mask = mask.long()
    return mask.cumsum(1) * mask - 1


def all_tokens(length: int, like: Tensor) -> Tokens:
    """The positions of one sequence without padding."""
    return Tokens(torch.arange(length, device=like.device)[None])


def packed(cu_seqlens: Tensor, length: int) -> Tokens:
    """The positions of packed sequences with boundaries [N + 1]."""
    place = torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    sequence = torch.searchsorted(cu_seqlens, place, right=True)
    return Tokens((place - cu_seqlens[sequence - 1])[None], sequence[None])


def seen(mask: Mask, queries: Tokens, keys: Tokens) -> Tensor:
    """Which keys each query sees, [B, 1, T, S] bool, within its sequence; padding neither sees nor is seen."""
    q = queries.position.int()[:, None, :, None]
    k = keys.position.int()[:, None, None, :]
    is_seen = mask.sees(q, k) & (k >= 0) & (q >= 0)
    if keys.sequence is not None and queries.sequence is not None:
        is_seen = is_seen & (queries.sequence[:, None, :, None] == keys.sequence[:, None, None, :])
    return is_seen
