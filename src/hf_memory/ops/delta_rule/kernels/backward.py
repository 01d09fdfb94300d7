"""Backward: a loop over the chunks that computes the gradient of what was written; for the letters see launch.py."""

import triton
import triton.language as tl

from hf_memory.ops.triton.tiles import (
    channels,
    decay_to_end,
    decay_to_here,
    load_gates,
    load_numbers,
    load_rows,
    load_state,
    program,
    read,
    sequence_bounds,
    state_tile,
    store_rows,
    write,
)


@triton.jit
def solve_kernel(
    rows,  # Rows, whose v are the errors; without them for the gradient of the state alone
    matrices,  # Matrices P and W
    d_out,  # Outputs
    d_rows,  # Rows, of which v and beta are computed here, [tiles of V, B, T, HV] float32 for beta; None likewise
    d_states,  # States: those after are given, those before are computed
    call,  # Call
    meta: tl.constexpr,
):
    """Holds dS [BK, BV] for all key channels and a tile of value channels, and walks backwards."""
    n, head, key_head, tile = program(meta.V, meta.BV, meta)
    keys = channels(0, meta.BK, meta.K)
    values = channels(tile, meta.BV, meta.V)
    own = channels(0, meta.C, meta.C)
    start, end = sequence_bounds(call, n)
    i_s, in_s = state_tile(n, head, keys, values)
    dS = load_state(d_states.ST, i_s, in_s)
    chunks = (end - start + meta.C - 1) // meta.C
    for back in range(chunks):
        t = start + (chunks - 1 - tl.cast(back, tl.int64)) * meta.C + tl.arange(0, meta.C)
        tokens = (t, t < end)
        q_c = load_rows(rows.q, tokens, key_head, keys)
        k_c = load_rows(rows.k, tokens, key_head, keys)
        do_c = load_rows(d_out.o, tokens, head, values)
        P_c = load_rows(matrices.P, tokens, head, own)
        W_c = load_rows(matrices.W, tokens, head, own)
        d_c = call.scale * tl.dot(tl.trans(P_c), do_c, input_precision=meta.PRECISION)
        enter = 1.0
        leave = 1.0
        if meta.DECAY > 0:
            leave = decay_to_end(rows.g, t, end, head, keys, meta.DECAY)
        d_c += read(k_c, dS, leave, meta)
        d_c = tl.dot(tl.trans(W_c), d_c, input_precision=meta.PRECISION)
        beta_c = tl.cast(load_numbers(rows.beta, tokens, head), tl.float32)[:, None]
        dv_c = tl.cast(beta_c * d_c, k_c.dtype)
        if d_rows.v is not None:
            store_rows(d_rows.v, dv_c, tokens, head, values)
            e_c = tl.cast(load_rows(rows.v, tokens, head, values), tl.float32)
            i_t = (tl.cast(tile, tl.int64) * call.tokens + t) * meta.HV + head[0]
            tl.store(d_rows.beta + i_t, tl.sum(d_c * e_c, axis=1), mask=t < end)
        if meta.DECAY > 0:
            enter, whole = decay_to_here(
                load_gates(rows.g, tokens, head, keys, meta.DECAY), meta.DECAY
            )
            dS *= tl.trans(whole)
        dS += call.scale * write(q_c, do_c, enter, meta)
        dS -= write(k_c, dv_c, enter, meta)
    if d_states.S0 is not None:
        tl.store(d_states.S0 + i_s, dS, mask=in_s)
