"""Compile every shipped kernel ahead of time, on a machine without a GPU: `python benchmarks/kernel_report.py`.

The table shows registers of a thread, bytes of shared memory of a block, and bytes spilled, as ptxas says them; then
how many blocks a multiprocessor holds at once, and what part of its warps they are.
"""

import argparse
import re
import subprocess
import tempfile
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from hf_memory.ops import OPS
from hf_memory.ops.triton.variants import Variant

OPS_WITH_KERNELS = tuple(op.name for op in OPS if op.kernels)


class Limits(NamedTuple):
    """What one multiprocessor holds at once, from the table of technical specifications in CUDA's programming guide."""

    warps: int
    blocks: int
    registers: int
    shared_bytes: int


LIMITS = {
    80: Limits(64, 32, 65536, 164 << 10),
    90: Limits(64, 32, 65536, 228 << 10),
    100: Limits(64, 32, 65536, 228 << 10),
}
ARCHITECTURES = tuple(LIMITS)
RESERVED_BYTES = 1024  # of shared memory, for each block
REGISTER_UNIT = 256  # registers are given to a warp in such pieces


class Report(NamedTuple):
    """What the assembler says of one variant on one architecture."""

    name: str
    architecture: int
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


def compile_variant(variant: Variant, architecture: int) -> Report:
    """Compile for sm_<architecture>; raises what Triton or ptxas raise."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: variant.signature.get(name, "constexpr") for name in variant.kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = ASTSource(variant.kernel, signature, variant.constants, aligned)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    if narrow := re.search(r'"tt\.scan"(?:(?!"tt\.)[\s\S])*?\}\) : \((tensor<\d+x1x\w+>)', compiled.asm["ttir"]):
        raise ValueError(f"{variant.name} scans a {narrow[1]}, which Triton before 3.7 does not compile")
    registers, spilled = _assemble(compiled.asm["ptx"], architecture)
    return Report(variant.name, architecture, registers, compiled.metadata.shared, spilled, variant.num_warps)


def _assemble(ptx: str, architecture: int) -> tuple[int, int]:
    """Registers and spilled bytes, from ptxas -v, which comes with Triton."""
    from triton.backends.nvidia.compiler import get_ptxas

    target = re.findall(r"\.target (sm_\w+)", ptx)[0]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernel.ptx").write_text(ptx)
        command = [get_ptxas(architecture).path, "-v", f"--gpu-name={target}", "kernel.ptx", "-o", "kernel.cubin"]
        printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stderr
    return int(re.findall(r"Used (\d+) registers", printed)[0]), sum(
        int(n) for n in re.findall(r"(\d+) bytes spill stores", printed)
    )


def all_variants(op: str | None = None) -> list[Variant]:
    """The shipped variants of one op or of all."""
    ops = OPS_WITH_KERNELS if op is None else (op,)
    return [variant for name in ops for variant in import_module(f"hf_memory.ops.{name}.kernels").variants()]


def main() -> None:
    """Print a line for each variant and architecture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--op", choices=OPS_WITH_KERNELS)
    parser.add_argument("--arch", type=int, nargs="+", default=ARCHITECTURES)
    parser.add_argument("--only", nargs="+", default=[""], help="compile variants whose name contains one of these")
    arguments = parser.parse_args()
    print(f"{'kernel':60} {'sm':>4} {'registers':>9} {'shared':>8} {'spilled':>8} {'blocks':>7} {'warps':>6}")
    for variant in all_variants(arguments.op):
        if any(name in variant.name for name in arguments.only):
            for architecture in arguments.arch:
                print(_line(compile_variant(variant, architecture)), flush=True)


def _line(r: Report) -> str:
    printed = f"{r.name:60} {r.architecture:>4} {r.registers:>9} {r.shared_bytes:>8} {r.spilled_bytes:>8}"
    return f"{printed} {r.blocks:>7} {r.occupancy:>6.0%}"


if __name__ == "__main__":
    main()
