"""Mamba-3 with a single input, as gated linear attention. https://arxiv.org/abs/2603.15569."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_memory.cache import Spec, State
from hf_memory.layers import upcast
from hf_memory.mixers.base import Context, MemoryMixer, States
from hf_memory.mixers.gates import StepDecay
from hf_memory.mixers.pasts import kept
from hf_memory.ops import linear_attention
from hf_memory.ops.layout import blank, repeat_heads


class Mamba3Mixer(MemoryMixer):
    """S_t = e^(g_t) (S_{t-1} + c_t k_{t-1} x_{t-1}^T) + m_t k_t x_t^T;   o = S^T q + D x, times silu of a gate.

    With step d and share s of a token, m = d s and c = d (1 - s): the trapezoid rule. q and k have a bias for each
    head, and half of their channels, in pairs, turn by angles d pi tanh(W x), which add up from token to token. Whole
    turns are taken off in float64, so that angles have the same error after many tokens as after a few.

    Computed as linear attention: token j is written with m_j + c_{j+1}, of which c_{j+1} is not seen by itself.
    """

    has_silu = False
    padding_last = True
    starts = {"q_bias": 1.0, "k_bias": 1.0, "D": 1.0}

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.make_convolutions(config.linear_conv_kernel_dim)
        width = config.hidden_size
        heads = self.num_output_heads
        self.decay = StepDecay(width, heads)
        self.share_proj = nn.Linear(width, heads, bias=False)
        self.angle_proj = nn.Linear(width, self.head_dim // 4, bias=False)
        self.q_bias = nn.Parameter(torch.empty(heads, self.head_dim))
        self.k_bias = nn.Parameter(torch.empty(heads, self.head_dim))
        self.D = nn.Parameter(torch.empty(heads))
        self.g_proj = nn.Linear(width, heads * self.value_dim, bias=False)

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """The memory, the last key and value, and the angles."""
        spec = super().state_spec(config, layer_idx)
        heads, K, V = spec["memory"].shape
        own = {
            "last_keys": State((1, heads, K)),
            "last_values": State((1, heads, V)),
            "angles": State((heads, K // 4)),
        }
        return spec | own

    def scale_output(self, factor: Tensor) -> None:
        """Scale the values, of which the output is a multiple."""
        for x in self.v_proj.parameters():
            x.mul_(factor)

    def mix(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, States]:
        """The states are `memory` [N, HV, K, V], the last token's `last_keys` [N, 1, HV, K] and `last_values`
        [N, 1, HV, V], and the `angles` [N, HV, K / 4] of its key."""
        q, k, x, new_states = self.project(hidden_states, context)
        g, steps = self.decay(hidden_states)
        q, k, new_states["angles"] = self._turned(q, k, hidden_states, steps, context)
        share = upcast(self.share_proj(hidden_states)).sigmoid()
        later, memory = self._later(steps * (1 - share), context)
        _, last = kept(context.states, {"last_keys": k, "last_values": x}, 1, context.lengths)
        o, new_states["memory"] = linear_attention(
            q,
            k,
            ((steps * share + later)[..., None] * x).to(x.dtype),
            g,
            scale=1.0,
            in_place=True,
            **(context.options(self.config.mixer_backend) | {"initial_state": memory}),
        )
        unseen = later * (upcast(q) * upcast(k)).sum(-1)
        o = (o + (upcast(self.D) - unseen)[..., None].to(x.dtype) * x).flatten(-2)
        return self.o_proj(o * F.silu(self.g_proj(hidden_states))), new_states | last

    def _turned(self, q: Tensor, k: Tensor, hidden_states: Tensor, steps: Tensor, context: Context):
        """q and k [B, T, HV, K] with their biases, turned by angles [B, T, HV, K / 4], and the last angles."""
        q, k = (
            repeat_heads(x, steps.shape[2]) + bias.to(x.dtype)
            for x, bias in ((q, self.q_bias), (k, self.k_bias))
        )
        half_turns = steps[..., None] * upcast(self.angle_proj(hidden_states)).tanh()[:, :, None]
        if context.attention_mask is not None:
            half_turns = blank(half_turns, context.attention_mask)
        # across the boundaries of packed sequences too: differences alone matter
        sums = half_turns.cumsum(1, dtype=torch.float64)
        if context.states:
            sums = sums + context.states["angles"][:, None].double() / math.pi
        angles = _in_one_turn(sums).to(half_turns.dtype)
        cos = angles.cos()
        sin = angles.sin()
        return *(_turn(x, cos, sin) for x in (q, k)), angles[:, -1]

    def _later(self, shares: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        """What the token after each gives it [B, T, HV], and the memory with what the first token gives the last."""
        if context.attention_mask is not None:
            shares = blank(shares, context.attention_mask)
        later = F.pad(shares[:, 1:], (0, 0, 0, 1))
        if context.cu_seqlens is not None:
            ends = context.cu_seqlens[1:].long() - 1
            later = later.index_fill(1, ends[ends >= 0], 0)
        if not context.states:
            return later, None
        both = (context.states[name] for name in ("last_keys", "last_values"))
        keys, values = (x[:, 0, :, :, None].to(shares.dtype) for x in both)
        given = (
            shares[:, 0, :, None, None] * keys * values.mT
        )  # not a product of matrices, which autocast would round
        return later, context.states["memory"] + given


def _in_one_turn(half_turns: Tensor) -> Tensor:
    """The angles from -pi to pi after so many half turns; float32 rounds them by at most 1.2e-7."""
    return math.pi * (torch.remainder(half_turns + 1, 2) - 1)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first half of the channels of x [..., K], in pairs of neighbours, by angles [..., K / 4]."""
    pairs, rest = upcast(x).split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], -1)
    a, b = pairs.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    return torch.cat([turned, rest], -1).to(x.dtype)
