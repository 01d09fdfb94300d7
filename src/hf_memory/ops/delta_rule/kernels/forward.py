"""Forward: computations within chunks, then a loop over the chunks; for the letters see launch.py."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from hf_memory.ops.triton.tiles import (
    channels,
    chunk_bounds,
    decay_to_end,
    decay_to_here,
    load_gates,
    load_numbers,
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


class Matrices(NamedTuple):
    """The matrices of chunks, a row for each token."""

    P: Any  # [B, T, HV, C]
    U: Any = None  # [B, T, HV, C] float32, in the forward
    W: Any = None  # [B, T, HV, C] float32, in the backward


@triton.jit
def chunk_kernel(
    rows,  # Rows, without v
    matrices,  # Matrices
    call,  # Call; packed sequences with the bounds of chunks
    meta: tl.constexpr,
):
    """The matrices of one chunk and head."""
    c, head, key_head, _ = program(1, 1, meta)
    keys = channels(0, meta.BK, meta.K)
    own = channels(0, meta.C, meta.C)
    start, end = chunk_bounds(call, c, meta.C)
    lines = tl.arange(0, meta.C)
    tokens = (start + lines, start + lines < end)
    q_c = load_rows(rows.q, tokens, key_head, keys)
    k_c = load_rows(rows.k, tokens, key_head, keys)
    beta_c = tl.cast(load_numbers(rows.beta, tokens, head), tl.float32)
    gates = 0.0
    if meta.DECAY > 0:
        gates = load_gates(rows.g, tokens, head, keys, meta.DECAY)
    store_rows(matrices.P, scores(q_c, k_c, gates, False, meta), tokens, head, own)
    A = tl.where(lines[:, None] > lines[None, :], scores(k_c, k_c, gates, False, meta), 0.0)
    U_c = unit_lower_inverse(A * beta_c[None, :], meta.C)
    if matrices.U is not None:
        store_rows(matrices.U, U_c, tokens, head, own)
    if matrices.W is not None:  # (I + diag(beta) A)^-1
        W_c = tl.where(lines[:, None] == lines[None, :], 1.0, 0.0)
        W_c -= beta_c[:, None] * tl.dot(U_c, A, input_precision="tf32x3")
        store_rows(matrices.W, W_c, tokens, head, own)


@triton.jit
def first_state(S0, v, n, head, keys, values):
    """The tile of S0; without S0 zeros, or the identity if v is None too."""
    if S0 is not None:
        at, inside = state_tile(n, head, keys, values)
        S = tl.load(S0 + at, mask=inside, other=0.0)
    elif v is not None:
        S = tl.zeros([keys[0].shape[0], values[0].shape[0]], tl.float32)
    else:
        S = tl.where(keys[0][:, None] == values[0][None, :], 1.0, 0.0)
    return S


@triton.jit
def forward_kernel(
    rows,  # Rows; v is None for zeros
    matrices,  # Matrices P and U
    states,  # States; without S0 and v it begins with the identity
    out,  # Outputs: o and the errors, None if only the state is needed
    call,  # Call
    meta: tl.constexpr,
):
    """Holds S [BK, BV] for all key channels and a tile of value channels."""
    n, head, key_head, tile = program(meta.V, meta.BV, meta)
    keys = channels(0, meta.BK, meta.K)
    values = channels(tile, meta.BV, meta.V)
    own = channels(0, meta.C, meta.C)
    start, end = sequence_bounds(call, n)
    S = first_state(states.S0, rows.v, n, head, keys, values)
    for first in range(start, end, meta.C):
        t = tl.cast(first, tl.int64) + tl.arange(0, meta.C)
        tokens = (t, t < end)
        k_c = load_rows(rows.k, tokens, key_head, keys)
        U_c = load_rows(matrices.U, tokens, head, own)
        beta_c = tl.cast(load_numbers(rows.beta, tokens, head), tl.float32)[:, None]
        enter = 1.0
        leave = 1.0
        if meta.DECAY > 0:
            enter, whole = decay_to_here(
                load_gates(rows.g, tokens, head, keys, meta.DECAY), meta.DECAY
            )
        e_c = -read(k_c, S, enter, meta)
        if rows.v is not None:
            e_c += tl.cast(load_rows(rows.v, tokens, head, values), tl.float32)
        e_c = tl.dot(U_c, e_c, input_precision=meta.PRECISION)
        x_c = tl.cast(beta_c * e_c, k_c.dtype)
        if out.o is not None:
            q_c = load_rows(rows.q, tokens, key_head, keys)
            P_c = load_rows(matrices.P, tokens, head, own)
            o_c = read(q_c, S, enter, meta) + tl.dot(P_c, x_c, input_precision=meta.PRECISION)
            store_rows(out.o, call.scale * o_c, tokens, head, values)
            store_rows(out.e, e_c, tokens, head, values)
        if meta.DECAY > 0:
            S *= tl.trans(whole)
            leave = decay_to_end(rows.g, t, end, head, keys, meta.DECAY)
        S += write(k_c, x_c, leave, meta)
    if states.ST is not None:
        i_s, in_s = state_tile(n, head, keys, values)
        tl.store(states.ST + i_s, S, mask=in_s)
