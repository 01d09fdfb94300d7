"""Compile every shipped kernel ahead of time, on a machine without a GPU: `python benchmarks/kernel_report.py`.

The table shows registers of a thread, bytes of shared memory of a block, and bytes spilled, as ptxas says them; then
how many blocks a multiprocessor holds at once, and what part of its warps they are. A launch that does not compile, or
whose block needs more shared memory than the architecture has, gets a line with the reason, and the exit status is
then 1. `--triton 3.6.0 3.9.0` compiles with each of these versions, which pip installs into .tritons once.
"""

import argparse
import inspect
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache, partial
from importlib import import_module, metadata
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_flatten, tree_map

from descriptors import end_of_narrow_products
from hf_memory.ops import OPS, Op
from hf_memory.ops.attention_in_bits import attention_in_bits
from hf_memory.ops.bits import BITS, packed_bytes
from hf_memory.ops.kv_eviction import KERNEL_POLICIES, Rule, retained_attention
from hf_memory.ops.kv_eviction.policies import EvictionPolicy
from hf_memory.ops.rows import Rows
from hf_memory.ops.rwkv7_gates import rwkv7_gates
from hf_memory.ops.short_convolution import convolution_step

OPS_WITH_KERNELS = {op.name: op for op in OPS if op.has_kernels}
VARIANTS = {  # further arguments of `example`
    "neural_memory": (
        {"depth": 2, "chunk_size": 16, "expansion": 4, "residual": True},
        {"depth": 2, "chunk_size": 16},
        {"depth": 2, "chunk_size": 16, "K": 32, "V": 32},
        {"depth": 2, "chunk_size": 64},
        {"depth": 2, "chunk_size": 32, "K": 16, "V": 16},
    ),
}
SIZES = [(D, dtype) for D in (64, 128, 256) for dtype in (torch.bfloat16, torch.float32)]
# Tokens, and whether there is a state before them: decoding, one segment, and two (ops/triton/segments.py).
LENGTHS = ((1, False), (1, True), (64, False), (64, True), (1024, False))
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}
TRITONS = Path(__file__).resolve().parent.parent / ".tritons"


class Limits(NamedTuple):
    """What one multiprocessor holds at once, from the table of technical specifications in CUDA's programming guide."""

    warps: int
    blocks: int
    registers: int
    shared_bytes: int


LIMITS = {
    "sm_80": Limits(64, 32, 65536, 164 << 10),
    "sm_89": Limits(48, 24, 65536, 100 << 10),
    "sm_90": Limits(64, 32, 65536, 228 << 10),
    "sm_100": Limits(64, 32, 65536, 228 << 10),
    "sm_120": Limits(48, 24, 65536, 100 << 10),
}
TENSOR_MEMORY = 512  # columns of a multiprocessor of sm_100
RESERVED_BYTES = 1024  # of shared memory, for each block
REGISTER_UNIT = 256  # registers are given to a warp in such pieces


class Report(NamedTuple):
    """What the assembler says of one launch on one architecture."""

    name: str
    architecture: str
    registers: int
    shared_bytes: int
    spilled_bytes: int
    num_warps: int

    @property
    def blocks(self) -> int:
        """How many blocks a multiprocessor holds at once; 0 means that the kernel cannot be launched."""
        limits = LIMITS[self.architecture]
        registers = -(-32 * self.registers // REGISTER_UNIT) * REGISTER_UNIT  # of a warp
        return min(
            limits.blocks,
            limits.warps // self.num_warps,
            limits.registers // registers // self.num_warps,
            limits.shared_bytes // (self.shared_bytes + RESERVED_BYTES),
        )

    @property
    def occupancy(self) -> float:
        """The part of the multiprocessor's warps that those blocks are."""
        return self.blocks * self.num_warps / LIMITS[self.architecture].warps

    def __str__(self) -> str:
        if not self.blocks:
            return f"{self.name:60} {self.architecture:>7} FAILED: needs {self.shared_bytes} bytes of shared memory"
        printed = (
            f"{self.name:60} {self.architecture:>7} {self.registers:>9} {self.shared_bytes:>8}"
        )
        return f"{printed} {self.spilled_bytes:>8} {self.blocks:>7} {self.occupancy:>6.0%}"


class Launch(NamedTuple):
    """A launch of a kernel."""

    name: str
    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]
    grid: tuple[int, ...]


@cache
def launches(only: tuple[str, ...]) -> list[Launch]:
    """What ops launch in both passes at usual sizes, each specialisation once; nothing is computed."""
    asked = ((name, call) for name, call in calls() if any(part in name for part in only))
    made = [
        launch._replace(name=f"{launch.name} {name}")
        for name, call in asked
        for launch in recorded(call)
    ]
    found: dict[str, Launch] = {}
    for launch in made:
        found.setdefault(f"{launch.kernel} {specialisation(launch)}", launch)
    return list(found.values())


def calls() -> Iterator[tuple[str, Callable]]:
    """Calls of all ops with kernels, with the names of op, variant and size."""
    others = "attention_in_bits", "kv_eviction", "rwkv7_gates", "short_convolution"
    for module in (
        *(f"{name}.kernels" for name in (*OPS_WITH_KERNELS, *others)),
        "triton.one_token",
    ):
        import_module(f"hf_memory.ops.{module}")  # before `recorded` says that Triton interprets
    for op in OPS_WITH_KERNELS.values():
        for variant, (D, dtype), (T, has_state) in product(
            (*op.variants, *VARIANTS.get(op.name, ())), SIZES, LENGTHS
        ):
            about = " ".join(filter(None, map(_in_a_name, variant, variant.values())))
            sizes = {"B": 1, "T": T, "H": 8, "K": D, "V": D, "dtype": dtype, **variant}
            yield f"{op.name} {about} {D} {str(dtype)[6:]}", partial(_call, op, sizes, has_state)
    for dtype in (torch.bfloat16, torch.float32):
        x, state, weight = (
            torch.zeros(shape, dtype=dtype) for shape in ((1, 1, 512), (1, 3, 512), (512, 4))
        )
        options = {"silu": True, "in_place": True, "backend": "triton"}
        yield (
            f"short_convolution 512 {str(dtype)[6:]}",
            partial(convolution_step, x, state, weight, **options),
        )
        k = torch.zeros(1, 1, 8, 64, dtype=dtype)
        factor = torch.zeros(8, 64, dtype=dtype)
        gates = partial(rwkv7_gates, k, k, k, factor, factor, erasure=1.0, backend="triton")
        yield f"rwkv7_gates 64 {str(dtype)[6:]}", gates
    kept = (64, 240, torch.bfloat16), (128, 240, torch.bfloat16), (32, 112, torch.float32)
    student = (64, 439, torch.bfloat16), (64, 1123, torch.bfloat16)  # heads of SmolLM2 by default
    for (D, stay, dtype), policy in product((*kept, *student), KERNEL_POLICIES):
        of = "" if stay < 256 else f" of {stay}"
        name = f"kv_eviction {policy.__name__}{of} {D} {str(dtype)[6:]}"
        yield name, partial(_call_kv_eviction, policy, D, stay, dtype)
    for bits, (D, dtype), S in product(BITS, SIZES, (250, 8192)):
        name = f"attention_in_bits {bits} {D} {str(dtype)[6:]}"
        yield name, partial(_call_in_bits, bits, D, dtype, S)


def _in_a_name(option: str, x: Any) -> str:
    """An argument of `example` in the name of a variant."""
    if isinstance(x, bool):
        return option if x else ""
    return str(x)


def _call(op: Op, sizes: dict, has_state: bool) -> None:
    """A call of an op and its backward; of one token without it, as in decoding."""

    def real(x: Any) -> Any:
        return x.requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    arguments = tree_map(real, op.example(**sizes)) | {"mask": None}
    if not has_state:
        arguments["initial_state"] = None
    with torch.set_grad_enabled(sizes["T"] > 1):
        o, state = op.op(**arguments, backend="triton", output_final_state=True)
        if sizes["T"] > 1:
            sum(x.sum() for x in tree_flatten((o, state))[0] if x.requires_grad).backward()


def _call_kv_eviction(policy: EvictionPolicy, D: int, stay: int, dtype: torch.dtype) -> None:
    """A call of kept tokens and its backward."""
    q = torch.zeros(1, 64, 16, D, dtype=dtype)
    k = torch.zeros(1, 4, stay + 64, D, dtype=dtype)
    number = torch.zeros(1, 4, stay + 64, dtype=torch.int32)
    score = torch.zeros(1, 4, stay)
    rule = Rule(16, 4, 32, policy, 0.1, 0.0, None, True)
    with torch.enable_grad():
        o, *_ = retained_attention(q.requires_grad_(), k, k, number, score, rule, backend="triton")
        o.sum().backward()


def _call_in_bits(bits: int, D: int, dtype: torch.dtype, S: int) -> None:
    """One token that reads kept tokens, some of which are hidden, or the many of full heads."""
    q = torch.zeros(1, 3, 3, D, dtype=dtype)
    k = torch.zeros(1, S, 3, packed_bytes(D, bits), dtype=torch.uint8).transpose(1, 2)
    are_kept = S < 1024
    visible = torch.ones(1, 3, S, dtype=torch.bool) if are_kept else None
    attention_in_bits(q, k, k, visible, rows=Rows(bits, bits), scale=0.1, backend="triton")


def recorded(call: Callable) -> list[Launch]:
    """The launches of a call; none where the op has no kernel."""
    from triton import knobs
    from triton.runtime import JITFunction

    found = []

    def record(kernel, *args, grid, warmup, **given) -> None:
        options = {name: given.pop(name) for name in list(given) if name not in kernel.arg_names}
        arguments = inspect.signature(kernel.fn).bind(*args, **given).arguments
        found.append(Launch(kernel.__name__, kernel, arguments, options, grid))

    with (
        patch.object(JITFunction, "run", record),
        knobs.runtime.scope(),
        torch.set_grad_enabled(False),
    ):
        knobs.runtime.interpret = True  # then ops let tensors on the CPU pass
        try:
            call()
        except ValueError as refused:
            if "has no kernel" not in str(refused):
                raise
    return found


def specialisation(launch: Launch) -> tuple[dict, dict, dict]:
    """Types of the arguments; then by places the values that are compiled in, and the pointers to multiples of 16."""
    constants: dict[tuple, Any] = {}
    aligned: dict[tuple, list] = {}

    def kind(x: Any, place: tuple, is_constant: bool = False) -> Any:
        if x is None or is_constant:
            constants[place] = x
            return "constexpr"
        if isinstance(x, tuple):
            return type(x)(*(kind(y, (*place, i)) for i, y in enumerate(x)))
        if isinstance(x, torch.Tensor):
            aligned[place] = [["tt.divisibility", 16]]
            return POINTERS[x.dtype]
        return "fp32" if isinstance(x, float) else "i32"

    parameters = enumerate(launch.kernel.params)
    types = {p.name: kind(launch.arguments[p.name], (i,), p.is_constexpr) for i, p in parameters}
    return types, constants, aligned


def compiled_launch(launch: Launch, number: int) -> Any:
    """What Triton makes of a launch for an architecture, as 90 for sm_90; raises what Triton or ptxas raise."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(launch.kernel, *specialisation(launch))
    return triton.compile(source, target=GPUTarget("cuda", number, 32), options=launch.options)


def compile_launch(launch: Launch, architecture: str) -> Report:
    """Compile for an architecture; raises what Triton or ptxas raise."""
    number = int(architecture.removeprefix("sm_"))
    compiled = compiled_launch(launch, number)
    if narrow := re.search(
        r'"tt\.scan"(?:(?!"tt\.)[\s\S])*?\}\) : \((tensor<\d+x1x\w+>)', compiled.asm["ttir"]
    ):
        raise ValueError(
            f"{launch.name} scans a {narrow[1]}, which Triton before 3.7 does not compile"
        )
    if (columns := getattr(compiled.metadata, "tmem_size", 0)) > TENSOR_MEMORY:
        raise ValueError(
            f"{launch.name} needs {columns} columns of tensor memory, and Triton makes code that traps"
        )
    end = end_of_narrow_products(compiled.asm["ptx"], compiled.metadata.num_warps)
    if end > compiled.metadata.shared:
        raise ValueError(
            f"{launch.name} multiplies 8 columns of shared memory, which Hopper reads up to byte {end}, "
            f"but has {compiled.metadata.shared}"
        )
    registers, spilled = assemble(compiled.asm["ptx"], number)
    return Report(
        launch.name,
        architecture,
        registers,
        compiled.metadata.shared,
        spilled,
        compiled.metadata.num_warps,
    )


def assemble(ptx: str, architecture: int) -> tuple[int, int]:
    """Registers and spilled bytes, from ptxas -v, which comes with Triton."""
    from triton.backends.nvidia.compiler import get_ptxas

    takes_architecture = inspect.signature(get_ptxas).parameters  # since Triton 3.6
    ptxas = get_ptxas(architecture) if takes_architecture else get_ptxas()
    target = re.findall(r"\.target (sm_\w+)", ptx)[0]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernel.ptx").write_text(ptx)
        command = [ptxas.path, "-v", f"--gpu-name={target}", "kernel.ptx", "-o", "kernel.cubin"]
        printed = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=folder
        ).stderr
    return int(re.findall(r"Used (\d+) registers", printed)[0]), sum(
        int(n) for n in re.findall(r"(\d+) bytes spill stores", printed)
    )


def line_of(place: int, only: tuple[str, ...], architecture: str) -> tuple[str, bool]:
    """The table's line of one of `launches`, and whether it can be launched on the architecture."""
    launch = launches(only)[place]
    try:
        report = compile_launch(launch, architecture)
    except Exception as failed:  # whatever a compiler raises is a line of the table
        reason = " ".join(str(failed).split())[-200:]
        return (
            f"{launch.name:60} {architecture:>7} FAILED: {type(failed).__name__}: {reason}",
            False,
        )
    return str(report), report.blocks > 0


def with_triton(version: str) -> int:
    """Run this command with another version of Triton; its exit status."""
    folder = TRITONS / version
    if not folder.exists():
        install = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            f"--target={folder}.partial",
        ]
        subprocess.run([*install, f"triton=={version}"], check=True)
        Path(f"{folder}.partial").rename(folder)
    given = sys.argv[1 : sys.argv.index("--triton")]
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, __file__, *given], env={**os.environ, "PYTHONPATH": path}
    ).returncode


def main() -> None:
    """Print a line for each launch and architecture, in the order of the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", nargs="+", default=list(LIMITS), choices=list(LIMITS))
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        help="ops, variants and sizes whose name contains one of these",
    )
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count(), help="compile so many at the same time"
    )
    parser.add_argument(
        "--triton", nargs="+", metavar="VERSION", help="the last option: versions to compile with"
    )
    arguments = parser.parse_args()
    if arguments.triton:
        sys.exit(max(with_triton(version) for version in arguments.triton))
    print(
        f"{'kernel':60} {'sm':>7} {'registers':>9} {'shared':>8} {'spilled':>8} {'blocks':>7} {'warps':>6}"
    )
    only = tuple(arguments.only)
    failures = 0
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as pool:
        jobs = [
            pool.submit(line_of, n, only, x)
            for x in arguments.arch
            for n in range(len(launches(only)))
        ]
        for job in as_completed(jobs):
            line, fits = job.result()
            failures += not fits
            print(line, flush=True)
    print(
        f"Triton {metadata.version('triton')}: {len(jobs)} compiled, {failures} failed",
        file=sys.stderr,
    )
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
