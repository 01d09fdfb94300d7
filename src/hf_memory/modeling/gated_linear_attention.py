"""Gated linear attention, from retention to Mamba-2 and MesaNet, by the config's `gate`."""

import math
from typing import Any

from hf_memory.mixers.far_memory import DecayedSlots
from hf_memory.mixers.gated_linear_attention import GatedLinearAttentionMixer, Mamba2Mixer
from hf_memory.mixers.mamba import MambaMixer
from hf_memory.mixers.variants.mamba3 import Mamba3Mixer
from hf_memory.mixers.variants.ridge_regression import KalmanMixer, MesaMixer
from hf_memory.mixers.windowed import WindowedMixer
from hf_memory.modeling import base
from hf_memory.modeling.checks import check, check_gate, check_values, strict
from hf_memory.modeling.memory_heads import Levels, MemoryHeadsConfig

MIXERS = {
    **dict.fromkeys(("retention", "scalar", "vector"), GatedLinearAttentionMixer),
    "mamba": MambaMixer,
    "mamba2": Mamba2Mixer,
    "mamba3": Mamba3Mixer,
    "mesa": MesaMixer,
    "kalman": KalmanMixer,
}
# whose mixers have the projections of a Transformer
GATES = tuple(gate for gate in MIXERS if gate != "mamba")
OUTPUT_GATE = {  # options of the output gate, with what they must be where a gate has another one
    "output_gate": "silu",
    "output_gate_low_rank_dim": None,
    "output_gate_bias": False,
    "output_norm_eps": None,
}
TEMPERATURE = {"gate_logit_normalizer": 16}
DECAY = {"gate_low_rank_dim": 16, **TEMPERATURE}
UNUSED = {  # options that a gate does not use, and their defaults
    "retention": DECAY,
    "scalar": {"gate_low_rank_dim": 16},
    "mamba": {**TEMPERATURE, **OUTPUT_GATE},
    "mamba2": {**DECAY, **OUTPUT_GATE},
    "mamba3": {**DECAY, **OUTPUT_GATE},
    "mesa": DECAY,
    "kalman": DECAY,
}


@strict
class GatedLinearAttentionConfig(Levels, MemoryHeadsConfig):
    """Config of gated linear attention. Options that are not given follow the paper of the chosen gate.

    Args:
        gate (`str`, defaults to `"vector"`): what the decay of the memory depends on:
            `"retention"`: a fixed decay for each head, with rotary positions and values twice as wide as keys;
            `"scalar"` (gated retention): one decay for each head and token;
            `"vector"` (GLA): one decay for each key channel and token, with keys half as wide as values;
            `"mamba"`: one decay for each number of the memory, which has a single head of 16 key channels and twice
            `hidden_size` value channels, and a convolution over 4 tokens (the published models have no MLP:
            `intermediate_size=0`);
            `"mamba2"`: one decay for each head of 64 value channels, with a single head of 128 key channels and
            convolutions over 4 tokens. If `linear_num_value_heads` is given, the number of key heads is that of the
            other gates;
            `"mamba3"`: as `"mamba2"`, with RMS norms and biases of queries and keys, of which half of the channels turn
            by angles that depend on the tokens, and writes by the trapezoid rule in place of convolutions;
            `"mesa"` (MesaNet) and `"kalman"` (Gated KalmaNet): one decay for each head and token, and the memory is
            read as the linear map that fits all pairs of keys and values best, with unit keys and convolutions over 4
            tokens.
        gate_low_rank_dim (`int`, *optional*): rank of the projection to the gate `"vector"` (default: 16) or to the
            step sizes of `"mamba"` (default: a sixteenth of `hidden_size`).
        gate_logit_normalizer (`int`, defaults to 16): temperature of the gates `"scalar"` and `"vector"`; larger:
            slower decay.
    """

    model_type = "hf_memory_gated"
    far_memory = DecayedSlots

    gate: str = "vector"
    gate_low_rank_dim: int | None = None
    gate_logit_normalizer: int = 16
    memory_rope: bool | None = None

    @property
    def mixers(self) -> dict:
        """The mixer class of each layer type."""
        return {
            **MemoryHeadsConfig.mixers,
            "memory": MIXERS[self.gate],
            "sliding_memory": WindowedMixer,
        }

    def set_defaults(self) -> None:
        """See `MemoryConfig.set_defaults`."""
        super().set_defaults()
        head_dim: Any = self.head_dim
        width = self.hidden_size
        convolves = self.gate in ("mamba", "mamba2", "mesa", "kalman")
        if self.gate == "mamba":
            rank = math.ceil(width / 16)
            self.fill(
                linear_num_key_heads=1, linear_value_head_dim=2 * width, gate_low_rank_dim=rank
            )
        if self.gate in ("mamba2", "mamba3") and self.linear_num_value_heads is None:
            self.fill(linear_num_key_heads=1, linear_value_head_dim=64)
            self.fill(linear_num_value_heads=2 * width // self.linear_value_head_dim)
        key_dims = {"vector": head_dim // 2, "mamba": 16, "mamba2": 128, "mamba3": 128}
        self.fill(
            linear_key_head_dim=key_dims.get(self.gate, head_dim),
            linear_value_head_dim=head_dim * (2 if self.gate == "retention" else 1),
            linear_conv_kernel_dim=4 if convolves else 0,
            memory_rope=self.gate == "retention",
            gate_low_rank_dim=16,
            memory_qk_norm=True if self.gate == "mamba3" else None,
            output_gate="none" if self.gate == "mesa" else "silu",
        )

    def validate_architecture(self):
        """Check the gate, and refuse what it would ignore, too."""
        check_gate(self.gate, tuple(MIXERS))
        super().validate_architecture()
        check_values(
            self, f"with gate={self.gate!r}, which does not use it", **UNUSED.get(self.gate, {})
        )
        heads = self.memory_heads[:3]
        only = "1, as linear_num_value_heads, with gate='mamba'"
        check(self.gate != "mamba" or heads == (1, 1, 1), "linear_num_key_heads", only, heads)


class GatedLinearAttentionModel(base.MemoryModel):
    """Gated linear attention without a head."""


class GatedLinearAttentionForCausalLM(base.MemoryForCausalLM):
    """Gated linear attention with a head that predicts the next token."""

    model_class = GatedLinearAttentionModel


class GatedLinearAttentionForSequenceClassification(base.MemoryForSequenceClassification):
    """Gated linear attention with a head that classifies sequences."""


class GatedLinearAttentionForTokenClassification(base.MemoryForTokenClassification):
    """Gated linear attention with a head that classifies tokens."""
