"""The kernels of the form with a and b, with a decay for each channel; for letters see rank_one_launch.py."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from hf_memory.ops.delta_rule.kernels.forward import first_state
from hf_memory.ops.triton.launch import VECTOR
from hf_memory.ops.triton.tiles import (
    channels,
    chunk_bounds,
    decay_to_end,
    decay_to_here,
    load_gates,
    load_pairs,
    load_rows,
    load_state,
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


class Matrices(NamedTuple):
    """The matrices of chunks, a row for each token."""

    PR: Any  # [B, T, HV, 2 C]: what q finds of k and of b
    WU: Any  # [B, T, HV, 2 C] float32


@triton.jit
def decay_to_before(g, t, end, head, keys):
    """Decays from the start of a chunk to the token before each of its tokens, [C, BK]."""
    has_one = (tl.arange(0, t.shape[0]) > 0) & (t - 1 < end)
    before, _ = decay_to_here(load_gates(g, (t - 1, has_one), head, keys, DECAY), DECAY)
    return before


@triton.jit
def halves(C: tl.constexpr):
    """The columns of the first and of the second matrix among the 2 C of both."""
    i = tl.arange(0, C)
    return (i, i < C, 2 * C), (i + C, i < C, 2 * C)


@triton.jit
def rank_one_chunk_kernel(
    rows,  # Rows, without v
    matrices,  # Matrices
    call,  # Call; packed sequences with the bounds of chunks
    meta: tl.constexpr,
):
    """The four matrices of one chunk and head.

    With the rows of q above those of a, and the columns of k before those of b, (I + [[0, 0], [-A_ak, -A_ab]])^-1 is
    [[I, 0], [W, U]].
    """
    c, head, _, _ = program(1, 1, meta)
    C: tl.constexpr = meta.C
    start, end = chunk_bounds(call, c, C)
    lines = tl.arange(0, 2 * C)
    i = lines % C
    is_q = lines < C
    t = start + i
    t_c = start + tl.arange(0, C)
    tokens = (t, t < end)
    same = is_q[:, None] & (i[:, None] == i[None, :])
    found = tl.zeros([2 * C, 2 * C], tl.float32)
    for first in range(0, meta.K, meta.BK):
        i_k = first + tl.arange(0, meta.BK)
        keys = (i_k, i_k < meta.K, meta.K)
        reads = load_pairs(rows.q, rows.a, tokens, head, keys)
        writes = load_pairs(rows.k, rows.b, tokens, head, keys)
        gates = load_gates(rows.g, (t_c, t_c < end), head, keys, DECAY)
        found += tl.where(
            same, tl.dot(reads, tl.trans(writes), input_precision=meta.PRECISION), 0.0
        )
        found += scores_by_level(reads, writes, gates, C, False, meta.PRECISION)
    both = channels(0, 2 * C, 2 * C)
    store_rows(matrices.PR, found, (t, (t < end) & is_q), head, both)
    inverse = unit_lower_inverse(tl.where(is_q[:, None], 0.0, -found), 2 * C)
    store_rows(matrices.WU, inverse, (t, (t < end) & (lines >= C)), head, both)


@triton.jit
def rank_one_forward_kernel(
    rows,  # Rows; v is None for zeros
    matrices,  # Matrices
    states,  # States; without S0 and v it begins with the identity
    out,  # Outputs: o and what a reads, None for the state alone
    call,  # Call
    meta: tl.constexpr,
):
    """Holds S [BK, BV] for all key channels and a tile of value channels."""
    n, head, _, tile = program(meta.V, meta.BV, meta)
    keys = channels(0, meta.BK, meta.K)
    values = channels(tile, meta.BV, meta.V)
    start, end = sequence_bounds(call, n)
    S = first_state(states.S0, rows.v, n, head, keys, values)
    left, right = halves(meta.C)
    for first in range(start, end, meta.C):
        t = tl.cast(first, tl.int64) + tl.arange(0, meta.C)
        tokens = (t, t < end)
        a_c = load_rows(rows.a, tokens, head, keys)
        U_c = load_rows(matrices.WU, tokens, head, right)
        before = decay_to_before(rows.g, t, end, head, keys)
        e_c = tl.dot(U_c, read(a_c, S, before, meta), input_precision=meta.PRECISION)
        if rows.v is not None:
            v_c = load_rows(rows.v, tokens, head, values)
            W_c = load_rows(matrices.WU, tokens, head, left)
            e_c += tl.dot(W_c, tl.cast(v_c, tl.float32), input_precision=meta.PRECISION)
        x_c = tl.cast(e_c, a_c.dtype)
        enter, whole = decay_to_here(load_gates(rows.g, tokens, head, keys, DECAY), DECAY)
        if out.o is not None:
            q_c = load_rows(rows.q, tokens, head, keys)
            P_c = load_rows(matrices.PR, tokens, head, left)
            R_c = load_rows(matrices.PR, tokens, head, right)
            o_c = read(q_c, S, enter, meta) + tl.dot(P_c, v_c, input_precision=meta.PRECISION)
            o_c += tl.dot(R_c, x_c, input_precision=meta.PRECISION)
            store_rows(out.o, call.scale * o_c, tokens, head, values)
            store_rows(out.e, e_c, tokens, head, values)
        leave = decay_to_end(rows.g, t, end, head, keys, DECAY)
        S *= tl.trans(whole)
        b_c = load_rows(rows.b, tokens, head, keys)
        S += write(b_c, x_c, leave, meta)
        if rows.v is not None:
            k_c = load_rows(rows.k, tokens, head, keys)
            S += write(k_c, v_c, leave, meta)
    if states.ST is not None:
        i_s, in_s = state_tile(n, head, keys, values)
        tl.store(states.ST + i_s, S, mask=in_s)


@triton.jit
def rank_one_backward_kernel(
    rows,  # Rows, without v
    matrices,  # Matrices
    d_states,  # States: those after are given, those before are computed
    d_out,  # Outputs: o is given, e, of what a reads, is computed; None for the gradient of the state alone
    dv,  # [B, T, HV, V]; None likewise
    call,  # Call
    meta: tl.constexpr,
):
    """Holds dS [BK, BV] for all key channels and a tile of value channels, and loops backwards."""
    n, head, _, tile = program(meta.V, meta.BV, meta)
    keys = channels(0, meta.BK, meta.K)
    values = channels(tile, meta.BV, meta.V)
    start, end = sequence_bounds(call, n)
    i_s, in_s = state_tile(n, head, keys, values)
    dS = load_state(d_states.ST, i_s, in_s)
    left, right = halves(meta.C)
    chunks = (end - start + meta.C - 1) // meta.C
    for back in range(chunks):
        t = start + (chunks - 1 - tl.cast(back, tl.int64)) * meta.C + tl.arange(0, meta.C)
        tokens = (t, t < end)
        b_c = load_rows(rows.b, tokens, head, keys)
        do_c = load_rows(d_out.o, tokens, head, values)
        R_c = load_rows(matrices.PR, tokens, head, right)
        U_c = load_rows(matrices.WU, tokens, head, right)
        leave = decay_to_end(rows.g, t, end, head, keys, DECAY)
        written = call.scale * tl.dot(tl.trans(R_c), do_c, input_precision=meta.PRECISION)
        written += read(b_c, dS, leave, meta)
        if dv is not None:
            k_c = load_rows(rows.k, tokens, head, keys)
            P_c = load_rows(matrices.PR, tokens, head, left)
            W_c = load_rows(matrices.WU, tokens, head, left)
            dv_c = call.scale * tl.dot(tl.trans(P_c), do_c, input_precision=meta.PRECISION)
            dv_c += read(k_c, dS, leave, meta)
            dv_c += tl.dot(tl.trans(W_c), written, input_precision=meta.PRECISION)
            store_rows(dv, dv_c, tokens, head, values)
        a_c = load_rows(rows.a, tokens, head, keys)
        de_c = tl.cast(tl.dot(tl.trans(U_c), written, input_precision=meta.PRECISION), a_c.dtype)
        if d_out.e is not None:
            store_rows(d_out.e, de_c, tokens, head, values)
        enter, whole = decay_to_here(load_gates(rows.g, tokens, head, keys, DECAY), DECAY)
        dS *= tl.trans(whole)
        q_c = load_rows(rows.q, tokens, head, keys)
        dS += call.scale * write(q_c, do_c, enter, meta)
        before = decay_to_before(rows.g, t, end, head, keys)
        dS += write(a_c, de_c, before, meta)
    if d_states.S0 is not None:
        tl.store(d_states.S0 + i_s, dS, mask=in_s)
