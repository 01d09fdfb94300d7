"""Functions that the kernels of the neural memory share: loads and stores, activations, coefficients of a chunk."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from hf_memory.ops.triton.tiles import split_dot


class Rows(NamedTuple):
    """What the memory reads and the coefficients of chunks, or the gradients of both."""

    q: Any  # [NC, N, C, K]
    k: Any  # [NC, N, C, K]
    v: Any  # [NC, N, C, V]
    P: Any  # [NC, N, C, C]
    beta: Any  # [NC, N, C, 1]
    c: Any  # [NC, N, C, 1]
    m: Any  # [NC, N, C, 1]
    H: Any  # [NC, N, 1, 1]


class Learned(NamedTuple):
    """Rows of the inner gradients, which writes compute."""

    z: Any  # [NC, N, C, HIDDEN]
    f: Any  # [NC, N, C, HIDDEN]
    e: Any  # [NC, N, C, V]


class Chunks(NamedTuple):
    """Chunks with the states before them and after the last."""

    rows: Any  # Rows
    initial: Any  # [N, SIZE]
    states: Any  # [NC + 1, N, PARTS, SIZE]; None until there are any, like what follows
    learned: Any  # Learned
    closed: Any = None  # [NC, N] int32, whether the anchor becomes the weights before the chunk; or None for always


class Reads(NamedTuple):
    """What the backward of reads leaves for that of writes."""

    y: Any  # [NC, N, C, HIDDEN]
    du: Any  # [NC, N, C, HIDDEN]
    scores: Any  # [2, NC, N, C, C]: Q K^T and Y X^T
    G: Any  # [2, NC, N, C, C]: dU D^T and dO E^T, minus the gradients of P .* scores


class Sizes(NamedTuple):
    """Numbers of chunks, of heads of all sequences, and of tokens of a chunk."""

    NC: int
    N: int
    C: int


class Meta(NamedTuple):
    """What is known when the kernels are compiled."""

    K: int
    V: int
    HIDDEN: int
    SIZE: int  # weights of a head
    PARTS: int  # of a state: weights, momentum and anchor
    BC: int  # tile sizes
    BK: int
    BV: int
    BH: int  # hidden channels
    BR: int  # rows that a program reads
    ACTIVATION: str
    RESIDUAL: bool
    ANCHOR: bool  # whether the anchor is not always the weights
    DTYPE: Any  # of operands of products


@triton.jit
def load(x, inside):
    """Load a tile, zero outside; by `where`, so that numbers are rounded before the layout for a product."""
    return tl.where(inside, tl.load(x, mask=inside), 0.0)


@triton.jit
def load_tile(x, i, R, j, D):
    """x[i, j] of a matrix [R, D], zero outside."""
    return load(x + i[:, None] * D + j[None, :], (i[:, None] < R) & (j[None, :] < D))


@triton.jit
def store_tile(x, value, i, R, j, D):
    """The inverse of `load_tile`."""
    tl.store(x + i[:, None] * D + j[None, :], value, mask=(i[:, None] < R) & (j[None, :] < D))


@triton.jit
def dot(x, y, DTYPE: tl.constexpr, PARTS: tl.constexpr = 1):
    """x y, of operands rounded to DTYPE."""
    PRECISION: tl.constexpr = "tf32x3" if tl.float32 == DTYPE else "tf32"
    return split_dot(tl.cast(x, DTYPE), tl.cast(y, DTYPE), PARTS, PRECISION)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """s(x) and its first and second derivative."""
    if ACTIVATION == "silu":
        s = tl.sigmoid(x)
        rest = s * (1 - s)
        y = x * s
        first = s + x * rest
        second = rest * (2 + x * (1 - 2 * s))
    elif ACTIVATION == "gelu":
        Phi = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
        density = tl.exp(-0.5 * x * x) * 0.3989422804014327
        y = x * Phi
        first = Phi + x * density
        second = density * (2 - x * x)
    else:
        t = 2 * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x)) - 1
        du = 0.7978845608028654 * (1 + 0.134145 * x * x)
        ddu = 0.2140644488 * x
        dt = (1 - t * t) * du
        ddt = (1 - t * t) * ddu - 2 * t * dt * du
        y = 0.5 * x * (1 + t)
        first = 0.5 * (1 + t + x * dt)
        second = dt + 0.5 * x * ddt
    return y, first, second


@triton.jit
def places(i_k, j, i_v, meta: tl.constexpr):
    """The tiles of both layers: offsets among a head's weights, and the masks of those that exist."""
    in_h = j < meta.HIDDEN
    first = i_k[:, None] * meta.HIDDEN + j[None, :]
    second = meta.K * meta.HIDDEN + j[:, None] * meta.V + i_v[None, :]
    return (first, (i_k[:, None] < meta.K) & in_h[None, :]), (
        second,
        in_h[:, None] & (i_v[None, :] < meta.V),
    )


@triton.jit
def load_layer(x, tile):
    """A tile of a layer of weights, momentum or their gradients, zero outside."""
    at, inside = tile
    return load(x + at, inside)


@triton.jit
def store_layer(x, value, tile):
    """The inverse of `load_layer`."""
    at, inside = tile
    tl.store(x + at, value, mask=inside)


@triton.jit
def anchor_of(state, closed, at, meta: tl.constexpr):
    """The anchor of a chunk in its state, and whether it becomes the weights before the chunk."""
    anchor = state
    is_closed = True
    if meta.ANCHOR:
        is_closed = tl.load(closed + at) != 0
        anchor += tl.where(is_closed, 0, (meta.PARTS - 1) * meta.SIZE)
    return anchor, is_closed


@triton.jit
def column(x, at, rows, C):
    """x [C] as a column [C, 1]."""
    return tl.load(x + at + rows, mask=rows < C, other=0.0)[:, None]


@triton.jit
def of_write(given, at, rows, C):
    """The coefficients of a write: columns w and m, and the scalars beta_n, c_n and H."""
    w_c = column(given.P, at * C * C + (C - 1) * C, rows, C)
    m_c = column(given.m, at * C, rows, C)
    last = at * C + C - 1
    return w_c, m_c, tl.load(given.beta + last), tl.load(given.c + last), tl.load(given.H + at)


@triton.jit
def of_read(given, at, rows, C):
    """The coefficients of reads: columns beta and c."""
    return column(given.beta, at * C, rows, C), column(given.c, at * C, rows, C)
