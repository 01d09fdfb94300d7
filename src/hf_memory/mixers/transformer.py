"""Attention with any kind of positions, to all tokens or with a local pattern."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hf_memory.cache import Spec, State, States
from hf_memory.mixers.attention_blocks import (
    Blocks,
    Columns,
    full_attention,
    near_blocks,
    rows_of,
    softmax_and_mass,
)
from hf_memory.mixers.base import Context, MemoryMixer
from hf_memory.mixers.patterns import pattern_of
from hf_memory.mixers.relations import RELATIONS
from hf_memory.mixers.window_attention import window_attention
from hf_memory.ops.masks import Tokens, causal

Attended = tuple[Tensor, Tensor]  # the result of `softmax_and_mass`


class TransformerMixer(MemoryMixer):
    """o_i = sum_{j<=i} softmax_j(s_ij) v_j,   s_ij = q_i k_j / sqrt(D), changed by the positions of i and j."""

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.relation: Any = RELATIONS[config.position](config) if config.position in RELATIONS else None

    @property
    def sees_positions(self) -> bool:
        """Whether positions are rotations."""
        return self.rotates

    @property
    def new_part(self) -> nn.Module | None:
        """None with rotary positions, as in a teacher; otherwise all, since queries and keys change their meaning."""
        return None if self.config.position == "rope" else self

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """See `mix`."""
        _, heads, _, K, V = config.attention_heads
        spec = {"count": State((), torch.long), "keys": State((heads, K), None, "token")}
        spec |= {"values": State((heads, V), None, "token")}
        return spec | {"positions": State((), torch.int32, "token", absent=-1)}

    def mix(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, States]:
        """States: `count` [B] of tokens read, `keys` and `values` [B, tokens, H, D], and `positions` [B, tokens]."""
        q, k, v = self.projected(hidden_states, context)
        tokens, past, states = grown(k, v, context)
        o = full_attention(
            q,
            tokens,
            Columns(Tokens(past["positions"], tokens.sequence), past["keys"], past["values"]),
            scaling=self.scaling,
            softcap=self.config.attn_logit_softcapping,
            relation=self.relation,
            is_whole=context.is_whole,
        )
        return self.o_proj(o.flatten(2)), states

    def apart(self, hidden_states: Tensor, context: Context, cu_seqlens: Tensor) -> tuple[Tensor, States]:
        """Mix each packed sequence separately; they have no states."""
        bounds = [slice(a, b) for a, b in pairwise(cu_seqlens.unique().tolist())]  # without empty sequences
        parts = [(hidden_states[:, x], context.of(x, {})._replace(cu_seqlens=None)) for x in bounds]
        return torch.cat([self.mix(*part)[0] for part in parts], 1), {}

    def softmax(self, blocks: Blocks) -> Attended:
        """Attention in blocks with this mixer's scores."""
        return softmax_and_mass(blocks, self.scaling, self.config.attn_logit_softcapping, self.relation)

    def softmax_near(self, q: Tensor, tokens: Tokens, seen: Columns) -> Attended:
        """Attention of queries [B, T, HQ, D] to the tokens near them (see `near_blocks`), as rows."""
        o, mass = zip(*(self.softmax(blocks) for blocks in near_blocks(q, tokens, seen, None)))
        return rows_of(o, q), rows_of(mass, q)

    def projected(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, T, HQ, D], k and v [B, T, H, D]."""
        q, k, v = self.split_heads(self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states))
        pattern = pattern_of(self.config, self.layer_idx)
        self.check_split(q, 1 if pattern is None else pattern.kinds)
        return *self.normalize_and_rotate(q, k, context.positions), v

    def check_split(self, q: Tensor, kinds: int) -> None:
        """Raise an error if tensor parallelism separates heads [B, T, HQ, D] that see different tokens."""
        heads, total = q.shape[2], self.config.num_attention_heads
        if heads < total and heads % kinds:
            raise ValueError(
                f"tensor parallelism must give each process a multiple of {kinds} heads with "
                f"pattern={self.config.patterns[self.layer_idx]!r}, got {heads} of {total} heads"
            )


def grown(k: Tensor, v: Tensor, context: Context, **more: Tensor) -> tuple[Tokens, States, States]:
    """The new tokens; `keys`, `values`, `positions` and `more` of all tokens; and the states: these, and `count`."""
    tokens, count = context.places(k)
    new = {"keys": k, "values": v, "positions": tokens.position.expand(len(k), -1).int(), **more}
    past, states = context.grown(new)
    return tokens, past, {"count": count, **states}


class LocalMixer(TransformerMixer):
    """Attention to some of the last tokens, and possibly the first ones; the cache holds only these."""

    padding_last = True

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """See `mix`."""
        _, heads, _, D, _ = config.attention_heads
        pattern = pattern_of(config, layer_idx)
        sizes = {"": pattern.reach - 1} | ({"sink_": pattern.first} if pattern.first else {})
        spec = {f"{kind}{x}": State((n, heads, D), None) for kind, n in sizes.items() for x in ("keys", "values")}
        return spec | {"seen": State((), torch.long)}

    def reach(self, T: int) -> int | None:
        """Tokens that T of them see, if parameters know of fewer than the pattern does."""

    def mix(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, States]:
        """The states are those of `window_attention`."""
        pattern = pattern_of(self.config, self.layer_idx)
        o, states = window_attention(
            *self.projected(hidden_states, context),
            window=pattern.reach,
            sees=causal & pattern.sees,
            scaling=self.scaling,
            states=context.states,
            softcap=self.config.attn_logit_softcapping,
            relation=self.relation,
            first=pattern.first,
            reach=self.reach(hidden_states.shape[1]),
            lengths=context.lengths,
            cu_seqlens=context.cu_seqlens,
        )
        return self.o_proj(o.flatten(2)), states
