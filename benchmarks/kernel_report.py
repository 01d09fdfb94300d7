"""Compile every shipped kernel ahead of time, on a machine without a GPU: `python benchmarks/kernel_report.py`.

The table shows registers of a thread, bytes of shared memory of a block, and bytes spilled, as ptxas says them; then
how many blocks a multiprocessor holds at once, and what part of its warps they are. A variant that does not compile, or
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
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import import_module, metadata
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from hf_memory.ops import OPS
from hf_memory.ops.triton.variants import Variant

OPS_WITH_KERNELS = tuple(op.name for op in OPS if op.kernels)
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
RESERVED_BYTES = 1024  # of shared memory, for each block
REGISTER_UNIT = 256  # registers are given to a warp in such pieces


class Report(NamedTuple):
    """What the assembler says of one variant on one architecture."""

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
        printed = f"{self.name:60} {self.architecture:>7} {self.registers:>9} {self.shared_bytes:>8}"
        return f"{printed} {self.spilled_bytes:>8} {self.blocks:>7} {self.occupancy:>6.0%}"


def compile_variant(variant: Variant, architecture: str) -> Report:
    """Compile for an architecture; raises what Triton or ptxas raise."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: variant.signature.get(name, "constexpr") for name in variant.kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = ASTSource(variant.kernel, signature, variant.constants, aligned)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    number = int(architecture.removeprefix("sm_"))
    compiled = triton.compile(source, target=GPUTarget("cuda", number, 32), options=options)
    if narrow := re.search(r'"tt\.scan"(?:(?!"tt\.)[\s\S])*?\}\) : \((tensor<\d+x1x\w+>)', compiled.asm["ttir"]):
        raise ValueError(f"{variant.name} scans a {narrow[1]}, which Triton before 3.7 does not compile")
    registers, spilled = _assemble(compiled.asm["ptx"], number)
    return Report(variant.name, architecture, registers, compiled.metadata.shared, spilled, variant.num_warps)


def _assemble(ptx: str, architecture: int) -> tuple[int, int]:
    """Registers and spilled bytes, from ptxas -v, which comes with Triton."""
    from triton.backends.nvidia.compiler import get_ptxas

    takes_architecture = inspect.signature(get_ptxas).parameters  # since Triton 3.6
    ptxas = get_ptxas(architecture) if takes_architecture else get_ptxas()
    target = re.findall(r"\.target (sm_\w+)", ptx)[0]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernel.ptx").write_text(ptx)
        command = [ptxas.path, "-v", f"--gpu-name={target}", "kernel.ptx", "-o", "kernel.cubin"]
        printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stderr
    return int(re.findall(r"Used (\d+) registers", printed)[0]), sum(
        int(n) for n in re.findall(r"(\d+) bytes spill stores", printed)
    )


def all_variants(op: str | None = None) -> list[Variant]:
    """The shipped variants of one op or of all."""
    ops = OPS_WITH_KERNELS if op is None else (op,)
    return [variant for name in ops for variant in import_module(f"hf_memory.ops.{name}.kernels").variants()]


def line_of(place: int, op: str | None, architecture: str) -> tuple[str, bool]:
    """The table's line of one of `all_variants`, and whether it can be launched on the architecture."""
    variant = all_variants(op)[place]
    try:
        report = compile_variant(variant, architecture)
    except Exception as failed:  # whatever a compiler raises is a line of the table
        reason = " ".join(str(failed).split())[-200:]
        return f"{variant.name:60} {architecture:>7} FAILED: {type(failed).__name__}: {reason}", False
    return str(report), report.blocks > 0


def with_triton(version: str) -> int:
    """Run this command with another version of Triton; its exit status."""
    folder = TRITONS / version
    if not folder.exists():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", f"--target={folder}.partial"]
        subprocess.run([*install, f"triton=={version}"], check=True)
        Path(f"{folder}.partial").rename(folder)
    given = sys.argv[1 : sys.argv.index("--triton")]
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run([sys.executable, __file__, *given], env={**os.environ, "PYTHONPATH": path}).returncode


def main() -> None:
    """Print a line for each variant and architecture, in the order of the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--op", choices=OPS_WITH_KERNELS)
    parser.add_argument("--arch", nargs="+", default=list(LIMITS), choices=list(LIMITS))
    parser.add_argument("--only", nargs="+", default=[""], help="compile variants whose name contains one of these")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="compile so many at the same time")
    parser.add_argument("--triton", nargs="+", metavar="VERSION", help="the last option: versions to compile with")
    arguments = parser.parse_args()
    if arguments.triton:
        sys.exit(max(with_triton(version) for version in arguments.triton))
    print(f"{'kernel':60} {'sm':>7} {'registers':>9} {'shared':>8} {'spilled':>8} {'blocks':>7} {'warps':>6}")
    chosen = [
        place
        for place, variant in enumerate(all_variants(arguments.op))
        if any(name in variant.name for name in arguments.only)
    ]
    failures = 0
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(line_of, place, arguments.op, x) for place in chosen for x in arguments.arch]
        for job in as_completed(jobs):
            line, fits = job.result()
            failures += not fits
            print(line, flush=True)
    print(f"Triton {metadata.version('triton')}: {len(jobs)} compiled, {failures} failed", file=sys.stderr)
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
