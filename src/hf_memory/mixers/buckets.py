"""Attention to tokens of the same bucket, which what they say decides: queries are keys, hashed or near a centroid."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from hf_memory.cache import Spec, State, States
from hf_memory.layers import in_their_places, real_tokens_first, unit_length, wide
from hf_memory.mixers.attention_blocks import (
    BLOCK,
    Blocks,
    Columns,
    joined_softmax,
    near_blocks,
    rows_of,
    softmax_and_mass,
)
from hf_memory.mixers.base import Context
from hf_memory.mixers.transformer import TransformerMixer, grown
from hf_memory.ops.masks import Tokens

ITSELF = -5e4  # a token's score of itself: it is seen only where nothing else is


class BucketMixer(TransformerMixer):
    """o_i = sum_j softmax_j(q_i k_j / sqrt(D)) v_j over earlier j of a bucket of i's in any round, k_j = q_j / |q_j|.

    All tokens of all buckets count, however full: sorted by bucket, a token sees no further back than the largest
    bucket is long. What is in several buckets with it counts once.
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
        """[B, T, H, D] of unit length -> [B, T, H, rounds] int32."""
        raise NotImplementedError

    def mix(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, States]:
        """States: those of a `TransformerMixer`, and `buckets` [B, tokens, H, rounds]."""
        if context.cu_seqlens is not None:
            return self.apart(hidden_states, context, context.cu_seqlens)
        q, v = (proj(hidden_states).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.v_proj))
        unit = unit_length(q)
        asked = self.buckets(unit.detach())
        q, k = self.rotate(q, unit, context.positions)
        tokens, states = grown(k, v, context, buckets=asked)
        if context.states or torch.compiler.is_compiling():
            o = self._all_pairs(q, tokens.position.expand(len(q), -1), asked, states)
        else:
            o = self._sorted(q, context.attention_mask, states)
        return self.o_proj(o.flatten(2)), states

    def _all_pairs(self, q: Tensor, position: Tensor, asked: Tensor, past: States) -> Tensor:
        """Of few queries with all tokens, a block at a time."""
        parts, columns = [], Columns(Tokens(past["positions"].long()), past["keys"], past["values"])
        for i in range(0, q.shape[1], BLOCK):
            here = slice(i, i + BLOCK)
            blocks = Blocks.of(q[:, here], Tokens(position[:, here]), columns)
            same = (asked[:, here, None] == past["buckets"][:, None]).any(-1)  # [B, C, S, H]
            blocks = blocks._replace(visible=blocks.visible & same.permute(0, 3, 1, 2))
            parts.append(softmax_and_mass(blocks, self.scaling, None, Itself())[0])
        return torch.cat(parts, 1)

    def _sorted(self, q: Tensor, mask: Tensor | None, new: States) -> Tensor:
        """Of whole texts, a round after the other."""
        k, v, order = new["keys"], new["values"], None
        tokens, asked = new["positions"].long(), new["buckets"].long()
        if mask is not None:
            q, order = real_tokens_first(q, mask)
            k, v, tokens, asked = (real_tokens_first(x, mask)[0] for x in (k, v, tokens, asked))
        B, T, H, _ = q.shape
        q, k, v, asked = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v, asked))  # [B * H, T, ...]
        tokens = tokens.repeat_interleave(H, 0)
        rounds = [self._round(q, k, v, tokens, asked, i) for i in range(asked.shape[-1])]
        both = rounds[0]
        for more in rounds[1:]:
            both = joined_softmax(both, more)
        o = both[0].view(B, H, T, -1).transpose(1, 2)
        return o if order is None else in_their_places(o, order)

    def _round(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tensor, asked: Tensor, i: int) -> tuple[Tensor, Tensor]:
        """What `softmax_and_mass` gives over the buckets of one round: [B * H, T, 1, D] and [B * H, T, 1]."""
        T, bucket = q.shape[1], asked[..., i].masked_fill(tokens < 0, self.config.num_buckets)
        order = (bucket * T + torch.arange(T, device=q.device)).argsort(1)
        sizes = F.one_hot(bucket, self.config.num_buckets + 1)[..., :-1].sum(1)
        before = max(int(sizes.max()) - 1, 1)
        here = Tokens(tokens.gather(1, order), bucket.gather(1, order))
        keys, values, queries = (x.gather(1, order[..., None].expand_as(x))[:, :, None] for x in (k, v, q))
        keys, values = (F.pad(x, (0, 0, 0, 0, before, 0)) for x in (keys, values))
        seen = Columns(here.map(lambda x: F.pad(x, (before, 0), value=-1)), keys, values)
        blocks = near_blocks(queries, here, seen, None)
        o, mass = softmax_and_mass(blocks, self.scaling, None, Itself(asked))
        return tuple(in_their_places(rows_of(x, queries), order) for x in (o, mass))  # type: ignore[return-value]


@dataclass
class Itself:
    """What a token sees of itself, and of tokens that it meets in several rounds: a share in each."""

    buckets: Tensor | None = None  # [rows, T, rounds], by position

    def __call__(self, scores: Tensor, blocks: Blocks, scaling: float) -> Tensor:
        """See `Relation`."""
        itself = (blocks.asking[:, :, None] == blocks.asked[:, None, :])[:, None]
        scores = scores.masked_fill(itself, ITSELF)
        if self.buckets is None:
            return scores
        table = self.buckets.repeat_interleave(len(blocks.asking) // len(self.buckets), 0)
        asking, asked = (self._of(table, x) for x in (blocks.asking, blocks.asked))
        rounds = sum((asking[:, :, None, i] == asked[:, None, :, i]).to(scores.dtype) for i in range(table.shape[-1]))
        return scores - torch.as_tensor(rounds).clamp(min=1)[:, None].log()

    def _of(self, table: Tensor, position: Tensor) -> Tensor:
        return table.gather(1, position.clamp(min=0)[..., None].expand(-1, -1, table.shape[-1]))

    def read(self, weights: Tensor, blocks: Blocks) -> None:
        """See `Relation`: what is read are the values."""


class ReformerMixer(BucketMixer):
    """Buckets are hashes: the random direction, of either sign, that is nearest. https://arxiv.org/abs/2001.04451."""

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        shape = config.num_attention_heads, config.head_dim, config.num_hashes * (config.num_buckets // 2)
        self.projection = nn.Buffer(torch.empty(shape))

    def init_own_parameters(self) -> None:
        """Drawn once and saved with the model."""
        init.normal_(self.projection)

    def buckets(self, x: Tensor) -> Tensor:
        """See `BucketMixer`."""
        directions = torch.einsum("bthd,hdn->bthn", wide(x), self.projection.to(wide(x).dtype))
        directions = directions.unflatten(-1, (self.config.num_hashes, -1))
        return torch.cat([directions, -directions], -1).argmax(-1).int()


class RoutingMixer(BucketMixer):
    """A bucket is the nearest centroid, as in k-means. https://arxiv.org/abs/2003.05997.

    Each token goes to one, since the best of all tokens for each centroid would be chosen by later tokens, too.
    Centroids learn from a loss of their own, 1 - cos(q, centroid), where the paper has a moving average.
    """

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.centroids = nn.Parameter(torch.empty(config.num_attention_heads * config.num_buckets, config.head_dim))

    def init_own_parameters(self) -> None:
        """In all directions."""
        init.normal_(self.centroids)

    def forward(self, hidden_states: Tensor, *args, own_losses: list[Tensor] | None = None, **kwargs) -> Any:
        """As the others'; in training centroids come to the tokens."""
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
    """How many buckets a token is in."""
    return config.num_hashes if config.patterns[layer_idx] == "reformer" else 1
