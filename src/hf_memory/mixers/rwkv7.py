"""RWKV-7, "Goose": https://arxiv.org/abs/2503.14456."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from hf_memory.cache import Spec, State
from hf_memory.layers import token_before
from hf_memory.mixers.base import Context, Projected, States, WholeMixer
from hf_memory.mixers.positions import Positions
from hf_memory.ops import delta_rule
from hf_memory.ops.rwkv7_gates import rwkv7_gates

# The inputs of the time mix, and initial exponents of their shares of the previous token.
MIXES = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}


class Start(NamedTuple):
    """Initial values of channels: a curve over all channels, plus a zigzag within each head."""

    first: float
    last: float
    curve: float = 1.0  # exponent of the curve
    swing: float = 0.0

    def of(self, channels: int, head_dim: int) -> Tensor:
        """The initial values [channels]."""
        place = torch.linspace(0, 1, channels)
        in_head = torch.linspace(-1, 1, head_dim).repeat(channels // head_dim)
        return (
            self.first
            + (self.last - self.first) * place**self.curve
            + self.swing * in_head * in_head.abs()
        )


class Rwkv7Mixer(WholeMixer):
    """A whole layer of RWKV-7: time mix and channel mix, each after a layer norm.

    With x the normed token, and m_i = x + x_i (x_before - x) for i of r, w, k, v, a and g, the time mix is

        r, k, v = W_r m_r, W_k m_k, W_v m_v;   after the first layer v <- v + sigmoid(lora_v(m_v)) (v_first - v)
        w = exp(-e^(-1/2) sigmoid(lora_w(m_w))),   a = sigmoid(lora_a(m_a)),   g = lora_g(m_g)
        c = k_k k / |k_k k| by head,   k <- (1 + (a - 1) k_a) k
        S <- (diag(w) - n (a c) c^T) S + k v^T;   y = W_o (g (norm(S^T r) + (r^T (r_k k)) v))

    with n = 1, or 2 with `allow_negative_eigenvalues`. The channel mix is W_v relu(W_k m_k)^2 of the normed result.
    Input and output have the first layer's values [B, T, H * V] after the channels of the hidden states; the output is
    to be added to the hidden states. The first layer computes these values.
    """

    starts = {"k_a": 1.02, "r_k": -0.04}  # as published

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        width = config.hidden_size
        channels = self.q_proj.out_features
        layers = config.num_hidden_layers
        self.depth = layer_idx / layers
        self.largest_erasure = 2.0 if config.allow_negative_eigenvalues else 1.0
        self.is_first = layer_idx == config.layer_types.index("memory")
        self.input_layernorm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        for name in MIXES:
            self.register_parameter(f"x_{name}", nn.Parameter(torch.empty(width)))
        self.k_k = nn.Parameter(torch.empty(channels))
        self.k_a = nn.Parameter(torch.empty(channels))
        self.r_k = nn.Parameter(torch.empty(channels))
        curve = 1 + (layer_idx / max(1, layers - 1)) ** 0.3
        self.w_lora = self._low_rank(
            config.decay_low_rank_dim, torch.tanh, Start(-5.5, 0.5, curve, 2.5)
        )
        self.a_lora = self._low_rank(config.a_low_rank_dim, None, Start(-0.39, 0.01, swing=0.3))
        if not self.is_first:
            self.v_lora = self._low_rank(config.v_low_rank_dim, None, Start(0.93, 0.53))
        self.g_lora = self._low_rank(config.gate_low_rank_dim, torch.sigmoid, None)
        self.o_norm = HeadNorm(
            channels, self.value_dim * config.layer_norm_eps, (self.depth + 1 / layers) ** 0.7
        )
        self.post_attention_layernorm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.mlp = ChannelMix(config, layer_idx)

    @property
    def width(self) -> int:
        """The channels of the hidden states, and of the first layer's values."""
        return self.config.hidden_size + self.q_proj.out_features

    def _low_rank(self, rank: int, activation: Callable | None, start: Start | None) -> "LowRank":
        return LowRank(
            self.config.hidden_size,
            rank,
            self.q_proj.out_features,
            activation,
            self.head_dim,
            start,
        )

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """A matrix for each head, and the previous token for both mixes."""
        H, _, _, K, V = config.memory_heads
        last = State((1, config.hidden_size), None)
        memory = State((H, K, V), is_recurrent=True)
        return {"memory": memory, "time_shift": last, "channel_shift": last}

    def init_own_parameters(self) -> None:
        """As published: the previous token has more weight in early channels and layers."""
        width = self.config.hidden_size
        place = torch.arange(width) / width
        for name, power in MIXES.items():
            init.copy_(getattr(self, f"x_{name}"), 1 - place ** (power * (1 - self.depth)))
        init.copy_(self.k_k, Start(0.76, 0.66).of(len(self.k_k), self.head_dim))

    def project(self, hidden_states: Tensor, positions: Positions | None) -> Projected:
        """The channels of hidden states, normed too, and the first layer's values: before all else comes a state."""
        width = self.config.hidden_size
        x = hidden_states[..., :width]
        first_values = hidden_states[..., width:]
        return {"x": x, "normed": self.input_layernorm(x), "first_values": first_values}

    def mix(self, projected: Projected, context: Context) -> tuple[Tensor, States]:
        """The states are `memory` [N, H, K, V], `time_shift` and `channel_shift` [B, 1, hidden_size]."""
        x = projected["x"]
        given = projected["first_values"]
        mixed, first_values, states = self.mix_time(projected["normed"], given, context)
        fed, states["channel_shift"] = self.mlp(self.post_attention_layernorm(x + mixed), context)
        output = torch.cat([mixed + fed, first_values], dim=-1)
        return output[..., : x.shape[-1] + given.shape[-1]], states

    def mix_time(
        self, x: Tensor, first_values: Tensor, context: Context
    ) -> tuple[Tensor, Tensor, States]:
        """The output of the time mix [B, T, hidden_size], the values of the first layer, and the states."""
        before, shift = token_before(
            x, context.states.get("time_shift"), context.attention_mask, context.cu_seqlens
        )
        shares = torch.stack([getattr(self, f"x_{name}") for name in MIXES]).to(x.dtype)
        x_r, x_w, x_k, x_v, x_a, x_g = torch.lerp(x, before, shares[:, None, None])
        r = self.q_proj(x_r)
        k = self.k_proj(x_k)
        v = self.v_proj(x_v)
        if self.is_first:
            first_values = v
        else:
            v = torch.lerp(v, first_values.to(v.dtype), self.v_lora(x_v).sigmoid().to(v.dtype))
        r, k, v, a, w = map(self.by_head, (r, k, v.to(r.dtype), self.a_lora(x_a), self.w_lora(x_w)))
        k, g, a, b = rwkv7_gates(
            k, a, w, *map(self.by_head, (self.k_k, self.k_a)), erasure=self.largest_erasure
        )
        o, memory = delta_rule(
            r,
            k,
            v,
            a.new_ones(a.shape[:3]),
            g,
            a,
            b,
            scale=1.0,
            in_place=True,
            **context.options(self.config.mixer_backend, context.states.get("memory")),
        )
        share_of_value = (r * self.by_head(self.r_k) * k).sum(-1, keepdim=True)
        o = torch.addcmul(self.by_head(self.o_norm(o)), share_of_value, v).flatten(-2)
        return (
            self.o_proj((o * self.g_lora(x_g)).to(r.dtype)),
            first_values,
            {"memory": memory, "time_shift": shift},
        )


class ChannelMix(nn.Module):
    """W_down relu(W_up (x + x_k (x_before - x)))^2."""

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.power = (1 - layer_idx / config.num_hidden_layers) ** 4
        self.x_k = nn.Parameter(torch.empty(config.hidden_size))
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def init_own_parameters(self) -> None:
        """Initial values as published."""
        init.copy_(self.x_k, 1 - (torch.arange(len(self.x_k)) / len(self.x_k)) ** self.power)

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """The output [B, T, hidden_size], and the last token as the state."""
        before, shift = token_before(
            x, context.states.get("channel_shift"), context.attention_mask, context.cu_seqlens
        )
        return self.down_proj(
            F.relu(self.up_proj(torch.lerp(x, before, self.x_k.to(x.dtype)))).square()
        ), shift


class LowRank(nn.Module):
    """W_up activation(W_down x), plus a bias if a start for it is given."""

    def __init__(
        self,
        hidden_size: int,
        rank: int,
        channels: int,
        activation: Callable | None,
        head_dim: int,
        start,
    ):
        super().__init__()
        self.activation = activation
        self.head_dim = head_dim
        self.start = start
        self.down_proj = nn.Linear(hidden_size, rank, bias=False)
        self.up_proj = nn.Linear(rank, channels, bias=start is not None)

    def init_own_parameters(self) -> None:
        """Initial values as published."""
        if self.start is not None:
            init.copy_(self.up_proj.bias, self.start.of(self.up_proj.out_features, self.head_dim))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, hidden_size] -> [B, T, channels]."""
        x = self.down_proj(x)
        return self.up_proj(x if self.activation is None else self.activation(x))


class HeadNorm(nn.Module):
    """Layer norm of each head, with a weight and a bias for each channel of all heads."""

    def __init__(self, channels: int, eps: float, start: float):
        super().__init__()
        self.eps = eps
        self.starts = {"weight": start, "bias": 0.0}
        self.weight = nn.Parameter(torch.empty(channels))
        self.bias = nn.Parameter(torch.empty(channels))

    def forward(self, o: Tensor) -> Tensor:
        """[B, T, H, V] -> [B, T, H * V]."""
        return torch.addcmul(
            self.bias, F.layer_norm(o, o.shape[-1:], eps=self.eps).flatten(-2), self.weight
        )
