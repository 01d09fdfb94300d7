"""The memory of ATLAS, which learns windows of tokens with steps of Muon. https://arxiv.org/abs/2505.23735."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_memory.cache import Spec, State, States
from hf_memory.layers import last_tokens, unit_length, upcast
from hf_memory.mixers.base import Context, Projected
from hf_memory.mixers.neural_memory import NeuralMemoryMixer
from hf_memory.ops.feature_maps import taylor
from hf_memory.ops.neural_memory import EarlierPairs


class AtlasMixer(NeuralMemoryMixer):
    """A memory f(x; W) = gelu(phi(x) W_1) W_2 that learns the last c tokens at each token: the Omega rule.

        S_t = eta_t S_{t-1} - sum_{i = t-c+1 .. t} gamma_i grad 1/2 |f(k_i; W) - v_i|^2
        W_t = a_t W_{t-1} + lr_t NS(S_t),   o_t = f(q_t; W_t)

    with gradients at the weights W at the start of a chunk, and the five Newton-Schulz steps NS of Muon, which
    orthogonalise a matrix. phi(x) has all products of at most two channels of x; those of degree i are multiplied by a
    learned number that starts at 1 / sqrt(i!), so that phi(q)^T phi(k) is a Taylor series of exp(q^T k). The paper adds
    the input to the output of f, which is not possible with features, and exchanges the letters of eta and lr. Source:
    https://arxiv.org/abs/2505.23735.
    """

    gates = {**NeuralMemoryMixer.gates, "token": 0.0}
    starts = {"degrees": 1.0}  # as in the Taylor series
    clips_gradients = False
    unit_keys = False  # the features of unit keys do not have unit length

    @staticmethod
    def input_size(head_dim: int) -> int:
        """Number of features of a head."""
        return 1 + head_dim + head_dim * (head_dim + 1) // 2

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """The states of the memory, and the last tokens, which the next ones also learn."""
        query_heads, *_, K, V = config.memory_heads
        size = query_heads * cls.input_size(K) + config.num_output_heads * (V + 1)
        return super().state_spec(config, layer_idx) | {
            "earlier": State((config.memory_window - 1, size))
        }

    def make_gates(self, width: int, heads: int) -> None:
        """Create the gates of Titans with the rate gamma, and the factors of the features' degrees."""
        super().make_gates(width, heads)
        self.degrees = nn.Parameter(torch.empty(3))

    def heads_of(
        self, projected: Projected, context: Context
    ) -> tuple[Tensor, Tensor, Tensor, States]:
        """See `MemoryMixer.heads_of`; queries and keys become features of unit vectors."""
        q, k, v, new_states = super().heads_of(projected, context)
        D = self.head_dim
        sizes = torch.tensor([1, D, D * (D + 1) // 2], device=q.device)
        by_degree = self.degrees.repeat_interleave(sizes, output_size=self.input_size(D)).to(
            q.dtype
        )
        return taylor(unit_length(q)) * by_degree, taylor(unit_length(k)) * by_degree, v, new_states

    def learning(self, projected: Projected, context: Context) -> dict[str, Any]:
        """Arguments of the op: gamma is the rate of gradients, lr that of Muon's steps."""
        return {
            "lr": projected["token"].sigmoid(),
            "momentum": F.logsigmoid(projected["momentum"]),
            "muon_lr": self.inner_rate(projected),
            "decay": self.log_decay(projected),
        }

    def learn(
        self, q: Tensor, k: Tensor, v: Tensor, learning: dict, context: Context
    ) -> tuple[Tensor, States]:
        """See `NeuralMemoryMixer.learn`; each token also learns the tokens before it."""
        parts = [upcast(x.flatten(2)) for x in (k, v, learning["lr"])]
        tokens, state = last_tokens(
            torch.cat(parts, -1),
            self.config.memory_window,
            context.states.get("earlier"),
            context.attention_mask,
            context.cu_seqlens,
        )
        keys, values, lr = tokens[:, :, :-1].split([x.shape[-1] for x in parts], -1)
        keys, values = (
            x.unflatten(-1, (like.shape[2], -1)).transpose(2, 3).to(like.dtype)
            for x, like in ((keys, k), (values, v))
        )
        earlier = EarlierPairs(keys, values, lr.transpose(2, 3))
        o, states = super().learn(q, k, v, learning | {"earlier": earlier}, context)
        return o, states | {"earlier": state}
