"""The mixer of DeltaNet, Gated DeltaNet and Kimi Delta Attention; later variants are in `variants.delta_rules`."""

from torch import Tensor, nn

from hf_memory.layers import unit_length, upcast
from hf_memory.mixers.base import Context, MemoryMixer, OutputGate, Projected, States
from hf_memory.mixers.gates import SoftplusDecay
from hf_memory.mixers.levels import Levels, Written
from hf_memory.mixers.positions import Positions

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

    def project(self, hidden_states: Tensor, positions: Positions | None) -> Projected:
        """See `MemoryMixer.project`; with the write strength, the decay and the gate of the output."""
        rows = super().project(hidden_states, positions)
        rows["beta"] = self.largest_beta * upcast(self.b_proj(hidden_states)).sigmoid()
        if self.decays:
            decay = self.decay(hidden_states)
            # that of another gate may have no size of steps
            rows["g"] = decay if isinstance(decay, Tensor) else decay[0]
        return rows | self.output_gate.project(hidden_states)

    def mix(self, projected: Projected, context: Context) -> tuple[Tensor, States]:
        """The states are `memory` [N, HV, K, V] and those of the convolutions."""
        q, k, v, new_states = self.heads_of(projected, context)
        written = Written(q, k, v, projected.get("g"), projected["beta"])
        o, states = self.update(projected, context, written)
        return self.output_gate(o, projected), new_states | states

    def update(
        self, projected: Projected, context: Context, written: Written
    ) -> tuple[Tensor, States]:
        """Outputs [B, T, HV, V] and the memory after the tokens; q and k are not of unit length yet."""
        written = written._replace(q=unit_length(written.q), k=unit_length(written.k))
        return self.remember(projected, context, written)
