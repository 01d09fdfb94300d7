"""The dual form of two matrices in Triton: a program walks the chunks of one head, a tile of hidden channels at a time.

The letters are those of `dual`, with rows K, X and Q, Y that enter the two layers, D and E what leaves them:

    Z = K A_1,   X = s(Z),   E = X A_2 - V,   F = E A_2^T,   D = F .* s'(Z)
    U = beta .* Q W_1 + c .* Q S_1 - (P .* Q K^T) D,   Y = s(U)
    O = beta .* Y W_2 + c .* Y S_2 - (P .* Y X^T) E

Only E, O and the scores Y X^T gather over hidden channels. So one pass over the tiles makes E, a second one the rest,
and weights of any width stay in global memory, where a chunk after the other leaves them: a program holds a tile.
Backward there is a third pass, for what E hands down. It starts from the states before groups of chunks, as in `dual`;
a group is walked forwards again, this time keeping all its states, and then backwards.
There is one program for each row and head: few of them leave a GPU idle.
"""

from functools import partial
from math import isqrt

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_memory.ops.kernel_report import Variant
from hf_memory.ops.neural_memory import chunk, exact, exact_kernels
from hf_memory.ops.neural_memory.exact_kernels import _put, _tile
from hf_memory.ops.neural_memory.network import NeuralMemoryState, Rule

TILE = 16  # hidden channels; with more, registers spill


@triton.jit
def _dot(x, y, DTYPE: tl.constexpr):
    """x y, of operands rounded to DTYPE."""
    PRECISION: tl.constexpr = "tf32x3" if tl.float32 == DTYPE else "tf32"
    return tl.dot(tl.cast(x, DTYPE), tl.cast(y, DTYPE), input_precision=PRECISION)


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
def _coefficients(P, beta, c, m, H, at, rows, C, DECAY: tl.constexpr, MOMENTUM: tl.constexpr):
    """P [C, C], then columns [C, 1] beta, c, w and m, then what becomes of W, S: beta_n, c_n and H."""
    P_c = _tile(P + at * C * C, rows, C, rows, C)
    in_c = rows < C
    w_c = tl.load(P + at * C * C + (C - 1) * C + rows, mask=in_c, other=0.0)[:, None]
    beta_c, beta_n, c_c, c_n, m_c, H_n = 1.0, 1.0, 0.0, 0.0, 0.0, 0.0
    if DECAY:
        beta_c = tl.load(beta + at * C + rows, mask=in_c, other=0.0)[:, None]
        beta_n = tl.load(beta + at * C + C - 1)
    if MOMENTUM:
        c_c = tl.load(c + at * C + rows, mask=in_c, other=0.0)[:, None]
        c_n = tl.load(c + at * C + C - 1)
        m_c = tl.load(m + at * C + rows, mask=in_c, other=0.0)[:, None]
        H_n = tl.load(H + at)
    return P_c, beta_c, c_c, w_c, m_c, beta_n, c_n, H_n


@triton.jit
def _read(
    x, state, initial, at, inside, beta, c, SIZE, RETURNS: tl.constexpr, MOMENTUM: tl.constexpr, DTYPE: tl.constexpr
):
    """x through the weights that the chunk began with, decayed, and its momentum."""
    W = tl.load(state + at, mask=inside, other=0.0)
    if RETURNS:
        I = tl.load(initial + at, mask=inside, other=0.0)
        y = beta * _dot(x, W - I, DTYPE) + _dot(x, I, DTYPE)
    else:
        y = beta * _dot(x, W, DTYPE)
    if MOMENTUM:
        y += c * _dot(x, tl.load(state + SIZE + at, mask=inside, other=0.0), DTYPE)
    return y


@triton.jit
def _write(
    X, D, state, after, initial, at, inside, w, m, beta, c, H, SIZE,
    RETURNS: tl.constexpr, MOMENTUM: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Weights and momentum after the chunk."""
    W = beta * tl.load(state + at, mask=inside, other=0.0) - _dot(tl.trans(X), w * D, DTYPE)
    if RETURNS:
        W += (1 - beta) * tl.load(initial + at, mask=inside, other=0.0)
    if MOMENTUM:
        S = tl.load(state + SIZE + at, mask=inside, other=0.0)
        W += c * S
        tl.store(after + SIZE + at, H * S - _dot(tl.trans(X), m * D, DTYPE), mask=inside)
    tl.store(after + at, W, mask=inside)


@triton.jit
def _put_error(
    k, v, e, anchor, after, rows, C, i_k, i_v, K: tl.constexpr, V: tl.constexpr, HIDDEN: tl.constexpr, BH: tl.constexpr,
    ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr, FACTOR: tl.constexpr, ANCHOR: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Put E [C, V] into e; with ANCHOR the anchor is handed on to `after`."""
    e_c = -_tile(v, rows, C, i_v, V)
    if RESIDUAL:
        e_c += _tile(k, rows, C, i_k, K)
    for tile in tl.range(0, HIDDEN, BH, disable_licm=True):
        at_1, in_1, at_2, in_2 = _places(i_k, tile + tl.arange(0, BH), i_v, K, HIDDEN, V)
        A_1, A_2 = tl.load(anchor + at_1, mask=in_1, other=0.0), tl.load(anchor + at_2, mask=in_2, other=0.0)
        x, _, _ = _activate(_dot(_tile(k, rows, C, i_k, K), A_1, DTYPE), ACTIVATION)
        e_c += _dot(x, A_2, DTYPE)
        if ANCHOR:
            tl.store(after + at_1, A_1, mask=in_1)
            tl.store(after + at_2, A_2, mask=in_2)
    _put(e, FACTOR * e_c, rows, C, i_v, V)
    tl.debug_barrier()  # what threads have written others read


@triton.jit
def _forward_kernel(
    q,  # [NC, N, C, K]
    k,  # [NC, N, C, K]
    v,  # [NC, N, C, V]
    P,  # [NC, N, C, C]
    beta,  # [NC, N, C] or None
    c,  # [NC, N, C] or None
    m,  # [NC, N, C] or None
    H,  # [NC, N] or None
    closed,  # [NC, N] int32, whether the anchor becomes the weights before the chunk; or None for always
    initial,  # [N, SIZE] or None
    states,  # [slots, N, PARTS, SIZE]: the one before the first chunk comes first
    o,  # [NC, N, C, V], where E is before
    first,
    chunks,
    slots,
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
    """Program n reads and writes `chunks` chunks of head n, from the first on."""
    n, SIZE = tl.cast(tl.program_id(0), tl.int64), K * HIDDEN + HIDDEN * V
    PARTS = 1 + MOMENTUM + ANCHOR
    i_k, i_v, rows = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, BC)
    if RETURNS:
        initial += n * SIZE
    for i in tl.range(chunks, disable_licm=True):
        at = (tl.cast(i, tl.int64) + first) * N + n
        state = states + (tl.cast(i % slots, tl.int64) * N + n) * PARTS * SIZE
        after = states + (tl.cast((i + 1) % slots, tl.int64) * N + n) * PARTS * SIZE
        anchor = state
        if ANCHOR:
            anchor += tl.where(tl.load(closed + at) != 0, 0, (PARTS - 1) * SIZE)
        q_c, k_c, o_c = q + at * C * K, k + at * C * K, o + at * C * V
        P_c, beta_c, c_c, w_c, m_c, beta_n, c_n, H_n = _coefficients(P, beta, c, m, H, at, rows, C, DECAY, MOMENTUM)
        _put_error(
            k_c, v + at * C * V, o_c, anchor, after + (PARTS - 1) * SIZE, rows, C, i_k, i_v, K, V, HIDDEN, BH,
            ACTIVATION, RESIDUAL, FACTOR, ANCHOR, DTYPE,
        )  # fmt: skip
        scores = P_c * _dot(_tile(q_c, rows, C, i_k, K), tl.trans(_tile(k_c, rows, C, i_k, K)), DTYPE)
        said, scores_2 = tl.zeros([BC, BV], tl.float32), tl.zeros([BC, BC], tl.float32)
        for tile in tl.range(0, HIDDEN, BH, disable_licm=True):
            at_1, in_1, at_2, in_2 = _places(i_k, tile + tl.arange(0, BH), i_v, K, HIDDEN, V)
            k_t, e = _tile(k_c, rows, C, i_k, K), _tile(o_c, rows, C, i_v, V)  # again, to hold them no longer
            x, slope, _ = _activate(_dot(k_t, tl.load(anchor + at_1, mask=in_1, other=0.0), DTYPE), ACTIVATION)
            d = slope * _dot(e, tl.trans(tl.load(anchor + at_2, mask=in_2, other=0.0)), DTYPE)
            q_t = _tile(q_c, rows, C, i_k, K)
            u = _read(q_t, state, initial, at_1, in_1, beta_c, c_c, SIZE, RETURNS, MOMENTUM, DTYPE)
            y, _, _ = _activate(u - _dot(scores, d, DTYPE), ACTIVATION)
            _write(
                k_t, d, state, after, initial, at_1, in_1, w_c, m_c, beta_n, c_n, H_n, SIZE, RETURNS, MOMENTUM, DTYPE
            )
            said += _read(y, state, initial, at_2, in_2, beta_c, c_c, SIZE, RETURNS, MOMENTUM, DTYPE)
            scores_2 += _dot(y, tl.trans(x), DTYPE)
            _write(x, e, state, after, initial, at_2, in_2, w_c, m_c, beta_n, c_n, H_n, SIZE, RETURNS, MOMENTUM, DTYPE)
        said -= _dot(P_c * scores_2, _tile(o_c, rows, C, i_v, V), DTYPE)
        if RESIDUAL:
            said += _tile(q_c, rows, C, i_k, K)
        tl.debug_barrier()
        _put(o_c, said, rows, C, i_v, V)


@triton.jit
def _layer_backward(
    x, g, X, D, state, d_state, initial, d_initial, at, inside, last, w, m, beta, c, beta_n, c_n, H, SIZE,
    RETURNS: tl.constexpr, MOMENTUM: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Gradients of one tile of `_read(x)`, from g, and of `_write(X, D)`, from d_state, which becomes the one before.

    Returns those of x, X and D, and then of beta, c, w, m and H, the last in the row `last`.
    """
    W, G = tl.load(state + at, mask=inside, other=0.0), tl.load(d_state + at, mask=inside, other=0.0)
    if RETURNS:
        W -= tl.load(initial + at, mask=inside, other=0.0)
    back = _dot(g, tl.trans(W), DTYPE)
    dx, dbeta = beta * back, tl.sum(x * back, axis=1) + tl.where(last, tl.sum(G * W), 0.0)
    out = _dot(X, G, DTYPE)
    dX, dD, dw = -w * _dot(D, tl.trans(G), DTYPE), -w * out, -tl.sum(out * D, axis=1)
    dc, dm, dH = tl.zeros_like(dw), tl.zeros_like(dw), tl.zeros_like(dw)
    if MOMENTUM:
        S = tl.load(state + SIZE + at, mask=inside, other=0.0)
        G_s = tl.load(d_state + SIZE + at, mask=inside, other=0.0)
        back, out = _dot(g, tl.trans(S), DTYPE), _dot(X, G_s, DTYPE)
        dx += c * back
        dX -= m * _dot(D, tl.trans(G_s), DTYPE)
        dD -= m * out
        dc, dm = tl.sum(x * back, axis=1) + tl.where(last, tl.sum(G * S), 0.0), -tl.sum(out * D, axis=1)
        dH += tl.where(last, tl.sum(G_s * S), 0.0)
        dS = c_n * G + H * G_s + _dot(tl.trans(x), c * g, DTYPE)
        tl.debug_barrier()
        tl.store(d_state + SIZE + at, dS, mask=inside)
    if RETURNS:
        dx += _dot(g, tl.trans(tl.load(initial + at, mask=inside, other=0.0)), DTYPE)
        dI = (1 - beta_n) * tl.load(d_state + at, mask=inside, other=0.0) + _dot(tl.trans(x), (1 - beta) * g, DTYPE)
        dI += tl.load(d_initial + at, mask=inside, other=0.0)
        tl.debug_barrier()
        tl.store(d_initial + at, dI, mask=inside)
    dW = beta_n * tl.load(d_state + at, mask=inside, other=0.0) + _dot(tl.trans(x), beta * g, DTYPE)
    tl.debug_barrier()  # all threads have read before one writes
    tl.store(d_state + at, dW, mask=inside)
    return dx, dX, dD, dbeta, dc, dw, dm, dH


@triton.jit
def _add_anchor(d_state, dA, at, inside, is_closed, OFFSET, ANCHOR: tl.constexpr):
    """The gradient of the anchor: of the weights where it became them, else of the anchor before."""
    G = tl.load(d_state + at, mask=inside, other=0.0)
    if ANCHOR:
        dA += tl.load(d_state + OFFSET + at, mask=inside, other=0.0)
        tl.debug_barrier()
        tl.store(d_state + OFFSET + at, tl.where(is_closed, 0.0, dA), mask=inside)
        dA = tl.where(is_closed, dA, 0.0)
    tl.debug_barrier()
    tl.store(d_state + at, G + dA, mask=inside)


@triton.jit
def _backward_kernel(
    q,  # [NC, N, C, K]
    k,  # [NC, N, C, K]
    v,  # [NC, N, C, V]
    P,  # [NC, N, C, C]
    beta,  # [NC, N, C] or None
    c,  # [NC, N, C] or None
    m,  # [NC, N, C] or None
    H,  # [NC, N] or None
    closed,  # [NC, N] int32 or None
    initial,  # [N, SIZE] or None
    states,  # [chunks, N, PARTS, SIZE]: before each chunk
    do,  # [NC, N, C, V]
    d_states,  # [N, PARTS, SIZE]: from after the last chunk to before the first
    d_initial,  # [N, SIZE], added to; or None
    scratch,  # [N, 3, C, HIDDEN]
    dq,  # [NC, N, C, K]
    dk,  # [NC, N, C, K]
    dv,  # [NC, N, C, V], where E is before
    dP,  # [NC, N, C, C]
    dbeta,  # [NC, N, C] or None
    dc,  # [NC, N, C] or None
    dm,  # [NC, N, C] or None
    dH,  # [NC, N] or None
    first,
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
    """Program n walks `chunks` chunks of head n backwards."""
    n, SIZE = tl.cast(tl.program_id(0), tl.int64), K * HIDDEN + HIDDEN * V
    PARTS = 1 + MOMENTUM + ANCHOR
    i_k, i_v, rows = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, BC)
    last, in_c = rows == C - 1, rows < C
    d_state = d_states + n * PARTS * SIZE
    if RETURNS:
        initial, d_initial = initial + n * SIZE, d_initial + n * SIZE
    dX_rows = scratch + n * 3 * C * HIDDEN
    dZ_rows, dF_rows = dX_rows + C * HIDDEN, dX_rows + 2 * C * HIDDEN
    for reverse in tl.range(chunks, disable_licm=True):
        i = chunks - 1 - tl.cast(reverse, tl.int64)
        at = (i + first) * N + n
        state = states + (i * N + n) * PARTS * SIZE
        anchor, is_closed = state, True
        if ANCHOR:
            is_closed = tl.load(closed + at) != 0
            anchor += tl.where(is_closed, 0, (PARTS - 1) * SIZE)
        q_c, k_c, do_c, e_c = q + at * C * K, k + at * C * K, do + at * C * V, dv + at * C * V
        P_c, beta_c, c_c, w_c, m_c, beta_n, c_n, H_n = _coefficients(P, beta, c, m, H, at, rows, C, DECAY, MOMENTUM)
        _put_error(
            k_c, v + at * C * V, e_c, anchor, state, rows, C, i_k, i_v, K, V, HIDDEN, BH,
            ACTIVATION, RESIDUAL, FACTOR, False, DTYPE,
        )  # fmt: skip
        scores = _dot(_tile(q_c, rows, C, i_k, K), tl.trans(_tile(k_c, rows, C, i_k, K)), DTYPE)
        G_2 = _dot(_tile(do_c, rows, C, i_v, V), tl.trans(_tile(e_c, rows, C, i_v, V)), DTYPE)
        scores_2, G_1 = tl.zeros([BC, BC], tl.float32), tl.zeros([BC, BC], tl.float32)
        dq_s, dk_s, de = tl.zeros([BC, BK], tl.float32), tl.zeros([BC, BK], tl.float32), tl.zeros([BC, BV], tl.float32)
        none = tl.zeros([BC], tl.float32)
        dbeta_s, dc_s, dw_s, dm_s, dH_s = none, none, none, none, none
        for tile in tl.range(0, HIDDEN, BH, disable_licm=True):
            j = tile + tl.arange(0, BH)
            at_1, in_1, at_2, in_2 = _places(i_k, j, i_v, K, HIDDEN, V)
            k_t, e = _tile(k_c, rows, C, i_k, K), _tile(e_c, rows, C, i_v, V)  # again, to hold them no longer
            x, slope, bend = _activate(_dot(k_t, tl.load(anchor + at_1, mask=in_1, other=0.0), DTYPE), ACTIVATION)
            f = _dot(e, tl.trans(tl.load(anchor + at_2, mask=in_2, other=0.0)), DTYPE)
            d, q_t = f * slope, _tile(q_c, rows, C, i_k, K)
            u = _read(q_t, state, initial, at_1, in_1, beta_c, c_c, SIZE, RETURNS, MOMENTUM, DTYPE)
            y, slope_y, _ = _activate(u - _dot(P_c * scores, d, DTYPE), ACTIVATION)
            scores_2 += _dot(y, tl.trans(x), DTYPE)
            dy, dx, de_t, dbeta_t, dc_t, dw_t, dm_t, dH_t = _layer_backward(
                y, _tile(do_c, rows, C, i_v, V), x, e, state, d_state, initial, d_initial, at_2, in_2, last,
                w_c, m_c, beta_c, c_c, beta_n, c_n, H_n, SIZE, RETURNS, MOMENTUM, DTYPE,
            )  # fmt: skip
            de += de_t
            dbeta_s, dc_s, dw_s, dm_s, dH_s = dbeta_s + dbeta_t, dc_s + dc_t, dw_s + dw_t, dm_s + dm_t, dH_s + dH_t
            _put(dX_rows, dx - _dot(tl.trans(P_c * G_2), y, DTYPE), rows, C, j, HIDDEN)
            du = slope_y * (dy - _dot(P_c * G_2, x, DTYPE))
            G_1 += _dot(du, tl.trans(d), DTYPE)
            dq_t, dk_t, dd, dbeta_t, dc_t, dw_t, dm_t, dH_t = _layer_backward(
                _tile(q_c, rows, C, i_k, K), du, _tile(k_c, rows, C, i_k, K), d, state, d_state, initial, d_initial,
                at_1, in_1, last, w_c, m_c, beta_c, c_c, beta_n, c_n, H_n, SIZE, RETURNS, MOMENTUM, DTYPE,
            )  # fmt: skip
            dq_s, dk_s = dq_s + dq_t, dk_s + dk_t
            dbeta_s, dc_s, dw_s, dm_s, dH_s = dbeta_s + dbeta_t, dc_s + dc_t, dw_s + dw_t, dm_s + dm_t, dH_s + dH_t
            dd -= _dot(tl.trans(P_c * scores), du, DTYPE)
            _put(dZ_rows, dd * f * bend, rows, C, j, HIDDEN)
            _put(dF_rows, dd * slope, rows, C, j, HIDDEN)
            de += _dot(dd * slope, tl.load(anchor + at_2, mask=in_2, other=0.0), DTYPE)
        de = FACTOR * (de - _dot(tl.trans(P_c * scores_2), _tile(do_c, rows, C, i_v, V), DTYPE))
        dq_s -= _dot(P_c * G_1, _tile(k_c, rows, C, i_k, K), DTYPE)
        dk_s -= _dot(tl.trans(P_c * G_1), _tile(q_c, rows, C, i_k, K), DTYPE)
        if RESIDUAL:
            dq_s += _tile(do_c, rows, C, i_v, V)
            dk_s += de
        dP_c = tl.where(last[:, None], dw_s[None, :], 0.0) - scores * G_1 - scores_2 * G_2
        _put(dq + at * C * K, dq_s, rows, C, i_k, K)
        _put(dP + at * C * C, dP_c, rows, C, rows, C)
        if DECAY:
            tl.store(dbeta + at * C + rows, dbeta_s, mask=in_c)
        if MOMENTUM:
            tl.store(dc + at * C + rows, dc_s, mask=in_c)
            tl.store(dm + at * C + rows, dm_s, mask=in_c)
            tl.store(dH + at, tl.sum(dH_s))
        tl.debug_barrier()
        for tile in tl.range(0, HIDDEN, BH, disable_licm=True):
            j = tile + tl.arange(0, BH)
            at_1, in_1, at_2, in_2 = _places(i_k, j, i_v, K, HIDDEN, V)
            A_1, k_t = tl.load(anchor + at_1, mask=in_1, other=0.0), _tile(k_c, rows, C, i_k, K)
            x, slope, _ = _activate(_dot(k_t, A_1, DTYPE), ACTIVATION)
            dx = _dot(de, tl.trans(tl.load(anchor + at_2, mask=in_2, other=0.0)), DTYPE)
            dx += _tile(dX_rows, rows, C, j, HIDDEN)
            dz = dx * slope + _tile(dZ_rows, rows, C, j, HIDDEN)
            dk_s += _dot(dz, tl.trans(A_1), DTYPE)
            e, df = _tile(e_c, rows, C, i_v, V), _tile(dF_rows, rows, C, j, HIDDEN)
            dA_2 = _dot(tl.trans(x), de, DTYPE) + _dot(tl.trans(df), e, DTYPE)
            OFFSET = (PARTS - 1) * SIZE
            _add_anchor(d_state, _dot(tl.trans(k_t), dz, DTYPE), at_1, in_1, is_closed, OFFSET, ANCHOR)
            _add_anchor(d_state, dA_2, at_2, in_2, is_closed, OFFSET, ANCHOR)
        _put(dk + at * C * K, dk_s, rows, C, i_k, K)
        tl.debug_barrier()
        _put(e_c, -de, rows, C, i_v, V)


_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _constants(C: int, K: int, V: int, hidden: int, rule: Rule, dtype: torch.dtype, decay, momentum, anchor) -> dict:
    """Compile-time arguments and launch options of both kernels."""
    return {
        "K": K, "V": V, "HIDDEN": hidden, "BH": max(16, min(TILE, triton.next_power_of_2(hidden))),
        **{name: max(16, triton.next_power_of_2(D)) for name, D in (("BC", C), ("BK", K), ("BV", V))},
        "ACTIVATION": rule.activation, "RESIDUAL": rule.residual, "FACTOR": rule.factor,
        "DECAY": decay, "MOMENTUM": momentum, "RETURNS": decay and rule.forget_to == "initial", "ANCHOR": anchor,
        "DTYPE": _TYPES[dtype], "num_warps": 8, "num_stages": 1,
    }  # fmt: skip


class _Walk(torch.autograd.Function):
    """All chunks, from `start` [N, PARTS, SIZE]."""

    @staticmethod
    def forward(ctx, constants: dict, closed, start, initial, *rows):
        rows = tuple(x if x is None else x.contiguous() for x in rows)
        (NC, N, C), size = rows[0].shape[:3], max(1, isqrt(rows[0].shape[0]))
        o, states = torch.empty_like(rows[2]), start.new_empty(2, *start.shape)
        kept = start.new_empty(-(-NC // size), *start.shape)
        for i, first in enumerate(range(0, NC, size)):
            chunks = min(size, NC - first)
            kept[i] = states[0] = start
            _forward_kernel[(N,)](*rows, closed, initial, states, o, first, chunks, 2, N, C, **constants)
            start = states[chunks % 2]
        ctx.save_for_backward(closed, initial, kept, *rows)
        ctx.constants, ctx.size = constants, size
        return o, start.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, do, d_states):
        closed, initial, kept, *rows = ctx.saved_tensors
        (NC, N, C), constants, size = rows[0].shape[:3], ctx.constants, ctx.size
        do, d_states = do.contiguous(), d_states.clone(memory_format=torch.contiguous_format)
        d_initial = None if initial is None else torch.zeros_like(initial)
        d_rows = [None if x is None else torch.empty_like(x) for x in rows]
        scratch = do.new_empty(N, 3, C, constants["HIDDEN"])
        states = kept.new_empty(min(size, NC) + 1, *kept.shape[1:])
        for first in reversed(range(0, NC, size)):
            chunks = min(size, NC - first)
            states[0] = kept[first // size]
            again = (*rows, closed, initial, states, d_rows[2])  # what it says is not needed
            _forward_kernel[(N,)](*again, first, chunks, chunks + 1, N, C, **constants)
            _backward_kernel[(N,)](
                *rows,
                closed,
                initial,
                states,
                do,
                d_states,
                d_initial,
                scratch,
                *d_rows,
                first,
                chunks,
                N,
                C,
                **constants,
            )
        return None, None, d_states, d_initial, *d_rows


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
    """What is compiled ahead of time: both kernels at the usual sizes of a memory."""
    sizes = [(b, D, 2 * D, dtype) for b in (16, 64) for D in (64, 128) for dtype in _POINTERS]
    sizes += [(16, 64, 256, dtype) for dtype in _POINTERS]
    return [variant for size in sizes for variant in _case(*size)] + exact_kernels.variants()


_POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}


def _case(b: int, D: int, hidden: int, dtype: torch.dtype) -> list[Variant]:
    rule = Rule(b, "silu", True, False, 1.0, False, "initial")
    constants = _constants(b, D, D, hidden, rule, dtype, True, True, False) | {"closed": None}
    launch = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    integers = ("first", "chunks", "slots", "N", "C")
    made = []
    for kernel in (_forward_kernel, _backward_kernel):
        signature = {
            argument: "i32" if argument in integers else "*fp32"
            for argument in kernel.arg_names
            if argument not in constants
        }
        name = f"{kernel.__name__} {b} x {D} x {hidden} {str(dtype)[6:]}"
        made.append(Variant(name, kernel, signature, constants, **launch))
    return made
