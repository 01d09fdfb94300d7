"""Attention to tokens of the same bucket, found by hashing queries (Reformer) or by the nearest centroid (Routing)."""

from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from hf_memory.cache import Spec, State, States
from hf_memory.layers import in_their_places, unit_length, wide
from hf_memory.mixers.attention_blocks import BLOCK, Blocks, Columns, joined_softmax, softmax_and_mass
from hf_memory.mixers.base import Context
from hf_memory.mixers.transformer import Attended, TransformerMixer, grown
from hf_memory.ops.masks import Tokens, earlier

ITSELF = -5e4  # score of a token with itself, which matters only if it sees no other token


class BucketMixer(TransformerMixer):
    """o_i = sum_j softmax_j(q_i k_j / sqrt(D)) v_j over earlier j in the same bucket in some round, k_j = q_j / |q_j|.

    Buckets have no capacity limit: a token sees all earlier tokens of its buckets. A token that shares several buckets
    counts once.
    """

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        del self.k_proj

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """See `mix`."""
        rounds = State((config.num_attention_heads, rounds_of(config, layer_idx)), torch.int32, "token")
        return super().state_spec(config, layer_idx) | {"buckets": rounds}

    def buckets(self, x: Tensor) -> Tensor:
        """Buckets [B, T, H, rounds] int32 of keys [B, T, H, D] of unit length."""
        raise NotImplementedError

    def mix(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, States]:
        """The states are those of a `TransformerMixer`, and `buckets` [B, tokens, H, rounds]."""
        if context.cu_seqlens is not None:
            return self.apart(hidden_states, context, context.cu_seqlens)
        q, v = (proj(hidden_states).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.v_proj))
        unit = unit_length(q)
        asked = self.buckets(unit.detach())
        q, k = self.rotate(q, unit, context.positions)
        tokens, states = grown(k, v, context, buckets=asked)
        if q.shape[1] == 1 or torch.compiler.is_compiling():
            seen = self._all_pairs(q, tokens.position.expand(len(q), -1), asked, states)
        else:
            seen = self._sorted(q, states)
        itself = v, torch.full_like(seen[1], ITSELF)
        return self.o_proj(joined_softmax(seen, itself)[0].flatten(2)), states

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


def attention_in_buckets(q: Tensor, k: Tensor, v: Tensor, buckets: Tensor) -> Attended:
    """Softmax attention to earlier tokens with the same last bucket, of which no earlier bucket is the same.

    Tokens are sorted by bucket. Each block of queries is compared only with the blocks of keys that it sees something
    of, so that the cost follows the actual sizes of the buckets.

    Args:
        q: queries [N, T, D] of the last tokens, scaled.
        k: keys [N, S, D] of all tokens.
        v: values [N, S, V].
        buckets: [N, S, rounds], -1 at padding.

    Returns:
        The results of `softmax_and_mass`, [N, T, V] and [N, T].
    """
    (N, T, _), C = q.shape, min(q.shape[1], BLOCK)
    order, asking, starts, ends = _sorted_by(buckets[..., -1], T)
    q, starts, ends = (_in_blocks(x, asking, C) for x in (q, starts, ends))
    k, v = (_in_blocks(x, order, C) for x in (k, v))
    first = starts[:, 0] // C
    number = ((ends.amax(1) + C - 1) // C - first).clamp(min=0)
    asks = torch.arange(len(q), device=q.device).repeat_interleave(number)  # block of queries of each pair
    nth = first[asks] + torch.arange(len(asks), device=q.device) - (number.cumsum(0) - number)[asks]
    asked = asks // (len(q) // N) * (len(k) // N) + nth
    places = (C * nth[:, None] + torch.arange(C, device=q.device)).int()[:, None]
    visible = (places >= starts[asks, :, None]) & (places < ends[asks, :, None])
    for others in buckets[..., :-1].unbind(-1):
        mine, theirs = _in_blocks(others[:, -T:], asking, C), _in_blocks(others, order, C)
        visible &= mine[asks, :, None] != theirs[asked, None]
    scores = wide(q.index_select(0, asks) @ k.index_select(0, asked).mT).masked_fill_(~visible, -torch.inf)
    o, mass = _softmax_of_parts(scores, v.index_select(0, asked), asks, len(q))
    o, mass = (in_their_places(x.unflatten(0, (N, -1)).flatten(1, 2)[:, :T], asking) for x in (o, mass))
    return o, mass


def _sorted_by(bucket: Tensor, T: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The order of all tokens [N, S] and of the last T, and the range of places that each of these sees."""
    order = bucket.argsort(dim=1, stable=True)
    place, mine = order.argsort(1)[:, -T:], bucket[:, -T:].contiguous()
    starts = torch.searchsorted(bucket.gather(1, order), mine)
    return order, place.argsort(1), starts.int(), place.where(mine >= 0, 0).int()


def _in_blocks(x: Tensor, order: Tensor, C: int) -> Tensor:
    """x [N, T, ...] in the order [N, T], cut into blocks [N * blocks, C, ...] and padded with zeros."""
    rows = order + order.shape[1] * torch.arange(len(x), device=x.device)[:, None]
    x = x.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, order.shape)
    return F.pad(x, (0, 0) * (x.ndim - 2) + (0, -x.shape[1] % C)).unflatten(1, (-1, C)).flatten(0, 1)


def _softmax_of_parts(scores: Tensor, v: Tensor, part_of: Tensor, number: int) -> Attended:
    """Softmax over scores [P, C, S] of values [P, S, V], where parts of the same of `number` blocks share a softmax."""
    each = scores.detach().amax(-1)
    most = each.new_full((number, each.shape[1]), torch.finfo(each.dtype).min)
    most = most.scatter_reduce(0, part_of[:, None].expand_as(each), each, "amax")
    weights = scores.sub_(most[part_of, :, None]).exp_()
    mass = weights.new_zeros(most.shape).index_add(0, part_of, weights.sum(-1))
    read = wide(weights.to(v.dtype) @ v)
    o = read.new_zeros(number, *read.shape[1:]).index_add(0, part_of, read)
    is_any = mass > 0
    mass = mass.where(is_any, 1)
    return (o / mass[..., None]).to(v.dtype), (most + mass.log()).where(is_any, -torch.inf)


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
        self.centroids = nn.Parameter(torch.empty(config.num_attention_heads * config.num_buckets, config.head_dim))

    def init_own_parameters(self) -> None:
        """Centroids start in random directions."""
        init.normal_(self.centroids)

    def forward(self, hidden_states: Tensor, *args, own_losses: list[Tensor] | None = None, **kwargs) -> Any:
        """See `MemoryMixer.forward`; in training, the loss of the centroids is added to the losses."""
        if own_losses is not None and self.training:
            x = unit_length(self.q_proj(hidden_states).unflatten(-1, (-1, self.head_dim)))
            own_losses.append(1 - self._cosines(x.detach()).amax(-1).mean())
        return super().forward(hidden_states, *args, **kwargs)

    def buckets(self, x: Tensor) -> Tensor:
        """See `BucketMixer`."""
        return self._cosines(x).argmax(-1, keepdim=True).int()

    def _cosines(self, x: Tensor) -> Tensor:
        centroids = unit_length(self.centroids).unflatten(0, (-1, self.config.num_buckets))
        return torch.einsum("bthd,hnd->bthn", x, centroids.to(x.dtype))


def rounds_of(config, layer_idx: int) -> int:
    """The number of buckets of a token."""
    return config.num_hashes if config.patterns[layer_idx] == "reformer" else 1
