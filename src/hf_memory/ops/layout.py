"""Rows, heads and packed sequences of tensors [B, T, H, ...]."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from hf_memory.ops.exported import in_pieces, varies
from hf_memory.ops.inputs import check_tensor

PIECE = 64  # tokens of a piece in graphs for any number of tokens: a chunk of most ops


def repeat_heads(x: Tensor, HV: int) -> Tensor:
    """[B, T, H, ...] -> [B, T, HV, ...]: repeat key heads for their value heads; HQ query heads are not changed."""
    return x if x.shape[2] >= HV else x.repeat_interleave(HV // x.shape[2], dim=2)


def without_padding(mask: Tensor | None, q: Tensor, *others: Tensor | None) -> list:
    """The inputs [B, T, ...] of an op, with zeros where the mask [B, T] is False."""
    if mask is None:
        return [q, *others]
    check_tensor("mask", mask, tuple(q.shape[:2]), like=q)
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must have dtype torch.bool, got {mask.dtype}")
    return [x if x is None else blank(x, mask) for x in (q, *others)]


def blank(x: Tensor, mask: Tensor) -> Tensor:
    """x with zeros at masked tokens [B, T], even where x is NaN, so that they affect neither results nor gradients."""
    return x.masked_fill(~expand_dims_like(mask, x), 0)


def expand_dims_like(x: Tensor, other: Tensor) -> Tensor:
    """x [B, T] as [B, T, 1, ...]: with dimensions of size one after its own, so that it has as many as `other`."""
    return x.view(*x.shape, *(1 for _ in other.shape[x.ndim :]))


def true_first(mask: Tensor) -> Tensor:
    """The places [B, T] of the true entries of a mask [B, T], in their order, and then of the others."""
    place = torch.arange(mask.shape[1], device=mask.device)
    count = mask.cumsum(1)
    rank = torch.where(mask, count - 1, count[:, -1:] + place - count)
    return torch.zeros_like(rank).scatter(1, rank, place.expand_as(rank))


def per_sequence(
    op: Callable,
    cu_seqlens: Tensor | None,
    q: Tensor,
    *others: Tensor | None,
    initial_state,
    piece: int | None = None,
    **kwargs,
):
    """Run `op(q, *others, initial_state=..., **kwargs)` once for each packed sequence and join the results.

    Args:
        op: takes tensors [B, T, ...] and a state [N, ...]; returns (o [B, T, ...], state [N, ...]).
        cu_seqlens: boundaries [N + 1], or None if each row is a sequence.
        q: [1, T, ...].
        *others: [1, T, ...] each, or None; k and v come first.
        initial_state: tensor or NamedTuple of tensors [N, ...].
        piece: number of tokens that are read at once in a graph for any number of tokens, by an op to which zeros are
            no tokens; None: all.
        **kwargs: passed on.
    """
    if piece is not None and cu_seqlens is None and varies(q.shape[1]):

        def of_piece(state, rows):
            o, state = op(*rows, initial_state=state, **kwargs)
            return [o], state

        whole, state = in_pieces(of_piece, piece, initial_state, (q, *others))
        return whole[0], state
    if cu_seqlens is None:
        return op(q, *others, initial_state=initial_state, **kwargs)
    bounds = cu_seqlens.tolist()
    T = q.shape[1]
    if bounds[0] != 0 or bounds[-1] != T or any(b < a for a, b in zip(bounds, bounds[1:])):
        raise ValueError(f"cu_seqlens must increase from 0 to T={T}, got {bounds}")
    outputs = []
    states = []
    for n, (start, end) in enumerate(zip(bounds, bounds[1:])):
        state = tree_map(lambda s: s[n : n + 1], initial_state)  # noqa: B023
        if end > start:
            o, state = op(
                *(x if x is None else x[:, start:end] for x in (q, *others)),
                initial_state=state,
                **kwargs,
            )
            outputs.append(o)
        states.append(tree_flatten(state))
    _, structure = states[0]
    joined = [torch.cat(parts) for parts in zip(*(leaves for leaves, _ in states))]
    o = torch.cat(outputs, dim=1) if outputs else others[1]
    return o, tree_unflatten(joined, structure)
