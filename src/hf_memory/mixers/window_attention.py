"""Softmax attention over a sliding window whose past is a state of fixed size, so that it is a memory like others."""

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.cache import States
from hf_memory.layers import in_their_places, real_tokens_first
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
    always: Columns | None = None,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, States]:
    """Each token attends to what it sees of itself and the `window` - 1 tokens before it, and to some others.

    Args:
        q: [B, T, HQ, D].
        k: [B, T, H, D], HQ a multiple of H.
        v: [B, T, H, D].
        window: tokens that a token can see, itself among them.
        sees: which of them it does, and of the first ones.
        scaling: factor of the products of queries and keys.
        states: the states after the tokens before; empty means there were none.
        softcap: scores s become softcap tanh(s / softcap), or None.
        relation: what distances do, or None.
        first: tokens of the beginning of a sequence that may be seen from afar; not with `always`.
        always: tokens that stand before every sequence.
        attention_mask: [B, T], zero at padding, or None.
        cu_seqlens: boundaries [N + 1] of packed sequences, with B == 1, or None.

    Returns:
        o [B, T, HQ, D], and the states after the tokens: `keys` and `values` [B, window - 1, H, D] of the last ones,
        how many were read, `seen` [B], and of the first ones `sink_keys` and `sink_values` [B, first, H, D].
    """
    (B, T), W, order, lengths = q.shape[:2], window - 1, None, None
    if attention_mask is not None:
        lengths = attention_mask.sum(1)
        (q, order), (k, _), (v, _) = (real_tokens_first(x, attention_mask) for x in (q, k, v))
    count = states["seen"] if states else torch.zeros(B, dtype=torch.long, device=q.device)
    tokens = present(count, lengths, cu_seqlens, T)
    new = {"seen": count_on(count, lengths, T)}
    if first:
        always = first_tokens(k, v, first, states.get("seen"), states, lengths, cu_seqlens)
        always = always._replace(sees=sees & older(window))
        if cu_seqlens is None:
            new |= {"sink_keys": always.keys, "sink_values": always.values}
    k, v = after(states.get("keys"), k, W), after(states.get("values"), v, W)
    near = columns(tokens, states.get("seen"), k, v, sees & last_tokens(window))
    o = rows_of(softmax_attention(near_blocks(q, tokens, near, always), scaling, softcap, relation), q)
    new |= {"keys": last(k, lengths, W), "values": last(v, lengths, W)}
    return o if order is None else in_their_places(o, order), new


def present(count: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None, T: int) -> Tokens:
    """Which tokens the present ones are [1 or B, T]: those of a row that are not padding come first in it.

    Args:
        count: tokens that were read before [B].
        lengths: tokens that are no padding [B]; None where all are.
        cu_seqlens: boundaries [N + 1] of packed sequences, with B == 1, or None.
        T: tokens of a row.
    """
    if cu_seqlens is not None:
        return packed(cu_seqlens, T)
    place = torch.arange(T, device=count.device)
    if lengths is None:
        return Tokens(count[:, None] + place)
    return Tokens(torch.where(place < lengths[:, None], count[:, None] + place, -1))


def count_on(count: Tensor, lengths: Tensor | None, T: int) -> Tensor:
    """Tokens that were read after the present ones [B]; arguments as those of `present`."""
    return count + (T if lengths is None else lengths)


def columns(tokens: Tokens, count: Tensor | None, keys: Tensor, values: Tensor, sees: Mask) -> Columns:
    """Keys and values [B, W + T, H, D] of the present tokens and of the W before them, of which `count` [B] were read.

    Without a count there was nothing before; then these columns are left out, unless blocks need something there.
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
    """[B, T, ...] after the last W tokens before them: [B, W + T, ...]"""
    return F.pad(x, (0, 0) * (x.ndim - 2) + (W, 0)) if past is None else torch.cat([past.to(x.dtype), x], 1)


def last(x: Tensor, lengths: Tensor | None, W: int) -> Tensor:
    """The last W tokens of [B, W + T, ...], T of which `lengths` [B] are real, or all."""
    if lengths is None:
        T = x.shape[1] - W
        return x[:, T:] if T == 1 else x[:, T:].clone()  # a view keeps all of x alive
    return take(x, lengths[:, None] + torch.arange(W, device=x.device))


def take(x: Tensor, places: Tensor) -> Tensor:
    """x [B, S, ...] at places [B, n] -> [B, n, ...]"""
    return x.gather(1, places.view(*places.shape, *(1 for _ in x.shape[2:])).expand(-1, -1, *x.shape[2:]))


def first_tokens(
    k: Tensor, v: Tensor, S: int, count: Tensor | None, states: dict, lengths: Tensor | None, cu_seqlens: Tensor | None
) -> Columns:
    """The first S tokens of each sequence, read before, which `states` have, or among the present ones [B, T, H, D].

    The other arguments are those of `present`; without a count nothing was read.
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
