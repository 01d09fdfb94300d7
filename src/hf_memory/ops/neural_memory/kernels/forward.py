"""Forward: writes of a head's chunks one after the other, then reads of all in parallel; for letters see launch.py."""

import triton
import triton.language as tl

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
def decaying(state, initial, at, inside, meta: tl.constexpr):
    """What decays of the weights before the chunk; states that a program has held leave out initial weights."""
    W = load(state + at, inside)
    if meta.RETURNS and not meta.HELD:
        W -= load(initial + at, inside)
    return W


@triton.jit
def read(x, state, initial, at, inside, beta, c, meta: tl.constexpr):
    """x times the weights before the chunk, decayed, and times the momentum."""
    y = beta * dot(x, decaying(state, initial, at, inside, meta), meta.DTYPE)
    if meta.RETURNS:
        y += dot(x, load(initial + at, inside), meta.DTYPE)
    if meta.MOMENTUM:
        y += c * dot(x, load(state + meta.SIZE + at, inside), meta.DTYPE)
    return y


@triton.jit
def write(X, D, state, after, initial, at, inside, w, m, beta, c, H, meta: tl.constexpr):
    """Weights and momentum after the chunk."""
    W = beta * load(state + at, inside) - dot(tl.trans(X), w * D, meta.DTYPE)
    if meta.RETURNS:
        W += (1 - beta) * load(initial + at, inside)
    if meta.MOMENTUM:
        S = load(state + meta.SIZE + at, inside)
        W += c * S
        tl.store(after + meta.SIZE + at, H * S - dot(tl.trans(X), m * D, meta.DTYPE), mask=inside)
    tl.store(after + at, W, mask=inside)


@triton.jit
def write_kernel(
    given,  # Rows
    closed,  # [NC, N] int32, whether the anchor becomes the weights before the chunk; or None for always
    initial,  # [N, SIZE] or None
    states,  # [NC + 1, N, PARTS, SIZE]: the first is given
    learned,  # Learned
    chunks,
    N,
    C,
    meta: tl.constexpr,
):
    """Program n computes the writes of all chunks of head n: Z, F, E and the states."""
    K: tl.constexpr = meta.K
    V: tl.constexpr = meta.V
    HIDDEN: tl.constexpr = meta.HIDDEN
    n = tl.cast(tl.program_id(0), tl.int64)
    STATE, OFFSET = meta.PARTS * meta.SIZE, (meta.PARTS - 1) * meta.SIZE
    i_k, i_v, rows = tl.arange(0, meta.BK), tl.arange(0, meta.BV), tl.arange(0, meta.BC)
    if meta.RETURNS:
        initial += n * meta.SIZE
    for i in tl.range(chunks, disable_licm=True):
        at = tl.cast(i, tl.int64) * N + n
        state, after = states + at * STATE, states + (at + N) * STATE
        anchor = anchor_of(state, closed, at, meta)[0]
        k_c, z_c = given.k + at * C * K, learned.z + at * C * HIDDEN
        f_c, e_c = learned.f + at * C * HIDDEN, learned.e + at * C * V
        error = -load_tile(given.v + at * C * V, rows, C, i_v, V)
        if meta.RESIDUAL:
            error += load_tile(k_c, rows, C, i_k, K)
        for tile in tl.range(0, HIDDEN, meta.BH, disable_licm=True):
            j = tile + tl.arange(0, meta.BH)
            at_1, in_1, at_2, in_2 = places(i_k, j, i_v, meta)
            A_1, A_2 = load(anchor + at_1, in_1), load(anchor + at_2, in_2)
            z_t = dot(load_tile(k_c, rows, C, i_k, K), A_1, meta.DTYPE)
            x, _, _ = activate(z_t, meta.ACTIVATION)
            error += dot(x, A_2, meta.DTYPE)
            store_tile(z_c, z_t, rows, C, j, HIDDEN)
            if meta.ANCHOR:
                tl.store(after + OFFSET + at_1, A_1, mask=in_1)
                tl.store(after + OFFSET + at_2, A_2, mask=in_2)
        store_tile(e_c, error, rows, C, i_v, V)
        tl.debug_barrier()  # threads read what others have written
        w_c, m_c, beta_n, c_n, H_n = of_write(given, at, rows, C, meta)
        for tile in tl.range(0, HIDDEN, meta.BH, disable_licm=True):
            j = tile + tl.arange(0, meta.BH)
            at_1, in_1, at_2, in_2 = places(i_k, j, i_v, meta)
            x, slope, _ = activate(load_tile(z_c, rows, C, j, HIDDEN), meta.ACTIVATION)
            e_t = load_tile(e_c, rows, C, i_v, V)  # loaded for every tile, to save registers
            f_t = dot(e_t, tl.trans(load(anchor + at_2, in_2)), meta.DTYPE)
            store_tile(f_c, f_t, rows, C, j, HIDDEN)
            write(x, e_t, state, after, initial, at_2, in_2, w_c, m_c, beta_n, c_n, H_n, meta)
            k_t = load_tile(k_c, rows, C, i_k, K)
            write(k_t, slope * f_t, state, after, initial, at_1, in_1, w_c, m_c, beta_n, c_n, H_n, meta)
        tl.debug_barrier()


@triton.jit
def read_kernel(
    given,  # Rows
    initial,  # [N, SIZE] or None
    states,  # [NC + 1, N, PARTS, SIZE]
    learned,  # Learned
    o,  # [NC, N, C, V]
    N,
    C,
    meta: tl.constexpr,
):
    """Program (n, i, r) reads the r-th rows of chunk i of head n."""
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
    q_c, z_c, f_c = given.q + at * C * K, learned.z + at * C * HIDDEN, learned.f + at * C * HIDDEN
    P_c, k_c = load_tile(given.P + at * C * C, rows, C, cols, C), load_tile(given.k + at * C * K, cols, C, i_k, K)
    beta_c, c_c = column(given.beta, at * C, rows, C, 1.0), column(given.c, at * C, rows, C, 0.0)
    scores = P_c * dot(load_tile(q_c, rows, C, i_k, K), tl.trans(k_c), meta.DTYPE)
    output, scores_2 = tl.zeros([meta.BR, meta.BV], tl.float32), tl.zeros([meta.BR, meta.BC], tl.float32)
    for tile in tl.range(0, HIDDEN, meta.BH, disable_licm=True):
        j = tile + tl.arange(0, meta.BH)
        at_1, in_1, at_2, in_2 = places(i_k, j, i_v, meta)
        x, slope, _ = activate(load_tile(z_c, cols, C, j, HIDDEN), meta.ACTIVATION)
        d = slope * load_tile(f_c, cols, C, j, HIDDEN)
        q_t = load_tile(q_c, rows, C, i_k, K)  # loaded a second time, to save registers
        u = read(q_t, state, initial, at_1, in_1, beta_c, c_c, meta)
        y, _, _ = activate(u - dot(scores, d, meta.DTYPE), meta.ACTIVATION)
        output += read(y, state, initial, at_2, in_2, beta_c, c_c, meta)
        scores_2 += dot(y, tl.trans(x), meta.DTYPE)
    output -= dot(P_c * scores_2, load_tile(learned.e + at * C * V, cols, C, i_v, V), meta.DTYPE)
    if meta.RESIDUAL:
        output += load_tile(q_c, rows, C, i_k, K)
    store_tile(o + at * C * V, output, rows, C, i_v, V)
