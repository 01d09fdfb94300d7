"""Linear attention in Triton: programs walk a sequence chunk by chunk with a tile of the state in registers.

The letters are those of ops/contract.py; b is the sum of g from the start of the chunk; no exponent is positive:

    O = (Q e^b) S + A V,   A_ij = sum_d q_id k_jd e^(b_id - b_jd) for i >= j;   S <- e^(b_C) S + (K e^(b_C - b))^T V

Backward, with P = (dO V^T) for i >= j and dS the gradient of the state after the chunk:

    dQ = e^b (dO S^T) + sum_j P_ij e^(b_i - b_j) k_j           walked forwards, a tile of key channels at a time
    dK = e^(b_C - b) (V dS^T) + sum_i P_ij e^(b_i - b_j) q_i   walked backwards, likewise
    dV = (K e^(b_C - b)) dS + A^T dO                           walked backwards, a tile of value channels at a time
    dg_t = sum over t' >= t of the block of (q dq - k dk) + sum(S dS) at its end

The normaliser is one more value channel whose values are one: z beside S, and dd beside dO.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_memory.ops.kernel_report import Variant
from hf_memory.ops.linear_attention.reference import EPS, LinearState

CHUNK = 64  # tokens of a chunk, and of a block at whose ends the gate's gradient starts afresh
VECTOR_CHUNK = 16  # with a decay for each channel, scores are summed channel by channel
TILE = 4096  # numbers of the state that one program holds
NONE, SCALAR, VECTOR = 0, 1, 2  # kinds of decay


@triton.jit
def _bounds(cu_seqlens, n, T):
    """First token of sequence n, and the one after its last, among all rows."""
    if cu_seqlens is not None:
        start = tl.cast(tl.load(cu_seqlens + n), tl.int64)
        end = tl.cast(tl.load(cu_seqlens + n + 1), tl.int64)
    else:
        start = tl.cast(n, tl.int64) * T
        end = start + T
    return start, end


@triton.jit
def _block_slot(cu_seqlens, start, n, T, CHUNK: tl.constexpr):
    """Where the stored states of sequence n begin; packed sequences have room for a ragged block each."""
    return start // CHUNK + n if cu_seqlens is not None else tl.cast(n, tl.int64) * ((T + CHUNK - 1) // CHUNK)


@triton.jit
def _rows(x, t, in_t, h, heads, i, in_i, D: tl.constexpr):
    """x[t, h, i] of a tensor [tokens, heads, D], zero outside."""
    return tl.load(x + (t[:, None] * heads + h) * D + i[None, :], mask=in_t[:, None] & in_i[None, :], other=0.0)


@triton.jit
def _cumulative_decay(g, t, in_t, hv, HV, i_k, in_k, K: tl.constexpr, DECAY: tl.constexpr):
    """b [C, 1] or [C, BK], and its last row [1, 1] or [1, BK]."""
    if DECAY == 2:
        g_c = tl.cast(_rows(g, t, in_t, hv, HV, i_k, in_k, K), tl.float32)
    else:
        g_c = tl.cast(tl.load(g + t * HV + hv, mask=in_t, other=0.0), tl.float32)[:, None]
    return tl.cumsum(g_c, axis=0), tl.sum(g_c, axis=0)[None, :]


@triton.jit
def _row(x, here):
    """The row of x that `here` marks, by a sum: [C, D] -> [1, D]."""
    return tl.sum(tl.where(here[:, None], x, 0.0), axis=0)[None, :]


@triton.jit
def _column(x, here):
    """The column of x that `here` marks: [C, C] -> [C, 1]."""
    return tl.sum(tl.where(here[None, :], x, 0.0), axis=1)[:, None]


@triton.jit
def _scores(q, k, b, C: tl.constexpr, DECAY: tl.constexpr, PRECISION: tl.constexpr):
    """A [C, C] without scale; rows are queries."""
    rows = tl.arange(0, C)
    past = rows[:, None] >= rows[None, :]
    if DECAY == 2:
        A = tl.zeros([C, C], tl.float32)
        q32, k32 = tl.cast(q, tl.float32), tl.cast(k, tl.float32)
        for j in range(C):
            here = rows == j
            a_j = tl.sum(q32 * _row(k32, here) * tl.exp(tl.minimum(b - _row(b, here), 0.0)), axis=1)
            A = tl.where(here[None, :], a_j[:, None], A)
        A = tl.where(past, A, 0.0)
    else:
        A = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if DECAY == 1:
            A *= tl.exp(tl.minimum(b - tl.trans(b), 0.0))
        A = tl.where(past, A, 0.0)
    return A


@triton.jit
def _forward_kernel(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    v,  # [B, T, HV, V]
    g,  # [B, T, HV] or [B, T, HV, K] or None
    S0,  # [N, HV, K, V]
    z0,  # [N, HV, K] or None
    o,  # [B, T, HV, V]
    den,  # [B, T, HV] or None
    ST,  # [N, HV, K, V]
    zT,  # [N, HV, K] or None
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
    NORMALIZE: tl.constexpr,
    EPS: tl.constexpr,
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
    if NORMALIZE:
        z = tl.load(z0 + (n * HV + hv) * K + i_k, mask=in_k, other=0.0)
    for first in range(start, end, C):
        t = tl.cast(first, tl.int64) + tl.arange(0, C)
        in_t = t < end
        q_c = _rows(q, t, in_t, h, H, i_k, in_k, K)
        k_c = _rows(k, t, in_t, h, H, i_k, in_k, K)
        v_c = _rows(v, t, in_t, hv, HV, i_v, in_v, V)
        q_in, k_out = tl.cast(q_c, tl.float32), tl.cast(k_c, tl.float32)
        b = 0.0
        if DECAY > 0:
            b, last = _cumulative_decay(g, t, in_t, hv, HV, i_k, in_k, K, DECAY)
            q_in, k_out = q_in * tl.exp(b), k_out * tl.exp(last - b)
        A = _scores(q_c, k_c, b, C, DECAY, PRECISION)
        o_c = tl.dot(tl.cast(q_in, q_c.dtype), tl.cast(S, q_c.dtype), input_precision=PRECISION)
        o_c += tl.dot(tl.cast(A, v_c.dtype), v_c, input_precision=PRECISION)
        if NORMALIZE:
            den_c = tl.sum(q_in * z[None, :], axis=1) + tl.sum(A, axis=1) + EPS
            o_c /= den_c[:, None]
            if tl.program_id(0) == 0:
                tl.store(den + t * HV + hv, den_c, mask=in_t)
        else:
            o_c *= scale
        i_o = (t[:, None] * HV + hv) * V + i_v[None, :]
        tl.store(o + i_o, tl.cast(o_c, o.dtype.element_ty), mask=in_t[:, None] & in_v[None, :])
        if DECAY > 0:
            S *= tl.trans(tl.exp(last))
        S += tl.dot(tl.trans(tl.cast(k_out, v_c.dtype)), v_c, input_precision=PRECISION)
        if NORMALIZE:
            if DECAY > 0:
                z *= tl.sum(tl.exp(last), axis=0)
            z += tl.sum(k_out, axis=0)
    tl.store(ST + i_s, S, mask=in_s)
    if NORMALIZE:  # noqa: SIM102  (one is known at compile time, the other is not)
        if tl.program_id(0) == 0:
            tl.store(zT + (n * HV + hv) * K + i_k, z, mask=in_k)


@triton.jit
def _dq_kernel(
    k,  # [B, T, H, K]
    v,  # [B, T, HV, V]
    g,  # [B, T, HV] or [B, T, HV, K] or None
    S0,  # [N, HV, K, V]
    z0,  # [N, HV, K] or None
    do,  # [B, T, HV, V], of the numerator
    dd,  # [B, T, HV], of the denominator, or None
    dq,  # [B, T, HV, K] float32
    states,  # [slots, HV, V, K] float32: the state after each block of CHUNK tokens; or None
    normalizers,  # [slots, HV, K] float32 or None
    cu_seqlens,  # [N + 1] or None
    scale,
    T,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    CHUNK: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DECAY: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (i, n * HV + hv) holds S^T [BV, BK] for all value channels and the i-th tile of key channels."""
    n, hv = tl.program_id(1) // HV, tl.program_id(1) % HV
    h = hv // (HV // H)
    i_k, i_v = tl.program_id(0) * BK + tl.arange(0, BK), tl.arange(0, BV)
    in_k, in_v = i_k < K, i_v < V
    start, end = _bounds(cu_seqlens, n, T)
    slot = _block_slot(cu_seqlens, start, n, T, CHUNK)
    in_s = in_v[:, None] & in_k[None, :]
    i_s = tl.cast(n * HV + hv, tl.int64) * K * V + i_k[None, :] * V + i_v[:, None]
    S = tl.load(S0 + i_s, mask=in_s, other=0.0)
    if NORMALIZE:
        z = tl.load(z0 + (n * HV + hv) * K + i_k, mask=in_k, other=0.0)
    rows = tl.arange(0, C)
    past = rows[:, None] >= rows[None, :]
    for first in range(start, end, C):
        t = tl.cast(first, tl.int64) + rows
        in_t = t < end
        k_c = _rows(k, t, in_t, h, H, i_k, in_k, K)
        v_c = _rows(v, t, in_t, hv, HV, i_v, in_v, V)
        do_c = _rows(do, t, in_t, hv, HV, i_v, in_v, V)
        k_out = tl.cast(k_c, tl.float32)
        P = tl.dot(do_c, tl.trans(v_c), input_precision=PRECISION)
        dq_c = tl.dot(do_c, tl.cast(S, do_c.dtype), input_precision=PRECISION)
        if NORMALIZE:
            dd_c = tl.load(dd + t * HV + hv, mask=in_t, other=0.0)[:, None]
            P += dd_c
            dq_c += dd_c * z[None, :]
        P = tl.where(past, P, 0.0)
        if DECAY > 0:
            b, last = _cumulative_decay(g, t, in_t, hv, HV, i_k, in_k, K, DECAY)
            dq_c *= tl.exp(b)
            k_out *= tl.exp(last - b)
        if DECAY == 2:
            k32 = tl.cast(k_c, tl.float32)
            for j in range(C):
                here = rows == j
                dq_c += _column(P, here) * tl.exp(tl.minimum(b - _row(b, here), 0.0)) * _row(k32, here)
        else:
            if DECAY == 1:
                P *= tl.exp(tl.minimum(b - tl.trans(b), 0.0))
            dq_c += tl.dot(tl.cast(P, k_c.dtype), k_c, input_precision=PRECISION)
        tl.store(dq + (t[:, None] * HV + hv) * K + i_k[None, :], scale * dq_c, mask=in_t[:, None] & in_k[None, :])
        if DECAY > 0:
            S *= tl.exp(last)
        S += tl.dot(tl.trans(v_c), tl.cast(k_out, v_c.dtype), input_precision=PRECISION)
        if NORMALIZE:
            if DECAY > 0:
                z *= tl.sum(tl.exp(last), axis=0)
            z += tl.sum(k_out, axis=0)
        if DECAY > 0:
            done = tl.cast(first, tl.int64) + C - start
            if (done % CHUNK == 0) | (start + done >= end):
                block = (slot + (done - 1) // CHUNK) * HV + hv
                tl.store(states + block * V * K + i_v[:, None] * K + i_k[None, :], S, mask=in_s)
                if NORMALIZE:
                    tl.store(normalizers + block * K + i_k, z, mask=in_k)


@triton.jit
def _dk_kernel(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    v,  # [B, T, HV, V]
    g,  # [B, T, HV] or [B, T, HV, K] or None
    do,  # [B, T, HV, V]
    dd,  # [B, T, HV] or None
    dq,  # [B, T, HV, K] float32
    states,  # [slots, HV, V, K] float32 or None
    normalizers,  # [slots, HV, K] float32 or None
    dST,  # [N, HV, K, V]
    dzT,  # [N, HV, K] or None
    dk,  # [B, T, HV, K] float32
    dg,  # [tiles of K, B, T, HV] or [B, T, HV, K] float32, or None
    dz0,  # [N, HV, K] or None
    cu_seqlens,  # [N + 1] or None
    scale,
    T,
    tokens,  # B * T
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    CHUNK: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DECAY: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (i, n * HV + hv) holds dS^T [BV, BK] for all value channels and the i-th tile of key channels."""
    n, hv = tl.program_id(1) // HV, tl.program_id(1) % HV
    h = hv // (HV // H)
    i_k, i_v = tl.program_id(0) * BK + tl.arange(0, BK), tl.arange(0, BV)
    in_k, in_v = i_k < K, i_v < V
    start, end = _bounds(cu_seqlens, n, T)
    slot = _block_slot(cu_seqlens, start, n, T, CHUNK)
    in_s = in_v[:, None] & in_k[None, :]
    i_s = tl.cast(n * HV + hv, tl.int64) * K * V + i_k[None, :] * V + i_v[:, None]
    dS = tl.load(dST + i_s, mask=in_s, other=0.0)
    if NORMALIZE:
        dz = tl.load(dzT + (n * HV + hv) * K + i_k, mask=in_k, other=0.0)
    rows = tl.arange(0, C)
    later = rows[:, None] <= rows[None, :]  # rows are keys, columns queries
    tail = tl.zeros([1, BK], tl.float32)
    chunks = (end - start + C - 1) // C
    for back in range(chunks):
        done = (chunks - tl.cast(back, tl.int64)) * C  # tokens up to the end of this chunk
        t = start + done - C + rows
        in_t = t < end
        q_c = _rows(q, t, in_t, h, H, i_k, in_k, K)
        k_c = _rows(k, t, in_t, h, H, i_k, in_k, K)
        v_c = _rows(v, t, in_t, hv, HV, i_v, in_v, V)
        do_c = _rows(do, t, in_t, hv, HV, i_v, in_v, V)
        q_in = tl.cast(q_c, tl.float32)
        PT = tl.dot(v_c, tl.trans(do_c), input_precision=PRECISION)
        dk_c = tl.dot(v_c, tl.cast(dS, v_c.dtype), input_precision=PRECISION)
        if NORMALIZE:
            dd_c = tl.load(dd + t * HV + hv, mask=in_t, other=0.0)
            PT += dd_c[None, :]
            dk_c += dz[None, :]
        PT = tl.where(later, PT, 0.0) * scale
        if DECAY > 0:
            b, last = _cumulative_decay(g, t, in_t, hv, HV, i_k, in_k, K, DECAY)
            dk_c *= tl.exp(last - b)
            q_in *= tl.exp(b)
        if DECAY == 2:
            q32 = tl.cast(q_c, tl.float32)
            for i in range(C):
                here = rows == i
                dk_c += _column(PT, here) * tl.exp(tl.minimum(_row(b, here) - b, 0.0)) * _row(q32, here)
        else:
            if DECAY == 1:
                PT *= tl.exp(tl.minimum(tl.trans(b) - b, 0.0))
            dk_c += tl.dot(tl.cast(PT, q_c.dtype), q_c, input_precision=PRECISION)
        i_t = (t[:, None] * HV + hv) * K + i_k[None, :]
        in_tk = in_t[:, None] & in_k[None, :]
        tl.store(dk + i_t, dk_c, mask=in_tk)
        if DECAY > 0:
            if (done % CHUNK == 0) | (back == 0):
                block = (slot + (done - 1) // CHUNK) * HV + hv
                S = tl.load(states + block * V * K + i_v[:, None] * K + i_k[None, :], mask=in_s, other=0.0)
                tail = tl.sum(S * dS, axis=0)[None, :]
                if NORMALIZE:
                    tail += (tl.load(normalizers + block * K + i_k, mask=in_k, other=0.0) * dz)[None, :]
            db = tl.cast(q_c, tl.float32) * tl.load(dq + i_t, mask=in_tk, other=0.0) - tl.cast(k_c, tl.float32) * dk_c
            total = tl.sum(db, axis=0)[None, :]
            dg_c = total - tl.cumsum(db, axis=0) + db + tail
            tail += total
            if DECAY == 2:
                tl.store(dg + i_t, dg_c, mask=in_tk)
            else:
                i_g = (tl.program_id(0) * tl.cast(tokens, tl.int64) + t) * HV + hv
                tl.store(dg + i_g, tl.sum(dg_c, axis=1), mask=in_t)
            dS *= tl.exp(last)
        dS += tl.dot(tl.trans(do_c), tl.cast(q_in * scale, do_c.dtype), input_precision=PRECISION)
        if NORMALIZE:
            if DECAY > 0:
                dz *= tl.sum(tl.exp(last), axis=0)
            dz += tl.sum(q_in * dd_c[:, None], axis=0)
    if NORMALIZE:
        tl.store(dz0 + (n * HV + hv) * K + i_k, dz, mask=in_k)


@triton.jit
def _dv_kernel(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    g,  # [B, T, HV] or [B, T, HV, K] or None
    do,  # [B, T, HV, V]
    dST,  # [N, HV, K, V]
    dv,  # [B, T, HV, V]
    dS0,  # [N, HV, K, V]
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
    """Program (i, n * HV + hv) holds dS [BK, BV] for all key channels and the i-th tile of value channels."""
    n, hv = tl.program_id(1) // HV, tl.program_id(1) % HV
    h = hv // (HV // H)
    i_k, i_v = tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
    in_k, in_v = i_k < K, i_v < V
    start, end = _bounds(cu_seqlens, n, T)
    i_s = tl.cast(n * HV + hv, tl.int64) * K * V + i_k[:, None] * V + i_v[None, :]
    in_s = in_k[:, None] & in_v[None, :]
    dS = tl.load(dST + i_s, mask=in_s, other=0.0)
    chunks = (end - start + C - 1) // C
    for back in range(chunks):
        t = start + (chunks - 1 - tl.cast(back, tl.int64)) * C + tl.arange(0, C)
        in_t = t < end
        q_c = _rows(q, t, in_t, h, H, i_k, in_k, K)
        k_c = _rows(k, t, in_t, h, H, i_k, in_k, K)
        do_c = _rows(do, t, in_t, hv, HV, i_v, in_v, V)
        q_in, k_out = tl.cast(q_c, tl.float32), tl.cast(k_c, tl.float32)
        b = 0.0
        if DECAY > 0:
            b, last = _cumulative_decay(g, t, in_t, hv, HV, i_k, in_k, K, DECAY)
            q_in, k_out = q_in * tl.exp(b), k_out * tl.exp(last - b)
        A = _scores(q_c, k_c, b, C, DECAY, PRECISION) * scale
        dv_c = tl.dot(tl.cast(k_out, do_c.dtype), tl.cast(dS, do_c.dtype), input_precision=PRECISION)
        dv_c += tl.dot(tl.trans(tl.cast(A, do_c.dtype)), do_c, input_precision=PRECISION)
        i_o = (t[:, None] * HV + hv) * V + i_v[None, :]
        tl.store(dv + i_o, tl.cast(dv_c, dv.dtype.element_ty), mask=in_t[:, None] & in_v[None, :])
        if DECAY > 0:
            dS *= tl.trans(tl.exp(last))
        dS += tl.dot(tl.trans(tl.cast(q_in * scale, do_c.dtype)), do_c, input_precision=PRECISION)
    tl.store(dS0 + i_s, dS, mask=in_s)


def _decay_kind(g: Tensor | None) -> int:
    return NONE if g is None else SCALAR if g.ndim == 3 else VECTOR


def _constants(H: int, HV: int, K: int, V: int, decay: int, dtype: torch.dtype) -> tuple[dict, dict]:
    """Compile-time arguments: of the kernels that hold all key channels, and of those that hold all value channels."""
    width_k, width_v = max(16, triton.next_power_of_2(K)), max(16, triton.next_power_of_2(V))
    chunk = 16 if decay == VECTOR or dtype == torch.float32 else 32
    precision = "tf32x3" if dtype == torch.float32 else "tf32"  # three products keep float32; 16 bits know no tf32
    common = {"H": H, "HV": HV, "K": K, "V": V, "C": chunk, "DECAY": decay, "PRECISION": precision}
    tile = TILE if dtype != torch.float32 and max(width_k, width_v) > 64 else TILE // 2  # else registers spill
    by_value = {**common, "BK": width_k, "BV": min(width_v, max(16, tile // width_k))}
    by_key = {**common, "BK": min(width_k, max(16, tile // width_v)), "BV": width_v, "CHUNK": CHUNK}
    return by_value, by_key


def _launch(BK: int, BV: int) -> dict:
    """Warps by the size of the tile; no software pipelining, whose buffers the large tiles have no room for."""
    return {"num_warps": 8 if BK * BV >= TILE // 2 else 4, "num_stages": 1}


class _LinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g, S, z, scale, cu_seqlens):
        q, k, v, g, S, z = (None if x is None else x.contiguous() for x in (q, k, v, g, S, z))
        (B, T, H, K), (N, HV, _, V) = q.shape, S.shape
        by_value, _ = _constants(H, HV, K, V, _decay_kind(g), q.dtype)
        o, ST = torch.empty_like(v), torch.empty_like(S)
        den, zT = (None, None) if z is None else (S.new_empty(B, T, HV), torch.empty_like(z))
        _forward_kernel[(triton.cdiv(V, by_value["BV"]), N * HV)](
            q, k, v, g, S, z, o, den, ST, zT, cu_seqlens, scale, T,
            **by_value, NORMALIZE=z is not None, EPS=EPS, **_launch(by_value["BK"], by_value["BV"]),
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, g, S, z, o, den, cu_seqlens)
        ctx.scale = scale
        return (o, ST) if z is None else (o, ST, zT)

    @staticmethod
    def backward(ctx, do, dST, dzT=None):
        q, k, v, g, S, z, o, den, cu_seqlens = ctx.saved_tensors
        (H, K), (N, HV, _, V), scale = q.shape[2:], S.shape, ctx.scale
        by_value, _ = _constants(H, HV, K, V, _decay_kind(g), q.dtype)
        dd = None
        if z is not None:
            dd = -(do.float() * o.float()).sum(-1) / den
            do, dzT = (do.float() / den[..., None]).to(v.dtype), dzT.contiguous()
        do, dST = do.contiguous(), dST.contiguous()
        dq, dk, dg, dz0 = query_and_key_gradients(q, k, v, g, S, z, do, dd, dST, dzT, cu_seqlens, scale)
        dv, dS0 = torch.empty_like(v), torch.empty_like(S)
        _dv_kernel[(triton.cdiv(V, by_value["BV"]), N * HV)](
            q, k, g, do, dST, dv, dS0, cu_seqlens, scale, q.shape[1],
            **by_value, **_launch(by_value["BK"], by_value["BV"]),
        )  # fmt: skip
        return dq, dk, dv, dg, dS0, dz0, None, None


def query_and_key_gradients(q, k, v, g, S, z, do, dd, dST, dzT, cu_seqlens, scale):
    """dq, dk, dg and dz0, given the gradients of the numerator, the denominator and the final state; all contiguous."""
    (B, T, H, K), (N, HV, _, V) = q.shape, S.shape
    decay, normalize = _decay_kind(g), z is not None
    _, by_key = _constants(H, HV, K, V, decay, q.dtype)
    slots = (B * triton.cdiv(T, CHUNK) if cu_seqlens is None else T // CHUNK + N) if decay else 0
    states = S.new_empty(slots, HV, V, K) if decay else None
    normalizers = S.new_empty(slots, HV, K) if decay and normalize else None
    dq, dk = S.new_empty(B, T, HV, K), S.new_empty(B, T, HV, K)
    dz0 = torch.empty_like(z) if normalize else None
    tiles = triton.cdiv(K, by_key["BK"])
    dg = S.new_empty(tiles, B, T, HV) if decay == SCALAR else S.new_empty(B, T, HV, K) if decay else None
    launch = {**by_key, "NORMALIZE": normalize, **_launch(by_key["BK"], by_key["BV"])}
    _dq_kernel[(tiles, N * HV)](k, v, g, S, z, do, dd, dq, states, normalizers, cu_seqlens, scale, T, **launch)
    _dk_kernel[(tiles, N * HV)](
        q, k, v, g, do, dd, dq, states, normalizers, dST, dzT, dk, dg, dz0, cu_seqlens, scale, T, B * T, **launch
    )
    dq, dk = (x.unflatten(2, (H, -1)).sum(3).to(q.dtype) for x in (dq, dk))
    return dq, dk, dg.sum(0) if decay == SCALAR else dg, dz0


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state: Tensor | LinearState,
    scale: float,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | LinearState]:
    """Same function as the reference, for K and V up to 256."""
    if isinstance(state, LinearState):
        o, *state = _LinearAttention.apply(q, k, v, g, *state, 1.0, cu_seqlens)
        return o, LinearState(*state)
    return _LinearAttention.apply(q, k, v, g, state, None, scale, cu_seqlens)


_POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}


def variants() -> list[Variant]:
    """What is compiled ahead of time: each kernel for each kind of decay at the usual sizes of a head."""
    sizes = [(D, dtype) for D in (64, 128, 256) for dtype in _POINTERS]
    cases = [(D, decay, dtype) for D, dtype in sizes for decay in (NONE, SCALAR, VECTOR)]
    return [variant for case in cases for normalize in (False, True) for variant in _case(*case, normalize)]


def _case(D: int, decay: int, dtype: torch.dtype, normalize: bool) -> list[Variant]:
    by_value, by_key = _constants(8, 8, D, D, decay, dtype)
    name = f"{('none', 'scalar', 'vector')[decay]} {'normalized ' if normalize else ''}{D} {str(dtype)[6:]}"
    kernels = (
        (_forward_kernel, {**by_value, "NORMALIZE": normalize, "EPS": EPS}),
        (_dq_kernel, {**by_key, "NORMALIZE": normalize}),
        (_dk_kernel, {**by_key, "NORMALIZE": normalize}),
        (_dv_kernel, by_value),
    )
    absent = {"cu_seqlens"} | (set() if decay else {"g", "dg", "states"})
    absent |= set() if normalize else {"z0", "zT", "den", "dd", "dz0", "dzT"}
    absent |= set() if normalize and decay else {"normalizers"}
    narrow = {"q", "k", "v", "o", "do", "dv"}
    made = []
    for kernel, constants in kernels:
        signature = {}
        for argument in kernel.arg_names:
            if argument in absent:
                constants = {**constants, argument: None}
            elif argument not in constants:
                pointer = _POINTERS[dtype] if argument in narrow else "*fp32"
                signature[argument] = {"scale": "fp32", "T": "i32", "tokens": "i32"}.get(argument, pointer)
        launch = _launch(constants["BK"], constants["BV"])
        made.append(Variant(f"{kernel.__name__} {name}", kernel, signature, constants, **launch))
    return made
