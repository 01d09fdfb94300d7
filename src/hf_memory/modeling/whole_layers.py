"""Config of families whose mixer is a whole layer: it has its own norms and what follows in a Transformer's layer."""

from huggingface_hub.dataclasses import strict

from hf_memory.modeling.configuration import MemoryConfig


@strict
class WholeLayersConfig(MemoryConfig):
    """Memory layers have no positions, no grouped heads and no MLP of their own."""

    @property
    def memory_heads(self) -> tuple[int, int, int, int, int]:
        """Each query head has keys and values of its own."""
        heads, _, _, K, V = self.attention_heads
        return heads, heads, heads, K, V

    @property
    def has_memory_qk_norm(self) -> bool:
        """Keys have unit length where the memory is asked."""
        return False

    @property
    def feed_forwards(self) -> list[str]:
        """What follows a memory has a state, so it belongs to the mixer."""
        return ["none" if kind == "memory" else mlp for kind, mlp in zip(self.mixer_types, super().feed_forwards)]

    def norms(self, layer_idx: int) -> tuple[str, str, str, str]:
        """Those of memory layers are the mixer's."""
        return ("", "", "", "") if self.mixer_types[layer_idx] == "memory" else super().norms(layer_idx)

    def validate_memory(self):
        """Refuse what memory layers do not have."""
        for name, only in (("attention_window", None), ("memory_rope", False)):
            if getattr(self, name) != only:
                raise ValueError(f"{name} must be {only} for {self.model_type}, got {getattr(self, name)!r}")
