"""Log-linear attention in PyTorch, parallel inside chunks: O(T log T), and never T x T.

A chunk of the op without levels is linear in its values and in the state before it:

    O = W V + Q S,   S <- e^b S - K^T (E S) + K^T V         (no E without beta)

With levels, an entry of W is multiplied by the weight of the level between its two tokens. There is an S for each
level, and a token reads each S at the level that the block has for this token. A block of level l after n tokens has,
at position t >= n, the level

    max(l, level_between(t, n))

If all rows start with an empty memory and have no padding, it is known without reading a tensor which levels hold a
block, and there are half as many.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.ops.chunks import (
    chunk_size,
    in_segments,
    joined_chunks,
    split_chunks,
    unit_lower_inverse,
)
from hf_memory.ops.delta_rule.chunk import decayed as decayed_delta
from hf_memory.ops.layout import repeat_heads
from hf_memory.ops.linear_attention.chunk import decayed
from hf_memory.ops.log_linear_attention.reference import LogLinearState, level_between
from hf_memory.ops.precision import in_float32

CHUNK = 64


class Past(NamedTuple):
    """The levels that may hold a block."""

    S: Tensor  # [B * H, number of such levels, K, V]
    held: list[int]  # these levels
    tokens_read: int | None  # number of tokens of every row, if it is known on the host


class Chunks(NamedTuple):
    """The matrices of the module's docstring for each chunk, [NC, B * H, C, ...]."""

    W: Tensor  # [..., C, C]
    q: Tensor
    k: Tensor
    erase: Tensor | None  # E
    decay: Tensor | None  # [..., K or 1, 1]


@in_float32
def log_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    level_weights: Tensor,
    beta: Tensor | None,
    g: Tensor | None,
    counted: Tensor | None,
    *,
    initial_state: LogLinearState,
    scale: float,
    is_empty: bool = False,
) -> tuple[Tensor, LogLinearState]:
    """Same function as the reference; `is_empty` says whether the initial state is known to be empty on the host."""
    B, T, H = v.shape[:3]
    L = level_weights.shape[-1] - 1
    q = repeat_heads(q, H)
    k = repeat_heads(k, H)
    tokens_read = 0 if is_empty and counted is None else None
    n = initial_state.tokens_read[:, None]
    ends = n + (torch.arange(1, T + 1, device=q.device) if counted is None else counted.cumsum(1))
    starts = torch.cat([n, ends[:, :-1]], dim=1)
    held = _levels_with_block(tokens_read, L)
    S = initial_state.levels.transpose(1, 2).flatten(0, 1)
    past = Past(S[:, : len(held)], held, tokens_read)
    beta = None if beta is None else beta[..., None]
    C = chunk_size(T, CHUNK)
    o, past = in_segments(
        _segment, C, past, q, k, v, level_weights, beta, g, starts, ends, scale=scale
    )
    levels = (
        torch.zeros_like(S).index_copy(1, _levels(past.held, q) - 1, past.S).unflatten(0, (B, H))
    )
    tokens_after = initial_state.tokens_read + (T if counted is None else counted.sum(1))
    return o, LogLinearState(levels.transpose(1, 2).contiguous(), tokens_after)


def _levels_with_block(tokens_read: int | None, L: int) -> list[int]:
    """The levels from 1 to L that hold a block after `tokens_read` tokens."""
    if tokens_read is None:
        return list(range(1, L + 1))
    return [level for level in range(1, L) if tokens_read >> level - 1 & 1] + [L] * (
        tokens_read >> L - 1 > 0
    )


def _segment(C: int, past: Past, rows: tuple, scale: float) -> tuple[Tensor, Past]:
    q, k, v, weights, beta, g, starts, ends = rows
    B, T = v.shape[:2]
    L = weights.shape[-1] - 1
    tokens = torch.arange(-(-T // C) * C, device=q.device).clamp(max=T - 1).view(-1, C)
    position = starts[:, tokens].transpose(0, 1)
    after = ends[:, tokens[:, -1:]].transpose(0, 1)  # [NC, B, C or 1]
    # [NC, B * H, C, ...]
    q, k, v, weights = (split_chunks(x, C) for x in (scale * q, k, v, weights))
    beta, g = (None if x is None else split_chunks(x, C) for x in (beta, g))
    chunks = _chunks(q, k, beta, g)
    between = level_between(position[..., None], position[..., None, :], L)
    within_chunk = (chunks.W * _at_levels(weights, between)) @ v
    outputs = []
    for n in range(len(v)):
        chunk = Chunks._make(None if x is None else x[n] for x in chunks)
        read = torch.maximum(
            _levels(past.held, q), level_between(position[n], position[n, :, :1], L)[..., None]
        )
        queries = _times_each(chunk.q, _at_levels(weights[n], read))
        outputs.append(within_chunk[n] + queries @ past.S.flatten(1, 2))
        past = _after(past, chunk, v[n], position[n], after[n], min(C, T - n * C), L)
    return joined_chunks(torch.stack(outputs), B, C), past


def _after(
    past: Past, chunk: Chunks, v: Tensor, position: Tensor, after: Tensor, num_tokens: int, L: int
) -> Past:
    """The blocks after a chunk, including its tokens, at their new levels.

    Args:
        past: the blocks before it.
        chunk: its matrices.
        v: its values [B * H, C, V].
        position: [B, C], the numbers of tokens before each of its tokens.
        after: [B, 1], the number of tokens read after it.
        num_tokens: how many of its C tokens exist.
        L: number of levels.
    """
    before = past.tokens_read
    later = None
    held = written = _levels_with_block(None, L)
    if before is not None:
        later = before + num_tokens
        held = _levels_with_block(later, L)
        written = [level for level in held if level <= (before ^ later).bit_length()]
    blocks = torch.maximum(_levels(past.held, v), level_between(after, position[:, :1], L))
    S = _passed(chunk, past.S)
    S = (_one_hot(blocks, held, v).mT @ S.flatten(2)).unflatten(-1, S.shape[2:])
    new = _times_each(chunk.k, _one_hot(level_between(after, position, L), written, v)).mT @ v
    new = new.unflatten(1, (len(written), -1))
    return Past(S + F.pad(new, (0, 0, 0, 0, 0, len(held) - len(written))), held, later)


def _chunks(q: Tensor, k: Tensor, beta: Tensor | None, g: Tensor | None) -> Chunks:
    """W and, for the delta rule, E by X = M (V - K S) of its chunk form: errors take the place of values."""
    if beta is None:
        W, q_in, k_out, decay = decayed(q, k, g)
        return Chunks(W, q_in, k_out, None, decay)
    P, A, q_in, k_in, k_out, decay = decayed_delta(q, k, g)
    M = unit_lower_inverse(beta * A) * beta.mT
    W = P @ M
    return Chunks(W, q_in - W @ k_in, M.mT @ k_out, k_in, decay)


def _at_levels(weights: Tensor, levels: Tensor) -> Tensor:
    """The entries of weights [..., B * H, C, L + 1] at levels [..., B, C, n]."""
    B = levels.shape[-3]
    H = weights.shape[-3] // levels.shape[-3]
    index = levels[..., None, :, :].expand(*levels.shape[:-2], H, *levels.shape[-2:])
    return weights.unflatten(-3, (B, H)).gather(-1, index).flatten(-4, -3)


def _times_each(x: Tensor, weights: Tensor) -> Tensor:
    """x [..., C, K] times each of the weights [..., C, n], concatenated: [..., C, n * K]."""
    return (weights[..., None] * x[..., None, :]).flatten(-2)


def _passed(chunk: Chunks, S: Tensor) -> Tensor:
    """The states [B * H, held, K, V] of each level after a chunk has decayed and erased them, before it writes."""
    if chunk.erase is not None:
        eye = torch.eye(S.shape[-2], dtype=S.dtype, device=S.device)
        kept = (eye if chunk.decay is None else chunk.decay * eye) - chunk.k.mT @ chunk.erase
        return kept[:, None] @ S
    return S if chunk.decay is None else chunk.decay[:, None] * S


def _levels(held: list[int], like: Tensor) -> Tensor:
    return torch.tensor(held, device=like.device, dtype=torch.long)


def _one_hot(levels: Tensor, held: list[int], v: Tensor) -> Tensor:
    """The index of each of the levels [B, n] among the held ones as one-hot vectors [B * H, n, held], for all heads."""
    found = levels[..., None] == _levels(held, levels)
    return found.to(v.dtype).repeat_interleave(v.shape[0] // levels.shape[0], dim=0)
