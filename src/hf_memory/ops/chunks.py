"""Chunks of tokens and decays inside them, for the PyTorch forms of all ops. Exponents are never positive."""

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 16  # rows of a sub-block, inside which a vector decay is applied channel by channel


def whole_blocks(T: int) -> int:
    """The multiple of BLOCK that holds T tokens."""
    return -(-T // BLOCK) * BLOCK


def split_chunks(x: Tensor, C: int) -> Tensor:
    """[B, T, H, ...] -> [B, H, NC, C, ...]; the last chunk is filled with zeros, which are identity tokens."""
    x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, -x.shape[1] % C))
    return x.transpose(1, 2).unflatten(2, (-1, C))


def decay_mask(b: Tensor) -> Tensor:
    """e^(b_i - b_j) for i >= j, else 0: [..., C] -> [..., C, C]."""
    later = torch.ones(b.shape[-1], b.shape[-1], dtype=torch.bool, device=b.device).triu(1)
    return (b[..., :, None] - b[..., None, :]).masked_fill(later, -torch.inf).exp()


def vector_scores(q: Tensor, k: Tensor, b: Tensor) -> Tensor:
    """A_ij = sum_d q_id k_jd e^(b_id - b_jd) for i >= j, else 0: [..., C, K] -> [..., C, C].

    In rows of blocks; each row refers its exponents to its own first token, so that none is positive.
    """
    C = q.shape[-2]
    rows = []
    for start in range(0, C, BLOCK):
        here, past = slice(start, start + BLOCK), slice(start)
        b_here, first = b[..., here, :], b[..., start : start + 1, :]
        scores = _decay_scores(q[..., here, :], k[..., here, :], b_here)
        if start:
            q_row, k_past = q[..., here, :] * (b_here - first).exp(), k[..., past, :] * (first - b[..., past, :]).exp()
            scores = torch.cat([q_row @ k_past.mT, scores], dim=-1)
        rows.append(F.pad(scores, (0, C - start - BLOCK)))
    return torch.cat(rows, dim=-2)


def _decay_scores(q: Tensor, k: Tensor, b: Tensor) -> Tensor:
    """Inside a block: sum_d q_id k_jd e^(b_id - b_jd) for i >= j, each channel with its own decay."""
    later = torch.ones(b.shape[-2], b.shape[-2], dtype=torch.bool, device=b.device).triu(1)[..., None]
    decay = (b[..., :, None, :] - b[..., None, :, :]).masked_fill(later, -torch.inf).exp()  # [..., C, C, K]
    return torch.einsum("...id,...jd,...ijd->...ij", q, k, decay)
