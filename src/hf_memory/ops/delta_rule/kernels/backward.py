"""Backward: a loop over the chunks that computes the gradient of what was written; for the letters see launch.py."""

import triton
import triton.language as tl

from hf_memory.ops.triton.tiles import (
    decay_to_end,
    decay_to_here,
    load_gates,
    load_rows,
    program,
    read,
    sequence_bounds,
    state_tile,
    store_rows,
    write,
)


@triton.jit
def solve_kernel(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    beta,  # [B, T, HV]
    g,  # [B, T, HV] or [B, T, HV, K] or None
    P,  # [B, T, HV, C]
    W,  # [B, T, HV, C] float32
    e,  # [B, T, HV, V]; None for the gradient of the state alone
    do,  # [B, T, HV, V]
    dST,  # [N, HV, K, V]; None for zeros
    dv,  # [B, T, HV, V]; None likewise
    dbeta,  # [tiles of V, B, T, HV] float32; None likewise
    dS0,  # [N, HV, K, V] or None
    cu_seqlens,  # [N + 1] or None
    scale,
    T,
    tokens,  # B * T
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
    """Holds dS [BK, BV] for all key channels and a tile of value channels, and walks backwards."""
    n, hv, tile = program(HV, (V + BV - 1) // BV)
    h = hv // (HV // H)
    i_k, i_v = tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    in_k, in_v = i_k < K, i_v < V
    start, end = sequence_bounds(cu_seqlens, n, T)
    i_s, in_s = state_tile(n, hv, HV, i_k, in_k, i_v, in_v, K, V)
    dS = tl.zeros([BK, BV], tl.float32)
    if dST is not None:
        dS = tl.load(dST + i_s, mask=in_s, other=0.0)
    rows = tl.arange(0, C)
    chunks = (end - start + C - 1) // C
    for back in range(chunks):
        t = start + (chunks - 1 - tl.cast(back, tl.int64)) * C + rows
        in_t = t < end
        q_c = load_rows(q, t, in_t, h, H, i_k, in_k, K)
        k_c = load_rows(k, t, in_t, h, H, i_k, in_k, K)
        do_c = load_rows(do, t, in_t, hv, HV, i_v, in_v, V)
        P_c = load_rows(P, t, in_t, hv, HV, rows, rows < C, C)
        W_c = load_rows(W, t, in_t, hv, HV, rows, rows < C, C)
        d_c, enter, leave = scale * tl.dot(tl.trans(P_c), do_c, input_precision=PRECISION), 1.0, 1.0
        if DECAY > 0:
            has_next = (t + 1 < end) & (rows < C - 1)
            leave = decay_to_end(g, t, has_next, hv, HV, i_k, in_k, K, DECAY)
        d_c += read(k_c, dS, leave, DECAY, PARTS, PRECISION)
        d_c = tl.dot(tl.trans(W_c), d_c, input_precision=PRECISION)
        beta_c = tl.cast(tl.load(beta + t * HV + hv, mask=in_t, other=0.0), tl.float32)[:, None]
        dv_c = tl.cast(beta_c * d_c, k_c.dtype)
        if dv is not None:
            store_rows(dv, dv_c, t, in_t, hv, HV, i_v, in_v, V)
            e_c = tl.cast(load_rows(e, t, in_t, hv, HV, i_v, in_v, V), tl.float32)
            i_t = (tl.cast(tile, tl.int64) * tokens + t) * HV + hv
            tl.store(dbeta + i_t, tl.sum(d_c * e_c, axis=1), mask=in_t)
        if DECAY > 0:
            enter, whole = decay_to_here(load_gates(g, t, in_t, hv, HV, i_k, in_k, K, DECAY), DECAY)
            dS *= tl.trans(whole)
        dS += scale * write(q_c, do_c, enter, DECAY, PRECISION)
        dS -= write(k_c, dv_c, enter, DECAY, PRECISION)
    if dS0 is not None:
        tl.store(dS0 + i_s, dS, mask=in_s)
