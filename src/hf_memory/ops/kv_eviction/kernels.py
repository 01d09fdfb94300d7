"""Kernels of kept tokens: one program for each head decides block by block which entries stay; then all blocks are read
at once, by a program for each head and block. A block sees the entries that are held, in their order, and then its own,
some of which are a tile."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_memory.ops.kv_eviction.policies import LEAST_REST
from hf_memory.ops.triton.launch import contiguous, launcher, precision, width

_LEAST_REST = tl.constexpr(LEAST_REST)
_LEAST = tl.constexpr(-3e38)  # below all scores
# numbers of a tile of entries for each warp, and of one of queries, by bytes of a number: what fits in registers
ENTRIES = {2: 1024, 4: 512}
QUERIES = {2: 8192, 4: 2048}
ATTENDING = {"num_warps": 4, "num_stages": 1}
DECIDING = {"num_warps": 8, "num_stages": 1}  # since there are few programs


class Meta(NamedTuple):
    """What is known when kernels are compiled."""

    H: int  # heads of keys
    G: int  # queries of each
    D: int
    C: int  # tokens of a block
    STAY: int
    ALL: int  # the width of all entries
    BM: int  # tile sizes, of entries, channels, and rows, which are queries
    BD: int
    BR: int
    SOFTCAP: bool
    PRECISION: str
    FIRST: int = 0
    WINDOW: int = 0
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
def _scores(given, queries, keys, meta: tl.constexpr):
    """Scores [rows, entries] with the soft cap."""
    s = given.scale * tl.dot(queries, tl.trans(keys), input_precision=meta.PRECISION)
    if meta.SOFTCAP:
        s = given.softcap * (2 * tl.sigmoid(2 * s / given.softcap) - 1)
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
def _entries_of(given, row, n, i, meta: tl.constexpr):
    """Places of the entries i of those that the queries of a block see, and the numbers of their tokens."""
    places = given.places + (row * (given.blocks + 1) + n) * meta.STAY
    at = tl.where(i < meta.STAY, tl.load(places + i, mask=i < meta.STAY, other=0), n * meta.C + i)
    number = given.number + row * (meta.STAY + given.blocks * meta.C)
    return at, tl.load(number + at, mask=i < meta.STAY + meta.C, other=0)


@triton.jit
def _read(given, row, n, queries, place, needs_outputs: tl.constexpr, meta: tl.constexpr):
    """Of queries of a block the largest score, and sums of exponentials below it and of values weighted by them."""
    D: tl.constexpr = meta.D
    entries = row * (meta.STAY + given.blocks * meta.C)
    c = tl.arange(0, meta.BD)
    most = tl.full([meta.BR], _LEAST, tl.float32)
    total = tl.zeros([meta.BR], tl.float32)
    o = tl.zeros([meta.BR, meta.BD], tl.float32)
    for first in range(0, meta.STAY + meta.C, meta.BM):
        i = first + tl.arange(0, meta.BM)
        at, token = _entries_of(given, row, n, i, meta)
        is_entry = i < meta.STAY + meta.C
        s = _scores(given, queries, _tile_rows(given.k + entries * D, at, c, D, is_entry), meta)
        s = tl.where(_seen(token, i, place, meta), s, float("-inf"))
        before = most
        most = tl.maximum(before, tl.max(s, 1))
        remains = tl.exp(before - most)
        p = tl.exp(s - most[:, None])
        total = remains * total + tl.sum(p, 1)
        if needs_outputs:
            values = _tile_rows(given.v + entries * D, at, c, D, is_entry)
            p = tl.cast(p, values.dtype)
            o = remains[:, None] * o + tl.dot(p, values, input_precision=meta.PRECISION)
    return most, total, o


@triton.jit
def _changes(p, o, v, meta: tl.constexpr):
    """[rows, entries], how far outputs o of queries with weights p move without an entry, in squares.

    See `change_of_output` in policies.py, which says why.
    """
    # of one entry at most, which the output is near to; a sum of one term is exact
    is_near = p > 0.5
    value = tl.dot(tl.cast(is_near, v.dtype), v, input_precision=meta.PRECISION)
    difference = tl.cast(o, tl.float32) - value
    nearest = tl.sum(difference * difference, 1)
    products = tl.dot(o, tl.trans(v), input_precision=meta.PRECISION)
    o = tl.cast(o, tl.float32)
    v = tl.cast(v, tl.float32)
    distances = tl.sum(o * o, 1)[:, None] - 2 * products + tl.sum(v * v, 1)[None, :]
    distances = tl.where(is_near, nearest[:, None], distances)
    odds = p / tl.maximum(1 - p, _LEAST_REST)
    return odds * odds * tl.maximum(distances, 0.0)


@triton.jit
def _best(value, count: tl.constexpr):
    """Which elements are the `count` largest, of equal ones the first; the count-th is found bit by bit."""
    bits = tl.cast(value, tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of floats
    least = tl.where(tl.sum(tl.cast(order >= 0, tl.int32), 0) >= count, 0, -0x80000000)
    for n in range(31):
        larger = least + (1 << (30 - n))
        least = tl.where(tl.sum(tl.cast(order >= larger, tl.int32), 0) >= count, larger, least)
    is_better = order > least
    is_equal = tl.cast(order == least, tl.int32)
    rest = count - tl.sum(tl.cast(is_better, tl.int32), 0)
    return is_better | ((is_equal > 0) & (tl.cumsum(is_equal, 0) <= rest))


@triton.jit
def _decide_kernel(given, score, worth, decay, meta: tl.constexpr):
    """Places of the entries before each block, and what they are worth: a moving average of what a policy says.

    Some queries of a block at a time read all entries, and then add to what each is worth, which is kept in `worth`.
    """
    D: tl.constexpr = meta.D
    C: tl.constexpr = meta.C
    STAY: tl.constexpr = meta.STAY
    row = tl.cast(tl.program_id(0), tl.int64)
    e = tl.arange(0, meta.ALL)
    c = tl.arange(0, meta.BD)
    is_held = e < STAY
    is_any = e < STAY + C
    is_older = e < STAY + C - meta.WINDOW
    tokens = given.blocks * C
    entries = row * (STAY + tokens)
    number = given.number + entries
    score = score + row * STAY
    worth = worth + row * (STAY + C)
    places = given.places + row * (given.blocks + 1) * STAY
    tl.store(places + e, e, mask=is_held)
    for n in range(given.blocks):
        tl.debug_barrier()  # what the last round has stored is there
        block = tl.cast(n, tl.int64)
        start = block * C
        tl.store(worth + e, decay * tl.load(score + e, mask=is_held, other=0.0), mask=is_any)
        tl.debug_barrier()  # `worth` is there, and then sums are
        for part in range((C * meta.G + meta.BR - 1) // meta.BR):
            place, at_query, is_query = _queries(row, start, part, tokens, meta)
            queries = _tile_rows(given.q, at_query, c, D, is_query)
            most, total, o = _read(given, row, block, queries, place, meta.BY_CHANGE, meta)
            share = tl.where(is_query, 1 / total, 0.0)
            o = tl.cast(share[:, None] * o, given.v.dtype.element_ty)
            for first in range(0, STAY + C, meta.BM):
                i = first + tl.arange(0, meta.BM)
                is_entry = i < STAY + C
                at, token = _entries_of(given, row, block, i, meta)
                keys = _tile_rows(given.k + entries * D, at, c, D, is_entry)
                s = _scores(given, queries, keys, meta)
                is_seen = _seen(token, i, place, meta)
                p = tl.where(is_seen, share[:, None] * tl.exp(s - most[:, None]), 0.0)
                if meta.BY_CHANGE:
                    values = _tile_rows(given.v + entries * D, at, c, D, is_entry)
                    p = _changes(p, o, values, meta)
                tl.atomic_add(worth + i, tl.sum(p, 0), mask=is_entry, sem="relaxed")
        tl.debug_barrier()
        u = tl.load(worth + e, mask=is_any, other=0.0)
        at, token = _entries_of(given, row, block, e, meta)
        value = tl.where(token == 0, -1.0, tl.where(token <= meta.FIRST, float("inf"), u))
        value = tl.where(is_older, value, float("-inf"))
        stays = tl.where(is_older, _best(value, STAY - meta.WINDOW), is_any)
        is_full = tl.load(number + STAY + start + C - 1) > 0  # else all that are held stay
        stays = tl.where(is_full, stays, is_held)
        to = tl.cumsum(tl.cast(stays, tl.int32), 0) - 1
        u = tl.where(is_full, u, tl.load(score + e, mask=is_held, other=0.0))
        tl.debug_barrier()  # all have read what is replaced
        tl.store(score + to, u, mask=stays)
        tl.store(places + (block + 1) * STAY + to, tl.cast(at, tl.int32), mask=stays)


@triton.jit
def _attend_kernel(given, outputs, meta: tl.constexpr):
    """Attention of queries of a block."""
    D: tl.constexpr = meta.D
    row = tl.cast(tl.program_id(0), tl.int64)
    n = tl.cast(tl.program_id(1), tl.int64)
    c = tl.arange(0, meta.BD)
    place, at_query, is_query = _queries(
        row, n * meta.C, tl.program_id(2), given.blocks * meta.C, meta
    )
    queries = _tile_rows(given.q, at_query, c, D, is_query)
    most, total, o = _read(given, row, n, queries, place, True, meta)
    tl.store(outputs.mass + at_query, most + tl.log(total), mask=is_query)
    o = tl.cast(o / total[:, None], outputs.o.dtype.element_ty)
    where = at_query[:, None] * D + c[None, :]
    tl.store(outputs.o + where, o, mask=is_query[:, None] & (c < D)[None, :])


@triton.jit
def _gradients_kernel(given, outputs, gradients, dq, dk, dv, meta: tl.constexpr):
    """Gradients of queries of a block, and sums of those of keys and values."""
    D: tl.constexpr = meta.D
    row = tl.cast(tl.program_id(0), tl.int64)
    n = tl.cast(tl.program_id(1), tl.int64)
    c = tl.arange(0, meta.BD)
    entries = row * (meta.STAY + given.blocks * meta.C)
    place, at_query, is_query = _queries(
        row, n * meta.C, tl.program_id(2), given.blocks * meta.C, meta
    )
    queries = _tile_rows(given.q, at_query, c, D, is_query)
    do = _tile_rows(gradients.o, at_query, c, D, is_query)
    o = _tile_rows(outputs.o, at_query, c, D, is_query)
    sums = tl.sum(tl.cast(do, tl.float32) * tl.cast(o, tl.float32), 1)
    sums -= tl.load(gradients.mass + at_query, mask=is_query, other=0.0)
    mass = tl.load(outputs.mass + at_query, mask=is_query, other=0.0)
    of_queries = tl.zeros([meta.BR, meta.BD], tl.float32)
    for first in range(0, meta.STAY + meta.C, meta.BM):
        i = first + tl.arange(0, meta.BM)
        at, token = _entries_of(given, row, n, i, meta)
        is_entry = i < meta.STAY + meta.C
        keys = _tile_rows(given.k + entries * D, at, c, D, is_entry)
        s = _scores(given, queries, keys, meta)
        is_seen = _seen(token, i, place, meta) & is_query[:, None]
        p = tl.where(is_seen, tl.exp(s - mass[:, None]), 0.0)
        values = _tile_rows(given.v + entries * D, at, c, D, is_entry)
        dp = tl.dot(do, tl.trans(values), input_precision=meta.PRECISION)
        ds = given.scale * p * (dp - sums[:, None])
        if meta.SOFTCAP:
            ds *= 1 - (s / given.softcap) * (s / given.softcap)
        p = tl.cast(p, do.dtype)
        ds = tl.cast(ds, queries.dtype)
        is_number = is_entry[:, None] & (c < D)[None, :]
        sum_at = (entries + at)[:, None] * D + c[None, :]
        of_values = tl.dot(tl.trans(p), do, input_precision=meta.PRECISION)
        tl.atomic_add(dv + sum_at, of_values, mask=is_number, sem="relaxed")
        of_keys = tl.dot(tl.trans(ds), queries, input_precision=meta.PRECISION)
        tl.atomic_add(dk + sum_at, of_keys, mask=is_number, sem="relaxed")
        of_queries += tl.dot(ds, keys, input_precision=meta.PRECISION)
    where = at_query[:, None] * D + c[None, :]
    of_queries = tl.cast(of_queries, dq.dtype.element_ty)
    tl.store(dq + where, of_queries, mask=is_query[:, None] & (c < D)[None, :])


def _meta(q: Tensor, k: Tensor, block: int, stay: int, softcap: float, warps: int) -> Meta:
    _, H, _, D = k.shape
    G = q.shape[2] // H
    BD = width(D)
    size = k.element_size()
    BM = max(16, ENTRIES[size] * warps // max(64, BD))
    BR = max(16, min(64, QUERIES[size] // max(64, BD), width(block * G)))
    tiles = width(stay + block), BM, BD, BR
    return Meta(H, G, D, block, stay, *tiles, softcap != 0, precision(k.dtype))


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
    worth = score.new_empty(B, H, entries - T + block)
    meta = _meta(q, k, block, entries - T, softcap, DECIDING["num_warps"])
    meta = meta._replace(FIRST=first, WINDOW=window, BY_CHANGE=by_change)
    launcher(_decide_kernel, (B * H,))(given, score, worth, decay, meta=meta, **DECIDING)
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
    given, meta, parts = _given(q, k, v, number, places, scale, softcap)
    outputs = Outputs(torch.empty_like(given.q), q.new_empty(q.shape[:3], dtype=torch.float32))
    launcher(_attend_kernel, (len(q) * meta.H, given.blocks, parts))(
        given, outputs, meta=meta, **ATTENDING
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
    given, meta, parts = _given(q, k, v, number, places, scale, softcap)
    outputs = Outputs(o, mass)
    gradients = Outputs(*contiguous(do, dmass))
    dq = torch.empty_like(given.q)
    dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (given.k, given.k))
    programs = len(q) * meta.H, given.blocks, parts
    launcher(_gradients_kernel, programs)(
        given, outputs, gradients, dq, dk, dv, meta=meta, **ATTENDING
    )
    return dq, dk.to(k.dtype), dv.to(v.dtype)


@_backward.register_fake
def _(q, k, v, number, places, o, mass, do, dmass, scale, softcap):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _given(
    q: Tensor, k: Tensor, v: Tensor, number: Tensor, places: Tensor, scale: float, softcap: float
) -> tuple[Given, Meta, int]:
    """What kernels of attention read, how they are compiled, and the parts of a block that programs take."""
    blocks = places.shape[2] - 1
    stay = places.shape[3]
    meta = _meta(q, k, q.shape[1] // blocks, stay, softcap, ATTENDING["num_warps"])
    q, k, v, number, places = contiguous(q, k, v, number, places)
    given = Given(q, k, v, number, places, blocks, scale, softcap)
    return given, meta, triton.cdiv(meta.C * meta.G, meta.BR)


def _save(ctx, inputs, output):
    *tensors, ctx.scale, ctx.softcap = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx, do, dmass):
    return *_backward(*ctx.saved_tensors, do, dmass, ctx.scale, ctx.softcap), None, None, None, None


retained_attention.register_autograd(_gradients, setup_context=_save)
