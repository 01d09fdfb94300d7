"""Gradients of DeltaFormer's write once G, the gradient of the right side, is known: one program a block of rows.

    Y_ts = -G_t u_s,   r_t = sum_{s<t} P_ts Y_ts,   dX_ts = beta_t P_ts (Y_ts - r_t)

With Z = beta G and p = beta r, which are saved, dX_ts = -P_ts (Z_t u_s + p_t). A key is in dX as row and as column.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from hf_memory.ops.deltaformer.kernels.blocks import head_and_block, load_row
from hf_memory.ops.triton.tiles import LOG2E, channels, load_rows, store_numbers, store_rows


class Gradients(NamedTuple):
    """What both kernels compute."""

    k: Any  # [B, T, H, K]
    v: Any  # [B, T, H, V]
    a: Any  # [B, T, H]
    beta: Any  # [B, T, H]
    p: Any  # [B, T, H] float32


@triton.jit
def beta_gradient_kernel(
    system,  # System
    u,  # [B, T, H, V]
    g,  # [B, T, H, V] float32
    grads,  # Gradients, without those of k
    scale,
    T,
    meta: tl.constexpr,
):
    """dbeta = r, p = beta r, da = rowsum(G v) and dv = a G for a block of ROWS rows."""
    blocks = (T + meta.ROWS - 1) // meta.ROWS
    row, head, block = head_and_block(T, blocks, meta)
    scale *= LOG2E
    first = (blocks - 1 - block) * meta.ROWS  # the longest sums begin first
    keys = channels(0, meta.BK, meta.K)
    values = channels(0, meta.BV, meta.V)
    t = first + tl.arange(0, meta.ROWS)
    tokens = (row + t, t < T)
    g_t = load_rows(g, tokens, head, values)
    a_t = load_row(system.a, tokens, head, 0.0)
    store_rows(grads.v, a_t[:, None] * g_t, tokens, head, values)
    v_t = tl.cast(load_rows(system.v, tokens, head, values), tl.float32)
    store_numbers(grads.a, tl.sum(g_t * v_t, axis=1), tokens, head)
    k_t = load_rows(system.k, tokens, head, keys)
    g_t = tl.cast(g_t, u.dtype.element_ty)
    L_t = load_row(system.L, tokens, head, float("inf"))
    r = tl.zeros([meta.ROWS], tl.float32)
    for start in range(0, tl.minimum(first + meta.ROWS, T), meta.C):
        s = start + tl.arange(0, meta.C)
        others = (row + s, s < T)
        X = scale * tl.dot(
            k_t, tl.trans(load_rows(system.k, others, head, keys)), input_precision=meta.PRECISION
        )
        Y = tl.dot(
            g_t, tl.trans(load_rows(u, others, head, values)), input_precision=meta.PRECISION
        )
        r -= tl.sum(tl.where(t[:, None] > s[None, :], tl.exp2(X - L_t[:, None]) * Y, 0.0), axis=1)
    store_numbers(grads.beta, r, tokens, head)
    store_numbers(grads.p, load_row(system.beta, tokens, head, 0.0) * r, tokens, head)


@triton.jit
def key_gradient_kernel(
    system,  # System, of which k and L are read
    u,  # [B, T, H, V]
    z,  # [B, T, H, V]
    grads,  # Gradients, of which p is read and those of k are computed
    scale,
    T,
    meta: tl.constexpr,
):
    """dk_t = scale (sum_{s<t} dX_ts k_s + sum_{s>t} dX_st k_s) for a block of C rows."""
    row, head, block = head_and_block(T, (T + meta.C - 1) // meta.C, meta)
    factor = scale * LOG2E
    keys = channels(0, meta.BK, meta.K)
    values = channels(0, meta.BV, meta.V)
    t = row + block * meta.C + tl.arange(0, meta.C)
    tokens = (t, t < row + T)
    k_t = load_rows(system.k, tokens, head, keys)
    dk_t = tl.zeros([meta.C, meta.BK], tl.float32)
    z_t = load_rows(z, tokens, head, values)
    p_t = load_row(grads.p, tokens, head, 0.0)
    L_t = load_row(system.L, tokens, head, float("inf"))
    for start in range(0, tl.minimum((block + 1) * meta.C, T), meta.C):  # the row's weights
        s = row + start + tl.arange(0, meta.C)
        others = (s, s < row + T)
        k_s = load_rows(system.k, others, head, keys)
        X = factor * tl.dot(k_t, tl.trans(k_s), input_precision=meta.PRECISION)
        Y = tl.dot(
            z_t, tl.trans(load_rows(u, others, head, values)), input_precision=meta.PRECISION
        )
        dX = tl.where(t[:, None] > s[None, :], tl.exp2(X - L_t[:, None]) * (Y + p_t[:, None]), 0.0)
        dk_t += tl.dot(tl.cast(dX, k_s.dtype), k_s, input_precision=meta.PRECISION)
    u_t = load_rows(u, tokens, head, values)
    for start in range(block * meta.C, T, meta.C):  # weights of later rows
        s = row + start + tl.arange(0, meta.C)
        others = (s, s < row + T)
        k_s = load_rows(system.k, others, head, keys)
        X = factor * tl.dot(k_t, tl.trans(k_s), input_precision=meta.PRECISION)
        Y = tl.dot(
            u_t, tl.trans(load_rows(z, others, head, values)), input_precision=meta.PRECISION
        )
        L_s = load_row(system.L, others, head, float("inf"))
        p_s = load_row(grads.p, others, head, 0.0)
        dX = tl.where(s[None, :] > t[:, None], tl.exp2(X - L_s[None, :]) * (Y + p_s[None, :]), 0.0)
        dk_t += tl.dot(tl.cast(dX, k_s.dtype), k_s, input_precision=meta.PRECISION)
    store_rows(grads.k, -scale * dk_t, tokens, head, keys)
