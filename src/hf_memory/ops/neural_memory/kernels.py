"""The dual form of two matrices in Triton: programs see weights of any width a tile of hidden channels at a time.

The letters are those of `dual`, with rows K, X and Q, Y that enter the two layers, D and E what leaves them:

    Z = K A_1,   X = s(Z),   E = X A_2 - V,   F = E A_2^T,   D = F .* s'(Z)
    U = beta .* Q W_1 + c .* Q S_1 - (P .* Q K^T) D,   Y = s(U)
    O = beta .* Y W_2 + c .* Y S_2 - (P .* Y X^T) E

Only to write is to wait for the chunk before: one program for each row and head walks the chunks, and leaves all states
in global memory. Then all chunks are read at once, BR rows in a program. Backward they are read at once first, and then
written, from the last to the first; products of all chunks give the rest. It goes over groups of chunks, as in `dual`:
the state before each is kept, and it is written again.
"""

from functools import partial
from math import isqrt
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_memory.ops.kernel_report import Variant
from hf_memory.ops.neural_memory import chunk, exact, exact_kernels
from hf_memory.ops.neural_memory.exact_kernels import _load, _put, _tile
from hf_memory.ops.neural_memory.network import ACTIVATIONS, NeuralMemoryState, Rule
from hf_memory.ops.tiles import split_dot

TILE = 16  # hidden channels; with more, registers spill
ROWS = 16  # that one program reads


@triton.jit
def _dot(x, y, DTYPE: tl.constexpr, PARTS: tl.constexpr = 1):
    """x y, of operands rounded to DTYPE."""
    PRECISION: tl.constexpr = "tf32x3" if tl.float32 == DTYPE else "tf32"
    return split_dot(tl.cast(x, DTYPE), tl.cast(y, DTYPE), PARTS, PRECISION)


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    """s(x) and its first and second derivative."""
    if ACTIVATION == "silu":
        s = tl.sigmoid(x)
        rest = s * (1 - s)
        y, first, second = x * s, s + x * rest, rest * (2 + x * (1 - 2 * s))
    elif ACTIVATION == "gelu":
        Phi = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
        density = tl.exp(-0.5 * x * x) * 0.3989422804014327
        y, first, second = x * Phi, Phi + x * density, density * (2 - x * x)
    else:
        t = 2 * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x)) - 1
        du, ddu = 0.7978845608028654 * (1 + 0.134145 * x * x), 0.2140644488 * x
        dt = (1 - t * t) * du
        ddt = (1 - t * t) * ddu - 2 * t * dt * du
        y, first, second = 0.5 * x * (1 + t), 0.5 * (1 + t + x * dt), dt + 0.5 * x * ddt
    return y, first, second


@triton.jit
def _places(i_k, j, i_v, K: tl.constexpr, HIDDEN: tl.constexpr, V: tl.constexpr):
    """Where the tiles of both layers lie among a head's weights, and which numbers of them there are."""
    in_h = j < HIDDEN
    first, second = i_k[:, None] * HIDDEN + j[None, :], K * HIDDEN + j[:, None] * V + i_v[None, :]
    return first, (i_k[:, None] < K) & in_h[None, :], second, in_h[:, None] & (i_v[None, :] < V)


@triton.jit
def _column(x, at, rows, C, GIVEN: tl.constexpr, DEFAULT: tl.constexpr):
    """x [C] as a column [C, 1], or the default where there is no x."""
    column = tl.full([rows.shape[0], 1], DEFAULT, tl.float32)
    if GIVEN:
        column = tl.load(x + at + rows, mask=rows < C, other=0.0)[:, None]
    return column


@triton.jit
def _of_write(P, beta, c, m, H, at, rows, C, DECAY: tl.constexpr, MOMENTUM: tl.constexpr):
    """Columns w and m, then what becomes of W and S: beta_n, c_n and H."""
    w_c, m_c = _column(P, at * C * C + (C - 1) * C, rows, C, True, 0.0), 0.0
    beta_n, c_n, H_n = 1.0, 0.0, 0.0
    if DECAY:
        beta_n = tl.load(beta + at * C + C - 1)
    if MOMENTUM:
        c_n, H_n, m_c = tl.load(c + at * C + C - 1), tl.load(H + at), _column(m, at * C, rows, C, True, 0.0)
    return w_c, m_c, beta_n, c_n, H_n


@triton.jit
def _read(
    x, state, initial, at, inside, beta, c, SIZE, RETURNS: tl.constexpr, MOMENTUM: tl.constexpr, DTYPE: tl.constexpr
):
    """x through the weights that the chunk began with, decayed, and its momentum."""
    W = _load(state + at, inside)
    if RETURNS:
        I = _load(initial + at, inside)
        y = beta * _dot(x, W - I, DTYPE) + _dot(x, I, DTYPE)
    else:
        y = beta * _dot(x, W, DTYPE)
    if MOMENTUM:
        y += c * _dot(x, _load(state + SIZE + at, inside), DTYPE)
    return y


@triton.jit
def _write(
    X, D, state, after, initial, at, inside, w, m, beta, c, H, SIZE,
    RETURNS: tl.constexpr, MOMENTUM: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Weights and momentum after the chunk."""
    W = beta * _load(state + at, inside) - _dot(tl.trans(X), w * D, DTYPE)
    if RETURNS:
        W += (1 - beta) * _load(initial + at, inside)
    if MOMENTUM:
        S = _load(state + SIZE + at, inside)
        W += c * S
        tl.store(after + SIZE + at, H * S - _dot(tl.trans(X), m * D, DTYPE), mask=inside)
    tl.store(after + at, W, mask=inside)


@triton.jit
def _write_kernel(
    k,  # [NC, N, C, K]
    v,  # [NC, N, C, V]
    P,  # [NC, N, C, C]
    beta,  # [NC, N, C] or None
    c,  # [NC, N, C] or None
    m,  # [NC, N, C] or None
    H,  # [NC, N] or None
    closed,  # [NC, N] int32, whether the anchor becomes the weights before the chunk; or None for always
    initial,  # [N, SIZE] or None
    states,  # [NC + 1, N, PARTS, SIZE]: the first is given
    z,  # [NC, N, C, HIDDEN]
    f,  # [NC, N, C, HIDDEN]
    e,  # [NC, N, C, V]
    chunks,
    N,
    C,
    K: tl.constexpr,
    V: tl.constexpr,
    HIDDEN: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    FACTOR: tl.constexpr,
    DECAY: tl.constexpr,
    MOMENTUM: tl.constexpr,
    RETURNS: tl.constexpr,
    ANCHOR: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Program n writes all chunks of head n: Z, F, E and the states."""
    n, SIZE = tl.cast(tl.program_id(0), tl.int64), K * HIDDEN + HIDDEN * V
    PARTS, OFFSET = 1 + MOMENTUM + ANCHOR, (MOMENTUM + ANCHOR) * SIZE
    i_k, i_v, rows = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, BC)
    if RETURNS:
        initial += n * SIZE
    for i in tl.range(chunks, disable_licm=True):
        at = tl.cast(i, tl.int64) * N + n
        state, after = states + at * PARTS * SIZE, states + (at + N) * PARTS * SIZE
        anchor = state
        if ANCHOR:
            anchor += tl.where(tl.load(closed + at) != 0, 0, OFFSET)
        k_c, z_c, f_c, e_c = k + at * C * K, z + at * C * HIDDEN, f + at * C * HIDDEN, e + at * C * V
        said = -_tile(v + at * C * V, rows, C, i_v, V)
        if RESIDUAL:
            said += _tile(k_c, rows, C, i_k, K)
        for tile in tl.range(0, HIDDEN, BH, disable_licm=True):
            j = tile + tl.arange(0, BH)
            at_1, in_1, at_2, in_2 = _places(i_k, j, i_v, K, HIDDEN, V)
            A_1, A_2 = _load(anchor + at_1, in_1), _load(anchor + at_2, in_2)
            z_t = _dot(_tile(k_c, rows, C, i_k, K), A_1, DTYPE)
            x, _, _ = _activate(z_t, ACTIVATION)
            said += _dot(x, A_2, DTYPE)
            _put(z_c, z_t, rows, C, j, HIDDEN)
            if ANCHOR:
                tl.store(after + OFFSET + at_1, A_1, mask=in_1)
                tl.store(after + OFFSET + at_2, A_2, mask=in_2)
        _put(e_c, FACTOR * said, rows, C, i_v, V)
        tl.debug_barrier()  # what threads have written others read
        w_c, m_c, beta_n, c_n, H_n = _of_write(P, beta, c, m, H, at, rows, C, DECAY, MOMENTUM)
        for tile in tl.range(0, HIDDEN, BH, disable_licm=True):
            j = tile + tl.arange(0, BH)
            at_1, in_1, at_2, in_2 = _places(i_k, j, i_v, K, HIDDEN, V)
            x, slope, _ = _activate(_tile(z_c, rows, C, j, HIDDEN), ACTIVATION)
            e_t = _tile(e_c, rows, C, i_v, V)  # in every tile again, to hold it no longer
            f_t = _dot(e_t, tl.trans(_load(anchor + at_2, in_2)), DTYPE)
            _put(f_c, f_t, rows, C, j, HIDDEN)
            _write(
                x, e_t, state, after, initial, at_2, in_2, w_c, m_c, beta_n, c_n, H_n, SIZE, RETURNS, MOMENTUM, DTYPE
            )
            _write(
                _tile(k_c, rows, C, i_k, K), slope * f_t, state, after, initial, at_1, in_1, w_c, m_c, beta_n, c_n, H_n,
                SIZE, RETURNS, MOMENTUM, DTYPE,
            )  # fmt: skip
        tl.debug_barrier()


@triton.jit
def _read_kernel(
    q,  # [NC, N, C, K]
    k,  # [NC, N, C, K]
    P,  # [NC, N, C, C]
    beta,  # [NC, N, C] or None
    c,  # [NC, N, C] or None
    initial,  # [N, SIZE] or None
    states,  # [NC + 1, N, PARTS, SIZE]
    z,  # [NC, N, C, HIDDEN]
    f,  # [NC, N, C, HIDDEN]
    e,  # [NC, N, C, V]
    o,  # [NC, N, C, V]
    N,
    C,
    K: tl.constexpr,
    V: tl.constexpr,
    HIDDEN: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    DECAY: tl.constexpr,
    MOMENTUM: tl.constexpr,
    RETURNS: tl.constexpr,
    ANCHOR: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Program (n, i, r) reads the r-th rows of chunk i of head n."""
    n, SIZE = tl.cast(tl.program_id(0), tl.int64), K * HIDDEN + HIDDEN * V
    at = tl.cast(tl.program_id(1), tl.int64) * N + n
    i_k, i_v, cols = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, BC)
    rows = tl.program_id(2) * BR + tl.arange(0, BR)
    state = states + at * (1 + MOMENTUM + ANCHOR) * SIZE
    if RETURNS:
        initial += n * SIZE
    q_c, z_c, f_c = q + at * C * K, z + at * C * HIDDEN, f + at * C * HIDDEN
    P_c = _tile(P + at * C * C, rows, C, cols, C)
    beta_c, c_c = _column(beta, at * C, rows, C, DECAY, 1.0), _column(c, at * C, rows, C, MOMENTUM, 0.0)
    scores = P_c * _dot(_tile(q_c, rows, C, i_k, K), tl.trans(_tile(k + at * C * K, cols, C, i_k, K)), DTYPE)
    said, scores_2 = tl.zeros([BR, BV], tl.float32), tl.zeros([BR, BC], tl.float32)
    for tile in tl.range(0, HIDDEN, BH, disable_licm=True):
        j = tile + tl.arange(0, BH)
        at_1, in_1, at_2, in_2 = _places(i_k, j, i_v, K, HIDDEN, V)
        x, slope, _ = _activate(_tile(z_c, cols, C, j, HIDDEN), ACTIVATION)
        d = slope * _tile(f_c, cols, C, j, HIDDEN)
        q_t = _tile(q_c, rows, C, i_k, K)  # again, to hold it no longer
        u = _read(q_t, state, initial, at_1, in_1, beta_c, c_c, SIZE, RETURNS, MOMENTUM, DTYPE)
        y, _, _ = _activate(u - _dot(scores, d, DTYPE), ACTIVATION)
        said += _read(y, state, initial, at_2, in_2, beta_c, c_c, SIZE, RETURNS, MOMENTUM, DTYPE)
        scores_2 += _dot(y, tl.trans(x), DTYPE)
    said -= _dot(P_c * scores_2, _tile(e + at * C * V, cols, C, i_v, V), DTYPE)
    if RESIDUAL:
        said += _tile(q_c, rows, C, i_k, K)
    _put(o + at * C * V, said, rows, C, i_v, V)


@triton.jit
def _back_through(
    x, g, state, initial, at, inside, beta, c, SIZE, RETURNS: tl.constexpr, MOMENTUM: tl.constexpr, DTYPE: tl.constexpr
):
    """Gradients of one tile of `_read(x)` from g: of x, beta and c."""
    W = _load(state + at, inside)
    if RETURNS:
        W -= _load(initial + at, inside)
    back = _dot(g, tl.trans(W), DTYPE)
    dx, dbeta = beta * back, tl.sum(x * back, axis=1)
    dc = tl.zeros_like(dbeta)
    if RETURNS:
        dx += _dot(g, tl.trans(_load(initial + at, inside)), DTYPE)
    if MOMENTUM:
        back = _dot(g, tl.trans(_load(state + SIZE + at, inside)), DTYPE)
        dx += c * back
        dc += tl.sum(x * back, axis=1)
    return dx, dbeta, dc


@triton.jit
def _read_backward_kernel(
    q,  # [NC, N, C, K]
    k,  # [NC, N, C, K]
    P,  # [NC, N, C, C]
    beta,  # [NC, N, C] or None
    c,  # [NC, N, C] or None
    initial,  # [N, SIZE] or None
    states,  # [NC + 1, N, PARTS, SIZE]
    z,  # [NC, N, C, HIDDEN]
    f,  # [NC, N, C, HIDDEN]
    e,  # [NC, N, C, V]
    do,  # [NC, N, C, V]
    y,  # [NC, N, C, HIDDEN]
    du,  # [NC, N, C, HIDDEN]
    scores,  # [2, NC, N, C, C]: Q K^T and Y X^T
    G,  # [2, NC, N, C, C]: dU D^T and dO E^T, minus the gradients of P .* scores
    dq,  # [NC, N, C, K]
    dbeta,  # [NC, N, C] or None
    dc,  # [NC, N, C] or None
    chunks,
    N,
    C,
    K: tl.constexpr,
    V: tl.constexpr,
    HIDDEN: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    DECAY: tl.constexpr,
    MOMENTUM: tl.constexpr,
    RETURNS: tl.constexpr,
    ANCHOR: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Program (n, i, r) reads the r-th rows of chunk i of head n again, and makes what needs no other rows."""
    n, SIZE = tl.cast(tl.program_id(0), tl.int64), K * HIDDEN + HIDDEN * V
    at = tl.cast(tl.program_id(1), tl.int64) * N + n
    i_k, i_v, cols = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, BC)
    rows = tl.program_id(2) * BR + tl.arange(0, BR)
    state = states + at * (1 + MOMENTUM + ANCHOR) * SIZE
    if RETURNS:
        initial += n * SIZE
    q_c, k_c, do_c = q + at * C * K, k + at * C * K, do + at * C * V
    z_c, f_c, y_c, du_c = z + at * C * HIDDEN, f + at * C * HIDDEN, y + at * C * HIDDEN, du + at * C * HIDDEN
    P_c = _tile(P + at * C * C, rows, C, cols, C)
    beta_c, c_c = _column(beta, at * C, rows, C, DECAY, 1.0), _column(c, at * C, rows, C, MOMENTUM, 0.0)
    scores, G, SECOND = scores + at * C * C, G + at * C * C, tl.cast(chunks, tl.int64) * N * C * C
    scores_1 = _dot(_tile(q_c, rows, C, i_k, K), tl.trans(_tile(k_c, cols, C, i_k, K)), DTYPE)
    _put(scores, scores_1, rows, C, cols, C)
    G_2 = _dot(_tile(do_c, rows, C, i_v, V), tl.trans(_tile(e + at * C * V, cols, C, i_v, V)), DTYPE)
    _put(G + SECOND, G_2, rows, C, cols, C)
    scores_1, G_2 = P_c * scores_1, P_c * G_2
    scores_2, G_1 = tl.zeros([BR, BC], tl.float32), tl.zeros([BR, BC], tl.float32)
    dq_c, dbeta_c, dc_c = tl.zeros([BR, BK], tl.float32), tl.zeros([BR], tl.float32), tl.zeros([BR], tl.float32)
    for tile in tl.range(0, HIDDEN, BH, disable_licm=True):
        j = tile + tl.arange(0, BH)
        at_1, in_1, at_2, in_2 = _places(i_k, j, i_v, K, HIDDEN, V)
        x, slope, _ = _activate(_tile(z_c, cols, C, j, HIDDEN), ACTIVATION)
        d = slope * _tile(f_c, cols, C, j, HIDDEN)
        q_t = _tile(q_c, rows, C, i_k, K)  # again, to hold it no longer
        u = _read(q_t, state, initial, at_1, in_1, beta_c, c_c, SIZE, RETURNS, MOMENTUM, DTYPE)
        y_t, slope, _ = _activate(u - _dot(scores_1, d, DTYPE, BC // 16), ACTIVATION)
        scores_2 += _dot(y_t, tl.trans(x), DTYPE)
        _put(y_c, y_t, rows, C, j, HIDDEN)
        dy, dbeta_t, dc_t = _back_through(
            y_t, _tile(do_c, rows, C, i_v, V), state, initial, at_2, in_2, beta_c, c_c, SIZE, RETURNS, MOMENTUM, DTYPE
        )
        dbeta_c, dc_c = dbeta_c + dbeta_t, dc_c + dc_t
        du_t = slope * (dy - _dot(G_2, x, DTYPE, BC // 16))
        G_1 += _dot(du_t, tl.trans(d), DTYPE)
        _put(du_c, du_t, rows, C, j, HIDDEN)
        dq_t, dbeta_t, dc_t = _back_through(
            _tile(q_c, rows, C, i_k, K), du_t, state, initial, at_1, in_1, beta_c, c_c, SIZE, RETURNS, MOMENTUM, DTYPE
        )
        dq_c, dbeta_c, dc_c = dq_c + dq_t, dbeta_c + dbeta_t, dc_c + dc_t
    _put(scores + SECOND, scores_2, rows, C, cols, C)
    _put(G, G_1, rows, C, cols, C)
    P_c = _tile(P + at * C * C, rows, C, cols, C)  # again, to hold it no longer
    dq_c -= _dot(P_c * G_1, _tile(k_c, cols, C, i_k, K), DTYPE)
    if RESIDUAL:
        dq_c += _tile(do_c, rows, C, i_v, V)
    _put(dq + at * C * K, dq_c, rows, C, i_k, K)
    if DECAY:
        tl.store(dbeta + at * C + rows, dbeta_c, mask=rows < C)
    if MOMENTUM:
        tl.store(dc + at * C + rows, dc_c, mask=rows < C)


@triton.jit
def _put_back(
    x, g, before, after, at, inside, beta, c, beta_n, c_n, H, SIZE, MOMENTUM: tl.constexpr, DTYPE: tl.constexpr
):
    """Put one tile of the gradient of the state before, from that of the state after and g, that of `_read(x)`."""
    dW = _load(after + at, inside)
    tl.store(before + at, beta_n * dW + _dot(tl.trans(x), beta * g, DTYPE), mask=inside)
    if MOMENTUM:
        dS = c_n * dW + H * _load(after + SIZE + at, inside) + _dot(tl.trans(x), c * g, DTYPE)
        tl.store(before + SIZE + at, dS, mask=inside)


@triton.jit
def _back_through_write(k, d, x, e, dd, dx, de, after, at_1, in_1, at_2, in_2, w, DTYPE: tl.constexpr):
    """Add one tile of the gradients of both `_write`s, of D, X and E, from that of what they leave; and that of w."""
    G = _load(after + at_2, in_2)
    back, out = _dot(e, tl.trans(G), DTYPE), _dot(k, _load(after + at_1, in_1), DTYPE)
    dw = -tl.sum(x * back + out * d, axis=1)
    return dd - w * out, dx - w * back, de - _dot(w * x, G, DTYPE), dw


@triton.jit
def _add_anchor(before, after, dA, at, inside, is_closed, OFFSET, ANCHOR: tl.constexpr):
    """The gradient of the anchor: of the weights where it became them, else of the anchor before."""
    G = _load(before + at, inside)
    if ANCHOR:
        dA += _load(after + OFFSET + at, inside)
        tl.store(before + OFFSET + at, tl.where(is_closed, 0.0, dA), mask=inside)
        dA = tl.where(is_closed, dA, 0.0)
    tl.debug_barrier()  # all threads have read before one writes
    tl.store(before + at, G + dA, mask=inside)


@triton.jit
def _write_backward_kernel(
    q,  # [NC, N, C, K]
    k,  # [NC, N, C, K]
    P,  # [NC, N, C, C]
    beta,  # [NC, N, C] or None
    c,  # [NC, N, C] or None
    m,  # [NC, N, C] or None
    H,  # [NC, N] or None
    closed,  # [NC, N] int32 or None
    states,  # [NC + 1, N, PARTS, SIZE]
    z,  # [NC, N, C, HIDDEN]
    f,  # [NC, N, C, HIDDEN]
    e,  # [NC, N, C, V]
    y,  # [NC, N, C, HIDDEN]
    du,  # [NC, N, C, HIDDEN]
    do,  # [NC, N, C, V]
    d_states,  # [NC + 1, N, PARTS, SIZE]: the last is given
    dd,  # [NC, N, C, HIDDEN], as dx and de with what reading gives
    dx,  # [NC, N, C, HIDDEN]
    de,  # [NC, N, C, V]
    dz,  # [NC, N, C, HIDDEN]
    dw,  # [NC, N, C]
    dm,  # [NC, N, C] or None
    chunks,
    N,
    C,
    K: tl.constexpr,
    V: tl.constexpr,
    HIDDEN: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FACTOR: tl.constexpr,
    DECAY: tl.constexpr,
    MOMENTUM: tl.constexpr,
    ANCHOR: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Program n walks the chunks of head n backwards."""
    n, SIZE = tl.cast(tl.program_id(0), tl.int64), K * HIDDEN + HIDDEN * V
    PARTS, OFFSET = 1 + MOMENTUM + ANCHOR, (MOMENTUM + ANCHOR) * SIZE
    i_k, i_v, rows = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, BC)
    for reverse in tl.range(chunks, disable_licm=True):
        at = (chunks - 1 - tl.cast(reverse, tl.int64)) * N + n
        before, after = d_states + at * PARTS * SIZE, d_states + (at + N) * PARTS * SIZE
        anchor, is_closed = states + at * PARTS * SIZE, True
        if ANCHOR:
            is_closed = tl.load(closed + at) != 0
            anchor += tl.where(is_closed, 0, OFFSET)
        q_c, k_c, e_c, do_c = q + at * C * K, k + at * C * K, e + at * C * V, do + at * C * V
        z_c, f_c, y_c, du_c = z + at * C * HIDDEN, f + at * C * HIDDEN, y + at * C * HIDDEN, du + at * C * HIDDEN
        dd_c, dx_c, de_c = dd + at * C * HIDDEN, dx + at * C * HIDDEN, de + at * C * V
        w_c, m_c, beta_n, c_n, H_n = _of_write(P, beta, c, m, H, at, rows, C, DECAY, MOMENTUM)
        beta_c, c_c = _column(beta, at * C, rows, C, DECAY, 1.0), _column(c, at * C, rows, C, MOMENTUM, 0.0)
        de_s = _tile(de_c, rows, C, i_v, V)
        dw_s, dm_s = tl.zeros([BC], tl.float32), tl.zeros([BC], tl.float32)
        for tile in tl.range(0, HIDDEN, BH, disable_licm=True):
            j = tile + tl.arange(0, BH)
            at_1, in_1, at_2, in_2 = _places(i_k, j, i_v, K, HIDDEN, V)
            _put_back(
                _tile(q_c, rows, C, i_k, K), _tile(du_c, rows, C, j, HIDDEN),
                before, after, at_1, in_1, beta_c, c_c, beta_n, c_n, H_n, SIZE, MOMENTUM, DTYPE,
            )  # fmt: skip
            _put_back(
                _tile(y_c, rows, C, j, HIDDEN), _tile(do_c, rows, C, i_v, V),
                before, after, at_2, in_2, beta_c, c_c, beta_n, c_n, H_n, SIZE, MOMENTUM, DTYPE,
            )  # fmt: skip
        for tile in tl.range(0, HIDDEN, BH, disable_licm=True):
            j = tile + tl.arange(0, BH)
            at_1, in_1, at_2, in_2 = _places(i_k, j, i_v, K, HIDDEN, V)
            x, slope, _ = _activate(_tile(z_c, rows, C, j, HIDDEN), ACTIVATION)
            d = slope * _tile(f_c, rows, C, j, HIDDEN)
            dd_t, dx_t = _tile(dd_c, rows, C, j, HIDDEN), _tile(dx_c, rows, C, j, HIDDEN)
            dd_t, dx_t, de_s, dw_t = _back_through_write(
                _tile(k_c, rows, C, i_k, K), d, x, _tile(e_c, rows, C, i_v, V), dd_t, dx_t, de_s,
                after, at_1, in_1, at_2, in_2, w_c, DTYPE,
            )  # fmt: skip
            dw_s += dw_t
            if MOMENTUM:
                tl.debug_barrier()  # loads of before are not held over it
                dd_t, dx_t, de_s, dm_t = _back_through_write(
                    _tile(k_c, rows, C, i_k, K), d, x, _tile(e_c, rows, C, i_v, V), dd_t, dx_t, de_s,
                    after + SIZE, at_1, in_1, at_2, in_2, m_c, DTYPE,
                )  # fmt: skip
                dm_s += dm_t
            de_s += _dot(slope * dd_t, _load(anchor + at_2, in_2), DTYPE)
            tl.debug_barrier()  # all threads have read before one writes
            _put(dd_c, dd_t, rows, C, j, HIDDEN)
            _put(dx_c, dx_t, rows, C, j, HIDDEN)
        tl.store(dw + at * C + rows, dw_s, mask=rows < C)
        if MOMENTUM:
            tl.store(dm + at * C + rows, dm_s, mask=rows < C)
        tl.debug_barrier()
        _put(de_c, FACTOR * de_s, rows, C, i_v, V)
        tl.debug_barrier()
        for tile in tl.range(0, HIDDEN, BH, disable_licm=True):
            j = tile + tl.arange(0, BH)
            at_1, in_1, at_2, in_2 = _places(i_k, j, i_v, K, HIDDEN, V)
            x, slope, bend = _activate(_tile(z_c, rows, C, j, HIDDEN), ACTIVATION)
            de_t, dd_t = _tile(de_c, rows, C, i_v, V), _tile(dd_c, rows, C, j, HIDDEN)
            dx_t = _tile(dx_c, rows, C, j, HIDDEN) + _dot(de_t, tl.trans(_load(anchor + at_2, in_2)), DTYPE)
            dA_2 = _dot(tl.trans(x), de_t, DTYPE) + _dot(tl.trans(slope * dd_t), _tile(e_c, rows, C, i_v, V), DTYPE)
            _add_anchor(before, after, dA_2, at_2, in_2, is_closed, OFFSET, ANCHOR)
            dz_t = slope * dx_t + bend * _tile(f_c, rows, C, j, HIDDEN) * dd_t
            _put(dz + at * C * HIDDEN, dz_t, rows, C, j, HIDDEN)
            dA_1 = _dot(tl.trans(_tile(k_c, rows, C, i_k, K)), dz_t, DTYPE)
            _add_anchor(before, after, dA_1, at_1, in_1, is_closed, OFFSET, ANCHOR)
        tl.debug_barrier()


_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _constants(C: int, K: int, V: int, hidden: int, rule: Rule, dtype: torch.dtype, decay, momentum, anchor) -> dict:
    """Compile-time arguments and launch options of all kernels."""
    widths = {name: max(16, triton.next_power_of_2(D)) for name, D in (("BC", C), ("BK", K), ("BV", V), ("BH", hidden))}
    return {
        "K": K, "V": V, "HIDDEN": hidden, **widths, "BH": min(TILE, widths["BH"]), "BR": min(ROWS, widths["BC"]),
        "ACTIVATION": rule.activation, "RESIDUAL": rule.residual, "FACTOR": rule.factor,
        "DECAY": decay, "MOMENTUM": momentum, "RETURNS": decay and rule.forget_to == "initial", "ANCHOR": anchor,
        "DTYPE": _TYPES[dtype], "num_warps": 8, "num_stages": 1,
    }  # fmt: skip


def _launch(kernel, grid: tuple, given: dict) -> None:
    """Run a kernel on those of the given arguments that it has."""
    kernel[grid](**{name: given[name] for name in (*kernel.arg_names, "num_warps", "num_stages")})


_ROWS = ("q", "k", "v", "P", "beta", "c", "m", "H")


def _write_group(constants: dict, rows: dict, closed, initial, states: Tensor) -> dict:
    """Write the chunks of `rows` and `closed` into states, and return what the kernels to come are given."""
    chunks, N, C = rows["q"].shape[:3]
    z, f = rows["q"].new_empty(2, chunks, N, C, constants["HIDDEN"])
    made = {"closed": closed, "initial": initial, "states": states, "z": z, "f": f, "e": torch.empty_like(rows["v"])}
    given = {**constants, **rows, **made, "chunks": chunks, "N": N, "C": C}
    _launch(_write_kernel, (N,), given)
    return given


def _grid(given: dict) -> tuple[int, int, int]:
    """Of kernels that read."""
    return given["N"], given["chunks"], triton.cdiv(given["C"], given["BR"])


def _backward_group(given: dict, do: Tensor, d_states: Tensor) -> tuple[dict, Tensor | None]:
    """Gradients of the rows of a group and of the initial weights.

    d_states [chunks + 1, N, PARTS, SIZE], of which the last is given, is written.
    """
    chunks, N, C = do.shape[:3]
    y, du, dz = do.new_empty(3, chunks, N, C, given["HIDDEN"])
    scores, G = do.new_empty(2, 2, chunks, N, C, C)
    grads: Any = {name: None if given[name] is None else torch.empty_like(given[name]) for name in _ROWS}
    given |= {"do": do, "y": y, "du": du, "scores": scores, "G": G, **{f"d{name}": x for name, x in grads.items()}}
    _launch(_read_backward_kernel, _grid(given), given)
    used, back = given["P"] * scores, given["P"] * G
    read = {"dd": -used[0].mT @ du, "dx": -back[1].mT @ y, "de": -used[1].mT @ do}
    given |= {**read, "dz": dz, "dw": do.new_empty(chunks, N, C), "d_states": d_states}
    _launch(_write_backward_kernel, (N,), given)
    grads |= {"k": _of_keys(given) - back[0].mT @ given["q"], "v": -given["de"], "P": -(scores * G).sum(0)}
    grads["P"][:, :, -1] += given["dw"]
    return grads, _last(given, grads)


def _of_keys(given: dict) -> Tensor:
    """Gradient of the keys that are written: of Z, and of the layer that they enter."""
    states, after = given["states"][:-1], given["d_states"][1:]
    A = states[:, :, 0]
    if given["ANCHOR"]:
        A = torch.where(given["closed"][..., None] != 0, A, states[:, :, -1])
    d = ACTIVATIONS[given["ACTIVATION"]].backward(given["f"], given["z"])
    dk = given["dz"] @ _first(A, given).mT - (given["P"][:, :, -1, :, None] * d) @ _first(after[:, :, 0], given).mT
    if given["MOMENTUM"]:
        dk -= (given["m"] * d) @ _first(after[:, :, 1], given).mT
    return dk + given["de"] if given["RESIDUAL"] else dk


def _first(flat: Tensor, given: dict) -> Tensor:
    """The first layer [..., K, HIDDEN] of [..., SIZE]."""
    K, hidden = given["K"], given["HIDDEN"]
    return flat[..., : K * hidden].unflatten(-1, (K, hidden))


def _last(given: dict, grads: dict) -> Tensor | None:
    """Add what a chunk leaves to the gradients of beta, c and H; return that of the initial weights, or None."""
    after = given["d_states"][1:]
    W, dW, d_initial = given["states"][:-1, :, 0], after[:, :, 0], None
    if given["RETURNS"]:
        W, rest = W - given["initial"], 1 - given["beta"]
        d_initial = _flat((_over_chunks(given["q"], rest * given["du"]), _over_chunks(given["y"], rest * given["do"])))
        d_initial += (rest[:, :, -1] * dW).sum(0)
    if given["DECAY"]:
        grads["beta"][:, :, -1, 0] += (dW * W).sum(-1)
    if given["MOMENTUM"]:
        S, dS = given["states"][:-1, :, 1], after[:, :, 1]
        grads["c"][:, :, -1, 0] += (dW * S).sum(-1)
        grads["H"][..., 0, 0] = (dS * S).sum(-1)
    return d_initial


def _over_chunks(x: Tensor, g: Tensor) -> Tensor:
    """x^T g of rows [NC, N, C, ...] of all chunks."""
    return torch.einsum("inck,incv->nkv", x, g)


class _Walk(torch.autograd.Function):
    """All chunks, from `start` [N, PARTS, SIZE]."""

    @staticmethod
    def forward(ctx, constants: dict, closed, start, initial, *rows):
        rows = tuple(x if x is None else x.contiguous() for x in rows)
        o, size = torch.empty_like(rows[2]), max(1, isqrt(len(rows[0])))
        kept: list[Tensor] = []
        for first in range(0, len(o), size):
            part, kept = slice(first, first + size), [*kept, start]
            states = start.new_empty(len(o[part]) + 1, *start.shape)
            states[0] = start
            given = _write_group(constants, *_part(part, rows, closed), initial, states)
            _launch(_read_kernel, _grid(given), {**given, "o": o[part]})
            start = states[-1].clone()
        ctx.save_for_backward(closed, initial, torch.stack(kept), *rows)
        ctx.constants, ctx.size = constants, size
        return o, start

    @staticmethod
    @once_differentiable
    def backward(ctx, do, d_start):
        closed, initial, kept, *rows = ctx.saved_tensors
        do, d_initial, d_rows = do.contiguous(), None, [None if x is None else torch.empty_like(x) for x in rows]
        for n in reversed(range(len(kept))):
            part = slice(n * ctx.size, (n + 1) * ctx.size)
            states, d_states = kept.new_empty(2, len(do[part]) + 1, *d_start.shape)
            states[0], d_states[-1] = kept[n], d_start
            given = _write_group(ctx.constants, *_part(part, rows, closed), initial, states)
            grads, added = _backward_group(given, do[part], d_states)
            d_start, d_initial = d_states[0].clone(), added if d_initial is None else d_initial + added
            for whole, name in zip(d_rows, _ROWS):
                if whole is not None:
                    whole[part] = grads[name]
        return None, None, d_start, d_initial, *d_rows


def _part(part: slice, rows, closed) -> tuple[dict, Tensor | None]:
    """Some of the chunks."""
    some = [x if x is None else x[part] for x in (*rows, closed)]
    return dict(zip(_ROWS, some)), some[-1]


def neural_memory(q, k, v, *others: Tensor | None, **kwargs) -> tuple[Tensor, NeuralMemoryState]:
    """Same function as the reference, for a matrix that learns at every token and for what `run` takes."""
    walk = partial(exact_kernels.walk, dtype=q.dtype)
    forms = partial(exact.run, walk=walk), partial(run, dtype=q.dtype)
    return chunk.neural_memory(q, k, v, *others, forms=forms, **kwargs)


def run(q, k, v, coefficients, closed: list, state, initial, norm, rule: Rule, *, dtype: torch.dtype):
    """Same function as `dual.run`, for two matrices and the usual rule; products are of operands in `dtype`."""
    W, S, A = state
    closed = closed if A else [True] * len(closed)
    anchor, C, (K, hidden) = any(x is not True for x in closed), q.shape[2], W[0].shape[1:]
    start = torch.stack([_flat(layers) for layers in (W, S, A if anchor else ()) if layers], dim=1)
    decay, momentum = coefficients.beta is not None, bool(S)
    constants = _constants(C, K, v.shape[-1], hidden, rule, dtype, decay, momentum, anchor)
    table = torch.stack([_row(x, q) for x in closed[:-1]]) if anchor else None
    o, final = _Walk.apply(
        constants, table, start, _flat(initial) if constants["RETURNS"] else None, q, k, v, *coefficients
    )
    after = [_layers(x, W) for x in final.unbind(1)]
    W, S = after[0], after[1] if S else ()
    if anchor:
        is_closed = _row(closed[-1], q).bool()[:, None, None]
        A = tuple(torch.where(is_closed, w, a) for w, a in zip(W, after[-1]))
    elif A:
        A = tuple(w.clone() for w in W)
    return o, (W, S, A)


def _flat(layers) -> Tensor:
    """[N, d_in, d_out] of each layer -> [N, SIZE]."""
    return torch.cat([x.flatten(1) for x in layers], dim=1)


def _layers(flat: Tensor, like) -> tuple[Tensor, ...]:
    """The inverse of `_flat`."""
    parts = flat.split([W.shape[1] * W.shape[2] for W in like], dim=1)
    return tuple(part.unflatten(1, W.shape[1:]) for part, W in zip(parts, like))


def _row(closed: bool | Tensor, like: Tensor) -> Tensor:
    """[N] int32."""
    N = like.shape[1]
    if isinstance(closed, bool):
        return torch.full((N,), int(closed), dtype=torch.int32, device=like.device)
    return closed.flatten().to(torch.int32)


def variants() -> list[Variant]:
    """What is compiled ahead of time: all kernels at the usual sizes of a memory, and at the largest that they take."""
    both = [(16, 64, hidden, dtype) for hidden in (128, 256) for dtype in _POINTERS]
    largest = [(16, 128, 256, torch.bfloat16), (64, 64, 128, torch.bfloat16), (32, 16, 32, torch.float32)]
    return [variant for size in both + largest for variant in _case(*size)] + exact_kernels.variants()


_POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}


def _case(b: int, D: int, hidden: int, dtype: torch.dtype) -> list[Variant]:
    rule = Rule(b, "silu", True, False, 1.0, False, "initial")
    constants = _constants(b, D, D, hidden, rule, dtype, True, True, False) | {"closed": None}
    launch = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    made = []
    for kernel in (_write_kernel, _read_kernel, _read_backward_kernel, _write_backward_kernel):
        signature = {
            argument: "i32" if argument in ("chunks", "N", "C") else "*fp32"
            for argument in kernel.arg_names
            if argument not in constants
        }
        used = {argument: constants[argument] for argument in kernel.arg_names if argument in constants}
        made.append(
            Variant(f"{kernel.__name__} {b} x {D} x {hidden} {str(dtype)[6:]}", kernel, signature, used, **launch)
        )
    return made
