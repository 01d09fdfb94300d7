"""Rows of numbers in 8 or 4 bits a number.

A row is the last dimension of a tensor, and is packed by itself, after an orthonormal Hadamard matrix, which spreads a
large number over many channels: what is packed does not depend on other rows. With 8 bits a row x has one scale s, in
bfloat16, and each of its numbers a code c from -127 to 127:

    c = round(x / s),   s = max |x| / 127,   x ~ s c

With 4 bits, groups of 32 channels have a scale s and a least number m, in bfloat16, and codes from 0 to 15, which is
nearer than one scale with more bits:

    c = round((x - m) / s),   m = min x,   s = (max x - m) / 15,   x ~ m + s c

So a number takes 8 bits and 2 bytes for its row, or 5 bits. A row with a number that is not finite has none that is.

A packed row is bytes: the scale or scales, the least numbers, and the codes. So packed rows are one tensor with the
same leading dimensions, and what moves, copies or selects rows does not need to know that they are packed.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.ops import cpu
from hf_memory.ops.cpu import GROUP
from hf_memory.ops.precision import without_autocast

BITS = (8, 4)
MOST = 127  # the largest code in 8 bits
SMALLEST = 2.0**-126  # a scale, so that none is zero
NAN_OF_SHORT = 0x7F80  # the bits of a bfloat16 that is not finite are at least these


def packed_bytes(channels: int, bits: int) -> int:
    """Bytes of a packed row of so many channels: an even number, since scales have two bytes."""
    of_bits = {8: 2 + channels + channels % 2, 4: 4 * _groups(channels) + _code_bytes(channels)}
    return of_bits[bits]


def pack(x: Tensor, bits: int) -> Tensor:
    """Pack rows x [..., D] of any floating dtype in `bits` (8 or 4): [..., packed_bytes(D, bits)] in uint8."""
    return without_autocast(_pack, x.detach() if x.requires_grad else x, bits)


def unpack(packed: Tensor, channels: int, bits: int, dtype: torch.dtype) -> Tensor:
    """The numbers [..., channels] of packed rows, computed in float32, or in float64 for this dtype."""
    return without_autocast(_unpack, packed, channels, bits, dtype)


def unpack_rotated(packed: Tensor, channels: int, bits: int, dtype: torch.dtype) -> Tensor:
    """The same numbers after the Hadamard matrix, as they were packed: products of two such rows are the same."""
    return without_autocast(_unpack_rotated, packed, channels, bits, dtype)


def scales(packed: Tensor, bits: int) -> Tensor:
    """The scale of packed rows [..., 1], or with 4 bits the scales and least numbers [..., 2 n] of n groups."""
    size = 2 if bits == 8 else 4 * -(-packed.shape[-1] // (4 + GROUP // 2))
    return _numbers_of(packed.narrow(-1, 0, size))


def codes(packed: Tensor, channels: int, bits: int) -> Tensor:
    """The codes [..., channels] of packed rows: of 8 bits in int8, of 4 in uint8."""
    return CODES[bits](packed, channels)


def rounded(x: Tensor, packed: Tensor, bits: int) -> Tensor:
    """The numbers that were packed from rows x [..., D]; the gradient is that of x, as if nothing were rounded."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _Rounded.apply(x, packed, bits)
    return unpack(packed, x.shape[-1], bits, x.dtype)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, bits: int) -> Tensor:
        return unpack(packed, x.shape[-1], bits, x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient, None, None


def hadamard(x: Tensor) -> Tensor:
    """Rows x [..., D] times orthonormal Hadamard matrices, one for each block of channels; the inverse of itself.

    Blocks have the largest power of two that divides D.
    """
    D = x.shape[-1]
    size = D & -D
    half = size // 2
    while half:
        first, second = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x = torch.stack([first + second, first - second], -2).flatten(-3)
        half //= 2
    return x * size**-0.5


def rotated(x: Tensor) -> Tensor:
    """The same as `hadamard`, as one product in the dtype of x, which is faster."""
    D = x.shape[-1]
    size = D & -D
    rotation = _matrix("rotation", size, x)
    if size == D:
        return x @ rotation
    return (x.unflatten(-1, (-1, size)) @ rotation).flatten(-2)


def group_matrix(channels: int, like: Tensor) -> Tensor:
    """The groups of channels, [groups, channels]: one where a channel is in a group, in the dtype of `like`."""
    return _matrix("groups", channels, like)


def _pack(x: Tensor, bits: int) -> Tensor:
    if cpu.takes_rows(x, bits):
        return cpu.pack(x, bits, packed_bytes(x.shape[-1], bits))
    # in float64, whose sums round to the same codes whatever their order
    return PACKING[bits](rotated(x.double()))


def _pack_row(x: Tensor) -> Tensor:
    largest = x.abs().amax(-1, keepdim=True)
    scale = largest.div_(MOST).clamp_(min=SMALLEST).to(torch.bfloat16)
    code = x.div_(scale).round_()  # at most MOST, since a scale is rounded by less than half a code
    if x.shape[-1] % 2:
        code = F.pad(code, (0, 1))
    return torch.cat([_bytes_of(scale), _unsigned(code)], -1)


def _pack_groups(x: Tensor) -> Tensor:
    D = x.shape[-1]
    groups = _grouped(x)
    least, greatest = torch.aminmax(groups, dim=-1, keepdim=True)
    least = least.to(torch.bfloat16)
    scale = greatest.sub_(least).div_(15).clamp_(min=SMALLEST).to(torch.bfloat16)
    each = (groups - least).div_(scale).round_().clamp_(0, 15).flatten(-2)
    if D % GROUP:
        each = F.pad(each[..., :D], (0, -D % 4))
    first, second = each.chunk(2, -1)
    both = torch.add(first, second, alpha=16)
    numbers = _bytes_of(torch.cat([scale, least], -2).flatten(-2))
    return torch.cat([numbers, both.to(torch.uint8)], -1)


# how a rotated row is packed, by the bits of a number
PACKING = {8: _pack_row, 4: _pack_groups}


def _codes_of_row(packed: Tensor, channels: int) -> Tensor:
    return _signed(packed.narrow(-1, 2, channels))


def _codes_of_groups(packed: Tensor, channels: int) -> Tensor:
    both = packed[..., 4 * _groups(channels) :]
    return torch.cat([both & 15, both >> 4], -1)[..., :channels]


CODES = {8: _codes_of_row, 4: _codes_of_groups}


def _unpack(packed: Tensor, D: int, bits: int, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(dtype, torch.float32)
    return rotated(_unpack_rotated(packed, D, bits, wide)).to(dtype)


def _unpack_rotated(packed: Tensor, D: int, bits: int, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(dtype, torch.float32)
    numbers = scales(packed, bits).contiguous().to(wide)  # of contiguous numbers this is faster
    return UNPACKING[bits](codes(packed, D, bits).to(wide), numbers).to(dtype)


def _unpack_row(each: Tensor, scale: Tensor) -> Tensor:
    return each.mul_(scale)


def _unpack_groups(each: Tensor, numbers: Tensor) -> Tensor:
    groups = group_matrix(each.shape[-1], numbers)
    # of each channel, faster than expanding
    scale, least = (x @ groups for x in numbers.chunk(2, -1))
    return torch.addcmul(least, each, scale)


UNPACKING = {8: _unpack_row, 4: _unpack_groups}


def _unsigned(code: Tensor) -> Tensor:
    """Codes from -127 to 127 as bytes, which hold them as int8 does."""
    if torch.compiler.is_exporting():
        return (code + 256 * (code < 0)).to(torch.uint8)
    return code.to(torch.int8).view(torch.uint8)


def _signed(x: Tensor) -> Tensor:
    """The inverse of `_unsigned`."""
    if torch.compiler.is_exporting():
        wide = x.to(torch.int16)
        return (wide - 256 * (wide > 127)).to(torch.int8)
    return x.view(torch.int8)


def _bytes_of(x: Tensor) -> Tensor:
    """The bytes [..., 2 n] of numbers [..., n] in bfloat16.

    In exported graphs they are computed, since other runtimes cannot view numbers as bytes: with its exponent e a
    number above zero is the integer 128 (e + 127) + 2^(7 - e) x - 128.
    """
    if not torch.compiler.is_exporting():
        return x.view(torch.uint8)
    size = x.float().abs()
    powers = _powers_of_two(size)
    # the number of powers that are not larger, without the first
    above = (size[..., None] >= powers[1:]).sum(-1)
    whole = 128 * (above + size / powers[above]) + 32768 * (x < 0)
    whole = torch.where(x.isfinite(), whole, NAN_OF_SHORT + 1)
    high = (whole / 256).floor()
    return torch.stack([whole - 256 * high, high], -1).flatten(-2).to(torch.uint8)


def _numbers_of(x: Tensor) -> Tensor:
    """The inverse of `_bytes_of`."""
    if not torch.compiler.is_exporting():
        return x.view(torch.bfloat16)
    low, high = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    is_negative = high >= 128
    whole = low + 256 * high - 32768 * is_negative
    above = ((whole / 128).floor() - 1).clamp(0, 253).long()
    size = (whole / 128 - above) * _powers_of_two(low)[above]
    size = torch.where(whole < NAN_OF_SHORT, size, torch.nan)
    return torch.where(is_negative, -size, size)


def _powers_of_two(like: Tensor) -> Tensor:
    """The powers of two [254] that are exponents of normal numbers in bfloat16."""
    return torch.tensor([2.0**i for i in range(-126, 128)], device=like.device)


def _matrix(kind: str, size: int, like: Tensor) -> Tensor:
    is_plain = type(like) is Tensor and not torch.compiler.is_compiling()
    make = _kept_matrix if is_plain else _new_matrix  # a matrix without data must not be kept
    return make(kind, size, like.dtype, like.device)


def _new_matrix(kind: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The Hadamard matrix of so many channels; or [groups, channels], one where a channel is in a group."""
    if kind == "rotation":
        return hadamard(torch.eye(size, dtype=dtype, device=device))
    groups = torch.eye(_groups(size), dtype=dtype, device=device)
    return groups.repeat_interleave(GROUP, 1)[:, :size].contiguous()


@lru_cache
def _kept_matrix(kind: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return _new_matrix(kind, size, dtype, device)


def _groups(channels: int) -> int:
    return -(-channels // GROUP)


def _code_bytes(channels: int) -> int:
    return -(-channels // 4) * 2


def _grouped(x: Tensor) -> Tensor:
    """Rows [..., D] as groups [..., n, 32], the last of which repeats the last channel if D is no multiple."""
    missing = -x.shape[-1] % GROUP
    if missing:
        x = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], missing)], -1)
    return x.view(*x.shape[:-1], -1, GROUP)  # `unflatten` is Python, which takes ten times as long
