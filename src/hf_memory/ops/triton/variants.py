"""Specialisations of kernels that are compiled ahead of time."""

from typing import Any, NamedTuple

import torch

POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
OTHERS = {"scale": "fp32", "bounds": "*i64", "first": "*i64"}
OTHERS |= dict.fromkeys(("T", "tokens", "chunks", "N", "C"), "i32")


class Variant(NamedTuple):
    """One specialisation of a kernel."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict
    num_warps: int
    num_stages: int


def variant(name: str, kernel: Any, constants: dict, absent: set[str], narrow: set[str], dtype: torch.dtype) -> Variant:
    """A specialisation from the arguments of a launch.

    Args:
        name: the row's name in the table.
        kernel: the Triton kernel.
        constants: launch options and compile-time arguments; the kernel may use only some of them.
        absent: arguments that are None.
        narrow: arguments that are tensors of `dtype`; others are what OTHERS says, or float32 tensors.
        dtype: the dtype of the inputs.
    """
    launch = {n: constants[n] for n in ("num_warps", "num_stages")}
    constants = {**constants, **dict.fromkeys(absent)}
    constants = {n: constants[n] for n in kernel.arg_names if n in constants}
    pointers = {n: POINTERS[dtype if n in narrow else torch.float32] for n in kernel.arg_names if n not in constants}
    return Variant(name, kernel, {n: OTHERS.get(n, pointer) for n, pointer in pointers.items()}, constants, **launch)
