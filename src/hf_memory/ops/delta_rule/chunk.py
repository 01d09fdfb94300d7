"""The delta rule in PyTorch, parallel inside chunks: the CPU path and the oracle for kernels.

With b the sum of g from the start of the chunk to each token, and S the state before the chunk:

    A_ij = beta_i sum_d k_id k_jd e^(b_id - b_jd) for i > j;   (I + A) [U, W] = [diag(beta) V, diag(beta) (K e^b)]
    X = U - W S;   O = (Q e^b) S + P X with P_ij as A_ij, but of q and k, and for i >= j
    S <- e^(b_C) S + (K e^(b_C - b))^T X

The solve needs no state, so all chunks are solved at once, and the state passes from chunk to chunk by one product.
"""

import torch
from torch import Tensor

from hf_memory.ops.chunks import decay_mask, split_chunks, vector_scores, whole_blocks
from hf_memory.ops.contract import in_float32, repeat_heads

CHUNK = 64


@in_float32
def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, *, initial_state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Same function as the reference."""
    T, HV = v.shape[1:3]
    q, k = repeat_heads(q, HV), repeat_heads(k, HV)
    if T == 1:
        return _one_token(scale * q, k, v, beta, g, initial_state)
    C = min(CHUNK, whole_blocks(T))
    q, k, v, beta = (split_chunks(x, C) for x in (scale * q, k, v, beta[..., None]))  # [B, H, NC, C, ...]
    P, A, q_in, k_in, k_out, decay = _decayed(q, k, None if g is None else split_chunks(g, C))
    U, W = torch.linalg.solve_triangular(
        beta * A, beta * torch.cat([v, k_in], dim=-1), upper=False, unitriangular=True
    ).split([v.shape[-1], k.shape[-1]], dim=-1)
    S, final_state = _states(k_out.mT @ U, k_out.mT @ W, decay, initial_state)
    o = q_in @ S + P @ (U - W @ S)
    return o.flatten(2, 3).transpose(1, 2)[:, :T], final_state


def _decayed(q: Tensor, k: Tensor, g: Tensor | None):
    """P, A without beta, and the rows that meet the state: q and k on the way in, k on the way out, and its decay."""
    if g is None:
        return (q @ k.mT).tril(), (k @ k.mT).tril(-1), q, k, k, None
    b = (g if g.ndim == q.ndim else g[..., None]).cumsum(-2)  # [B, H, NC, C, K or 1]
    if g.ndim == q.ndim:
        P, A = vector_scores(q, k, b), vector_scores(k, k, b)
    else:
        mask = decay_mask(b[..., 0])
        P, A = (q @ k.mT) * mask, (k @ k.mT) * mask
    last = b[..., -1:, :]
    return P, A.tril(-1), q * b.exp(), k * b.exp(), k * (last - b).exp(), last.mT.exp()


def _states(written: Tensor, erased: Tensor, decay: Tensor | None, S: Tensor) -> tuple[Tensor, Tensor]:
    """The state before each chunk [B, H, NC, K, V], and after the last: S <- decay S - erased S + written."""
    before = []
    for n in range(written.shape[2]):
        before.append(S)
        kept = S if decay is None else decay[:, :, n] * S
        S = kept + written[:, :, n] - erased[:, :, n] @ S
    return torch.stack(before, dim=2), S


def _one_token(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, S: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v, beta = q[:, 0, :, None], k[:, 0, :, None], v[:, 0, :, None], beta[:, 0, :, None, None]  # [B, H, 1, D]
    if g is not None:
        S = S * (g[:, 0, :, None, None] if g.ndim == 3 else g[:, 0, ..., None]).exp()
    S = S + k.mT * (beta * (v - k @ S))
    return (q @ S).transpose(1, 2), S
