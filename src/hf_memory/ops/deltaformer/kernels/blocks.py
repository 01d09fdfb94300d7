"""Parts that DeltaFormer's kernels share: groups of arguments, programs, and sums over blocks of columns."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from hf_memory.ops.triton.tiles import channels, load_rows


class System(NamedTuple):
    """(I + diag(beta) P) U = diag(a) V, or the transposed system without a."""

    k: Any  # [B, T, H, K]
    v: Any  # [B, T, H, V]
    a: Any  # [B, T, H]
    beta: Any  # [B, T, H]
    L: Any  # [B, T, H] float32: the logarithms with base two of the sums of rows, so that P is known


class Place(NamedTuple):
    """The panel of a launch."""

    scale: float
    panel: int  # its first token
    end: int  # the token after its last
    T: int


@triton.jit
def head_and_block(T, blocks, meta: tl.constexpr):
    """First token of the row (int64), head and block of this program; blocks of a head are adjacent."""
    i = tl.program_id(0)
    return tl.cast(i // (blocks * meta.H), tl.int64) * T, (i // blocks % meta.H, meta.H), i % blocks


@triton.jit
def load_row(x, tokens, head, other):
    """x[t, h] of a tensor [tokens, heads] in float32, else `other`: [C]."""
    t, in_t = tokens
    h, H = head
    return tl.cast(tl.load(x + t * H + h, mask=in_t, other=other), tl.float32)


@triton.jit
def recalled(rows, system, x, span, scale, head, meta: tl.constexpr):
    """sum_s P_ts x_s over a span of tokens, all before the rows t; BACKWARDS: P_st, all after.

    `rows` are keys and logarithms of the rows t; `span` has the first token of the sequence and, counted from it, the
    first one of the span and the one after its last. `scale` has the factor of base two, as L has.
    """
    k_t, L_t = rows
    row, first, end = span
    keys = channels(0, meta.BK, meta.K)
    values = channels(0, meta.BV, meta.V)
    total = tl.zeros([k_t.shape[0], meta.BV], tl.float32)
    for start in range(first, end, meta.C):
        s = row + start + tl.arange(0, meta.C)
        tokens = (s, s < row + end)
        X = scale * tl.dot(
            k_t, tl.trans(load_rows(system.k, tokens, head, keys)), input_precision=meta.PRECISION
        )
        if meta.BACKWARDS:
            X -= load_row(system.L, tokens, head, float("inf"))[None, :]
        else:
            X -= L_t[:, None]
        P = tl.cast(tl.exp2(X), x.dtype.element_ty)
        total += tl.dot(P, load_rows(x, tokens, head, values), input_precision=meta.PRECISION)
    return total


@triton.jit
def own_weights(k_t, L_t, scale, meta: tl.constexpr):
    """P [C, C] within a block of rows, strictly lower triangular."""
    rows = tl.arange(0, meta.C)
    X = scale * tl.dot(k_t, tl.trans(k_t), input_precision=meta.PRECISION)
    return tl.where(rows[:, None] > rows[None, :], tl.exp2(X - L_t[:, None]), 0.0)
