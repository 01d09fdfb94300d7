"""Forward: computations within chunks, then a loop over the chunks; for the letters see launch.py."""

import triton
import triton.language as tl

from hf_memory.ops.triton.tiles import (
    chunk_bounds,
    decay_to_end,
    decay_to_here,
    load_gates,
    load_rows,
    program,
    read,
    scores,
    sequence_bounds,
    state_tile,
    store_rows,
    unit_lower_inverse,
    write,
)


@triton.jit
def chunk_kernel(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    beta,  # [B, T, HV]
    g,  # [B, T, HV] or [B, T, HV, K] or None
    P,  # [B, T, HV, C]
    U,  # [B, T, HV, C] float32; None in the backward
    W,  # [B, T, HV, C] float32; None in the forward
    bounds,  # [chunks + 1], or None without packed sequences
    T,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    DECAY: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The three matrices of one chunk and head; a row for each token."""
    c, hv, _ = program(HV, 1)
    h = hv // (HV // H)
    start, end = chunk_bounds(bounds, c, T, C)
    rows, i_k = tl.arange(0, C), tl.arange(0, BK)
    t, in_k = start + rows, i_k < K
    in_t = t < end
    q_c = load_rows(q, t, in_t, h, H, i_k, in_k, K)
    k_c = load_rows(k, t, in_t, h, H, i_k, in_k, K)
    beta_c = tl.cast(tl.load(beta + t * HV + hv, mask=in_t, other=0.0), tl.float32)
    gates = 0.0
    if DECAY > 0:
        gates = load_gates(g, t, in_t, hv, HV, i_k, in_k, K, DECAY)
    P_c = scores(q_c, k_c, gates, C, DECAY, False, PARTS, PRECISION)
    store_rows(P, P_c, t, in_t, hv, HV, rows, rows < C, C)
    A = tl.where(rows[:, None] > rows[None, :], scores(k_c, k_c, gates, C, DECAY, False, PARTS, PRECISION), 0.0)
    U_c = unit_lower_inverse(A * beta_c[None, :], C)
    if U is not None:
        store_rows(U, U_c, t, in_t, hv, HV, rows, rows < C, C)
    if W is not None:  # (I + diag(beta) A)^-1
        W_c = tl.where(rows[:, None] == rows[None, :], 1.0, 0.0)
        W_c -= beta_c[:, None] * tl.dot(U_c, A, input_precision="tf32x3")
        store_rows(W, W_c, t, in_t, hv, HV, rows, rows < C, C)


@triton.jit
def first_state(S0, v, i_s, in_s, i_k, i_v):
    """The tile of S0; without S0 zeros, or the identity if v is None too."""
    if S0 is not None:
        S = tl.load(S0 + i_s, mask=in_s, other=0.0)
    elif v is not None:
        S = tl.zeros([i_k.shape[0], i_v.shape[0]], tl.float32)
    else:
        S = tl.where(i_k[:, None] == i_v[None, :], 1.0, 0.0)
    return S


@triton.jit
def forward_kernel(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    v,  # [B, T, HV, V]; None for zeros
    beta,  # [B, T, HV]
    g,  # [B, T, HV] or [B, T, HV, K] or None
    S0,  # [N, HV, K, V]; None: zeros, or the identity if v is None too
    P,  # [B, T, HV, C]
    U,  # [B, T, HV, C] float32
    o,  # [B, T, HV, V]; None if only the state is needed
    e,  # [B, T, HV, V]: errors, or None
    ST,  # [N, HV, K, V] or None
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
    PRECISION: tl.constexpr,
):
    """Holds S [BK, BV] for all key channels and a tile of value channels."""
    n, hv, tile = program(HV, (V + BV - 1) // BV)
    h = hv // (HV // H)
    i_k, i_v = tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    in_k, in_v = i_k < K, i_v < V
    start, end = sequence_bounds(cu_seqlens, n, T)
    i_s, in_s = state_tile(n, hv, HV, i_k, in_k, i_v, in_v, K, V)
    S = first_state(S0, v, i_s, in_s, i_k, i_v)
    rows = tl.arange(0, C)
    for first in range(start, end, C):
        t = tl.cast(first, tl.int64) + rows
        in_t = t < end
        k_c = load_rows(k, t, in_t, h, H, i_k, in_k, K)
        U_c = load_rows(U, t, in_t, hv, HV, rows, rows < C, C)
        beta_c = tl.cast(tl.load(beta + t * HV + hv, mask=in_t, other=0.0), tl.float32)[:, None]
        enter, leave = 1.0, 1.0
        if DECAY > 0:
            enter, whole = decay_to_here(load_gates(g, t, in_t, hv, HV, i_k, in_k, K, DECAY), DECAY)
        e_c = -read(k_c, S, enter, DECAY, PARTS, PRECISION)
        if v is not None:
            e_c += tl.cast(load_rows(v, t, in_t, hv, HV, i_v, in_v, V), tl.float32)
        e_c = tl.dot(U_c, e_c, input_precision=PRECISION)
        x_c = tl.cast(beta_c * e_c, k_c.dtype)
        if o is not None:
            q_c = load_rows(q, t, in_t, h, H, i_k, in_k, K)
            P_c = load_rows(P, t, in_t, hv, HV, rows, rows < C, C)
            o_c = read(q_c, S, enter, DECAY, PARTS, PRECISION) + tl.dot(P_c, x_c, input_precision=PRECISION)
            store_rows(o, scale * o_c, t, in_t, hv, HV, i_v, in_v, V)
            store_rows(e, e_c, t, in_t, hv, HV, i_v, in_v, V)
        if DECAY > 0:
            S *= tl.trans(whole)
            has_next = (t + 1 < end) & (rows < C - 1)
            leave = decay_to_end(g, t, has_next, hv, HV, i_k, in_k, K, DECAY)
        S += write(k_c, x_c, leave, DECAY, PRECISION)
    if ST is not None:
        tl.store(ST + i_s, S, mask=in_s)
