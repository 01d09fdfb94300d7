"""Sequences cut into segments that are processed in parallel, for calls with too few heads to fill a GPU.

The state after a segment is linear in the state before it: S_end = M S_start + own. There are three passes:

    1. for each segment, from an empty state: own and M, which is a decay e^b of each key channel for linear
       attention and a matrix [K, K] for the delta rule;
    2. over the segments of a sequence: the state before each segment, and the final state;
    3. the op itself, which treats segments like packed sequences with initial states.

Gradients of states go backwards: dS_start = M^T dS_end + own. With keys of unit length and beta in [0, 2] the norm of M
is at most one, so products of them are as stable as the recurrence.

M is the number of segments of a call here, N of sequences; other letters are those of ops/contract.py.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_memory.ops.triton.launch import TILE, VECTOR, decay_kind, launcher, shared_constants
from hf_memory.ops.triton.tiles import decays, load_rows, program, sequence_bounds, write

BLOCK = 64  # the length of a segment is a multiple of this
SHORTEST = 512  # tokens of a segment: in shorter ones, states cost more than tokens
PROGRAMS = 264  # fills a large GPU: two programs for each of 132 multiprocessors


class Segments(NamedTuple):
    """Segments, sequence by sequence. Without tensors all have the same length, which takes no launches."""

    number: int  # M
    sequences: int  # N
    bounds: Tensor | None = None  # [M + 1]: tokens; unused segments at the end are empty
    first: Tensor | None = None  # [N + 1]: the first segment of each sequence


def segment_length(q: Tensor, sequences: int, programs: int) -> int:
    """Tokens of a segment, or 0 if sequences should not be cut; it depends on shapes only.

    Args:
        q: [B, T, H, K].
        sequences: number of sequences of the call, N.
        programs: number of programs for one sequence.
    """
    B, T = q.shape[:2]
    if 2 * sequences * programs > PROGRAMS:
        return 0
    length = max(SHORTEST, triton.cdiv(B * T * programs, PROGRAMS * BLOCK) * BLOCK)
    parts = triton.cdiv(T, length)
    equal = (T // n for n in range(parts, 2 * parts) if T % (n * BLOCK) == 0 and T // n >= SHORTEST)
    length = next(equal, length)  # equal parts take fewer launches
    return length if length < T else 0


def number_of_segments(q: Tensor, cu_seqlens: Tensor | None, N: int, length: int) -> int:
    """How many segments `cut` makes, M; it depends on shapes only."""
    B, T = q.shape[:2]
    return B * T // length + (N if cu_seqlens is not None or T % length else 0)


def tokens_of_sequences(q: Tensor, states: Tensor) -> int:
    """Tokens of each sequence or segment, if all have the same number, and states are one for each."""
    return q.shape[0] * q.shape[1] // states.shape[0]


def cut(cu_seqlens: Tensor | None, B: int, T: int, length: int, like: Tensor) -> Segments:
    """Segments of `length` tokens; the last one of a sequence may be shorter. An empty sequence is one segment."""
    if cu_seqlens is None and T % length == 0:
        return Segments(B * T // length, B)
    if cu_seqlens is None:
        cu_seqlens = torch.arange(B + 1, device=like.device) * T
    ends = cu_seqlens[1:]
    N = ends.shape[0]
    counts = ((ends - cu_seqlens[:-1] + length - 1) // length).clamp(min=1)
    first = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    m = torch.arange(B * T // length + N, device=like.device)
    n = torch.searchsorted(first[1:], m, right=True).clamp(max=N - 1)
    starts = torch.minimum(cu_seqlens[n] + (m - first[n]) * length, ends[n])
    return Segments(m.shape[0], N, torch.cat([starts, ends[-1:]]), first)


@triton.jit
def sum_kernel(
    x,  # [B, T, H, K]
    y,  # [B, T, HV, V]
    w,  # [B, T, HV], or None for ones
    g,  # [B, T, HV] or [B, T, HV, K] or None
    own,  # [M, HV, K, V]
    own_z,  # [M, HV, K] or None
    decay,  # [M, HV, K] or None
    bounds,  # [M + 1] or None
    scale,
    T,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DECAY: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BACKWARDS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sums of scale x y^T and x w, decayed to the end of a segment or BACKWARDS to its start; a tile of values."""
    m, hv, tile = program(HV, (V + BV - 1) // BV)
    h = hv // (HV // H)
    i_k, i_v = tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    in_k, in_v = i_k < K, i_v < V
    start, end = sequence_bounds(bounds, m, T)
    S = tl.zeros([BK, BV], tl.float32)
    z = tl.zeros([BK], tl.float32)
    past = tl.full([1, BK if DECAY == 2 else 1], 1.0, tl.float32)  # the decay of chunks that were read
    last = start + (end - start - 1) // C * C
    for i in range(start, end, C):
        begin = i if BACKWARDS else start + last - i  # the chunk nearest to the state first
        t = tl.cast(begin, tl.int64) + tl.arange(0, C)
        in_t = t < end
        y_c = load_rows(y, t, in_t, hv, HV, i_v, in_v, V)
        x_c = load_rows(x, t, in_t, h, H, i_k, in_k, K)
        weight = 1.0  # the decay from here to the state
        if DECAY > 0:
            _gates, enter, leave, whole = decays(g, t, end, hv, HV, i_k, in_k, K, DECAY)
            weight = past * (enter if BACKWARDS else leave)
            past *= whole
        S += write(x_c, y_c, weight, DECAY, PRECISION)
        if NORMALIZE:
            x32 = tl.cast(x_c, tl.float32) * weight
            if w is not None:
                x32 *= tl.load(w + t * HV + hv, mask=in_t, other=0.0)[:, None]
            z += tl.sum(x32, axis=0)
    i_m = (m * HV + hv) * K
    tl.store(own + i_m * V + i_k[:, None] * V + i_v[None, :], scale * S, mask=in_k[:, None] & in_v[None, :])
    if tile == 0:
        if DECAY > 0:
            tl.store(decay + i_m + i_k, tl.sum(past, axis=0) + tl.zeros([BK], tl.float32), mask=in_k)
        if NORMALIZE:
            tl.store(own_z + i_m + i_k, z, mask=in_k)


@triton.jit
def scan_kernel(
    own,  # [M, HV, K, V]
    decay,  # [M, HV, K] or None
    state,  # [N, HV, K, V]
    boundary,  # [M, HV, K, V]: the state before each segment, or BACKWARDS after it
    final,  # [N, HV, K, V]: the state after the last segment, or BACKWARDS before the first
    first,  # [N + 1] or None
    segments,  # of each sequence, without `first`
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BACKWARDS: tl.constexpr,
):
    """A tile of key channels, with all value channels, of one sequence and head."""
    n, hv, tile = program(HV, (K + BK - 1) // BK)
    i_k, i_v = tile * BK + tl.arange(0, BK), tl.arange(0, BV)
    in_k = i_k < K
    in_s, i_s = in_k[:, None] & (i_v < V)[None, :], i_k[:, None] * V + i_v[None, :]
    start, end = sequence_bounds(first, n, segments)
    S = tl.load(state + (n * HV + hv) * K * V + i_s, mask=in_s, other=0.0)
    for step in range(start, end):
        m = tl.cast(step, tl.int64)
        if BACKWARDS:
            m = start + end - 1 - m
        i_m = (m * HV + hv) * K
        tl.store(boundary + i_m * V + i_s, S, mask=in_s)
        if decay is not None:
            S *= tl.load(decay + i_m + i_k, mask=in_k, other=0.0)[:, None]
        S += tl.load(own + i_m * V + i_s, mask=in_s, other=0.0)
    tl.store(final + (n * HV + hv) * K * V + i_s, S, mask=in_s)


@triton.jit
def matrix_scan_kernel(
    own,  # [M, HV, K, V]
    transition,  # [M, HV, K, K]
    state,  # [N, HV, K, V]
    boundary,  # [M, HV, K, V]: the state before each segment, or BACKWARDS after it
    final,  # [N, HV, K, V]: the state after the last segment, or BACKWARDS before the first
    first,  # [N + 1] or None
    segments,  # of each sequence, without `first`
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BJ: tl.constexpr,
    BACKWARDS: tl.constexpr,
):
    """A tile of value channels of one sequence and head. States are read back in pieces: registers hold no matrix."""
    n, hv, tile = program(HV, (V + BV - 1) // BV)
    i_k, i_v = tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    in_k, in_v = i_k < K, i_v < V
    in_s, i_s = in_k[:, None] & in_v[None, :], i_k[:, None] * V + i_v[None, :]
    start, end = sequence_bounds(first, n, segments)
    S = tl.load(state + (n * HV + hv) * K * V + i_s, mask=in_s, other=0.0)
    for step in range(start, end):
        m = tl.cast(step, tl.int64)
        if BACKWARDS:
            m = start + end - 1 - m
        i_m = (m * HV + hv) * K
        tl.store(boundary + i_m * V + i_s, S, mask=in_s)
        tl.debug_barrier()  # all of the state is read below
        S = tl.load(own + i_m * V + i_s, mask=in_s, other=0.0)
        for j in range(0, K, BJ):
            i_j = j + tl.arange(0, BJ)
            in_j = i_j < K
            i_M = i_j[None, :] * K + i_k[:, None] if BACKWARDS else i_k[:, None] * K + i_j[None, :]
            M_j = tl.load(transition + i_m * K + i_M, mask=in_k[:, None] & in_j[None, :], other=0.0)
            i_S = i_m * V + i_j[:, None] * V + i_v[None, :]
            S_j = tl.load(boundary + i_S, mask=in_j[:, None] & in_v[None, :], other=0.0)
            S += tl.dot(M_j, S_j, input_precision="tf32x3")
    tl.store(final + (n * HV + hv) * K * V + i_s, S, mask=in_s)


def sum_constants(H: int, HV: int, K: int, V: int, decay: int, dtype: torch.dtype) -> dict:
    """Compile-time arguments and launch options of `sum_kernel`."""
    common, width_k, width_v = shared_constants(H, HV, K, V, decay, dtype)
    is_large = decay == VECTOR and dtype == torch.float32 and width_k > 128  # for 99 KB of shared memory
    is_small = decay != VECTOR and dtype != torch.float32 and width_k <= 128
    C = 16 if is_large else 64 if is_small else 32
    tile = min(width_v, max(16, (TILE if dtype == torch.float32 else 2 * TILE) // width_k))
    return {**common, "C": C, "BK": width_k, "BV": tile, "num_warps": 8, "num_stages": 2}


def scan_constants(HV: int, K: int, V: int) -> dict:
    """Compile-time arguments and launch options of `scan_kernel`."""
    width_k, width_v = triton.next_power_of_2(K), triton.next_power_of_2(V)
    return {
        "HV": HV, "K": K, "V": V, "BK": min(width_k, max(1, 1024 // width_v)), "BV": width_v,
        "num_warps": 4, "num_stages": 1,
    }  # fmt: skip


def matrix_scan_constants(HV: int, K: int, V: int) -> dict:
    """Compile-time arguments and launch options of `matrix_scan_kernel`."""
    return {
        "HV": HV, "K": K, "V": V, "BK": max(16, triton.next_power_of_2(K)), "BV": 16, "BJ": 16,
        "num_warps": 4, "num_stages": 1,
    }  # fmt: skip


def boundary_states(
    segments: Segments,
    x: Tensor,
    y: Tensor,
    w: Tensor | None,
    g: Tensor | None,
    S: Tensor,
    z: Tensor | None,
    *,
    scale: float = 1.0,
    backwards: bool = False,
) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
    """States of linear attention before each segment and after all, or gradients of states after each and before all.

    Args:
        segments: M segments of N sequences.
        x: keys [B, T, H, K], or queries for gradients.
        y: values [B, T, HV, V], or gradients of outputs.
        w: the weights of the normaliser, [B, T, HV]; None for ones.
        g: decay [B, T, HV], [B, T, HV, K] or None.
        S: the state before each sequence, or the gradient after it, [N, HV, K, V].
        z: the same of the normaliser [N, HV, K], or None.
        scale: factor of products of keys and values.
        backwards: whether to compute gradients.

    Returns:
        [M, HV, K, V], and [M, HV, K] or None; then [N, HV, K, V], and [N, HV, K] or None.
    """
    M, (_, HV, K, V) = segments.number, S.shape
    own, own_z = S.new_empty(M, HV, K, V), None if z is None else S.new_empty(M, HV, K)
    kind = decay_kind(g)
    decay = S.new_empty(M, HV, K) if kind else None
    constants = sum_constants(x.shape[2], HV, K, V, kind, x.dtype)
    launcher(sum_kernel, (M * HV * triton.cdiv(V, constants["BV"]),))(
        x, y, w, g, own, own_z, decay, segments.bounds, scale, tokens_of_sequences(x, own),
        **constants, NORMALIZE=z is not None, BACKWARDS=backwards,
    )  # fmt: skip
    states, final = _scan(own, decay, S, segments, backwards)
    if z is None or own_z is None:
        return (states, None), (final, None)
    of_z = _scan(own_z[..., None], decay, z[..., None], segments, backwards)
    return (states, of_z[0][..., 0]), (final, of_z[1][..., 0])


def _scan(
    own: Tensor, decay: Tensor | None, state: Tensor, segments: Segments, backwards: bool
) -> tuple[Tensor, Tensor]:
    N, HV, K, V = state.shape
    states, final, constants = torch.empty_like(own), torch.empty_like(state), scan_constants(HV, K, V)
    launcher(scan_kernel, (N * HV * triton.cdiv(K, constants["BK"]),))(
        own, decay, state, states, final, segments.first, own.shape[0] // N, **constants, BACKWARDS=backwards
    )
    return states, final


def boundary_states_of(
    transition: Tensor, own: Tensor, state: Tensor, segments: Segments, *, backwards: bool = False
) -> tuple[Tensor, Tensor]:
    """The same as `boundary_states`, where transitions are matrices [M, HV, K, K]: [M, HV, K, V] and [N, HV, K, V].

    Args:
        transition: the matrix M of each segment, [M, HV, K, K].
        own: what each segment adds, [M, HV, K, V].
        state: the state before each sequence, or the gradient after it, [N, HV, K, V].
        segments: M segments of N sequences.
        backwards: whether to compute gradients.
    """
    N, HV, K, V = state.shape
    states, final, constants = torch.empty_like(own), torch.empty_like(state), matrix_scan_constants(HV, K, V)
    launcher(matrix_scan_kernel, (N * HV * triton.cdiv(V, constants["BV"]),))(
        own, transition, state, states, final, segments.first, own.shape[0] // N, **constants, BACKWARDS=backwards
    )
    return states, final
