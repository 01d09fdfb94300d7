"""The neural memory's kernels."""

from hf_memory.ops.neural_memory.kernels.launch import neural_memory

__all__ = ["neural_memory"]
