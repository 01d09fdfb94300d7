"""Ops: the memories as pure functions of tensors. The contract tests run over all entries of OPS.

An argument with a wrong shape, dtype or value raises a ValueError whose message names it.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

from hf_memory.ops.delta_rule import delta_rule
from hf_memory.ops.delta_rule import reference as _delta_rule
from hf_memory.ops.deltaformer import DeltaFormerState, deltaformer
from hf_memory.ops.deltaformer import reference as _deltaformer
from hf_memory.ops.linear_attention import LinearState, linear_attention
from hf_memory.ops.linear_attention import reference as _linear_attention
from hf_memory.ops.log_linear_attention import LogLinearState, log_linear_attention
from hf_memory.ops.log_linear_attention import reference as _log_linear_attention
from hf_memory.ops.neural_memory import EarlierPairs, Learning, NeuralMemoryState, neural_memory
from hf_memory.ops.neural_memory import reference as _neural_memory
from hf_memory.ops.selective_scan import reference as _selective_scan
from hf_memory.ops.selective_scan import selective_scan
from hf_memory.ops.variants.large_chunk_memory import LargeChunkState, large_chunk_memory
from hf_memory.ops.variants.large_chunk_memory import reference as _large_chunk_memory
from hf_memory.ops.variants.ridge_regression import RidgeState, ridge_regression
from hf_memory.ops.variants.ridge_regression import reference as _ridge_regression

__all__ = [
    "OPS",
    "DeltaFormerState",
    "EarlierPairs",
    "LargeChunkState",
    "Learning",
    "LinearState",
    "LogLinearState",
    "NeuralMemoryState",
    "Op",
    "RidgeState",
    "delta_rule",
    "deltaformer",
    "large_chunk_memory",
    "linear_attention",
    "log_linear_attention",
    "neural_memory",
    "ridge_regression",
    "selective_scan",
]


class Op(NamedTuple):
    """An entry of OPS: an op with what the contract tests need."""

    name: str
    op: Callable
    example: Callable  # returns valid random arguments
    # arguments of `example` for each variant of the op, the plain one first
    variants: tuple[dict, ...]
    gates: tuple[str, ...] = ()  # arguments that are logarithms of a decay
    # of the state; "token": no state for packed sequences
    growth: Literal["fixed", "log", "token"] = "fixed"
    is_linear: bool = False  # in its state: then has 16-bit products, in_place and more query heads
    has_kernels: bool = False


OPS = (
    Op(
        "linear_attention",
        linear_attention,
        _linear_attention.example,
        tuple(
            {"decay": decay, "normalize": n}
            for decay in ("none", "scalar", "vector")
            for n in (False, True)
        ),
        gates=("g",),
        is_linear=True,
        has_kernels=True,
    ),
    Op(
        "delta_rule",
        delta_rule,
        _delta_rule.example,
        (
            *(
                {"decay": decay, "beta": beta}
                for decay in ("none", "scalar", "vector")
                for beta in ("random", "extreme")
            ),
            {"decay": "vector", "erase": "own"},
        ),
        gates=("g",),
        is_linear=True,
        has_kernels=True,
    ),
    Op(
        "log_linear_attention",
        log_linear_attention,
        _log_linear_attention.example,
        (
            {"decay": "scalar"},
            {"decay": "scalar", "delta": True},
            {"decay": "none", "levels": 3},
            {"decay": "vector", "delta": True, "levels": 3},
        ),
        gates=("g",),
        growth="log",
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
        growth="token",
        has_kernels=True,
    ),
    Op(
        "neural_memory",
        neural_memory,
        _neural_memory.example,
        (
            {"depth": 2, "chunk_size": 16},
            {"depth": 1, "chunk_size": 1},
            {"depth": 1, "chunk_size": 16, "momentum": False},
            {"depth": 2, "chunk_size": 4, "decay": False},
            {"depth": 3, "chunk_size": 7},
        ),
        gates=("decay",),
        has_kernels=True,
    ),
    Op("large_chunk_memory", large_chunk_memory, _large_chunk_memory.example, ({},)),
    Op(
        "ridge_regression",
        ridge_regression,
        _ridge_regression.example,
        ({}, {"ratio": 0.02}),
        gates=("g",),
    ),
    Op("selective_scan", selective_scan, _selective_scan.example, ({},), gates=("g",)),
)
