"""Test-time training: a layer whose state is a model that takes gradient steps. https://arxiv.org/abs/2407.04620."""

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_memory.cache import States
from hf_memory.layers import places, wide
from hf_memory.mixers.base import Context
from hf_memory.mixers.neural_memory import Gate, NeuralMemoryMixer
from hf_memory.mixers.positions import Positions
from hf_memory.ops.neural_memory import Learning

LEAST = 1e-4  # of the rates of positions, whose logarithms are taken


class InnerNorm(nn.Module):
    """Weight and bias [H, V] of the layer norm inside of each head's memory."""

    def __init__(self, heads: int, value_dim: int):
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.empty(heads, value_dim)) for _ in range(2))

    def forward(self) -> tuple[Tensor, Tensor]:
        """In float32."""
        return wide(self.weight), wide(self.bias)

    def init_own_parameters(self) -> None:
        """The plain norm."""
        init.ones_(self.weight)
        init.zeros_(self.bias)


class TTTMixer(NeuralMemoryMixer):
    """TTT-Linear with one matrix, TTT-MLP with two; queries and keys turn by position within a mini-batch of b tokens.

        f(x; W) = x + LN(x W_1 + c_1)    or    x + LN(gelu(x W_1 + c_1) W_2 + c_2)
        W_i = A - tau_i sum_{j <= i} lr_j grad l(A; k_j, v_j),   l = 1/2 |f(k_j; A) - v_j|^2
        o_i = f(q_i; W_i)
        lr_j = max_lr / K sigmoid(w x_j + c),   tau_i = 1 / i + learned

    for tokens i = 1 .. b of a mini-batch, with A what W was after the one before. Biases are weights too. Source:
    https://arxiv.org/abs/2407.04620, equations 4 to 7 and section 2.7; tau as its authors' code has it.
    """

    has_silu = False
    unit_keys = False
    has_momentum = False
    has_bias = True

    @property
    def sees_positions(self) -> bool:
        """Its own alone."""
        return False

    def make_gates(self, width: int, heads: int) -> None:
        """Rates of tokens and of positions, and the norm."""
        self.lr_proj = Gate(width, heads, 0.0)
        self.position_rate = nn.Parameter(torch.empty(self.config.memory_chunk_size))
        self.inner_norm = InnerNorm(heads, self.value_dim)

    def init_own_parameters(self) -> None:
        """Rates of positions are 1 / i."""
        super().init_own_parameters()
        init.zeros_(self.position_rate)

    def project(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor, States]:
        """As any memory, with positions within mini-batches."""
        if self.config.memory_rope:
            context = context._replace(positions=self._positions(self._places(hidden_states, context)))
        return super().project(hidden_states, context)

    def gates(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Forgetting the steps since the anchor from tau_{i-1} to tau_i gives all of them the rate tau_i."""
        place, b = self._places(hidden_states, context), self.config.memory_chunk_size
        learned = wide(self.position_rate)
        tau = (1 / torch.arange(1, b + 1, device=learned.device, dtype=learned.dtype) + learned).clamp(min=LEAST)
        decay = torch.cat([tau.new_zeros(1), tau.log().diff()])
        lr = self.config.memory_max_lr / self.head_dim * wide(self.lr_proj(hidden_states)).sigmoid()
        return lr * tau[place][..., None], None, decay[place][..., None].expand_as(lr)

    def learning(self) -> Learning:
        """With the norm, and what forgetting leads to."""
        return {**super().learning(), "norm": self.inner_norm(), "forget_to": "anchor"}

    def _places(self, hidden_states: Tensor, context: Context) -> Tensor:
        """Of tokens in their mini-batches [1 or B, T]."""
        T, mask, bounds = hidden_states.shape[1], context.attention_mask, context.cu_seqlens
        if bounds is not None:
            place = places(bounds, T)[None]
        elif mask is not None:
            place = (mask.cumsum(1) - 1).clamp(min=0)
        else:
            place = torch.arange(T, device=hidden_states.device)[None]
        return (place + context.states["phase"][:, None] if context.states else place) % self.config.memory_chunk_size

    def _positions(self, place: Tensor) -> Positions:
        channels = torch.arange(0, self.config.rotary_dim, 2, device=place.device)
        frequencies = self.config.rope_parameters["rope_theta"] ** (-channels / self.config.rotary_dim)
        angles = (place[..., None] * frequencies).repeat(1, 1, 2)
        return Positions(angles.cos(), angles.sin())
