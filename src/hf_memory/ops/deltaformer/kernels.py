"""DeltaFormer's softmax write in Triton, for sequences without a past: a program loops over the blocks of one head.

The letters are those of chunk.py. Forward, an online softmax over all columns before a block gives what the past
returns for its keys; then the triangular system within the block is solved in registers. U and the logarithm L of each
row's sum are saved. Backward goes from the last block to the first, and accumulates gradients of earlier blocks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_memory.ops.triton.launch import launcher, precision
from hf_memory.ops.triton.tiles import split_dot, unit_lower_inverse

BLOCK = 16  # rows of the triangular system


@triton.jit
def _tile(x, t, T, h, H: tl.constexpr, i, D: tl.constexpr):
    """x[t, h, :] for rows t before T: [C, BD]."""
    offset = (t[:, None] * H + h) * D + i[None, :]
    return tl.load(x + offset, mask=(t[:, None] < T) & (i[None, :] < D), other=0.0)


@triton.jit
def _put(x, value, t, T, h, H: tl.constexpr, i, D: tl.constexpr):
    offset = (t[:, None] * H + h) * D + i[None, :]
    tl.store(x + offset, tl.cast(value, x.dtype.element_ty), mask=(t[:, None] < T) & (i[None, :] < D))


@triton.jit
def _forward_kernel(
    k,  # [B, T, H, K]
    v,  # [B, T, H, V]
    a,  # [B, T, H]
    beta,  # [B, T, H]
    u,  # [B, T, H, V] float32
    L,  # [B, T, H] float32
    scale,
    T,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    K_PARTS: tl.constexpr,
    V_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program b * H + h."""
    h, row = tl.program_id(0) % H, tl.cast(tl.program_id(0) // H, tl.int64) * T
    k, v, u = k + row * H * K, v + row * H * V, u + row * H * V
    a, beta, L = a + row * H, beta + row * H, L + row * H
    i_k, i_v, rows = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, C)
    for first in range(0, T, C):
        t = tl.cast(first, tl.int64) + rows
        k_t = _tile(k, t, T, h, H, i_k, K)
        m, l, acc = tl.full([C], -float("inf"), tl.float32), tl.zeros([C], tl.float32), tl.zeros([C, BV], tl.float32)
        for before in range(0, first, C):
            s = tl.cast(before, tl.int64) + rows
            X = scale * split_dot(k_t, tl.trans(_tile(k, s, T, h, H, i_k, K)), K_PARTS, PRECISION)
            m_new = tl.maximum(m, tl.max(X, axis=1))
            p, rescale = tl.exp(X - m_new[:, None]), tl.exp(m - m_new)
            l = l * rescale + tl.sum(p, axis=1)
            acc = acc * rescale[:, None] + tl.dot(p, _tile(u, s, T, h, H, i_v, V), input_precision=PRECISION)
            m = m_new
        X = scale * split_dot(k_t, tl.trans(k_t), K_PARTS, PRECISION)
        X = tl.where(rows[:, None] > rows[None, :], X, -float("inf"))
        m_new = tl.maximum(tl.maximum(m, tl.max(X, axis=1)), -1e30)
        p, rescale = tl.exp(X - m_new[:, None]), tl.exp(m - m_new)
        l = l * rescale + tl.sum(p, axis=1)
        b_t = tl.cast(tl.load(beta + t * H + h, mask=t < T, other=0.0), tl.float32)
        a_t = tl.cast(tl.load(a + t * H + h, mask=t < T, other=0.0), tl.float32)
        part = tl.where(l > 0, b_t / tl.where(l > 0, l, 1.0), 0.0)
        R = a_t[:, None] * _tile(v, t, T, h, H, i_v, V) - (part * rescale)[:, None] * acc
        u_t = tl.dot(unit_lower_inverse(part[:, None] * p, C), R, input_precision=PRECISION)
        _put(u, u_t, t, T, h, H, i_v, V)
        tl.store(L + t * H + h, tl.where(l > 0, m_new + tl.log(tl.where(l > 0, l, 1.0)), float("inf")), mask=t < T)
        tl.debug_barrier()  # later blocks read u


@triton.jit
def _backward_kernel(
    k,  # [B, T, H, K]
    beta,  # [B, T, H]
    u,  # [B, T, H, V] float32
    L,  # [B, T, H] float32
    du,  # [B, T, H, V] float32; becomes G
    dk,  # [B, T, H, K] float32, zero
    dbeta,  # [B, T, H] float32
    scale,
    T,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    K_PARTS: tl.constexpr,
    V_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program b * H + h, from the last block to the first."""
    h, row = tl.program_id(0) % H, tl.cast(tl.program_id(0) // H, tl.int64) * T
    k, dk, u, du = k + row * H * K, dk + row * H * K, u + row * H * V, du + row * H * V
    beta, L, dbeta = beta + row * H, L + row * H, dbeta + row * H
    i_k, i_v, rows = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, C)
    blocks = (T + C - 1) // C
    for back in range(blocks):
        last = (blocks - 1 - tl.cast(back, tl.int64)) * C
        t = last + rows
        k_t = _tile(k, t, T, h, H, i_k, K)
        b_t = tl.cast(tl.load(beta + t * H + h, mask=t < T, other=0.0), tl.float32)
        L_t = tl.load(L + t * H + h, mask=t < T, other=float("inf"))
        X = scale * split_dot(k_t, tl.trans(k_t), K_PARTS, PRECISION)
        P = tl.where(rows[:, None] > rows[None, :], tl.exp(X - L_t[:, None]), 0.0)
        inverse = unit_lower_inverse(b_t[:, None] * P, C)
        g = tl.dot(tl.trans(inverse), _tile(du, t, T, h, H, i_v, V), input_precision=PRECISION)
        _put(du, g, t, T, h, H, i_v, V)
        Y = -split_dot(g, tl.trans(_tile(u, t, T, h, H, i_v, V)), V_PARTS, PRECISION)
        r = tl.sum(P * Y, axis=1)
        for before in range(0, last, C):
            s = tl.cast(before, tl.int64) + rows
            X = scale * split_dot(k_t, tl.trans(_tile(k, s, T, h, H, i_k, K)), K_PARTS, PRECISION)
            y = -split_dot(g, tl.trans(_tile(u, s, T, h, H, i_v, V)), V_PARTS, PRECISION)
            r += tl.sum(tl.exp(X - L_t[:, None]) * y, axis=1)
        tl.store(dbeta + t * H + h, r, mask=t < T)
        dX = b_t[:, None] * P * (Y - r[:, None])
        dX = tl.cast(scale * dX, k_t.dtype)
        dk_t = _tile(dk, t, T, h, H, i_k, K) + tl.dot(dX, k_t, input_precision=PRECISION)
        dk_t += tl.dot(tl.trans(dX), k_t, input_precision=PRECISION)
        for before in range(0, last, C):
            s = tl.cast(before, tl.int64) + rows
            k_s = _tile(k, s, T, h, H, i_k, K)
            p = tl.exp(scale * split_dot(k_t, tl.trans(k_s), K_PARTS, PRECISION) - L_t[:, None])
            y = -split_dot(g, tl.trans(_tile(u, s, T, h, H, i_v, V)), V_PARTS, PRECISION)
            dX = tl.cast(scale * b_t[:, None] * p * (y - r[:, None]), k_t.dtype)
            dk_t += tl.dot(dX, k_s, input_precision=PRECISION)
            dk_s = _tile(dk, s, T, h, H, i_k, K) + tl.dot(tl.trans(dX), k_t, input_precision=PRECISION)
            _put(dk, dk_s, s, T, h, H, i_k, K)
            du_s = _tile(du, s, T, h, H, i_v, V)
            du_s -= tl.dot(tl.trans(p), b_t[:, None] * g, input_precision=PRECISION)
            _put(du, du_s, s, T, h, H, i_v, V)
        _put(dk, dk_t, t, T, h, H, i_k, K)
        tl.debug_barrier()  # earlier blocks read du and dk


def _constants(H: int, K: int, V: int, dtype: torch.dtype) -> dict:
    """Compile-time arguments and launch options of both kernels."""
    width_k, width_v = max(16, triton.next_power_of_2(K)), max(16, triton.next_power_of_2(V))
    wide = max(K, V) > 64 or dtype == torch.float32
    return {
        "H": H, "K": K, "V": V, "C": BLOCK, "BK": width_k, "BV": width_v,
        "K_PARTS": max(1, width_k // 32) if wide else 1, "V_PARTS": max(1, width_v // 32) if wide else 1,
        "PRECISION": precision(dtype),
        "num_warps": 8 if wide else 4, "num_stages": 1,
    }  # fmt: skip


@torch.library.custom_op("hf_memory::corrected_values", mutates_args=())
def _forward(k: Tensor, v: Tensor, a: Tensor, beta: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """u and the logarithms L of the rows' sums."""
    k, v, a, beta = (x.contiguous() for x in (k, v, a, beta))
    (B, T, H, K), V = k.shape, v.shape[-1]
    u, L = torch.empty_like(v, dtype=torch.float32), torch.empty_like(beta, dtype=torch.float32)
    launcher(_forward_kernel, (B * H,))(k, v, a, beta, u, L, scale, T, **_constants(H, K, V, k.dtype))
    return u, L


@_forward.register_fake
def _(k, v, a, beta, scale):
    return v.new_empty(v.shape, dtype=torch.float32), beta.new_empty(beta.shape, dtype=torch.float32)


@torch.library.custom_op("hf_memory::corrected_values_backward", mutates_args=())
def _backward(k: Tensor, beta: Tensor, u: Tensor, L: Tensor, du: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """dk, dbeta, and G, the gradient of the right side; float32."""
    k, beta = k.contiguous(), beta.contiguous()
    (B, T, H, K), V = k.shape, u.shape[-1]
    g, dk, dbeta = du.contiguous().clone(), torch.zeros_like(k, dtype=torch.float32), torch.empty_like(L)
    launcher(_backward_kernel, (B * H,))(k, beta, u, L, g, dk, dbeta, scale, T, **_constants(H, K, V, k.dtype))
    return dk, dbeta, g


@_backward.register_fake
def _(k, beta, u, L, du, scale):
    return u.new_empty(k.shape), u.new_empty(beta.shape), u.new_empty(u.shape)


def _save(ctx, inputs, output):
    k, v, a, beta, ctx.scale = inputs
    ctx.save_for_backward(k, v, a, beta, *output)


def _gradients(ctx, du, _):
    k, v, a, beta, u, L = ctx.saved_tensors
    dk, dbeta, g = _backward(k, beta, u, L, du, ctx.scale)
    da = (g * v.float()).sum(-1)
    return dk.to(k.dtype), (a[..., None] * g).to(v.dtype), da.to(a.dtype), dbeta.to(beta.dtype), None


_forward.register_autograd(_gradients, setup_context=_save)


def corrected_values(k: Tensor, v: Tensor, a: Tensor, beta: Tensor, scale: float) -> Tensor:
    """u [B, T, H, V] in float32 with w = k, for k [B, T, H, K], v [B, T, H, V], a and beta [B, T, H]."""
    return _forward(k, v, a, beta, scale)[0]
