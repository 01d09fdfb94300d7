"""Predict how long our kernels take on an H100, on a machine without a GPU: `python benchmarks/predict_kernels.py`.

Ops run on tensors without numbers, and their launches and operations of PyTorch are recorded. Each launch is compiled
for sm_90; its machine code is simulated for one warp, and its time follows from that, from how many blocks a
multiprocessor holds, and from the bytes that must move. Where memory bounds a kernel this is within some 25 %, where a
chain of instructions does within 40 %; ratios are better than times. Prints a row of a table for each op.

    python benchmarks/predict_kernels.py --ops delta gdn --batch 1 --tokens 8192 --heads 96
    python benchmarks/predict_kernels.py --launches      # a line for each launch, too
"""

import argparse
import importlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from hf_memory.mixers.attention_blocks import Scores
from hf_memory.mixers.base import Context
from hf_memory.mixers.retention import Retention
from hf_memory.ops import delta_rule, linear_attention, neural_memory
from kernel_report import Launch, Report, assemble, compiled_launch, recorded, specialisation
from loop_trips import leaves, trips
from machine_code import Instruction, cycles, disassembled, tensor_cycles

RESULT = Path(__file__).parent / "results" / "kernels_predicted.json"
CLOCK = 1.70e9  # cycles a second, sustained under load
MULTIPROCESSORS = 132
BANDWIDTH = 2.85e12  # bytes a second, 85 % of 3.35 TB/s
ISSUE = 1.15  # cycles of an instruction, where warps share a scheduler
LAUNCH = 3e-6  # seconds to a further launch, when the host is ahead
SMALLEST = 2e-6  # seconds of the smallest operation of PyTorch
COMPILED: dict[str, tuple] = {}  # what `compiled` found, by all that it depends on
FREE = "view _unsafe_view t transpose permute expand unsqueeze squeeze select slice as_strided detach alias unbind "
FREE += "split split_with_sizes unflatten flatten _reshape_alias diagonal empty empty_like new_empty empty_strided "
FREE += "new_empty_strided reshape copy_ promote_types"
FILLS = ("zeros_like", "zeros", "new_zeros", "zero_", "ones_like", "full", "fill_")
OPS = {  # names in the table
    "linear": "linear attention",
    "gla_scalar": "a decay for each head",
    "gla_vector": "a decay for each channel (GLA)",
    "delta": "delta rule",
    "gdn": "gated delta rule",
    "kda": "delta rule, a decay for each channel (KDA)",
    "rwkv7": "RWKV-7",
    "deltaformer": "DeltaFormer's write",
    "titans": "Titans",
    "kept": "kept tokens",
}


class Time(NamedTuple):
    """Predicted seconds of a launch, and what bounds it."""

    seconds: float
    bound: str


class Recorder(TorchDispatchMode):
    """Runs custom ops on tensors without numbers as if they had some, and sums the time of PyTorch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds, self.number = 0.0, 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name, kwargs = operation._schema.name, kwargs or {}
        if name in OPDEFS:
            with self:
                return OPDEFS[name]._init_fn(*args, **kwargs)
        result, short = operation(*args, **kwargs), name.split("::")[1]
        if short not in FREE.split():
            read = 0 if short in FILLS else _bytes((args, kwargs))
            self.number += 1
            self.seconds += max((read + _bytes(result)) / BANDWIDTH, SMALLEST) + LAUNCH
        return result


def _bytes(tree: Any) -> int:
    """Bytes of all tensors; those that expand repeats count once."""
    tensors = {id(x): x for x in tree_flatten(tree)[0] if isinstance(x, torch.Tensor)}.values()
    sizes = ([n for n, stride in zip(x.shape, x.stride()) if stride] for x in tensors)
    return sum(math.prod(size) * x.element_size() for size, x in zip(sizes, tensors))


def moved(launch: Launch) -> float:
    """Bytes of the tensors of a launch; of a panel of DeltaFormer's tokens, those of it and of panels solved before."""
    given = dict(leaves(launch.arguments))
    if "place.panel" not in given:
        return _bytes(list(given.values()))
    first, end, T = (given[f"place.{name}"] for name in ("panel", "end", "T"))
    solved = T - end if given["meta.BACKWARDS"] else first

    def tokens(name: str) -> int:
        if launch.name != "gather_kernel" or name not in ("system.k", "system.beta", "system.L", "x"):
            return end - first
        return solved if name == "x" else solved + end - first

    return sum(_bytes(x) * tokens(name) / T for name, x in given.items())


def call_of(op: str, B: int, T: int, H: int, D: int) -> Callable[[], torch.Tensor]:
    """A call of an op on tensors without numbers."""

    def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(B, T, H, *shape, dtype=dtype, device="meta", requires_grad=True)

    q, k, v, a, b = (rows(D, dtype=torch.bfloat16) for _ in range(5))
    beta, scalar, vector = rows(), rows(), rows(D)
    if op == "deltaformer":
        write = importlib.import_module("hf_memory.ops.deltaformer.kernels").corrected_values
        return lambda: write(k, v, scalar, beta, D**-0.5)
    if op == "titans":
        return _titans(*(rows(64, dtype=torch.bfloat16) for _ in range(3)), *(rows() for _ in range(3)))
    if op == "kept":
        memory = Retention(64, 4, 172, 16, backend="triton")
        return lambda: memory.attend(q, k, v, Scores(D**-0.5), Context(None, None, None, {}))[0][0]
    gates = {"gla_scalar": [scalar], "gla_vector": [vector], "gdn": [scalar], "kda": [vector], "rwkv7": [vector, a, b]}
    if op in ("linear", "gla_scalar", "gla_vector"):
        return lambda: linear_attention(q, k, v, *gates.get(op, []), backend="triton")[0]
    return lambda: delta_rule(q, k, v, beta, *gates.get(op, []), backend="triton")[0]


def _titans(*rows: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A call of Titans' memory of two matrices."""
    _, _, H, D = rows[0].shape
    shapes = (H, D, 2 * D), (H, 2 * D, D)
    weights = tuple(torch.empty(shape, device="meta", requires_grad=True) for shape in shapes)
    return lambda: neural_memory(*rows, weights, chunk_size=16, residual=True, backend="triton")[0]


def passes(call: Callable[[], torch.Tensor]) -> dict[str, tuple[list[Launch], Recorder]]:
    """Launches of forward and backward, and PyTorch's operations."""
    outputs, found = [], {}

    def forward() -> None:
        outputs.append(call())

    def backward() -> None:
        outputs[0].backward(torch.empty_like(outputs[0]))

    for name, one in (("forward", forward), ("backward", backward)):
        recorder = Recorder()
        with patch.object(torch, "is_autocast_enabled", lambda *_: False):  # it does not know meta tensors
            found[name] = recorded(_with(recorder, one)), recorder
    return found


def _with(recorder: Recorder, call: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        with recorder, torch.enable_grad():
            call()

    return run


def compiled(launch: Launch) -> tuple[Report, list[Instruction], list[tuple[int, int]], str]:
    """What the compilers say of a launch, its machine code with its loops, and Triton's code."""
    made = compiled_launch(launch, 90)
    registers, spilled = assemble(made.asm["ptx"], 90)
    report = Report(launch.name, "sm_90", registers, made.metadata.shared, spilled, made.metadata.num_warps)
    return report, *disassembled(made.asm["cubin"]), made.asm["ttir"]


def time_of(launch: Launch) -> Time:
    """Seconds of a launch: of its slowest resource."""
    key = f"{launch.kernel} {specialisation(launch)} {launch.options}"
    if key not in COMPILED:
        COMPILED[key] = compiled(launch)
    report, program, loops, code = COMPILED[key]
    numbers = trips(code, launch.arguments, launch.grid[0])
    if len(numbers) != len(loops):
        raise ValueError(f"{launch.name} has {len(numbers)} loops in Triton, and {len(loops)} in machine code")
    chain, issued, partition, whole = totals(program, dict(zip(loops, numbers)), (0, len(program) - 1))

    def wave(blocks: int) -> dict[str, float]:
        share = blocks * report.num_warps / 4
        return {"chain": chain, "issue": share * issued * ISSUE, "tensor": max(share * partition, blocks * whole)}

    computing = waves(math.prod(launch.grid), report.blocks, lambda blocks: max(wave(blocks).values())) / CLOCK
    moving = moved(launch) / BANDWIDTH
    full = wave(min(report.blocks, math.ceil(math.prod(launch.grid) / MULTIPROCESSORS)))
    return Time(max(moving, computing), "memory" if moving > computing else max(full, key=full.__getitem__))


def waves(programs: int, blocks: int, cycles_of: Callable[[int], float]) -> float:
    """Cycles of all programs, where a multiprocessor holds so many blocks at once."""
    each = programs / MULTIPROCESSORS
    held = min(blocks, math.ceil(each))
    if each >= 8 * held:  # then the last wave hardly matters
        return each / held * cycles_of(held)
    full, rest = divmod(each, held)
    return full * cycles_of(held) + (cycles_of(math.ceil(rest)) if rest > 1e-9 else 0)


def totals(
    program: list[Instruction], numbers: dict[tuple[int, int], float], part: tuple[int, int]
) -> tuple[float, float, float, float]:
    """Of a part of a program: cycles of a warp alone, issued instructions, cycles of tensor cores; loops repeat."""
    inside = [x for x in numbers if part[0] <= x[0] and x[1] <= part[1] and x != part]
    outer = [x for x in inside if not any(y != x and y[0] <= x[0] and x[1] <= y[1] for y in inside)]
    if not outer:
        body = program[part[0] : part[1] + 1]
        return (cycles(body), len(body), *tensor_cycles(body)) if body else (0.0, 0.0, 0.0, 0.0)
    sums, at = [0.0] * 4, part[0]
    for loop in [*outer, None]:
        straight = program[at : loop[0] if loop else part[1] + 1]
        if straight:
            once = (cycles(straight, 2), len(straight), *tensor_cycles(straight))
            sums = [x + y for x, y in zip(sums, once)]
        if loop:
            repeated = totals(program, numbers, loop)
            sums = [x + numbers[loop] * y for x, y in zip(sums, repeated)]
            at = loop[1] + 1
    return tuple(sums)  # type: ignore[return-value]


def predicted(op: str, shape: tuple[int, int, int, int], verbose: bool) -> dict[str, float]:
    """Milliseconds of both passes."""
    found = {}
    for name, (launches, recorder) in passes(call_of(op, *shape)).items():
        seconds = recorder.seconds
        for launch in launches:
            time = time_of(launch)
            seconds += time.seconds + LAUNCH
            if verbose:
                print(f"    {name:8} {launch.name:26} {1e3 * time.seconds:7.3f} ms, bound by {time.bound}", flush=True)
        found[name] = round(1e3 * seconds, 2)
    return found


def row(name: str, ours: dict[str, float], theirs: dict[str, float] | None) -> str:
    """A row of the table: ours / theirs, where theirs are known."""
    both = sum(ours.values())
    if theirs is None:
        return f"| {name} | {ours['forward']:.2f} | {both:.1f} | |"
    total = sum(theirs.values())
    forward = f"{ours['forward']:.2f} / {theirs['forward']:.2f}"
    return f"| {name} | {forward} | {both:.1f} / {total:.1f} | {both / total:.2f} |"


def main() -> None:
    """Print the table, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"batch": 8, "tokens": 4096, "heads": 16, "channels": 128}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--ops", nargs="+", choices=list(OPS), default=list(OPS))
    parser.add_argument("--launches", action="store_true", help="print a line for each launch")
    parser.add_argument("--write", action="store_true", help="write the figures to the results")
    arguments = parser.parse_args()
    for module in ("linear_attention", "delta_rule", "deltaformer", "neural_memory", "retention"):
        importlib.import_module(f"hf_memory.ops.{module}.kernels")  # before Triton seems to interpret
    shape = tuple(getattr(arguments, name) for name in sizes)
    results = json.loads(RESULT.read_text())
    rows = results["rows"]
    if shape != tuple(sizes.values()):
        named = zip(sizes, shape[:3])
        rows = results["other shapes"].setdefault(", ".join(f"{name} {size}" for name, size in named), {})
    for op in arguments.ops:
        ours = predicted(op, shape, arguments.launches)
        kept = rows.setdefault(OPS[op], {})
        kept["now"] = ours
        print(row(OPS[op], ours, kept.get("flash-linear-attention")), flush=True)
        if arguments.write:
            RESULT.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
