"""The delta rule's kernels."""

from hf_memory.ops.delta_rule.kernels import launch, rank_one_launch
from hf_memory.ops.delta_rule.kernels.launch import delta_rule
from hf_memory.ops.delta_rule.kernels.rank_one_launch import diagonal_plus_rank_one
from hf_memory.ops.triton.variants import Variant

__all__ = ["delta_rule", "diagonal_plus_rank_one", "variants"]


def variants() -> list[Variant]:
    """The specialisations of both forms to compile ahead of time."""
    return launch.variants() + rank_one_launch.variants()
