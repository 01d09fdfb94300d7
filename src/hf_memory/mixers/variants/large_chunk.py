"""LaCT: a memory that learns large chunks at once, with steps of Muon. https://arxiv.org/abs/2505.23884."""

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import initialization as init

from hf_memory.cache import Spec, State, States
from hf_memory.mixers.base import Context, Projected, convolution_spec
from hf_memory.mixers.neural_memory import NeuralMemoryMixer
from hf_memory.ops import LargeChunkState, large_chunk_memory

FIRST_RATE = -6.9  # softplus(FIRST_RATE) = 0.001


class LargeChunkMixer(NeuralMemoryMixer):
    """A memory f(x; W) = (silu(x W_1) * x W_2) W_3, trained on a chunk of b tokens at once.

        o_t = f(q_t; W)                                                           for tokens t of a chunk, then
        S <- mean(eta) S + sum_t lr_t grad <f(k_t; W), v_t>,   W <- W + r NS(S)

    with gradients at the weights W before the chunk, r = memory_max_lr, the five Newton-Schulz steps NS of Muon, and
    every column of W scaled to its initial length. eta = sigmoid(w x), lr = softplus(w x + c). A token reads complete
    chunks only, so the memory is combined with attention over a window, to which it is added: variant="mag" with
    memory_gate="add". In the authors' model the memory shares queries, keys and values with attention, scaled and
    shifted for each channel, and each matrix has its own learning rate; here the memory has its own projections, and
    one learning rate. Source: https://arxiv.org/abs/2505.23884.
    """

    gates = {"lr": FIRST_RATE, "momentum": 0.0}
    clips_gradients = False

    @classmethod
    def layer_shapes(cls, config) -> list[tuple[int, int]]:
        """The shapes of W_1, W_2 and W_3."""
        *_, K, V = config.memory_heads
        width = config.memory_expansion * K
        return [(K, width), (K, width), (width, V)]

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """Weights of each head, the last chunk's S, the sum of the incomplete chunk, and its number of tokens."""
        size = sum(d_in * d_out for d_in, d_out in cls.layer_shapes(config))
        weights = State((config.num_output_heads, size), is_recurrent=True)
        spec = dict.fromkeys(LargeChunkState._fields[:3], weights)
        return (
            convolution_spec(config)
            | spec
            | {"phase": State((), torch.long, largest=config.memory_chunk_size - 1)}
        )

    def init_own_parameters(self) -> None:
        """Random matrices that keep the scale of their inputs, since the length of their columns never changes."""
        super().init_own_parameters()
        for weights in self.initial_weights.parameters():
            init.normal_(weights, std=weights.shape[1] ** -0.5)

    def learning(self, projected: Projected, context: Context) -> dict[str, Tensor]:
        """The arguments lr and eta [B, T, HV] of the op, in float32."""
        return {"lr": F.softplus(projected["lr"]), "momentum": projected["momentum"].sigmoid()}

    def learn(
        self, q: Tensor, k: Tensor, v: Tensor, learning: dict, context: Context
    ) -> tuple[Tensor, States]:
        """Outputs [B, T, HV, V] and states of the memory."""
        options = context.options(self.config.mixer_backend, context.past(LargeChunkState))
        o, state = large_chunk_memory(
            q,
            k,
            v,
            weights=self.initial_weights(),
            chunk_size=self.config.memory_chunk_size,
            step_size=self.config.memory_max_lr,
            **learning,
            **options,
        )
        return o, state._asdict()  # type: ignore[union-attr]
