"""Gradients of DeltaFormer's write once G, the gradient of the right side, is known: one program a block of rows.

    Y_ts = -G_t u_s,   r_t = sum_{s<t} P_ts Y_ts,   dX_ts = beta_t P_ts (Y_ts - r_t)

With Z = beta G and p = beta r, which are saved, dX_ts = -P_ts (Z_t u_s + p_t). A key is in dX as row and as column.
"""

import triton
import triton.language as tl

from hf_memory.ops.deltaformer.kernels.blocks import LOG2E, head_and_block, load_row, load_tile, store_tile


@triton.jit
def beta_gradient_kernel(
    k,  # [B, T, H, K]
    v,  # [B, T, H, V]
    a,  # [B, T, H]
    beta,  # [B, T, H]
    u,  # [B, T, H, V]
    L,  # [B, T, H] float32
    g,  # [B, T, H, V] float32
    dv,  # [B, T, H, V]
    da,  # [B, T, H]
    dbeta,  # [B, T, H]
    p,  # [B, T, H] float32
    scale,
    T,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dbeta = r, p = beta r, da = rowsum(G v) and dv = a G for a block of ROWS rows."""
    blocks = (T + ROWS - 1) // ROWS
    row, h, block = head_and_block(T, H, blocks)
    k, u, g, v, dv = k + row * H * K, u + row * H * V, g + row * H * V, v + row * H * V, dv + row * H * V
    a, beta, L, p, da, dbeta = a + row * H, beta + row * H, L + row * H, p + row * H, da + row * H, dbeta + row * H
    scale *= LOG2E
    first = (blocks - 1 - block) * ROWS  # the longest sums begin first
    i_k, i_v, t = tl.arange(0, BK), tl.arange(0, BV), tl.cast(first, tl.int64) + tl.arange(0, ROWS)
    g_t, a_t = load_tile(g, t, T, h, H, i_v, V), load_row(a, t, T, h, H, 0.0)
    store_tile(dv, a_t[:, None] * g_t, t, T, h, H, i_v, V)
    v_t = tl.cast(load_tile(v, t, T, h, H, i_v, V), tl.float32)
    tl.store(da + t * H + h, tl.cast(tl.sum(g_t * v_t, axis=1), da.dtype.element_ty), mask=t < T)
    k_t, g_t = load_tile(k, t, T, h, H, i_k, K), tl.cast(g_t, u.dtype.element_ty)
    L_t, r = load_row(L, t, T, h, H, float("inf")), tl.zeros([ROWS], tl.float32)
    for start in range(0, tl.minimum(first + ROWS, T), C):
        s = tl.cast(start, tl.int64) + tl.arange(0, C)
        X = scale * tl.dot(k_t, tl.trans(load_tile(k, s, T, h, H, i_k, K)), input_precision=PRECISION)
        Y = tl.dot(g_t, tl.trans(load_tile(u, s, T, h, H, i_v, V)), input_precision=PRECISION)
        r -= tl.sum(tl.where(t[:, None] > s[None, :], tl.exp2(X - L_t[:, None]) * Y, 0.0), axis=1)
    tl.store(dbeta + t * H + h, tl.cast(r, dbeta.dtype.element_ty), mask=t < T)
    tl.store(p + t * H + h, load_row(beta, t, T, h, H, 0.0) * r, mask=t < T)


@triton.jit
def key_gradient_kernel(
    k,  # [B, T, H, K]
    u,  # [B, T, H, V]
    z,  # [B, T, H, V]
    L,  # [B, T, H] float32
    p,  # [B, T, H] float32
    dk,  # [B, T, H, K]
    scale,
    T,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dk_t = scale (sum_{s<t} dX_ts k_s + sum_{s>t} dX_st k_s) for a block of C rows."""
    blocks = (T + C - 1) // C
    row, h, block = head_and_block(T, H, blocks)
    k, dk, u, z, L, p = k + row * H * K, dk + row * H * K, u + row * H * V, z + row * H * V, L + row * H, p + row * H
    factor = scale * LOG2E
    i_k, i_v = tl.arange(0, BK), tl.arange(0, BV)
    t = tl.cast(block, tl.int64) * C + tl.arange(0, C)
    k_t, dk_t = load_tile(k, t, T, h, H, i_k, K), tl.zeros([C, BK], tl.float32)
    z_t, L_t, p_t = (
        load_tile(z, t, T, h, H, i_v, V),
        load_row(L, t, T, h, H, float("inf")),
        load_row(p, t, T, h, H, 0.0),
    )
    for start in range(0, tl.minimum((block + 1) * C, T), C):  # the row's weights
        s = tl.cast(start, tl.int64) + tl.arange(0, C)
        k_s = load_tile(k, s, T, h, H, i_k, K)
        X = factor * tl.dot(k_t, tl.trans(k_s), input_precision=PRECISION)
        Y = tl.dot(z_t, tl.trans(load_tile(u, s, T, h, H, i_v, V)), input_precision=PRECISION)
        dX = tl.where(t[:, None] > s[None, :], tl.exp2(X - L_t[:, None]) * (Y + p_t[:, None]), 0.0)
        dk_t += tl.dot(tl.cast(dX, k_s.dtype), k_s, input_precision=PRECISION)
    u_t = load_tile(u, t, T, h, H, i_v, V)
    for start in range(block * C, T, C):  # weights of later rows
        s = tl.cast(start, tl.int64) + tl.arange(0, C)
        k_s = load_tile(k, s, T, h, H, i_k, K)
        X = factor * tl.dot(k_t, tl.trans(k_s), input_precision=PRECISION)
        Y = tl.dot(u_t, tl.trans(load_tile(z, s, T, h, H, i_v, V)), input_precision=PRECISION)
        L_s, p_s = load_row(L, s, T, h, H, float("inf")), load_row(p, s, T, h, H, 0.0)
        dX = tl.where(s[None, :] > t[:, None], tl.exp2(X - L_s[None, :]) * (Y + p_s[None, :]), 0.0)
        dk_t += tl.dot(tl.cast(dX, k_s.dtype), k_s, input_precision=PRECISION)
    store_tile(dk, -scale * dk_t, t, T, h, H, i_k, K)
