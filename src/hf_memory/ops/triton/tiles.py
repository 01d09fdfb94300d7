"""Functions that kernels share: program indices, loads and stores, decays, scores and small triangular systems.

They take what belongs together in tuples: tokens (t, in_t) and channels (i, in_i, D) with the masks of those that
exist, and a head (h, heads).
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
SHUT = tl.constexpr(-16384.0)  # 2^SHUT is zero, and a sum of 64 such gates is exact in float32


@triton.jit
def program(D: tl.constexpr, B: tl.constexpr, meta: tl.constexpr):
    """Sequence (int64), head of values, head of its keys, and tile of B of D channels; tiles of a head are adjacent."""
    TILES: tl.constexpr = (D + B - 1) // B
    i = tl.program_id(0)
    hv = i // TILES % meta.HV
    return (
        tl.cast(i // (meta.HV * TILES), tl.int64),
        (hv, meta.HV),
        (hv // (meta.HV // meta.H), meta.H),
        i % TILES,
    )


@triton.jit
def channels(tile, B: tl.constexpr, D: tl.constexpr):
    """The channels of a tile of B among D."""
    i = tile * B + tl.arange(0, B)
    return i, i < D, D


@triton.jit
def sequence_bounds(call, n):
    """First token of sequence n, and the one after its last, among all rows."""
    if call.bounds is not None:
        start = tl.cast(tl.load(call.bounds + n), tl.int64)
        end = tl.cast(tl.load(call.bounds + n + 1), tl.int64)
    else:
        start = n * call.T
        end = start + call.T
    return start, end


@triton.jit
def chunk_bounds(call, c, C: tl.constexpr):
    """First token of chunk c, and the one after its last: of packed sequences by their bounds, else of rows of T."""
    if call.bounds is not None:
        start, end = sequence_bounds(call, c)
    else:
        chunks = (call.T + C - 1) // C
        start = c // chunks * call.T + c % chunks * C
        end = tl.minimum(start + C, c // chunks * call.T + call.T)
    return start, end


@triton.jit
def rows_tile(tokens, head, channels):
    """Offsets of x[t, h, i] in a tensor [tokens, heads, D], and the mask of those that exist."""
    t, in_t = tokens
    h, heads = head
    i, in_i, D = channels
    return (t[:, None] * heads + h) * D + i[None, :], in_t[:, None] & in_i[None, :]


@triton.jit
def load_rows(x, tokens, head, channels):
    """x[t, h, i] of a tensor [tokens, heads, D], zero outside."""
    at, inside = rows_tile(tokens, head, channels)
    return tl.load(x + at, mask=inside, other=0.0)


@triton.jit
def store_rows(x, value, tokens, head, channels):
    """The inverse of `load_rows`."""
    at, inside = rows_tile(tokens, head, channels)
    tl.store(x + at, tl.cast(value, x.dtype.element_ty), mask=inside)


@triton.jit
def load_numbers(x, tokens, head):
    """x[t, h] of a tensor [tokens, heads], zero outside."""
    t, in_t = tokens
    h, heads = head
    return tl.load(x + t * heads + h, mask=in_t, other=0.0)


@triton.jit
def store_numbers(x, value, tokens, head):
    """The inverse of `load_numbers`."""
    t, in_t = tokens
    h, heads = head
    tl.store(x + t * heads + h, tl.cast(value, x.dtype.element_ty), mask=in_t)


@triton.jit
def state_tile(n, head, keys, values):
    """Offsets of S[n, hv, i_k, i_v] in states [N, HV, K, V], and the mask of those that exist."""
    hv, HV = head
    i_k, in_k, K = keys
    i_v, in_v, V = values
    return (n * HV + hv) * K * V + i_k[:, None] * V + i_v[None, :], in_k[:, None] & in_v[None, :]


@triton.jit
def load_state(states, at, inside):
    """A tile of states, or zeros without states."""
    S = tl.zeros([at.shape[0], at.shape[1]], tl.float32)
    if states is not None:
        S = tl.load(states + at, mask=inside, other=0.0)
    return S


@triton.jit
def turned_state_tile(n, head, keys, values):
    """The same as `state_tile` for a tile S^T."""
    hv, HV = head
    i_k, in_k, K = keys
    i_v, in_v, V = values
    return (n * HV + hv) * K * V + i_k[None, :] * V + i_v[:, None], in_v[:, None] & in_k[None, :]


@triton.jit
def normalizer_tile(n, head, keys):
    """Offsets of z[n, hv, i_k] in normalisers [N, HV, K], and the mask of those that exist."""
    hv, HV = head
    i_k, in_k, K = keys
    return (n * HV + hv) * K + i_k, in_k


@triton.jit
def load_gates(g, tokens, head, keys, DECAY: tl.constexpr):
    """Gates g [C] or [C, BK] with base two, zero outside."""
    gates = load_rows(g, tokens, head, keys) if DECAY == 2 else load_numbers(g, tokens, head)
    return tl.cast(gates, tl.float32) * LOG2E


@triton.jit
def decay_to_here(gates, DECAY: tl.constexpr):
    """From the start of a chunk to each of its tokens [C, 1] or [C, BK], and of the whole chunk [1, 1] or [1, BK]."""
    enter = tl.exp2(tl.cumsum(gates, axis=0))
    whole = tl.exp2(tl.sum(gates, axis=0))
    if DECAY == 2:
        whole = whole[None, :]
    else:
        enter = enter[:, None]
        whole = whole + tl.zeros([1, 1], tl.float32)
    return enter, whole


@triton.jit
def decay_from_here(following, DECAY: tl.constexpr):
    """From each token of a chunk to its end [C, 1] or [C, BK], given the gates of the tokens after each.

    They are summed separately, since a difference of two sums would be inexact, and -inf - (-inf) is NaN.
    """
    leave = tl.exp2(tl.cumsum(following, axis=0, reverse=True))
    if DECAY < 2:
        leave = leave[:, None]
    return leave


@triton.jit
def decay_to_end(g, t, end, head, keys, DECAY: tl.constexpr):
    """`decay_from_here` for the tokens t of a chunk."""
    has_next = (t + 1 < end) & (tl.arange(0, t.shape[0]) < t.shape[0] - 1)  # in the chunk
    return decay_from_here(load_gates(g, (t + 1, has_next), head, keys, DECAY), DECAY)


@triton.jit
def decays(g, t, end, head, keys, DECAY: tl.constexpr):
    """Gates of a chunk, and its decays: to each token, from each, and of the whole."""
    gates = load_gates(g, (t, t < end), head, keys, DECAY)
    leave = decay_to_end(g, t, end, head, keys, DECAY)
    enter, whole = decay_to_here(gates, DECAY)
    return gates, enter, leave, whole


@triton.jit
def decay_between(A, gates, OF_KEYS: tl.constexpr):
    """A_ij [C, C] times the decay after j up to i, from gates [C]; rows are i and columns j, or OF_KEYS the other way.

    Gates are split into multiples of 1 / 16, whose sums are exact, and small remainders, so that no precision is lost.
    """
    gates = tl.maximum(gates, SHUT)
    multiples = tl.floor(16 * gates) / 16
    coarse = tl.cumsum(multiples, axis=0)
    fine = tl.cumsum(gates - multiples, axis=0)
    if OF_KEYS:
        coarse = -coarse
        fine = -fine
    return A * tl.exp2(
        tl.minimum(coarse[:, None] - coarse[None, :], 0.0) + (fine[:, None] - fine[None, :])
    )


@triton.jit
def split_dot(x, y, PARTS: tl.constexpr, PRECISION: tl.constexpr):
    """x y for x [M, D] and y [D, N], summed over PARTS parts of D, which warps share so that none reads all of D."""
    if PARTS == 1:
        return tl.dot(x, y, input_precision=PRECISION)
    M: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1] // PARTS
    N: tl.constexpr = y.shape[1]
    parts = tl.permute(tl.reshape(x, [M, PARTS, D]), [1, 0, 2])
    return tl.sum(tl.dot(parts, tl.reshape(y, [PARTS, D, N]), input_precision=PRECISION), axis=0)


@triton.jit
def read(x, S, decay, meta: tl.constexpr):
    """(x decay) S [C, BV] for x [C, BK] and decay [C, 1] or [C, BK]; operands stay as loaded if they can."""
    if meta.DECAY == 2:
        return split_dot(
            tl.cast(x * decay, x.dtype), tl.cast(S, x.dtype), meta.PARTS, meta.PRECISION
        )
    y = split_dot(x, tl.cast(S, x.dtype), meta.PARTS, meta.PRECISION)
    if meta.DECAY == 1:
        y *= decay
    return y


@triton.jit
def write(x, y, decay, meta: tl.constexpr):
    """(x decay)^T y [BK, BV] for x [C, BK], y [C, BV] of one dtype, and decay [C, 1] or [C, BK]."""
    if meta.DECAY == 2:
        x = tl.cast(x * decay, x.dtype)
    elif meta.DECAY == 1:
        y = tl.cast(y * decay, y.dtype)
    return tl.dot(tl.trans(x), y, input_precision=meta.PRECISION)


@triton.jit
def write_transposed(x, y, decay, DECAY: tl.constexpr, PRECISION: tl.constexpr):
    """The transposed result, [BV, BK]."""
    if DECAY == 2:
        x = tl.cast(x * decay, x.dtype)
    elif DECAY == 1:
        y = tl.cast(y * decay, y.dtype)
    return tl.dot(tl.trans(y), x, input_precision=PRECISION)


@triton.jit
def load_pairs(x, y, tokens, head, channels):
    """Rows of x, then those of y: `load_rows` for t [2 C], which has the same tokens twice."""
    at, inside = rows_tile(tokens, head, channels)
    is_x = (tl.arange(0, at.shape[0]) < at.shape[0] // 2)[:, None]
    return tl.load(tl.where(is_x, x + at, y + at), mask=inside, other=0.0)


@triton.jit
def store_pairs(x, y, value, tokens, head, channels):
    """The inverse of `load_pairs`, for x and y of one dtype."""
    at, inside = rows_tile(tokens, head, channels)
    is_x = (tl.arange(0, at.shape[0]) < at.shape[0] // 2)[:, None]
    tl.store(tl.where(is_x, x + at, y + at), tl.cast(value, x.dtype.element_ty), mask=inside)


@triton.jit
def decay_over(gates, between, PRECISION: tl.constexpr):
    """Decays [ROWS, BK] over the tokens [C] that `between` [ROWS, C] marks for each row, of gates [C, BK].

    Sums are products with zeros and ones, so that none is the difference of two large ones.
    """
    return tl.exp2(
        tl.dot(tl.where(between, 1.0, 0.0), tl.maximum(gates, SHUT), input_precision=PRECISION)
    )


@triton.jit
def level_of_pairs(SIZE: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, OF_KEYS: tl.constexpr):
    """Pairs [ROWS, ROWS] of a later row i and an earlier column j in the two halves of a block of 2 SIZE tokens.

    Each pair of different tokens of a chunk is in one of the levels SIZE = 1, 2, 4 ... C / 2; OF_KEYS transposed. With
    ROWS = 2 C all tokens have a second row.
    """
    halves = tl.arange(0, ROWS) % C // SIZE
    if OF_KEYS:
        pairs = (halves[:, None] % 2 == 0) & (halves[:, None] + 1 == halves[None, :])
    else:
        pairs = (halves[:, None] % 2 == 1) & (halves[:, None] == halves[None, :] + 1)
    return pairs


@triton.jit
def decay_of_level(
    gates, SIZE: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr
):
    """Decays [ROWS, BK] between each token and the middle of its block of 2 SIZE, of which no exponent is positive.

    The product of two of them is the decay between the tokens of a pair. A second row reads before its token decays.
    """
    rows = tl.arange(0, ROWS)
    t = tl.arange(0, C)[None, :]
    i = (rows % C)[:, None]
    until = i - (rows // C)[:, None]
    between = (i // SIZE == t // SIZE) & tl.where(i // SIZE % 2 == 1, t <= until, t > i)
    return decay_over(gates, between, PRECISION)


@triton.jit
def scores_by_level(x, y, gates, C: tl.constexpr, OF_KEYS: tl.constexpr, PRECISION: tl.constexpr):
    """sum_d x_id y_jd e^(b_id - b_jd) for tokens i > j, with a decay for each channel; rows are keys if OF_KEYS."""
    ROWS: tl.constexpr = x.shape[0]
    A = tl.zeros([ROWS, ROWS], tl.float32)
    for level in tl.static_range(6):
        if 2**level < C:
            decay = decay_of_level(gates, 2**level, C, ROWS, PRECISION)
            products = tl.dot(
                tl.cast(x * decay, x.dtype),
                tl.trans(tl.cast(y * decay, y.dtype)),
                input_precision=PRECISION,
            )
            A = tl.where(level_of_pairs(2**level, C, ROWS, OF_KEYS), products, A)
    return A


@triton.jit
def scores(q, k, gates, OF_KEYS: tl.constexpr, meta: tl.constexpr):
    """A [C, C] without scale; rows are queries, or keys if OF_KEYS (a transposed product was wrong on Hopper)."""
    rows = tl.arange(0, meta.C)
    if OF_KEYS:
        x = k
        y = q
        seen = rows[:, None] <= rows[None, :]
    else:
        x = q
        y = k
        seen = rows[:, None] >= rows[None, :]
    if meta.DECAY == 2:
        same = tl.sum(tl.cast(x, tl.float32) * tl.cast(y, tl.float32), axis=1)
        A = scores_by_level(x, y, gates, meta.C, OF_KEYS, meta.PRECISION)
        A = tl.where(rows[:, None] == rows[None, :], same[:, None], A)
    else:
        A = split_dot(x, tl.trans(y), meta.PARTS, meta.PRECISION)
        if meta.DECAY == 1:
            A = decay_between(A, gates, OF_KEYS)
        A = tl.where(seen, A, 0.0)
    return A


@triton.jit
def unit_lower_inverse(A, C: tl.constexpr):
    """(I + A)^-1 for strictly lower triangular A [C, C], where C is 16 or 32.

    The blocks of 16 rows on the diagonal are inverted row by row, both at once; then [[D, 0], [E, F]]^-1 is
    [[D^-1, 0], [-F^-1 E D^-1, F^-1]].
    """
    BLOCKS: tl.constexpr = C // 16
    rows = tl.arange(0, 16)
    blocks = tl.arange(0, BLOCKS)
    # [BLOCKS, 1, BLOCKS, 1]
    on_diagonal = blocks[:, None, None, None] == blocks[None, None, :, None]
    A = tl.reshape(A, [BLOCKS, 16, BLOCKS, 16])
    D = tl.sum(tl.where(on_diagonal, A, 0.0), axis=2)
    inverse = (
        tl.zeros([BLOCKS, 16, 16], tl.float32)
        + tl.where(rows[:, None] == rows[None, :], 1.0, 0.0)[None]
    )
    for i in range(1, 16):
        here = (rows == i)[None, :, None]
        a_i = tl.sum(tl.where(here, D, 0.0), axis=1)  # [BLOCKS, 16]
        row = tl.sum(a_i[:, :, None] * inverse, axis=1)
        inverse = tl.where(here, inverse - row[:, None, :], inverse)
    inverse = tl.reshape(tl.where(on_diagonal, inverse[:, :, None, :], 0.0), [C, C])
    if C > 16:
        below = tl.reshape(tl.where(on_diagonal, 0.0, A), [C, C])
        inverse -= tl.dot(
            tl.dot(inverse, below, input_precision="tf32x3"), inverse, input_precision="tf32x3"
        )
    return inverse
