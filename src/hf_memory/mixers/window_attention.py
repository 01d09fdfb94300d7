"""Softmax attention over a sliding window, with a past of fixed size, so that caches treat it like a memory."""

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.cache import States
from hf_memory.mixers.attention_blocks import BLOCK, Columns, Relation, near_blocks, rows_of, softmax_attention
from hf_memory.ops.contract import varies
from hf_memory.ops.masks import Mask, Tokens, older, packed
from hf_memory.ops.masks import window as last_tokens


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    sees: Mask,
    scaling: float,
    states: States,
    softcap: float | None = None,
    relation: Relation | None = None,
    first: int = 0,
    reach: int | None = None,
    always: Columns | None = None,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, States]:
    """Each token attends to itself, to the `window` - 1 tokens before it, and maybe to first or persistent tokens.

    Args:
        q: [B, T, HQ, D].
        k: [B, T, H, D], HQ a multiple of H.
        v: [B, T, H, D].
        window: number of tokens that a token can see, including itself.
        sees: the mask of the tokens that it sees among these and among the first tokens.
        scaling: factor of the products of queries and keys.
        states: the states after the previous tokens; empty if there are none.
        softcap: soft cap c of the scores s, which become c tanh(s / c), or None.
        relation: relative positions, which change the scores, or None.
        first: number of first tokens of a sequence that stay visible; not together with `always`.
        reach: number of tokens of the window that any of these queries sees; default: all.
        always: keys and values of persistent tokens, which precede every sequence, or None.
        lengths: [B], numbers of tokens of the rows, which have padding at their ends; None: no padding.
        cu_seqlens: boundaries [N + 1] of packed sequences, with B == 1, or None.

    Returns:
        o [B, T, HQ, D], and the states after the tokens: `keys` and `values` [B, window - 1, H, D] of the last tokens,
        `seen` [B], the number of tokens read, and `sink_keys` and `sink_values` [B, first, H, D] of the first tokens.
    """
    (B, T), W = q.shape[:2], window - 1
    count = states["seen"] if states else torch.zeros(B, dtype=torch.long, device=q.device)
    tokens = present(count, lengths, cu_seqlens, T)
    new = {"seen": count_on(count, lengths, T)}
    if first:
        always = first_tokens(k, v, first, states.get("seen"), states, lengths, cu_seqlens)
        always = always._replace(sees=sees & older(window))
        if cu_seqlens is None:
            new |= {"sink_keys": always.keys, "sink_values": always.values}
    k, v = after(states.get("keys"), k, W), after(states.get("values"), v, W)
    reach = window if reach is None else min(reach, window)
    seen_k, seen_v = k[:, window - reach :], v[:, window - reach :]
    near = columns(tokens, states.get("seen"), seen_k, seen_v, sees & last_tokens(reach))
    groups = near_blocks(q, tokens, near, always)
    o = rows_of((softmax_attention(blocks, scaling, softcap, relation) for blocks in groups), q)
    new |= {"keys": last(k, lengths, W), "values": last(v, lengths, W)}
    return o, new


def present(count: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None, T: int) -> Tokens:
    """The positions [1 or B, T] of the new tokens in their sequences. Padding is at the end of each row.

    Args:
        count: [B], number of tokens that were read before.
        lengths: [B], number of tokens that are not padding; None if there is no padding.
        cu_seqlens: boundaries [N + 1] of packed sequences, with B == 1, or None.
        T: number of tokens of a row.
    """
    if cu_seqlens is not None:
        return packed(cu_seqlens, T)
    place = torch.arange(T, device=count.device)
    if lengths is None:
        return Tokens(count[:, None] + place)
    return Tokens(torch.where(place < lengths[:, None], count[:, None] + place, -1))


def count_on(count: Tensor, lengths: Tensor | None, T: int) -> Tensor:
    """[B], the number of tokens read including the new ones; the arguments are those of `present`."""
    return count + (T if lengths is None else lengths)


def columns(tokens: Tokens, count: Tensor | None, keys: Tensor, values: Tensor, sees: Mask) -> Columns:
    """Keys and values [B, W + T, H, D] of the new tokens and of the W tokens before them, of which `count` [B] exist.

    If `count` is None, nothing was read before, and these W columns are left out, unless blocks need them.
    """
    T = tokens.position.shape[1]
    W = keys.shape[1] - T
    if count is not None:
        before = count[:, None] - torch.arange(W, 0, -1, device=keys.device)
        return Columns(Tokens(torch.cat([before, tokens.position], 1)), keys, values, sees)
    if not varies(T) and max(W + 1, BLOCK) < T:
        return Columns(tokens.map(lambda x: F.pad(x, (W, 0), value=-1)), keys, values, sees)
    return Columns(tokens, keys[:, W:], values[:, W:], sees)


def after(past: Tensor | None, x: Tensor, W: int) -> Tensor:
    """x [B, T, ...] with the W tokens of the past in front: [B, W + T, ...]"""
    return F.pad(x, (0, 0) * (x.ndim - 2) + (W, 0)) if past is None else torch.cat([past.to(x.dtype), x], 1)


def last(x: Tensor, lengths: Tensor | None, W: int) -> Tensor:
    """The last W real tokens of x [B, W + T, ...]; `lengths` [B] of the T new tokens are real, or all if it is None."""
    if lengths is None:
        return x[:, x.shape[1] - W :]
    return take(x, lengths[:, None] + torch.arange(W, device=x.device))


def take(x: Tensor, places: Tensor) -> Tensor:
    """Select x [B, S, ...] at places [B, n]: [B, n, ...]"""
    return x.gather(1, places.view(*places.shape, *(1 for _ in x.shape[2:])).expand(-1, -1, *x.shape[2:]))


def first_tokens(
    k: Tensor, v: Tensor, S: int, count: Tensor | None, states: dict, lengths: Tensor | None, cu_seqlens: Tensor | None
) -> Columns:
    """The first S tokens of each sequence, from `states` if they were read before, or from the new ones [B, T, H, D].

    The other arguments are those of `present`; if `count` is None, nothing was read before.
    """
    place, T = torch.arange(S, device=k.device), k.shape[1]
    if cu_seqlens is not None:
        starts, size = cu_seqlens[:-1, None].long(), cu_seqlens.diff()[:, None]
        index = (starts + place).clamp(max=T - 1).flatten()[None]
        sequence = torch.arange(1, len(size) + 1, device=k.device).repeat_interleave(S)[None]
        return Columns(
            Tokens(torch.where(place < size, place, -1).flatten()[None], sequence), take(k, index), take(v, index)
        )
    before = place.new_zeros(len(k)) if count is None else count
    is_read = place < count_on(before, lengths, T)[:, None]
    before = before[:, None]
    if T == 1:
        keys, values = (x.repeat(1, S, 1, 1) for x in (k, v))
    else:
        index = (place - before).clamp(min=0, max=T - 1)
        keys, values = take(k, index), take(v, index)
    if count is not None:
        is_old = (place < before)[..., None, None]
        old = (states[name] for name in ("sink_keys", "sink_values"))
        keys, values = (torch.where(is_old, x.to(y.dtype), y) for x, y in zip(old, (keys, values)))
    return Columns(Tokens(torch.where(is_read, place, -1)), keys, values)
