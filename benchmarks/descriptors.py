"""What matrix products of Hopper read of shared memory, from the descriptors in PTX.

For a product of 8 columns (`wgmma` m64n8), Triton gives the right operand room for 8 rows of shared memory, and Hopper
reads 16: an illegal address if the operand is the last of a program's shared memory. That is what the one kernel that
failed on a GPU had and all others did not; https://github.com/triton-lang/triton/issues/10629 reports the same.
"""

import re
from collections.abc import Callable

ROW_BYTES = {0: 16, 1: 128, 2: 64, 3: 32}  # of a row, by the kind of swizzling
OPERATIONS: dict[str, Callable[..., int]] = {
    "mov": lambda x: x,
    "cvt": lambda x: x,
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "or": lambda x, y: x | y,
    "and": lambda x, y: x & y,
    "xor": lambda x, y: x ^ y,
    "shl": lambda x, y: x << y,
    "shr": lambda x, y: x >> y,
    "mul": lambda x, y: x * y,
    "shfl": lambda x, *_: x,  # of a warp's number, which is the same in all its threads
    "bfe": lambda x, start, length: (x >> start) & ((1 << length) - 1),
}


def end_of_narrow_products(ptx: str, num_warps: int) -> int:
    """The byte of shared memory up to which products of 8 columns read; 0 if there are none."""
    lines = re.findall(r"^\s+([a-z]\w*)\S*\s+(%\w+)(?:\|%\w+)?, (.+);", ptx, re.MULTILINE)
    definitions = {name: (operation, operands.split(", ")) for operation, name, operands in lines}

    def value(x: str, thread: int) -> int:
        if x in ("global_smem", "%tid.x"):
            return thread if x == "%tid.x" else 0
        if not x.startswith("%"):
            return int(x, 0)
        operation, operands = definitions[x]
        bits = 64 if x.startswith("%rd") else 32
        return OPERATIONS[operation](*(value(y, thread) for y in operands)) % (1 << bits)

    found = re.findall(r"wgmma\.mma_async\S*\.m64n8k\S* \{[^}]*\}, (?:\{[^}]*\}|%\w+), (%\w+)", ptx)
    threads = range(0, 32 * num_warps, 128)  # of which one is asked for each group of four warps
    return max((_end(value(x, thread)) for x in set(found) for thread in threads), default=0)


def _end(descriptor: int) -> int:
    """The end of 16 rows, from their start in units of 16 bytes and the kind of swizzling."""
    rows = 8 * ROW_BYTES[descriptor >> 62]
    start = (descriptor & 0x3FFF) << 4
    return start // rows * rows + 2 * rows
