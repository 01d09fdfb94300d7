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

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_memory.ops.triton.arguments import Call, Outputs, Rows, States
from hf_memory.ops.triton.launch import (
    CHUNK,
    SCALAR,
    VECTOR,
    Constants,
    additive_constants,
    decay_kind,
    launcher,
)
from hf_memory.ops.triton.tiles import (
    channels,
    decay_between,
    decay_of_level,
    decays,
    level_of_pairs,
    load_numbers,
    load_rows,
    load_state,
    normalizer_tile,
    program,
    sequence_bounds,
    split_dot,
    state_tile,
    store_rows,
    turned_state_tile,
    write_transposed,
)

BLOCK = tl.constexpr(CHUNK)  # tokens after which a state is stored
SHUT = tl.constexpr(-150.0)  # below it e^g is zero, and so is its gradient


class Reads(NamedTuple):
    """What the loop forwards leaves for the loop backwards."""

    dq: Any = None  # [B, T, HV, K], float32 with a decay for each channel; else only the first loop has it
    dk: Any = None  # [B, T, HV, K] float32, of reads by k, or None
    db: Any = None  # [tiles of K, B, T, HV] float32, sums of q dq + k dk, for a decay for each head, or None
    # [slots, HV, V, K]: the state after each block of CHUNK tokens; None without decay
    S: Any = None
    z: Any = None  # [slots, HV, K] float32, the same of the normaliser, or None


@triton.jit
def block_slot(call, start, n):
    """The first slot of sequence n among the stored states; packed sequences have one more slot for a partial block."""
    return start // BLOCK + n if call.bounds is not None else n * ((call.T + BLOCK - 1) // BLOCK)


def number_of_slots(q: Tensor, states: Tensor, call: Call) -> int:
    """How many states kernels store for queries [B, T, H, K] and states [N, HV, K, V]; see `block_slot`."""
    B, T = q.shape[:2]
    return B * triton.cdiv(T, CHUNK) if call.bounds is None else B * T // CHUNK + states.shape[0]


@triton.jit
def add_within(x, P, y, gates, OF_KEYS: tl.constexpr, meta: tl.constexpr):
    """x [C, BK] plus the sum over columns j of P_ij y_j, with the decay from j to i, or OF_KEYS from i to j."""
    if meta.DECAY == 2:
        ROWS: tl.constexpr = x.shape[0]  # C, or 2 C with two rows of each token
        tokens = tl.arange(0, ROWS) % meta.C
        same = tl.where(tokens[:, None] == tokens[None, :], P, 0.0)
        if ROWS > meta.C:
            x += tl.dot(tl.cast(same, y.dtype), y, input_precision=meta.PRECISION)
        else:
            x += tl.sum(same, axis=1)[:, None] * y
        for level in tl.static_range(6):
            if 2**level < meta.C:
                decay = decay_of_level(gates, 2**level, meta.C, ROWS, meta.PRECISION)
                P_c = tl.cast(
                    tl.where(level_of_pairs(2**level, meta.C, ROWS, OF_KEYS), P, 0.0), y.dtype
                )
                x += decay * tl.dot(
                    P_c, tl.cast(y * decay, y.dtype), input_precision=meta.PRECISION
                )
    else:
        if meta.DECAY == 1:
            P = decay_between(P, gates, OF_KEYS)
        x += tl.dot(tl.cast(P, y.dtype), y, input_precision=meta.PRECISION)
    return x


@triton.jit
def dq_kernel(
    rows,  # Rows; q is None unless the decay is one for each head, and beta unless the gradient of e is given
    states,  # States, of which those before are read
    d_out,  # Outputs: gradients of the numerator, of the denominator or None, and of e or None
    reads,  # Reads
    call,  # Call
    meta: tl.constexpr,
):
    """Holds S^T [BV, BK] for all value channels and the i-th tile of key channels."""
    n, head, key_head, tile = program(meta.K, meta.BK, meta)
    keys = channels(tile, meta.BK, meta.K)
    values = channels(0, meta.BV, meta.V)
    start, end = sequence_bounds(call, n)
    slot = block_slot(call, start, n)
    i_s, in_s = turned_state_tile(n, head, keys, values)
    S = tl.load(states.S0 + i_s, mask=in_s, other=0.0)
    if meta.NORMALIZE:
        i_z, in_z = normalizer_tile(n, head, keys)
        z = tl.load(states.z0 + i_z, mask=in_z, other=0.0)
    cols = tl.arange(0, meta.C)
    # for sm_100, Triton 3.5 pipelines no other type
    for chunk in range(tl.cast((end - start + meta.C - 1) // meta.C, tl.int32)):
        first = start + tl.cast(chunk, tl.int64) * meta.C
        t = first + cols
        tokens = (t, t < end)
        k_c = load_rows(rows.k, tokens, key_head, keys)
        v_c = load_rows(rows.v, tokens, head, values)
        do_c = load_rows(d_out.o, tokens, head, values)
        gates = 0.0
        enter = 1.0
        leave = 1.0
        if meta.DECAY > 0:
            gates, enter, leave, whole = decays(rows.g, t, end, head, keys, meta.DECAY)
        P = call.scale * split_dot(do_c, tl.trans(v_c), meta.PARTS, meta.PRECISION)
        dq_c = call.scale * split_dot(do_c, tl.cast(S, do_c.dtype), meta.PARTS, meta.PRECISION)
        if meta.NORMALIZE:
            dd_c = load_numbers(d_out.den, tokens, head)[:, None]
            P += dd_c
            dq_c += dd_c * z[None, :]
        if d_out.e is not None:
            w_c = tl.cast(load_numbers(rows.beta, tokens, head), tl.float32)
            P *= w_c[None, :]
            leave *= w_c[:, None]
        P = tl.where(cols[:, None] >= cols[None, :], P, 0.0)
        dq_c = add_within(dq_c * enter, P, k_c, gates, False, meta)
        store_rows(reads.dq, dq_c, tokens, head, keys)
        if meta.DECAY == 1:
            db_c = tl.sum(
                tl.cast(load_rows(rows.q, tokens, key_head, keys), tl.float32) * dq_c, axis=1
            )
        if d_out.e is not None:
            dr_c = load_rows(d_out.e, tokens, head, values)
            R = split_dot(dr_c, tl.trans(v_c), meta.PARTS, meta.PRECISION)
            R = tl.where(cols[:, None] > cols[None, :], -w_c[None, :] * R, 0.0)
            dk_c = -enter * split_dot(dr_c, tl.cast(S, dr_c.dtype), meta.PARTS, meta.PRECISION)
            dk_c = add_within(dk_c, R, k_c, gates, False, meta)
            store_rows(reads.dk, dk_c, tokens, head, keys)
            if meta.DECAY == 1:
                db_c += tl.sum(tl.cast(k_c, tl.float32) * dk_c, axis=1)
        if meta.DECAY == 1:
            i_b = (tl.cast(tile, tl.int64) * call.tokens + t) * meta.HV + head[0]
            tl.store(reads.db + i_b, db_c, mask=t < end)
        if meta.DECAY > 0:
            S *= whole
        S += write_transposed(
            k_c, v_c, leave, meta.DECAY if d_out.e is None or meta.DECAY == 2 else 1, meta.PRECISION
        )
        if meta.NORMALIZE:
            if meta.DECAY > 0:
                z *= tl.sum(whole, axis=0)
            z += tl.sum(tl.cast(k_c, tl.float32) * leave, axis=0)
        if meta.DECAY > 0:
            done = first + meta.C - start
            if (done % BLOCK == 0) | (start + done >= end):
                block = slot + (done - 1) // BLOCK
                at, inside = state_tile(block, head, values, keys)
                tl.store(reads.S + at, S, mask=inside)
                if meta.NORMALIZE:
                    at, inside = normalizer_tile(block, head, keys)
                    tl.store(reads.z + at, z, mask=inside)


@triton.jit
def dk_kernel(
    rows,  # Rows; k is None without decay and gradient of e, and beta without the latter
    d_out,  # Outputs, as above
    reads,  # Reads, of which dq is None unless the decay is one for each channel
    d_states,  # States: those after are given, those before are computed
    d_rows,  # Rows, of which k and g are computed, g [tiles of K, B, T, HV] or [B, T, HV, K] float32, or None
    call,  # Call
    meta: tl.constexpr,
):
    """Holds dS^T [BV, BK] for all value channels and the i-th tile of key channels."""
    n, head, key_head, tile = program(meta.K, meta.BK, meta)
    keys = channels(tile, meta.BK, meta.K)
    values = channels(0, meta.BV, meta.V)
    start, end = sequence_bounds(call, n)
    slot = block_slot(call, start, n)
    i_s, in_s = turned_state_tile(n, head, keys, values)
    dS = load_state(d_states.ST, i_s, in_s)
    if meta.NORMALIZE:
        i_z, in_z = normalizer_tile(n, head, keys)
        dz = tl.load(d_states.zT + i_z, mask=in_z, other=0.0)
    lines = tl.arange(0, meta.C)  # of keys; columns are queries
    tail = tl.zeros([1, meta.BK if meta.DECAY == 2 else 1], tl.float32)
    chunks = tl.cast((end - start + meta.C - 1) // meta.C, tl.int32)
    for back in range(chunks):
        done = (chunks - tl.cast(back, tl.int64)) * meta.C  # tokens up to the end of this chunk
        if meta.DECAY > 0:  # noqa: SIM102  (one is known at compile time, the other is not)
            if (done % BLOCK == 0) | (back == 0):
                block = slot + (done - 1) // BLOCK
                at, inside = state_tile(block, head, values, keys)
                S = tl.load(reads.S + at, mask=inside, other=0.0)
                end_sum = tl.sum(S * dS, axis=0)[None, :]
                if meta.NORMALIZE:
                    at, inside = normalizer_tile(block, head, keys)
                    end_sum += (tl.load(reads.z + at, mask=inside, other=0.0) * dz)[None, :]
                tail = end_sum if meta.DECAY == 2 else tl.sum(end_sum, axis=1)[:, None]
        t = start + done - meta.C + lines
        tokens = (t, t < end)
        q_c = load_rows(rows.q, tokens, key_head, keys)
        if rows.k is not None:
            k_c = load_rows(rows.k, tokens, key_head, keys)
        v_c = load_rows(rows.v, tokens, head, values)
        do_c = load_rows(d_out.o, tokens, head, values)
        gates = 0.0
        enter = 1.0
        leave = 1.0
        if meta.DECAY > 0:
            gates, enter, leave, whole = decays(rows.g, t, end, head, keys, meta.DECAY)
        P = call.scale * split_dot(v_c, tl.trans(do_c), meta.PARTS, meta.PRECISION)
        dk_c = split_dot(v_c, tl.cast(dS, v_c.dtype), meta.PARTS, meta.PRECISION)
        if meta.NORMALIZE:
            dd_c = load_numbers(d_out.den, tokens, head)
            P += dd_c[None, :]
            dk_c += dz[None, :]
        P = tl.where(lines[:, None] <= lines[None, :], P, 0.0)
        dk_c = add_within(dk_c * leave, P, q_c, gates, True, meta)
        if d_out.e is not None:
            dr_c = load_rows(d_out.e, tokens, head, values)
            R = split_dot(v_c, tl.trans(dr_c), meta.PARTS, meta.PRECISION)
            R = tl.where(lines[:, None] < lines[None, :], -R, 0.0)
            dk_c = add_within(dk_c, R, k_c, gates, True, meta)
        dk_all = dk_c
        if d_out.e is not None:
            dk_c *= tl.cast(load_numbers(rows.beta, tokens, head), tl.float32)[:, None]
            read_c = load_rows(reads.dk, tokens, head, keys)
            dk_all = dk_c + read_c
        store_rows(d_rows.k, dk_all, tokens, head, keys)
        if meta.DECAY > 0:
            written = tl.cast(k_c, tl.float32) * dk_c
            if meta.DECAY == 2:
                db_c = tl.cast(q_c, tl.float32) * load_rows(reads.dq, tokens, head, keys) - written
                if d_out.e is not None:
                    db_c += tl.cast(k_c, tl.float32) * read_c
                total = tl.sum(db_c, axis=0)[None, :]
                dg_c = total - tl.cumsum(db_c, axis=0) + db_c + tail
                store_rows(d_rows.g, tl.where(gates < SHUT, 0.0, dg_c), tokens, head, keys)
                tail += total
            else:  # cumsum in one dimension, sums in two: Triton 3.6 compiles nothing else, for sm_100
                i_g = (tl.cast(tile, tl.int64) * call.tokens + t) * meta.HV + head[0]
                in_t = t < end
                db_c = tl.load(reads.db + i_g, mask=in_t, other=0.0) - tl.sum(written, axis=1)
                total = tl.sum(db_c[:, None], axis=0)[:, None]
                dg_c = total + tail + (db_c - tl.cumsum(db_c, axis=0))[:, None]
                shut = gates[:, None] < SHUT  # type: ignore[index]
                tl.store(d_rows.g + i_g[:, None], tl.where(shut, 0.0, dg_c), mask=in_t[:, None])
                tail += total
            dS *= whole
        dS += call.scale * write_transposed(q_c, do_c, enter, meta.DECAY, meta.PRECISION)
        if d_out.e is not None:
            dS -= write_transposed(k_c, dr_c, enter, meta.DECAY, meta.PRECISION)
        if meta.NORMALIZE:
            if meta.DECAY > 0:
                dz *= tl.sum(whole, axis=0)
            dz += tl.sum(tl.cast(q_c, tl.float32) * enter * dd_c[:, None], axis=0)
    if meta.NORMALIZE:
        tl.store(d_states.z0 + i_z, dz, mask=in_z)


def _constants(rows: Rows, V: int, reads: bool) -> Constants:
    """How both kernels are compiled and launched; those of narrow heads that are read twice save registers."""
    H, K = rows.q.shape[2:]
    HV = rows.v.shape[2]
    decay = decay_kind(rows.g)
    _, (meta, options) = additive_constants(H, HV, K, V, decay, rows.q.dtype)
    if reads and V <= 64 and decay == SCALAR:
        meta = meta._replace(C=min(meta.C, 32))
    elif reads and V <= 64 and decay == VECTOR:
        options["num_warps"] = 8
    return Constants(meta, options)


def query_and_key_gradients(
    rows: Rows, states: States, d_out: Outputs, d_states: States, call: Call
) -> tuple[Tensor, Tensor, Any, Any]:
    """dq, dk, dg and dz0, of which the last two may be None; all tensors are contiguous.

    Args:
        rows: q, k, v and g; for the delta rule errors as v, and beta.
        states: the states before sequences.
        d_out: gradients of the numerator and the denominator; for the delta rule those of the errors, too.
        d_states: gradients of the states after sequences.
        call: the sequences.
    """
    S = states.S0
    z = states.z0
    B, T, H, K = rows.q.shape
    N, HV, _, V = S.shape
    decay = decay_kind(rows.g)
    normalize = z is not None
    meta, options = _constants(rows, V, d_out.e is not None)
    tiles = triton.cdiv(K, meta.BK)
    out = rows.q if H == HV else S  # the sum over a group is taken in float32
    dk = out.new_empty(B, T, HV, K)
    dz0 = None if z is None else torch.empty_like(z)
    dq = (S if decay == VECTOR else out).new_empty(B, T, HV, K)
    db, dg = (S.new_empty(tiles, B, T, HV) if decay == SCALAR else None for _ in range(2))
    if decay == VECTOR:
        dg = S.new_empty(B, T, HV, K)
    slots = number_of_slots(rows.q, S, call)
    reads = Reads(
        dq=dq,
        dk=None if d_out.e is None else S.new_empty(B, T, HV, K),
        db=db,
        S=rows.q.new_empty(slots, HV, V, K) if decay else None,
        z=S.new_empty(slots, HV, K) if decay and normalize else None,
    )
    call = call._replace(tokens=B * T)
    grid = (N * HV * tiles,)
    meta = meta._replace(NORMALIZE=normalize)
    read = rows if decay == SCALAR else rows._replace(q=None)
    launcher(dq_kernel, grid)(read, states, d_out, reads, call, meta=meta, **options)
    written = rows if decay or d_out.e is not None else rows._replace(k=None)
    reads = reads if decay == VECTOR else reads._replace(dq=None)
    d_states = d_states._replace(z0=dz0)
    launcher(dk_kernel, grid)(
        written, d_out, reads, d_states, Rows(k=dk, g=dg), call, meta=meta, **options
    )
    if H != HV:
        dq, dk = (x.unflatten(2, (H, -1)).sum(3) for x in (dq, dk))
    dq, dk = (x if x.dtype == rows.q.dtype else x.to(rows.q.dtype) for x in (dq, dk))
    return dq, dk, dg.sum(0) if dg is not None and decay == SCALAR else dg, dz0
