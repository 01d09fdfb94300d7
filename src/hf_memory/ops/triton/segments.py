"""Sequences cut into segments that are processed in parallel, for calls with too few heads to fill a GPU.

The state after a segment is linear in the state before it: S_end = M S_start + own. There are three passes:

    1. for each segment, from an empty state: own and M, which is a decay e^b of each key channel for linear
       attention and a matrix [K, K] for the delta rule;
    2. over the segments of a sequence: the state before each segment, and the final state;
    3. the op itself, which treats segments like packed sequences with initial states.

Gradients of states go backwards: dS_start = M^T dS_end + own. With keys of unit length and beta in [0, 2] the norm of M
is at most one, so products of them are as stable as the recurrence.

M is the number of segments of a call here, N of sequences; other letters are those of ops/inputs.py.

Beside the op's kernels on whole sequences, which take the same calls: not timed.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_memory.ops.triton.arguments import Call, Meta, Rows
from hf_memory.ops.triton.launch import (
    TILE,
    VECTOR,
    Constants,
    decay_kind,
    launcher,
    precision,
    width,
)
from hf_memory.ops.triton.tiles import (
    channels,
    decays,
    load_numbers,
    load_rows,
    normalizer_tile,
    program,
    sequence_bounds,
    state_tile,
    write,
)

BLOCK = 64  # the length of a segment is a multiple of this
SHORTEST = 512  # tokens of a segment: in shorter ones, states cost more than tokens
PROGRAMS = 264  # fills a large GPU: two programs for each of 132 multiprocessors
PIECE = tl.constexpr(16)  # key channels of a state that `matrix_scan_kernel` reads at once
SCAN = {"num_warps": 4, "num_stages": 1}


class Segments(NamedTuple):
    """Segments, sequence by sequence. Without tensors all have the same length, which takes no launches."""

    number: int  # M
    sequences: int  # N
    bounds: Tensor | None = None  # [M + 1]: tokens; unused segments at the end are empty
    first: Tensor | None = None  # [N + 1]: the first segment of each sequence

    def of_sequences(self, state: Tensor | None, like: Tensor) -> Tensor:
        """The state of each sequence, or zeros without one; `like` are states of segments."""
        return like.new_zeros(self.sequences, *like.shape[1:]) if state is None else state


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
    rows,  # Rows: the sums are over k and v, and over k and beta, or k alone without beta
    own,  # [M, HV, K, V]
    own_z,  # [M, HV, K] or None
    decay,  # [M, HV, K] or None
    call,  # Call
    meta: tl.constexpr,
):
    """Sums of scale k v^T and k beta, decayed to the end of a segment or BACKWARDS to its start; a tile of values."""
    m, head, key_head, tile = program(meta.V, meta.BV, meta)
    keys = channels(0, meta.BK, meta.K)
    values = channels(tile, meta.BV, meta.V)
    start, end = sequence_bounds(call, m)
    S = tl.zeros([meta.BK, meta.BV], tl.float32)
    z = tl.zeros([meta.BK], tl.float32)
    # the decay of chunks that were read
    past = tl.full([1, meta.BK if meta.DECAY == 2 else 1], 1.0, tl.float32)
    last = start + (end - start - 1) // meta.C * meta.C
    for i in range(start, end, meta.C):
        begin = i if meta.BACKWARDS else start + last - i  # the chunk nearest to the state first
        t = tl.cast(begin, tl.int64) + tl.arange(0, meta.C)
        tokens = (t, t < end)
        v_c = load_rows(rows.v, tokens, head, values)
        k_c = load_rows(rows.k, tokens, key_head, keys)
        weight = 1.0  # the decay from here to the state
        if meta.DECAY > 0:
            _gates, enter, leave, whole = decays(rows.g, t, end, head, keys, meta.DECAY)
            weight = past * (enter if meta.BACKWARDS else leave)
            past *= whole
        S += write(k_c, v_c, weight, meta)
        if meta.NORMALIZE:
            k32 = tl.cast(k_c, tl.float32) * weight
            if rows.beta is not None:
                k32 *= load_numbers(rows.beta, tokens, head)[:, None]
            z += tl.sum(k32, axis=0)
    i_s, in_s = state_tile(m, head, keys, values)
    tl.store(own + i_s, call.scale * S, mask=in_s)
    if tile == 0:
        i_z, in_z = normalizer_tile(m, head, keys)
        if meta.DECAY > 0:
            tl.store(decay + i_z, tl.sum(past, axis=0) + tl.zeros([meta.BK], tl.float32), mask=in_z)
        if meta.NORMALIZE:
            tl.store(own_z + i_z, z, mask=in_z)


@triton.jit
def scan_kernel(
    own,  # [M, HV, K, V]
    decay,  # [M, HV, K] or None
    state,  # [N, HV, K, V]
    boundary,  # [M, HV, K, V]: the state before each segment, or BACKWARDS after it
    final,  # [N, HV, K, V]: the state after the last segment, or BACKWARDS before the first
    call,  # Call of the segments of sequences
    meta: tl.constexpr,
):
    """A tile of key channels, with all value channels, of one sequence and head."""
    n, head, _, tile = program(meta.K, meta.BK, meta)
    i_k, in_k, K = channels(tile, meta.BK, meta.K)
    i_v, in_v, V = channels(0, meta.BV, meta.V)
    hv, HV = head
    in_s = in_k[:, None] & in_v[None, :]
    i_s = i_k[:, None] * V + i_v[None, :]
    start, end = sequence_bounds(call, n)
    S = tl.load(state + (n * HV + hv) * K * V + i_s, mask=in_s, other=0.0)
    for step in range(start, end):
        m = tl.cast(step, tl.int64)
        if meta.BACKWARDS:
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
    call,  # Call of the segments of sequences
    meta: tl.constexpr,
):
    """A tile of value channels of one sequence and head. States are read back in pieces: registers hold no matrix."""
    n, head, _, tile = program(meta.V, meta.BV, meta)
    i_k, in_k, K = channels(0, meta.BK, meta.K)
    i_v, in_v, V = channels(tile, meta.BV, meta.V)
    hv, HV = head
    in_s = in_k[:, None] & in_v[None, :]
    i_s = i_k[:, None] * V + i_v[None, :]
    start, end = sequence_bounds(call, n)
    S = tl.load(state + (n * HV + hv) * K * V + i_s, mask=in_s, other=0.0)
    for step in range(start, end):
        m = tl.cast(step, tl.int64)
        if meta.BACKWARDS:
            m = start + end - 1 - m
        i_m = (m * HV + hv) * K
        tl.store(boundary + i_m * V + i_s, S, mask=in_s)
        tl.debug_barrier()  # all of the state is read below
        S = tl.load(own + i_m * V + i_s, mask=in_s, other=0.0)
        for j in range(0, K, PIECE):
            i_j = j + tl.arange(0, PIECE)
            in_j = i_j < K
            i_M = (
                i_j[None, :] * K + i_k[:, None]
                if meta.BACKWARDS
                else i_k[:, None] * K + i_j[None, :]
            )
            M_j = tl.load(transition + i_m * K + i_M, mask=in_k[:, None] & in_j[None, :], other=0.0)
            i_S = i_m * V + i_j[:, None] * V + i_v[None, :]
            S_j = tl.load(boundary + i_S, mask=in_j[:, None] & in_v[None, :], other=0.0)
            S += tl.dot(M_j, S_j, input_precision="tf32x3")
    tl.store(final + (n * HV + hv) * K * V + i_s, S, mask=in_s)


def sum_constants(H: int, HV: int, K: int, V: int, decay: int, dtype: torch.dtype) -> Constants:
    """How `sum_kernel` is compiled and launched."""
    width_k = width(K)
    # for 99 KB of shared memory
    is_large = decay == VECTOR and dtype == torch.float32 and width_k > 128
    is_small = decay != VECTOR and dtype != torch.float32 and width_k <= 128
    tile = min(width(V), max(16, (TILE if dtype == torch.float32 else 2 * TILE) // width_k))
    C = 32
    if is_large:
        C = 16
    elif is_small:
        C = 64
    meta = Meta(H, HV, K, V, C=C, BK=width_k, BV=tile, DECAY=decay, PRECISION=precision(dtype))
    return Constants(meta, {"num_warps": 8, "num_stages": 2})


def scan_meta(HV: int, K: int, V: int) -> Meta:
    """What `scan_kernel` is compiled for."""
    width_k = triton.next_power_of_2(K)
    width_v = triton.next_power_of_2(V)
    return Meta(HV, HV, K, V, BK=min(width_k, max(1, 1024 // width_v)), BV=width_v)


def boundary_states(
    segments: Segments,
    rows: Rows,
    S: Tensor,
    z: Tensor | None,
    *,
    scale: float = 1.0,
    backwards: bool = False,
) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
    """States of linear attention before each segment and after all, or gradients of states after each and before all.

    Args:
        segments: M segments of N sequences.
        rows: k, v, g and for the normaliser beta, None for ones; for gradients q and the gradients of outputs instead.
        S: the state before each sequence, or the gradient after it, [N, HV, K, V].
        z: the same of the normaliser [N, HV, K], or None.
        scale: factor of products of keys and values.
        backwards: whether to compute gradients.

    Returns:
        [M, HV, K, V], and [M, HV, K] or None; then [N, HV, K, V], and [N, HV, K] or None.
    """
    M = segments.number
    _, HV, K, V = S.shape
    own = S.new_empty(M, HV, K, V)
    own_z = None if z is None else S.new_empty(M, HV, K)
    kind = decay_kind(rows.g)
    decay = S.new_empty(M, HV, K) if kind else None
    meta, options = sum_constants(rows.k.shape[2], HV, K, V, kind, rows.k.dtype)
    meta = meta._replace(NORMALIZE=z is not None, BACKWARDS=backwards)
    call = Call(segments.bounds, tokens_of_sequences(rows.k, own), scale)
    launcher(sum_kernel, (M * HV * triton.cdiv(V, meta.BV),))(
        rows._replace(q=None), own, own_z, decay, call, meta=meta, **options
    )
    states, final = _scan(own, decay, S, segments, backwards)
    if z is None or own_z is None:
        return (states, None), (final, None)
    of_z = _scan(own_z[..., None], decay, z[..., None], segments, backwards)
    return (states, of_z[0][..., 0]), (final, of_z[1][..., 0])


def _scan(
    own: Tensor, decay: Tensor | None, state: Tensor, segments: Segments, backwards: bool
) -> tuple[Tensor, Tensor]:
    N, HV, K, V = state.shape
    states = torch.empty_like(own)
    final = torch.empty_like(state)
    meta = scan_meta(HV, K, V)._replace(BACKWARDS=backwards)
    call = Call(segments.first, own.shape[0] // N)
    launcher(scan_kernel, (N * HV * triton.cdiv(K, meta.BK),))(
        own, decay, state, states, final, call, meta=meta, **SCAN
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
    states = torch.empty_like(own)
    final = torch.empty_like(state)
    meta = Meta(HV, HV, K, V, BK=width(K), BV=16, BACKWARDS=backwards)
    launcher(matrix_scan_kernel, (N * HV * triton.cdiv(V, meta.BV),))(
        own,
        transition,
        state,
        states,
        final,
        Call(segments.first, own.shape[0] // N),
        meta=meta,
        **SCAN,
    )
    return states, final
