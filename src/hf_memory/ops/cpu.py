"""Compiled code for a CPU, `cpu.cpp`, which is used where there is a C++ compiler.

It is compiled when it is first needed, in a few seconds, and kept in the user's cache for later processes. PyTorch has
no operation for rows in few bits: there, codes become numbers in memory before they are multiplied. A norm and a
rotation of one token are several of its operations, which take longer than what they compute.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

SOURCE = Path(__file__).with_suffix(".cpp")
# sums in any order, which vectors need; numbers that are not finite stay so
FLAGS = "-std=c++17 -O3 -shared -fPIC -pthread -fno-math-errno -fno-trapping-math -fassociative-math -fno-signed-zeros"
OF_PROCESSOR = {  # by the name of PyTorch for what its own code uses
    "AVX2": "-mavx2 -mfma",
    "AVX512": "-mavx2 -mfma -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512",
}
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
WIDEST = 256  # channels of a head
GROUP = 32  # channels that share a scale in 4 bits
POLICIES = ("received_attention", "change_of_output")  # of kept tokens

_LONG = ctypes.c_int64
_INT = ctypes.c_int
_FLOAT = ctypes.c_float
_POINTER = ctypes.c_void_p
ARGUMENTS = {  # types of those of each function
    "rms_norm": [_LONG, _LONG, _POINTER, _POINTER, _FLOAT, _POINTER],
    "turn": [*(_LONG, _LONG, _INT, _INT), *(_POINTER, _POINTER, _POINTER), *(_LONG, _POINTER)],
    "pack": [_LONG, _INT, _INT, _POINTER, _POINTER],
    "attend": [
        *(_LONG, _LONG, _INT, _INT),
        *[_POINTER, _LONG, _INT] * 2,
        *(_POINTER, _POINTER, _POINTER, _POINTER, _LONG),
        *(_POINTER, _LONG, _LONG),
        *(_FLOAT, _FLOAT, _POINTER, _POINTER),
    ],
    "read_tokens": [
        *(_LONG, _LONG, _INT, _INT),
        *[_INT] * 7,
        *(_FLOAT, _FLOAT),
        *(_POINTER, _POINTER, _POINTER, _POINTER),
        *[_POINTER, _LONG, _LONG, _LONG] * 4,
    ],
}


@lru_cache
def library() -> Any:
    """The functions of `cpu.cpp`; None without a C++ compiler, which the variable CXX can name."""
    compiler = os.environ.get("CXX", "c++").split()  # as make has it: "ccache g++"
    if os.name != "posix" or not compiler or shutil.which(compiler[0]) is None:
        return None
    of_processor = OF_PROCESSOR.get(torch.backends.cpu.get_cpu_capability(), "")
    command = [*compiler, *FLAGS.split(), *of_processor.split()]
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
        given = " ".join(compiler)
        warnings.warn(
            f"{given} cannot compile {SOURCE.name}, so PyTorch runs: {said}", stacklevel=2
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
    torch.func transforms, nor tangents of forward-mode AD, nor a mode that sees each operation, such as make_fx, would
    notice compiled code.
    """
    is_plain = x.device.type == "cpu" and x.dtype in DTYPES and type(x) is Tensor
    if not is_plain or torch.is_grad_enabled():
        return False
    if torch.compiler.is_compiling():
        return in_graphs and not torch.compiler.is_exporting() and _is_there()
    return (
        torch._C._get_tracing_state() is None
        and torch._C._functorch.maybe_current_level() is None
        and forward_ad._current_level < 0
        and not torch._C._len_torch_dispatch_stack()
        and library() is not None
    )


def takes_rows(x: Tensor, *bits: int | None, in_graphs: bool = False) -> bool:
    """Whether compiled code writes and reads rows x [..., D] in each of these bits; None: as they are."""
    D = x.shape[-1]
    has_pairs = D % 2 == 0 or 8 not in bits
    has_groups = D % GROUP == 0 or 4 not in bits
    return D <= WIDEST and has_pairs and has_groups and runs(x, in_graphs)


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


def pack(x: Tensor, bits: int, size: int) -> Tensor:
    """See `hf_memory.ops.bits.pack`; a packed row has `size` bytes."""
    D = x.shape[-1]
    x = x.contiguous()
    packed = x.new_empty((*x.shape[:-1], size), dtype=torch.uint8)
    run = getattr(library(), f"pack_{DTYPES[x.dtype]}")
    run(x.numel() // D, D, bits, x.data_ptr(), packed.data_ptr())
    return packed


def attention(
    q: Tensor,
    keys: Tensor | Sequence[Tensor],
    values: Tensor | Sequence[Tensor],
    visible: Tensor | None,
    bits: tuple[int, int],
    sizes: tuple[int, ...] | None,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """See `hf_memory.ops.attention_in_bits`; `bits` are those of keys and of values."""
    B, H, G, D = q.shape
    of_row, of_head, of_group, of_channel = q.stride()
    if of_channel != 1 or of_group != D:
        q = q.contiguous()
        of_row, of_head, *_ = q.stride()
    held = _laid_alike(keys), _laid_alike(values)
    seen = None
    of_seen_row = of_seen_head = 0
    if visible is not None:
        visible = visible.expand(B, H, -1)
        visible = visible if visible.stride(2) == 1 else visible.contiguous()
        seen = visible.data_ptr()
        of_seen_row, of_seen_head, _ = visible.stride()
    rows = []
    for x, of_bits in zip(held, bits):
        *_, of_head_of_rows, of_entry, _ = (x if isinstance(x, Tensor) else x[0]).stride()
        first = _alike(H, of_head_of_rows) if sizes is None else _in_turn(sizes, of_entry)
        rows += [first, of_entry, of_bits]
    if sizes is None:
        S = (held[0] if isinstance(held[0], Tensor) else held[0][0]).shape[-2]
        rows += [_longs((S,) * H), _alike(H, of_seen_head)]
    else:
        rows += [_longs(sizes), _in_turn(sizes, 1)]
        H = len(sizes)
        G //= H
        of_head = G * D
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    mass = q.new_empty(q.shape[:3], dtype=torch.float32)
    run = getattr(library(), f"attend_{DTYPES[q.dtype]}")
    run(
        *(B, H, G, D, *rows),
        *(_addresses(held), seen, of_seen_row),
        *(q.data_ptr(), of_row, of_head),
        *(scale, softcap, o.data_ptr(), mass.data_ptr()),
    )
    return o, mass


_OPERATIONS = torch.library.Library("hf_memory", "FRAGMENT")


def _operation(name: str, run: Callable, shapes: Callable, mutates: Sequence[str] = ()) -> Any:
    """A function as an operation of graphs on a CPU, without gradients.

    `torch.library.custom_op` makes operations with gradients: a call of `read_token` took 80 microseconds longer.

    Args:
        name: of the operation.
        run: the function.
        shapes: the same for tensors without numbers.
        mutates: the arguments that it changes.
    """
    schema = torch.library.infer_schema(run, mutates_args=mutates)
    _OPERATIONS.define(name + schema)
    _OPERATIONS.impl(name, run, "CPU")
    torch.library.register_fake(f"hf_memory::{name}", shapes, lib=_OPERATIONS)
    return getattr(torch.ops.hf_memory, name).default


def _attention_in_graph(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor | None,
    bits: list[int],
    sizes: list[int] | None,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    key_bits, value_bits = bits
    of_heads = None if sizes is None else tuple(sizes)
    return attention(q, keys, values, visible, (key_bits, value_bits), of_heads, scale, softcap)


def _shapes_of_attention(q, keys, values, visible, bits, sizes, scale, softcap):
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


# `attention` in a graph of `torch.compile`, in which it is one operation
attention_in_graph = _operation(
    "attention_in_bits_on_cpu", _attention_in_graph, _shapes_of_attention
)


def reads_tokens(held: Sequence[Any], q: Tensor, bits: Sequence[int | None], policy: str) -> bool:
    """Whether a `TokenReader` takes these states, with keys and values in these bits, and queries q [..., D]."""
    if policy not in POLICIES or not takes_rows(q, *bits, in_graphs=True):
        return False
    for state in held:
        for x in [state] if isinstance(state, Tensor) else state:
            if not x.is_contiguous():
                return False
    is_whole = isinstance(held[0], Tensor)
    keys, values, *_, queries = held if is_whole else next(zip(*held))
    key_bits, value_bits = bits
    return (
        keys.dtype == (torch.uint8 if key_bits else q.dtype)
        and values.dtype == (torch.uint8 if value_bits else q.dtype)
        and queries.dtype == q.dtype
    )


class TokenReader:
    """Writes new tokens of each row among kept tokens, reads them, and ends blocks, in place.

    It can be called for each token of the same rows, as long as their states stay where they are.

    Args:
        held: keys, values, numbers, scores and queries, as `hf_memory.mixers.pasts.kept` has them: the entries of all
            heads in turn, in a tensor with a row for each sequence, or a list of rows anywhere in memory.
        sizes: the number of entries of each head.
        bits: those of keys and of values, 8 or 4 each; None: they are numbers as they are.
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
        bits: Sequence[int | None],
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
        self.run = getattr(library(), f"read_tokens_{DTYPES[queries.dtype]}")
        held_rows = _addresses(held)
        self.sizes = len(held_rows) // len(held), H, queries.shape[1] // H, D
        stored = [each or 8 * queries.itemsize for each in bits]
        self.rule = c, *stored, first, window, policy == "change_of_output"
        self.scores = scale, softcap or 0.0
        self.states = _longs(sizes), held_rows

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, before: Any, o: Tensor, counts: Any = None
    ) -> None:
        """Write outputs into o [B, T, H, G, D], contiguous; of one token, T may be left out of all shapes.

        Args:
            q: queries [B, T, heads, G, D].
            k: keys [B, T, heads, D].
            v: values [B, T, heads, D].
            before: the number of tokens that each row has read before, a tuple or a tensor.
            o: the outputs; those of padding are left as they are.
            counts: how many of the new tokens of each row are there, a tuple; those after them are padding. None: all.
        """
        if isinstance(before, Tensor):
            before = tuple(before.tolist())
        T = q.shape[1] if q.dim() > 4 else 1
        counts = (T,) * q.shape[0] if counts is None else counts
        if q.stride()[-2:] != (self.channels, 1):
            q = q.contiguous()
        if k.stride(-1) != 1 or v.stride(-1) != 1:
            k = k.contiguous()
            v = v.contiguous()
        rows: list[int] = []
        for x, of_head in ((q, q.stride(-3)), (k, k.stride(-2)), (v, v.stride(-2))):
            first = x.data_ptr() + self.first_head * of_head * x.itemsize
            rows += [first, x.stride(0), x.stride(1), self.step * of_head]
        _, H, G, D = self.sizes
        rows += [o.data_ptr(), T * H * G * D, H * G * D, G * D]
        # a thread takes longer to begin than to read one token
        threads = 1 if T == 1 else torch.get_num_threads()
        self.run(
            *(*self.sizes, *self.rule, threads, *self.scores, *self.states),
            *(_longs(before), _longs(counts), *rows),
        )


class TokenReaderInGraph:
    """The same for one token, in a graph of `torch.compile`, in which it is one operation."""

    def __init__(
        self,
        held: Sequence[Any],
        sizes: tuple[int, ...],
        *,
        bits: Sequence[int | None],
        softcap: float | None,
        among: slice,
        **options: Any,
    ):
        self.held = [*held]
        self.options = (
            [*sizes],
            [each or 0 for each in bits],
            softcap or 0.0,
            among.start,
            among.step,
        )
        self.more = options

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, before: Any, o: Tensor) -> None:
        """See `TokenReader`; `before` is a tensor."""
        _read_token(q, k, v, before, self.held, o, *self.options, **self.more)


def _read(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    before: Tensor,
    held: list[Tensor],
    o: Tensor,
    sizes: list[int],
    bits: list[int],
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
        bits=[each or None for each in bits],
        first=first,
        window=window,
        policy=policy,
        scale=scale,
        softcap=softcap,
        among=among,
    )
    reader(q, k, v, before, o)


def _shapes_of_nothing(*arguments) -> None:
    return None


_read_token = _operation("read_token", _read, _shapes_of_nothing, ("held", "o"))


def _laid_alike(x: Any) -> Any:
    """Packed rows, copied unless all parts have the same strides, which code is given once."""
    parts = [x] if isinstance(x, Tensor) else x
    strides = parts[0].stride()
    if strides[-1] == 1 and all(part.stride() == strides for part in parts):
        return x
    return x.contiguous() if isinstance(x, Tensor) else [part.contiguous() for part in x]


@lru_cache(maxsize=1024)
def _alike(heads: int, size: int) -> Any:
    """Where each head begins if all have the same size."""
    return _longs(tuple(size * h for h in range(heads)))


@lru_cache(maxsize=1024)
def _in_turn(sizes: tuple[int, ...], of_entry: int) -> Any:
    """The same if each has so many entries, which come after those of the head before."""
    return _longs(tuple(of_entry * x for x in (0, *accumulate(sizes[:-1]))))


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
