"""Rows of numbers in 8 or 4 bits a number.

A row is the last dimension of a tensor, and is packed by itself: what is packed does not depend on other rows. Groups
of 32 channels have a scale s and a least number m in 16 bits, and each number x of a group a code c of 8 or 4 bits:

    c = round((x - m) / s),   m = min x,   s = (max x - m) / (2^bits - 1),   x ~ m + s c

With 4 bits, x is a row after an orthonormal Hadamard matrix, which spreads a large number over many channels.

A packed row is bytes: the scales of its groups, their least numbers, and the codes. So packed rows are one tensor with
the same leading dimensions, and what moves, copies or selects rows does not need to know that they are packed.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.ops.precision import upcast, without_autocast

BITS = (8, 4)
GROUP = 32  # channels that share a scale
LARGEST = torch.finfo(torch.float16).max  # of scales and least numbers
NAN_OF_HALF = 0x7E00  # the bits of a float16 that is no number
SMALLEST = 2.0**-24  # a scale, so that none is zero: the smallest number above zero in float16


def packed_bytes(channels: int, bits: int) -> int:
    """Bytes of a packed row of so many channels: an even number, since scales have two bytes."""
    return 4 * _groups(channels) + _code_bytes(channels, bits)


def pack(x: Tensor, bits: int) -> Tensor:
    """Pack rows x [..., D] of any floating dtype in `bits` (8 or 4): [..., packed_bytes(D, bits)] in uint8."""
    return without_autocast(_pack, x.detach() if x.requires_grad else x, bits)


def unpack(packed: Tensor, channels: int, bits: int, dtype: torch.dtype) -> Tensor:
    """The numbers [..., channels] of packed rows, computed in float32, or in float64 for this dtype."""
    return without_autocast(_unpack, packed, channels, bits, dtype)


def scales(packed: Tensor, bits: int) -> Tensor:
    """The scales and least numbers [..., 2 n] of the n groups of packed rows, in float16."""
    most = 4 + GROUP * bits // 8  # bytes of a group
    n = -(-packed.shape[-1] // most)
    return _half_of(packed[..., : 4 * n])


def codes(packed: Tensor, channels: int, bits: int) -> Tensor:
    """The codes [..., channels] of packed rows, in uint8."""
    both = packed[..., 4 * _groups(channels) :]
    if bits == 4:
        both = torch.cat([both & 15, both >> 4], -1)
    return both[..., :channels]


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
    rotation = _matrix("rotation", D & -D, x)
    if len(rotation) == D:
        return x @ rotation
    return (x.unflatten(-1, (-1, len(rotation))) @ rotation).flatten(-2)


def group_matrix(channels: int, like: Tensor) -> Tensor:
    """The groups of channels, [groups, channels]: one where a channel is in a group, in the dtype of `like`."""
    return _matrix("groups", channels, like)


def _pack(x: Tensor, bits: int) -> Tensor:
    x = upcast(x)
    D = x.shape[-1]
    if bits == 4:  # in float64, whose sums are the same numbers in float32 whatever their order
        x = rotated(x.double()).to(x.dtype)
    groups = _grouped(x)
    least, greatest = torch.aminmax(groups, dim=-1, keepdim=True)
    most = 2**bits - 1
    least = least.clamp_(-LARGEST, LARGEST).half()
    scale = greatest.sub_(least).div_(most).clamp_(SMALLEST, 2 * LARGEST / most).half()
    each = (groups - least).div_(scale).round_().clamp_(0, most).flatten(-2)
    if D % GROUP:
        each = F.pad(each[..., :D], (0, -D % (16 // bits)))
    if bits == 4:
        first, second = each.chunk(2, -1)
        each = torch.add(first, second, alpha=16)
    numbers = _bytes_of(torch.cat([scale, least], -2).flatten(-2))
    return torch.cat([numbers, each.to(torch.uint8)], -1)


def _unpack(packed: Tensor, D: int, bits: int, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(dtype, torch.float32)
    numbers = scales(packed, bits).contiguous().to(wide)  # of contiguous numbers this is faster
    groups = group_matrix(D, numbers)
    scale, least = (
        x @ groups for x in numbers.chunk(2, -1)
    )  # of each channel, faster than expanding
    x = torch.addcmul(least, codes(packed, D, bits).to(wide), scale)
    if bits == 4:
        x = rotated(x)
    return x.to(dtype)


def _bytes_of(x: Tensor) -> Tensor:
    """The bytes [..., 2 n] of numbers [..., n] in float16.

    In exported graphs they are computed, since other runtimes cannot view numbers as bytes. With s steps of the
    exponent above the smallest, a number above zero is the integer 1024 s + 2^(24 - s) x.
    """
    if not torch.compiler.is_exporting():
        return x.view(torch.uint8)
    size = x.float().abs()
    units = _units_of_half(size)
    steps = (size[..., None] >= 2048 * units[:-1]).sum(-1)
    whole = 1024 * steps + size / units[steps] + 32768 * (x < 0)
    whole = torch.where(x.isnan(), NAN_OF_HALF, whole)
    high = (whole / 256).floor()
    return torch.stack([whole - 256 * high, high], -1).flatten(-2).to(torch.uint8)


def _half_of(x: Tensor) -> Tensor:
    """The inverse of `_bytes_of`."""
    if not torch.compiler.is_exporting():
        return x.view(torch.float16)
    low, high = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    is_negative = high >= 128
    whole = low + 256 * high - 32768 * is_negative
    steps = ((whole / 1024).floor() - 1).clamp(0, 29).long()
    size = (whole - 1024 * steps) * _units_of_half(low)[steps]
    size = torch.where(whole < NAN_OF_HALF, size, torch.nan)
    return torch.where(is_negative, -size, size).half()


def _units_of_half(like: Tensor) -> Tensor:
    """The distances [30] of neighbours in float16, from the smallest exponent to the largest."""
    return torch.tensor([2.0**i for i in range(-24, 6)], device=like.device)


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


def _code_bytes(channels: int, bits: int) -> int:
    return -(-channels * bits // 16) * 2


def _grouped(x: Tensor) -> Tensor:
    """Rows [..., D] as groups [..., n, 32], the last of which repeats the last channel if D is no multiple."""
    missing = -x.shape[-1] % GROUP
    if missing:
        x = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], missing)], -1)
    return x.view(*x.shape[:-1], -1, GROUP)  # `unflatten` is Python, which takes ten times as long
