"""The delta rule in PyTorch, parallel inside chunks: the CPU path and the oracle for kernels.

With b the sum of g from the start of the chunk to each token, and S the state before the chunk:

    A_ij = beta_i sum_d k_id k_jd e^(b_id - b_jd) for i > j,   P_ij = sum_d q_id k_jd e^(b_id - b_jd) for i >= j
    X = (I + A)^-1 diag(beta) (V - (K e^b) S)
    O = (Q e^b) S + P X,   S <- e^(b_C) S + (K e^(b_C - b))^T X

With a and b, where a reads the memory before the decay of its token, E are the values that are written along b:

    E = (I - A_ab)^-1 (A_ak V + (A e^b') S),   b' = b - g, the sum up to the token before
    O = (Q e^b) S + P_qk V + P_qb E,   S <- e^(b_C) S + (K e^(b_C - b))^T V + (B e^(b_C - b))^T E

All that does not need the state is computed for all chunks of a segment at once. The loop over chunks has its own
backward pass.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.ops.autograd import first_derivatives_only
from hf_memory.ops.chunks import (
    add_product,
    chunk_size,
    grouped_rows,
    in_segments,
    joined_chunks,
    rows_by_head,
    scalar_decays,
    split_chunks,
    unit_lower_inverse,
    vector_decays,
)
from hf_memory.ops.layout import repeat_heads
from hf_memory.ops.precision import with_bfloat16_products

CHUNK = 32  # takes fewer operations than 64


@with_bfloat16_products
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    *,
    initial_state: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Same function as the reference."""
    T, HV = v.shape[1:3]
    q = repeat_heads(q, HV)
    k = repeat_heads(k, HV)
    return in_segments(
        _segment, chunk_size(T, CHUNK), initial_state, q, k, v, beta[..., None], g, scale=scale
    )


def _segment(C: int, S: Tensor, rows: tuple, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v, beta, g = rows
    B, _, H, _ = v.shape
    q, k, v, beta = (split_chunks(x, C) for x in (scale * q, k, v, beta))  # [NC, B * H, C, ...]
    q = grouped_rows(q, k)
    P, A, q_in, k_in, k_out, decay = decayed(q, k, None if g is None else split_chunks(g, C))
    o, S = _Pass.apply(beta * A, P, q_in, k_in, k_out, v, beta, decay, None, S.flatten(0, 1))
    return joined_chunks(o, B, C), S.unflatten(0, (B, H))


@with_bfloat16_products
def diagonal_plus_rank_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    initial_state: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Same function as the reference."""
    T, HV = v.shape[1:3]
    q = repeat_heads(q, HV)
    k = repeat_heads(k, HV)
    v = (beta[..., None] * v).to(v.dtype)
    return in_segments(
        _rank_one_segment, chunk_size(T, CHUNK), initial_state, q, k, v, g, a, b, scale=scale
    )


def _rank_one_segment(C: int, S: Tensor, rows: tuple, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v, g, a, b = rows
    B, _, H, _ = v.shape
    # [NC, B * H, C, ...]
    q, k, v, g, a, b = (split_chunks(x, C) for x in (scale * q, k, v, g, a, b))
    queries = rows_by_head(grouped_rows(q, k), k)
    reads = torch.cat([queries.to(b.dtype), _one_later(a, -1).unsqueeze(-3)], -3)
    writes = torch.stack([k.to(b.dtype), b]).unsqueeze(-3)
    products, read_in, write_out, decay = vector_decays(reads, writes, g.unsqueeze(-3))
    q_in = read_in[..., :-1, :, :].flatten(-3, -2)
    a_in = read_in[..., -1, :, :]
    k_out, b_out = write_out.squeeze(-3)
    P_k, P_b = products[..., :-1, :, :].flatten(-3, -2)  # products of q with k and b
    A_k, A_b = _one_later(products[..., -1, :, :])  # products of a with k and b
    a_in = torch.cat([a[..., :1, :], a_in[..., :-1, :]], dim=-2)
    P_k, P_b, A_k, q_in, a_in, k_out, b_out = (
        x.to(v.dtype) for x in (P_k, P_b, A_k, q_in, a_in, k_out, b_out)
    )
    ones = torch.ones_like(a[..., :1])
    o, S = _Pass.apply(
        -A_b,
        P_b,
        q_in,
        -a_in,
        b_out,
        A_k @ v,
        ones,
        decay.squeeze(-3).mT,
        k_out.mT @ v,
        S.flatten(0, 1),
    )
    return joined_chunks(o + P_k @ v, B, C), S.unflatten(0, (B, H))


def _one_later(rows: Tensor, tokens: int = 1) -> Tensor:
    """Shift the rows of [..., C, D] to the next token, or with -1 to the previous one, and fill with zeros."""
    return F.pad(rows, (0, 0, tokens, -tokens))


def decayed(q: Tensor, k: Tensor, g: Tensor | None):
    """The matrices of the first equations of the module's docstring, with A before its rows are multiplied by beta.

    Args:
        q: queries [..., G * C, K] of chunks, the rows of G heads that read one state.
        k: keys [..., C, K].
        g: natural logarithms of the decay [..., C] or [..., C, K], or None.

    Returns:
        P; A, in float32, since its inverse amplifies rounding errors if keys are similar; Q e^b and K e^b, which read
        the state before the chunk; K e^(b_C - b), which writes to the state after it; and e^(b_C), None without g.
    """
    wide = k.to(torch.promote_types(k.dtype, torch.float32))
    if g is None:
        return (
            rows_by_head(q @ k.mT, k).tril().flatten(-3, -2),
            (wide @ wide.mT).tril(-1),
            q,
            k,
            k.view_as(k),
            None,
        )
    queries = rows_by_head(q, k)
    if g.ndim == q.ndim:
        reads = torch.cat([queries.to(wide), wide.unsqueeze(-3)], -3)
        writes = wide.unsqueeze(-3)
        products, read_in, k_out, decay = vector_decays(reads, writes, g.unsqueeze(-3))
        P = products[..., :-1, :, :]
        A = products[..., -1, :, :]
        q_in = read_in[..., :-1, :, :]
        k_in = read_in[..., -1, :, :]
        k_out = k_out.squeeze(-3)
        decay = decay.squeeze(-3)
    else:
        mask, enter, leave = scalar_decays(g)
        P = rows_by_head(q @ k.mT, k) * mask.unsqueeze(-3)
        A = (wide @ wide.mT) * mask
        q_in = enter.unsqueeze(-3) * queries
        k_in = enter * k
        k_out = leave * k
        decay = enter[..., -1:, :]
    P, q_in, k_in, k_out = (
        x.to(q.dtype) for x in (P.flatten(-3, -2), q_in.flatten(-3, -2), k_in, k_out)
    )
    return P, A.tril(-1), q_in, k_in, k_out, decay.mT


class _Pass(torch.autograd.Function):
    """The loop over chunks: X, O and S as in the first equations of the module's docstring.

    Tensors are [NC, B * H, C, ...], S is [B * H, K, V]. P and q have rows for all heads that read a state. `written`
    [NC, B * H, K, V] is added to the state after each chunk, or is None.
    """

    @staticmethod
    def forward(ctx, A, P, q, k, k_out, v, beta, decay, written, S):
        inverse = unit_lower_inverse(A)
        solve = (inverse * beta.mT).to(v.dtype)
        before = []
        R = torch.empty_like(v)
        X = torch.empty_like(v)
        o = v.new_empty(*q.shape[:3], v.shape[3])
        each = zip(*(x.unbind() for x in (q, k, k_out.mT, v, P, solve)))
        for n, (q_n, k_n, k_out_n, v_n, P_n, solve_n) in enumerate(each):
            # not of unbind: where its parts are written to, an exported graph has the example's number of rows
            R_n = R[n]
            X_n = X[n]
            o_n = o[n]
            before.append(S_n := S.to(v.dtype))
            torch.baddbmm(v_n, k_n, S_n, alpha=-1, out=R_n)
            torch.bmm(solve_n, R_n, out=X_n)
            torch.bmm(q_n, S_n, out=o_n).baddbmm_(P_n, X_n)
            S = add_product(S, k_out_n, X_n, None if decay is None else decay[n])
            if written is not None:
                S.add_(written[n])
        ctx.writes = written is not None
        ctx.save_for_backward(inverse, P, q, k, k_out, beta, decay, R, X, *before)
        return o, S

    @staticmethod
    @first_derivatives_only
    def backward(ctx, do, dS):
        inverse, P, q, k, k_out, beta, decay, R, X, *before = ctx.saved_tensors
        S = torch.stack(before)
        inverse = inverse.to(R.dtype)
        dS_after = torch.empty_like(S)
        W = torch.empty_like(R)
        negated_dR = torch.empty_like(R)  # W: of diag(beta) R
        for n in reversed(range(len(R))):
            dS_n = dS_after[n].copy_(dS)
            torch.bmm(inverse[n].mT, torch.baddbmm(P[n].mT @ do[n], k_out[n], dS_n), out=W[n])
            negated_dR[n] = -beta[n] * W[n]
            dS = add_product(dS, q[n].mT, do[n], None if decay is None else decay[n])
            dS = add_product(dS, k[n].mT, negated_dR[n])
        dbeta = (W * R).sum(-1, keepdim=True, dtype=beta.dtype)
        ddecay = None
        if decay is not None:
            ddecay = (
                (S * dS_after).sum(-1, keepdim=True, dtype=decay.dtype).sum_to_size(decay.shape)
            )
        dA = -W @ X.mT
        dP = do @ X.mT
        dq = do @ S.mT
        dk = negated_dR @ S.mT
        dk_out = X @ dS_after.mT
        return (
            dA,
            dP,
            dq,
            dk,
            dk_out,
            -negated_dR,
            dbeta,
            ddecay,
            dS_after if ctx.writes else None,
            dS,
        )
