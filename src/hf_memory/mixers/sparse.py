"""Sparse attention: near tokens in blocks, and a few far tokens, without computing all pairs."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from hf_memory.cache import States
from hf_memory.layers import real_tokens_first
from hf_memory.mixers.attention_blocks import (
    BLOCK,
    Blocks,
    Columns,
    joined_softmax,
    near_columns,
    rows_of,
    softmax_attention,
)
from hf_memory.mixers.base import Context
from hf_memory.mixers.patterns import pattern_of
from hf_memory.mixers.transformer import Attended, TransformerMixer, grown
from hf_memory.mixers.window_attention import take
from hf_memory.ops.masks import Mask, Tokens, causal, older, random_block, window


class WholePastMixer(TransformerMixer, ABC):
    """A mixer whose cache holds all tokens. Each row's tokens are in order, with padding at the end."""

    padding_last = True

    def mix(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, States]:
        """The states are those of a `TransformerMixer`."""
        if context.cu_seqlens is not None:
            return self.apart(hidden_states, context, context.cu_seqlens)
        q, k, v = self.projected(hidden_states, context)
        tokens, seen, states = grown(k, v, context)
        past = Columns(Tokens(seen["positions"]), seen["keys"], seen["values"])
        if context.states:  # with padding before the new tokens
            is_token = seen["positions"] >= 0
            past = past.map(lambda x: real_tokens_first(x, is_token)[0])
        o = self.attend_in_order(q, tokens.map(lambda x: x.expand(len(q), -1)), past)
        return self.o_proj(o.flatten(2)), states

    @abstractmethod
    def attend_in_order(self, q: Tensor, tokens: Tokens, past: Columns) -> Tensor:
        """Attention of queries [B, T, HQ, D], which are these tokens, to the past up to the last of them."""


class SparseMixer(WholePastMixer):
    """Attention with a pattern that has near tokens, computed in blocks, and far tokens."""

    def near(self, tokens: Tokens, past: Columns) -> Columns:
        """All tokens within reach of the queries."""
        pattern, T = pattern_of(self.config, self.layer_idx), tokens.position.shape[1]
        places = tokens.position[:, :1] + torch.arange(1 - pattern.reach, T, device=past.keys.device)
        return at(past, places)._replace(sees=causal & pattern.sees & window(pattern.reach))

    @property
    def sees_far(self) -> Mask:
        """The mask of the pattern's tokens that are out of reach."""
        pattern = pattern_of(self.config, self.layer_idx)
        return causal & pattern.sees & older(pattern.reach)


class SummaryMixer(SparseMixer):
    """All queries see the same far tokens: `num_summary_tokens` for each complete block."""

    def attend_in_order(self, q: Tensor, tokens: Tokens, past: Columns) -> Tensor:
        """Process one block of queries at a time, with the summaries of earlier blocks."""
        near, far, parts, (B, T) = self.near(tokens, past), self.summaries(past), [], q.shape[:2]
        size, each = self.config.pattern_size, self.config.num_summary_tokens
        C, unread = min(T, BLOCK), past.keys.shape[1] - T
        nears = near_columns(near, B, near.keys.shape[1] - T, C).by_block(B)
        for end, mine, asking, own in zip(range(C, T + C, C), q.split(C, 1), tokens.position.split(C, 1), nears):
            ended = None if end >= T else (unread + end) // size * each
            blocks = Blocks.of(mine, Tokens(asking), far.of(slice(ended)), own)
            parts.append(softmax_attention(blocks, self.scaling, self.config.attn_logit_softcapping, self.relation))
        return torch.cat(parts, 1)

    @abstractmethod
    def summaries(self, past: Columns) -> Columns:
        """The summaries of all blocks as columns [B, blocks * num_summary_tokens], in order."""


class GroupMixer(SparseMixer):
    """Groups of queries see the same far tokens, so that each group is a small dense attention."""

    def attend_in_order(self, q: Tensor, tokens: Tokens, past: Columns) -> Tensor:
        """Combine near and far tokens in one softmax."""
        near = self.softmax_near(q, tokens, self.near(tokens, past))
        return joined_softmax(near, self.far(q, tokens, past))[0]

    @abstractmethod
    def far(self, q: Tensor, tokens: Tokens, past: Columns) -> Attended:
        """Attention to far tokens, [B, T, HQ, ...]."""

    def grouped(self, q: Tensor, position: Tensor, columns: Columns, groups: int) -> Attended:
        """Attention of queries [B, groups * size], each group to its columns [B, groups * n]: [B * groups, size]."""
        mine = columns.map(lambda x: x.unflatten(1, (groups, -1)).flatten(0, 1))
        asking, places = (x.unflatten(1, (groups, -1)).flatten(0, 1) for x in (q, position))
        return self.softmax(Blocks.of(asking, Tokens(places), mine))


class FixedMixer(SummaryMixer):
    """The summary of a block is its last tokens."""

    def summaries(self, past: Columns) -> Columns:
        """See `SummaryMixer`."""
        size, n = self.config.pattern_size, self.config.num_summary_tokens
        blocks = torch.arange(past.keys.shape[1] // size, device=past.keys.device)[:, None] * size
        places = (blocks + torch.arange(size - n, size, device=blocks.device)).flatten()
        return past.map(lambda x: x[:, places])._replace(sees=self.sees_far)


class LinformerMixer(SummaryMixer):
    """The summary of a block is a few learned sums of its keys and values. https://arxiv.org/abs/2006.04768.

    The paper sums over the whole text, which would let tokens see the future.
    """

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.compress = nn.Parameter(torch.empty(config.num_summary_tokens, config.pattern_size))

    def init_own_parameters(self) -> None:
        """Sums start as means, with noise that makes them different."""
        mean = 1 / self.config.pattern_size
        init.normal_(self.compress, mean=mean, std=mean)

    def summaries(self, past: Columns) -> Columns:
        """See `SummaryMixer`; a summary has the position of the end of its block."""
        n, size = self.compress.shape
        starts = size * torch.arange(past.keys.shape[1] // size, device=past.keys.device)
        blocks = starts[:, None] + torch.arange(size, device=starts.device)

        def sums(x: Tensor) -> Tensor:
            return torch.einsum("ns,bmshd->bmnhd", self.compress.to(x.dtype), x[:, blocks]).flatten(1, 2)

        position = past.tokens.position[:, blocks[:, -1]].repeat_interleave(n, 1)
        earlier = causal & Mask(lambda q, k: k // size < q // size)
        return Columns(Tokens(position), sums(past.keys), sums(past.values), earlier)


class StridedMixer(GroupMixer):
    """Queries at distances that are multiples of the stride see the same far tokens, and form a group."""

    def far(self, q: Tensor, tokens: Tokens, past: Columns) -> Attended:
        """See `GroupMixer`."""
        stride, (B, T) = self.config.pattern_size, q.shape[:2]
        groups = min(stride, T)
        rest = (tokens.position[:, :1] + torch.arange(groups, device=q.device)) % stride
        places = rest[..., None] + torch.arange(0, past.keys.shape[1], stride, device=q.device)
        seen = at(past, places.flatten(1))._replace(sees=self.sees_far)
        asking, position = (_groups(x, groups, value) for x, value in ((q, 0), (tokens.position, -1)))
        both = self.grouped(asking, position, seen, groups)
        o, mass = (x.unflatten(0, (B, groups)).transpose(1, 2).flatten(1, 2)[:, :T] for x in both)
        return o, mass


class BigBirdMixer(GroupMixer):
    """Groups are blocks of queries, which see the first block and their random blocks."""

    def far(self, q: Tensor, tokens: Tokens, past: Columns) -> Attended:
        """See `GroupMixer`."""
        config, T = self.config, q.shape[1]
        size = min(config.pattern_size, T)
        blocks = -(-T // size)
        pad = blocks * size - T
        position = F.pad(tokens.position, (0, pad), value=-1)
        touched = tokens.position[:, ::size, None] // config.pattern_size + torch.arange(2, device=q.device)
        drawn = [random_block(touched, i, config.pattern_seed) for i in range(config.num_random_blocks)]
        seen = F.pad(torch.cat(drawn, -1), (1, 0))  # [B, blocks, n], the first block among them
        twice = (seen[..., :, None] == seen[..., None, :]).tril(-1).any(-1)
        starts = torch.where(twice, -1, seen)[..., None] * config.pattern_size
        places = torch.where(starts < 0, -1, starts + torch.arange(config.pattern_size, device=q.device))
        columns = at(past, places.flatten(1))._replace(sees=self.sees_far)
        asking = F.pad(q, (0, 0, 0, 0, 0, pad))
        both = self.grouped(asking, position, columns, blocks)
        o, mass = (rows_of([x], q) for x in both)
        return o, mass


def at(past: Columns, places: Tensor) -> Columns:
    """The tokens at places [B, n]; none at negative places and after the last token."""
    is_place = (places >= 0) & (places < past.keys.shape[1])
    inside = places.where(is_place, 0)
    position = past.tokens.position.expand(len(places), -1).gather(1, inside).where(is_place, -1)
    return Columns(Tokens(position), take(past.keys, inside), take(past.values, inside))


def _groups(x: Tensor, groups: int, value: float) -> Tensor:
    """[B, T, ...] -> [B, T', ...], sorted by position modulo `groups`, and padded."""
    pad = -x.shape[1] % groups
    x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, pad), value=value)
    return x.unflatten(1, (-1, groups)).transpose(1, 2).flatten(1, 2)
