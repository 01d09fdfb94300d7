"""Gradients of queries, keys and decay of an additive memory, by two kernels that loop over a sequence.

A token writes w_t k_t^T v_t and is then read by q_t, with gradient scale dO_t. In the delta rule k_t reads first, with
gradient -dR_t; for other memories dR = 0 and w = 1. With
P = scale dO V^T diag(w) for i >= j, R = -dR V^T diag(w) for i > j, b the sum of g from the start of the chunk, and dS
the gradient of the state after it:

    dQ = e^b (scale dO S^T) + sum_j P_ij e^(b_i - b_j) k_j           looping forwards, for tiles of key channels
    dK' = -e^b (dR S^T) + sum_j R_ij e^(b_i - b_j) k_j               likewise
    dK = dK' + dK'',  dK'' = e^(b_C - b) diag(w) (V dS^T)            looping backwards, likewise
                             + sum_i (P_ij q_i + R_ij k_i) e^(b_i - b_j)
    dg_t = sum over t' >= t of the block of (q dq + k dk' - k dk'') + sum(S dS) at its end
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_memory.ops.triton.launch import CHUNK, SCALAR, VECTOR, additive_constants, decay_kind, launcher
from hf_memory.ops.triton.segments import tokens_of_sequences
from hf_memory.ops.triton.tiles import (
    decay_between,
    decay_of_level,
    decays,
    level_of_pairs,
    load_rows,
    program,
    sequence_bounds,
    split_dot,
    store_rows,
    write_transposed,
)

SHUT = tl.constexpr(-150.0)  # below it e^g is zero, and so is its gradient


@triton.jit
def block_slot(cu_seqlens, start, n, T, CHUNK: tl.constexpr):
    """The first slot of sequence n among the stored states; packed sequences have one more slot for a partial block."""
    return start // CHUNK + n if cu_seqlens is not None else n * ((T + CHUNK - 1) // CHUNK)


@triton.jit
def add_within(x, P, y, gates, C: tl.constexpr, DECAY: tl.constexpr, OF_KEYS: tl.constexpr, PRECISION: tl.constexpr):
    """x [C, BK] plus the sum over columns j of P_ij y_j, with the decay from j to i, or OF_KEYS from i to j."""
    if DECAY == 2:
        ROWS: tl.constexpr = x.shape[0]  # C, or 2 C with two rows of each token
        tokens = tl.arange(0, ROWS) % C
        same = tl.where(tokens[:, None] == tokens[None, :], P, 0.0)
        if ROWS > C:
            x += tl.dot(tl.cast(same, y.dtype), y, input_precision=PRECISION)
        else:
            x += tl.sum(same, axis=1)[:, None] * y
        for level in tl.static_range(6):
            if 2**level < C:
                decay = decay_of_level(gates, 2**level, C, ROWS, PRECISION)
                P_c = tl.cast(tl.where(level_of_pairs(2**level, C, ROWS, OF_KEYS), P, 0.0), y.dtype)
                x += decay * tl.dot(P_c, tl.cast(y * decay, y.dtype), input_precision=PRECISION)
    else:
        if DECAY == 1:
            P = decay_between(P, gates, OF_KEYS)
        x += tl.dot(tl.cast(P, y.dtype), y, input_precision=PRECISION)
    return x


@triton.jit
def dq_kernel(
    q,  # [B, T, H, K]; None unless the decay is one for each head
    k,  # [B, T, H, K]
    v,  # [B, T, HV, V]
    w,  # [B, T, HV], with dr, or None
    g,  # [B, T, HV] or [B, T, HV, K] or None
    S0,  # [N, HV, K, V]
    z0,  # [N, HV, K] or None
    do,  # [B, T, HV, V], of the numerator
    dd,  # [B, T, HV], of the denominator, or None
    dr,  # [B, T, HV, V], minus the gradient of reads by k, or None
    dq,  # [B, T, HV, K]
    dk,  # [B, T, HV, K] float32, of reads by k, or None
    db,  # [tiles of K, B, T, HV] float32, sums of q dq + k dk; None unless the decay is one for each head
    states,  # [slots, HV, V, K]: the state after each block of CHUNK tokens; or None
    normalizers,  # [slots, HV, K] float32 or None
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
    slot = block_slot(cu_seqlens, start, n, T, CHUNK)
    in_s = in_v[:, None] & in_k[None, :]
    i_s = (n * HV + hv) * K * V + i_k[None, :] * V + i_v[:, None]
    S = tl.load(S0 + i_s, mask=in_s, other=0.0)
    if NORMALIZE:
        z = tl.load(z0 + (n * HV + hv) * K + i_k, mask=in_k, other=0.0)
    rows = tl.arange(0, C)
    for chunk in range(tl.cast((end - start + C - 1) // C, tl.int32)):  # for sm_100, Triton 3.5 pipelines no other type
        first = start + tl.cast(chunk, tl.int64) * C
        t = first + rows
        in_t = t < end
        k_c = load_rows(k, t, in_t, h, H, i_k, in_k, K)
        v_c = load_rows(v, t, in_t, hv, HV, i_v, in_v, V)
        do_c = load_rows(do, t, in_t, hv, HV, i_v, in_v, V)
        gates, enter, leave = 0.0, 1.0, 1.0
        if DECAY > 0:
            gates, enter, leave, whole = decays(g, t, end, hv, HV, i_k, in_k, K, DECAY)
        P = scale * split_dot(do_c, tl.trans(v_c), PARTS, PRECISION)
        dq_c = scale * split_dot(do_c, tl.cast(S, do_c.dtype), PARTS, PRECISION)
        if NORMALIZE:
            dd_c = tl.load(dd + t * HV + hv, mask=in_t, other=0.0)[:, None]
            P += dd_c
            dq_c += dd_c * z[None, :]
        if dr is not None:
            w_c = tl.cast(tl.load(w + t * HV + hv, mask=in_t, other=0.0), tl.float32)
            P *= w_c[None, :]
            leave *= w_c[:, None]
        P = tl.where(rows[:, None] >= rows[None, :], P, 0.0)
        dq_c = add_within(dq_c * enter, P, k_c, gates, C, DECAY, False, PRECISION)
        store_rows(dq, dq_c, t, in_t, hv, HV, i_k, in_k, K)
        if DECAY == 1:
            db_c = tl.sum(tl.cast(load_rows(q, t, in_t, h, H, i_k, in_k, K), tl.float32) * dq_c, axis=1)
        if dr is not None:
            dr_c = load_rows(dr, t, in_t, hv, HV, i_v, in_v, V)
            R = split_dot(dr_c, tl.trans(v_c), PARTS, PRECISION)
            R = tl.where(rows[:, None] > rows[None, :], -w_c[None, :] * R, 0.0)
            dk_c = -enter * split_dot(dr_c, tl.cast(S, dr_c.dtype), PARTS, PRECISION)
            dk_c = add_within(dk_c, R, k_c, gates, C, DECAY, False, PRECISION)
            store_rows(dk, dk_c, t, in_t, hv, HV, i_k, in_k, K)
            if DECAY == 1:
                db_c += tl.sum(tl.cast(k_c, tl.float32) * dk_c, axis=1)
        if DECAY == 1:
            tl.store(db + (tl.cast(tile, tl.int64) * tokens + t) * HV + hv, db_c, mask=in_t)
        if DECAY > 0:
            S *= whole
        S += write_transposed(k_c, v_c, leave, DECAY if dr is None or DECAY == 2 else 1, PRECISION)
        if NORMALIZE:
            if DECAY > 0:
                z *= tl.sum(whole, axis=0)
            z += tl.sum(tl.cast(k_c, tl.float32) * leave, axis=0)
        if DECAY > 0:
            done = first + C - start
            if (done % CHUNK == 0) | (start + done >= end):
                block = (slot + (done - 1) // CHUNK) * HV + hv
                tl.store(states + block * V * K + i_v[:, None] * K + i_k[None, :], S, mask=in_s)
                if NORMALIZE:
                    tl.store(normalizers + block * K + i_k, z, mask=in_k)


@triton.jit
def dk_kernel(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]; None without decay and dr
    v,  # [B, T, HV, V]
    w,  # [B, T, HV], with dr, or None
    g,  # [B, T, HV] or [B, T, HV, K] or None
    do,  # [B, T, HV, V]
    dd,  # [B, T, HV] or None
    dr,  # [B, T, HV, V] or None
    dq,  # [B, T, HV, K] float32; None unless the decay is one for each channel
    dk_read,  # [B, T, HV, K] float32, of reads by k, or None
    db,  # [tiles of K, B, T, HV] float32, of reads; None unless the decay is one for each head
    states,  # [slots, HV, V, K] or None
    normalizers,  # [slots, HV, K] float32 or None
    dST,  # [N, HV, K, V]; None for zeros
    dzT,  # [N, HV, K] or None
    dk,  # [B, T, HV, K]
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
    slot = block_slot(cu_seqlens, start, n, T, CHUNK)
    in_s = in_v[:, None] & in_k[None, :]
    dS = tl.zeros([BV, BK], tl.float32)
    if dST is not None:
        i_s = (n * HV + hv) * K * V + i_k[None, :] * V + i_v[:, None]
        dS = tl.load(dST + i_s, mask=in_s, other=0.0)
    if NORMALIZE:
        dz = tl.load(dzT + (n * HV + hv) * K + i_k, mask=in_k, other=0.0)
    rows = tl.arange(0, C)  # of keys; columns are queries
    tail = tl.zeros([1, BK if DECAY == 2 else 1], tl.float32)
    chunks = tl.cast((end - start + C - 1) // C, tl.int32)
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
        if k is not None:
            k_c = load_rows(k, t, in_t, h, H, i_k, in_k, K)
        v_c = load_rows(v, t, in_t, hv, HV, i_v, in_v, V)
        do_c = load_rows(do, t, in_t, hv, HV, i_v, in_v, V)
        gates, enter, leave = 0.0, 1.0, 1.0
        if DECAY > 0:
            gates, enter, leave, whole = decays(g, t, end, hv, HV, i_k, in_k, K, DECAY)
        P = scale * split_dot(v_c, tl.trans(do_c), PARTS, PRECISION)
        dk_c = split_dot(v_c, tl.cast(dS, v_c.dtype), PARTS, PRECISION)
        if NORMALIZE:
            dd_c = tl.load(dd + t * HV + hv, mask=in_t, other=0.0)
            P += dd_c[None, :]
            dk_c += dz[None, :]
        P = tl.where(rows[:, None] <= rows[None, :], P, 0.0)
        dk_c = add_within(dk_c * leave, P, q_c, gates, C, DECAY, True, PRECISION)
        if dr is not None:
            dr_c = load_rows(dr, t, in_t, hv, HV, i_v, in_v, V)
            R = split_dot(v_c, tl.trans(dr_c), PARTS, PRECISION)
            R = tl.where(rows[:, None] < rows[None, :], -R, 0.0)
            dk_c = add_within(dk_c, R, k_c, gates, C, DECAY, True, PRECISION)
        i_t = (t[:, None] * HV + hv) * K + i_k[None, :]
        in_tk = in_t[:, None] & in_k[None, :]
        dk_all = dk_c
        if dr is not None:
            dk_c *= tl.cast(tl.load(w + t * HV + hv, mask=in_t, other=0.0), tl.float32)[:, None]
            read_c = tl.load(dk_read + i_t, mask=in_tk, other=0.0)
            dk_all = dk_c + read_c
        tl.store(dk + i_t, tl.cast(dk_all, dk.dtype.element_ty), mask=in_tk)
        if DECAY > 0:
            written = tl.cast(k_c, tl.float32) * dk_c
            if DECAY == 2:
                db_c = tl.cast(q_c, tl.float32) * tl.load(dq + i_t, mask=in_tk, other=0.0) - written
                if dr is not None:
                    db_c += tl.cast(k_c, tl.float32) * read_c
                total = tl.sum(db_c, axis=0)[None, :]
                dg_c = total - tl.cumsum(db_c, axis=0) + db_c + tail
                tl.store(dg + i_t, tl.where(gates < SHUT, 0.0, dg_c), mask=in_tk)
                tail += total
            else:  # cumsum in one dimension, sums in two: Triton 3.6 compiles nothing else, for sm_100
                i_g = (tl.cast(tile, tl.int64) * tokens + t) * HV + hv
                db_c = tl.load(db + i_g, mask=in_t, other=0.0) - tl.sum(written, axis=1)
                total = tl.sum(db_c[:, None], axis=0)[:, None]
                dg_c = total + tail + (db_c - tl.cumsum(db_c, axis=0))[:, None]
                shut = gates[:, None] < SHUT  # type: ignore[index]
                tl.store(dg + i_g[:, None], tl.where(shut, 0.0, dg_c), mask=in_t[:, None])
                tail += total
            dS *= whole
        dS += scale * write_transposed(q_c, do_c, enter, DECAY, PRECISION)
        if dr is not None:
            dS -= write_transposed(k_c, dr_c, enter, DECAY, PRECISION)
        if NORMALIZE:
            if DECAY > 0:
                dz *= tl.sum(whole, axis=0)
            dz += tl.sum(tl.cast(q_c, tl.float32) * enter * dd_c[:, None], axis=0)
    if NORMALIZE:
        tl.store(dz0 + (n * HV + hv) * K + i_k, dz, mask=in_k)


def _constants(H: int, HV: int, K: int, V: int, decay: int, dtype: torch.dtype, reads: bool) -> dict:
    """Compile-time arguments and launch options; those of narrow heads that are read twice save registers."""
    _, by_key = additive_constants(H, HV, K, V, decay, dtype)
    if reads and decay and V <= 64:
        by_key |= {"C": min(by_key["C"], 32)} if decay == SCALAR else {"num_warps": 8}
    return by_key


def query_and_key_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    S: Tensor,
    z: Tensor | None,
    do: Tensor,
    dd: Tensor | None,
    dST: Tensor | None,
    dzT: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float = 1.0,
    w: Tensor | None = None,
    dr: Tensor | None = None,
) -> tuple[Tensor, Tensor, Any, Any]:
    """dq, dk, dg and dz0, of which the last two may be None; all tensors are contiguous.

    `do` and `dd` are the gradients of the numerator and the denominator, `dST` and `dzT` those of the final state. `w`
    [B, T, HV] and `dr` [B, T, HV, V] are those of the delta rule; see the module's docstring.
    """
    (B, T, H, K), (N, HV, _, V) = q.shape, S.shape
    decay, normalize = decay_kind(g), z is not None
    by_key = _constants(H, HV, K, V, decay, q.dtype, dr is not None)
    tiles = triton.cdiv(K, by_key["BK"])
    slots = (B * triton.cdiv(T, CHUNK) if cu_seqlens is None else B * T // CHUNK + N) if decay else 0
    states = q.new_empty(slots, HV, V, K) if decay else None
    normalizers = S.new_empty(slots, HV, K) if decay and normalize else None
    out = q if H == HV else S  # the sum over a group is taken in float32
    dk, dz0 = out.new_empty(B, T, HV, K), None if z is None else torch.empty_like(z)
    dq = (S if decay == VECTOR else out).new_empty(B, T, HV, K)
    dk_read = None if dr is None else S.new_empty(B, T, HV, K)
    db, dg = (S.new_empty(tiles, B, T, HV) if decay == SCALAR else None for _ in range(2))
    if decay == VECTOR:
        dg = S.new_empty(B, T, HV, K)
    launch, grid = {**by_key, "NORMALIZE": normalize}, (N * HV * tiles,)
    launcher(dq_kernel, grid)(
        q if decay == SCALAR else None, k, v, w, g, S, z, do, dd, dr, dq, dk_read, db, states, normalizers,
        cu_seqlens, scale, tokens_of_sequences(q, S), B * T, **launch,
    )  # fmt: skip
    launcher(dk_kernel, grid)(
        q, None if dr is None and not decay else k, v, w, g, do, dd, dr, dq if decay == VECTOR else None, dk_read, db,
        states, normalizers, dST, dzT, dk, dg, dz0, cu_seqlens, scale, tokens_of_sequences(q, S), B * T, **launch,
    )  # fmt: skip
    if H != HV:
        dq, dk = (x.unflatten(2, (H, -1)).sum(3) for x in (dq, dk))
    dq, dk = (x if x.dtype == q.dtype else x.to(q.dtype) for x in (dq, dk))
    return dq, dk, dg.sum(0) if dg is not None and decay == SCALAR else dg, dz0
