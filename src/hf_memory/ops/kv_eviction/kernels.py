"""Kernels of kept tokens: one program for each head decides block by block which entries stay; then all blocks are read
at once, by a program for each head and block. Its tile has the entries that are held, in their order, and then those of
the block."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_memory.ops.kv_eviction.policies import LEAST_REST
from hf_memory.ops.triton.launch import contiguous, launcher, precision, width

_LEAST_REST = tl.constexpr(LEAST_REST)
ROWS = 32
CHANNELS = 64  # queries that are scored at once, and channels of a tile
VALUE_CHANNELS = tl.constexpr(32)  # of a tile of values, where outputs are needed to decide


class Meta(NamedTuple):
    """What is known when kernels are compiled."""

    H: int  # heads of keys
    G: int  # queries of each
    D: int
    C: int  # tokens of a block
    STAY: int
    FIRST: int
    WINDOW: int
    BM: int  # tile sizes, of entries, all channels, channels in turn, and rows
    BD: int
    BC: int
    BR: int
    SOFTCAP: bool
    PRECISION: str
    # whether entries are worth what outputs change without them, else what they receive
    BY_CHANGE: bool = False


class Given(NamedTuple):
    """What is read; entries are those that are held at first, and new tokens."""

    q: Tensor  # [B, T, H * G, D]
    k: Tensor  # [B, H, STAY + T, D]
    v: Tensor  # [B, H, STAY + T, D]
    number: Tensor  # [B, H, STAY + T]
    places: Tensor  # [B, H, blocks + 1, STAY]
    blocks: int
    scale: float
    softcap: float


class Outputs(NamedTuple):
    """What a kernel gives, or its gradients."""

    o: Tensor  # [B, T, H * G, D]
    mass: Tensor  # [B, T, H * G] float32, the logarithm


@triton.jit
def _tile_rows(x, at, channel, D: tl.constexpr, is_row):
    """Rows `at` of x [n, D], zeros elsewhere."""
    return tl.load(
        x + at[:, None] * D + channel[None, :],
        mask=is_row[:, None] & (channel < D)[None, :],
        other=0.0,
    )


@triton.jit
def _capped(s, softcap, meta: tl.constexpr):
    """Scores with the soft cap."""
    if meta.SOFTCAP:
        s = softcap * (2 * tl.sigmoid(2 * s / softcap) - 1)
    return s


@triton.jit
def _seen(token, i, place, meta: tl.constexpr):
    """[rows, entries], whether a query at a place of the block sees an entry of the tile."""
    exists = (i < meta.STAY + meta.C) & ((token > 0) | (i >= meta.STAY))
    return exists[None, :] & (i[None, :] - meta.STAY <= place[:, None])


@triton.jit
def _queries(row, start, part, tokens, meta: tl.constexpr):
    """Some queries of a block that begins at `start`: their places in it and in q, and which of them exist."""
    query = part * meta.BR + tl.arange(0, meta.BR)
    place = query // meta.G
    at = (
        (row // meta.H * tokens + start + place) * (meta.H * meta.G)
        + row % meta.H * meta.G
        + query % meta.G
    )
    return place, at, query < meta.C * meta.G


@triton.jit
def _entries_of(given, row, n, meta: tl.constexpr):
    """Places of the entries that the queries of a block see, and the numbers of their tokens."""
    i = tl.arange(0, meta.BM)
    places = given.places + (row * (given.blocks + 1) + n) * meta.STAY
    at = tl.where(i < meta.STAY, tl.load(places + i, mask=i < meta.STAY, other=0), n * meta.C + i)
    number = given.number + row * (meta.STAY + given.blocks * meta.C)
    return at, tl.load(number + at, mask=i < meta.STAY + meta.C, other=0)


@triton.jit
def _changes(p, values, at, is_entry, meta: tl.constexpr):
    """[rows, entries], how far outputs of queries with weights p move without an entry, in squares.

    See `change_of_output` in policies.py, which says why.
    """
    products = tl.zeros([meta.BR, meta.BM], tl.float32)
    of_outputs = tl.zeros([meta.BR], tl.float32)
    of_values = tl.zeros([meta.BM], tl.float32)
    for first in range(0, meta.BD, VALUE_CHANNELS):
        c = first + tl.arange(0, VALUE_CHANNELS)
        v = _tile_rows(values, at, c, meta.D, is_entry)
        o = tl.dot(tl.cast(p, v.dtype), v, input_precision=meta.PRECISION)
        o = tl.cast(o, v.dtype)
        products += tl.dot(o, tl.trans(v), input_precision=meta.PRECISION)
        o = tl.cast(o, tl.float32)
        v = tl.cast(v, tl.float32)
        of_outputs += tl.sum(o * o, 1)
        of_values += tl.sum(v * v, 1)
    distances = of_outputs[:, None] - 2 * products + of_values[None, :]
    odds = p / tl.maximum(1 - p, _LEAST_REST)
    return odds * odds * tl.maximum(distances, 0.0)


@triton.jit
def _decide_kernel(given, score, decay, meta: tl.constexpr):
    """Places of the entries before each block, and what they are worth: a moving average of what a policy says."""
    D: tl.constexpr = meta.D
    C: tl.constexpr = meta.C
    STAY: tl.constexpr = meta.STAY
    row = tl.cast(tl.program_id(0), tl.int64)
    i = tl.arange(0, meta.BM)
    d = tl.arange(0, meta.BD)
    is_held = i < STAY
    is_entry = i < STAY + C
    is_older = i < STAY + C - meta.WINDOW
    tokens = given.blocks * C
    entries = row * (STAY + given.blocks * C)
    number = given.number + entries
    score = score + row * STAY
    places = given.places + row * (given.blocks + 1) * STAY
    tl.store(places + i, i, mask=is_held)
    for n in range(given.blocks):
        tl.debug_barrier()  # what the last round has stored is there
        block = tl.cast(n, tl.int64)
        start = block * C
        at, token = _entries_of(given, row, block, meta)
        before = tl.load(score + i, mask=is_held, other=0.0)
        u = decay * before
        parts = (meta.C * meta.G + meta.BR - 1) // meta.BR
        for part in tl.range(parts, disable_licm=meta.BY_CHANGE):
            if meta.BY_CHANGE:
                # Else Triton 3.6 loads keys and values before the loop, and shared memory has no room for both.
                tl.debug_barrier()
            keys = _tile_rows(given.k + entries * D, at, d, D, is_entry)
            place, at_query, is_query = _queries(row, start, part, tokens, meta)
            queries = _tile_rows(given.q, at_query, d, D, is_query)
            s = given.scale * tl.dot(queries, tl.trans(keys), input_precision=meta.PRECISION)
            s = tl.where(
                _seen(token, i, place, meta), _capped(s, given.softcap, meta), float("-inf")
            )
            p = tl.exp(s - tl.max(s, 1)[:, None])
            counts = tl.where(is_query, 1 / tl.sum(p, 1), 0.0)
            p *= counts[:, None]
            if meta.BY_CHANGE:
                p = _changes(p, given.v + entries * D, at, is_entry, meta)
            u += tl.sum(p, 0)
        value = tl.where(token == 0, -1.0, tl.where(token <= meta.FIRST, float("inf"), u))
        value = tl.where(is_older, value, float("-inf"))
        is_before = i[None, :] < i[:, None]
        precedes = (value[None, :] > value[:, None]) | (
            (value[None, :] == value[:, None]) & is_before
        )
        rank = tl.sum(tl.cast(precedes, tl.int32), 1)
        stays = tl.where(is_older, rank < STAY - meta.WINDOW, is_entry)
        is_full = tl.load(number + STAY + start + C - 1) > 0  # else all that are held stay
        stays = tl.where(is_full, stays, is_held)
        to = tl.cumsum(tl.cast(stays, tl.int32), 0) - 1
        u = tl.where(is_full, u, before)
        tl.debug_barrier()  # all have read what is replaced
        tl.store(score + to, u, mask=stays)
        tl.store(places + (block + 1) * STAY + to, tl.cast(at, tl.int32), mask=stays)


@triton.jit
def _attend_kernel(given, outputs, meta: tl.constexpr):
    """Attention of the queries of a block."""
    D: tl.constexpr = meta.D
    row = tl.cast(tl.program_id(0), tl.int64)
    n = tl.cast(tl.program_id(1), tl.int64)
    i = tl.arange(0, meta.BM)
    is_entry = i < meta.STAY + meta.C
    tokens = given.blocks * meta.C
    entries = row * (meta.STAY + tokens)
    at, token = _entries_of(given, row, n, meta)
    for part in range((meta.C * meta.G + meta.BR - 1) // meta.BR):
        place, at_query, is_query = _queries(row, n * meta.C, part, tokens, meta)
        s = tl.zeros([meta.BR, meta.BM], tl.float32)
        for first in tl.static_range(0, meta.BD, meta.BC):
            c = first + tl.arange(0, meta.BC)
            keys = _tile_rows(given.k + entries * D, at, c, D, is_entry)
            s += tl.dot(
                _tile_rows(given.q, at_query, c, D, is_query),
                tl.trans(keys),
                input_precision=meta.PRECISION,
            )
        s = _capped(given.scale * s, given.softcap, meta)
        s = tl.where(_seen(token, i, place, meta), s, float("-inf"))
        most = tl.max(s, 1)
        p = tl.exp(s - most[:, None])
        total = tl.sum(p, 1)
        tl.store(outputs.mass + at_query, most + tl.log(total), mask=is_query)
        p = tl.cast(p / total[:, None], given.v.dtype.element_ty)
        for first in tl.static_range(0, meta.BD, meta.BC):
            c = first + tl.arange(0, meta.BC)
            values = _tile_rows(given.v + entries * D, at, c, D, is_entry)
            o = tl.cast(
                tl.dot(p, values, input_precision=meta.PRECISION), outputs.o.dtype.element_ty
            )
            where = at_query[:, None] * D + c[None, :]
            tl.store(outputs.o + where, o, mask=is_query[:, None] & (c < D)[None, :])


@triton.jit
def _gradients_kernel(given, outputs, gradients, dq, dk, dv, meta: tl.constexpr):
    """Gradients of queries, and sums of those of keys and values."""
    D: tl.constexpr = meta.D
    row = tl.cast(tl.program_id(0), tl.int64)
    n = tl.cast(tl.program_id(1), tl.int64)
    i = tl.arange(0, meta.BM)
    is_entry = i < meta.STAY + meta.C
    tokens = given.blocks * meta.C
    entries = row * (meta.STAY + tokens)
    at, token = _entries_of(given, row, n, meta)
    for part in range((meta.C * meta.G + meta.BR - 1) // meta.BR):
        place, at_query, is_query = _queries(row, n * meta.C, part, tokens, meta)
        sums = -tl.load(gradients.mass + at_query, mask=is_query, other=0.0)
        s = tl.zeros([meta.BR, meta.BM], tl.float32)
        dp = tl.zeros([meta.BR, meta.BM], tl.float32)
        for first in tl.static_range(0, meta.BD, meta.BC):
            c = first + tl.arange(0, meta.BC)
            keys = _tile_rows(given.k + entries * D, at, c, D, is_entry)
            s += tl.dot(
                _tile_rows(given.q, at_query, c, D, is_query),
                tl.trans(keys),
                input_precision=meta.PRECISION,
            )
            values = _tile_rows(given.v + entries * D, at, c, D, is_entry)
            do = _tile_rows(gradients.o, at_query, c, D, is_query)
            dp += tl.dot(do, tl.trans(values), input_precision=meta.PRECISION)
            o = _tile_rows(outputs.o, at_query, c, D, is_query)
            sums += tl.sum(tl.cast(do, tl.float32) * tl.cast(o, tl.float32), 1)
        s = _capped(given.scale * s, given.softcap, meta)
        is_seen = _seen(token, i, place, meta) & is_query[:, None]
        mass = tl.load(outputs.mass + at_query, mask=is_query, other=0.0)
        p = tl.where(is_seen, tl.exp(s - mass[:, None]), 0.0)
        ds = given.scale * p * (dp - sums[:, None])
        if meta.SOFTCAP:
            ds *= 1 - (s / given.softcap) * (s / given.softcap)
        p = tl.cast(p, given.k.dtype.element_ty)
        ds = tl.cast(ds, given.k.dtype.element_ty)
        for first in tl.static_range(0, meta.BD, meta.BC):
            c = first + tl.arange(0, meta.BC)
            is_number = is_entry[:, None] & (c < D)[None, :]
            sum_at = (entries + at)[:, None] * D + c[None, :]
            queries = _tile_rows(given.q, at_query, c, D, is_query)
            of_keys = tl.dot(tl.trans(ds), queries, input_precision=meta.PRECISION)
            tl.atomic_add(dk + sum_at, of_keys, mask=is_number, sem="relaxed")
            do = _tile_rows(gradients.o, at_query, c, D, is_query)
            of_values = tl.dot(tl.trans(p), do, input_precision=meta.PRECISION)
            tl.atomic_add(dv + sum_at, of_values, mask=is_number, sem="relaxed")
            keys = _tile_rows(given.k + entries * D, at, c, D, is_entry)
            of_queries = tl.cast(
                tl.dot(ds, keys, input_precision=meta.PRECISION), dq.dtype.element_ty
            )
            where = at_query[:, None] * D + c[None, :]
            tl.store(dq + where, of_queries, mask=is_query[:, None] & (c < D)[None, :])


def _meta(
    q: Tensor, k: Tensor, block: int, stay: int, first: int = 0, window: int = 0, softcap: float = 0
) -> Meta:
    _, H, _, D = k.shape
    G = q.shape[2] // k.shape[1]
    tiles = width(stay + block), width(D), min(CHANNELS, width(D)), min(ROWS, width(block * G))
    return Meta(H, G, D, block, stay, first, window, *tiles, softcap != 0, precision(k.dtype))


@torch.library.custom_op("hf_memory::retained_places", mutates_args=())
def retained_places(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    number: Tensor,
    score: Tensor,
    block: int,
    first: int,
    window: int,
    decay: float,
    scale: float,
    softcap: float,
    by_change: bool,
) -> tuple[Tensor, Tensor]:
    """Places [B, H, blocks + 1, stay] and what entries are worth [B, H, stay], see the package; no cap is 0.

    This is the change of outputs without an entry, or the attention that it receives.
    """
    B, T = q.shape[:2]
    H, entries = k.shape[1:3]
    q, k, v, number = contiguous(q, k, v, number)
    score = score.clone(memory_format=torch.contiguous_format)
    places = number.new_empty(B, H, T // block + 1, entries - T)
    given = Given(q, k, v, number, places, T // block, scale, softcap)
    meta = _meta(q, k, block, entries - T, first, window, softcap)
    if by_change:
        # weights, and products of outputs and values, of more rows would not fit in registers
        meta = meta._replace(BY_CHANGE=True, BR=min(16, meta.BR))
    launcher(_decide_kernel, (B * H,))(given, score, decay, meta=meta, num_warps=8, num_stages=1)
    return places, score


@retained_places.register_fake
def _(q, k, v, number, score, block, first, window, decay, scale, softcap, by_change):
    B, T = q.shape[:2]
    H, entries = k.shape[1:3]
    return number.new_empty(B, H, T // block + 1, entries - T), torch.empty_like(score)


@torch.library.custom_op("hf_memory::retained_attention", mutates_args=())
def retained_attention(
    q: Tensor, k: Tensor, v: Tensor, number: Tensor, places: Tensor, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Outputs [B, T, HQ, D], and the logarithm of the mass [B, T, HQ] in float32."""
    given, meta = _given(q, k, v, number, places, scale, softcap)
    outputs = Outputs(torch.empty_like(given.q), q.new_empty(q.shape[:3], dtype=torch.float32))
    launcher(_attend_kernel, (len(q) * meta.H, given.blocks))(
        given, outputs, meta=meta, num_warps=8, num_stages=1
    )
    return outputs


@retained_attention.register_fake
def _(q, k, v, number, places, scale, softcap):
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("hf_memory::retained_attention_backward", mutates_args=())
def _backward(
    q: Tensor, k: Tensor, v: Tensor, number: Tensor, places: Tensor, o: Tensor, mass: Tensor, do: Tensor, dmass: Tensor,
    scale: float, softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v."""
    given, meta = _given(q, k, v, number, places, scale, softcap)
    outputs = Outputs(o, mass)
    gradients = Outputs(*contiguous(do, dmass))
    dq = torch.empty_like(given.q)
    dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (given.k, given.k))
    programs = len(q) * meta.H, given.blocks
    meta = meta._replace(BR=min(16, meta.BR))
    launcher(_gradients_kernel, programs)(
        given, outputs, gradients, dq, dk, dv, meta=meta, num_warps=8, num_stages=1
    )
    return dq, dk.to(k.dtype), dv.to(v.dtype)


@_backward.register_fake
def _(q, k, v, number, places, o, mass, do, dmass, scale, softcap):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _given(
    q: Tensor, k: Tensor, v: Tensor, number: Tensor, places: Tensor, scale: float, softcap: float
) -> tuple[Given, Meta]:
    blocks = places.shape[2] - 1
    stay = places.shape[3]
    meta = _meta(q, k, q.shape[1] // blocks, stay, softcap=softcap)
    q, k, v, number, places = contiguous(q, k, v, number, places)
    return Given(q, k, v, number, places, blocks, scale, softcap), meta


def _save(ctx, inputs, output):
    *tensors, ctx.scale, ctx.softcap = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx, do, dmass):
    return *_backward(*ctx.saved_tensors, do, dmass, ctx.scale, ctx.softcap), None, None, None, None


retained_attention.register_autograd(_gradients, setup_context=_save)
