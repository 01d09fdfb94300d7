"""Parts that kernel launches share: kinds of decay, tile sizes, and conversions for custom ops."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_memory.ops.triton.arguments import Meta

CHUNK = 64  # tokens of a block; the sum for the gate's gradient restarts at the end of each block
TILE = 4096  # size of the part of the state that a program holds
NONE = 0  # kinds of decay: none, one for each head, and one for each key channel
SCALAR = 1
VECTOR = 2
# Without a limit, ptxas gives some kernels 32 registers a thread and spills all else.
REGISTERS: dict[str, int] = {} if torch.version.hip else {"maxnreg": 255}


def decay_kind(g: Tensor | None) -> int:
    """The kind of decay: NONE, SCALAR or VECTOR."""
    if g is None:
        return NONE
    return SCALAR if g.ndim == 3 else VECTOR


def precision(dtype: torch.dtype) -> str:
    """How products of float32 operands are computed beside inputs of a dtype.

    GPUs cut numbers off for tf32, which loses more than rounding to float16 does, but less than rounding to bfloat16.
    Three products in tf32 are as exact as float32.
    """
    return "tf32" if dtype == torch.bfloat16 else "tf32x3"


class Constants(NamedTuple):
    """How a kernel is compiled and launched."""

    meta: Meta
    options: dict[str, int]


def width(D: int) -> int:
    """The width of a tile that holds all of D channels."""
    return max(16, triton.next_power_of_2(D))


def additive_constants(
    H: int, HV: int, K: int, V: int, decay: int, dtype: torch.dtype
) -> tuple[Constants, Constants]:
    """How kernels of additive memories are compiled and launched, chosen by register counts (kernel_report).

    Returns those that hold all key channels, and those that hold all value channels. Four warps share the rows of a
    chunk of 64 and the tensor cores of Hopper; more warps would compute the same products twice.
    """
    width_k = width(K)
    width_v = width(V)
    narrow = dtype != torch.float32
    wide = max(width_k, width_v) > 128
    rows = 16
    if narrow and decay != VECTOR:
        rows = 32 if wide else 64
    tile = TILE if narrow and max(width_k, width_v) > 64 else TILE // 2
    warps = 8 if wide or not narrow or decay == VECTOR else 4
    stages = 2 if rows == 64 else 1
    common = Meta(H, HV, K, V, C=rows, DECAY=decay, PRECISION=precision(dtype))
    parts_k, parts_v = (max(1, x // 32) if wide or not narrow else 1 for x in (width_k, width_v))
    tile_k = min(width_k, max(16, tile // width_v))
    tile_v = min(width_v, max(16, tile // width_k))
    warps_by_key = warps
    # decays by pairs of tokens cost most: compute them once a chunk
    if decay == VECTOR and narrow and not wide:
        tile_v = width_v
        warps_by_key = 4
    by_value = common._replace(BK=width_k, BV=tile_v, PARTS=parts_k)
    by_key = common._replace(BK=tile_k, BV=width_v, PARTS=parts_v)
    return (
        Constants(by_value, {"num_warps": warps, "num_stages": stages}),
        Constants(by_key, {"num_warps": warps_by_key, "num_stages": stages}),
    )


def delta_constants(
    H: int, HV: int, K: int, V: int, decay: int, dtype: torch.dtype
) -> tuple[Constants, Constants]:
    """How kernels of the delta rule are compiled and launched.

    Returns those of kernels that compute all chunks in parallel, and of those that loop over the chunks.
    """
    width_k = width(K)
    width_v = width(V)
    wide = dtype == torch.float32 or width_k > 128
    tile = 2 * TILE if decay == VECTOR else TILE
    warps_of_chunk = 2 if decay == VECTOR else 1
    if wide:
        tile = TILE // 2
        warps_of_chunk = 4
    C = 16 if wide or decay == VECTOR else 32
    parts = max(1, width_k // 32) if wide else 1
    chunk = Meta(H, HV, K, C=C, BK=width_k, PARTS=parts, DECAY=decay, PRECISION=precision(dtype))
    walk = chunk._replace(V=V, BV=min(width_v, max(16, tile // width_k)))
    return (
        Constants(chunk, {"num_warps": warps_of_chunk, "num_stages": 1}),
        Constants(walk, {"num_warps": 8 if wide else 4, "num_stages": 3 if C == 32 else 1}),
    )


def rank_one_constants(HV: int, K: int, V: int, dtype: torch.dtype) -> tuple[Constants, Constants]:
    """The same with a and b: of the kernel for chunks, which takes key channels in turn, and of gradients."""
    width_k = width(K)
    width_v = width(V)
    wide = dtype == torch.float32 or max(width_k, width_v) > 128
    tile = TILE // 2 if wide else 2 * TILE
    chunk = Meta(HV, HV, K, C=16, BK=min(width_k, 32), DECAY=VECTOR, PRECISION=precision(dtype))
    by_key = chunk._replace(
        V=V,
        BK=min(width_k, max(16, tile // width_v)),
        BV=width_v,
        PARTS=max(1, width_v // 32) if wide else 1,
    )
    return Constants(chunk, {"num_warps": 2, "num_stages": 2}), Constants(
        by_key, {"num_warps": 8, "num_stages": 1}
    )


@cache
def compiled(meta: Any) -> Any:
    """Constants of a launch as Triton before 3.6 needs them, which takes numbers of a tuple for those of a program."""
    return type(meta)(*map(tl.constexpr, meta))


def launcher(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """A function that runs a kernel on the device of its tensors; Triton alone would take the current device."""

    def run(*args, meta: tuple, **options) -> None:
        tensors = (x for given in args for x in (given if isinstance(given, tuple) else (given,)))
        device = next(x.device for x in tensors if isinstance(x, Tensor))
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            kernel[grid](*args, compiled(meta), **options, **REGISTERS)

    return run


def contiguous(*tensors: Tensor | None) -> list[Any]:
    """Contiguous tensors, as kernels need them."""
    return [None if x is None else x.contiguous() for x in tensors]


def or_empty(like: Tensor, *tensors: Tensor | None) -> Any:
    """Replace None by empty tensors, since custom ops can only return tensors."""
    return tuple(like.new_empty(0) if x is None else x for x in tensors)
