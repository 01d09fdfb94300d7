"""Gradients of queries, keys and decay of an additive memory, by two kernels that loop over a sequence.

With P = (dO V^T) for i >= j, b the sum of g from the start of the chunk, and dS the gradient of the state after it:

    dQ = e^b (dO S^T) + sum_j P_ij e^(b_i - b_j) k_j           looping forwards, for tiles of key channels
    dK = e^(b_C - b) (V dS^T) + sum_i P_ij e^(b_i - b_j) q_i   looping backwards, likewise
    dg_t = sum over t' >= t of the block of (q dq - k dk) + sum(S dS) at its end
"""

import torch
import triton
import triton.language as tl

from hf_memory.ops.triton.launch import CHUNK, SCALAR, decay_kind, launcher, walk_constants
from hf_memory.ops.triton.tiles import (
    column_of,
    decay_between,
    decays,
    load_rows,
    program,
    row_of,
    sequence_bounds,
    split_dot,
    store_rows,
    write_transposed,
)


@triton.jit
def _block_slot(cu_seqlens, start, n, T, CHUNK: tl.constexpr):
    """The first slot of sequence n among the stored states; packed sequences have one more slot for a partial block."""
    return start // CHUNK + n if cu_seqlens is not None else n * ((T + CHUNK - 1) // CHUNK)


@triton.jit
def dq_kernel(
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
            gates, enter, leave, whole = decays(g, t, end, hv, HV, i_k, in_k, K, DECAY)
            dq_c *= enter
        if DECAY == 2:
            k32 = tl.cast(k_c, tl.float32)
            sums = tl.zeros_like(k32)  # sums of gates between the rows and a column
            for step in range(C):
                j = C - 1 - step
                here = rows == j
                dq_c += column_of(P, here) * tl.exp2(sums) * row_of(k32, here)
                sums += tl.where((rows >= j)[:, None], row_of(gates, here), 0.0)
        else:
            if DECAY == 1:
                P = decay_between(P, gates, False)
            dq_c += tl.dot(tl.cast(P, k_c.dtype), k_c, input_precision=PRECISION)
        store_rows(dq, dq_c, t, in_t, hv, HV, i_k, in_k, K)
        if DECAY > 0:
            S *= whole
        S += write_transposed(k_c, v_c, leave, DECAY, PRECISION)
        if NORMALIZE:
            if DECAY > 0:
                z *= tl.sum(whole, axis=0)
            z += tl.sum(tl.cast(k_c, tl.float32) * leave, axis=0)
        if DECAY > 0:
            done = tl.cast(first, tl.int64) + C - start
            if (done % CHUNK == 0) | (start + done >= end):
                block = (slot + (done - 1) // CHUNK) * HV + hv
                tl.store(states + block * V * K + i_v[:, None] * K + i_k[None, :], S, mask=in_s)
                if NORMALIZE:
                    tl.store(normalizers + block * K + i_k, z, mask=in_k)


@triton.jit
def dk_kernel(
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
            gates, enter, leave, whole = decays(g, t, end, hv, HV, i_k, in_k, K, DECAY)
            dk_c *= leave
        if DECAY == 2:
            q32 = tl.cast(q_c, tl.float32)
            sums = tl.zeros_like(q32)
            for i in range(C):
                here = rows == i
                sums += tl.where((rows < i)[:, None], row_of(gates, here), 0.0)
                dk_c += column_of(PT, here) * tl.exp2(sums) * row_of(q32, here)
        else:
            if DECAY == 1:
                PT = decay_between(PT, gates, True)
            dk_c += tl.dot(tl.cast(PT, q_c.dtype), q_c, input_precision=PRECISION)
        i_t = (t[:, None] * HV + hv) * K + i_k[None, :]
        in_tk = in_t[:, None] & in_k[None, :]
        tl.store(dk + i_t, dk_c, mask=in_tk)
        if DECAY > 0:
            db = tl.cast(q_c, tl.float32) * tl.load(dq + i_t, mask=in_tk, other=0.0) - tl.cast(k_c, tl.float32) * dk_c
            if DECAY == 1:
                db = tl.sum(db, axis=1)  # in one dimension: Triton before 3.7 compiles no cumsum of [C, 1]
            total, rest = tl.sum(db, axis=0), db - tl.cumsum(db, axis=0)
            if DECAY == 2:
                total = total[None, :]
            else:
                total, rest = total + tl.zeros([1, 1], tl.float32), rest[:, None]
            dg_c = total + rest + tail
            tail += total
            is_shut = gates < -150.0  # e^g is zero, and so is its gradient
            if DECAY == 2:
                tl.store(dg + i_t, tl.where(is_shut, 0.0, dg_c), mask=in_tk)
            else:
                i_g = (tl.cast(tile, tl.int64) * tokens + t) * HV + hv
                tl.store(dg + i_g, tl.where(is_shut, 0.0, tl.sum(dg_c, axis=1)), mask=in_t)
            dS *= whole
        dS += write_transposed(q_c, do_c, enter, DECAY, PRECISION)
        if NORMALIZE:
            if DECAY > 0:
                dz *= tl.sum(whole, axis=0)
            dz += tl.sum(tl.cast(q_c, tl.float32) * enter * dd_c[:, None], axis=0)
    if NORMALIZE:
        tl.store(dz0 + (n * HV + hv) * K + i_k, dz, mask=in_k)


def query_and_key_gradients(q, k, v, g, S, z, do, dd, dST, dzT, cu_seqlens):
    """dq, dk, dg and dz0, given the gradients of the numerator, the denominator and the final state; all contiguous."""
    (B, T, H, K), (N, HV, _, V) = q.shape, S.shape
    decay, normalize = decay_kind(g), z is not None
    _, by_key = walk_constants(H, HV, K, V, decay, q.dtype)
    slots = (B * triton.cdiv(T, CHUNK) if cu_seqlens is None else B * T // CHUNK + N) if decay else 0
    states = S.new_empty(slots, HV, V, K) if decay else None
    normalizers = S.new_empty(slots, HV, K) if decay and normalize else None
    dq, dk = S.new_empty(B, T, HV, K), S.new_empty(B, T, HV, K)
    dz0 = torch.empty_like(z) if normalize else None
    tiles = triton.cdiv(K, by_key["BK"])
    dg = S.new_empty(tiles, B, T, HV) if decay == SCALAR else S.new_empty(B, T, HV, K) if decay else None
    constants = {**by_key, "NORMALIZE": normalize}
    grid = (N * HV * tiles,)
    launcher(dq_kernel, grid)(k, v, g, S, z, do, dd, dq, states, normalizers, cu_seqlens, T, **constants)
    launcher(dk_kernel, grid)(
        q, k, v, g, do, dd, dq, states, normalizers, dST, dzT, dk, dg, dz0, cu_seqlens, T, B * T, **constants
    )
    dq, dk = (x.unflatten(2, (H, -1)).sum(3).to(q.dtype) for x in (dq, dk))
    return dq, dk, dg.sum(0) if decay == SCALAR else dg, dz0
