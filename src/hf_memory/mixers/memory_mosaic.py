"""Memory Mosaics, networks of associative memories: https://arxiv.org/abs/2405.06394."""

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_memory.cache import Spec, State, States
from hf_memory.layers import RMSNorm, token_before, unit_length, upcast
from hf_memory.mixers.attention_blocks import Scores, full_attention
from hf_memory.mixers.base import Context, Projected, WholeMixer
from hf_memory.mixers.pasts.everything import Everything
from hf_memory.mixers.pasts.rows import New
from hf_memory.mixers.positions import Positions
from hf_memory.ops import linear_attention
from hf_memory.ops.masks import Mask

# There is no complete pair yet at the first token of a sequence.
completed = Mask(lambda q, k: (k <= q) & (k > 0))


class MemoryMosaicMixer(WholeMixer):
    """A whole layer: a contextual memory of the text, then a persistent memory learned in training, each after a norm.

        n_t = e^(-|r|) n_{t-1} + W_k x_t,   k_t = e^a n_t / |n_t|
        m_i = c W_v x_i + (1 - c) W_v x_{i+1},   v_i = e^b m_i / |m_i|
        y_t = W_o sum_{i<t} softmax_i(k_t . k_i) v_i

    Keys are leaky averages, and values include the next token, so that the pair (k_i, v_i) is complete when token i + 1
    arrives. The persistent memory has learned pairs instead, and its query is computed like k_t. The cache stores at
    each token the pair that this token completes.
    """

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        heads = self.num_output_heads
        width = config.hidden_size
        self.input_layernorm = RMSNorm(width, eps=config.rms_norm_eps)
        self.key_average = LeakyAverage(config, heads)
        self.value_average = PeekingAverage(heads)
        self.post_attention_layernorm = RMSNorm(width, eps=config.rms_norm_eps)
        self.query_average = LeakyAverage(config, heads)
        self.persistent = PersistentMemory(heads, config.intermediate_size, self.head_dim)
        self.persistent_o_proj = nn.Linear(heads * self.head_dim, width, bias=False)

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """The states of `mix`."""
        heads, _, _, D, _ = config.memory_heads
        average = State((heads, 1, D))
        last = State((1, 2 * heads * D), None)
        spec = {
            "key_average": average,
            "query_average": average,
            "tokens_read": State((), torch.long),
            "last": last,
        }
        return spec | Everything().spec(heads, D, D)

    def project(self, hidden_states: Tensor, positions: Positions | None) -> Projected:
        """The hidden states, normed too, and the projections of the contextual memory."""
        x = self.input_layernorm(hidden_states)
        return {"x": hidden_states, "k": self.by_head(self.k_proj(x)), "v": self.v_proj(x)}

    def mix(self, projected: Projected, context: Context) -> tuple[Tensor, States]:
        """The states are `key_average` and `query_average` [B, H, 1, D]; `tokens_read` [B]; `last` [B, 1, 2 H D],
        key and value projection of the last token, which is not part of a complete pair yet; and of the complete pairs
        `keys` and `values` [B, tokens, H, D] and `positions` [B, tokens]."""
        recalled, states = self._recall(projected["k"], projected["v"], context)
        x = self.post_attention_layernorm(projected["x"] + recalled)
        q, states["query_average"] = self.query_average(
            self.by_head(self.q_proj(x)), "query_average", context
        )
        return recalled + self.persistent_o_proj(self.persistent(q).flatten(2)), states

    def _recall(self, x: Tensor, v: Tensor, context: Context) -> tuple[Tensor, States]:
        """The output of the contextual memory, and its states, for the projections of keys and values."""
        states = {}
        k, states["key_average"] = self.key_average(x, "key_average", context)
        before, states["last"] = token_before(
            torch.cat([k.flatten(2), v], -1),
            context.states.get("last"),
            context.attention_mask,
            context.cu_seqlens,
        )
        key, value = (self.by_head(y) for y in before.chunk(2, -1))
        tokens, states["tokens_read"] = context.tokens_and_count(x)
        value = self.value_average(value, self.by_head(v))
        everything = Everything()
        new = New.of(key, value, everything.kind, context)
        past = everything.read_many(new, tokens, context)
        o = full_attention(k, tokens, past.near._replace(sees=completed), Scores(1.0))
        o = o * (tokens.position > 0)[..., None, None]
        return self.o_proj(o.flatten(2)), states | past.states


class LeakyAverage(nn.Module):
    """k_t = e^scale n_t / |n_t|,   n_t = e^(-|rate|) n_{t-1} + x_t, with a scale and a rate for each head."""

    def __init__(self, config, heads: int):
        super().__init__()
        self.config = config
        self.rate = nn.Parameter(torch.empty(heads))
        self.scale = nn.Parameter(torch.empty(heads))

    def init_own_parameters(self) -> None:
        """As published: rates from long averages to short ones."""
        init.copy_(self.rate, torch.linspace(0.5, 5.0, len(self.rate)))
        init.ones_(self.scale)

    def forward(self, x: Tensor, name: str, context: Context) -> tuple[Tensor, Tensor]:
        """Averages [B, T, H, D] of x [B, T, H, D], and the state [N, H, 1, D], called `name` in `context.states`."""
        ones = x.new_ones(*x.shape[:2], 1, 1)
        n, state = linear_attention(
            ones,
            ones,
            x,
            -upcast(self.rate).abs().expand(x.shape[:3]),
            scale=1.0,
            **context.options(self.config.mixer_backend, context.states.get(name)),
        )
        return unit_length(n) * self.scale.exp()[:, None].to(x.dtype), state


class PeekingAverage(nn.Module):
    """v = e^scale m / |m|,   m = share x + (1 - share) x_next, with a scale and a share for each head."""

    def __init__(self, heads: int):
        super().__init__()
        self.share = nn.Parameter(torch.empty(heads))
        self.scale = nn.Parameter(torch.empty(heads))

    def init_own_parameters(self) -> None:
        """Initial values as published."""
        init.uniform_(self.share, 0.0, 1.0)
        init.constant_(self.scale, -0.5)

    def forward(self, x: Tensor, x_next: Tensor) -> Tensor:
        """The values [B, T, H, D] of x and x_next, [B, T, H, D] each."""
        m = torch.lerp(x_next, x, self.share[:, None].to(x.dtype))
        return unit_length(m) * self.scale.exp()[:, None].to(x.dtype)


class PersistentMemory(nn.Module):
    """e^scale sum_i softmax_i(q . k_i) v_i over the learned pairs of each head."""

    def __init__(self, heads: int, pairs: int, head_dim: int):
        super().__init__()
        self.keys = nn.Parameter(torch.empty(heads, pairs, head_dim))
        self.values = nn.Parameter(torch.empty(heads, pairs, head_dim))
        self.scale = nn.Parameter(torch.empty(heads))

    def init_own_parameters(self) -> None:
        """Keys and values start with about unit length."""
        for x in (self.keys, self.values):
            init.normal_(x, std=x.shape[-1] ** -0.5)
        init.constant_(self.scale, -0.5)

    def forward(self, q: Tensor) -> Tensor:
        """Outputs [B, T, H, D] for queries [B, T, H, D]."""
        scores = torch.einsum("bthd,hnd->bthn", q, self.keys.to(q.dtype))
        weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
        o = torch.einsum("bthn,hnd->bthd", weights, self.values.to(q.dtype))
        return o * self.scale.exp()[:, None].to(q.dtype)
