"""Gradients of q, k, g, a and b of the form with a and b, by two kernels that loop over a sequence.

Two rows stand for each token: those of q above those of a for reads, with the gradients G of dO and dE, and those of k
above those of b for writes, of the values Z of V and E. With M = G Z^T for tokens i >= j, or i > j if a reads, and dS
the gradient of the state after a chunk:

    d[q; a] = e^b (G S^T) + sum_j M_ij e^(b_i - b_j) [k; b]_j               looping forwards, for tiles of key channels
    d[k; b] = e^(b_C - b) (Z dS^T) + sum_i M_ij e^(b_i - b_j) [q; a]_i      looping backwards, likewise

where b of a row of a is the sum up to the token before. The gradient of g is that of ops/triton/gradients.py.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_memory.ops.delta_rule.kernels.rank_one import DECAY
from hf_memory.ops.triton.arguments import Call, Rows
from hf_memory.ops.triton.gradients import (
    BLOCK,
    SHUT,
    Reads,
    add_within,
    block_slot,
    number_of_slots,
)
from hf_memory.ops.triton.launch import launcher, rank_one_constants
from hf_memory.ops.triton.tiles import (
    channels,
    decay_over,
    load_gates,
    load_pairs,
    load_rows,
    load_state,
    program,
    sequence_bounds,
    split_dot,
    state_tile,
    store_pairs,
    store_rows,
    turned_state_tile,
)


class Pairs(NamedTuple):
    """What both kernels read, in pairs of the rows of a token, and its gates."""

    q: Any  # [B, T, HV, K]: where it reads
    a: Any  # [B, T, HV, K]
    k: Any  # [B, T, HV, K]: where it writes
    b: Any  # [B, T, HV, K]
    v: Any  # [B, T, HV, V]: what it writes
    e: Any  # [B, T, HV, V]
    do: Any  # [B, T, HV, V]: gradients of what it reads
    de: Any  # [B, T, HV, V]
    g: Any  # [B, T, HV, K]


@triton.jit
def of_tokens(x, C: tl.constexpr):
    """The sum of both rows of each token: [2 C, D] -> [C, D]."""
    return tl.sum(tl.reshape(x, [2, C, x.shape[1]]), axis=0)


@triton.jit
def decays_of_pairs(gates, C: tl.constexpr, PRECISION: tl.constexpr):
    """Decays from the start of a chunk to each row that reads, and from each row that writes to the end, [2 C, BK]."""
    rows = tl.arange(0, 2 * C)
    t = tl.arange(0, C)[None, :]
    i = (rows % C)[:, None]
    enter = decay_over(gates, t <= i - (rows // C)[:, None], PRECISION)
    return enter, decay_over(gates, t > i, PRECISION), tl.exp2(tl.sum(gates, axis=0))[None, :]


@triton.jit
def rank_one_reads_kernel(
    pairs,  # Pairs
    S0,  # [N, HV, K, V]
    d_rows,  # Rows, of which q and a are computed here
    reads,  # Reads db and S
    call,  # Call
    meta: tl.constexpr,
):
    """Holds S^T [BV, BK] for all value channels and the i-th tile of key channels."""
    n, head, _, tile = program(meta.K, meta.BK, meta)
    keys = channels(tile, meta.BK, meta.K)
    values = channels(0, meta.BV, meta.V)
    start, end = sequence_bounds(call, n)
    slot = block_slot(call, start, n)
    i_s, in_s = turned_state_tile(n, head, keys, values)
    S = tl.load(S0 + i_s, mask=in_s, other=0.0)
    lines = tl.arange(0, 2 * meta.C)
    i = lines % meta.C
    of_q = lines < meta.C
    scales = tl.where(of_q, call.scale, 1.0)[:, None]
    for first in range(start, end, meta.C):
        t_c = tl.cast(first, tl.int64) + tl.arange(0, meta.C)
        t = tl.cast(first, tl.int64) + i
        tokens = (t_c, t_c < end)
        both = (t, t < end)
        writes = load_pairs(pairs.k, pairs.b, both, head, keys)
        Z = load_pairs(pairs.v, pairs.e, both, head, values)
        G = load_pairs(pairs.do, pairs.de, both, head, values)
        gates = load_gates(pairs.g, tokens, head, keys, DECAY)
        enter, leave, whole = decays_of_pairs(gates, meta.C, meta.PRECISION)
        M = scales * split_dot(G, tl.trans(Z), meta.PARTS, meta.PRECISION)
        M = tl.where(i[None, :] <= (i - lines // meta.C)[:, None], M, 0.0)
        dx = scales * enter * split_dot(G, tl.cast(S, G.dtype), meta.PARTS, meta.PRECISION)
        dx = add_within(dx, M, writes, gates, False, meta)
        store_pairs(d_rows.q, d_rows.a, dx, both, head, keys)
        x = load_pairs(pairs.q, pairs.a, both, head, keys)
        store_rows(reads.db, of_tokens(x * dx, meta.C), tokens, head, keys)
        S *= whole
        S += tl.dot(tl.trans(Z), tl.cast(writes * leave, Z.dtype), input_precision=meta.PRECISION)
        done = tl.cast(first, tl.int64) + meta.C - start
        if (done % BLOCK == 0) | (start + done >= end):
            at, inside = state_tile(slot + (done - 1) // BLOCK, head, values, keys)
            tl.store(reads.S + at, S, mask=inside)


@triton.jit
def rank_one_writes_kernel(
    pairs,  # Pairs
    dST,  # [N, HV, K, V]; None for zeros
    d_rows,  # Rows, of which a is given, and k, b and g are computed here
    reads,  # Reads db and S
    call,  # Call
    meta: tl.constexpr,
):
    """Holds dS^T [BV, BK] for all value channels and the i-th tile of key channels."""
    n, head, _, tile = program(meta.K, meta.BK, meta)
    keys = channels(tile, meta.BK, meta.K)
    values = channels(0, meta.BV, meta.V)
    start, end = sequence_bounds(call, n)
    slot = block_slot(call, start, n)
    i_s, in_s = turned_state_tile(n, head, keys, values)
    dS = load_state(dST, i_s, in_s)
    lines = tl.arange(0, 2 * meta.C)
    i = lines % meta.C
    of_q = lines < meta.C
    scales = tl.where(of_q, call.scale, 1.0)
    tail = tl.zeros([1, meta.BK], tl.float32)
    chunks = (end - start + meta.C - 1) // meta.C
    for back in range(chunks):
        done = (chunks - tl.cast(back, tl.int64)) * meta.C  # tokens up to the end of this chunk
        if (done % BLOCK == 0) | (back == 0):
            at, inside = state_tile(slot + (done - 1) // BLOCK, head, values, keys)
            tail = tl.sum(tl.load(reads.S + at, mask=inside, other=0.0) * dS, axis=0)[None, :]
        t_c = start + done - meta.C + tl.arange(0, meta.C)
        t = start + done - meta.C + i
        tokens = (t_c, t_c < end)
        both = (t, t < end)
        x = load_pairs(pairs.q, pairs.a, both, head, keys)
        Z = load_pairs(pairs.v, pairs.e, both, head, values)
        G = load_pairs(pairs.do, pairs.de, both, head, values)
        gates = load_gates(pairs.g, tokens, head, keys, DECAY)
        enter, leave, whole = decays_of_pairs(gates, meta.C, meta.PRECISION)
        M = scales[None, :] * split_dot(Z, tl.trans(G), meta.PARTS, meta.PRECISION)
        M = tl.where(i[:, None] <= (i - lines // meta.C)[None, :], M, 0.0)
        dx = leave * split_dot(Z, tl.cast(dS, Z.dtype), meta.PARTS, meta.PRECISION)
        dx = add_within(dx, M, x, gates, True, meta)
        store_pairs(d_rows.k, d_rows.b, dx, both, head, keys)
        writes = load_pairs(pairs.k, pairs.b, both, head, keys)
        db_c = load_rows(reads.db, tokens, head, keys) - of_tokens(writes * dx, meta.C)
        total = tl.sum(db_c, axis=0)[None, :]
        # is read before its token decays
        a_c = tl.cast(load_rows(pairs.a, tokens, head, keys), tl.float32)
        own = a_c * tl.cast(load_rows(d_rows.a, tokens, head, keys), tl.float32)
        dg_c = total - tl.cumsum(db_c, axis=0) + db_c + tail - own
        store_rows(d_rows.g, tl.where(gates < SHUT, 0.0, dg_c), tokens, head, keys)
        tail += total
        dS *= whole
        dS += tl.dot(
            tl.trans(G),
            tl.cast(scales[:, None] * enter * x, G.dtype),
            input_precision=meta.PRECISION,
        )


def row_gradients(pairs: Pairs, S: Tensor, dST: Tensor | None, call: Call) -> Rows:
    """Gradients of q, k, g, a and b; all tensors are contiguous, `S` are states before sequences, `dST` those after."""
    q = pairs.q
    N, HV, K, V = S.shape
    _, (meta, options) = rank_one_constants(HV, K, V, q.dtype)
    grid = (N * HV * triton.cdiv(K, meta.BK),)
    reads = Reads(db=S.new_empty(q.shape), S=q.new_empty(number_of_slots(q, S, call), HV, V, K))
    read = Rows(q=torch.empty_like(q), a=torch.empty_like(q))
    written = Rows(k=torch.empty_like(q), g=S.new_empty(q.shape), a=read.a, b=torch.empty_like(q))
    launcher(rank_one_reads_kernel, grid)(pairs, S, read, reads, call, meta=meta, **options)
    launcher(rank_one_writes_kernel, grid)(pairs, dST, written, reads, call, meta=meta, **options)
    return written._replace(q=read.q)
