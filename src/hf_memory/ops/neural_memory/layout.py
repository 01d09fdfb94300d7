"""Arranges tokens so that the chunks of all rows are aligned, whatever phase each row starts with."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.ops.exported import varies


class Layout(NamedTuple):
    """An arrangement of the tokens of each row in which chunks of all rows begin at multiples of C."""

    C: int
    # [B, NC * C]: the token at each place, T if there is none; None: tokens keep their places
    source: Tensor | None
    place: Tensor | None  # [B, T]: the inverse
    closed: list  # for NC + 1 chunks: whether a chunk of the memory begins there, a bool or [B]
    phase: Tensor  # [B], the phase after the last token


def pieces_of(q: Tensor, mask: Tensor | None, fresh: bool) -> tuple[bool, Tensor | None]:
    """Whether chunks are aligned with the pieces of a call that `per_sequence` makes, and the mask of the pieces.

    In a graph for any number of tokens there are several, as long as chunks, of which the mask [B, T] tells tokens from
    what the last one is filled with. `fresh`: whether the memory has read nothing.
    """
    if not varies(q.shape[1]):
        return fresh, mask
    if mask is None:
        return fresh, q.new_ones(q.shape[:2], dtype=torch.bool)
    return False, mask


def layout_of(phase: Tensor, mask: Tensor | None, T: int, b: int, aligned: bool) -> Layout:
    """The layout. Tokens keep their places if no chunk of the memory ends before the last one, or all end together.

    `aligned`: whether a chunk of each row begins with the first token.
    """
    after = phase + (T if mask is None else mask.sum(1))
    if aligned and mask is None:
        return Layout(min(b, T), None, None, [True] * -(-T // b) + [bool(T % b == 0)], after % b)
    if aligned and b >= T:
        return Layout(T, None, None, [True, after == b], after % b)
    # a graph cannot depend on the longest row
    many = T + b - 1 if torch.compiler.is_compiling() else 0
    places = 1 if T == 1 else many or int(after.max())
    if places <= b:
        return Layout(T, None, None, [phase == 0, after == b], after % b)
    NC = -(-places // b)
    tokens = torch.arange(T, device=phase.device).expand(phase.shape[0], T)
    place = phase[:, None] + (tokens if mask is None else mask.cumsum(1) - 1)
    source = torch.full((phase.shape[0], NC * b + 1), T, device=phase.device)
    source = source.scatter(1, place if mask is None else place.where(mask, NC * b), tokens)[:, :-1]
    return Layout(
        b,
        source,
        place.clamp(min=0),
        [phase == 0, *(after >= n * b for n in range(1, NC + 1))],
        after % b,
    )


def real_places(mask: Tensor | None, layout: Layout, B: int, T: int, like: Tensor) -> Tensor | None:
    """[NC, B, C], 1 at places with a token and 0 at others; None if all have a token."""
    if mask is None and layout.source is None and T % layout.C == 0:
        return None
    ones = like.new_ones(B, T) if mask is None else mask.to(like)
    return arrange(ones[:, :, None], layout)


def arrange(x: Tensor, layout: Layout) -> Tensor:
    """[B, T, H, ...] -> [NC, B * H, C, ...] in the layout's order, zeros where there is no token."""
    if layout.source is not None:
        x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, 1))
        index = layout.source.view(*layout.source.shape, *(1 for _ in x.shape[2:]))
        x = x.gather(1, index.expand(-1, -1, *x.shape[2:]))
    if rest := -x.shape[1] % layout.C:
        x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, rest))
    return x.unflatten(1, (-1, layout.C)).movedim((1, 3), (0, 2)).flatten(1, 2).contiguous()


def restore(o: Tensor, T: int, mask: Tensor | None, layout: Layout) -> Tensor:
    """[NC, B, H, C, V] -> [B, T, H, V] in the order of the tokens, zeros where the mask is False."""
    o = o.permute(1, 0, 3, 2, 4).flatten(1, 2)
    if layout.place is not None:
        o = o.gather(1, layout.place[:, :, None, None].expand(-1, -1, *o.shape[2:]))
    o = o[:, :T]
    return o if mask is None else o * mask[:, :, None, None]
