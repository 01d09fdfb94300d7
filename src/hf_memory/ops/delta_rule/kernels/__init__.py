"""The delta rule's kernels."""

from hf_memory.ops.delta_rule.kernels.launch import delta_rule, variants

__all__ = ["delta_rule", "variants"]
