"""DeltaNet, Gated DeltaNet and Kimi Delta Attention, by the config's `gate`."""

from typing import Any

from huggingface_hub.dataclasses import strict

from hf_memory.mixers.delta_net import DeltaNetMixer
from hf_memory.mixers.far_memory import DeltaSlots
from hf_memory.modeling import base
from hf_memory.modeling.checks import check_word
from hf_memory.modeling.memory_heads import Levels, MemoryHeadsConfig

GATES = ("none", "scalar", "vector")


@strict
class DeltaNetConfig(Levels, MemoryHeadsConfig):
    """Config of DeltaNet. Options that are not given follow the paper of the chosen gate.

    Args:
        gate (`str`, defaults to `"none"`): the decay of the memory: `"none"` (DeltaNet), `"scalar"` (Gated DeltaNet:
            one decay for each head, values twice as wide as keys, output gated by silu) or `"vector"` (Kimi Delta
            Attention: one decay for each key channel, output gated by sigmoid).
        allow_negative_eigenvalues (`bool`, defaults to `False`): let the write strength reach 2 instead of 1. A write
            can then negate what the memory holds for a key, so that it can count modulo two
            (https://arxiv.org/abs/2411.12537).
    """

    model_type = "hf_memory_deltanet"
    mixers = {**MemoryHeadsConfig.mixers, "memory": DeltaNetMixer}
    far_memory = DeltaSlots

    gate: str = "none"
    allow_negative_eigenvalues: bool = False

    def set_defaults(self) -> None:
        """See `MemoryConfig.set_defaults`."""
        super().set_defaults()
        head_dim: Any = self.head_dim
        self.fill(
            linear_key_head_dim=head_dim,
            linear_value_head_dim=head_dim * (2 if self.gate == "scalar" else 1),
            linear_conv_kernel_dim=4,
            output_gate={"scalar": "silu", "vector": "sigmoid"}.get(self.gate, "none"),
        )

    def validate_architecture(self):
        """Check the gate, too."""
        check_word("gate", self.gate, GATES)
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
