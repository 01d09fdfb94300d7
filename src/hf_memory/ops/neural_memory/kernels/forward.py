"""Forward: writes of a head's chunks one after the other, then reads of all in parallel; for letters see launch.py."""

import triton
import triton.language as tl

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
def decaying(state, initial, tile):
    """What decays of the weights before the chunk."""
    return load_layer(state, tile) - load_layer(initial, tile)


@triton.jit
def read(x, state, initial, tile, coefficients, meta: tl.constexpr):
    """x times the weights before the chunk, decayed, and times the momentum."""
    beta, c = coefficients
    y = beta * dot(x, decaying(state, initial, tile), meta.DTYPE)
    y += dot(x, load_layer(initial, tile), meta.DTYPE)
    y += c * dot(x, load_layer(state + meta.SIZE, tile), meta.DTYPE)
    return y


@triton.jit
def write(X, D, state, after, initial, tile, coefficients, meta: tl.constexpr):
    """Weights and momentum after the chunk, from the state before it and initial weights."""
    w, m, beta, c, H = coefficients
    W = beta * load_layer(state, tile) - dot(tl.trans(X), w * D, meta.DTYPE)
    W += (1 - beta) * load_layer(initial, tile)
    S = load_layer(state + meta.SIZE, tile)
    W += c * S
    store_layer(after + meta.SIZE, H * S - dot(tl.trans(X), m * D, meta.DTYPE), tile)
    store_layer(after, W, tile)


@triton.jit
def write_kernel(
    chunks,  # Chunks, of which the first state is given
    sizes,  # Sizes
    meta: tl.constexpr,
):
    """Program n computes the writes of all chunks of head n: Z, F, E and the states."""
    K: tl.constexpr = meta.K
    V: tl.constexpr = meta.V
    HIDDEN: tl.constexpr = meta.HIDDEN
    given = chunks.rows
    learned = chunks.learned
    N = sizes.N
    C = sizes.C
    n = tl.cast(tl.program_id(0), tl.int64)
    initial = chunks.initial + n * meta.SIZE
    STATE = meta.PARTS * meta.SIZE
    OFFSET = (meta.PARTS - 1) * meta.SIZE
    i_k = tl.arange(0, meta.BK)
    i_v = tl.arange(0, meta.BV)
    rows = tl.arange(0, meta.BC)
    for i in tl.range(sizes.NC, disable_licm=True):
        at = tl.cast(i, tl.int64) * N + n
        state = chunks.states + at * STATE
        after = chunks.states + (at + N) * STATE
        anchor = anchor_of(state, chunks.closed, at, meta)[0]
        k_c = given.k + at * C * K
        z_c = learned.z + at * C * HIDDEN
        f_c = learned.f + at * C * HIDDEN
        e_c = learned.e + at * C * V
        error = -load_tile(given.v + at * C * V, rows, C, i_v, V)
        if meta.RESIDUAL:
            error += load_tile(k_c, rows, C, i_k, K)
        for tile in tl.range(0, HIDDEN, meta.BH, disable_licm=True):
            j = tile + tl.arange(0, meta.BH)
            first, second = places(i_k, j, i_v, meta)
            A_1 = load_layer(anchor, first)
            A_2 = load_layer(anchor, second)
            z_t = dot(load_tile(k_c, rows, C, i_k, K), A_1, meta.DTYPE)
            x, _, _ = activate(z_t, meta.ACTIVATION)
            error += dot(x, A_2, meta.DTYPE)
            store_tile(z_c, z_t, rows, C, j, HIDDEN)
            if meta.ANCHOR:
                store_layer(after + OFFSET, A_1, first)
                store_layer(after + OFFSET, A_2, second)
        store_tile(e_c, error, rows, C, i_v, V)
        tl.debug_barrier()  # threads read what others have written
        coefficients = of_write(given, at, rows, C)
        for tile in tl.range(0, HIDDEN, meta.BH, disable_licm=True):
            j = tile + tl.arange(0, meta.BH)
            first, second = places(i_k, j, i_v, meta)
            x, slope, _ = activate(load_tile(z_c, rows, C, j, HIDDEN), meta.ACTIVATION)
            e_t = load_tile(e_c, rows, C, i_v, V)  # loaded for every tile, to save registers
            f_t = dot(e_t, tl.trans(load_layer(anchor, second)), meta.DTYPE)
            store_tile(f_c, f_t, rows, C, j, HIDDEN)
            write(x, e_t, state, after, initial, second, coefficients, meta)
            k_t = load_tile(k_c, rows, C, i_k, K)
            write(k_t, slope * f_t, state, after, initial, first, coefficients, meta)
        tl.debug_barrier()


@triton.jit
def read_kernel(
    chunks,  # Chunks
    o,  # [NC, N, C, V]
    sizes,  # Sizes
    meta: tl.constexpr,
):
    """Program (n, i, r) reads the r-th rows of chunk i of head n."""
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
    z_c = learned.z + at * C * HIDDEN
    f_c = learned.f + at * C * HIDDEN
    P_c = load_tile(given.P + at * C * C, rows, C, cols, C)
    k_c = load_tile(given.k + at * C * K, cols, C, i_k, K)
    coefficients = of_read(given, at, rows, C)
    scores = P_c * dot(load_tile(q_c, rows, C, i_k, K), tl.trans(k_c), meta.DTYPE)
    output = tl.zeros([meta.BR, meta.BV], tl.float32)
    scores_2 = tl.zeros([meta.BR, meta.BC], tl.float32)
    for tile in tl.range(0, HIDDEN, meta.BH, disable_licm=True):
        j = tile + tl.arange(0, meta.BH)
        first, second = places(i_k, j, i_v, meta)
        x, slope, _ = activate(load_tile(z_c, cols, C, j, HIDDEN), meta.ACTIVATION)
        d = slope * load_tile(f_c, cols, C, j, HIDDEN)
        q_t = load_tile(q_c, rows, C, i_k, K)  # loaded a second time, to save registers
        u = read(q_t, state, initial, first, coefficients, meta)
        y, _, _ = activate(u - dot(scores, d, meta.DTYPE), meta.ACTIVATION)
        output += read(y, state, initial, second, coefficients, meta)
        scores_2 += dot(y, tl.trans(x), meta.DTYPE)
    output -= dot(P_c * scores_2, load_tile(learned.e + at * C * V, cols, C, i_v, V), meta.DTYPE)
    if meta.RESIDUAL:
        output += load_tile(q_c, rows, C, i_k, K)
    store_tile(o + at * C * V, output, rows, C, i_v, V)
