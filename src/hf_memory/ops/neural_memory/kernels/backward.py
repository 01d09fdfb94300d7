"""Backward: reads of all chunks in parallel, then writes from last to first chunk; for letters see launch.py."""

import triton
import triton.language as tl

from hf_memory.ops.neural_memory.kernels.forward import read
from hf_memory.ops.neural_memory.kernels.parts import (
    activate,
    column,
    dot,
    load,
    load_tile,
    of_write,
    places,
    store_tile,
)


@triton.jit
def _back_through(
    x, g, state, initial, at, inside, beta, c, SIZE, RETURNS: tl.constexpr, MOMENTUM: tl.constexpr, DTYPE: tl.constexpr
):
    """Gradients of x, beta and c from g, the gradient of one tile of `read(x)`."""
    W = load(state + at, inside)
    if RETURNS:
        W -= load(initial + at, inside)
    back = dot(g, tl.trans(W), DTYPE)
    dx, dbeta = beta * back, tl.sum(x * back, axis=1)
    dc = tl.zeros_like(dbeta)
    if RETURNS:
        dx += dot(g, tl.trans(load(initial + at, inside)), DTYPE)
    if MOMENTUM:
        back = dot(g, tl.trans(load(state + SIZE + at, inside)), DTYPE)
        dx += c * back
        dc += tl.sum(x * back, axis=1)
    return dx, dbeta, dc


@triton.jit
def read_backward_kernel(
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
    """Program (n, i, r): the part of the backward of reads that needs only the r-th rows of chunk i of head n."""
    n, SIZE = tl.cast(tl.program_id(0), tl.int64), K * HIDDEN + HIDDEN * V
    at = tl.cast(tl.program_id(1), tl.int64) * N + n
    i_k, i_v, cols = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, BC)
    rows = tl.program_id(2) * BR + tl.arange(0, BR)
    state = states + at * (1 + MOMENTUM + ANCHOR) * SIZE
    if RETURNS:
        initial += n * SIZE
    q_c, k_c, do_c = q + at * C * K, k + at * C * K, do + at * C * V
    z_c, f_c, y_c, du_c = z + at * C * HIDDEN, f + at * C * HIDDEN, y + at * C * HIDDEN, du + at * C * HIDDEN
    P_c = load_tile(P + at * C * C, rows, C, cols, C)
    beta_c, c_c = column(beta, at * C, rows, C, DECAY, 1.0), column(c, at * C, rows, C, MOMENTUM, 0.0)
    scores, G, SECOND = scores + at * C * C, G + at * C * C, tl.cast(chunks, tl.int64) * N * C * C
    scores_1 = dot(load_tile(q_c, rows, C, i_k, K), tl.trans(load_tile(k_c, cols, C, i_k, K)), DTYPE)
    store_tile(scores, scores_1, rows, C, cols, C)
    G_2 = dot(load_tile(do_c, rows, C, i_v, V), tl.trans(load_tile(e + at * C * V, cols, C, i_v, V)), DTYPE)
    store_tile(G + SECOND, G_2, rows, C, cols, C)
    scores_1, G_2 = P_c * scores_1, P_c * G_2
    scores_2, G_1 = tl.zeros([BR, BC], tl.float32), tl.zeros([BR, BC], tl.float32)
    dq_c, dbeta_c, dc_c = tl.zeros([BR, BK], tl.float32), tl.zeros([BR], tl.float32), tl.zeros([BR], tl.float32)
    for tile in tl.range(0, HIDDEN, BH, disable_licm=True):
        j = tile + tl.arange(0, BH)
        at_1, in_1, at_2, in_2 = places(i_k, j, i_v, K, HIDDEN, V)
        x, slope, _ = activate(load_tile(z_c, cols, C, j, HIDDEN), ACTIVATION)
        d = slope * load_tile(f_c, cols, C, j, HIDDEN)
        q_t = load_tile(q_c, rows, C, i_k, K)  # loaded a second time, to save registers
        u = read(q_t, state, initial, at_1, in_1, beta_c, c_c, SIZE, RETURNS, MOMENTUM, DTYPE)
        y_t, slope, _ = activate(u - dot(scores_1, d, DTYPE, BC // 16), ACTIVATION)
        scores_2 += dot(y_t, tl.trans(x), DTYPE)
        store_tile(y_c, y_t, rows, C, j, HIDDEN)
        dy, dbeta_t, dc_t = _back_through(
            y_t,
            load_tile(do_c, rows, C, i_v, V),
            state,
            initial,
            at_2,
            in_2,
            beta_c,
            c_c,
            SIZE,
            RETURNS,
            MOMENTUM,
            DTYPE,
        )
        dbeta_c, dc_c = dbeta_c + dbeta_t, dc_c + dc_t
        du_t = slope * (dy - dot(G_2, x, DTYPE, BC // 16))
        G_1 += dot(du_t, tl.trans(d), DTYPE)
        store_tile(du_c, du_t, rows, C, j, HIDDEN)
        dq_t, dbeta_t, dc_t = _back_through(
            load_tile(q_c, rows, C, i_k, K),
            du_t,
            state,
            initial,
            at_1,
            in_1,
            beta_c,
            c_c,
            SIZE,
            RETURNS,
            MOMENTUM,
            DTYPE,
        )
        dq_c, dbeta_c, dc_c = dq_c + dq_t, dbeta_c + dbeta_t, dc_c + dc_t
    store_tile(scores + SECOND, scores_2, rows, C, cols, C)
    store_tile(G, G_1, rows, C, cols, C)
    P_c = load_tile(P + at * C * C, rows, C, cols, C)  # loaded a second time, to save registers
    dq_c -= dot(P_c * G_1, load_tile(k_c, cols, C, i_k, K), DTYPE)
    if RESIDUAL:
        dq_c += load_tile(do_c, rows, C, i_v, V)
    store_tile(dq + at * C * K, dq_c, rows, C, i_k, K)
    if DECAY:
        tl.store(dbeta + at * C + rows, dbeta_c, mask=rows < C)
    if MOMENTUM:
        tl.store(dc + at * C + rows, dc_c, mask=rows < C)


@triton.jit
def _put_back(
    x, g, before, after, at, inside, beta, c, beta_n, c_n, H, SIZE, MOMENTUM: tl.constexpr, DTYPE: tl.constexpr
):
    """Store a tile of the gradient of the state before, from that of the state after and g, that of `read(x)`."""
    dW = load(after + at, inside)
    tl.store(before + at, beta_n * dW + dot(tl.trans(x), beta * g, DTYPE), mask=inside)
    if MOMENTUM:
        dS = c_n * dW + H * load(after + SIZE + at, inside) + dot(tl.trans(x), c * g, DTYPE)
        tl.store(before + SIZE + at, dS, mask=inside)


@triton.jit
def _back_through_write(k, d, x, e, dd, dx, de, after, at_1, in_1, at_2, in_2, w, DTYPE: tl.constexpr):
    """Add one tile of the gradients of both `_write`s, of D, X and E, from that of what they leave; and that of w."""
    G = load(after + at_2, in_2)
    back, out = dot(e, tl.trans(G), DTYPE), dot(k, load(after + at_1, in_1), DTYPE)
    dw = -tl.sum(x * back + out * d, axis=1)
    return dd - w * out, dx - w * back, de - dot(w * x, G, DTYPE), dw


@triton.jit
def _add_anchor(before, after, dA, at, inside, is_closed, OFFSET, ANCHOR: tl.constexpr):
    """Add the anchor's gradient to that of the weights if they became the anchor, else to that of the old anchor."""
    G = load(before + at, inside)
    if ANCHOR:
        dA += load(after + OFFSET + at, inside)
        tl.store(before + OFFSET + at, tl.where(is_closed, 0.0, dA), mask=inside)
        dA = tl.where(is_closed, dA, 0.0)
    tl.debug_barrier()  # all threads have read before one writes
    tl.store(before + at, G + dA, mask=inside)


@triton.jit
def write_backward_kernel(
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
    DECAY: tl.constexpr,
    MOMENTUM: tl.constexpr,
    ANCHOR: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Program n loops over the chunks of head n backwards."""
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
        w_c, m_c, beta_n, c_n, H_n = of_write(P, beta, c, m, H, at, rows, C, DECAY, MOMENTUM)
        beta_c, c_c = column(beta, at * C, rows, C, DECAY, 1.0), column(c, at * C, rows, C, MOMENTUM, 0.0)
        de_s = load_tile(de_c, rows, C, i_v, V)
        dw_s, dm_s = tl.zeros([BC], tl.float32), tl.zeros([BC], tl.float32)
        for tile in tl.range(0, HIDDEN, BH, disable_licm=True):
            j = tile + tl.arange(0, BH)
            at_1, in_1, at_2, in_2 = places(i_k, j, i_v, K, HIDDEN, V)
            _put_back(
                load_tile(q_c, rows, C, i_k, K), load_tile(du_c, rows, C, j, HIDDEN),
                before, after, at_1, in_1, beta_c, c_c, beta_n, c_n, H_n, SIZE, MOMENTUM, DTYPE,
            )  # fmt: skip
            _put_back(
                load_tile(y_c, rows, C, j, HIDDEN), load_tile(do_c, rows, C, i_v, V),
                before, after, at_2, in_2, beta_c, c_c, beta_n, c_n, H_n, SIZE, MOMENTUM, DTYPE,
            )  # fmt: skip
        for tile in tl.range(0, HIDDEN, BH, disable_licm=True):
            j = tile + tl.arange(0, BH)
            at_1, in_1, at_2, in_2 = places(i_k, j, i_v, K, HIDDEN, V)
            x, slope, _ = activate(load_tile(z_c, rows, C, j, HIDDEN), ACTIVATION)
            d = slope * load_tile(f_c, rows, C, j, HIDDEN)
            dd_t, dx_t = load_tile(dd_c, rows, C, j, HIDDEN), load_tile(dx_c, rows, C, j, HIDDEN)
            dd_t, dx_t, de_s, dw_t = _back_through_write(
                load_tile(k_c, rows, C, i_k, K), d, x, load_tile(e_c, rows, C, i_v, V), dd_t, dx_t, de_s,
                after, at_1, in_1, at_2, in_2, w_c, DTYPE,
            )  # fmt: skip
            dw_s += dw_t
            if MOMENTUM:
                tl.debug_barrier()  # frees the registers of earlier loads
                dd_t, dx_t, de_s, dm_t = _back_through_write(
                    load_tile(k_c, rows, C, i_k, K), d, x, load_tile(e_c, rows, C, i_v, V), dd_t, dx_t, de_s,
                    after + SIZE, at_1, in_1, at_2, in_2, m_c, DTYPE,
                )  # fmt: skip
                dm_s += dm_t
            de_s += dot(slope * dd_t, load(anchor + at_2, in_2), DTYPE)
            tl.debug_barrier()  # all threads have read before one writes
            store_tile(dd_c, dd_t, rows, C, j, HIDDEN)
            store_tile(dx_c, dx_t, rows, C, j, HIDDEN)
        tl.store(dw + at * C + rows, dw_s, mask=rows < C)
        if MOMENTUM:
            tl.store(dm + at * C + rows, dm_s, mask=rows < C)
        tl.debug_barrier()
        store_tile(de_c, de_s, rows, C, i_v, V)
        tl.debug_barrier()
        for tile in tl.range(0, HIDDEN, BH, disable_licm=True):
            j = tile + tl.arange(0, BH)
            at_1, in_1, at_2, in_2 = places(i_k, j, i_v, K, HIDDEN, V)
            x, slope, bend = activate(load_tile(z_c, rows, C, j, HIDDEN), ACTIVATION)
            de_t, dd_t = load_tile(de_c, rows, C, i_v, V), load_tile(dd_c, rows, C, j, HIDDEN)
            dx_t = load_tile(dx_c, rows, C, j, HIDDEN) + dot(de_t, tl.trans(load(anchor + at_2, in_2)), DTYPE)
            dA_2 = dot(tl.trans(x), de_t, DTYPE) + dot(tl.trans(slope * dd_t), load_tile(e_c, rows, C, i_v, V), DTYPE)
            _add_anchor(before, after, dA_2, at_2, in_2, is_closed, OFFSET, ANCHOR)
            dz_t = slope * dx_t + bend * load_tile(f_c, rows, C, j, HIDDEN) * dd_t
            store_tile(dz + at * C * HIDDEN, dz_t, rows, C, j, HIDDEN)
            dA_1 = dot(tl.trans(load_tile(k_c, rows, C, i_k, K)), dz_t, DTYPE)
            _add_anchor(before, after, dA_1, at_1, in_1, is_closed, OFFSET, ANCHOR)
        tl.debug_barrier()
