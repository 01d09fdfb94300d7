"""How often the loops of a launch run, read from Triton's intermediate code with the arguments of the launch."""

import re
import statistics
from collections.abc import Callable, Iterator
from typing import Any

SAMPLES = 64  # programs whose loops are counted; their distance is odd, so that they are of all blocks of a head
INTEGERS: dict[str, Callable[..., float]] = {
    "addi": lambda a, b: a + b,
    "subi": lambda a, b: a - b,
    "muli": lambda a, b: a * b,
    "divsi": lambda a, b: a // b,
    "remsi": lambda a, b: a % b,
    "minsi": min,
    "maxsi": max,
    "extsi": lambda a: a,
    "trunci": lambda a: a,
}


def trips(ttir: str, arguments: dict, programs: int) -> list[float]:
    """Of each loop in the order of the code, the mean of programs spread over the grid's first dimension.

    Those of an inner loop are of one outer iteration. A loop whose bounds depend on the place in an outer one counts as
    in the middle of it.

    Raises:
        ValueError: if a bound is not known from the arguments, as with bounds in memory.
    """
    spread = range(0, programs, max(1, programs // SAMPLES) | 1)
    return [statistics.mean(x) for x in zip(*(_trips(ttir, arguments, program) for program in spread))]


def leaves(arguments: dict, group: str = "") -> Iterator[tuple[str, Any]]:
    """Arguments that are no groups, with their names in Triton's code, as `call.T`."""
    for name, x in arguments.items():
        if hasattr(x, "_asdict"):
            yield from leaves(x._asdict(), f"{group}{name}.")
        else:
            yield group + name, x


def _trips(ttir: str, arguments: dict, program_id: int) -> list[float]:
    known: dict[str, float] = {f"%{n}": x for n, x in leaves(arguments) if isinstance(x, int)}
    found = []
    for line in ttir.splitlines():
        if constant := re.search(r"(%\S+) = arith\.constant (-?\d+) : i\d+", line):
            known[constant[1]] = int(constant[2])
        elif program := re.search(r"(%\S+) = tt\.get_program_id", line):
            known[program[1]] = program_id if "get_program_id x" in line else 0
        elif loop := re.search(r"scf\.for (%\S+) = (%\S+) to (%\S+) step (%\S+) ", line):
            unknown = [x for x in loop.groups()[1:] if x not in known]
            if unknown:
                raise ValueError(f"the bound {unknown[0]} of a loop is not known from the launch: {line.strip()[:120]}")
            first, end, step = (known[x] for x in loop.groups()[1:])
            found.append(max(0.0, -((first - end) // step)))
            known[loop[1]] = (first + end) // 2
        elif operation := re.search(r"(%\S+) = arith\.(\w+) ([^:]*) : (?!tensor)", line):
            operands = re.findall(r"%[\w#.]+", operation[3])
            if operation[2] in INTEGERS and all(x in known for x in operands):
                known[operation[1]] = INTEGERS[operation[2]](*(known[x] for x in operands))
    return found
