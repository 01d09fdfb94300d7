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
