"""Compiled code for rows in 8 bits on a CPU, `cpu.cpp`, which is used where there is a C++ compiler.

It is compiled when it is first needed, in two seconds, and kept in the user's cache for later processes. PyTorch has no
operation for what it does: there, codes become numbers in memory before they are multiplied.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCE = Path(__file__).with_suffix(".cpp")
# sums in any order, which vectors need; numbers that are not finite stay so
FLAGS = "-std=c++17 -O3 -shared -fPIC -fno-math-errno -fno-trapping-math -fassociative-math -fno-signed-zeros"
OF_PROCESSOR = {  # by the name of PyTorch for what its own code uses
    "AVX2": "-mavx2 -mfma",
    "AVX512": "-mavx2 -mfma -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512",
}
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
WIDEST = 256  # channels of a head
SCALE = 2  # bytes of the scale of a row
POLICIES = ("received_attention", "change_of_output")  # of kept tokens

_LONG = ctypes.c_int64
_INT = ctypes.c_int
_FLOAT = ctypes.c_float
_POINTER = ctypes.c_void_p
ARGUMENTS = {  # types of those of each function
    "pack": [_LONG, _INT, _POINTER, _POINTER],
    "attend": [
        *(_LONG, _LONG, _INT, _INT),
        *(_POINTER, _POINTER, _POINTER, _LONG),
        *(_POINTER, _POINTER, _POINTER, _LONG),
        *(_POINTER, _LONG, _LONG),
        *(_FLOAT, _FLOAT, _POINTER, _POINTER),
    ],
    "end_block": [*[_INT] * 8, *[_POINTER] * 5, _FLOAT, _FLOAT],
}


@lru_cache
def library() -> Any:
    """The functions of `cpu.cpp`; None without a C++ compiler, which the variable CXX can name."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None or os.name != "posix":
        return None
    of_processor = OF_PROCESSOR.get(torch.backends.cpu.get_cpu_capability(), "")
    command = [compiler, *FLAGS.split(), *of_processor.split()]
    made_of = "\n".join([SOURCE.read_text(), platform.machine(), *command])
    name = hashlib.sha256(made_of.encode()).hexdigest()[:16]
    cache = os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")
    file = Path(cache) / "hf_memory" / f"{name}.so"
    try:
        if not file.exists():
            _compile(command, file)
        return _declared(ctypes.CDLL(str(file)))
    except (OSError, subprocess.CalledProcessError) as fault:
        said = getattr(fault, "stderr", None) or fault
        warnings.warn(
            f"{compiler} cannot compile {SOURCE.name}, so PyTorch runs: {said}", stacklevel=2
        )
        return None


def _compile(command: list[str], file: Path) -> None:
    """Compile a file that other processes see only when it is complete."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        partial = Path(folder) / file.name
        given = [*command, str(SOURCE), "-o", str(partial)]
        subprocess.run(given, check=True, capture_output=True, text=True)
        partial.replace(file)


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    for dtype in DTYPES.values():
        for name, arguments in ARGUMENTS.items():
            function = getattr(library, f"{name}_{dtype}")
            function.argtypes = arguments
            function.restype = None
    return library


def runs(x: Tensor) -> bool:
    """Whether compiled code takes rows x [..., D]: data on a CPU in float32 or bfloat16, without gradients or graphs."""
    return (
        x.device.type == "cpu"
        and x.dtype in DTYPES
        and type(x) is Tensor
        and x.shape[-1] % 2 == 0
        and x.shape[-1] <= WIDEST
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and library() is not None
    )


def pack(x: Tensor) -> Tensor:
    """See `hf_memory.ops.bits.pack`, in 8 bits."""
    D = x.shape[-1]
    x = x.contiguous()
    packed = x.new_empty((*x.shape[:-1], SCALE + D), dtype=torch.uint8)
    run = getattr(library(), f"pack_{DTYPES[x.dtype]}")
    run(x.numel() // D, D, x.data_ptr(), packed.data_ptr())
    return packed


def attention(
    q: Tensor,
    keys: Tensor | Sequence[Tensor],
    values: Tensor | Sequence[Tensor],
    visible: Tensor | None,
    sizes: tuple[int, ...] | None,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """See `hf_memory.ops.attention_in_bits`, in 8 bits."""
    B, H, G, D = q.shape
    of_row, of_head, of_group, of_channel = q.stride()
    if of_channel != 1 or of_group != D:
        q = q.contiguous()
        of_row, of_head, *_ = q.stride()
    *_, of_head_of_keys, of_entry, _ = (keys if isinstance(keys, Tensor) else keys[0]).stride()
    seen = None
    of_seen_row = of_seen_head = 0
    if visible is not None:
        visible = visible.expand(B, H, -1)
        seen = visible.data_ptr()
        of_seen_row, of_seen_head, _ = visible.stride()
    if sizes is None:
        S = (keys if isinstance(keys, Tensor) else keys[0]).shape[-2]
        places = _alike(H, S, of_head_of_keys, of_seen_head)
    else:
        places = _in_turn(sizes, of_entry)
        H = len(sizes)
        G //= H
        of_head = G * D
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    mass = q.new_empty(q.shape[:3], dtype=torch.float32)
    run = getattr(library(), f"attend_{DTYPES[q.dtype]}")
    run(
        *(B, H, G, D),
        *(*places, of_entry),
        *(_addresses(keys), _addresses(values), seen, of_seen_row),
        *(q.data_ptr(), of_row, of_head),
        *(scale, softcap, o.data_ptr(), mass.data_ptr()),
    )
    return o, mass


def end_block(
    held: Sequence[Tensor],
    ends: Tensor,
    *,
    first: int,
    window: int,
    policy: str,
    scale: float,
    softcap: float,
) -> None:
    """Keep, in place, the entries that are worth most, see `hf_memory.ops.kv_eviction`; those of a row are contiguous.

    Args:
        held: keys and values [B, H, n, bytes] in 8 bits, numbers [B, H, n], scores [B, H, stay], and queries
            [B, H * G, block, D].
        ends: [B or 1, 1, 1] bool, for which rows.
        first: how many first tokens always stay.
        window: how many last tokens always stay.
        policy: one of `POLICIES`.
        scale: factor of the products of queries and keys.
        softcap: cap of these, or 0.
    """
    *_, score, queries = held
    B, H, stay = score.shape
    _, heads, block, D = queries.shape
    how = H, heads // H, D, stay, block, first, window, policy == "change_of_output"
    run = getattr(library(), f"end_block_{DTYPES[queries.dtype]}")
    for i, is_end in enumerate(ends.expand(B, 1, 1).flatten().tolist()):
        if is_end:
            run(*how, *(x[i].data_ptr() for x in held), scale, softcap)


@lru_cache(maxsize=1024)
def _alike(heads: int, count: int, of_head: int, of_visible: int) -> tuple[Any, Any, Any]:
    """Where each head begins in bytes, how many entries it has, and where it begins in what is visible."""
    places = range(heads)
    return _longs(of_head * h for h in places), _longs([count] * heads), _longs(of_visible * h for h in places)


@lru_cache(maxsize=1024)
def _in_turn(sizes: tuple[int, ...], of_entry: int) -> tuple[Any, Any, Any]:
    """The same for heads whose entries come after those of the head before."""
    first = [0, *accumulate(sizes)][: len(sizes)]
    return _longs(of_entry * x for x in first), _longs(sizes), _longs(first)


def _longs(numbers: Iterable[int]) -> Any:
    numbers = [*numbers]
    return (_LONG * len(numbers))(*numbers)


def _addresses(rows: Tensor | Sequence[Tensor]) -> Any:
    """Where each row begins, which are bytes."""
    if isinstance(rows, Tensor):
        first = rows.data_ptr()
        size = rows.stride(0)
        places = [first + i * size for i in range(rows.shape[0])]
    else:
        places = [x.data_ptr() for x in rows]
    return (_POINTER * len(places))(*places)
