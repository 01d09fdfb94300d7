"""The mixer of DeltaNet, Gated DeltaNet and Kimi Delta Attention; later variants are in `variants.delta_rules`."""

from torch import Tensor, nn

from hf_memory.layers import unit_length, upcast
from hf_memory.mixers.base import Context, MemoryMixer, OutputGate, States
from hf_memory.mixers.gates import SoftplusDecay
from hf_memory.mixers.levels import Levels, Written

BY_CHANNEL = ("vector", "gdn2", "preconditioned_vector")  # gates with a decay for each key channel


class DeltaNetMixer(Levels, MemoryMixer):
    """S <- e^g S;   S <- S + beta k (v - S^T k)^T, with keys and queries of unit length.

    https://arxiv.org/abs/2406.06484 without decay, https://arxiv.org/abs/2412.06464 with a decay for each head,
    https://arxiv.org/abs/2510.26692 with a decay for each key channel.
    """

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.make_convolutions(config.linear_conv_kernel_dim)
        heads = self.num_output_heads
        self.b_proj = nn.Linear(config.hidden_size, heads, bias=False)
        self.largest_beta = 2.0 if config.allow_negative_eigenvalues else 1.0
        self.decays = config.gate != "none"
        if self.decays:
            channels = self.head_dim if config.gate in BY_CHANNEL else None
            self.decay = SoftplusDecay(config.hidden_size, heads, channels)
        self.output_gate = OutputGate(heads, self.value_dim, config)

    def mix(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, States]:
        """The states are `memory` [N, HV, K, V] and those of the convolutions."""
        q, k, v, new_states = self.project(hidden_states, context)
        beta = self.largest_beta * upcast(self.b_proj(hidden_states)).sigmoid()
        g = self.decay(hidden_states)[0] if self.decays else None
        o, states = self.update(hidden_states, context, Written(q, k, v, g, beta))
        return self.o_proj(self.output_gate(o, hidden_states)), new_states | states

    def update(
        self, hidden_states: Tensor, context: Context, written: Written
    ) -> tuple[Tensor, States]:
        """Outputs [B, T, HV, V] and the memory after the tokens; q and k are not of unit length yet."""
        written = written._replace(q=unit_length(written.q), k=unit_length(written.k))
        return self.remember(hidden_states, context, written)
