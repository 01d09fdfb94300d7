"""Triangular systems with DeltaFormer's weights: rows' normalisers, inverses of blocks, sums over panels, substitution.

The system is solved panel by panel. What solved panels give to the rows of the next one is summed by many programs, one
for each block of rows; then one program a head goes through the panel's blocks, and reads what it wrote itself.
"""

import triton
import triton.language as tl

from hf_memory.ops.deltaformer.kernels.blocks import head_and_block, load_row, own_weights, recalled
from hf_memory.ops.triton.tiles import (
    LOG2E,
    channels,
    load_rows,
    store_numbers,
    store_rows,
    unit_lower_inverse,
)


@triton.jit
def normalizer_kernel(
    k,  # [B, T, H, K]
    L,  # [B, T, H] float32
    scale,
    T,
    meta: tl.constexpr,
):
    """L_t = log2 sum_{i<t} exp(scale k_i k_t), infinite for the first row, for a block of ROWS rows."""
    blocks = (T + meta.ROWS - 1) // meta.ROWS
    row, head, block = head_and_block(T, blocks, meta)
    scale *= LOG2E
    first = (blocks - 1 - block) * meta.ROWS  # the longest sums begin first
    keys = channels(0, meta.BK, meta.K)
    t = first + tl.arange(0, meta.ROWS)
    tokens = (row + t, t < T)
    k_t = load_rows(k, tokens, head, keys)
    m = tl.full([meta.ROWS], -1e30, tl.float32)
    l = tl.zeros([meta.ROWS], tl.float32)
    for start in range(0, tl.minimum(first + meta.ROWS, T), meta.C):
        s = start + tl.arange(0, meta.C)
        k_s = load_rows(k, (row + s, s < T), head, keys)
        X = scale * tl.dot(k_t, tl.trans(k_s), input_precision=meta.PRECISION)
        X = tl.where(t[:, None] > s[None, :], X, -float("inf"))
        m_new = tl.maximum(m, tl.max(X, axis=1))
        l = l * tl.exp2(m - m_new) + tl.sum(tl.exp2(X - m_new[:, None]), axis=1)
        m = m_new
    store_numbers(
        L, tl.where(l > 0, m + tl.log2(tl.where(l > 0, l, 1.0)), float("inf")), tokens, head
    )


@triton.jit
def inverse_kernel(
    system,  # System, of which k, beta and L are read
    W,  # [B, T, H, C] float32
    scale,
    T,
    meta: tl.constexpr,
):
    """W = (I + diag(beta) P)^-1 of a block of C rows."""
    row, head, block = head_and_block(T, (T + meta.C - 1) // meta.C, meta)
    t = row + block * meta.C + tl.arange(0, meta.C)
    tokens = (t, t < row + T)
    k_t = load_rows(system.k, tokens, head, channels(0, meta.BK, meta.K))
    b_t = load_row(system.beta, tokens, head, 0.0)
    L_t = load_row(system.L, tokens, head, float("inf"))
    P = own_weights(k_t, L_t, scale * LOG2E, meta)
    store_rows(
        W, unit_lower_inverse(b_t[:, None] * P, meta.C), tokens, head, channels(0, meta.C, meta.C)
    )


@triton.jit
def gather_kernel(
    system,  # System
    x,  # [B, T, H, V], what the solved panels hold
    out,  # [B, T, H, V] float32
    place,  # Place
    meta: tl.constexpr,
):
    """out_t = a_t v_t - beta_t sum_s P_ts x_s over all panels before; BACKWARDS: v_t - sum_s P_st x_s, after."""
    panel = place.panel
    end = place.end
    T = place.T
    row, head, block = head_and_block(T, (end - panel + meta.ROWS - 1) // meta.ROWS, meta)
    values = channels(0, meta.BV, meta.V)
    t = row + panel + block * meta.ROWS + tl.arange(0, meta.ROWS)
    tokens = (t, t < row + end)
    k_t = load_rows(system.k, tokens, head, channels(0, meta.BK, meta.K))
    L_t = load_row(system.L, tokens, head, float("inf"))
    if meta.BACKWARDS:
        first = end
        last = T
    else:
        first = panel * 0
        last = panel
    total = recalled((k_t, L_t), system, x, (row, first, last), place.scale * LOG2E, head, meta)
    v_t = tl.cast(load_rows(system.v, tokens, head, values), tl.float32)
    if meta.BACKWARDS:
        v_t -= total
    else:
        a_t = load_row(system.a, tokens, head, 0.0)
        b_t = load_row(system.beta, tokens, head, 0.0)
        v_t = a_t[:, None] * v_t - b_t[:, None] * total
    store_rows(out, v_t, tokens, head, values)


@triton.jit
def substitute_kernel(
    system,  # System, of which k, beta and L are read
    W,  # [B, T, H, C] float32
    out,  # [B, T, H, V] float32, the right side, which becomes the solution
    x,  # [B, T, H, V], what later blocks read: the solution, times beta if BACKWARDS
    place,  # Place
    meta: tl.constexpr,
):
    """Solve for the tokens of a panel, block by block, BACKWARDS the transposed system from the last block on."""
    panel = place.panel
    end = place.end
    row, head, _ = head_and_block(place.T, 1, meta)
    keys = channels(0, meta.BK, meta.K)
    values = channels(0, meta.BV, meta.V)
    own = channels(0, meta.C, meta.C)
    blocks = (end - panel + meta.C - 1) // meta.C
    for n in range(blocks):
        if meta.BACKWARDS:
            here = panel + (blocks - 1 - n) * meta.C
            first = tl.minimum(here + meta.C, end)
            last = end
        else:
            here = panel + n * meta.C
            first = panel
            last = here
        t = row + here + tl.arange(0, meta.C)
        tokens = (t, t < row + end)
        k_t = load_rows(system.k, tokens, head, keys)
        b_t = load_row(system.beta, tokens, head, 0.0)
        L_t = load_row(system.L, tokens, head, float("inf"))
        W_t = load_rows(W, tokens, head, own)
        total = recalled((k_t, L_t), system, x, (row, first, last), place.scale * LOG2E, head, meta)
        right = load_rows(out, tokens, head, values)
        if meta.BACKWARDS:
            solved = tl.dot(tl.trans(W_t), right - total, input_precision=meta.PRECISION)
            read = b_t[:, None] * solved
        else:
            solved = tl.dot(W_t, right - b_t[:, None] * total, input_precision=meta.PRECISION)
            read = solved
        store_rows(out, solved, tokens, head, values)
        store_rows(x, read, tokens, head, values)
        tl.debug_barrier()  # the next blocks read x
