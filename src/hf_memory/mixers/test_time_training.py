"""Test-time training: a layer whose state is a model that is trained on the text. https://arxiv.org/abs/2407.04620."""

from typing import Any

import torch
from torch import Tensor, nn

from hf_memory.cache import States
from hf_memory.layers import upcast
from hf_memory.mixers.base import Context, Projected
from hf_memory.mixers.neural_memory import NeuralMemoryMixer
from hf_memory.mixers.positions import Positions
from hf_memory.ops.masks import packed

LEAST = 1e-4  # lower bound of the rates of positions, since their logarithms are needed


class TTTMixer(NeuralMemoryMixer):
    """TTT-Linear with one matrix, or TTT-MLP with two. Queries and keys are rotated by position in their mini-batch.

        f(x; W) = x + LN(x W_1 + c_1)    or    x + LN(gelu(x W_1 + c_1) W_2 + c_2)
        W_i = A - tau_i sum_{j <= i} lr_j grad l(A; k_j, v_j),   l = 1/2 |f(k_j; A) - v_j|^2
        o_i = f(q_i; W_i)
        lr_j = max_lr / K sigmoid(w x_j + c),   tau_i = 1 / i + learned

    for tokens i = 1 .. b of a mini-batch, where A are the weights after the previous mini-batch, including the biases.
    Source: https://arxiv.org/abs/2407.04620, equations 4 to 7 and section 2.7; tau follows the authors' code.
    """

    has_silu = False
    gates = {"lr": 0.0}
    starts = {"position_rate": 0.0}  # rates of 1 / i
    unit_keys = False
    has_bias = True
    has_norm = True
    sees_positions = False  # it has its own positions, those in a mini-batch

    def make_gates(self, width: int, heads: int) -> None:
        """The learning rates of tokens and of positions, and the norm."""
        super().make_gates(width, heads)
        self.position_rate = nn.Parameter(torch.empty(self.config.memory_chunk_size))

    def heads_of(
        self, projected: Projected, context: Context
    ) -> tuple[Tensor, Tensor, Tensor, States]:
        """See `MemoryMixer.heads_of`; rotated by positions in mini-batches."""
        if self.config.memory_rope:
            place = self._places(projected["q"], context)
            channels = self.config.rotary_dim
            exponents = -torch.arange(0, channels, 2, device=place.device) / channels
            angles = place[..., None] * self.config.rope_parameters["rope_theta"] ** exponents
            angles = angles.repeat(1, 1, 2)
            context = context._replace(positions=Positions(angles.cos(), angles.sin()))
        return super().heads_of(projected, context)

    def learning(self, projected: Projected, context: Context) -> dict[str, Any]:
        """Arguments of the op for each token [B, T, HV]: learning rates, and logarithms of decays.

        The op decays all steps since the anchor by tau_i / tau_{i-1}, after which all have the factor tau_i.
        """
        place = self._places(projected["q"], context)
        b = self.config.memory_chunk_size
        learned = upcast(self.position_rate)
        position = torch.arange(1, b + 1, device=learned.device, dtype=learned.dtype)
        tau = (1 / position + learned).clamp(min=LEAST)
        decay = torch.cat([tau.new_zeros(1), tau.log().diff()])
        lr = self.config.memory_max_lr / self.head_dim * projected["lr"].sigmoid()
        return {
            "lr": lr * tau[place][..., None],
            "momentum": None,
            "decay": decay[place][..., None].expand_as(lr),
        }

    def _places(self, x: Tensor, context: Context) -> Tensor:
        """Positions of tokens x [B, T, ...] in their mini-batches, [1 or B, T]."""
        T = x.shape[1]
        mask = context.attention_mask
        bounds = context.cu_seqlens
        if bounds is not None:
            place = packed(bounds, T).position
        elif mask is not None:
            place = (mask.cumsum(1) - 1).clamp(min=0)
        else:
            place = torch.arange(T, device=x.device)[None]
        if context.states:
            place = place + context.states["phase"][:, None]
        return place % self.config.memory_chunk_size
