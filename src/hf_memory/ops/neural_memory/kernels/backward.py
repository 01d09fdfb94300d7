"""Backward: reads of all chunks in parallel, then writes from last to first chunk; for letters see launch.py."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from hf_memory.ops.neural_memory.kernels.forward import decaying, read
from hf_memory.ops.neural_memory.kernels.parts import (
    activate,
    anchor_of,
    dot,
    load_layer,
    load_tile,
    of_read,
    of_write,
    places,
    store_layer,
    store_tile,
)


@triton.jit
def _back_through(x, g, state, initial, tile, coefficients, meta: tl.constexpr):
    """Gradients of x, beta and c from g, the gradient of one tile of `read(x)`."""
    beta, c = coefficients
    back = dot(g, tl.trans(decaying(state, initial, tile)), meta.DTYPE)
    dx = beta * back
    dbeta = tl.sum(x * back, axis=1)
    dx += dot(g, tl.trans(load_layer(initial, tile)), meta.DTYPE)
    back = dot(g, tl.trans(load_layer(state + meta.SIZE, tile)), meta.DTYPE)
    dx += c * back
    return dx, dbeta, tl.sum(x * back, axis=1)


@triton.jit
def read_backward_kernel(
    chunks,  # Chunks
    do,  # [NC, N, C, V]
    reads,  # Reads
    grads,  # Rows, of which those of q, beta and c are computed here
    sizes,  # Sizes
    meta: tl.constexpr,
):
    """Program (n, i, r): the part of the backward of reads that needs only the r-th rows of chunk i of head n."""
    K: tl.constexpr = meta.K
    V: tl.constexpr = meta.V
    HIDDEN: tl.constexpr = meta.HIDDEN
    given = chunks.rows
    learned = chunks.learned
    N = sizes.N
    C = sizes.C
    n = tl.cast(tl.program_id(0), tl.int64)
    initial = chunks.initial + n * meta.SIZE
    at = tl.cast(tl.program_id(1), tl.int64) * N + n
    i_k = tl.arange(0, meta.BK)
    i_v = tl.arange(0, meta.BV)
    cols = tl.arange(0, meta.BC)
    rows = tl.program_id(2) * meta.BR + tl.arange(0, meta.BR)
    state = chunks.states + at * meta.PARTS * meta.SIZE
    q_c = given.q + at * C * K
    k_c = given.k + at * C * K
    do_c = do + at * C * V
    z_c = learned.z + at * C * HIDDEN
    f_c = learned.f + at * C * HIDDEN
    e_c = learned.e + at * C * V
    y_c = reads.y + at * C * HIDDEN
    du_c = reads.du + at * C * HIDDEN
    P_c = load_tile(given.P + at * C * C, rows, C, cols, C)
    coefficients = of_read(given, at, rows, C)
    scores = reads.scores + at * C * C
    G = reads.G + at * C * C
    SECOND = tl.cast(sizes.NC, tl.int64) * N * C * C
    scores_1 = dot(
        load_tile(q_c, rows, C, i_k, K), tl.trans(load_tile(k_c, cols, C, i_k, K)), meta.DTYPE
    )
    store_tile(scores, scores_1, rows, C, cols, C)
    G_2 = dot(
        load_tile(do_c, rows, C, i_v, V), tl.trans(load_tile(e_c, cols, C, i_v, V)), meta.DTYPE
    )
    store_tile(G + SECOND, G_2, rows, C, cols, C)
    scores_1 = P_c * scores_1
    G_2 = P_c * G_2
    scores_2 = tl.zeros([meta.BR, meta.BC], tl.float32)
    G_1 = tl.zeros([meta.BR, meta.BC], tl.float32)
    dq_c = tl.zeros([meta.BR, meta.BK], tl.float32)
    dbeta_c = tl.zeros([meta.BR], tl.float32)
    dc_c = tl.zeros([meta.BR], tl.float32)
    for tile in tl.range(0, HIDDEN, meta.BH, disable_licm=True):
        j = tile + tl.arange(0, meta.BH)
        first, second = places(i_k, j, i_v, meta)
        x, slope, _ = activate(load_tile(z_c, cols, C, j, HIDDEN), meta.ACTIVATION)
        d = slope * load_tile(f_c, cols, C, j, HIDDEN)
        q_t = load_tile(q_c, rows, C, i_k, K)  # loaded a second time, to save registers
        u = read(q_t, state, initial, first, coefficients, meta)
        y_t, slope, _ = activate(u - dot(scores_1, d, meta.DTYPE, meta.BC // 16), meta.ACTIVATION)
        scores_2 += dot(y_t, tl.trans(x), meta.DTYPE)
        store_tile(y_c, y_t, rows, C, j, HIDDEN)
        do_t = load_tile(do_c, rows, C, i_v, V)
        dy, dbeta_t, dc_t = _back_through(y_t, do_t, state, initial, second, coefficients, meta)
        dbeta_c = dbeta_c + dbeta_t
        dc_c = dc_c + dc_t
        du_t = slope * (dy - dot(G_2, x, meta.DTYPE, meta.BC // 16))
        G_1 += dot(du_t, tl.trans(d), meta.DTYPE)
        store_tile(du_c, du_t, rows, C, j, HIDDEN)
        q_t = load_tile(q_c, rows, C, i_k, K)
        dq_t, dbeta_t, dc_t = _back_through(q_t, du_t, state, initial, first, coefficients, meta)
        dq_c = dq_c + dq_t
        dbeta_c = dbeta_c + dbeta_t
        dc_c = dc_c + dc_t
    store_tile(scores + SECOND, scores_2, rows, C, cols, C)
    store_tile(G, G_1, rows, C, cols, C)
    # loaded a second time, to save registers
    P_c = load_tile(given.P + at * C * C, rows, C, cols, C)
    dq_c -= dot(P_c * G_1, load_tile(k_c, cols, C, i_k, K), meta.DTYPE)
    if meta.RESIDUAL:
        dq_c += load_tile(do_c, rows, C, i_v, V)
    store_tile(grads.q + at * C * K, dq_c, rows, C, i_k, K)
    tl.store(grads.beta + at * C + rows, dbeta_c, mask=rows < C)
    tl.store(grads.c + at * C + rows, dc_c, mask=rows < C)


@triton.jit
def _put_back(x, g, before, after, tile, coefficients, meta: tl.constexpr):
    """Store a tile of the gradient of the state before, from that of the state after and g, that of `read(x)`."""
    beta, c, beta_n, c_n, H = coefficients
    dW = load_layer(after, tile)
    store_layer(before, beta_n * dW + dot(tl.trans(x), beta * g, meta.DTYPE), tile)
    dS = c_n * dW + H * load_layer(after + meta.SIZE, tile)
    dS += dot(tl.trans(x), c * g, meta.DTYPE)
    store_layer(before + meta.SIZE, dS, tile)


@triton.jit
def _back_through_write(written, grads, after, tiles, w, DTYPE: tl.constexpr):
    """Add one tile of the gradients of both `write`s, of D, X and E, from that of what they leave; and that of w."""
    k, d, x, e = written
    dd, dx, de = grads
    first, second = tiles
    G = load_layer(after, second)
    back = dot(e, tl.trans(G), DTYPE)
    out = dot(k, load_layer(after, first), DTYPE)
    dw = -tl.sum(x * back + out * d, axis=1)
    return dd - w * out, dx - w * back, de - dot(w * x, G, DTYPE), dw


@triton.jit
def _add_anchor(before, after, dA, tile, is_closed, meta: tl.constexpr):
    """Add the anchor's gradient to that of the weights if they became the anchor, else to that of the old anchor."""
    G = load_layer(before, tile)
    OFFSET = (meta.PARTS - 1) * meta.SIZE
    if meta.ANCHOR:
        dA += load_layer(after + OFFSET, tile)
        store_layer(before + OFFSET, tl.where(is_closed, 0.0, dA), tile)
        dA = tl.where(is_closed, dA, 0.0)
    tl.debug_barrier()  # all threads have read before one writes
    store_layer(before, G + dA, tile)


class Inner(NamedTuple):
    """Gradients of what writes compute; of d, x and e with what reading gives when the loop begins."""

    d: Any  # [NC, N, C, HIDDEN]
    x: Any  # [NC, N, C, HIDDEN]
    e: Any  # [NC, N, C, V]
    z: Any  # [NC, N, C, HIDDEN]
    w: Any  # [NC, N, C]
    m: Any  # [NC, N, C, 1]


@triton.jit
def write_backward_kernel(
    chunks,  # Chunks
    reads,  # Reads y and du
    do,  # [NC, N, C, V]
    d_states,  # [NC + 1, N, PARTS, SIZE]: the last is given
    grads,  # Inner
    sizes,  # Sizes
    meta: tl.constexpr,
):
    """Program n loops over the chunks of head n backwards."""
    K: tl.constexpr = meta.K
    V: tl.constexpr = meta.V
    HIDDEN: tl.constexpr = meta.HIDDEN
    given = chunks.rows
    learned = chunks.learned
    N = sizes.N
    C = sizes.C
    n = tl.cast(tl.program_id(0), tl.int64)
    DTYPE: tl.constexpr = meta.DTYPE
    STATE = meta.PARTS * meta.SIZE
    i_k = tl.arange(0, meta.BK)
    i_v = tl.arange(0, meta.BV)
    rows = tl.arange(0, meta.BC)
    for reverse in tl.range(sizes.NC, disable_licm=True):
        at = (sizes.NC - 1 - tl.cast(reverse, tl.int64)) * N + n
        before = d_states + at * STATE
        after = d_states + (at + N) * STATE
        anchor, is_closed = anchor_of(chunks.states + at * STATE, chunks.closed, at, meta)
        q_c = given.q + at * C * K
        k_c = given.k + at * C * K
        do_c = do + at * C * V
        z_c = learned.z + at * C * HIDDEN
        f_c = learned.f + at * C * HIDDEN
        e_c = learned.e + at * C * V
        y_c = reads.y + at * C * HIDDEN
        du_c = reads.du + at * C * HIDDEN
        dd_c = grads.d + at * C * HIDDEN
        dx_c = grads.x + at * C * HIDDEN
        de_c = grads.e + at * C * V
        w_c, m_c, beta_n, c_n, H_n = of_write(given, at, rows, C)
        beta_c, c_c = of_read(given, at, rows, C)
        coefficients = (beta_c, c_c, beta_n, c_n, H_n)
        de_s = load_tile(de_c, rows, C, i_v, V)
        dw_s = tl.zeros([meta.BC], tl.float32)
        dm_s = tl.zeros([meta.BC], tl.float32)
        for tile in tl.range(0, HIDDEN, meta.BH, disable_licm=True):
            j = tile + tl.arange(0, meta.BH)
            first, second = places(i_k, j, i_v, meta)
            x = load_tile(q_c, rows, C, i_k, K)
            g = load_tile(du_c, rows, C, j, HIDDEN)
            _put_back(x, g, before, after, first, coefficients, meta)
            x = load_tile(y_c, rows, C, j, HIDDEN)
            g = load_tile(do_c, rows, C, i_v, V)
            _put_back(x, g, before, after, second, coefficients, meta)
        for tile in tl.range(0, HIDDEN, meta.BH, disable_licm=True):
            j = tile + tl.arange(0, meta.BH)
            first, second = places(i_k, j, i_v, meta)
            x, slope, _ = activate(load_tile(z_c, rows, C, j, HIDDEN), meta.ACTIVATION)
            d = slope * load_tile(f_c, rows, C, j, HIDDEN)
            dd_t = load_tile(dd_c, rows, C, j, HIDDEN)
            dx_t = load_tile(dx_c, rows, C, j, HIDDEN)
            k_t = load_tile(k_c, rows, C, i_k, K)
            e_t = load_tile(e_c, rows, C, i_v, V)
            dd_t, dx_t, de_s, dw_t = _back_through_write(
                (k_t, d, x, e_t), (dd_t, dx_t, de_s), after, (first, second), w_c, DTYPE
            )
            dw_s += dw_t
            tl.debug_barrier()  # frees the registers of earlier loads
            k_t = load_tile(k_c, rows, C, i_k, K)
            e_t = load_tile(e_c, rows, C, i_v, V)
            dd_t, dx_t, de_s, dm_t = _back_through_write(
                (k_t, d, x, e_t),
                (dd_t, dx_t, de_s),
                after + meta.SIZE,
                (first, second),
                m_c,
                DTYPE,
            )
            dm_s += dm_t
            de_s += dot(slope * dd_t, load_layer(anchor, second), DTYPE)
            tl.debug_barrier()  # all threads have read before one writes
            store_tile(dd_c, dd_t, rows, C, j, HIDDEN)
            store_tile(dx_c, dx_t, rows, C, j, HIDDEN)
        tl.store(grads.w + at * C + rows, dw_s, mask=rows < C)
        tl.store(grads.m + at * C + rows, dm_s, mask=rows < C)
        tl.debug_barrier()
        store_tile(de_c, de_s, rows, C, i_v, V)
        tl.debug_barrier()
        for tile in tl.range(0, HIDDEN, meta.BH, disable_licm=True):
            j = tile + tl.arange(0, meta.BH)
            first, second = places(i_k, j, i_v, meta)
            x, slope, bend = activate(load_tile(z_c, rows, C, j, HIDDEN), meta.ACTIVATION)
            de_t = load_tile(de_c, rows, C, i_v, V)
            dd_t = load_tile(dd_c, rows, C, j, HIDDEN)
            dx_t = load_tile(dx_c, rows, C, j, HIDDEN) + dot(
                de_t, tl.trans(load_layer(anchor, second)), DTYPE
            )
            dA_2 = dot(tl.trans(x), de_t, DTYPE) + dot(
                tl.trans(slope * dd_t), load_tile(e_c, rows, C, i_v, V), DTYPE
            )
            _add_anchor(before, after, dA_2, second, is_closed, meta)
            dz_t = slope * dx_t + bend * load_tile(f_c, rows, C, j, HIDDEN) * dd_t
            store_tile(grads.z + at * C * HIDDEN, dz_t, rows, C, j, HIDDEN)
            dA_1 = dot(tl.trans(load_tile(k_c, rows, C, i_k, K)), dz_t, DTYPE)
            _add_anchor(before, after, dA_1, first, is_closed, meta)
        tl.debug_barrier()
