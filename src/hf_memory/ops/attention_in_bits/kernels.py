"""Attention of one token to packed rows: bytes become numbers in registers, tile by tile, with one softmax over tiles.

Several programs share the entries of a head if there are many; a second kernel joins what they found.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_memory.ops.bits import GROUP, packed_bytes
from hf_memory.ops.triton.launch import launcher, precision, width

TILE = 4096  # numbers of a tile of keys, half as many in float32: 32 for each thread of four warps
PROGRAMS = 512  # as many as a GPU runs at once, more or less
_GROUP = tl.constexpr(GROUP)


class Meta(NamedTuple):
    """What is known when kernels are compiled."""

    H: int = 0  # heads of keys
    G: int = 0  # queries of each
    D: int = 0
    KEY_BITS: int = 0
    VALUE_BITS: int = 0
    KEY_BYTES: int = 0  # of a packed row
    VALUE_BYTES: int = 0
    BR: int = 0  # tile sizes, of queries, entries, channels and parts
    BM: int = 0
    BD: int = 0
    BP: int = 0
    SOFTCAP: bool = False
    PRECISION: str = ""


class Given(NamedTuple):
    """What is read."""

    q: Any  # [B, H, G, D], rotated if keys are
    k: Any  # [B, H, S, KEY_BYTES] uint8, with any strides of whole rows
    v: Any  # [B, H, S, VALUE_BYTES] uint8
    visible: Any  # [B, H, S] uint8; None: all
    S: int
    span: int  # entries of a program, a multiple of BM
    scale: float
    softcap: float


class Strides(NamedTuple):
    """Distances in a tensor [B, H, S, ...]: in packed rows, or in numbers of what is visible."""

    batch: int = 0
    head: int = 0
    entry: int = 0


class Found(NamedTuple):
    """What is computed."""

    o: Any  # [B, H, G, D], or of each part [B, H, parts, G, D] in float32
    mass: Any  # [B, H, G] or [B, H, parts, G] float32, the logarithm


@triton.jit
def _tile(
    x,
    strides,
    batch,
    head,
    start,
    entry,
    is_entry,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
    meta: tl.constexpr,
):
    """Numbers [entries, channels] in float32 of packed rows; of no meaning beyond D and where `is_entry` is not."""
    first = batch * strides.batch + head * strides.head + start * strides.entry
    row = (first + entry * strides.entry) * BYTES
    numbers = tl.cast(x, tl.pointer_type(tl.bfloat16)) + row // 2
    if BITS == 8:
        d = tl.arange(0, meta.BD)
        scale = tl.load(numbers, mask=is_entry, other=0.0)
        is_code = is_entry[:, None] & (d < meta.D)[None, :]
        code = tl.load(x + row[:, None] + 2 + d[None, :], mask=is_code, other=0)
        signed = tl.cast(code, tl.int8, bitcast=True)
        return tl.cast(scale, tl.float32)[:, None] * tl.cast(signed, tl.float32)
    N: tl.constexpr = (meta.D + _GROUP - 1) // _GROUP
    HALF: tl.constexpr = (meta.D + 3) // 4 * 2  # channels from this one on are the upper bits
    group = tl.arange(0, meta.BD // _GROUP)
    is_group = is_entry[:, None] & (group < N)[None, :]
    of_groups = numbers[:, None] + group[None, :]
    scale = tl.load(of_groups, mask=is_group, other=0.0)
    least = tl.load(of_groups + N, mask=is_group, other=0.0)
    channel = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    is_code = is_entry[:, None, None] & (channel < meta.D)[None, :, :]
    codes = x + row[:, None, None] + 4 * N
    pair = tl.load(codes + (channel % HALF)[None, :, :], mask=is_code, other=0)
    code = tl.where((channel < HALF)[None, :, :], pair & 15, pair >> 4)
    number = tl.cast(scale, tl.float32)[:, :, None] * tl.cast(code, tl.float32)
    number += tl.cast(least, tl.float32)[:, :, None]
    return tl.reshape(number, [meta.BM, meta.BD])


@triton.jit
def _attend_kernel(given, of_keys, of_values, of_visible, found, meta: tl.constexpr):
    """Attention of the queries of a head to the entries of one part."""
    row = tl.cast(tl.program_id(0), tl.int64)
    batch = row // meta.H
    head = row % meta.H
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    g = tl.arange(0, meta.BR)
    d = tl.arange(0, meta.BD)
    i = tl.arange(0, meta.BM)
    is_number = (g < meta.G)[:, None] & (d < meta.D)[None, :]
    at = g[:, None] * meta.D + d[None, :]
    dtype: tl.constexpr = given.q.dtype.element_ty
    q = tl.load(given.q + row * meta.G * meta.D + at, mask=is_number, other=0.0)
    o = tl.zeros([meta.BR, meta.BD], tl.float32)
    most = tl.full([meta.BR], float("-inf"), tl.float32)
    total = tl.zeros([meta.BR], tl.float32)
    for step in range(part * given.span, min((part + 1) * given.span, given.S), meta.BM):
        start = tl.cast(step, tl.int64)
        is_entry = i < given.S - step
        is_seen = is_entry
        if given.visible is not None:
            first = batch * of_visible.batch + head * of_visible.head
            seen = given.visible + first + (start + i) * of_visible.entry
            is_seen = is_entry & (tl.load(seen, mask=is_entry, other=0) != 0)
        keys = _tile(
            given.k,
            of_keys,
            batch,
            head,
            start,
            i,
            is_entry,
            meta.KEY_BITS,
            meta.KEY_BYTES,
            meta,
        )
        s = given.scale * tl.dot(q, tl.trans(tl.cast(keys, dtype)), input_precision=meta.PRECISION)
        if meta.SOFTCAP:
            s = given.softcap * (2 * tl.sigmoid(2 * s / given.softcap) - 1)
        s = tl.where(is_seen[None, :], s, float("-inf"))
        new_most = tl.maximum(most, tl.max(s, 1))
        finite = tl.where(new_most == float("-inf"), 0.0, new_most)
        p = tl.exp(s - finite[:, None])
        factor = tl.exp(most - finite)
        total = factor * total + tl.sum(p, 1)
        values = _tile(
            given.v,
            of_values,
            batch,
            head,
            start,
            i,
            is_entry,
            meta.VALUE_BITS,
            meta.VALUE_BYTES,
            meta,
        )
        of_tile = tl.dot(tl.cast(p, dtype), tl.cast(values, dtype), input_precision=meta.PRECISION)
        o = factor[:, None] * o + of_tile
        most = new_most
    total = tl.where(total == 0, 1.0, total)  # of a query that sees nothing, whose mass is -inf
    o /= total[:, None]
    to_row = (row * parts + part) * meta.G
    to = found.o + to_row * meta.D + at
    tl.store(to, tl.cast(o, found.o.dtype.element_ty), mask=is_number)
    tl.store(found.mass + to_row + g, most + tl.log(total), mask=g < meta.G)


@triton.jit
def _join_kernel(found, joined, parts, meta: tl.constexpr):
    """The softmax over all parts of a query."""
    query = tl.cast(tl.program_id(0), tl.int64)
    part = tl.arange(0, meta.BP)
    d = tl.arange(0, meta.BD)
    row = (query // meta.G * parts + part) * meta.G + query % meta.G
    mass = tl.load(found.mass + row, mask=part < parts, other=float("-inf"))
    most = tl.max(mass, 0)
    p = tl.exp(mass - tl.where(most == float("-inf"), 0.0, most))
    total = tl.sum(p, 0)
    total = tl.where(total == 0, 1.0, total)
    is_number = (part < parts)[:, None] & (d < meta.D)[None, :]
    o = tl.load(found.o + row[:, None] * meta.D + d[None, :], mask=is_number, other=0.0)
    o = tl.sum(p[:, None] * o, 0) / total
    to = joined.o + query * meta.D + d
    tl.store(to, tl.cast(o, joined.o.dtype.element_ty), mask=d < meta.D)
    tl.store(joined.mass + query, most + tl.log(total))


@torch.library.custom_op("hf_memory::attention_in_bits", mutates_args=())
def attention_in_bits(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor | None,
    key_bits: int,
    value_bits: int,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Outputs [B, H, G, D], and their mass [B, H, G]; no cap is 0."""
    B, H, G, D = q.shape
    S = keys.shape[2]
    channels = max(GROUP, width(D))
    is_narrow = q.dtype.itemsize == 2
    tile = TILE if is_narrow else TILE // 2
    warps = 4 if is_narrow or channels <= 128 else 8
    meta = Meta(
        H,
        G,
        D,
        key_bits,
        value_bits,
        packed_bytes(D, key_bits),
        packed_bytes(D, value_bits),
        BR=width(G),
        BM=max(16, tile // channels),
        BD=channels,
        SOFTCAP=softcap != 0,
        PRECISION=precision(q.dtype),
    )
    span, parts = _parts(S, B * H, meta.BM)
    keys, of_keys = _rows(keys, meta.KEY_BYTES)
    values, of_values = _rows(values, meta.VALUE_BYTES)
    of_visible = Strides()
    if visible is not None:
        of_visible = Strides(*visible.stride())
        visible = visible.view(torch.uint8)
    o, mass = _results(q, keys, values, visible, key_bits, value_bits, scale, softcap)
    given = Given(q.contiguous(), keys, values, visible, S, span, scale, softcap)
    found = Found(o, mass)
    if parts > 1:
        o_of_parts = q.new_empty((B, H, parts, G, D), dtype=torch.float32)
        mass_of_parts = q.new_empty((B, H, parts, G), dtype=torch.float32)
        found = Found(o_of_parts, mass_of_parts)
    launcher(_attend_kernel, (B * H, parts))(
        given, of_keys, of_values, of_visible, found, meta=meta, num_warps=warps, num_stages=2
    )
    if parts > 1:
        meta = Meta(G=G, D=D, BD=channels, BP=triton.next_power_of_2(parts))
        launcher(_join_kernel, (B * H * G,))(found, Found(o, mass), parts, meta=meta, num_warps=4)
    return o, mass


@attention_in_bits.register_fake
def _results(q, keys, values, visible, key_bits, value_bits, scale, softcap):
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return o, q.new_empty(q.shape[:3], dtype=torch.float32)


def _parts(S: int, rows: int, tile: int) -> tuple[int, int]:
    """Entries of a program, and how many programs share the S entries of each head."""
    tiles = triton.cdiv(S, tile)
    parts = max(1, min(tiles // 4, PROGRAMS // rows))
    span = tile * triton.cdiv(tiles, parts)
    return span, triton.cdiv(S, span)


def _rows(x: Tensor, size: int) -> tuple[Tensor, Strides]:
    """Packed rows of so many bytes at distances of whole rows, and these distances."""
    *strides, last = x.stride()
    if last != 1 or any(n % size for n in strides):
        x = x.contiguous()
    return x, Strides(*(n // size for n in x.stride()[:-1]))
