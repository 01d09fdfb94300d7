"""The delta rule in Triton: programs walk a sequence chunk by chunk with a tile of the state in registers.

Forward, with the letters of chunk.py; E are the errors v - S^T k that each token finds:

    X = (I + A)^-1 diag(beta) (V - (K e^b) S),   E = V - (K e^b) S - A' X,   A = diag(beta) A'
    O = (Q e^b) S + P X,   S <- e^(b_C) S + (K e^(b_C - b))^T X

Backward, a kernel walks backwards and solves for the gradient D of X: then dV = diag(beta) D and dbeta = rowsum(D E).
What is left are gradients of reads and writes of a plain memory: it is read by k with -dV and then by q with dO, and in
between X is written at k. That is linear attention over twice as many tokens, whose kernels do the rest.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_memory.ops.kernel_report import Variant
from hf_memory.ops.linear_attention.kernels import (
    _bounds,
    _cumulative_decay,
    _decay_kind,
    _rows,
    _scores,
    query_and_key_gradients,
)

CHUNK = 16  # rows of the triangular system, solved by forward substitution in registers
TILE = 2048  # numbers of the state that one program holds; with more, the system in registers makes it spill


@triton.jit
def _unit_lower_inverse(A, C: tl.constexpr):
    """(I + A)^-1 for strictly lower A [C, C], a row after the other."""
    rows = tl.arange(0, C)
    inverse = tl.where(rows[:, None] == rows[None, :], 1.0, 0.0)
    for i in range(1, C):
        here = rows == i
        a_i = tl.sum(tl.where(here[:, None], A, 0.0), axis=0)  # [C]
        inverse = tl.where(here[:, None], inverse - tl.sum(a_i[:, None] * inverse, axis=0)[None, :], inverse)
    return inverse


@triton.jit
def _forward_kernel(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    v,  # [B, T, HV, V]
    beta,  # [B, T, HV]
    g,  # [B, T, HV] or [B, T, HV, K] or None
    S0,  # [N, HV, K, V]
    o,  # [B, T, HV, V]
    x,  # [B, T, HV, V]: what is written
    e,  # [B, T, HV, V] float32: errors
    ST,  # [N, HV, K, V]
    cu_seqlens,  # [N + 1] or None
    scale,
    T,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DECAY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (i, n * HV + hv) holds S [BK, BV] for all key channels and the i-th tile of value channels."""
    n, hv = tl.program_id(1) // HV, tl.program_id(1) % HV
    h = hv // (HV // H)
    i_k, i_v = tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
    in_k, in_v = i_k < K, i_v < V
    start, end = _bounds(cu_seqlens, n, T)
    i_s = tl.cast(n * HV + hv, tl.int64) * K * V + i_k[:, None] * V + i_v[None, :]
    in_s = in_k[:, None] & in_v[None, :]
    S = tl.load(S0 + i_s, mask=in_s, other=0.0)
    rows = tl.arange(0, C)
    before = rows[:, None] > rows[None, :]
    for first in range(start, end, C):
        t = tl.cast(first, tl.int64) + rows
        in_t = t < end
        q_c = _rows(q, t, in_t, h, H, i_k, in_k, K)
        k_c = _rows(k, t, in_t, h, H, i_k, in_k, K)
        v_c = tl.cast(_rows(v, t, in_t, hv, HV, i_v, in_v, V), tl.float32)
        beta_c = tl.cast(tl.load(beta + t * HV + hv, mask=in_t, other=0.0), tl.float32)[:, None]
        q_in, k_in, k_out = tl.cast(q_c, tl.float32), tl.cast(k_c, tl.float32), tl.cast(k_c, tl.float32)
        b = 0.0
        if DECAY > 0:
            b, last = _cumulative_decay(g, t, in_t, hv, HV, i_k, in_k, K, DECAY)
            q_in, k_in, k_out = q_in * tl.exp(b), k_in * tl.exp(b), k_out * tl.exp(last - b)
        A = tl.where(before, _scores(k_c, k_c, b, C, DECAY, PRECISION), 0.0)
        P = _scores(q_c, k_c, b, C, DECAY, PRECISION)
        S_c = tl.cast(S, q_c.dtype)
        error = v_c - tl.dot(tl.cast(k_in, q_c.dtype), S_c, input_precision=PRECISION)
        x_c = tl.dot(_unit_lower_inverse(beta_c * A, C), beta_c * error, input_precision="tf32x3")
        error -= tl.dot(A, x_c, input_precision="tf32x3")
        x_n = tl.cast(x_c, q_c.dtype)
        o_c = tl.dot(tl.cast(q_in, q_c.dtype), S_c, input_precision=PRECISION)
        o_c += tl.dot(tl.cast(P, q_c.dtype), x_n, input_precision=PRECISION)
        i_o = (t[:, None] * HV + hv) * V + i_v[None, :]
        in_o = in_t[:, None] & in_v[None, :]
        tl.store(o + i_o, tl.cast(scale * o_c, o.dtype.element_ty), mask=in_o)
        tl.store(x + i_o, tl.cast(x_c, x.dtype.element_ty), mask=in_o)
        tl.store(e + i_o, error, mask=in_o)
        if DECAY > 0:
            S *= tl.trans(tl.exp(last))
        S += tl.dot(tl.trans(tl.cast(k_out, q_c.dtype)), x_n, input_precision=PRECISION)
    tl.store(ST + i_s, S, mask=in_s)


@triton.jit
def _solve_kernel(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    beta,  # [B, T, HV]
    g,  # [B, T, HV] or [B, T, HV, K] or None
    do,  # [B, T, HV, V], times scale
    dST,  # [N, HV, K, V]
    dx,  # [B, T, HV, V] float32
    dS0,  # [N, HV, K, V]
    cu_seqlens,  # [N + 1] or None
    T,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DECAY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (i, n * HV + hv) holds dS [BK, BV]: D = (I + A)^-T (P^T dO + (K e^(b_C - b)) dS), backwards."""
    n, hv = tl.program_id(1) // HV, tl.program_id(1) % HV
    h = hv // (HV // H)
    i_k, i_v = tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
    in_k, in_v = i_k < K, i_v < V
    start, end = _bounds(cu_seqlens, n, T)
    i_s = tl.cast(n * HV + hv, tl.int64) * K * V + i_k[:, None] * V + i_v[None, :]
    in_s = in_k[:, None] & in_v[None, :]
    dS = tl.load(dST + i_s, mask=in_s, other=0.0)
    rows = tl.arange(0, C)
    before = rows[:, None] > rows[None, :]
    chunks = (end - start + C - 1) // C
    for back in range(chunks):
        t = start + (chunks - 1 - tl.cast(back, tl.int64)) * C + rows
        in_t = t < end
        q_c = _rows(q, t, in_t, h, H, i_k, in_k, K)
        k_c = _rows(k, t, in_t, h, H, i_k, in_k, K)
        do_c = _rows(do, t, in_t, hv, HV, i_v, in_v, V)
        beta_c = tl.cast(tl.load(beta + t * HV + hv, mask=in_t, other=0.0), tl.float32)[:, None]
        q_in, k_in, k_out = tl.cast(q_c, tl.float32), tl.cast(k_c, tl.float32), tl.cast(k_c, tl.float32)
        b = 0.0
        if DECAY > 0:
            b, last = _cumulative_decay(g, t, in_t, hv, HV, i_k, in_k, K, DECAY)
            q_in, k_in, k_out = q_in * tl.exp(b), k_in * tl.exp(b), k_out * tl.exp(last - b)
        A = tl.where(before, _scores(k_c, k_c, b, C, DECAY, PRECISION), 0.0)
        P = _scores(q_c, k_c, b, C, DECAY, PRECISION)
        d_c = tl.dot(tl.trans(tl.cast(P, q_c.dtype)), do_c, input_precision=PRECISION)
        d_c += tl.dot(tl.cast(k_out, q_c.dtype), tl.cast(dS, q_c.dtype), input_precision=PRECISION)
        d_c = tl.dot(tl.trans(_unit_lower_inverse(beta_c * A, C)), d_c, input_precision="tf32x3")
        i_o = (t[:, None] * HV + hv) * V + i_v[None, :]
        tl.store(dx + i_o, d_c, mask=in_t[:, None] & in_v[None, :])
        if DECAY > 0:
            dS *= tl.trans(tl.exp(last))
        dS += tl.dot(tl.trans(tl.cast(q_in, q_c.dtype)), do_c, input_precision=PRECISION)
        dS -= tl.dot(tl.trans(tl.cast(k_in, q_c.dtype)), tl.cast(beta_c * d_c, q_c.dtype), input_precision=PRECISION)
    tl.store(dS0 + i_s, dS, mask=in_s)


def _constants(H: int, HV: int, K: int, V: int, decay: int, dtype: torch.dtype) -> dict:
    """Compile-time arguments and launch options of both kernels."""
    width_k, width_v = max(16, triton.next_power_of_2(K)), max(16, triton.next_power_of_2(V))
    return {
        "H": H, "HV": HV, "K": K, "V": V, "C": CHUNK, "DECAY": decay,
        "BK": width_k, "BV": min(width_v, max(16, TILE // width_k)),
        "PRECISION": "tf32x3" if dtype == torch.float32 else "tf32",
        "num_warps": 8, "num_stages": 1,
    }  # fmt: skip


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, beta, g, S, scale, cu_seqlens):
        q, k, v, beta, g, S = (None if x is None else x.contiguous() for x in (q, k, v, beta, g, S))
        (H, K), (N, HV, _, V) = q.shape[2:], S.shape
        constants = _constants(H, HV, K, V, _decay_kind(g), q.dtype)
        o, x, e, ST = torch.empty_like(v), torch.empty_like(v), torch.empty_like(v, dtype=S.dtype), torch.empty_like(S)
        _forward_kernel[(triton.cdiv(V, constants["BV"]), N * HV)](
            q, k, v, beta, g, S, o, x, e, ST, cu_seqlens, scale, q.shape[1], **constants
        )
        ctx.save_for_backward(q, k, beta, g, S, x, e, cu_seqlens)
        ctx.scale = scale
        return o, ST

    @staticmethod
    def backward(ctx, do, dST):
        q, k, beta, g, S, x, e, cu_seqlens = ctx.saved_tensors
        (T, H, K), (N, HV, _, V) = q.shape[1:], S.shape
        constants = _constants(H, HV, K, V, _decay_kind(g), q.dtype)
        do, dST = (ctx.scale * do.float()).to(q.dtype).contiguous(), dST.contiguous()
        dx, dS0 = torch.empty_like(e), torch.empty_like(S)
        _solve_kernel[(triton.cdiv(V, constants["BV"]), N * HV)](
            q, k, beta, g, do, dST, dx, dS0, cu_seqlens, T, **constants
        )
        dv = (beta[..., None] * dx).to(q.dtype)
        nothing = torch.zeros_like
        twice = (
            _in_turn(k, q),
            _in_turn(nothing(k), k),
            _in_turn(nothing(x), x),
            g if g is None else _in_turn(g, nothing(g)),
        )
        bounds = None if cu_seqlens is None else 2 * cu_seqlens
        dy = _in_turn(-dv, do)
        dq, dk, dg, _ = query_and_key_gradients(*twice, S, None, dy, None, dST, None, bounds, 1.0)
        (dk_read, dq), dk = _apart(dq), _apart(dk)[1]
        dbeta = (dx * e).sum(-1).to(beta.dtype)
        return dq, dk + dk_read, dv, dbeta, None if g is None else _apart(dg)[0], dS0, None, None


def _in_turn(x: Tensor, y: Tensor) -> Tensor:
    """x_1, y_1, x_2, y_2 ...: [B, T, ...] twice -> [B, 2 * T, ...]."""
    return torch.stack([x, y], dim=2).flatten(1, 2)


def _apart(z: Tensor) -> tuple[Tensor, Tensor]:
    """What `_in_turn` joined."""
    return z[:, ::2], z[:, 1::2]


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    state: Tensor,
    scale: float,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Same function as the reference, for K and V up to 256."""
    return _DeltaRule.apply(q, k, v, beta, g, state, scale, cu_seqlens)


_POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}


def variants() -> list[Variant]:
    """What is compiled ahead of time: both kernels for each kind of decay at the usual sizes of a head."""
    sizes = [(D, dtype) for D in (64, 128, 256) for dtype in _POINTERS]
    return [variant for D, dtype in sizes for decay in (0, 1, 2) for variant in _case(D, decay, dtype)]


def _case(D: int, decay: int, dtype: torch.dtype) -> list[Variant]:
    constants = _constants(8, 8, D, D, decay, dtype)
    launch = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    absent = {"cu_seqlens": None} | ({} if decay else {"g": None})
    narrow = {"q", "k", "v", "o", "x", "do"}
    made = []
    for kernel in (_forward_kernel, _solve_kernel):
        signature = {
            argument: {"scale": "fp32", "T": "i32"}.get(argument, _POINTERS[dtype] if argument in narrow else "*fp32")
            for argument in kernel.arg_names
            if argument not in constants and argument not in absent
        }
        name = f"{kernel.__name__} {('none', 'scalar', 'vector')[decay]} {D} {str(dtype)[6:]}"
        made.append(Variant(name, kernel, signature, {**constants, **absent}, **launch))
    return made
