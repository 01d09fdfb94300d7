"""Softmax attention over a sliding window whose past is a state of fixed size, so that it is a memory like others."""

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.cache import States
from hf_memory.layers import real_tokens_first
from hf_memory.mixers.attention_blocks import blocks_of
from hf_memory.ops import masks
from hf_memory.ops.masks import Tokens


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    scaling: float,
    states: States,
    always: tuple[Tensor, Tensor] | None = None,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, States]:
    """Each token attends to itself and the `window` - 1 tokens before it, and to what is always visible.

    Args:
        q: [B, T, HQ, D].
        k: [B, T, H, D], HQ a multiple of H.
        v: [B, T, H, D].
        window: tokens that a token sees, itself among them.
        scaling: of the products.
        states: of the tokens before; empty means there were none.
        always: keys and values [P, H, D] that every token sees.
        attention_mask: [B, T], zero at padding, or None.
        cu_seqlens: boundaries [N + 1] of packed sequences, with B == 1, or None.

    Returns:
        o [B, T, HQ, D], and the states after the tokens: `keys` and `values` [B, window - 1, H, D] of the last ones,
        and how many of these there are, `seen` [B].
    """
    B, T = q.shape[:2]
    lengths = torch.full((B,), T, device=q.device)
    order = None
    if attention_mask is not None:
        lengths, order = attention_mask.sum(1), attention_mask
        (q, order), (k, _), (v, _) = (_compacted(x, attention_mask) for x in (q, k, v))
    past = window - 1 if states or window < T else 0
    before = states["seen"] if states else torch.zeros_like(lengths)
    k, v = _after_past(k, "keys", states, past), _after_past(v, "values", states, past)
    o = _attend(q, k, v, _columns(before, lengths, past, T, cu_seqlens), window, scaling, always)
    if order is not None:
        o = torch.zeros_like(o).scatter(1, order[..., None, None].expand_as(o), o)
    return o, _last(k, v, before, lengths, window, past)


def _compacted(x: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    flat, order = real_tokens_first(x.flatten(2), attention_mask)
    return flat.view_as(x), order


def _after_past(x: Tensor, name: str, states: States, past: int) -> Tensor:
    """[B, past + T, H, D]"""
    if states:
        return torch.cat([states[name].to(x.dtype), x], dim=1)
    return F.pad(x, (0, 0, 0, 0, past, 0))


def _columns(before: Tensor, lengths: Tensor, past: int, T: int, cu_seqlens: Tensor | None) -> Tokens:
    """Which tokens the places of the past and the present have, [1 or B, past + T]."""
    if cu_seqlens is not None:
        return masks.packed(cu_seqlens, T).map(lambda x: F.pad(x, (past, 0), value=-1))
    place = torch.arange(-past, T, device=before.device)
    return Tokens(torch.where(place < lengths[:, None], before[:, None] + place, -1))


def _attend(q, k, v, columns: Tokens, window: int, scaling: float, always) -> Tensor:
    """In blocks of queries, each with the keys that some query of the block sees."""
    B, T = q.shape[:2]
    past = k.shape[1] - T
    C = T if past == 0 else min(T, window)
    blocks = -(-T // C)
    q = F.pad(q, (0, 0, 0, 0, 0, blocks * C - T)).unflatten(1, (blocks, C)).flatten(0, 1).transpose(1, 2)
    k, v = (blocks_of(x, past, C, blocks).transpose(1, 2) for x in (k, v))  # [B * blocks, H, past + C, D]
    columns = columns.map(lambda x: blocks_of(x, past, C, blocks, -1))
    seen = masks.seen(masks.causal & masks.window(window), columns.of(slice(past, None)), columns)
    seen = seen | seen.new_ones(C, past + C).tril(past).triu(past)  # padding sees itself: a row must see something
    if always is not None:
        first = (x.transpose(0, 1).expand(len(k), -1, -1, -1).to(k.dtype) for x in always)
        k, v = (torch.cat(pair, dim=2) for pair in zip(first, (k, v)))
        seen = F.pad(seen, (len(always[0]), 0), value=True)
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scaling, enable_gqa=True)
    return o.transpose(1, 2).unflatten(0, (B, blocks)).flatten(1, 2)[:, :T]


def _last(k: Tensor, v: Tensor, before: Tensor, lengths: Tensor, window: int, past: int) -> States:
    """The last window - 1 tokens, at the end of their places."""
    missing = window - 1 - past
    k, v = (F.pad(x, (0, 0, 0, 0, missing, 0)) for x in (k, v))
    places = (lengths[:, None] + torch.arange(window - 1, device=k.device))[..., None, None]
    keys, values = (x.gather(1, places.expand(-1, -1, *x.shape[2:])) for x in (k, v))
    return {"keys": keys, "values": values, "seen": (before + lengths).clamp(max=window - 1)}
