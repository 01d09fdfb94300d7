"""Parts that DeltaFormer's kernels share: programs, tiles, and sums over blocks of columns."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def head_and_block(T, H: tl.constexpr, blocks):
    """First token of the row (int64), head and block of this program; blocks of a head are adjacent."""
    i = tl.program_id(0)
    return tl.cast(i // (blocks * H), tl.int64) * T, i // blocks % H, i % blocks


@triton.jit
def load_tile(x, t, T, h, H: tl.constexpr, i, D: tl.constexpr):
    """x[t, h, :] for rows t before T: [C, BD]."""
    offset = (t[:, None] * H + h) * D + i[None, :]
    return tl.load(x + offset, mask=(t[:, None] < T) & (i[None, :] < D), other=0.0)


@triton.jit
def store_tile(x, value, t, T, h, H: tl.constexpr, i, D: tl.constexpr):
    """The inverse of `load_tile`."""
    offset = (t[:, None] * H + h) * D + i[None, :]
    tl.store(x + offset, tl.cast(value, x.dtype.element_ty), mask=(t[:, None] < T) & (i[None, :] < D))


@triton.jit
def load_row(x, t, T, h, H: tl.constexpr, other):
    """x[t, h] in float32 for rows t before T, else `other`: [C]."""
    return tl.cast(tl.load(x + t * H + h, mask=t < T, other=other), tl.float32)


@triton.jit
def recalled(
    total,  # [ROWS, BV]
    k_t,  # [ROWS, BK]
    L_t,  # [ROWS]
    k,
    x,
    L,
    first,
    end,
    scale,
    T,
    h,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BACKWARD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """total + sum_s P_ts x_s over tokens s from first to before end, all before the rows t; BACKWARD: P_st, all after.

    `scale` has the factor of base two, as L has.
    """
    i_k, i_v = tl.arange(0, BK), tl.arange(0, BV)
    for start in range(first, end, C):
        s = tl.cast(start, tl.int64) + tl.arange(0, C)
        X = scale * tl.dot(k_t, tl.trans(load_tile(k, s, T, h, H, i_k, K)), input_precision=PRECISION)
        if BACKWARD:
            X -= load_row(L, s, T, h, H, float("inf"))[None, :]
        else:
            X -= L_t[:, None]
        P = tl.cast(tl.exp2(X), x.dtype.element_ty)
        total += tl.dot(P, load_tile(x, s, T, h, H, i_v, V), input_precision=PRECISION)
    return total


@triton.jit
def own_weights(k_t, L_t, scale, C: tl.constexpr, PRECISION: tl.constexpr):
    """P [C, C] within a block of rows, strictly lower triangular."""
    rows = tl.arange(0, C)
    X = scale * tl.dot(k_t, tl.trans(k_t), input_precision=PRECISION)
    return tl.where(rows[:, None] > rows[None, :], tl.exp2(X - L_t[:, None]), 0.0)
