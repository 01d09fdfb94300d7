"""Forget gates of softmax attention (FoX), as further channels of queries, keys and values."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_memory.cache import Spec, State, States
from hf_memory.mixers.base import Context
from hf_memory.mixers.gates import SigmoidDecay
from hf_memory.mixers.windowed import WindowedMixer
from hf_memory.ops.contract import blank

TOKENS_READ = State((), torch.long)  # their number
PARTS = 3  # of the logarithm of a forget gate, as channels of keys: 8 bits each, and the last one the rest


def kept_heads(config) -> tuple[int, int]:
    """Number of the heads of keys and values that are kept, and of their channels, in eights with forget gates."""
    query_heads, heads, _, D, _ = config.attention_heads
    return heads, D + (-(-PARTS * query_heads // heads // 8) * 8 if config.position == "forget" else 0)


def counts(config) -> Spec:
    """The number of tokens read, and the sums of the logarithms of their forget gates."""
    forgotten = {"forgotten": State((config.num_attention_heads,))} if config.position == "forget" else {}
    return {"tokens_read": TOKENS_READ} | forgotten


class ForgetGates(SigmoidDecay):
    """s_ij = q_i k_j / sqrt(D) + log f_{j+1} + ... + log f_i,   f = sigmoid(W x + b), for each query head.

    https://arxiv.org/abs/2503.02130.
    """

    def __init__(self, config, scaling: float):
        super().__init__(config.hidden_size, config.num_attention_heads, None, 0, 1)
        self.more, self.scaling = kept_heads(config)[1] - config.head_dim, scaling

    def sums(self, hidden_states: Tensor, context: Context) -> Tensor:
        """c_i = log f_1 + ... + log f_i for the gates f of all tokens up to each, [B, T, HQ] in float32.

        In packed sequences the sums begin anywhere, since their differences alone matter.
        """
        g = self(hidden_states)
        g = g if context.attention_mask is None else blank(g, context.attention_mask)
        before = context.states["forgotten"][:, None] if context.states else 0
        return before + g.cumsum(1)

    def extend(self, q: Tensor, k: Tensor, v: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v with more channels, whose products are -c_j, so that s_ij has c_i - c_j, but for a constant of i.

        c is kept in parts, so that in 16 bits nothing of it is lost.
        """
        parts = []
        for _ in range(PARTS - 1):
            parts.append(c.bfloat16().to(c.dtype))
            c = c - parts[-1]
        gates = -torch.stack([*parts, c], -1).unflatten(2, (k.shape[2], -1)).flatten(-2).to(k.dtype)  # [B, T, H, G * 3]
        groups = q.shape[2] // k.shape[2]
        reads = torch.eye(groups, dtype=q.dtype, device=q.device).repeat_interleave(PARTS, 1).repeat(k.shape[2], 1)
        q = torch.cat([q, (F.pad(reads, (0, self.more - reads.shape[1])) / self.scaling).expand(*q.shape[:3], -1)], -1)
        return q, torch.cat([k, F.pad(gates, (0, self.more - gates.shape[-1]))], -1), F.pad(v, (0, self.more))


class ForgettingHeads(WindowedMixer):
    """Heads with forget gates that see a window and the first tokens, and heads that see everything."""

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.forget, self.reads_step = ForgetGates(config, self.scaling), False

    @property
    def new_part(self) -> nn.Module | None:
        """All, since queries and keys change their meaning without positions."""
        return self

    @classmethod
    def kept_channels(cls, config) -> int:
        """See `kept_heads`."""
        return kept_heads(config)[1]

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """As of `WindowedMixer`, and the sums of the logarithms of the gates."""
        return super().state_spec(config, layer_idx) | counts(config)

    def mix(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, States]:
        """The states are those of `WindowedMixer`, and `forgotten` [B, HQ]."""
        sums = self.forget.sums(hidden_states, context)
        inputs = self.forget.extend(*self.project_heads(hidden_states, None), sums)
        o, states = self.attend(hidden_states, *inputs, context)
        return self.o_proj(o[..., : self.value_dim].flatten(2)), states | {"forgotten": sums[:, -1]}
