"""Chunks of tokens and decays inside them, for the PyTorch forms of all ops. Exponents are never positive.

On the CPU temporaries that leave the cache cost as much as the products. So a sequence is read in segments of a few
chunks each, one after the other.

Operands of products may be bfloat16. A product then sums in float32 and rounds once; states, gates, inverses and what
is added up over chunks stay float32.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.ops.contract import repeat_heads

BLOCK = 16  # tokens of the smallest chunk
SEGMENT = 2**18  # numbers of a temporary on the CPU: 1 MB of float32


def chunk_size(T: int, largest: int) -> int:
    """Of T tokens: a power of two, so that chunks fall into halves."""
    return min(largest, max(BLOCK, 1 << (T - 1).bit_length()))


def in_segments(
    op: Callable, C: int, S: Tensor, q: Tensor, *others: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Run `op(C, S, q, *others, scale)` over segments of tokens, from state to state, and join their outputs.

    Args:
        op: gives o as `joined_chunks` does, and the state after it.
        C: tokens of a chunk.
        S: state before the first token.
        q: [B, T, H, K].
        *others: [B, T, H, ...] each, or None.
        scale: passed on.

    Returns:
        o [B, T, H, V] and the state after the last token.
    """
    B, T, H, K = q.shape
    tokens = T if q.is_cuda else C * max(1, SEGMENT // (B * H * K * C))
    segments = zip(*([None] * -(-T // tokens) if x is None else x.split(tokens, dim=1) for x in (q, *others)))
    outputs = []
    for segment in segments:
        o, S = op(C, S, *segment, scale)
        outputs.append(o)
    return torch.cat(outputs, dim=1).flatten(1, 2)[:, :T], S


def split_chunks(x: Tensor, C: int) -> Tensor:
    """[B, T, H, ...] -> [NC, B * H, C, ...], contiguous; zeros, which are identity tokens, fill the last chunk."""
    if missing := -x.shape[1] % C:
        x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, missing))
    return x.unflatten(1, (-1, C)).movedim((1, 3), (0, 2)).flatten(1, 2).contiguous()


def head_rows(x: Tensor, HV: int) -> Tensor:
    """[B, 1, H, D] -> [B * HV, 1, D]: the one token of each value head, from the key head that it reads."""
    return repeat_heads(x, HV).reshape(-1, 1, x.shape[-1])


def joined_chunks(o: Tensor, B: int) -> Tensor:
    """[NC, B * H, C, V] -> [B, NC, C, H, V], a view."""
    return o.unflatten(1, (B, -1)).movedim((0, 2), (1, 3))


def decayed(x: Tensor, b: Tensor) -> Tensor:
    """x e^b in the dtype of x."""
    return (x * b.exp()).to(x.dtype)


def add_product(S: Tensor, a: Tensor, b: Tensor, decay: Tensor | None = None, *, in_place: bool = False) -> Tensor:
    """decay S + a b for states [B, K, V], which may be wider than a and b: their product is then rounded at once."""
    if decay is not None:
        S = S.mul_(decay) if in_place else decay * S
    if S.dtype != a.dtype:
        return S + torch.bmm(a, b)
    return S.baddbmm_(a, b) if in_place or decay is not None else torch.baddbmm(S, a, b)


def decay_mask(b: Tensor) -> Tensor:
    """e^(b_i - b_j) for i >= j, else 0: [..., C] -> [..., C, C]."""
    return (b[..., :, None] - b[..., None, :]).tril().exp().tril()


def vector_scores(q: Tensor, k: Tensor, b: Tensor) -> Tensor:
    """A_ij = sum_d q_id k_jd e^(b_id - b_jd) for i >= j, else 0: [..., C, K] -> [..., C, C].

    In blocks that double: the late half of a block sees the early half through its own first token, to which both refer
    their exponents, so that none is positive.
    """
    scores = (q * k).sum(-1)[..., None, None]  # [..., blocks, s, s]
    while (s := scores.shape[-1]) < q.shape[-2]:
        (_, q_late), (k_early, _), (b_early, b_late) = (_halves(x.unflatten(-2, (-1, s))) for x in (q, k, b))
        first = b_late[..., :1, :]
        across = decayed(q_late, b_late - first) @ decayed(k_early, first - b_early).mT
        early, late = _halves(scores)
        scores = _join(early, late, across)
    return scores[..., 0, :, :]


def unit_lower_inverse(A: Tensor) -> Tensor:
    """(I + A)^-1 for strictly lower A [..., C, C]: by forward substitution in small blocks, then of blocks that double.

    Not by products of powers of A, which overflow what float64 can cancel when keys are alike.
    """
    blocks = _diagonal_blocks(A, BLOCK)
    eye = torch.eye(BLOCK, dtype=A.dtype, device=A.device).expand_as(blocks)
    inverse = torch.linalg.solve_triangular(blocks, eye, upper=False, unitriangular=True)
    while (s := inverse.shape[-1]) < A.shape[-1]:
        early, late = _halves(inverse)
        inverse = _join(early, late, -(late @ _diagonal_blocks(A, 2 * s)[..., s:, :s] @ early))
    return inverse[..., 0, :, :]


def _halves(blocks: Tensor) -> tuple[Tensor, ...]:
    """The early and the late of each two blocks [..., 2 * n, s, :]."""
    return blocks.unflatten(-3, (-1, 2)).unbind(-3)


def _join(early: Tensor, late: Tensor, across: Tensor) -> Tensor:
    """[[early, 0], [across, late]], each [..., n, s, s]."""
    return torch.cat([F.pad(early, (0, early.shape[-1])), torch.cat([across, late], dim=-1)], dim=-2)


def _diagonal_blocks(A: Tensor, s: int) -> Tensor:
    """[..., C, C] -> [..., C // s, s, s]."""
    return A.unflatten(-2, (-1, s)).unflatten(-1, (-1, s)).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
