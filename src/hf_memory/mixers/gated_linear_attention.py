"""Linear attention whose memory decays: retention, gated retention, GLA and Mamba-2."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_memory.layers import GroupRMSNorm
from hf_memory.mixers.base import Context, MemoryMixer, OutputGate, Projected, States
from hf_memory.mixers.gates import FixedDecay, SigmoidDecay, SoftplusDecay, steady_rows
from hf_memory.mixers.levels import Levels, Written
from hf_memory.mixers.positions import Positions


class GatedLinearAttentionMixer(Levels, MemoryMixer):
    """S <- e^g S + k v^T, where g is fixed for each head, or depends on the token, for each head or key channel."""

    has_silu = False

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.make_convolutions(config.linear_conv_kernel_dim)
        heads = self.num_output_heads
        channels = self.head_dim if config.gate == "vector" else None
        sizes = (
            config.hidden_size,
            heads,
            channels,
            config.gate_low_rank_dim,
            config.gate_logit_normalizer,
        )
        self.decay: Any = FixedDecay(heads) if config.gate == "retention" else SigmoidDecay(*sizes)
        self.output_gate = OutputGate(heads, self.value_dim, config)

    def project(self, hidden_states: Tensor, positions: Positions | None) -> Projected:
        """See `MemoryMixer.project`; with the decay and the gate of the output."""
        rows = super().project(hidden_states, positions)
        rows["g"] = self.decay(hidden_states)
        return rows | self.output_gate.project(hidden_states)

    def mix(self, projected: Projected, context: Context) -> tuple[Tensor, States]:
        """The states are `memory` [N, HV, K, V] and those of the convolutions."""
        q, k, v, new_states = self.heads_of(projected, context)
        o, memory = self.remember(projected, context, Written(q, k, v, projected["g"]))
        return self.output_gate(o, projected), new_states | memory


class Mamba2Mixer(Levels, MemoryMixer):
    """Mamba-2 as gated linear attention: q = C, k = B, v = step x, g = -A step, and D x is added to the output.

    https://arxiv.org/abs/2405.21060, section 7. The norm follows the gate, over all channels that share a key.
    """

    can_be_steady = True
    starts = {"D": 1.0}

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.make_convolutions(config.linear_conv_kernel_dim, bias=True)
        heads = self.num_output_heads
        groups = self.q_proj.out_features // self.head_dim
        self.decay = SoftplusDecay(config.hidden_size, heads)
        self.D = nn.Parameter(torch.empty(heads))
        self.g_proj = nn.Linear(config.hidden_size, heads * self.value_dim, bias=False)
        self.o_norm = GroupRMSNorm(heads * self.value_dim, groups, eps=config.rms_norm_eps)

    def start_steady(self, direction: Tensor) -> None:
        """Start the gate as nearly constant: products of hidden states and `direction` [hidden_size] are about 1."""
        steady_rows(nn.Identity(), self.g_proj, direction)

    def project(self, hidden_states: Tensor, positions: Positions | None) -> Projected:
        """See `MemoryMixer.project`; with the decay, the steps and the gate of the output."""
        rows = super().project(hidden_states, positions)
        rows["g"], rows["steps"] = self.decay(hidden_states)
        rows["output_gate"] = F.silu(self.g_proj(hidden_states))
        return rows

    def mix(self, projected: Projected, context: Context) -> tuple[Tensor, States]:
        """The states are `memory` [N, HV, K, V] and those of the convolutions."""
        q, k, x, new_states = self.heads_of(projected, context)
        v = (x * projected["steps"][..., None]).to(x.dtype)
        written = Written(q, k, v, projected["g"])
        o, memory = self.remember(projected, context, written, scale=1.0)
        o = (o + self.D.to(x.dtype)[:, None] * x).flatten(-2)
        return self.o_norm(o * projected["output_gate"]), new_states | memory
