"""Chunks of tokens and decays within them, for the PyTorch forms of all ops. No exponent is ever positive.

On the CPU, temporaries that do not fit into the cache cost as much as the matrix products. So a sequence is processed
in segments of a few chunks.

Operands of products may be bfloat16. A product then accumulates in float32 and rounds once; states, gates, inverses and
sums over chunks stay in float32.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.ops.layout import repeat_heads

BLOCK = 16  # tokens of the smallest chunk
SHUT = -(2.0**14)  # e^SHUT is zero in all dtypes, and a sum of 1024 such gates is exact in float32
SEGMENT = 2**18  # size of a temporary on the CPU: 1 MB of float32


def chunk_size(T: int, largest: int) -> int:
    """The chunk size for T tokens: a power of two, so that chunks can be halved."""
    return min(largest, max(BLOCK, 1 << (T - 1).bit_length()))


def in_segments(
    op: Callable, C: int, S: Any, q: Tensor, *others: Tensor | None, scale: float
) -> tuple[Tensor, Any]:
    """Run `op(C, S, rows, scale)` on one segment after the other, passing on the state, and join the outputs.

    Args:
        op: returns o, as from `joined_chunks`, and the state after a segment; rows are q and the others.
        C: number of tokens of a chunk.
        S: state before the first token.
        q: [B, T, H, K].
        *others: [B, T, ...] each, or None.
        scale: passed on.

    Returns:
        o [B, T, H, V] and the state after the last token.
    """
    B, T, H, K = q.shape
    is_one = q.is_cuda or torch.compiler.is_exporting()
    tokens = T if is_one else C * max(1, SEGMENT // (B * H * K * C))
    segments = zip(
        *([None] * -(-T // tokens) if x is None else x.split(tokens, dim=1) for x in (q, *others))
    )
    outputs = []
    for segment in segments:
        o, S = op(C, S, segment, scale)
        outputs.append(o)
    return torch.cat(outputs, dim=1).flatten(1, 2)[:, :T], S


def split_chunks(x: Tensor, C: int) -> Tensor:
    """[B, T, H, ...] -> [NC, B * H, C, ...], contiguous; the last chunk is padded with zeros, which change nothing."""
    if missing := -x.shape[1] % C:
        x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, missing))
    chunks = x.unflatten(1, (-1, C)).movedim((1, 3), (0, 2)).flatten(1, 2)
    if torch.compiler.is_exporting():  # what is contiguous here may not be with another batch
        return chunks.clone(memory_format=torch.contiguous_format)
    return chunks.contiguous()


def head_rows(x: Tensor, HV: int) -> Tensor:
    """[B, 1, H, D] -> [B * HV, 1, D]: a single token, with each key head repeated for its value heads.

    Queries [B, 1, HQ, D] become HQ // HV rows for each value head.
    """
    return repeat_heads(x, HV).reshape(x.shape[0] * HV, -1, x.shape[-1])


def joined_chunks(o: Tensor, B: int, C: int) -> Tensor:
    """[NC, B * H, G * C, V] -> [B, NC, C, H * G, V], a view."""
    return o.unflatten(2, (-1, C)).unflatten(1, (B, -1)).flatten(2, 3).movedim((0, 2), (1, 3))


def grouped_rows(q: Tensor, k: Tensor) -> Tensor:
    """Chunks of queries [NC, B * H * G, C, K] of keys [NC, B * H, C, K] -> [NC, B * H, G * C, K]."""
    return q.view(*k.shape[:2], -1, q.shape[-1])


def rows_by_head(x: Tensor, k: Tensor) -> Tensor:
    """The rows [..., G * C, :] of G heads with the same keys k [..., C, K], head by head: [..., G, C, :]."""
    return x.unflatten(-2, (-1, k.shape[-2]))


def add_product(
    S: Tensor, a: Tensor, b: Tensor, decay: Tensor | None = None, *, in_place: bool = False
) -> Tensor:
    """decay S + a b for states S [B, K, V]; if S has a wider dtype than a and b, their product is rounded once.

    Args:
        S: the states.
        a: [B, K, n].
        b: [B, n, V].
        decay: [B, K or 1, 1] or None.
        in_place: whether S is overwritten.
    """
    if decay is not None:
        S = S.mul_(decay) if in_place else decay * S
    if S.dtype != a.dtype:
        return S + torch.bmm(a, b)
    return S.baddbmm_(a, b) if in_place or decay is not None else torch.baddbmm(S, a, b)


def scalar_decays(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The decays from token j to token i of a chunk, from its start to i, and from j to its end.

    The first is e^(g_{j+1} + ... + g_i) for i >= j, and 0 for i < j, since a token does not see later ones.

    Differences of cumulative sums of g would be inexact: next to a gate of -1e8 a gate of -0.1 is lost, and
    -inf - (-inf) is NaN. So g is split into multiples of 1 / 16, whose sums are exact, and a remainder, whose sums are
    small.

    Args:
        g: [..., C].

    Returns:
        The decays [..., C, C], with i before j, [..., C, 1] and [..., C, 1].
    """
    g = g.clamp(min=SHUT)
    C = g.shape[-1]
    with torch.no_grad():
        multiples = (16 * g).round_().div_(16)
        coarse = multiples.cumsum(-1)[..., None]
        between = (coarse - coarse.mT).add_(g.new_full((C, C), -torch.inf).triu_(1))
    fine = (g - multiples).cumsum(-1)[..., None]
    mask = (fine - fine.mT).add_(between).exp()
    return mask, (fine + coarse).exp(), mask[..., -1, :, None]


def vector_decays(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A_ij = sum_d q_id k_jd e^(g_{j+1, d} + ... + g_id) for i >= j, else 0, and the decays of q, k and the chunk.

    Blocks are doubled recursively: to let the second half of a block see the first half, keys of the first half are
    decayed up to the boundary, and queries of the second half from the boundary. Only products of decays are needed,
    and no differences, so nothing cancels.

    Args:
        q: [..., C, K].
        k: [..., C, K].
        g: [..., C, K].

    Returns:
        A [..., C, C], q decayed from the start of the chunk, k to its end, and the whole chunk's decay [..., 1, K].
    """
    scores = (q * k).sum(-1)[..., None, None]
    whole = g.exp()[..., None, :]  # for each block: [..., C / s, s, s or K]
    x = q[..., None, :] * whole
    y = k[..., None, :]
    while scores.shape[-1] < q.shape[-2]:
        x_early, x_late = _halves(x)
        y_early, y_late = _halves(y)
        early, late = _halves(scores)
        first, second = _halves(whole)
        scores = _join(early, late, x_late.to(q.dtype) @ y_early.to(k.dtype).mT)
        x = torch.cat([x_early, first * x_late], dim=-2)
        y = torch.cat([second * y_early, y_late], dim=-2)
        whole = first * second
    return scores[..., 0, :, :], x[..., 0, :, :], y[..., 0, :, :], whole[..., 0, :, :]


def unit_lower_inverse(A: Tensor) -> Tensor:
    """(I + A)^-1 for strictly lower triangular A [..., C, C]: by substitution in small blocks, which are then doubled.

    Products of powers of A would be faster, but lose all precision, even in float64, if keys are similar.
    """
    # other runtimes have no substitution; the inverse of [1] is [1]
    if torch.compiler.is_exporting():
        inverse = A.new_ones(*A.shape[:-1], 1, 1)
    else:
        blocks = _diagonal_blocks(A, BLOCK)
        eye = torch.eye(BLOCK, dtype=A.dtype, device=A.device).expand_as(blocks)
        inverse = torch.linalg.solve_triangular(blocks, eye, upper=False, unitriangular=True)
    while (s := inverse.shape[-1]) < A.shape[-1]:
        early, late = _halves(inverse)
        inverse = _join(early, late, -(late @ _diagonal_blocks(A, 2 * s)[..., s:, :s] @ early))
    return inverse[..., 0, :, :]


def _halves(blocks: Tensor) -> tuple[Tensor, ...]:
    """The first and the second of each pair of blocks [..., 2 * n, s, :]."""
    return blocks.unflatten(-3, (-1, 2)).unbind(-3)


def _join(early: Tensor, late: Tensor, across: Tensor) -> Tensor:
    """[[early, 0], [across, late]], each [..., n, s, s]."""
    return torch.cat(
        [F.pad(early, (0, early.shape[-1])), torch.cat([across, late], dim=-1)], dim=-2
    )


def _diagonal_blocks(A: Tensor, s: int) -> Tensor:
    """[..., C, C] -> [..., C // s, s, s]."""
    return (
        A.unflatten(-2, (-1, s)).unflatten(-1, (-1, s)).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
    )
