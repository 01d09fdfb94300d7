"""Backward: reads of all chunks in parallel, then writes from last to first chunk; for letters see launch.py."""

import triton
import triton.language as tl

from hf_memory.ops.neural_memory.kernels.forward import decaying, read
from hf_memory.ops.neural_memory.kernels.parts import (
    activate,
    anchor_of,
    column,
    dot,
    load,
    load_tile,
    of_write,
    places,
    store_tile,
)


@triton.jit
def _back_through(x, g, state, initial, at, inside, beta, c, meta: tl.constexpr):
    """Gradients of x, beta and c from g, the gradient of one tile of `read(x)`."""
    back = dot(g, tl.trans(decaying(state, initial, at, inside, meta)), meta.DTYPE)
    dx, dbeta = beta * back, tl.sum(x * back, axis=1)
    dc = tl.zeros_like(dbeta)
    if meta.RETURNS:
        dx += dot(g, tl.trans(load(initial + at, inside)), meta.DTYPE)
    if meta.MOMENTUM:
        back = dot(g, tl.trans(load(state + meta.SIZE + at, inside)), meta.DTYPE)
        dx += c * back
        dc += tl.sum(x * back, axis=1)
    return dx, dbeta, dc


@triton.jit
def read_backward_kernel(
    given,  # Rows
    initial,  # [N, SIZE] or None
    states,  # [NC + 1, N, PARTS, SIZE]
    learned,  # Learned
    do,  # [NC, N, C, V]
    y,  # [NC, N, C, HIDDEN]
    du,  # [NC, N, C, HIDDEN]
    scores,  # [2, NC, N, C, C]: Q K^T and Y X^T
    G,  # [2, NC, N, C, C]: dU D^T and dO E^T, minus the gradients of P .* scores
    grads,  # Rows, of which those of q, beta and c are computed here
    chunks,
    N,
    C,
    meta: tl.constexpr,
):
    """Program (n, i, r): the part of the backward of reads that needs only the r-th rows of chunk i of head n."""
    K: tl.constexpr = meta.K
    V: tl.constexpr = meta.V
    HIDDEN: tl.constexpr = meta.HIDDEN
    n = tl.cast(tl.program_id(0), tl.int64)
    at = tl.cast(tl.program_id(1), tl.int64) * N + n
    i_k, i_v, cols = tl.arange(0, meta.BK), tl.arange(0, meta.BV), tl.arange(0, meta.BC)
    rows = tl.program_id(2) * meta.BR + tl.arange(0, meta.BR)
    state = states + at * meta.PARTS * meta.SIZE
    if meta.RETURNS:
        initial += n * meta.SIZE
    q_c, k_c, do_c = given.q + at * C * K, given.k + at * C * K, do + at * C * V
    z_c, f_c, e_c = learned.z + at * C * HIDDEN, learned.f + at * C * HIDDEN, learned.e + at * C * V
    y_c, du_c = y + at * C * HIDDEN, du + at * C * HIDDEN
    P_c = load_tile(given.P + at * C * C, rows, C, cols, C)
    beta_c, c_c = column(given.beta, at * C, rows, C, 1.0), column(given.c, at * C, rows, C, 0.0)
    scores, G, SECOND = scores + at * C * C, G + at * C * C, tl.cast(chunks, tl.int64) * N * C * C
    scores_1 = dot(load_tile(q_c, rows, C, i_k, K), tl.trans(load_tile(k_c, cols, C, i_k, K)), meta.DTYPE)
    store_tile(scores, scores_1, rows, C, cols, C)
    G_2 = dot(load_tile(do_c, rows, C, i_v, V), tl.trans(load_tile(e_c, cols, C, i_v, V)), meta.DTYPE)
    store_tile(G + SECOND, G_2, rows, C, cols, C)
    scores_1, G_2 = P_c * scores_1, P_c * G_2
    scores_2, G_1 = tl.zeros([meta.BR, meta.BC], tl.float32), tl.zeros([meta.BR, meta.BC], tl.float32)
    dq_c = tl.zeros([meta.BR, meta.BK], tl.float32)
    dbeta_c, dc_c = tl.zeros([meta.BR], tl.float32), tl.zeros([meta.BR], tl.float32)
    for tile in tl.range(0, HIDDEN, meta.BH, disable_licm=True):
        j = tile + tl.arange(0, meta.BH)
        at_1, in_1, at_2, in_2 = places(i_k, j, i_v, meta)
        x, slope, _ = activate(load_tile(z_c, cols, C, j, HIDDEN), meta.ACTIVATION)
        d = slope * load_tile(f_c, cols, C, j, HIDDEN)
        q_t = load_tile(q_c, rows, C, i_k, K)  # loaded a second time, to save registers
        u = read(q_t, state, initial, at_1, in_1, beta_c, c_c, meta)
        y_t, slope, _ = activate(u - dot(scores_1, d, meta.DTYPE, meta.BC // 16), meta.ACTIVATION)
        scores_2 += dot(y_t, tl.trans(x), meta.DTYPE)
        store_tile(y_c, y_t, rows, C, j, HIDDEN)
        do_t = load_tile(do_c, rows, C, i_v, V)
        dy, dbeta_t, dc_t = _back_through(y_t, do_t, state, initial, at_2, in_2, beta_c, c_c, meta)
        dbeta_c, dc_c = dbeta_c + dbeta_t, dc_c + dc_t
        du_t = slope * (dy - dot(G_2, x, meta.DTYPE, meta.BC // 16))
        G_1 += dot(du_t, tl.trans(d), meta.DTYPE)
        store_tile(du_c, du_t, rows, C, j, HIDDEN)
        q_t = load_tile(q_c, rows, C, i_k, K)
        dq_t, dbeta_t, dc_t = _back_through(q_t, du_t, state, initial, at_1, in_1, beta_c, c_c, meta)
        dq_c, dbeta_c, dc_c = dq_c + dq_t, dbeta_c + dbeta_t, dc_c + dc_t
    store_tile(scores + SECOND, scores_2, rows, C, cols, C)
    store_tile(G, G_1, rows, C, cols, C)
    P_c = load_tile(given.P + at * C * C, rows, C, cols, C)  # loaded a second time, to save registers
    dq_c -= dot(P_c * G_1, load_tile(k_c, cols, C, i_k, K), meta.DTYPE)
    if meta.RESIDUAL:
        dq_c += load_tile(do_c, rows, C, i_v, V)
    store_tile(grads.q + at * C * K, dq_c, rows, C, i_k, K)
    if meta.DECAY:
        tl.store(grads.beta + at * C + rows, dbeta_c, mask=rows < C)
    if meta.MOMENTUM:
        tl.store(grads.c + at * C + rows, dc_c, mask=rows < C)


@triton.jit
def _put_back(x, g, before, after, at, inside, beta, c, beta_n, c_n, H, meta: tl.constexpr):
    """Store a tile of the gradient of the state before, from that of the state after and g, that of `read(x)`."""
    dW = load(after + at, inside)
    tl.store(before + at, beta_n * dW + dot(tl.trans(x), beta * g, meta.DTYPE), mask=inside)
    if meta.MOMENTUM:
        dS = c_n * dW + H * load(after + meta.SIZE + at, inside) + dot(tl.trans(x), c * g, meta.DTYPE)
        tl.store(before + meta.SIZE + at, dS, mask=inside)


@triton.jit
def _back_through_write(k, d, x, e, dd, dx, de, after, at_1, in_1, at_2, in_2, w, DTYPE: tl.constexpr):
    """Add one tile of the gradients of both `write`s, of D, X and E, from that of what they leave; and that of w."""
    G = load(after + at_2, in_2)
    back, out = dot(e, tl.trans(G), DTYPE), dot(k, load(after + at_1, in_1), DTYPE)
    dw = -tl.sum(x * back + out * d, axis=1)
    return dd - w * out, dx - w * back, de - dot(w * x, G, DTYPE), dw


@triton.jit
def _add_anchor(before, after, dA, at, inside, is_closed, meta: tl.constexpr):
    """Add the anchor's gradient to that of the weights if they became the anchor, else to that of the old anchor."""
    G, OFFSET = load(before + at, inside), (meta.PARTS - 1) * meta.SIZE
    if meta.ANCHOR:
        dA += load(after + OFFSET + at, inside)
        tl.store(before + OFFSET + at, tl.where(is_closed, 0.0, dA), mask=inside)
        dA = tl.where(is_closed, dA, 0.0)
    tl.debug_barrier()  # all threads have read before one writes
    tl.store(before + at, G + dA, mask=inside)


@triton.jit
def write_backward_kernel(
    given,  # Rows
    closed,  # [NC, N] int32 or None
    states,  # [NC + 1, N, PARTS, SIZE]
    learned,  # Learned
    y,  # [NC, N, C, HIDDEN]
    du,  # [NC, N, C, HIDDEN]
    do,  # [NC, N, C, V]
    d_states,  # [NC + 1, N, PARTS, SIZE]: the last is given
    dd,  # [NC, N, C, HIDDEN], as dx and de with what reading gives
    dx,  # [NC, N, C, HIDDEN]
    de,  # [NC, N, C, V]
    dz,  # [NC, N, C, HIDDEN]
    dw,  # [NC, N, C]
    dm,  # [NC, N, C, 1] or None
    chunks,
    N,
    C,
    meta: tl.constexpr,
):
    """Program n loops over the chunks of head n backwards."""
    K: tl.constexpr = meta.K
    V: tl.constexpr = meta.V
    HIDDEN: tl.constexpr = meta.HIDDEN
    n = tl.cast(tl.program_id(0), tl.int64)
    DTYPE: tl.constexpr = meta.DTYPE
    STATE = meta.PARTS * meta.SIZE
    i_k, i_v, rows = tl.arange(0, meta.BK), tl.arange(0, meta.BV), tl.arange(0, meta.BC)
    for reverse in tl.range(chunks, disable_licm=True):
        at = (chunks - 1 - tl.cast(reverse, tl.int64)) * N + n
        before, after = d_states + at * STATE, d_states + (at + N) * STATE
        anchor, is_closed = anchor_of(states + at * STATE, closed, at, meta)
        q_c, k_c, do_c = given.q + at * C * K, given.k + at * C * K, do + at * C * V
        z_c, f_c, e_c = learned.z + at * C * HIDDEN, learned.f + at * C * HIDDEN, learned.e + at * C * V
        y_c, du_c = y + at * C * HIDDEN, du + at * C * HIDDEN
        dd_c, dx_c, de_c = dd + at * C * HIDDEN, dx + at * C * HIDDEN, de + at * C * V
        w_c, m_c, beta_n, c_n, H_n = of_write(given, at, rows, C, meta)
        beta_c, c_c = column(given.beta, at * C, rows, C, 1.0), column(given.c, at * C, rows, C, 0.0)
        de_s = load_tile(de_c, rows, C, i_v, V)
        dw_s, dm_s = tl.zeros([meta.BC], tl.float32), tl.zeros([meta.BC], tl.float32)
        for tile in tl.range(0, HIDDEN, meta.BH, disable_licm=True):
            j = tile + tl.arange(0, meta.BH)
            at_1, in_1, at_2, in_2 = places(i_k, j, i_v, meta)
            x, g = load_tile(q_c, rows, C, i_k, K), load_tile(du_c, rows, C, j, HIDDEN)
            _put_back(x, g, before, after, at_1, in_1, beta_c, c_c, beta_n, c_n, H_n, meta)
            x, g = load_tile(y_c, rows, C, j, HIDDEN), load_tile(do_c, rows, C, i_v, V)
            _put_back(x, g, before, after, at_2, in_2, beta_c, c_c, beta_n, c_n, H_n, meta)
        for tile in tl.range(0, HIDDEN, meta.BH, disable_licm=True):
            j = tile + tl.arange(0, meta.BH)
            at_1, in_1, at_2, in_2 = places(i_k, j, i_v, meta)
            x, slope, _ = activate(load_tile(z_c, rows, C, j, HIDDEN), meta.ACTIVATION)
            d = slope * load_tile(f_c, rows, C, j, HIDDEN)
            dd_t, dx_t = load_tile(dd_c, rows, C, j, HIDDEN), load_tile(dx_c, rows, C, j, HIDDEN)
            k_t, e_t = load_tile(k_c, rows, C, i_k, K), load_tile(e_c, rows, C, i_v, V)
            dd_t, dx_t, de_s, dw_t = _back_through_write(
                k_t, d, x, e_t, dd_t, dx_t, de_s, after, at_1, in_1, at_2, in_2, w_c, DTYPE
            )
            dw_s += dw_t
            if meta.MOMENTUM:
                tl.debug_barrier()  # frees the registers of earlier loads
                k_t, e_t = load_tile(k_c, rows, C, i_k, K), load_tile(e_c, rows, C, i_v, V)
                dd_t, dx_t, de_s, dm_t = _back_through_write(
                    k_t, d, x, e_t, dd_t, dx_t, de_s, after + meta.SIZE, at_1, in_1, at_2, in_2, m_c, DTYPE
                )
                dm_s += dm_t
            de_s += dot(slope * dd_t, load(anchor + at_2, in_2), DTYPE)
            tl.debug_barrier()  # all threads have read before one writes
            store_tile(dd_c, dd_t, rows, C, j, HIDDEN)
            store_tile(dx_c, dx_t, rows, C, j, HIDDEN)
        tl.store(dw + at * C + rows, dw_s, mask=rows < C)
        if meta.MOMENTUM:
            tl.store(dm + at * C + rows, dm_s, mask=rows < C)
        tl.debug_barrier()
        store_tile(de_c, de_s, rows, C, i_v, V)
        tl.debug_barrier()
        for tile in tl.range(0, HIDDEN, meta.BH, disable_licm=True):
            j = tile + tl.arange(0, meta.BH)
            at_1, in_1, at_2, in_2 = places(i_k, j, i_v, meta)
            x, slope, bend = activate(load_tile(z_c, rows, C, j, HIDDEN), meta.ACTIVATION)
            de_t, dd_t = load_tile(de_c, rows, C, i_v, V), load_tile(dd_c, rows, C, j, HIDDEN)
            dx_t = load_tile(dx_c, rows, C, j, HIDDEN) + dot(de_t, tl.trans(load(anchor + at_2, in_2)), DTYPE)
            dA_2 = dot(tl.trans(x), de_t, DTYPE) + dot(tl.trans(slope * dd_t), load_tile(e_c, rows, C, i_v, V), DTYPE)
            _add_anchor(before, after, dA_2, at_2, in_2, is_closed, meta)
            dz_t = slope * dx_t + bend * load_tile(f_c, rows, C, j, HIDDEN) * dd_t
            store_tile(dz + at * C * HIDDEN, dz_t, rows, C, j, HIDDEN)
            dA_1 = dot(tl.trans(load_tile(k_c, rows, C, i_k, K)), dz_t, DTYPE)
            _add_anchor(before, after, dA_1, at_1, in_1, is_closed, meta)
        tl.debug_barrier()
