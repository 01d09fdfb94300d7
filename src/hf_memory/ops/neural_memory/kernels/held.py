"""Memories that fit into registers: weights, momentum and their gradients stay there while a program loops over chunks.

Tiles of a layer are hidden channels by all others, [BH, BK] and [BH, BV], so that a warp has the same hidden channels
in most products. Rows of hidden channels are turned as well, [BH, C]. The anchor is always the weights before a chunk.
For letters see launch.py.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from hf_memory.ops.neural_memory.kernels.parts import (
    activate,
    add_dot,
    dot,
    load,
    load_layer,
    load_tile,
    of_read,
    of_write,
    store_layer,
    store_tile,
)


@triton.jit
def _load_turned(x, i, R, j, D):
    """x[i, j] of a matrix [R, D] as a tile [j, i], zero outside."""
    return load(x + i[None, :] * D + j[:, None], (i[None, :] < R) & (j[:, None] < D))


@triton.jit
def _store_turned(x, value, i, R, j, D):
    """The inverse of `_load_turned`."""
    tl.store(x + i[None, :] * D + j[:, None], value, mask=(i[None, :] < R) & (j[:, None] < D))


@triton.jit
def _load_layers(x, i_k, j, i_v, meta: tl.constexpr):
    """Both layers of weights, momentum or their gradients [SIZE]."""
    first = _load_turned(x, i_k, meta.K, j, meta.HIDDEN)
    return first, load_tile(x + meta.K * meta.HIDDEN, j, meta.HIDDEN, i_v, meta.V)


@triton.jit
def _store_layers(x, first, second, i_k, j, i_v, meta: tl.constexpr):
    """The inverse of `_load_layers`."""
    _store_turned(x, first, i_k, meta.K, j, meta.HIDDEN)
    store_tile(x + meta.K * meta.HIDDEN, second, j, meta.HIDDEN, i_v, meta.V)


@triton.jit
def _load_state(x, i_k, j, i_v, meta: tl.constexpr):
    """Both layers of the weights, and of the momentum."""
    W_1, W_2 = _load_layers(x, i_k, j, i_v, meta)
    S_1 = 0.0
    S_2 = 0.0
    if meta.MOMENTUM:
        S_1, S_2 = _load_layers(x + meta.SIZE, i_k, j, i_v, meta)
    return W_1, W_2, S_1, S_2


@triton.jit
def _store_state(x, state, i_k, j, i_v, meta: tl.constexpr):
    """The inverse of `_load_state`."""
    W_1, W_2, S_1, S_2 = state
    _store_layers(x, W_1, W_2, i_k, j, i_v, meta)
    if meta.MOMENTUM:
        _store_layers(x + meta.SIZE, S_1, S_2, i_k, j, i_v, meta)


@triton.jit
def _write(W, S, I, x, y, coefficients, meta: tl.constexpr):
    """A layer's weights and momentum after the chunk, whose inner gradient is the product of x [BH, C] and y [C, ...].

    The coefficients are w and m [1, C] of the tokens, and beta, c and H of the whole chunk; see launch.py.
    """
    w, m, beta, c, H = coefficients
    W *= beta
    if meta.RETURNS:
        W += (1 - beta) * I
    if meta.MOMENTUM:
        W += c * S
        S = add_dot(H * S, -m * x, y, meta.DTYPE)
    return add_dot(W, -w * x, y, meta.DTYPE), S


@triton.jit
def held_kernel(
    chunks,  # Chunks
    start,  # [N, PARTS, SIZE]
    end,  # [N, PARTS, SIZE], or None
    o,  # [NC, N, C, V], or None
    sizes,  # Sizes
    meta: tl.constexpr,
):
    """Program n writes all chunks of head n, one after the other, and reads them if there is an output o.

    If the backward pass needs them, it stores the states before each chunk, and the rows that were computed from it.
    """
    K: tl.constexpr = meta.K
    V: tl.constexpr = meta.V
    HIDDEN: tl.constexpr = meta.HIDDEN
    DTYPE: tl.constexpr = meta.DTYPE
    given = chunks.rows
    learned = chunks.learned
    N = sizes.N
    C = sizes.C
    n = tl.cast(tl.program_id(0), tl.int64)
    STATE = meta.PARTS * meta.SIZE
    i_k = tl.arange(0, meta.BK)
    i_v = tl.arange(0, meta.BV)
    rows = tl.arange(0, meta.BC)
    j = tl.arange(0, meta.BH)
    W_1, W_2, S_1, S_2 = _load_state(start + n * STATE, i_k, j, i_v, meta)
    for i in tl.range(sizes.NC, disable_licm=True):
        at = tl.cast(i, tl.int64) * N + n
        I_1 = 0.0
        I_2 = 0.0
        if meta.RETURNS:
            I_1, I_2 = _load_layers(chunks.initial + n * meta.SIZE, i_k, j, i_v, meta)
        if chunks.states is not None:
            _store_state(
                chunks.states + at * STATE, (W_1 - I_1, W_2 - I_2, S_1, S_2), i_k, j, i_v, meta
            )
        k_c = load_tile(given.k + at * C * K, rows, C, i_k, K)
        w_c, m_c, beta_n, c_n, H_n = of_write(given, at, rows, C, meta)
        w_r = tl.trans(w_c)
        m_r = 0.0
        if meta.MOMENTUM:
            m_r = tl.trans(m_c)
        z = dot(W_1, tl.trans(k_c), DTYPE)
        x, slope, _ = activate(z, meta.ACTIVATION)
        e = dot(tl.trans(x), W_2, DTYPE) - load_tile(given.v + at * C * V, rows, C, i_v, V)
        if meta.RESIDUAL:
            e += k_c
        f = dot(W_2, tl.trans(e), DTYPE)
        d = slope * f
        if chunks.learned is not None:
            _store_turned(learned.z + at * C * HIDDEN, z, rows, C, j, HIDDEN)
            _store_turned(learned.f + at * C * HIDDEN, f, rows, C, j, HIDDEN)
            store_tile(learned.e + at * C * V, e, rows, C, i_v, V)
        if o is not None:
            q_c = load_tile(given.q + at * C * K, rows, C, i_k, K)
            beta_c, c_c = of_read(given, at, rows, C)
            P_c = load_tile(given.P + at * C * C, rows, C, rows, C)
            u = dot(W_1, tl.trans(beta_c * q_c), DTYPE)
            if meta.RETURNS:
                u = add_dot(u, I_1, tl.trans((1 - beta_c) * q_c), DTYPE)
            if meta.MOMENTUM:
                u = add_dot(u, S_1, tl.trans(c_c * q_c), DTYPE)
            u = add_dot(u, -d, tl.trans(P_c * dot(q_c, tl.trans(k_c), DTYPE)), DTYPE)
            y, _, _ = activate(u, meta.ACTIVATION)
            y = tl.trans(y)
            output = beta_c * dot(y, W_2, DTYPE) - dot(P_c * dot(y, x, DTYPE), e, DTYPE)
            if meta.RETURNS:
                output += (1 - beta_c) * dot(y, I_2, DTYPE)
            if meta.MOMENTUM:
                output += c_c * dot(y, S_2, DTYPE)
            if meta.RESIDUAL:
                output += q_c
            store_tile(o + at * C * V, output, rows, C, i_v, V)
        coefficients = (w_r, m_r, beta_n, c_n, H_n)
        W_1, S_1 = _write(W_1, S_1, I_1, d, k_c, coefficients, meta)
        W_2, S_2 = _write(W_2, S_2, I_2, x, e, coefficients, meta)
    if end is not None:
        _store_state(end + n * STATE, (W_1, W_2, S_1, S_2), i_k, j, i_v, meta)


@triton.jit
def _write_backward(negated, G_1, G_2, written, w, DTYPE: tl.constexpr):
    """The backward of the write W_1 -= sum_i w_i d_i k_i^T, W_2 -= sum_i w_i x_i e_i^T, or of that to the momentum.

    G_1 and G_2 are the gradients of W_1 and W_2 after it, and `negated` the negated gradients of d, x, k and e so far.
    Returns these with those of the write added, and the negated gradient of w [C].
    """
    negated_d, negated_x, negated_k, negated_e = negated
    d, x, k, e = written
    d_G_1 = dot(tl.trans(d), G_1, DTYPE)
    x_G_2 = dot(tl.trans(x), G_2, DTYPE)
    negated_d = add_dot(negated_d, G_1, tl.trans(w * k), DTYPE)
    negated_x = add_dot(negated_x, G_2, tl.trans(w * e), DTYPE)
    negated_k += w * d_G_1
    negated_e += w * x_G_2
    negated_w = tl.sum(k * d_G_1, axis=1) + tl.sum(e * x_G_2, axis=1)
    return (negated_d, negated_x, negated_k, negated_e), negated_w


@triton.jit
def _coefficients_backward(dW, dS, D, state, tile, meta: tl.constexpr):
    """A layer's part of the gradients of the chunk's last beta and c, and of H, from those of W and S after it."""
    dbeta = tl.sum(dW * D)
    dc = 0.0
    dH = 0.0
    if meta.MOMENTUM:
        S = load_layer(state + meta.SIZE, tile)
        dc = tl.sum(dW * S)
        dH = tl.sum(dS * S)
    return dbeta, dc, dH


@triton.jit
def _state_backward(after, x, g, d_initial, tile, coefficients, meta: tl.constexpr):
    """Gradients of a layer's weights and momentum before the chunk, from those after it and from reads in the chunk.

    The reads multiply rows x [BH, C] by the layer, and g [C, ...] are the gradients of the products.
    """
    dW, dS = after
    beta, c, beta_n, c_n, H = coefficients
    if meta.RETURNS:
        rest = load_layer(d_initial, tile) + (1 - beta_n) * dW
        store_layer(d_initial, add_dot(rest, x, (1 - beta) * g, meta.DTYPE), tile)
    if meta.MOMENTUM:
        dS = add_dot(c_n * dW + H * dS, x, c * g, meta.DTYPE)
    return add_dot(beta_n * dW, x, beta * g, meta.DTYPE), dS


class StateGradients(NamedTuple):
    """Gradients of the states after and before all chunks, and of initial weights."""

    end: Any  # [N, PARTS, SIZE]
    start: Any  # [N, PARTS, SIZE]
    initial: Any  # [N, SIZE] or None; added to


@triton.jit
def held_backward_kernel(
    chunks,  # Chunks
    reads,  # Reads
    do,  # [NC, N, C, V]
    grads,  # Rows, of which those of k, v, P, m and H are computed here, and the last of beta and c
    d_states,  # StateGradients
    sizes,  # Sizes
    meta: tl.constexpr,
):
    """Program n loops over the chunks of head n backwards, and holds the gradients of weights and momentum."""
    K: tl.constexpr = meta.K
    V: tl.constexpr = meta.V
    HIDDEN: tl.constexpr = meta.HIDDEN
    DTYPE: tl.constexpr = meta.DTYPE
    given = chunks.rows
    learned = chunks.learned
    initial = chunks.initial
    N = sizes.N
    C = sizes.C
    scores = reads.scores
    G = reads.G
    d_initial = d_states.initial
    n = tl.cast(tl.program_id(0), tl.int64)
    STATE = meta.PARTS * meta.SIZE
    SECOND = tl.cast(sizes.NC, tl.int64) * N * C * C
    i_k = tl.arange(0, meta.BK)
    i_v = tl.arange(0, meta.BV)
    rows = tl.arange(0, meta.BC)
    j = tl.arange(0, meta.BH)
    in_1 = (i_k[None, :] < K) & (j[:, None] < HIDDEN)
    in_2 = (j[:, None] < HIDDEN) & (i_v[None, :] < V)
    first = (i_k[None, :] * HIDDEN + j[:, None], in_1)
    second = (K * HIDDEN + j[:, None] * V + i_v[None, :], in_2)
    if meta.RETURNS:
        initial = initial + n * meta.SIZE
        d_initial = d_initial + n * meta.SIZE
    dW_1, dW_2, dS_1, dS_2 = _load_state(d_states.end + n * STATE, i_k, j, i_v, meta)
    for reverse in tl.range(sizes.NC, disable_licm=True):
        at = (sizes.NC - 1 - tl.cast(reverse, tl.int64)) * N + n
        state = chunks.states + at * STATE
        row_h = at * C * HIDDEN
        w_c, m_c, beta_n, c_n, H_n = of_write(given, at, rows, C, meta)
        k_c = load_tile(given.k + at * C * K, rows, C, i_k, K)
        e_c = load_tile(learned.e + at * C * V, rows, C, i_v, V)
        x, slope, bend = activate(
            _load_turned(learned.z + row_h, rows, C, j, HIDDEN), meta.ACTIVATION
        )
        f = _load_turned(learned.f + row_h, rows, C, j, HIDDEN)
        d = slope * f
        bend = bend * f
        # negated gradients of d, x, k and e, which writes and reads subtract: first those of the writes
        zeros = tl.zeros_like(d), tl.zeros_like(x), tl.zeros_like(k_c), tl.zeros_like(e_c)
        written = (d, x, k_c, e_c)
        negated, negated_dw = _write_backward(zeros, dW_1, dW_2, written, w_c, DTYPE)
        if meta.MOMENTUM:
            negated, negated_dm = _write_backward(negated, dS_1, dS_2, written, m_c, DTYPE)
            tl.store(grads.m + at * C + rows, -negated_dm, mask=rows < C)
        negated_d, negated_x, negated_k, negated_e = negated
        at_P = at * C * C
        P_c = load_tile(given.P + at_P, rows, C, rows, C)
        q_c = load_tile(given.q + at * C * K, rows, C, i_k, K)
        do_c = load_tile(do + at * C * V, rows, C, i_v, V)
        y_r = _load_turned(reads.y + row_h, rows, C, j, HIDDEN)
        du_r = _load_turned(reads.du + row_h, rows, C, j, HIDDEN)
        scores_1 = load_tile(scores + at_P, rows, C, rows, C)
        scores_2 = load_tile(scores + SECOND + at_P, rows, C, rows, C)
        G_1 = load_tile(G + at_P, rows, C, rows, C)
        G_2 = load_tile(G + SECOND + at_P, rows, C, rows, C)
        # w is the last row of P
        negated_dP = scores_1 * G_1 + scores_2 * G_2
        negated_dP += tl.where(rows[:, None] == C - 1, negated_dw[None, :], 0.0)
        store_tile(grads.P + at_P, -negated_dP, rows, C, rows, C)
        dd = -add_dot(negated_d, du_r, P_c * scores_1, DTYPE)
        negated_x = add_dot(negated_x, y_r, P_c * G_2, DTYPE)
        negated_e = add_dot(negated_e, tl.trans(P_c * scores_2), do_c, DTYPE)
        negated_k = add_dot(negated_k, tl.trans(P_c * G_1), q_c, DTYPE)
        # through the gradients at the anchor, and to the state before the chunk
        beta_c, c_c = of_read(given, at, rows, C)
        coefficients = (beta_c, c_c, beta_n, c_n, H_n)
        ds = slope * dd
        D = load_layer(state, second)
        dbeta, dc, dH = _coefficients_backward(dW_2, dS_2, D, state, second, meta)
        W = D
        if meta.RETURNS:
            W += load_layer(initial, second)
        de = dot(tl.trans(ds), W, DTYPE) - negated_e
        dz = slope * add_dot(-negated_x, W, tl.trans(de), DTYPE) + bend * dd
        dW_2, dS_2 = _state_backward((dW_2, dS_2), y_r, do_c, d_initial, second, coefficients, meta)
        dW_2 = add_dot(add_dot(dW_2, x, de, DTYPE), ds, e_c, DTYPE)
        tl.debug_barrier()  # frees the registers of the second layer
        D = load_layer(state, first)
        dbeta_1, dc_1, dH_1 = _coefficients_backward(dW_1, dS_1, D, state, first, meta)
        W = D
        if meta.RETURNS:
            W += load_layer(initial, first)
        dk = dot(tl.trans(dz), W, DTYPE) - negated_k
        dW_1, dS_1 = _state_backward((dW_1, dS_1), du_r, q_c, d_initial, first, coefficients, meta)
        dW_1 = add_dot(dW_1, dz, k_c, DTYPE)
        if meta.RESIDUAL:
            dk += de
        store_tile(grads.k + at * C * K, dk, rows, C, i_k, K)
        store_tile(grads.v + at * C * V, -de, rows, C, i_v, V)
        if meta.DECAY:
            last = grads.beta + at * C + C - 1
            tl.store(last, tl.load(last) + dbeta + dbeta_1)
        if meta.MOMENTUM:
            last = grads.c + at * C + C - 1
            tl.store(last, tl.load(last) + dc + dc_1)
            tl.store(grads.H + at, dH + dH_1)
        tl.debug_barrier()  # all have read the gradient of the initial weights before one adds to it again
    _store_state(d_states.start + n * STATE, (dW_1, dW_2, dS_1, dS_2), i_k, j, i_v, meta)
