"""Sparse attention: near tokens in blocks, and a few far tokens, without computing all pairs."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from hf_memory.cache import States
from hf_memory.layers import real_tokens_first
from hf_memory.mixers.attention_blocks import (
    LONG_BLOCK,
    Attended,
    Blocks,
    Columns,
    attended_rows,
    blocks_in_turn,
    joined_softmax,
)
from hf_memory.mixers.base import Context
from hf_memory.mixers.pasts.everything import Everything
from hf_memory.mixers.pasts.rows import take
from hf_memory.mixers.transformer.base import TransformerMixer
from hf_memory.mixers.transformer.patterns import exact_with_pattern, pattern_of
from hf_memory.ops.exported import first_tokens, in_blocks, pieces, varies
from hf_memory.ops.masks import Mask, Tokens, causal, older, random_block, window


class SparseMixer(TransformerMixer):
    """Attention with a pattern that has near tokens, computed in blocks, and far tokens; the cache holds all tokens."""

    padding_last = True
    takes_packed = False

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.compress: Any = None
        if config.patterns[layer_idx] == "linformer":
            self.compress = nn.Parameter(
                torch.empty(config.num_summary_tokens, config.pattern_size)
            )

    def init_own_parameters(self) -> None:
        """Sums start as means, with noise that makes them different."""
        if self.compress is not None:
            mean = 1 / self.config.pattern_size
            init.normal_(self.compress, mean=mean, std=mean)

    @classmethod
    def exact_up_to(cls, config, layer_idx: int, length: int) -> int | None:
        """See `exact_with_pattern`."""
        return exact_with_pattern(config, layer_idx, length)

    def attend(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, States]:
        """The states are those of a `TransformerMixer`."""
        q, tokens, (past, _, states, *_) = self.read(Everything(), hidden_states, context)
        if context.states:  # with padding before the new tokens
            is_token = past.tokens.position >= 0
            past = past.map(lambda x: real_tokens_first(x, is_token)[0])
        pattern = pattern_of(self.config, self.layer_idx)
        T = q.shape[1]
        places = tokens.position[:, :1] + torch.arange(1 - pattern.reach, T, device=q.device)
        near = _at(past, places)._replace(sees=pattern.sees & window(pattern.reach))
        past = past._replace(sees=pattern.sees & older(pattern.reach))
        far = FAR[self.config.patterns[self.layer_idx]](self, q, tokens, past)
        return joined_softmax(self.attend_near(q, tokens, near), far)[0], states


def _last_of_blocks(mixer: SparseMixer, q: Tensor, tokens: Tokens, past: Columns) -> Attended:
    """All queries see the last `num_summary_tokens` tokens of each complete block."""
    n = mixer.config.num_summary_tokens
    blocks = _in_blocks(past, mixer.config.pattern_size)
    return _attend_summaries(
        mixer, q, tokens, blocks.map(lambda x: x[:, :, -n:].flatten(1, 2)), past
    )


def _sums_of_blocks(mixer: SparseMixer, q: Tensor, tokens: Tokens, past: Columns) -> Attended:
    """All queries see a few learned sums of keys and values of each complete block. https://arxiv.org/abs/2006.04768.

    The paper sums over the whole text, which would let tokens see the future. A sum has the position of its last token.
    """
    n, size = mixer.compress.shape
    blocks = _in_blocks(past, mixer.config.pattern_size)
    keys, values = (
        torch.einsum("ns,bmshd->bmnhd", mixer.compress.to(x.dtype), x).flatten(1, 2)
        for x in (blocks.keys, blocks.values)
    )
    position = blocks.tokens.position[:, :, -1].repeat_interleave(n, 1)
    earlier = causal & Mask(lambda q, k: k // size < q // size)
    return _attend_summaries(
        mixer, q, tokens, Columns(Tokens(position), keys, values, earlier), past
    )


def _in_blocks(past: Columns, size: int) -> Columns:
    """The past [B, blocks, size, ...]; the last block is not complete."""
    position = in_blocks(past.tokens.position, size, -1, more=1)
    keys, values = (in_blocks(x, size, more=1) for x in (past.keys, past.values))
    return Columns(Tokens(position), keys, values, past.sees)


def _attend_summaries(
    mixer: SparseMixer, q: Tensor, tokens: Tokens, summaries: Columns, past: Columns
) -> Attended:
    """Attention to summaries, `num_summary_tokens` for each block of the past."""
    size = mixer.config.pattern_size
    each = mixer.config.num_summary_tokens
    before = past.keys.shape[1] - q.shape[1]

    def part(here: slice) -> slice:
        return slice(max(1, (before + here.stop) // size * each))

    groups = blocks_in_turn(q, tokens, LONG_BLOCK, summaries, part)
    return attended_rows(map(mixer.scores.attend_with_mass, groups), q)


def _strided(mixer: SparseMixer, q: Tensor, tokens: Tokens, past: Columns) -> Attended:
    """Queries at distances that are multiples of the stride see the same far tokens, and form a group."""
    stride = mixer.config.pattern_size
    T = q.shape[1]
    groups = stride if varies(T) else min(stride, T)
    rest = (tokens.position[:, :1] + torch.arange(groups, device=q.device)) % stride
    steps = torch.arange(pieces(past.keys.shape[1], stride), device=q.device)
    places = rest[..., None] + stride * steps
    in_turn = in_blocks(q, groups), in_blocks(tokens.position, groups, -1)
    q, position = (x.transpose(1, 2) for x in in_turn)  # sorted by position modulo `groups`
    results = _grouped(mixer, q, position, past, places)
    o, mass = (first_tokens(x.transpose(1, 2).flatten(1, 2), T) for x in results)
    return o, mass


def _random(mixer: SparseMixer, q: Tensor, tokens: Tokens, past: Columns) -> Attended:
    """Groups are blocks of queries, which see the first block and their random blocks."""
    config = mixer.config
    T = q.shape[1]
    size = config.pattern_size if varies(T) else min(config.pattern_size, T)
    position = in_blocks(tokens.position, size, -1)
    # after other tokens, the queries of a group may be in two blocks of the text
    q_blocks = position[..., :1] // config.pattern_size + torch.arange(2, device=q.device)
    drawn = [
        random_block(q_blocks, i, config.pattern_seed) for i in range(config.num_random_blocks)
    ]
    seen = F.pad(torch.cat(drawn, -1), (1, 0))  # [B, blocks, n], the first block among them
    is_repeated = (seen[..., :, None] == seen[..., None, :]).tril(-1).any(-1)
    starts = torch.where(is_repeated, -1, seen)[..., None] * config.pattern_size
    places = torch.where(
        starts < 0, -1, starts + torch.arange(config.pattern_size, device=q.device)
    )
    results = _grouped(mixer, in_blocks(q, size), position, past, places.flatten(2))
    o, mass = (first_tokens(x.flatten(1, 2), T) for x in results)
    return o, mass


def _grouped(
    mixer: SparseMixer, q: Tensor, position: Tensor, past: Columns, places: Tensor
) -> Attended:
    """Attention of groups of queries [B, groups, size, HQ, D] to the places [B, groups, n] of the past.

    Returns the outputs [B, groups, size, HQ, D], and the logarithms of their masses [B, groups, size, HQ].
    """
    columns = _at(past, places.flatten(1)).map(lambda x: x.unflatten(1, places.shape[1:]))
    blocks = Blocks.of(
        q.flatten(0, 1), Tokens(position.flatten(0, 1)), columns.map(lambda x: x.flatten(0, 1))
    )
    o, mass = (x.unflatten(0, q.shape[:2]) for x in mixer.scores.attend_with_mass(blocks))
    return o, mass


def _at(past: Columns, places: Tensor) -> Columns:
    """The columns at places [B, n] of the past; empty ones where a place is negative or after the last token."""
    is_place = (places >= 0) & (places < past.keys.shape[1])
    inside = places.where(is_place, 0)
    position = (
        past.tokens.position.expand(places.shape[0], -1).gather(1, inside).where(is_place, -1)
    )
    return Columns(Tokens(position), take(past.keys, inside), take(past.values, inside), past.sees)


FAR = {  # attention to the far tokens of each pattern
    "fixed": _last_of_blocks,
    "fixed_by_head": _last_of_blocks,
    "linformer": _sums_of_blocks,
    "strided": _strided,
    "strided_by_head": _strided,
    "bigbird": _random,
}
