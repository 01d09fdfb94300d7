"""Triangular systems with DeltaFormer's weights: rows' normalisers, inverses of blocks, sums over panels, substitution.

The system is solved panel by panel. What solved panels give to the rows of the next one is summed by many programs, one
for each block of rows; then one program a head goes through the panel's blocks, and reads what it wrote itself.
"""

import triton
import triton.language as tl

from hf_memory.ops.deltaformer.kernels.blocks import (
    LOG2E,
    head_and_block,
    load_row,
    load_tile,
    own_weights,
    recalled,
    store_tile,
)
from hf_memory.ops.triton.tiles import unit_lower_inverse


@triton.jit
def normalizer_kernel(
    k,  # [B, T, H, K]
    L,  # [B, T, H] float32
    scale,
    T,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """L_t = log2 sum_{i<t} exp(scale k_i k_t), infinite for the first row, for a block of ROWS rows."""
    blocks = (T + ROWS - 1) // ROWS
    row, h, block = head_and_block(T, H, blocks)
    k, L, scale = k + row * H * K, L + row * H, scale * LOG2E
    first = (blocks - 1 - block) * ROWS  # the longest sums begin first
    i_k, t = tl.arange(0, BK), tl.cast(first, tl.int64) + tl.arange(0, ROWS)
    k_t = load_tile(k, t, T, h, H, i_k, K)
    m, l = tl.full([ROWS], -1e30, tl.float32), tl.zeros([ROWS], tl.float32)
    for start in range(0, tl.minimum(first + ROWS, T), C):
        s = tl.cast(start, tl.int64) + tl.arange(0, C)
        X = scale * tl.dot(k_t, tl.trans(load_tile(k, s, T, h, H, i_k, K)), input_precision=PRECISION)
        X = tl.where(t[:, None] > s[None, :], X, -float("inf"))
        m_new = tl.maximum(m, tl.max(X, axis=1))
        l = l * tl.exp2(m - m_new) + tl.sum(tl.exp2(X - m_new[:, None]), axis=1)
        m = m_new
    tl.store(L + t * H + h, tl.where(l > 0, m + tl.log2(tl.where(l > 0, l, 1.0)), float("inf")), mask=t < T)


@triton.jit
def inverse_kernel(
    k,  # [B, T, H, K]
    beta,  # [B, T, H]
    L,  # [B, T, H] float32
    W,  # [B, T, H, C] float32
    scale,
    T,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """W = (I + diag(beta) P)^-1 of a block of C rows."""
    row, h, block = head_and_block(T, H, (T + C - 1) // C)
    k, beta, L, W = k + row * H * K, beta + row * H, L + row * H, W + row * H * C
    rows = tl.arange(0, C)
    t = tl.cast(block, tl.int64) * C + rows
    k_t, b_t = load_tile(k, t, T, h, H, tl.arange(0, BK), K), load_row(beta, t, T, h, H, 0.0)
    P = own_weights(k_t, load_row(L, t, T, h, H, float("inf")), scale * LOG2E, C, PRECISION)
    store_tile(W, unit_lower_inverse(b_t[:, None] * P, C), t, T, h, H, rows, C)


@triton.jit
def gather_kernel(
    k,  # [B, T, H, K]
    right,  # [B, T, H, V]
    a,  # [B, T, H]
    beta,  # [B, T, H]
    L,  # [B, T, H] float32
    x,  # [B, T, H, V], what the solved panels hold
    out,  # [B, T, H, V] float32
    scale,
    panel,  # the first token of this panel
    end,  # the token after its last
    T,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BACKWARD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out_t = a_t right_t - beta_t sum_s P_ts x_s over all panels before; BACKWARD: right_t - sum_s P_st x_s, after."""
    row, h, block = head_and_block(T, H, (end - panel + ROWS - 1) // ROWS)
    k, x, right, out = k + row * H * K, x + row * H * V, right + row * H * V, out + row * H * V
    a, beta, L, scale = a + row * H, beta + row * H, L + row * H, scale * LOG2E
    i_k, i_v = tl.arange(0, BK), tl.arange(0, BV)
    t = tl.cast(panel + block * ROWS, tl.int64) + tl.arange(0, ROWS)
    k_t, L_t = load_tile(k, t, end, h, H, i_k, K), load_row(L, t, end, h, H, float("inf"))
    if BACKWARD:
        first, last = end, T
    else:
        first, last = panel * 0, panel
    total = tl.zeros([ROWS, BV], tl.float32)
    total = recalled(
        total, k_t, L_t, k, x, L, first, last, scale, T, h, H, K, V, C, BK, BV, BACKWARD, PRECISION
    )  # fmt: skip
    right_t = tl.cast(load_tile(right, t, end, h, H, i_v, V), tl.float32)
    if BACKWARD:
        right_t -= total
    else:
        a_t, b_t = load_row(a, t, end, h, H, 0.0), load_row(beta, t, end, h, H, 0.0)
        right_t = a_t[:, None] * right_t - b_t[:, None] * total
    store_tile(out, right_t, t, end, h, H, i_v, V)


@triton.jit
def substitute_kernel(
    k,  # [B, T, H, K]
    beta,  # [B, T, H]
    L,  # [B, T, H] float32
    W,  # [B, T, H, C] float32
    out,  # [B, T, H, V] float32, the right side, which becomes the solution
    x,  # [B, T, H, V], what later blocks read: the solution, times beta if BACKWARD
    scale,
    panel,
    end,
    T,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BACKWARD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Solve for the tokens of a panel, block by block, BACKWARD the transposed system from the last block on."""
    row, h, _ = head_and_block(T, H, 1)
    k, x, out, W = k + row * H * K, x + row * H * V, out + row * H * V, W + row * H * C
    beta, L, scale = beta + row * H, L + row * H, scale * LOG2E
    i_k, i_v, rows = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, C)
    blocks = (end - panel + C - 1) // C
    for n in range(blocks):
        if BACKWARD:
            here = panel + (blocks - 1 - n) * C
            first, last = tl.minimum(here + C, end), end
        else:
            here = panel + n * C
            first, last = panel, here
        t = tl.cast(here, tl.int64) + rows
        k_t, b_t = load_tile(k, t, end, h, H, i_k, K), load_row(beta, t, end, h, H, 0.0)
        L_t, W_t = load_row(L, t, end, h, H, float("inf")), load_tile(W, t, end, h, H, rows, C)
        total = tl.zeros([C, BV], tl.float32)
        total = recalled(
            total, k_t, L_t, k, x, L, first, last, scale, end, h, H, K, V, C, BK, BV, BACKWARD, PRECISION
        )  # fmt: skip
        right = load_tile(out, t, end, h, H, i_v, V)
        if BACKWARD:
            solved = tl.dot(tl.trans(W_t), right - total, input_precision=PRECISION)
            read = b_t[:, None] * solved
        else:
            solved = tl.dot(W_t, right - b_t[:, None] * total, input_precision=PRECISION)
            read = solved
        store_tile(out, solved, t, end, h, H, i_v, V)
        store_tile(x, read, t, end, h, H, i_v, V)
        tl.debug_barrier()  # the next blocks read x
