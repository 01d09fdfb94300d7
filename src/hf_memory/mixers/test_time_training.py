"""Test-time training: a layer whose state is a model that takes gradient steps. https://arxiv.org/abs/2407.04620."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_memory.cache import States
from hf_memory.layers import places, wide
from hf_memory.mixers.base import Context
from hf_memory.mixers.neural_memory import Gate, InnerNorm, NeuralMemoryMixer
from hf_memory.mixers.positions import Positions

LEAST = 1e-4  # of the rates of positions, whose logarithms are taken


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

    def learning(self, hidden_states: Tensor, context: Context) -> dict[str, Any]:
        """Forgetting the steps since the anchor from tau_{i-1} to tau_i gives all of them the rate tau_i."""
        place, b = self._places(hidden_states, context), self.config.memory_chunk_size
        learned = wide(self.position_rate)
        tau = (1 / torch.arange(1, b + 1, device=learned.device, dtype=learned.dtype) + learned).clamp(min=LEAST)
        decay = torch.cat([tau.new_zeros(1), tau.log().diff()])
        lr = self.config.memory_max_lr / self.head_dim * wide(self.lr_proj(hidden_states)).sigmoid()
        gates = {"lr": lr * tau[place][..., None], "momentum": None, "decay": decay[place][..., None].expand_as(lr)}
        return {**gates, "forget_to": "anchor", "norm": self.inner_norm()}

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
