"""The delta rule in PyTorch, parallel inside chunks: the CPU path and the oracle for kernels.

With b the sum of g from the start of the chunk to each token, and S the state before the chunk:

    A_ij = beta_i sum_d k_id k_jd e^(b_id - b_jd) for i > j,   P_ij = sum_d q_id k_jd e^(b_id - b_jd) for i >= j
    X = (I + A)^-1 diag(beta) (V - (K e^b) S)
    O = (Q e^b) S + P X,   S <- e^(b_C) S + (K e^(b_C - b))^T X

What does not meet the state is done for all chunks at once; the pass over the chunks has a backward of its own, which
keeps only X and the state before each chunk.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_memory.ops.chunks import BLOCK, decay_mask, split_chunks, vector_scores, whole_blocks
from hf_memory.ops.contract import in_float32, repeat_heads

CHUNK = 64


@in_float32
def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, *, initial_state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Same function as the reference."""
    B, T, HV = v.shape[:3]
    q, k = repeat_heads(q, HV), repeat_heads(k, HV)
    if T == 1:
        return _one_token(scale * q, k, v, beta, g, initial_state)
    C = min(CHUNK, whole_blocks(T))
    q, k, v, beta = (_chunks_first(x, C) for x in (scale * q, k, v, beta[..., None]))  # [NC, B * HV, C, ...]
    P, A, q_in, k_in, k_out, decay = _decayed(q, k, None if g is None else _chunks_first(g, C))
    o, S = _Pass.apply(beta * A, P, q_in, k_in, k_out, v, beta, decay, initial_state.flatten(0, 1))
    o = o.unflatten(1, (B, HV)).permute(1, 0, 3, 2, 4).flatten(1, 2)  # [B, NC * C, HV, V]
    return o[:, :T], S.unflatten(0, (B, HV))


def _chunks_first(x: Tensor, C: int) -> Tensor:
    """[B, T, H, ...] -> [NC, B * H, C, ...]."""
    return split_chunks(x, C).flatten(0, 1).transpose(0, 1).contiguous()


def _decayed(q: Tensor, k: Tensor, g: Tensor | None):
    """P, A without beta, and the rows that meet the state: q and k on the way in, k on the way out, and its decay."""
    if g is None:
        return (q @ k.mT).tril(), (k @ k.mT).tril(-1), q, k, k, None
    b = (g if g.ndim == q.ndim else g[..., None]).cumsum(-2)  # [NC, B * H, C, K or 1]
    if g.ndim == q.ndim:
        P, A = vector_scores(q, k, b), vector_scores(k, k, b)
    else:
        mask = decay_mask(b[..., 0])
        P, A = (q @ k.mT) * mask, (k @ k.mT) * mask
    last = b[..., -1:, :]
    return P, A.tril(-1), q * b.exp(), k * b.exp(), k * (last - b).exp(), last.mT.exp()


class _Pass(torch.autograd.Function):
    """The last two lines of the module's docstring; tensors [NC, B * H, C, ...], S [B * H, K, V]."""

    @staticmethod
    def forward(ctx, A, P, q, k, k_out, v, beta, decay, S):
        inverse, o, X = unit_lower_inverse(A), torch.empty_like(v), torch.empty_like(v)
        before = S.new_empty(q.shape[0], *S.shape)
        for n in range(q.shape[0]):
            before[n] = S
            torch.bmm(inverse[n], beta[n] * torch.baddbmm(v[n], k[n], S, alpha=-1), out=X[n])
            torch.baddbmm(q[n] @ S, P[n], X[n], out=o[n])
            S = torch.baddbmm(S if decay is None else decay[n] * S, k_out[n].mT, X[n])
        ctx.save_for_backward(inverse, P, q, k, k_out, v, beta, decay, before, X)
        return o, S

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dS):
        inverse, P, q, k, k_out, v, beta, decay, S, X = ctx.saved_tensors
        dS_after, dR = torch.empty_like(S), torch.empty_like(v)  # dR: of diag(beta) (V - K S)
        for n in reversed(range(q.shape[0])):
            dS_after[n] = dS
            torch.bmm(inverse[n].mT, torch.baddbmm(P[n].mT @ do[n], k_out[n], dS), out=dR[n])
            dS = torch.baddbmm(dS if decay is None else decay[n] * dS, q[n].mT, do[n])
            dS = torch.baddbmm(dS, k[n].mT, beta[n] * dR[n], alpha=-1)
        dv = beta * dR
        dbeta = (dR * (v - k @ S)).sum(-1, keepdim=True)
        ddecay = None
        if decay is not None:
            ddecay = (S * dS_after).sum(-1, keepdim=True).sum_to_size(decay.shape)
        return -dR @ X.mT, do @ X.mT, do @ S.mT, -dv @ S.mT, X @ dS_after.mT, dv, dbeta, ddecay, dS


def unit_lower_inverse(A: Tensor) -> Tensor:
    """(I + A)^-1 for strictly lower A [..., C, C], by forward substitution: first in blocks, then between them.

    Not by products of powers of A, which overflow what float64 can cancel when keys are alike.
    """
    C = A.shape[-1]
    inverse = torch.eye(C, dtype=A.dtype, device=A.device).expand(A.shape).contiguous()
    for start in range(0, C, BLOCK):
        here = slice(start, start + BLOCK)
        block, a = inverse[..., here, here], A[..., here, here]
        for i in range(1, BLOCK):
            block[..., i, :i] = -(a[..., i, None, :i] @ block[..., :i, :i])[..., 0, :]
        if start:
            past = A[..., here, :start] @ inverse[..., :start, :start]
            inverse[..., here, :start] = -block @ past
    return inverse


def _one_token(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, S: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v, beta = q[:, 0, :, None], k[:, 0, :, None], v[:, 0, :, None], beta[:, 0, :, None, None]  # [B, H, 1, D]
    if g is not None:
        S = S * (g[:, 0, :, None, None] if g.ndim == 3 else g[:, 0, ..., None]).exp()
    S = S + k.mT * (beta * (v - k @ S))
    return (q @ S).transpose(1, 2), S
