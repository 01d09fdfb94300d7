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

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_memory.ops.kernel_report import POINTERS, Variant, variant
from hf_memory.ops.linear_attention.reference import EPS, LinearState
from hf_memory.ops.segments import (
    boundary_states,
    cut,
    scan_constants,
    scan_kernel,
    segment_length,
    sum_constants,
    sum_kernel,
)
from hf_memory.ops.tiles import (
    column_of,
    cumulative_decay,
    load_rows,
    program,
    read,
    row_of,
    scores,
    sequence_bounds,
    split_dot,
    write,
    write_transposed,
)

CHUNK = 64  # tokens of a block at whose ends the gate's gradient starts afresh
TILE = 4096  # numbers of the state that one program holds
NONE, SCALAR, VECTOR = 0, 1, 2  # kinds of decay


@triton.jit
def _block_slot(cu_seqlens, start, n, T, CHUNK: tl.constexpr):
    """Where the stored states of sequence n begin; packed sequences have room for a ragged block each."""
    return start // CHUNK + n if cu_seqlens is not None else n * ((T + CHUNK - 1) // CHUNK)


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
    PARTS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    EPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Holds S [BK, BV] for all key channels and the i-th tile of value channels."""
    n, hv, tile = program(HV, (V + BV - 1) // BV)
    h = hv // (HV // H)
    i_k, i_v = tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    in_k, in_v = i_k < K, i_v < V
    start, end = sequence_bounds(cu_seqlens, n, T)
    i_s = (n * HV + hv) * K * V + i_k[:, None] * V + i_v[None, :]
    in_s = in_k[:, None] & in_v[None, :]
    S = tl.load(S0 + i_s, mask=in_s, other=0.0)
    if NORMALIZE:
        z = tl.load(z0 + (n * HV + hv) * K + i_k, mask=in_k, other=0.0)
    for first in range(start, end, C):
        t = tl.cast(first, tl.int64) + tl.arange(0, C)
        in_t = t < end
        q_c = load_rows(q, t, in_t, h, H, i_k, in_k, K)
        k_c = load_rows(k, t, in_t, h, H, i_k, in_k, K)
        v_c = load_rows(v, t, in_t, hv, HV, i_v, in_v, V)
        b, enter, leave = 0.0, 1.0, 1.0
        if DECAY > 0:
            b, last = cumulative_decay(g, t, in_t, hv, HV, i_k, in_k, K, DECAY)
            enter, leave = tl.exp2(b), tl.exp2(last - b)
        if NORMALIZE:
            den_c = tl.sum(tl.cast(q_c, tl.float32) * enter * z[None, :], axis=1)
            if DECAY > 0:
                z *= tl.sum(tl.exp2(last), axis=0)
            z += tl.sum(tl.cast(k_c, tl.float32) * leave, axis=0)
        A = scores(q_c, k_c, b, C, DECAY, False, PARTS, PRECISION)
        o_c = read(q_c, S, enter, DECAY, PARTS, PRECISION)
        o_c += tl.dot(tl.cast(A, v_c.dtype), v_c, input_precision=PRECISION)
        if NORMALIZE:
            den_c += tl.sum(A, axis=1) + EPS
            o_c /= den_c[:, None]
            if tile == 0:
                tl.store(den + t * HV + hv, den_c, mask=in_t)
        else:
            o_c *= scale
        i_o = (t[:, None] * HV + hv) * V + i_v[None, :]
        tl.store(o + i_o, tl.cast(o_c, o.dtype.element_ty), mask=in_t[:, None] & in_v[None, :])
        if DECAY > 0:
            S *= tl.trans(tl.exp2(last))
        S += write(k_c, v_c, leave, DECAY, PRECISION)
    tl.store(ST + i_s, S, mask=in_s)
    if NORMALIZE:  # noqa: SIM102  (one is known at compile time, the other is not)
        if tile == 0:
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
    PARTS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Holds S^T [BV, BK] for all value channels and the i-th tile of key channels."""
    n, hv, tile = program(HV, (K + BK - 1) // BK)
    h = hv // (HV // H)
    i_k, i_v = tile * BK + tl.arange(0, BK), tl.arange(0, BV)
    in_k, in_v = i_k < K, i_v < V
    start, end = sequence_bounds(cu_seqlens, n, T)
    slot = _block_slot(cu_seqlens, start, n, T, CHUNK)
    in_s = in_v[:, None] & in_k[None, :]
    i_s = (n * HV + hv) * K * V + i_k[None, :] * V + i_v[:, None]
    S = tl.load(S0 + i_s, mask=in_s, other=0.0)
    if NORMALIZE:
        z = tl.load(z0 + (n * HV + hv) * K + i_k, mask=in_k, other=0.0)
    rows = tl.arange(0, C)
    past = rows[:, None] >= rows[None, :]
    for first in range(start, end, C):
        t = tl.cast(first, tl.int64) + rows
        in_t = t < end
        k_c = load_rows(k, t, in_t, h, H, i_k, in_k, K)
        v_c = load_rows(v, t, in_t, hv, HV, i_v, in_v, V)
        do_c = load_rows(do, t, in_t, hv, HV, i_v, in_v, V)
        leave = 1.0
        P = split_dot(do_c, tl.trans(v_c), PARTS, PRECISION)
        dq_c = split_dot(do_c, tl.cast(S, do_c.dtype), PARTS, PRECISION)
        if NORMALIZE:
            dd_c = tl.load(dd + t * HV + hv, mask=in_t, other=0.0)[:, None]
            P += dd_c
            dq_c += dd_c * z[None, :]
        P = tl.where(past, P, 0.0)
        if DECAY > 0:
            b, last = cumulative_decay(g, t, in_t, hv, HV, i_k, in_k, K, DECAY)
            dq_c *= tl.exp2(b)
            leave = tl.exp2(last - b)
        if DECAY == 2:
            k32 = tl.cast(k_c, tl.float32)
            for j in range(C):
                here = rows == j
                dq_c += column_of(P, here) * tl.exp2(tl.minimum(b - row_of(b, here), 0.0)) * row_of(k32, here)
        else:
            if DECAY == 1:
                P *= tl.exp2(tl.minimum(b - tl.sum(b, axis=1)[None, :], 0.0))
            dq_c += tl.dot(tl.cast(P, k_c.dtype), k_c, input_precision=PRECISION)
        tl.store(dq + (t[:, None] * HV + hv) * K + i_k[None, :], dq_c, mask=in_t[:, None] & in_k[None, :])
        if DECAY > 0:
            S *= tl.exp2(last)
        S += write_transposed(k_c, v_c, leave, DECAY, PRECISION)
        if NORMALIZE:
            if DECAY > 0:
                z *= tl.sum(tl.exp2(last), axis=0)
            z += tl.sum(tl.cast(k_c, tl.float32) * leave, axis=0)
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
    PARTS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Holds dS^T [BV, BK] for all value channels and the i-th tile of key channels."""
    n, hv, tile = program(HV, (K + BK - 1) // BK)
    h = hv // (HV // H)
    i_k, i_v = tile * BK + tl.arange(0, BK), tl.arange(0, BV)
    in_k, in_v = i_k < K, i_v < V
    start, end = sequence_bounds(cu_seqlens, n, T)
    slot = _block_slot(cu_seqlens, start, n, T, CHUNK)
    in_s = in_v[:, None] & in_k[None, :]
    i_s = (n * HV + hv) * K * V + i_k[None, :] * V + i_v[:, None]
    dS = tl.load(dST + i_s, mask=in_s, other=0.0)
    if NORMALIZE:
        dz = tl.load(dzT + (n * HV + hv) * K + i_k, mask=in_k, other=0.0)
    rows = tl.arange(0, C)
    later = rows[:, None] <= rows[None, :]  # rows are keys, columns queries
    tail = tl.zeros([1, BK if DECAY == 2 else 1], tl.float32)
    chunks = (end - start + C - 1) // C
    for back in range(chunks):
        done = (chunks - tl.cast(back, tl.int64)) * C  # tokens up to the end of this chunk
        if DECAY > 0:  # noqa: SIM102  (one is known at compile time, the other is not)
            if (done % CHUNK == 0) | (back == 0):
                block = (slot + (done - 1) // CHUNK) * HV + hv
                S = tl.load(states + block * V * K + i_v[:, None] * K + i_k[None, :], mask=in_s, other=0.0)
                end_sum = tl.sum(S * dS, axis=0)[None, :]
                if NORMALIZE:
                    end_sum += (tl.load(normalizers + block * K + i_k, mask=in_k, other=0.0) * dz)[None, :]
                tail = end_sum if DECAY == 2 else tl.sum(end_sum, axis=1)[:, None]
        t = start + done - C + rows
        in_t = t < end
        q_c = load_rows(q, t, in_t, h, H, i_k, in_k, K)
        k_c = load_rows(k, t, in_t, h, H, i_k, in_k, K)
        v_c = load_rows(v, t, in_t, hv, HV, i_v, in_v, V)
        do_c = load_rows(do, t, in_t, hv, HV, i_v, in_v, V)
        enter = 1.0
        PT = split_dot(v_c, tl.trans(do_c), PARTS, PRECISION)
        dk_c = split_dot(v_c, tl.cast(dS, v_c.dtype), PARTS, PRECISION)
        if NORMALIZE:
            dd_c = tl.load(dd + t * HV + hv, mask=in_t, other=0.0)
            PT += dd_c[None, :]
            dk_c += dz[None, :]
        PT = tl.where(later, PT, 0.0)
        if DECAY > 0:
            b, last = cumulative_decay(g, t, in_t, hv, HV, i_k, in_k, K, DECAY)
            dk_c *= tl.exp2(last - b)
            enter = tl.exp2(b)
        if DECAY == 2:
            q32 = tl.cast(q_c, tl.float32)
            for i in range(C):
                here = rows == i
                dk_c += column_of(PT, here) * tl.exp2(tl.minimum(row_of(b, here) - b, 0.0)) * row_of(q32, here)
        else:
            if DECAY == 1:
                PT *= tl.exp2(tl.minimum(tl.sum(b, axis=1)[None, :] - b, 0.0))
            dk_c += tl.dot(tl.cast(PT, q_c.dtype), q_c, input_precision=PRECISION)
        i_t = (t[:, None] * HV + hv) * K + i_k[None, :]
        in_tk = in_t[:, None] & in_k[None, :]
        tl.store(dk + i_t, dk_c, mask=in_tk)
        if DECAY > 0:
            db = tl.cast(q_c, tl.float32) * tl.load(dq + i_t, mask=in_tk, other=0.0) - tl.cast(k_c, tl.float32) * dk_c
            if DECAY == 1:
                db = tl.sum(db, axis=1)[:, None]
            total = tl.sum(db, axis=0)[None, :]
            dg_c = total - tl.cumsum(db, axis=0) + db + tail
            tail += total
            if DECAY == 2:
                tl.store(dg + i_t, dg_c, mask=in_tk)
            else:
                i_g = (tl.cast(tile, tl.int64) * tokens + t) * HV + hv
                tl.store(dg + i_g, tl.sum(dg_c, axis=1), mask=in_t)
            dS *= tl.exp2(last)
        dS += write_transposed(q_c, do_c, enter, DECAY, PRECISION)
        if NORMALIZE:
            if DECAY > 0:
                dz *= tl.sum(tl.exp2(last), axis=0)
            dz += tl.sum(tl.cast(q_c, tl.float32) * enter * dd_c[:, None], axis=0)
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
    T,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DECAY: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Holds dS [BK, BV] for all key channels and the i-th tile of value channels."""
    n, hv, tile = program(HV, (V + BV - 1) // BV)
    h = hv // (HV // H)
    i_k, i_v = tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    in_k, in_v = i_k < K, i_v < V
    start, end = sequence_bounds(cu_seqlens, n, T)
    i_s = (n * HV + hv) * K * V + i_k[:, None] * V + i_v[None, :]
    in_s = in_k[:, None] & in_v[None, :]
    dS = tl.load(dST + i_s, mask=in_s, other=0.0)
    chunks = (end - start + C - 1) // C
    for back in range(chunks):
        t = start + (chunks - 1 - tl.cast(back, tl.int64)) * C + tl.arange(0, C)
        in_t = t < end
        q_c = load_rows(q, t, in_t, h, H, i_k, in_k, K)
        k_c = load_rows(k, t, in_t, h, H, i_k, in_k, K)
        do_c = load_rows(do, t, in_t, hv, HV, i_v, in_v, V)
        b, enter, leave = 0.0, 1.0, 1.0
        if DECAY > 0:
            b, last = cumulative_decay(g, t, in_t, hv, HV, i_k, in_k, K, DECAY)
            enter, leave = tl.exp2(b), tl.exp2(last - b)
        A = scores(q_c, k_c, b, C, DECAY, True, PARTS, PRECISION)
        dv_c = read(k_c, dS, leave, DECAY, PARTS, PRECISION)
        dv_c += tl.dot(tl.cast(A, do_c.dtype), do_c, input_precision=PRECISION)
        i_o = (t[:, None] * HV + hv) * V + i_v[None, :]
        tl.store(dv + i_o, tl.cast(dv_c, dv.dtype.element_ty), mask=in_t[:, None] & in_v[None, :])
        if DECAY > 0:
            dS *= tl.trans(tl.exp2(last))
        dS += write(q_c, do_c, enter, DECAY, PRECISION)
    tl.store(dS0 + i_s, dS, mask=in_s)


def _decay_kind(g: Tensor | None) -> int:
    return NONE if g is None else SCALAR if g.ndim == 3 else VECTOR


def _constants(H: int, HV: int, K: int, V: int, decay: int, dtype: torch.dtype) -> tuple[dict, dict]:
    """Compile-time arguments and launch options, found by counting registers (kernel_report).

    Those of the kernels that hold all key channels, and of those that hold all value channels. Four warps share the
    rows of a chunk of 64 and the tensor cores of Hopper; more of them would repeat one another's products.
    """
    width_k, width_v = max(16, triton.next_power_of_2(K)), max(16, triton.next_power_of_2(V))
    narrow, wide = dtype != torch.float32, max(width_k, width_v) > 128
    rows = 64 if narrow and decay != VECTOR and not wide else 32 if narrow and decay != VECTOR else 16
    precision = "tf32" if narrow else "tf32x3"  # three products keep float32; 16 bits know no tf32
    tile = TILE if narrow and max(width_k, width_v) > 64 else TILE // 2
    common = {"H": H, "HV": HV, "K": K, "V": V, "DECAY": decay, "PRECISION": precision, "num_stages": 1}
    common["num_warps"] = 8 if wide or not narrow or decay == VECTOR else 4
    by_value = {"C": rows, "BK": width_k, "BV": min(width_v, max(16, tile // width_k))}
    by_key = {"C": min(rows, 32), "BK": min(width_k, max(16, tile // width_v)), "BV": width_v, "CHUNK": CHUNK}
    by_value["PARTS"] = max(1, width_k // 32) if wide or not narrow else 1
    by_key["PARTS"] = max(1, width_v // 32) if width_v > 64 or not narrow else 1
    return {**common, **by_value}, {**common, **by_key}


def _constants_of(q: Tensor, v: Tensor, g: Tensor | None) -> tuple[dict, dict]:
    return _constants(q.shape[2], v.shape[2], q.shape[3], v.shape[3], _decay_kind(g), q.dtype)


def contiguous(*tensors: Tensor | None) -> list[Any]:
    """What kernels index."""
    return [None if x is None else x.contiguous() for x in tensors]


def or_empty(like: Tensor, *tensors: Tensor | None) -> Any:
    """Custom ops return tensors alone."""
    return tuple(like.new_empty(0) if x is None else x for x in tensors)


@torch.library.custom_op("hf_memory::linear_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    S: Tensor,
    z: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    segment: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o, the final S and z, the denominators, and S and z before each segment; empty where there are none."""
    q, k, v, g, S, z = contiguous(q, k, v, g, S, z)
    (B, T), (HV, V) = q.shape[:2], v.shape[2:]
    constants, _ = _constants_of(q, v, g)
    segments = cut(cu_seqlens, B, T, segment, q) if segment else None
    if segments is not None:
        S, z = boundary_states(segments, k, v, None, g, S, z)
        cu_seqlens = segments.bounds
    o, ST = torch.empty_like(v), torch.empty_like(S)
    den, zT = (None, None) if z is None else (S.new_empty(B, T, HV), torch.empty_like(z))
    _forward_kernel[(S.shape[0] * HV * triton.cdiv(V, constants["BV"]),)](
        q, k, v, g, S, z, o, den, ST, zT, cu_seqlens, scale, T,
        **constants, NORMALIZE=z is not None, EPS=EPS,
    )  # fmt: skip
    if segments is None:
        return or_empty(ST, o, ST, zT, den, None, None)
    last = segments.first[1:] - 1
    return or_empty(ST, o, ST[last], None if zT is None else zT[last], den, S, z)


@_forward.register_fake
def _(q, k, v, g, S, z, cu_seqlens, scale, segment):
    M = q.shape[0] * q.shape[1] // segment + S.shape[0] if segment else 0
    den = None if z is None else S.new_empty(v.shape[:3])
    zT, normalizers = (None, None) if z is None else (z.new_empty(z.shape), z.new_empty(M, *z.shape[1:]))
    states, normalizers = (S.new_empty(M, *S.shape[1:]), normalizers) if segment else (None, None)
    return or_empty(S, v.new_empty(v.shape), S.new_empty(S.shape), zT, den, states, normalizers)


@torch.library.custom_op("hf_memory::linear_attention_backward", mutates_args=())
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    S: Tensor,
    z: Tensor | None,
    do: Tensor,
    dd: Tensor | None,
    dST: Tensor,
    dzT: Tensor | None,
    cu_seqlens: Tensor | None,
    segment: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dg, dS0 and dz0; empty where there are none.

    `S` and `z` are the states before each segment, `do` and `dd` the gradients of the numerator, times the
    scale of its queries, and of the denominator.
    """
    q, k, v, g, do, dd, dST, dzT = contiguous(q, k, v, g, do, dd, dST, dzT)
    (B, T), (HV, V) = q.shape[:2], v.shape[2:]
    constants, _ = _constants_of(q, v, g)
    segments = cut(cu_seqlens, B, T, segment, q) if segment else None
    if segments is not None:
        dST, dzT = boundary_states(segments, q, do, dd, g, dST, dzT, backwards=True)
        cu_seqlens = segments.bounds
    dq, dk, dg, dz0 = query_and_key_gradients(q, k, v, g, S, z, do, dd, dST, dzT, cu_seqlens)
    dv, dS0 = torch.empty_like(v), torch.empty_like(S)
    _dv_kernel[(S.shape[0] * HV * triton.cdiv(V, constants["BV"]),)](
        q, k, g, do, dST, dv, dS0, cu_seqlens, T, **constants
    )
    if segments is not None:
        dS0, dz0 = dS0[segments.first[:-1]], None if dz0 is None else dz0[segments.first[:-1]]
    return or_empty(S, dq, dk, dv, dg, dS0, dz0)


@_backward.register_fake
def _(q, k, v, g, S, z, do, dd, dST, dzT, cu_seqlens, segment):
    wide = (None if x is None else S.new_empty(x.shape) for x in (g, dST, dzT))
    return or_empty(S, *(x.new_empty(x.shape) for x in (q, k, v)), *wide)


def _save(ctx, inputs, output):
    q, k, v, g, S, z, cu_seqlens, ctx.scale, ctx.segment = inputs
    o, _, _, den, states, normalizers = output
    if ctx.segment:
        S, z = states, None if z is None else normalizers
    ctx.save_for_backward(q, k, v, g, S, z, cu_seqlens, *((None, None) if z is None else (o, den)))


def _gradients(ctx, do, dST, dzT, *_):
    q, k, v, g, S, z, cu_seqlens, o, den = ctx.saved_tensors
    dd, wide = None, do.float()
    if z is None:
        do = (ctx.scale * wide).to(v.dtype)
    else:
        dd = -(wide * o.float()).sum(-1) / den
        do = (wide / den[..., None]).to(v.dtype)
    dzT = None if z is None else dzT
    dq, dk, dv, dg, dS0, dz0 = _backward(q, k, v, g, S, z, do, dd, dST, dzT, cu_seqlens, ctx.segment)
    return dq, dk, dv, None if g is None else dg.to(g.dtype), dS0, None if z is None else dz0, None, None, None


_forward.register_autograd(_gradients, setup_context=_save)


def query_and_key_gradients(q, k, v, g, S, z, do, dd, dST, dzT, cu_seqlens):
    """dq, dk, dg and dz0, given the gradients of the numerator, the denominator and the final state; all contiguous."""
    (B, T, H, K), (N, HV, _, V) = q.shape, S.shape
    decay, normalize = _decay_kind(g), z is not None
    _, by_key = _constants(H, HV, K, V, decay, q.dtype)
    slots = (B * triton.cdiv(T, CHUNK) if cu_seqlens is None else B * T // CHUNK + N) if decay else 0
    states = S.new_empty(slots, HV, V, K) if decay else None
    normalizers = S.new_empty(slots, HV, K) if decay and normalize else None
    dq, dk = S.new_empty(B, T, HV, K), S.new_empty(B, T, HV, K)
    dz0 = torch.empty_like(z) if normalize else None
    tiles = triton.cdiv(K, by_key["BK"])
    dg = S.new_empty(tiles, B, T, HV) if decay == SCALAR else S.new_empty(B, T, HV, K) if decay else None
    launch = {**by_key, "NORMALIZE": normalize}
    grid = (N * HV * tiles,)
    _dq_kernel[grid](k, v, g, S, z, do, dd, dq, states, normalizers, cu_seqlens, T, **launch)
    _dk_kernel[grid](q, k, v, g, do, dd, dq, states, normalizers, dST, dzT, dk, dg, dz0, cu_seqlens, T, B * T, **launch)
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
    S, z = state if isinstance(state, LinearState) else (state, None)
    constants, _ = _constants_of(q, v, g)
    programs = v.shape[2] * triton.cdiv(v.shape[3], constants["BV"])
    segment = segment_length(q.shape[0] * q.shape[1], S.shape[0], programs)
    o, ST, zT, *_ = _forward(q, k, v, g, S, z, cu_seqlens, scale if z is None else 1.0, segment)
    return o, ST if z is None else LinearState(ST, zT)


def variants() -> list[Variant]:
    """What is compiled ahead of time: each kernel for each kind of decay at the usual sizes of a head."""
    sizes = [(D, dtype) for D in (64, 128, 256) for dtype in POINTERS]
    cases = [(D, decay, dtype) for D, dtype in sizes for decay in (NONE, SCALAR, VECTOR)]
    return [made for case in cases for normalize in (False, True) for made in _case(*case, normalize)]


def _case(D: int, decay: int, dtype: torch.dtype, normalize: bool) -> list[Variant]:
    by_value, by_key = _constants(8, 8, D, D, decay, dtype)
    options = {"NORMALIZE": normalize}
    absent = {"cu_seqlens"} | (set() if decay else {"g", "dg", "states", "decay"})
    absent |= set() if normalize else {"z0", "zT", "den", "dd", "dz0", "dzT", "w", "own_z"}
    absent |= set() if normalize and decay else {"normalizers"}
    sums, scan = sum_constants(8, 8, D, D, decay, dtype), scan_constants(8, D, D)
    kernels = (
        (_forward_kernel, {**by_value, **options, "EPS": EPS}),
        (_dq_kernel, {**by_key, **options}),
        (_dk_kernel, {**by_key, **options}),
        (_dv_kernel, by_value),
        (sum_kernel, {**sums, **options, "BACKWARDS": True}),
        (scan_kernel, {**scan, "BACKWARDS": True}),
    )
    narrow = {"q", "k", "v", "o", "do", "dv", "x", "y"}
    name = f"{('none', 'scalar', 'vector')[decay]} {'normalized ' if normalize else ''}{D} {str(dtype)[6:]}"
    return [variant(f"{kernel.__name__} {name}", kernel, c, absent, narrow, dtype) for kernel, c in kernels]
