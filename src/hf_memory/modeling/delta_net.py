"""DeltaNet and the memories made of it, by the config's `gate`."""

from typing import Any

from hf_memory.mixers.delta_net import DeltaNetMixer
from hf_memory.mixers.far_memory import DeltaSlots
from hf_memory.mixers.variants.delta_rules import (
    CombaMixer,
    DeltaProductMixer,
    GatedDeltaNet2Mixer,
    PreconditionedMixer,
)
from hf_memory.mixers.windowed import WindowedMixer
from hf_memory.modeling import base
from hf_memory.modeling.checks import check, check_gate, strict
from hf_memory.modeling.memory_heads import Levels, MemoryHeadsConfig

MIXERS = {
    **dict.fromkeys(("none", "scalar", "vector"), DeltaNetMixer),
    "gdn2": GatedDeltaNet2Mixer,
    "comba": CombaMixer,
    **dict.fromkeys(("preconditioned", "preconditioned_vector"), PreconditionedMixer),
}


@strict
class DeltaNetConfig(Levels, MemoryHeadsConfig):
    """Config of DeltaNet. Options that are not given follow the paper of the chosen gate.

    Args:
        gate (`str`, defaults to `"none"`): the decay of the memory, and how it is written:
            `"none"` (DeltaNet): it does not decay;
            `"scalar"` (Gated DeltaNet): one decay for each head, values twice as wide as keys, output gated by silu;
            `"vector"` (Kimi Delta Attention): one decay for each key channel, output gated by sigmoid;
            `"gdn2"` (Gated DeltaNet-2): as `"vector"`, and each channel of keys and values has a gate of its own;
            `"comba"`: as `"scalar"`; the memory is read before it decays, and queries are corrected by keys;
            `"preconditioned"`, `"preconditioned_vector"`: as `"scalar"` and `"vector"`, and channels of keys that were
            written often are written less.
        allow_negative_eigenvalues (`bool`, defaults to `False`): let the write strength reach 2 instead of 1. A write
            can then negate what the memory holds for a key, so that it can count modulo two
            (https://arxiv.org/abs/2411.12537).
        num_householder (`int`, defaults to 1): number of writes of each token, each with a key and a value of its own,
            with the gates `"none"`, `"scalar"` and `"vector"`. More than one is DeltaProduct.
    """

    model_type = "hf_memory_deltanet"
    far_memory = DeltaSlots

    gate: str = "none"
    allow_negative_eigenvalues: bool = False
    num_householder: int = 1

    @property
    def mixers(self) -> dict:
        """The mixer class of each layer type."""
        memory = MIXERS[self.gate] if self.num_householder == 1 else DeltaProductMixer
        return {**MemoryHeadsConfig.mixers, "memory": memory, "sliding_memory": WindowedMixer}

    def set_defaults(self) -> None:
        """See `MemoryConfig.set_defaults`."""
        super().set_defaults()
        head_dim: Any = self.head_dim
        self.fill(
            linear_key_head_dim=head_dim,
            linear_value_head_dim=head_dim
            * (2 if self.gate in ("scalar", "comba", "preconditioned") else 1),
            linear_conv_kernel_dim=4,
            output_gate={"none": "none", "scalar": "silu", "preconditioned": "silu"}.get(
                self.gate, "sigmoid"
            ),
        )

    def validate_architecture(self):
        """Check the gate and the number of writes, too."""
        check_gate(self.gate, tuple(MIXERS))
        is_plain = self.gate in ("none", "scalar", "vector") and not self.memory_rope
        only = "1 with memory_rope and with any gate but none, scalar and vector"
        check(self.num_householder == 1 or is_plain, "num_householder", only, self.num_householder)
        super().validate_architecture()


class DeltaNetModel(base.MemoryModel):
    """DeltaNet without a head."""


class DeltaNetForCausalLM(base.MemoryForCausalLM):
    """DeltaNet with a head that predicts the next token."""

    model_class = DeltaNetModel


class DeltaNetForSequenceClassification(base.MemoryForSequenceClassification):
    """DeltaNet with a head that classifies sequences."""


class DeltaNetForTokenClassification(base.MemoryForTokenClassification):
    """DeltaNet with a head that classifies tokens."""
