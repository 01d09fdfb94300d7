"""The delta rule's kernels."""

from hf_memory.ops.delta_rule.kernels.launch import delta_rule
from hf_memory.ops.delta_rule.kernels.rank_one_launch import diagonal_plus_rank_one

__all__ = ["delta_rule", "diagonal_plus_rank_one"]
