"""Mamba, whose memory has a decay for each number of its state. https://arxiv.org/abs/2312.00752."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_memory.cache import States
from hf_memory.mixers.base import Context, MemoryMixer, Projected
from hf_memory.mixers.gates import ChannelDecay
from hf_memory.mixers.positions import Positions
from hf_memory.ops import selective_scan


class MambaMixer(MemoryMixer):
    """h <- e^(step A) h + step B x^T;   y = h^T C + D x;   output W_o (y silu(z)), with one head that has all channels.

    x and z are projections of the hidden states; x then passes through a convolution and silu. The queries C, keys B
    and steps are projections of the result.
    """

    projects_all = False

    convolved = "v"
    starts = {"D": 1.0}

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        channels = self.value_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(channels, self.head_dim, bias=bias)
        self.k_proj = nn.Linear(channels, self.head_dim, bias=bias)
        self.make_convolutions(config.linear_conv_kernel_dim, bias=True)
        self.decay = ChannelDecay(channels, self.head_dim, config.gate_low_rank_dim)
        self.D = nn.Parameter(torch.empty(channels))
        self.g_proj = nn.Linear(config.hidden_size, channels, bias=False)

    def project(self, hidden_states: Tensor, positions: Positions | None) -> Projected:
        """x before its convolution, and the gate silu(z) of the output."""
        gate = F.silu(self.g_proj(hidden_states))
        return {"v": self.v_proj(hidden_states), "output_gate": gate}

    def mix(self, projected: Projected, context: Context) -> tuple[Tensor, States]:
        """The states are `memory` [N, 1, K, V] and that of the convolution."""
        new_states: States = {}
        x = self.convolve("v", projected["v"], context, new_states)
        steps, rate = self.decay(x)
        q, k, v = self.split_heads(self.q_proj(x), self.k_proj(x), (steps * x).to(x.dtype))
        q, k = self.normalize_and_rotate(q, k, context.positions)
        options = context.options(self.config.mixer_backend, context.states.get("memory"))
        o, new_states["memory"] = selective_scan(q, k, v, -steps[:, :, None], rate, **options)
        y = o.flatten(-2) + self.D.to(x.dtype) * x
        return y * projected["output_gate"], new_states
