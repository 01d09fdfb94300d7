"""Mamba-3 with a single input, as gated linear attention. https://arxiv.org/abs/2603.15569."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_memory.cache import Spec, State
from hf_memory.layers import upcast
from hf_memory.mixers.base import Context, MemoryMixer, Projected, States
from hf_memory.mixers.gates import StepDecay
from hf_memory.mixers.pasts.ring import last_tokens
from hf_memory.mixers.positions import Positions
from hf_memory.ops import linear_attention
from hf_memory.ops.layout import blank, repeat_heads


class Mamba3Mixer(MemoryMixer):
    """S_t = e^(g_t) (S_{t-1} + c_t k_{t-1} x_{t-1}^T) + m_t k_t x_t^T;   o = S^T q + D x, times silu of a gate.

    With step d and share s of a token, m = d s and c = d (1 - s): the trapezoid rule. q and k have a bias for each
    head, and half of their channels, in pairs, turn by angles d pi tanh(W x), which add up from token to token. Whole
    turns are taken off in float64, so that angles have the same error after many tokens as after a few.

    Token j is written twice, with m_j and one step later with c_{j+1}. This is linear attention in which it is written
    once with m_j + c_{j+1}; what its own query sees of the second write too early is subtracted from the output.
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
        return spec | {
            "last_keys": State((1, heads, K)),
            "last_values": State((1, heads, V)),
            "angles": State((heads, K // 4)),
        }

    def scale_output(self, factor: Tensor) -> None:
        """Scale the values, of which the output is a multiple."""
        for x in self.v_proj.parameters():
            x.mul_(factor)

    def project(self, hidden_states: Tensor, positions: Positions | None) -> Projected:
        """See `MemoryMixer.project`; with the decay, steps, shares, turns of the angles, and the gate of the output."""
        rows = super().project(hidden_states, positions)
        rows["g"], rows["steps"] = self.decay(hidden_states)
        rows["share"] = upcast(self.share_proj(hidden_states)).sigmoid()
        rows["turns"] = upcast(self.angle_proj(hidden_states)).tanh()
        rows["output_gate"] = F.silu(self.g_proj(hidden_states))
        return rows

    def mix(self, projected: Projected, context: Context) -> tuple[Tensor, States]:
        """The states are `memory` [N, HV, K, V], the last token's `last_keys` [N, 1, HV, K] and `last_values`
        [N, 1, HV, V], and the `angles` [N, HV, K / 4] of its key."""
        q, k, x, new_states = self.heads_of(projected, context)
        steps = projected["steps"]
        share = projected["share"]
        q, k, new_states["angles"] = self._turned(q, k, projected["turns"], steps, context)
        next_c, memory = self._second_writes(steps * (1 - share), context)
        _, last = last_tokens(
            context.states, {"last_keys": k, "last_values": x}, 1, context.lengths
        )
        o, new_states["memory"] = linear_attention(
            q,
            k,
            ((steps * share + next_c)[..., None] * x).to(x.dtype),
            projected["g"],
            scale=1.0,
            in_place=True,
            **context.options(self.config.mixer_backend, memory),
        )
        unseen = next_c * (upcast(q) * upcast(k)).sum(-1)
        o = (o + (upcast(self.D) - unseen)[..., None].to(x.dtype) * x).flatten(-2)
        return o * projected["output_gate"], new_states | last

    def _turned(self, q: Tensor, k: Tensor, turns: Tensor, steps: Tensor, context: Context):
        """q and k [B, T, HV, K] with their biases, turned by angles [B, T, HV, K / 4], and the last angles."""
        q, k = (
            repeat_heads(x, steps.shape[2]) + bias.to(x.dtype)
            for x, bias in ((q, self.q_bias), (k, self.k_bias))
        )
        half_turns = steps[..., None] * turns[:, :, None]
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

    def _second_writes(self, c: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        """The strength c_{t+1} of each token's second write, and the memory with the second write of an earlier token.

        Args:
            c: [B, T, HV], the strengths c_t of the new tokens.
            context: their context.

        Returns:
            c_{t+1} [B, T, HV], zero for the last token of a sequence, whose second write is that of a later call; and
            the memory [B, HV, K, V] with the second write of the token before the new ones, None if there is none.
        """
        if context.attention_mask is not None:
            c = blank(c, context.attention_mask)
        next_c = F.pad(c[:, 1:], (0, 0, 0, 1))
        if context.cu_seqlens is not None:
            ends = context.cu_seqlens[1:].long() - 1
            next_c = next_c.index_fill(1, ends[ends >= 0], 0)
        if not context.states:
            return next_c, None
        last_key, last_value = (
            context.states[name][:, 0, :, :, None].to(c.dtype)
            for name in ("last_keys", "last_values")
        )
        # not a product of matrices, which autocast would round
        second_write = c[:, 0, :, None, None] * last_key * last_value.mT
        return next_c, context.states["memory"] + second_write


def _in_one_turn(half_turns: Tensor) -> Tensor:
    """The angles from -pi to pi after so many half turns; float32 rounds them by at most 1.2e-7."""
    return math.pi * (torch.remainder(half_turns + 1, 2) - 1)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first half of the channels of x [..., K], in pairs of neighbours, by angles [..., K / 4]."""
    pairs, rest = upcast(x).split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], -1)
    a, b = pairs.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    return torch.cat([turned, rest], -1).to(x.dtype)
