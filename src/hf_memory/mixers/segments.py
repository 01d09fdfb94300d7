"""A memory of each segment of the past, side by side (memory caching). https://arxiv.org/abs/2602.24281."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_memory.layers import wide
from hf_memory.mixers.base import Context, States
from hf_memory.mixers.pasts import take
from hf_memory.ops.contract import beside, repeat_heads


class Grid(NamedTuple):
    """The places of new tokens in a grid of segments, which begins with the segment that the first of them is in."""

    position: Tensor  # [B, T], in the text; any value at padding
    place: Tensor  # [B, T], in the grid; `size` at padding
    first: Tensor  # [B, 1], the segment that the grid begins with
    tokens_read: Tensor  # [B], read including the new ones
    rows: int
    columns: int

    @classmethod
    def of(cls, x: Tensor, context: Context, length: int) -> "Grid":
        """The grid of tokens x [B, T, ...] for segments of a length; that of a single token has a single place."""
        (B, T), mask = x.shape[:2], context.attention_mask
        before, after = context.counts(x)
        count = torch.ones(B, T, dtype=torch.long, device=x.device) if mask is None else mask.long()
        position, first = before + count.cumsum(1) - 1, before // length
        columns = 1 if T == 1 else length
        rows = -(-(T + (length - 1 if context.states and T > 1 else 0)) // columns)
        place = torch.zeros_like(position) if T == 1 else position - first * length
        place = place if mask is None else torch.where(mask, place, rows * columns)
        return cls(position, place, first, after.flatten(), rows, columns)

    def spread(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [B * rows, columns, ...], zero where there is no token."""
        grid, places = x.new_zeros(len(x), self.rows * self.columns + 1, *x.shape[2:]), beside(self.place, x)
        return grid.scatter(1, places.expand_as(x), x)[:, :-1].unflatten(1, (self.rows, self.columns)).flatten(0, 1)

    def collect(self, x: Tensor) -> Tensor:
        """The inverse of `spread`."""
        return take(x.unflatten(0, (-1, self.rows)).flatten(1, 2), self.place.clamp(max=self.rows * self.columns - 1))

    def begin(self, states: Tensor) -> Tensor:
        """What is known of the segments of the grid, [B * rows, ...], from states of all segments [B, S, ...]."""
        own = take(states, self.first)
        return torch.cat([own, torch.zeros_like(own).repeat_interleave(self.rows - 1, 1)], 1).flatten(0, 1)

    def end(self, states: Tensor, new: Tensor) -> Tensor:
        """States of all segments [B, S, ...] with the new ones of the grid [B * rows, ...]."""
        S, new = states.shape[1], new.unflatten(0, (-1, self.rows))
        places = self.first + torch.arange(self.rows, device=new.device)
        room = torch.cat([states, torch.zeros_like(new)], 1)
        return room.scatter(1, beside(places, new).expand_as(new), new.to(room.dtype))[:, :S]


def read_segments(
    op: Callable, u: Tensor, tokens: Sequence[Any], context: Context, length: int, **options
) -> tuple[Tensor, States]:
    """o_t = sum_i w_ti S_i^T q_t over the segments i up to that of t, with w_t = softmax_i(u_t . mean of keys in i).

    Each segment has a memory of its own, which begins empty; those of t itself are the ones after token t.

    Args:
        op: an op whose state is a matrix for each head.
        u: what the segments are asked with [B, T, HV, K].
        tokens: q, k, v and other arguments of the op, [B, T, ...] each, or None.
        context: the padding, and the states `memory` [B, S, HV, K, V], `key_sums` [B, S, HV, K] and `tokens_read` [B].
        length: number of tokens of a segment.
        **options: further arguments of the op.

    Returns:
        o [B, T, HV, V], and the states after the tokens.
    """
    q, k, v, *gates = tokens
    q, k = repeat_heads(q, v.shape[2]), repeat_heads(k, v.shape[2])
    (B, T, HV, K), V, grid = q.shape, v.shape[-1], Grid.of(q, context, length)
    shape, states = (B, -(-T // length), HV, K), context.states
    memory = states["memory"] if states else wide(q).new_zeros(*shape, V)
    sums = states["key_sums"] if states else wide(q).new_zeros(shape)
    spread: list[Any] = [None if x is None else grid.spread(x) for x in (q, k, v, *gates)]
    filled = grid.spread(torch.ones(B, T, dtype=torch.bool, device=q.device))
    options |= {"initial_state": grid.begin(memory), "mask": filled, "output_final_state": True}
    own, after = op(*spread, **options)
    keys = grid.begin(sums)[:, None] + wide(spread[1]).cumsum(1)
    memory, sums = grid.end(memory, after), grid.end(sums, keys[:, -1])
    alike, beside = _weights(wide(u), grid.collect(keys), sums, grid.position, length)
    scale = K**-0.5 if options.get("scale") is None else options["scale"]
    queries = (scale * beside[..., None] * wide(q)[:, :, :, None]).flatten(-2)  # [B, T, HV, S * K]
    others = torch.einsum("bthx,bhxv->bthv", queries, memory.transpose(1, 2).flatten(2, 3))
    states = {"memory": memory, "key_sums": sums, "tokens_read": grid.tokens_read}
    return (alike[..., None] * grid.collect(own) + others).to(v.dtype), states


def _weights(u: Tensor, keys: Tensor, sums: Tensor, position: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The weights of a token's own segment [B, T, HV], and of complete ones before it [B, T, HV, S]."""
    own = (u * keys).sum(-1) / (position % length + 1)[..., None]
    others = torch.einsum("bthk,bshk->bths", u, sums / length)
    is_before = torch.arange(sums.shape[1], device=u.device) < (position // length)[..., None, None]
    weights = torch.cat([others.masked_fill(~is_before, -torch.inf), own[..., None]], -1).softmax(-1)
    return weights[..., -1], weights[..., :-1]
