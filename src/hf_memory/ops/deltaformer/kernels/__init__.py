"""DeltaFormer's kernels."""

from hf_memory.ops.deltaformer.kernels.launch import corrected_values

__all__ = ["corrected_values"]
