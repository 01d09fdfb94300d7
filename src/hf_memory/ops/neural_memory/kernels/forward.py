"""Forward: writes of a head's chunks one after the other, then reads of all in parallel; for letters see launch.py."""

import triton
import triton.language as tl

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
def read(
    x, state, initial, at, inside, beta, c, SIZE, RETURNS: tl.constexpr, MOMENTUM: tl.constexpr, DTYPE: tl.constexpr
):
    """x times the weights before the chunk, decayed, and times the momentum."""
    W = load(state + at, inside)
    if RETURNS:
        I = load(initial + at, inside)
        y = beta * dot(x, W - I, DTYPE) + dot(x, I, DTYPE)
    else:
        y = beta * dot(x, W, DTYPE)
    if MOMENTUM:
        y += c * dot(x, load(state + SIZE + at, inside), DTYPE)
    return y


@triton.jit
def write(
    X, D, state, after, initial, at, inside, w, m, beta, c, H, SIZE,
    RETURNS: tl.constexpr, MOMENTUM: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Weights and momentum after the chunk."""
    W = beta * load(state + at, inside) - dot(tl.trans(X), w * D, DTYPE)
    if RETURNS:
        W += (1 - beta) * load(initial + at, inside)
    if MOMENTUM:
        S = load(state + SIZE + at, inside)
        W += c * S
        tl.store(after + SIZE + at, H * S - dot(tl.trans(X), m * D, DTYPE), mask=inside)
    tl.store(after + at, W, mask=inside)


@triton.jit
def write_kernel(
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
    DECAY: tl.constexpr,
    MOMENTUM: tl.constexpr,
    RETURNS: tl.constexpr,
    ANCHOR: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Program n computes the writes of all chunks of head n: Z, F, E and the states."""
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
        error = -load_tile(v + at * C * V, rows, C, i_v, V)
        if RESIDUAL:
            error += load_tile(k_c, rows, C, i_k, K)
        for tile in tl.range(0, HIDDEN, BH, disable_licm=True):
            j = tile + tl.arange(0, BH)
            at_1, in_1, at_2, in_2 = places(i_k, j, i_v, K, HIDDEN, V)
            A_1, A_2 = load(anchor + at_1, in_1), load(anchor + at_2, in_2)
            z_t = dot(load_tile(k_c, rows, C, i_k, K), A_1, DTYPE)
            x, _, _ = activate(z_t, ACTIVATION)
            error += dot(x, A_2, DTYPE)
            store_tile(z_c, z_t, rows, C, j, HIDDEN)
            if ANCHOR:
                tl.store(after + OFFSET + at_1, A_1, mask=in_1)
                tl.store(after + OFFSET + at_2, A_2, mask=in_2)
        store_tile(e_c, error, rows, C, i_v, V)
        tl.debug_barrier()  # threads read what others have written
        w_c, m_c, beta_n, c_n, H_n = of_write(P, beta, c, m, H, at, rows, C, DECAY, MOMENTUM)
        for tile in tl.range(0, HIDDEN, BH, disable_licm=True):
            j = tile + tl.arange(0, BH)
            at_1, in_1, at_2, in_2 = places(i_k, j, i_v, K, HIDDEN, V)
            x, slope, _ = activate(load_tile(z_c, rows, C, j, HIDDEN), ACTIVATION)
            e_t = load_tile(e_c, rows, C, i_v, V)  # loaded for every tile, to save registers
            f_t = dot(e_t, tl.trans(load(anchor + at_2, in_2)), DTYPE)
            store_tile(f_c, f_t, rows, C, j, HIDDEN)
            write(x, e_t, state, after, initial, at_2, in_2, w_c, m_c, beta_n, c_n, H_n, SIZE, RETURNS, MOMENTUM, DTYPE)
            write(
                load_tile(k_c, rows, C, i_k, K), slope * f_t, state, after, initial, at_1, in_1,
                w_c, m_c, beta_n, c_n, H_n, SIZE, RETURNS, MOMENTUM, DTYPE,
            )  # fmt: skip
        tl.debug_barrier()


@triton.jit
def read_kernel(
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
    P_c = load_tile(P + at * C * C, rows, C, cols, C)
    beta_c, c_c = column(beta, at * C, rows, C, DECAY, 1.0), column(c, at * C, rows, C, MOMENTUM, 0.0)
    scores = P_c * dot(load_tile(q_c, rows, C, i_k, K), tl.trans(load_tile(k + at * C * K, cols, C, i_k, K)), DTYPE)
    output, scores_2 = tl.zeros([BR, BV], tl.float32), tl.zeros([BR, BC], tl.float32)
    for tile in tl.range(0, HIDDEN, BH, disable_licm=True):
        j = tile + tl.arange(0, BH)
        at_1, in_1, at_2, in_2 = places(i_k, j, i_v, K, HIDDEN, V)
        x, slope, _ = activate(load_tile(z_c, cols, C, j, HIDDEN), ACTIVATION)
        d = slope * load_tile(f_c, cols, C, j, HIDDEN)
        q_t = load_tile(q_c, rows, C, i_k, K)  # loaded a second time, to save registers
        u = read(q_t, state, initial, at_1, in_1, beta_c, c_c, SIZE, RETURNS, MOMENTUM, DTYPE)
        y, _, _ = activate(u - dot(scores, d, DTYPE), ACTIVATION)
        output += read(y, state, initial, at_2, in_2, beta_c, c_c, SIZE, RETURNS, MOMENTUM, DTYPE)
        scores_2 += dot(y, tl.trans(x), DTYPE)
    output -= dot(P_c * scores_2, load_tile(e + at * C * V, cols, C, i_v, V), DTYPE)
    if RESIDUAL:
        output += load_tile(q_c, rows, C, i_k, K)
    store_tile(o + at * C * V, output, rows, C, i_v, V)
