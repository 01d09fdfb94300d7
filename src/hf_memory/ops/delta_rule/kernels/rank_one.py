"""The kernels of the form with a and b, with a decay for each channel; for letters see rank_one_launch.py."""

import triton
import triton.language as tl

from hf_memory.ops.delta_rule.kernels.forward import first_state
from hf_memory.ops.triton.launch import VECTOR
from hf_memory.ops.triton.tiles import (
    chunk_bounds,
    decay_to_end,
    decay_to_here,
    load_gates,
    load_pairs,
    load_rows,
    program,
    read,
    scores_by_level,
    sequence_bounds,
    state_tile,
    store_rows,
    unit_lower_inverse,
    write,
)

DECAY = tl.constexpr(VECTOR)


@triton.jit
def decay_to_before(g, t, end, hv, HV, i_k, in_k, K: tl.constexpr):
    """Decays from the start of a chunk to the token before each of its tokens, [C, BK]."""
    has_one = (t > tl.min(t, axis=0)) & (t - 1 < end)
    before, _ = decay_to_here(load_gates(g, t - 1, has_one, hv, HV, i_k, in_k, K, DECAY), DECAY)
    return before


@triton.jit
def rank_one_chunk_kernel(
    q,  # [B, T, HV, K]
    k,  # [B, T, HV, K]
    g,  # [B, T, HV, K]
    a,  # [B, T, HV, K]
    b,  # [B, T, HV, K]
    PR,  # [B, T, HV, 2 C]: what q finds of k and of b
    WU,  # [B, T, HV, 2 C] float32
    bounds,  # [chunks + 1], or None without packed sequences
    T,
    HV: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The four matrices of one chunk and head; a row for each token.

    With the rows of q above those of a, and the columns of k before those of b, (I + [[0, 0], [-A_ak, -A_ab]])^-1 is
    [[I, 0], [W, U]].
    """
    c, hv, _ = program(HV, 1)
    start, end = chunk_bounds(bounds, c, T, C)
    rows = tl.arange(0, 2 * C)
    tokens, is_q = rows % C, rows < C
    t, t_c = start + tokens, start + tl.arange(0, C)
    in_t = t < end
    same = is_q[:, None] & (tokens[:, None] == tokens[None, :])
    found = tl.zeros([2 * C, 2 * C], tl.float32)
    for first in range(0, K, BK):
        i_k = first + tl.arange(0, BK)
        in_k = i_k < K
        reads = load_pairs(q, a, t, in_t, hv, HV, i_k, in_k, K)
        writes = load_pairs(k, b, t, in_t, hv, HV, i_k, in_k, K)
        gates = load_gates(g, t_c, t_c < end, hv, HV, i_k, in_k, K, DECAY)
        found += tl.where(same, tl.dot(reads, tl.trans(writes), input_precision=PRECISION), 0.0)
        found += scores_by_level(reads, writes, gates, C, False, PRECISION)
    store_rows(PR, found, t, in_t & is_q, hv, HV, rows, rows < 2 * C, 2 * C)
    inverse = unit_lower_inverse(tl.where(is_q[:, None], 0.0, -found), 2 * C)
    store_rows(WU, inverse, t, in_t & (rows >= C), hv, HV, rows, rows < 2 * C, 2 * C)


@triton.jit
def rank_one_forward_kernel(
    q,  # [B, T, HV, K]
    k,  # [B, T, HV, K]
    v,  # [B, T, HV, V]; None for zeros
    g,  # [B, T, HV, K]
    a,  # [B, T, HV, K]
    b,  # [B, T, HV, K]
    S0,  # [N, HV, K, V]; None for zeros, and where v is too for the identity
    PR,  # [B, T, HV, 2 C]
    WU,  # [B, T, HV, 2 C] float32
    o,  # [B, T, HV, V]; None for the state alone
    e,  # [B, T, HV, V] float32: what a reads; likewise
    ST,  # [N, HV, K, V] or None
    cu_seqlens,  # [N + 1] or None
    scale,
    T,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Holds S [BK, BV] for all key channels and a tile of value channels."""
    n, hv, tile = program(HV, (V + BV - 1) // BV)
    i_k, i_v = tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    in_k, in_v = i_k < K, i_v < V
    start, end = sequence_bounds(cu_seqlens, n, T)
    i_s, in_s = state_tile(n, hv, HV, i_k, in_k, i_v, in_v, K, V)
    S = first_state(S0, v, i_s, in_s, i_k, i_v)
    rows = tl.arange(0, C)
    for first in range(start, end, C):
        t = tl.cast(first, tl.int64) + rows
        in_t = t < end
        a_c = load_rows(a, t, in_t, hv, HV, i_k, in_k, K)
        U_c = load_rows(WU, t, in_t, hv, HV, C + rows, rows < C, 2 * C)
        before = decay_to_before(g, t, end, hv, HV, i_k, in_k, K)
        e_c = tl.dot(U_c, read(a_c, S, before, DECAY, PARTS, PRECISION), input_precision=PRECISION)
        if v is not None:
            v_c = load_rows(v, t, in_t, hv, HV, i_v, in_v, V)
            W_c = load_rows(WU, t, in_t, hv, HV, rows, rows < C, 2 * C)
            e_c += tl.dot(W_c, tl.cast(v_c, tl.float32), input_precision=PRECISION)
        x_c = tl.cast(e_c, a_c.dtype)
        enter, whole = decay_to_here(load_gates(g, t, in_t, hv, HV, i_k, in_k, K, DECAY), DECAY)
        if o is not None:
            q_c = load_rows(q, t, in_t, hv, HV, i_k, in_k, K)
            P_c = load_rows(PR, t, in_t, hv, HV, rows, rows < C, 2 * C)
            R_c = load_rows(PR, t, in_t, hv, HV, C + rows, rows < C, 2 * C)
            o_c = read(q_c, S, enter, DECAY, PARTS, PRECISION) + tl.dot(P_c, v_c, input_precision=PRECISION)
            o_c += tl.dot(R_c, x_c, input_precision=PRECISION)
            store_rows(o, scale * o_c, t, in_t, hv, HV, i_v, in_v, V)
            store_rows(e, e_c, t, in_t, hv, HV, i_v, in_v, V)
        has_next = (t + 1 < end) & (rows < C - 1)
        leave = decay_to_end(g, t, has_next, hv, HV, i_k, in_k, K, DECAY)
        S *= tl.trans(whole)
        b_c = load_rows(b, t, in_t, hv, HV, i_k, in_k, K)
        S += write(b_c, x_c, leave, DECAY, PRECISION)
        if v is not None:
            k_c = load_rows(k, t, in_t, hv, HV, i_k, in_k, K)
            S += write(k_c, v_c, leave, DECAY, PRECISION)
    if ST is not None:
        tl.store(ST + i_s, S, mask=in_s)


@triton.jit
def rank_one_backward_kernel(
    q,  # [B, T, HV, K]
    k,  # [B, T, HV, K]
    g,  # [B, T, HV, K]
    a,  # [B, T, HV, K]
    b,  # [B, T, HV, K]
    PR,  # [B, T, HV, 2 C]
    WU,  # [B, T, HV, 2 C] float32
    do,  # [B, T, HV, V]
    dST,  # [N, HV, K, V]; None for zeros
    de,  # [B, T, HV, V], of what a reads; None for the gradient of the state alone
    dv,  # [B, T, HV, V]; likewise
    dS0,  # [N, HV, K, V] or None
    cu_seqlens,  # [N + 1] or None
    scale,
    T,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Holds dS [BK, BV] for all key channels and a tile of value channels, and loops backwards."""
    n, hv, tile = program(HV, (V + BV - 1) // BV)
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
        b_c = load_rows(b, t, in_t, hv, HV, i_k, in_k, K)
        do_c = load_rows(do, t, in_t, hv, HV, i_v, in_v, V)
        R_c = load_rows(PR, t, in_t, hv, HV, C + rows, rows < C, 2 * C)
        U_c = load_rows(WU, t, in_t, hv, HV, C + rows, rows < C, 2 * C)
        has_next = (t + 1 < end) & (rows < C - 1)
        leave = decay_to_end(g, t, has_next, hv, HV, i_k, in_k, K, DECAY)
        written = scale * tl.dot(tl.trans(R_c), do_c, input_precision=PRECISION)
        written += read(b_c, dS, leave, DECAY, PARTS, PRECISION)
        if dv is not None:
            k_c = load_rows(k, t, in_t, hv, HV, i_k, in_k, K)
            P_c = load_rows(PR, t, in_t, hv, HV, rows, rows < C, 2 * C)
            W_c = load_rows(WU, t, in_t, hv, HV, rows, rows < C, 2 * C)
            dv_c = scale * tl.dot(tl.trans(P_c), do_c, input_precision=PRECISION)
            dv_c += read(k_c, dS, leave, DECAY, PARTS, PRECISION)
            dv_c += tl.dot(tl.trans(W_c), written, input_precision=PRECISION)
            store_rows(dv, dv_c, t, in_t, hv, HV, i_v, in_v, V)
        a_c = load_rows(a, t, in_t, hv, HV, i_k, in_k, K)
        de_c = tl.cast(tl.dot(tl.trans(U_c), written, input_precision=PRECISION), a_c.dtype)
        if de is not None:
            store_rows(de, de_c, t, in_t, hv, HV, i_v, in_v, V)
        enter, whole = decay_to_here(load_gates(g, t, in_t, hv, HV, i_k, in_k, K, DECAY), DECAY)
        dS *= tl.trans(whole)
        q_c = load_rows(q, t, in_t, hv, HV, i_k, in_k, K)
        dS += scale * write(q_c, do_c, enter, DECAY, PRECISION)
        before = decay_to_before(g, t, end, hv, HV, i_k, in_k, K)
        dS += write(a_c, de_c, before, DECAY, PRECISION)
    if dS0 is not None:
        tl.store(dS0 + i_s, dS, mask=in_s)
