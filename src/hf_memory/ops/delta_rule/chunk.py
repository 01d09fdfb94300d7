"""The delta rule in PyTorch, parallel inside chunks: the CPU path and the oracle for kernels.

With b the sum of g from the start of the chunk to each token, and S the state before the chunk:

    A_ij = beta_i sum_d k_id k_jd e^(b_id - b_jd) for i > j,   P_ij = sum_d q_id k_jd e^(b_id - b_jd) for i >= j
    X = (I + A)^-1 diag(beta) (V - (K e^b) S)
    O = (Q e^b) S + P X,   S <- e^(b_C) S + (K e^(b_C - b))^T X

What does not meet the state is done for all chunks of a segment at once; the pass over them has a backward of its own.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_memory.ops.chunks import (
    chunk_size,
    decay_mask,
    in_segments,
    joined_chunks,
    split_chunks,
    unit_lower_inverse,
    vector_scores,
)
from hf_memory.ops.contract import in_float32, repeat_heads

CHUNK = 32  # fewer operations than 64


@in_float32
def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, *, initial_state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Same function as the reference."""
    T, HV = v.shape[1:3]
    q, k = repeat_heads(q, HV), repeat_heads(k, HV)
    if T == 1:
        return _one_token(scale * q, k, v, beta, g, initial_state)
    return in_segments(_segment, chunk_size(T, CHUNK), initial_state, q, k, v, beta[..., None], g, scale=scale)


def _segment(
    C: int, S: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    B, _, H, _ = v.shape
    q, k, v, beta = (split_chunks(x, C) for x in (scale * q, k, v, beta))  # [NC, B * H, C, ...]
    P, A, q_in, k_in, k_out, decay = _decayed(q, k, None if g is None else split_chunks(g, C))
    o, S = _Pass.apply(beta * A, P, q_in, k_in, k_out, v, beta, decay, S.flatten(0, 1))
    return joined_chunks(o, B), S.unflatten(0, (B, H))


def _decayed(q: Tensor, k: Tensor, g: Tensor | None):
    """P, A without beta, and the rows that meet the state: q and k on the way in, k on the way out, and its decay."""
    if g is None:
        return (q @ k.mT).tril(), (k @ k.mT).tril(-1), q, k, k, None
    b = (g if g.ndim == q.ndim else g[..., None]).cumsum(-2)  # [NC, B * H, C, K or 1]
    if g.ndim == q.ndim:
        P, A = vector_scores(torch.stack([q, k]), k, b)
    else:
        mask = decay_mask(b[..., 0])
        P, A = (q @ k.mT) * mask, (k @ k.mT) * mask
    last = b[..., -1:, :]
    return P, A.tril(-1), q * b.exp(), k * b.exp(), k * (last - b).exp(), last.mT.exp()


class _Pass(torch.autograd.Function):
    """The last two lines of the module's docstring; tensors [NC, B * H, C, ...], S [B * H, K, V]."""

    @staticmethod
    def forward(ctx, A, P, q, k, k_out, v, beta, decay, S):
        inverse = unit_lower_inverse(A)
        solve, R, X, o, before = inverse * beta.mT, torch.empty_like(v), torch.empty_like(v), torch.empty_like(v), []
        each = zip(*(x.unbind() for x in (q, k, k_out.mT, v, P, solve, R, X, o)))
        for n, (q_n, k_n, k_out_n, v_n, P_n, solve_n, R_n, X_n, o_n) in enumerate(each):
            before.append(S)
            torch.baddbmm(v_n, k_n, S, alpha=-1, out=R_n)
            torch.bmm(solve_n, R_n, out=X_n)
            torch.bmm(q_n, S, out=o_n).baddbmm_(P_n, X_n)
            S = torch.baddbmm(S, k_out_n, X_n) if decay is None else (decay[n] * S).baddbmm_(k_out_n, X_n)
        ctx.save_for_backward(inverse, P, q, k, k_out, beta, decay, R, X, *before)
        return o, S

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dS):
        inverse, P, q, k, k_out, beta, decay, R, X, *before = ctx.saved_tensors
        S = torch.stack(before)
        dS_after, W = torch.empty_like(S), torch.empty_like(R)  # W: of diag(beta) R
        for n in reversed(range(len(R))):
            dS_after[n] = dS
            torch.bmm(inverse[n].mT, torch.baddbmm(P[n].mT @ do[n], k_out[n], dS), out=W[n])
            dS = torch.baddbmm(dS if decay is None else decay[n] * dS, q[n].mT, do[n])
            dS.baddbmm_(k[n].mT, beta[n] * W[n], alpha=-1)
        dR, dbeta = beta * W, (W * R).sum(-1, keepdim=True)
        ddecay = None if decay is None else (S * dS_after).sum(-1, keepdim=True).sum_to_size(decay.shape)
        return -W @ X.mT, do @ X.mT, do @ S.mT, -dR @ S.mT, X @ dS_after.mT, dR, dbeta, ddecay, dS


def _one_token(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, S: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v, beta = q[:, 0, :, None], k[:, 0, :, None], v[:, 0, :, None], beta[:, 0, :, None, None]  # [B, H, 1, D]
    if g is not None:
        S = S * (g[:, 0, :, None, None] if g.ndim == 3 else g[:, 0, ..., None]).exp()
    S = S + k.mT * (beta * (v - k @ S))
    return (q @ S).transpose(1, 2), S
