"""Machine code of a kernel for Hopper: its instructions, its loops, and a warp that issues them in order."""

import collections
import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

GLOBAL_LATENCY = 650  # cycles of a load from memory under load
SYNCHRONISE = 20  # cycles of a barrier
TENSOR_CYCLES = 16  # of a partition's tensor core for one HMMA
ADDRESS_REGISTERS = 2
LATENCIES = {"LDS": 30, "LDSM": 33, "LDL": 40, "HMMA": 33, "SHFL": 24, "MUFU": 22, "S2R": 25, "CS2R": 25, "S2UR": 25}
STORES = ("STS", "STG", "STL", "STSM", "RED", "LDGSTS")


class Instruction(NamedTuple):
    """One of a program, with the registers that it writes and reads."""

    name: str  # with its modifiers
    operands: str
    writes: tuple[str, ...]
    reads: tuple[str, ...]

    @property
    def kind(self) -> str:
        """The name without modifiers."""
        return self.name.split(".")[0]


def disassembled(cubin: bytes) -> tuple[list[Instruction], list[tuple[int, int]]]:
    """Instructions, and loops as the places of their first and last ones, in the order of the program."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
        text = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
    program: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x?_?\w+):", line):
            labels[label[1]] = len(program)
        elif code := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@\S+\s+)?(\S+)\s*(.*?)\s*;", line):
            program.append(_instruction(code[1], code[2]))
    return program, _loops(program, labels)


def _loops(program: list[Instruction], labels: dict[str, int]) -> list[tuple[int, int]]:
    """Branches to an earlier place; a branch to itself is the end of a program."""
    ends: dict[int, int] = {}
    for end, instruction in enumerate(program):
        label = re.search(r"\.L_x?_?\w+", instruction.operands)
        if instruction.kind == "BRA" and label and end - labels.get(label[0], end) >= 2:
            ends[labels[label[0]]] = end
    return sorted(ends.items(), key=lambda loop: (loop[0], -loop[1]))


def _instruction(name: str, text: str) -> Instruction:
    """An instruction with its registers; how many an operand takes is known from the name."""
    operands, kind = re.split(r",\s*(?![^\[]*\])", text), name.split(".")[0]
    width = 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
    written, read = width, 2 if width == 2 or kind == "LDG" else 1
    if kind == "LDSM":
        written = 4 if name.endswith(".4") else 2
    if kind == "HMMA":
        written, read = 4, 4
    if kind == "HGMMA":
        written, read = gmma_shape(name)[1] // 2, 4
    if kind in STORES or not operands[0]:
        pointer, values = operands[:1], operands[1:]
        return Instruction(name, text, (), _registers(pointer, ADDRESS_REGISTERS) + _registers(values, width))
    return Instruction(name, text, _registers(operands[:1], written), _registers(operands[1:], read))


def _registers(operands: list[str], width: int) -> tuple[str, ...]:
    found = (re.search(r"(?<![A-Z])(UR|R)(\d+)", x) for x in operands)
    return tuple(f"{x[1]}{int(x[2]) + i}" for x in found if x for i in range(width))


def gmma_shape(name: str) -> tuple[int, int, int]:
    """Rows, columns and depth of a product of a warp group."""
    return tuple(int(x) for x in re.findall(r"HGMMA\.(\d+)x(\d+)x(\d+)", name)[0])  # type: ignore[return-value]


def cycles(body: list[Instruction], iterations: int = 3) -> float:
    """Cycles of one more iteration of a loop's body, for a warp that issues in order and has no neighbours."""
    ready: dict[str, float] = collections.defaultdict(float)
    now = tensor = 0.0
    copies: list[float] = []
    ends = []
    for _ in range(iterations):
        for x in body:
            start = max([now, *(ready[register] for register in x.reads)])
            if x.kind in ("HMMA", "HGMMA"):
                start = max(start, tensor)
            elif x.name.startswith("WARPGROUP.DEPBAR"):
                start = max(start, tensor + 30)
            elif x.kind == "BAR":
                start += SYNCHRONISE
            elif x.kind == "LDGDEPBAR":
                copies.append(start + GLOBAL_LATENCY)
            elif x.kind == "DEPBAR":
                start = max([start, *_finished(copies, x.operands)])
            now = start + (2 if x.kind in ("LDG", "STG", "LDGSTS") else 1)
            if x.kind in ("HMMA", "HGMMA"):
                tensor = start + tensor_cycles_of_warp(x)
            ready.update((register, start + _latency(x)) for register in x.writes)
        ends.append(now)
    return ends[-1] - ends[-2]


def _finished(copies: list[float], operands: str) -> list[float]:
    """The ends of groups of copies that an instruction waits for; all but the last few, which it names."""
    left = re.search(r"SB\d+, (0x[0-9a-f]+)", operands)
    number = len(copies) - (int(left[1], 16) if left else 0)
    done, copies[:] = copies[: max(0, number)], copies[max(0, number) :]
    return done


def _latency(x: Instruction) -> float:
    if x.kind == "LDG":
        return GLOBAL_LATENCY
    return 2 if x.kind == "HGMMA" else LATENCIES.get(x.kind, 5)  # WARPGROUP.DEPBAR waits for the results of HGMMA


def tensor_cycles_of_warp(x: Instruction) -> float:
    """Cycles for which an instruction of a warp holds the tensor core."""
    if x.kind == "HMMA":
        return TENSOR_CYCLES
    rows, columns, depth = gmma_shape(x.name)
    return max(16, rows * columns * depth * 2 / (4096 if "TF32" in x.name else 8192))


def tensor_cycles(program: list[Instruction]) -> tuple[float, float]:
    """Cycles of a partition's tensor core for HMMA, and of a multiprocessor's for HGMMA, at what they sustain."""
    partition = 8.0 * sum(x.kind == "HMMA" for x in program)
    of_groups = [(gmma_shape(x.name), "TF32" in x.name) for x in program if x.kind == "HGMMA"]
    whole = sum(2 * m * n * k / (2048 if tf32 else 4096) / 0.8 for (m, n, k), tf32 in of_groups)
    return partition, whole
