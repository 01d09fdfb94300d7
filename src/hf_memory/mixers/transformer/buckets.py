"""Attention to tokens of the same bucket, found by hashing queries (Reformer) or by the nearest centroid (Routing)."""

from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_memory.cache import Spec, State, States
from hf_memory.layers import unit_length, upcast
from hf_memory.mixers.attention_blocks import (
    BLOCK,
    Attended,
    Columns,
    Scores,
    attended_rows,
    blocks_in_turn,
    joined_softmax,
)
from hf_memory.mixers.base import Context
from hf_memory.mixers.pasts.everything import Everything
from hf_memory.mixers.pasts.ring import Window, window_attention
from hf_memory.mixers.pasts.rows import New
from hf_memory.mixers.transformer.base import TransformerMixer
from hf_memory.mixers.transformer.bucket_attention import attention_in_buckets
from hf_memory.mixers.transformer.forgetting import TOKENS_READ
from hf_memory.ops.exported import varies
from hf_memory.ops.layout import repeat_heads
from hf_memory.ops.masks import Tokens, earlier

ITSELF = -5e4  # score of a token with itself, which matters only if it sees no other token


def in_buckets(
    mixer: TransformerMixer,
    q: Tensor,
    v: Tensor,
    buckets: Callable[[Tensor], Tensor],
    context: Context,
) -> tuple[Tensor, States]:
    """o_i = sum_j softmax_j(q_i k_j / sqrt(D)) v_j over earlier j in the same bucket in some round, k_j = q_j / |q_j|.

    Buckets have no capacity limit: a token sees all earlier tokens of its buckets. A token that shares several buckets
    counts once. Query heads of a group share values.

    Args:
        mixer: the mixer, whose scores and rotations are used.
        q: queries [B, T, HQ, D], not rotated.
        v: values [B, T, H, D].
        buckets: returns buckets [B, T, HQ, rounds] int32 of keys [B, T, HQ, D] of unit length.
        context: the context of the mixer.

    Returns:
        The heads [B, T, HQ, D], and the states of `bucket_spec`.
    """
    unit = unit_length(q)
    q_buckets = buckets(unit.detach())
    q, k = mixer.rotate(q, unit, context.positions)
    tokens, tokens_read = context.tokens_and_count(k)
    past = Everything(None).read_many(New.of(k, v, None, context), tokens, context)
    bucket, new = context.grown({"buckets": q_buckets})
    seen = past.near._replace(values=repeat_heads(past.values, q.shape[2]), sees=earlier)
    attend = _all_pairs if q.shape[1] == 1 or torch.compiler.is_compiling() else _sorted
    attended = attend(q, tokens, q_buckets, seen, bucket["buckets"], mixer.scaling)
    itself = repeat_heads(v, q.shape[2]), torch.full_like(attended[1], ITSELF)
    return joined_softmax(attended, itself)[0], past.states | new | {"tokens_read": tokens_read}


def bucket_spec(config, share: int, rounds: int) -> Spec:
    """The states of `Everything`, `tokens_read`, and `buckets` [B, tokens, HQ, rounds], of one of `share` heads."""
    heads, _, values, D, _ = config.attention_heads
    spec = Everything(None).spec(heads // share, D, D)
    spec["values"] = State((values // share, D), None, "token")
    spec["buckets"] = State(
        (heads // share, rounds), torch.int32, "token", largest=config.num_buckets - 1
    )
    return {"tokens_read": TOKENS_READ} | spec


def _all_pairs(
    q: Tensor, tokens: Tokens, q_buckets: Tensor, seen: Columns, buckets: Tensor, scaling: float
) -> Attended:
    """Attention of few queries, compared with all tokens, one block at a time."""
    parts = []
    groups = blocks_in_turn(q, tokens, BLOCK, seen, lambda here: slice(None))
    bucket_blocks = [q_buckets] if varies(q.shape[1]) else q_buckets.split(BLOCK, 1)
    for blocks, bucket_of_block in zip(groups, bucket_blocks):
        is_same = (bucket_of_block[:, :, None] == buckets[:, None]).any(-1)  # [B, C, S, H]
        blocks = blocks._replace(visible=blocks.visible & is_same.permute(0, 3, 1, 2))
        parts.append(Scores(scaling).attend_with_mass(blocks))
    return attended_rows(parts, q)


def _sorted(
    q: Tensor, tokens: Tokens, q_buckets: Tensor, seen: Columns, buckets: Tensor, scaling: float
) -> Attended:
    """Attention of the last tokens to all tokens, with tokens sorted by bucket, one round after the other."""
    is_token = (seen.tokens.position >= 0)[..., None, None]
    each = scaling * q, seen.keys, seen.values, buckets.masked_fill(~is_token, -1)
    q, k, v, buckets = (x.transpose(1, 2).flatten(0, 1) for x in each)  # [B * H, T or S, ...]
    rounds = (
        attention_in_buckets(q, k, v, buckets[..., : i + 1]) for i in range(buckets.shape[-1])
    )
    o, mass = (
        x.unflatten(0, each[0].shape[::2]).transpose(1, 2) for x in reduce(joined_softmax, rounds)
    )
    return o, mass


class ReformerMixer(TransformerMixer):
    """A bucket is a hash: the nearest of random directions and their negatives. https://arxiv.org/abs/2001.04451."""

    takes_packed = False
    can_have_few_bits = False

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        del self.k_proj
        shape = (
            config.num_attention_heads,
            config.head_dim,
            config.num_hashes * (config.num_buckets // 2),
        )
        self.projection = nn.Buffer(torch.empty(shape))

    def init_own_parameters(self) -> None:
        """Random directions are drawn once, and saved with the model."""
        init.normal_(self.projection)

    @classmethod
    def exact_up_to(cls, config, layer_idx: int, length: int) -> int | None:
        """None, since tokens of other buckets are not seen."""
        return None

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """The states of `attend`."""
        return bucket_spec(config, 1, config.num_hashes)

    def attend(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, States]:
        """The states are those of `in_buckets`."""
        q, v = (self.by_head(proj(hidden_states)) for proj in (self.q_proj, self.v_proj))
        return in_buckets(self, q, v, self.buckets, context)

    def buckets(self, x: Tensor) -> Tensor:
        """See `in_buckets`."""
        if x.shape[2] != len(self.projection):
            raise ValueError(
                "pattern must not be 'reformer' with tensor parallelism, "
                f"got {x.shape[2]} of {len(self.projection)} heads"
            )
        directions = torch.einsum("bthd,hdn->bthn", upcast(x), self.projection.to(upcast(x).dtype))
        directions = directions.unflatten(-1, (self.config.num_hashes, -1))
        nearest = directions.abs().argmax(-1, keepdim=True)
        is_opposite = directions.gather(-1, nearest) < 0
        return (nearest + is_opposite * directions.shape[-1])[..., 0].int()


class RoutingMixer(TransformerMixer):
    """A bucket is the nearest centroid, as in k-means. https://arxiv.org/abs/2003.05997.

    Each token chooses a centroid; if centroids chose their best tokens, later tokens would have an influence. Centroids
    are trained by a separate loss, 1 - cos(q, centroid); the paper has a moving average. With "routing_by_head" this
    holds for every second key-value head and its queries; the others are attention to the last tokens, have keys of
    their own, and states that hold only the window.
    """

    can_have_few_bits = False

    padding_last = True
    takes_packed = False

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.share = _share(config, layer_idx)
        heads = config.num_attention_heads // self.share
        self.centroids = nn.Parameter(torch.empty(heads * config.num_buckets, config.head_dim))
        del self.k_proj
        if self.share > 1:
            heads = config.num_key_value_heads // self.share
            self.k_proj = nn.Linear(
                config.hidden_size, heads * config.head_dim, bias=config.attention_bias
            )

    def init_own_parameters(self) -> None:
        """Centroids start in random directions."""
        init.normal_(self.centroids)

    @classmethod
    def exact_up_to(cls, config, layer_idx: int, length: int) -> int | None:
        """None, since tokens of other buckets are not seen."""
        return None

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """The states of `attend`."""
        share = _share(config, layer_idx)
        spec = bucket_spec(config, share, 1)
        if share == 1:
            return spec
        D = config.head_dim
        return spec | _near(config).spec(config.num_key_value_heads // share, D, D)

    def own_loss(self, hidden_states: Tensor, context: Context) -> Tensor | None:
        """The loss of the centroids, in the mean over the queries of a token."""
        with torch.no_grad():
            q = self.by_head(self.q_proj(hidden_states))
            if self.share > 1:
                q = _alternating(q, q.shape[2] // self.num_key_value_groups)[1]
            x = unit_length(q)
        return 1 - upcast(self._cosines(x)).amax(-1).mean(-1)

    def attend(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, States]:
        """The states are those of `in_buckets`; and, of heads without buckets, of a `Window`."""
        q, v = (self.by_head(proj(hidden_states)) for proj in (self.q_proj, self.v_proj))
        if self.share == 1:
            return in_buckets(self, q, v, self.buckets, context)
        self.check_split(q, self.share * self.num_key_value_groups)
        (near_q, q), (near_v, v) = (_alternating(x, v.shape[2]) for x in (q, v))
        near_k = self.by_head(self.k_proj(hidden_states))
        near_q, near_k = self.rotate(near_q, near_k, context.positions)
        new = New.of(near_k, near_v, None, context)
        near, near_states = window_attention(
            near_q, new, context, _near(self.config), Scores(self.scaling)
        )
        routed, states = in_buckets(self, q, v, self.buckets, context)
        both = [x.unflatten(2, (-1, self.num_key_value_groups)) for x in (near, routed)]
        return torch.stack(both, 3).flatten(2, 4), states | near_states

    def buckets(self, x: Tensor) -> Tensor:
        """See `in_buckets`."""
        return self._cosines(x).argmax(-1, keepdim=True).int()

    def _cosines(self, x: Tensor) -> Tensor:
        centroids = unit_length(self.centroids).unflatten(0, (-1, self.config.num_buckets))
        return torch.einsum("bthd,hnd->bthn", x, centroids.to(x.dtype))


def _share(config, layer_idx: int) -> int:
    return 2 if config.patterns[layer_idx] == "routing_by_head" else 1


def _near(config) -> Window:
    return Window.of_last(config.pattern_size, prefix="near_", kind=None)


def _alternating(x: Tensor, H: int) -> tuple[Tensor, ...]:
    """The heads [B, T, HQ / 2, D] of the first, third, ... of H groups, and those of the second, fourth, ... ones."""
    return tuple(y.flatten(2, 3) for y in x.unflatten(2, (H // 2, 2, -1)).unbind(3))
