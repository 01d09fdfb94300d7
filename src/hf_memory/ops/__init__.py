"""Pure functions of tensors. OPS is what the contract tests run over."""

from collections.abc import Callable
from typing import NamedTuple

from hf_memory.ops.delta_rule import delta_rule
from hf_memory.ops.delta_rule import reference as _delta_rule
from hf_memory.ops.deltaformer import DeltaFormerState, deltaformer
from hf_memory.ops.deltaformer import reference as _deltaformer
from hf_memory.ops.linear_attention import LinearState, linear_attention
from hf_memory.ops.linear_attention import reference as _linear_attention
from hf_memory.ops.neural_memory import NeuralMemoryState, neural_memory
from hf_memory.ops.neural_memory import reference as _neural_memory

__all__ = [
    "OPS",
    "DeltaFormerState",
    "LinearState",
    "NeuralMemoryState",
    "Op",
    "delta_rule",
    "deltaformer",
    "linear_attention",
    "neural_memory",
]


class Op(NamedTuple):
    """One op as the contract tests see it."""

    name: str
    op: Callable
    example: Callable  # makes valid random arguments
    variants: tuple[dict, ...]  # arguments of `example` that select each mathematically different form
    grows: bool = False  # the state has a row for each token; then packed sequences have none
    in_place: bool = False  # one token may be written over a state that the caller gives away


OPS = (
    Op(
        "linear_attention",
        linear_attention,
        _linear_attention.example,
        tuple({"decay": decay, "normalize": n} for decay in ("none", "scalar", "vector") for n in (False, True)),
        in_place=True,
    ),
    Op(
        "delta_rule",
        delta_rule,
        _delta_rule.example,
        tuple(
            {"decay": decay, "beta": beta} for decay in ("none", "scalar", "vector") for beta in ("random", "extreme")
        ),
        in_place=True,
    ),
    Op(
        "deltaformer",
        deltaformer,
        _deltaformer.example,
        tuple(
            {"write_kernel": write, "read_kernel": read, "beta_mode": mode}
            for write, read, mode in (
                ("softmax", "softmax", "erase"),
                ("softmax", "softmax", "delta"),
                ("softmax", "linear", "none"),
                ("linear", "linear", "delta"),
                ("relu", "softmax", "erase"),
                ("round", "relu", "erase"),
                ("linear", "round", "delta"),
            )
        ),
        grows=True,
    ),
    Op(
        "neural_memory",
        neural_memory,
        _neural_memory.example,
        (
            {"depth": 1, "chunk_size": 1},
            {"depth": 1, "chunk_size": 16, "momentum": False},
            {"depth": 2, "chunk_size": 16},
            {"depth": 2, "chunk_size": 4, "decay": False, "loss": "full"},
            {"depth": 3, "chunk_size": 7},
        ),
    ),
)
