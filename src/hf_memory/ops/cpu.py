"""Compiled code for a CPU, `cpu.cpp`, which is used where there is a C++ compiler.

It is compiled when it is first needed, in two seconds, and kept in the user's cache for later processes. PyTorch has no
operation for rows in 8 bits: there, codes become numbers in memory before they are multiplied. A norm and a rotation of
one token are several of its operations, which take longer than what they compute.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Sequence
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
LONGEST_ALIKE = 6  # bytes of a row that has as many in 4 bits
POLICIES = ("received_attention", "change_of_output")  # of kept tokens

_LONG = ctypes.c_int64
_INT = ctypes.c_int
_FLOAT = ctypes.c_float
_POINTER = ctypes.c_void_p
ARGUMENTS = {  # types of those of each function
    "rms_norm": [_LONG, _LONG, _POINTER, _POINTER, _FLOAT, _POINTER],
    "turn": [*(_LONG, _LONG, _INT, _INT), *(_POINTER, _POINTER, _POINTER), *(_LONG, _POINTER)],
    "pack": [_LONG, _INT, _POINTER, _POINTER],
    "attend": [
        *(_LONG, _LONG, _INT, _INT),
        *(_POINTER, _POINTER, _POINTER, _LONG),
        *(_POINTER, _POINTER, _LONG),
        *(_POINTER, _LONG, _LONG),
        *(_FLOAT, _FLOAT, _POINTER, _POINTER),
    ],
    "read_token": [
        *(_LONG, _LONG, _INT, _INT),
        *(_INT, _INT, _INT, _INT, _FLOAT, _FLOAT),
        *(_POINTER, _POINTER, _POINTER),
        *[_POINTER, _LONG, _LONG] * 3,
        _POINTER,
    ],
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
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        file = Path(cache) / "hf_memory" / f"{name}.so"
        if not file.exists():
            _compile(command, file)
        return _declared(ctypes.CDLL(str(file)))
    # a user without a home has no folder
    except (OSError, RuntimeError, subprocess.CalledProcessError) as fault:
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


def runs(x: Tensor, in_graphs: bool = False) -> bool:
    """Whether compiled code takes numbers x: on a CPU in float32 or bfloat16, without gradients.

    And without a graph, unless it is one of `torch.compile` and there is an operation for graphs. Neither what
    torch.func transforms nor a mode that sees each operation, such as make_fx, would notice compiled code.
    """
    is_plain = x.device.type == "cpu" and x.dtype in DTYPES and type(x) is Tensor
    if not is_plain or torch.is_grad_enabled():
        return False
    if torch.compiler.is_compiling():
        return in_graphs and not torch.compiler.is_exporting() and _is_there()
    return (
        torch._C._get_tracing_state() is None
        and torch._C._functorch.maybe_current_level() is None
        and not torch._C._len_torch_dispatch_stack()
        and library() is not None
    )


def takes_rows(x: Tensor, in_graphs: bool = False) -> bool:
    """Whether compiled code packs and reads rows x [..., D]."""
    D = x.shape[-1]
    return D % 2 == 0 and D <= WIDEST and runs(x, in_graphs)


@torch.compiler.assume_constant_result
def _is_there() -> bool:
    return library() is not None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`torch.rms_norm` of one token of each row, x [B, 1, ..., channels]."""
    x = x.contiguous()
    y = torch.empty_like(x)
    D = x.shape[-1]
    run = getattr(library(), f"rms_norm_{DTYPES[x.dtype]}")
    run(x.numel() // D, D, x.data_ptr(), weight.data_ptr(), eps, y.data_ptr())
    return y


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `hf_memory.mixers.positions.Positions.turn`, for one token of each row, x [B, 1, H, D]."""
    x = x.contiguous()
    cos = cos.contiguous()
    sin = sin.contiguous()
    y = torch.empty_like(x)
    B, _, H, D = x.shape
    rows, _, C = cos.shape
    run = getattr(library(), f"turn_{DTYPES[x.dtype]}")
    run(
        *(B, H, D, C),
        *(x.data_ptr(), cos.data_ptr(), sin.data_ptr()),
        *(0 if rows == 1 else C, y.data_ptr()),
    )
    return y


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
    keys, values = _laid_alike(keys, values)
    *_, of_head_of_keys, of_entry, _ = (keys if isinstance(keys, Tensor) else keys[0]).stride()
    seen = None
    of_seen_row = of_seen_head = 0
    if visible is not None:
        visible = visible.expand(B, H, -1)
        visible = visible if visible.stride(2) == 1 else visible.contiguous()
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
        *(_addresses([keys, values]), seen, of_seen_row),
        *(q.data_ptr(), of_row, of_head),
        *(scale, softcap, o.data_ptr(), mass.data_ptr()),
    )
    return o, mass


def reads_token(held: Sequence[Any], q: Tensor, policy: str) -> bool:
    """Whether a `TokenReader` takes these states, and queries q [..., D]."""
    if policy not in POLICIES or not takes_rows(q, in_graphs=True):
        return False
    for state in held:
        for x in [state] if isinstance(state, Tensor) else state:
            if not x.is_contiguous():
                return False
    is_whole = isinstance(held[0], Tensor)
    keys, values, *_, queries = held if is_whole else next(zip(*held))
    in_bytes = SCALE + q.shape[-1]
    return (
        keys.dtype == values.dtype == torch.uint8
        and keys.shape[-1] == values.shape[-1] == in_bytes
        and in_bytes > LONGEST_ALIKE
        and queries.dtype == q.dtype
    )


class TokenReader:
    """Writes one token of each row among kept tokens in 8 bits, reads them, and ends the block that ends, in place.

    It can be called for each token of the same rows, as long as their states stay where they are.

    Args:
        held: keys, values, numbers, scores and queries, as `hf_memory.mixers.pasts.kept` has them: the entries of all
            heads in turn, in a tensor with a row for each sequence, or a list of rows anywhere in memory.
        sizes: the number of entries of each head.
        first: how many first tokens always stay.
        window: how many last tokens always stay.
        policy: one of `POLICIES`, by which others stay.
        scale: factor of the products of queries and keys.
        softcap: cap of these, or None.
        among: which of the heads of queries, keys and values these are.
    """

    def __init__(
        self,
        held: Sequence[Any],
        sizes: tuple[int, ...],
        *,
        first: int,
        window: int,
        policy: str,
        scale: float,
        softcap: float | None,
        among: slice,
    ):
        queries = held[-1] if isinstance(held[-1], Tensor) else held[-1][0]
        H = len(sizes)
        c, D = queries.shape[-2:]
        self.channels = D
        self.first_head = among.start
        self.step = among.step
        self.run = getattr(library(), f"read_token_{DTYPES[queries.dtype]}")
        held_rows = _addresses(held)
        self.given = (
            *(len(held_rows) // len(held), H, queries.shape[1] // H, D),
            *(c, first, window, policy == "change_of_output", scale, softcap or 0.0),
            *(_longs(sizes), held_rows),
        )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, positions: Any, o: Tensor) -> None:
        """Write outputs into o, contiguous [B, ..., H, G, D]; dimensions that are not named have one element, or none.

        Args:
            q: queries [B, ..., heads, G, D].
            k: keys [B, ..., heads, D].
            v: values [B, ..., heads, D].
            positions: the number of tokens that each row has read before, a tuple or a tensor.
            o: the outputs.
        """
        if isinstance(positions, Tensor):
            positions = tuple(positions.tolist())
        if q.stride()[-2:] != (self.channels, 1):
            q = q.contiguous()
        if k.stride(-1) != 1 or v.stride(-1) != 1:
            k = k.contiguous()
            v = v.contiguous()
        of_heads = []
        for x, of_head in ((q, q.stride(-3)), (k, k.stride(-2)), (v, v.stride(-2))):
            first = x.data_ptr() + self.first_head * of_head * x.itemsize
            of_heads += [first, x.stride(0), self.step * of_head]
        self.run(*self.given, _longs(positions), *of_heads, o.data_ptr())


class TokenReaderInGraph:
    """The same in a graph of `torch.compile`, in which it is one operation."""

    def __init__(
        self,
        held: Sequence[Any],
        sizes: tuple[int, ...],
        *,
        softcap: float | None,
        among: slice,
        **options: Any,
    ):
        self.held = [*held]
        self.options = [*sizes], softcap or 0.0, among.start, among.step
        self.more = options

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, positions: Any, o: Tensor) -> None:
        """See `TokenReader`; positions are a tensor."""
        _read_token(q, k, v, positions, self.held, o, *self.options, **self.more)


@torch.library.custom_op("hf_memory::read_token", mutates_args=("held", "o"))
def _read_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    held: list[Tensor],
    o: Tensor,
    sizes: list[int],
    softcap: float,
    start: int,
    step: int,
    first: int,
    window: int,
    policy: str,
    scale: float,
) -> None:
    among = slice(start, start + len(sizes) * step, step)
    reader = TokenReader(
        held,
        tuple(sizes),
        first=first,
        window=window,
        policy=policy,
        scale=scale,
        softcap=softcap,
        among=among,
    )
    reader(q, k, v, positions, o)


def _laid_alike(keys: Any, values: Any) -> tuple[Any, Any]:
    """Packed keys and values, copied unless all of them have the same strides, which code is given once."""
    parts = [keys, values] if isinstance(keys, Tensor) else [*keys, *values]
    strides = parts[0].stride()
    if strides[-1] == 1 and all(x.stride() == strides for x in parts):
        return keys, values
    if isinstance(keys, Tensor):
        return keys.contiguous(), values.contiguous()
    return [x.contiguous() for x in keys], [x.contiguous() for x in values]


@lru_cache(maxsize=1024)
def _alike(heads: int, count: int, of_head: int, of_visible: int) -> tuple[Any, Any, Any]:
    """Where each head begins in bytes, how many entries it has, and where it begins in what is visible."""
    places = range(heads)
    first = _longs(tuple(of_head * h for h in places))
    return first, _longs((count,) * heads), _longs(tuple(of_visible * h for h in places))


@lru_cache(maxsize=1024)
def _in_turn(sizes: tuple[int, ...], of_entry: int) -> tuple[Any, Any, Any]:
    """The same for heads whose entries come after those of the head before."""
    first = (0, *accumulate(sizes[:-1]))
    return _longs(tuple(of_entry * x for x in first)), _longs(sizes), _longs(first)


@lru_cache(maxsize=1024)
def _longs(numbers: tuple[int, ...]) -> Any:
    return (_LONG * len(numbers))(*numbers)


def _addresses(states: Sequence[Tensor | Sequence[Tensor]]) -> Any:
    """Where each row of each state begins, in turn."""
    places = []
    for rows in states:
        if isinstance(rows, Tensor):
            first = rows.data_ptr()
            size = rows.stride(0) * rows.itemsize
            for i in range(rows.shape[0]):
                places.append(first + i * size)
        else:
            for row in rows:
                places.append(row.data_ptr())
    return (_POINTER * len(places))(*places)
