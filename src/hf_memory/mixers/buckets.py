"""Attention to tokens of the same bucket, found by hashing queries (Reformer) or by the nearest centroid (Routing)."""

from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_memory.cache import Spec, State, States
from hf_memory.layers import unit_length, wide
from hf_memory.mixers.attention_blocks import BLOCK, Blocks, Columns, joined_softmax, softmax_and_mass
from hf_memory.mixers.base import Context, repeat_heads
from hf_memory.mixers.bucket_attention import attention_in_buckets
from hf_memory.mixers.transformer import Attended, TransformerMixer, grown
from hf_memory.mixers.window_attention import window_attention
from hf_memory.ops.masks import Tokens, causal, earlier, window

ITSELF = -5e4  # score of a token with itself, which matters only if it sees no other token


class BucketMixer(TransformerMixer):
    """o_i = sum_j softmax_j(q_i k_j / sqrt(D)) v_j over earlier j in the same bucket in some round, k_j = q_j / |q_j|.

    Buckets have no capacity limit: a token sees all earlier tokens of its buckets. A token that shares several buckets
    counts once. Query heads of a group share values.
    """

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        del self.k_proj

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """See `mix`."""
        (heads, values), (*_, D) = bucket_heads(config, layer_idx), config.attention_heads
        rounds = config.num_hashes if config.patterns[layer_idx] == "reformer" else 1
        spec = {"keys": State((heads, D), None, "token"), "values": State((values, D), None, "token")}
        spec["buckets"] = State((heads, rounds), torch.int32, "token", largest=config.num_buckets - 1)
        return super().state_spec(config, layer_idx) | spec

    def buckets(self, x: Tensor) -> Tensor:
        """Buckets [B, T, H, rounds] int32 of keys [B, T, H, D] of unit length."""
        raise NotImplementedError

    def mix(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, States]:
        """The states are those of a `TransformerMixer` with keys [B, tokens, HQ, D], and `buckets` [B, tokens, HQ,
        rounds]."""
        if context.cu_seqlens is not None:
            return self.apart(hidden_states, context, context.cu_seqlens)
        o, states = self.attend(hidden_states, context)
        return self.o_proj(o.flatten(2)), states

    def attend(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, States]:
        """The heads [B, T, HQ, D], and the states."""
        return self.in_buckets(*self.queries_and_values(hidden_states), context)

    def queries_and_values(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """q [B, T, HQ, D] and v [B, T, H, D], not rotated."""
        q, v = (proj(hidden_states).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.v_proj))
        return q, v

    def in_buckets(self, q: Tensor, v: Tensor, context: Context) -> tuple[Tensor, States]:
        """Attention of heads with buckets, [B, T, HQ, D], and its states."""
        unit = unit_length(q)
        asked = self.buckets(unit.detach())
        q, k = self.rotate(q, unit, context.positions)
        tokens, past, states = grown(k, v, context, buckets=asked)
        past = past | {"values": repeat_heads(past["values"], q.shape[2])}
        if q.shape[1] == 1 or torch.compiler.is_compiling():
            seen = self._all_pairs(q, tokens.position.expand(len(q), -1), asked, past)
        else:
            seen = self._sorted(q, past)
        itself = repeat_heads(v, q.shape[2]), torch.full_like(seen[1], ITSELF)
        return joined_softmax(seen, itself)[0], states

    def _all_pairs(self, q: Tensor, position: Tensor, asked: Tensor, past: States) -> Attended:
        """Attention of few queries, compared with all tokens, one block at a time."""
        parts, columns = [], Columns(Tokens(past["positions"].long()), past["keys"], past["values"], earlier)
        for i in range(0, q.shape[1], BLOCK):
            here = slice(i, i + BLOCK)
            blocks = Blocks.of(q[:, here], Tokens(position[:, here]), columns)
            same = (asked[:, here, None] == past["buckets"][:, None]).any(-1)  # [B, C, S, H]
            blocks = blocks._replace(visible=blocks.visible & same.permute(0, 3, 1, 2))
            parts.append(softmax_and_mass(blocks, self.scaling, None))
        o, mass = (torch.cat(x, 1) for x in zip(*parts))
        return o, mass

    def _sorted(self, q: Tensor, past: States) -> Attended:
        """Attention of the last tokens to all tokens, with tokens sorted by bucket, one round after the other."""
        is_token = (past["positions"] >= 0)[..., None, None]
        each = self.scaling * q, past["keys"], past["values"], past["buckets"].masked_fill(~is_token, -1)
        q, k, v, buckets = (x.transpose(1, 2).flatten(0, 1) for x in each)  # [B * H, T or S, ...]
        rounds = (attention_in_buckets(q, k, v, buckets[..., : i + 1]) for i in range(buckets.shape[-1]))
        o, mass = (x.unflatten(0, each[0].shape[::2]).transpose(1, 2) for x in reduce(joined_softmax, rounds))
        return o, mass


class ReformerMixer(BucketMixer):
    """A bucket is a hash: the nearest of random directions and their negatives. https://arxiv.org/abs/2001.04451."""

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        shape = config.num_attention_heads, config.head_dim, config.num_hashes * (config.num_buckets // 2)
        self.projection = nn.Buffer(torch.empty(shape))

    def init_own_parameters(self) -> None:
        """Random directions are drawn once, and saved with the model."""
        init.normal_(self.projection)

    def buckets(self, x: Tensor) -> Tensor:
        """See `BucketMixer`."""
        if x.shape[2] != len(self.projection):
            raise ValueError(
                "pattern must not be 'reformer' with tensor parallelism, "
                f"got {x.shape[2]} of {len(self.projection)} heads"
            )
        directions = torch.einsum("bthd,hdn->bthn", wide(x), self.projection.to(wide(x).dtype))
        directions = directions.unflatten(-1, (self.config.num_hashes, -1))
        nearest = directions.abs().argmax(-1, keepdim=True)
        is_opposite = directions.gather(-1, nearest) < 0
        return (nearest + is_opposite * directions.shape[-1])[..., 0].int()


class RoutingMixer(BucketMixer):
    """A bucket is the nearest centroid, as in k-means. https://arxiv.org/abs/2003.05997.

    Each token chooses a centroid; if centroids chose their best tokens, later tokens would have an influence. Centroids
    are trained by a separate loss, 1 - cos(q, centroid); the paper has a moving average.
    """

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        heads, _ = bucket_heads(config, layer_idx)
        self.centroids = nn.Parameter(torch.empty(heads * config.num_buckets, config.head_dim))

    def init_own_parameters(self) -> None:
        """Centroids start in random directions."""
        init.normal_(self.centroids)

    def forward(self, hidden_states: Tensor, *args, own_losses: list[Tensor] | None = None, **kwargs) -> Any:
        """See `MemoryMixer.forward`; in training, the loss of the centroids is added to the losses."""
        if own_losses is not None and self.training:
            with torch.no_grad():
                q = self.q_proj(hidden_states).unflatten(-1, (-1, self.head_dim))
                x = unit_length(self.routed(q))
            own_losses.append(1 - self._cosines(x).amax(-1).mean())
        return super().forward(hidden_states, *args, **kwargs)

    def routed(self, q: Tensor) -> Tensor:
        """The queries [B, T, HQ, D] of the heads that have centroids."""
        return q

    def buckets(self, x: Tensor) -> Tensor:
        """See `BucketMixer`."""
        return self._cosines(x).argmax(-1, keepdim=True).int()

    def _cosines(self, x: Tensor) -> Tensor:
        centroids = unit_length(self.centroids).unflatten(0, (-1, self.config.num_buckets))
        return torch.einsum("bthd,hnd->bthn", x, centroids.to(x.dtype))


class RoutingByHeadMixer(RoutingMixer):
    """The same in every second key-value head and its queries; the others are attention to the last tokens.

    These have keys of their own, and their states hold only the window.
    """

    padding_last = True

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        heads = config.num_key_value_heads // 2
        self.k_proj = nn.Linear(config.hidden_size, heads * config.head_dim, bias=config.attention_bias)

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """See `attend`."""
        near = State((config.pattern_size - 1, config.num_key_value_heads // 2, config.head_dim), None)
        return super().state_spec(config, layer_idx) | {"near_keys": near, "near_values": near}

    def attend(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, States]:
        """The states are those of a `RoutingMixer` for half of the heads; and, of the others, `near_keys` and
        `near_values` [B, pattern_size - 1, H / 2, D] of the last tokens."""
        q, v = self.queries_and_values(hidden_states)
        self.check_split(q, 2 * self.num_key_value_groups)
        (near_q, q), (near_v, v) = (_in_turn(x, v.shape[2]) for x in (q, v))
        near_k = self.k_proj(hidden_states).unflatten(-1, (-1, self.head_dim))
        near, kept = self._near(near_q, near_k, near_v, context)
        routed, states = self.in_buckets(q, v, context)
        both = [x.unflatten(2, (-1, self.num_key_value_groups)) for x in (near, routed)]
        return torch.stack(both, 3).flatten(2, 4), states | kept

    def routed(self, q: Tensor) -> Tensor:
        """See `RoutingMixer`."""
        return _in_turn(q, q.shape[2] // self.num_key_value_groups)[1]

    def _near(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, States]:
        q, k = self.rotate(q, k, context.positions)
        W, states = self.config.pattern_size, {}
        if before := context.states:
            states = {"keys": before["near_keys"], "values": before["near_values"], "seen": before["count"]}
        o, new = window_attention(
            q,
            k,
            v,
            window=W,
            sees=causal & window(W),
            scaling=self.scaling,
            states=states,
            lengths=context.lengths,
        )
        return o, {"near_keys": new["keys"], "near_values": new["values"]}


def _in_turn(x: Tensor, H: int) -> tuple[Tensor, ...]:
    """The heads [B, T, HQ, D] of every second of H groups, and those of the others."""
    return tuple(y.flatten(2, 3) for y in x.unflatten(2, (H // 2, 2, -1)).unbind(3))


def bucket_heads(config, layer_idx: int) -> tuple[int, int]:
    """Numbers of query heads and of key-value heads with buckets."""
    share = 2 if config.patterns[layer_idx] == "routing_by_head" else 1
    return config.num_attention_heads // share, config.num_key_value_heads // share
