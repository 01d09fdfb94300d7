"""Gradients of q, k, g, a and b of the form with a and b, by two kernels that loop over a sequence.

Two rows stand for each token: those of q above those of a for reads, with the gradients G of dO and dE, and those of k
above those of b for writes, of the values Z of V and E. With M = G Z^T for tokens i >= j, or i > j if a reads, and dS
the gradient of the state after a chunk:

    d[q; a] = e^b (G S^T) + sum_j M_ij e^(b_i - b_j) [k; b]_j               looping forwards, for tiles of key channels
    d[k; b] = e^(b_C - b) (Z dS^T) + sum_i M_ij e^(b_i - b_j) [q; a]_i      looping backwards, likewise

where b of a row of a is the sum up to the token before. The gradient of g is that of ops/triton/gradients.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_memory.ops.delta_rule.kernels.rank_one import DECAY
from hf_memory.ops.triton.gradients import SHUT, add_within, block_slot
from hf_memory.ops.triton.launch import CHUNK, launcher, rank_one_constants
from hf_memory.ops.triton.segments import tokens_of_sequences
from hf_memory.ops.triton.tiles import (
    decay_over,
    load_gates,
    load_pairs,
    load_rows,
    program,
    sequence_bounds,
    split_dot,
    store_pairs,
    store_rows,
)


@triton.jit
def of_tokens(x, C: tl.constexpr):
    """The sum of both rows of each token: [2 C, D] -> [C, D]."""
    return tl.sum(tl.reshape(x, [2, C, x.shape[1]]), axis=0)


@triton.jit
def decays_of_pairs(gates, C: tl.constexpr, PRECISION: tl.constexpr):
    """Decays from the start of a chunk to each row that reads, and from each row that writes to the end, [2 C, BK]."""
    rows, t = tl.arange(0, 2 * C), tl.arange(0, C)[None, :]
    i = (rows % C)[:, None]
    enter = decay_over(gates, t <= i - (rows // C)[:, None], PRECISION)
    return enter, decay_over(gates, t > i, PRECISION), tl.exp2(tl.sum(gates, axis=0))[None, :]


@triton.jit
def rank_one_reads_kernel(
    q,  # [B, T, HV, K]
    k,  # [B, T, HV, K]
    v,  # [B, T, HV, V]
    g,  # [B, T, HV, K]
    a,  # [B, T, HV, K]
    b,  # [B, T, HV, K]
    e,  # [B, T, HV, V]
    do,  # [B, T, HV, V]
    de,  # [B, T, HV, V]
    S0,  # [N, HV, K, V]
    dq,  # [B, T, HV, K]
    da,  # [B, T, HV, K]
    db,  # [B, T, HV, K] float32, sums of q dq + a da
    states,  # [slots, HV, V, K]: the state after each block of CHUNK tokens
    cu_seqlens,  # [N + 1] or None
    scale,
    T,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    CHUNK: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Holds S^T [BV, BK] for all value channels and the i-th tile of key channels."""
    n, hv, tile = program(HV, (K + BK - 1) // BK)
    i_k, i_v = tile * BK + tl.arange(0, BK), tl.arange(0, BV)
    in_k, in_v = i_k < K, i_v < V
    start, end = sequence_bounds(cu_seqlens, n, T)
    slot = block_slot(cu_seqlens, start, n, T, CHUNK)
    in_s = in_v[:, None] & in_k[None, :]
    S = tl.load(S0 + (n * HV + hv) * K * V + i_k[None, :] * V + i_v[:, None], mask=in_s, other=0.0)
    rows = tl.arange(0, 2 * C)
    tokens, of_q = rows % C, rows < C
    scales = tl.where(of_q, scale, 1.0)[:, None]
    for first in range(start, end, C):
        t_c = tl.cast(first, tl.int64) + tl.arange(0, C)
        t = tl.cast(first, tl.int64) + tokens
        in_t = t < end
        writes = load_pairs(k, b, t, in_t, hv, HV, i_k, in_k, K)
        Z = load_pairs(v, e, t, in_t, hv, HV, i_v, in_v, V)
        G = load_pairs(do, de, t, in_t, hv, HV, i_v, in_v, V)
        gates = load_gates(g, t_c, t_c < end, hv, HV, i_k, in_k, K, DECAY)
        enter, leave, whole = decays_of_pairs(gates, C, PRECISION)
        M = scales * split_dot(G, tl.trans(Z), PARTS, PRECISION)
        M = tl.where(tokens[None, :] <= (tokens - rows // C)[:, None], M, 0.0)
        dx = scales * enter * split_dot(G, tl.cast(S, G.dtype), PARTS, PRECISION)
        dx = add_within(dx, M, writes, gates, C, DECAY, False, PRECISION)
        store_pairs(dq, da, dx, t, in_t, hv, HV, i_k, in_k, K)
        reads = load_pairs(q, a, t, in_t, hv, HV, i_k, in_k, K)
        store_rows(db, of_tokens(reads * dx, C), t_c, t_c < end, hv, HV, i_k, in_k, K)
        S *= whole
        S += tl.dot(tl.trans(Z), tl.cast(writes * leave, Z.dtype), input_precision=PRECISION)
        done = tl.cast(first, tl.int64) + C - start
        if (done % CHUNK == 0) | (start + done >= end):
            block = (slot + (done - 1) // CHUNK) * HV + hv
            tl.store(states + block * V * K + i_v[:, None] * K + i_k[None, :], S, mask=in_s)


@triton.jit
def rank_one_writes_kernel(
    q,  # [B, T, HV, K]
    k,  # [B, T, HV, K]
    v,  # [B, T, HV, V]
    g,  # [B, T, HV, K]
    a,  # [B, T, HV, K]
    b,  # [B, T, HV, K]
    e,  # [B, T, HV, V]
    do,  # [B, T, HV, V]
    de,  # [B, T, HV, V]
    dST,  # [N, HV, K, V]; None for zeros
    da,  # [B, T, HV, K]
    db,  # [B, T, HV, K] float32, of reads
    states,  # [slots, HV, V, K] float32
    dk,  # [B, T, HV, K]
    db_write,  # [B, T, HV, K], the gradient of b
    dg,  # [B, T, HV, K] float32
    cu_seqlens,  # [N + 1] or None
    scale,
    T,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    CHUNK: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Holds dS^T [BV, BK] for all value channels and the i-th tile of key channels."""
    n, hv, tile = program(HV, (K + BK - 1) // BK)
    i_k, i_v = tile * BK + tl.arange(0, BK), tl.arange(0, BV)
    in_k, in_v = i_k < K, i_v < V
    start, end = sequence_bounds(cu_seqlens, n, T)
    slot = block_slot(cu_seqlens, start, n, T, CHUNK)
    in_s = in_v[:, None] & in_k[None, :]
    dS = tl.zeros([BV, BK], tl.float32)
    if dST is not None:
        dS = tl.load(dST + (n * HV + hv) * K * V + i_k[None, :] * V + i_v[:, None], mask=in_s, other=0.0)
    rows = tl.arange(0, 2 * C)
    tokens, of_q = rows % C, rows < C
    scales = tl.where(of_q, scale, 1.0)
    tail = tl.zeros([1, BK], tl.float32)
    chunks = (end - start + C - 1) // C
    for back in range(chunks):
        done = (chunks - tl.cast(back, tl.int64)) * C  # tokens up to the end of this chunk
        if (done % CHUNK == 0) | (back == 0):
            block = (slot + (done - 1) // CHUNK) * HV + hv
            S = tl.load(states + block * V * K + i_v[:, None] * K + i_k[None, :], mask=in_s, other=0.0)
            tail = tl.sum(S * dS, axis=0)[None, :]
        t_c = start + done - C + tl.arange(0, C)
        t = start + done - C + tokens
        in_t, in_c = t < end, t_c < end
        reads = load_pairs(q, a, t, in_t, hv, HV, i_k, in_k, K)
        Z = load_pairs(v, e, t, in_t, hv, HV, i_v, in_v, V)
        G = load_pairs(do, de, t, in_t, hv, HV, i_v, in_v, V)
        gates = load_gates(g, t_c, in_c, hv, HV, i_k, in_k, K, DECAY)
        enter, leave, whole = decays_of_pairs(gates, C, PRECISION)
        M = scales[None, :] * split_dot(Z, tl.trans(G), PARTS, PRECISION)
        M = tl.where(tokens[:, None] <= (tokens - rows // C)[None, :], M, 0.0)
        dx = leave * split_dot(Z, tl.cast(dS, Z.dtype), PARTS, PRECISION)
        dx = add_within(dx, M, reads, gates, C, DECAY, True, PRECISION)
        store_pairs(dk, db_write, dx, t, in_t, hv, HV, i_k, in_k, K)
        writes = load_pairs(k, b, t, in_t, hv, HV, i_k, in_k, K)
        db_c = load_rows(db, t_c, in_c, hv, HV, i_k, in_k, K) - of_tokens(writes * dx, C)
        total = tl.sum(db_c, axis=0)[None, :]
        a_c = tl.cast(load_rows(a, t_c, in_c, hv, HV, i_k, in_k, K), tl.float32)  # is read before its token decays
        own = a_c * tl.cast(load_rows(da, t_c, in_c, hv, HV, i_k, in_k, K), tl.float32)
        dg_c = total - tl.cumsum(db_c, axis=0) + db_c + tail - own
        store_rows(dg, tl.where(gates < SHUT, 0.0, dg_c), t_c, in_c, hv, HV, i_k, in_k, K)
        tail += total
        dS *= whole
        dS += tl.dot(tl.trans(G), tl.cast(scales[:, None] * enter * reads, G.dtype), input_precision=PRECISION)


def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    a: Tensor,
    b: Tensor,
    S: Tensor,
    e: Tensor,
    do: Tensor,
    de: Tensor,
    dST: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dg, da and db; all tensors are contiguous, `S` are the states before sequences and `dST` those after."""
    (B, T, HV, K), (N, _, _, V), length = q.shape, S.shape, tokens_of_sequences(q, S)
    _, constants = rank_one_constants(HV, K, V, q.dtype)
    slots = B * triton.cdiv(T, CHUNK) if cu_seqlens is None else B * T // CHUNK + N
    states, grid = q.new_empty(slots, HV, V, K), (N * HV * triton.cdiv(K, constants["BK"]),)
    (dq, dk, da, db), (of_reads, dg) = (torch.empty_like(q) for _ in range(4)), (S.new_empty(q.shape) for _ in range(2))
    launcher(rank_one_reads_kernel, grid)(
        q, k, v, g, a, b, e, do, de, S, dq, da, of_reads, states, cu_seqlens, scale, length, **constants
    )
    launcher(rank_one_writes_kernel, grid)(
        q, k, v, g, a, b, e, do, de, dST, da, of_reads, states, dk, db, dg, cu_seqlens, scale, length, **constants
    )
    return dq, dk, dg, da, db
