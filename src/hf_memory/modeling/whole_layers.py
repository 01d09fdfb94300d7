"""Config of families whose mixer is a whole layer, with its own norms and feed-forward part."""

from hf_memory.modeling.checks import check_values, strict
from hf_memory.modeling.configuration import MemoryConfig


@strict
class WholeLayersConfig(MemoryConfig):
    """Base config of such families. Their memory layers have no positions, no grouped heads and no separate MLP."""

    @property
    def memory_heads(self) -> tuple[int, int, int, int, int]:
        """The heads of the memory; each query head has its own keys and values."""
        heads, _, _, K, V = self.attention_heads
        return heads, heads, heads, K, V

    @property
    def has_memory_qk_norm(self) -> bool:
        """False, since keys have unit length already."""
        return False

    @property
    def feed_forwards(self) -> list[str]:
        """No separate feed-forward part in memory layers, since it has a state and so belongs to the mixer."""
        return [
            "none" if kind == "memory" else mlp
            for kind, mlp in zip(self.layer_types, super().feed_forwards)
        ]

    def norms(self, layer_idx: int) -> tuple[str, str, str, str]:
        """No norms around the mixer of memory layers, which has its own."""
        if self.layer_types[layer_idx] == "memory":
            return "", "", "", ""
        return super().norms(layer_idx)

    def validate_architecture(self):
        """Refuse options that memory layers do not support, too."""
        super().validate_architecture()
        check_values(self, f"for {self.model_type}", memory_rope=False)
        if {*self.layer_types} == {"memory"}:
            check_values(self, "without attention layers, which have norms", norm_placement="pre")
