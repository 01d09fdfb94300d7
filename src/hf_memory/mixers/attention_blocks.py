"""Softmax attention in blocks of queries, each with the keys that some query of the block sees: never T x T numbers."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.ops.masks import Mask, Tokens, causal, older, seen, sinks, window

BLOCK = 64  # queries of a block, at least


class Columns(NamedTuple):
    """Tokens that can be attended to."""

    tokens: Tokens  # [1 or B, S]
    keys: Tensor  # [B, S, H, D]
    values: Tensor  # [B, S, H, V]


def near_attention(
    q: Tensor,
    queries: Tokens,
    near: Columns,
    first: Columns,
    *,
    num_near: int,
    num_sinks: int,
    scaling: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Each token attends to itself, the `num_near` - 1 tokens before it, and the first `num_sinks` of its sequence.

    Args:
        q: [B, T, HQ, D], HQ a multiple of H.
        queries: which tokens these are.
        near: the present tokens after at least `num_near` - 1 columns before them, which may be empty.
        first: the first tokens of each sequence.
        num_near: tokens of the window, the present one among them.
        num_sinks: first tokens that every later token sees.
        scaling: of the scores.
        softcap: scores s become softcap tanh(s / softcap), or None.

    Returns:
        o [B, T, HQ, V], zero at padding, and the logarithm of the sum that the softmax divides by [B, T, HQ], float32.
    """
    B, T, HQ, D = q.shape
    past = near.keys.shape[1] - T
    C = min(T, max(num_near, BLOCK))
    n = -(-T // C)
    q = F.pad(q, (0, 0, 0, 0, 0, n * C - T)).reshape(B * n, C, HQ, D)
    asking = _token_blocks(queries, B, 0, C, n)
    k, v = (blocks_of(x, past, C, n) for x in near[1:])
    visible = seen(causal & window(num_near), asking, _token_blocks(near.tokens, B, past, C, n))
    if num_sinks:
        k, v = (torch.cat([x.repeat_interleave(n, 0), y], 1) for x, y in ((first.keys, k), (first.values, v)))
        beyond = seen(sinks(num_sinks) & older(num_near), asking, _repeated(first.tokens, B, n))
        visible = torch.cat([beyond, visible], -1)
    o, logsumexp = _attend(q, k, v, visible, scaling, softcap)
    return o.reshape(B, n * C, HQ, -1)[:, :T], logsumexp.reshape(B, n * C, HQ)[:, :T]


def full_attention(
    q: Tensor, queries: Tokens, past: Columns, *, scaling: float, softcap: float | None = None, sees: Mask = causal
) -> Tensor:
    """Each token [B, T, HQ, D] attends to all that a mask lets it see: o [B, T, HQ, V], zero at padding."""
    blocks = range(0, q.shape[1], BLOCK)
    parts = []
    for i in blocks:
        visible = seen(sees, queries.of(slice(i, i + BLOCK)), past.tokens)
        parts.append(_attend(q[:, i : i + BLOCK], past.keys, past.values, visible, scaling, softcap)[0])
    return torch.cat(parts, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scaling: float, softcap: float | None):
    """q [B, C, HQ, D], k and v [B, S, H, D], visible [B, 1, C, S] -> o [B, C, HQ, D] and logsumexp [B, C, HQ]."""
    B, C, HQ, D = q.shape
    H = k.shape[2]
    q = (
        q.reshape(B, C, H, HQ // H, D).permute(0, 2, 3, 1, 4).reshape(B, H, -1, D)
    )  # queries of a group share their keys
    scores = (q @ k.permute(0, 2, 3, 1)).unflatten(2, (-1, C)).to(torch.promote_types(q.dtype, torch.float32)) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible[:, :, None], -torch.inf)  # [B, H, G, C, S]
    logsumexp = scores.logsumexp(-1, keepdim=True)
    weights = (scores - logsumexp.clamp(min=torch.finfo(scores.dtype).min)).exp()  # padding sees nothing: zero
    o = (weights.to(v.dtype).flatten(2, 3) @ v.transpose(1, 2)).unflatten(2, (-1, C))
    return o.permute(0, 3, 1, 2, 4).flatten(2, 3), logsumexp[..., 0].permute(0, 3, 1, 2).flatten(2)


def blocks_of(x: Tensor, past: int, C: int, n: int, value: float = 0.0) -> Tensor:
    """[B, past + T, ...] -> [B * n, past + C, ...]: block i has the places from i * C on."""
    x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, past + n * C - x.shape[1]), value=value)
    return x.unfold(1, past + C, C).movedim(-1, 2).flatten(0, 1)


def _token_blocks(tokens: Tokens, B: int, past: int, C: int, n: int) -> Tokens:
    return tokens.map(lambda x: blocks_of(x.expand(B, -1), past, C, n, -1))


def _repeated(tokens: Tokens, B: int, n: int) -> Tokens:
    """The same columns for each block of a row."""
    return tokens.map(lambda x: x.expand(B, -1).repeat_interleave(n, 0))
