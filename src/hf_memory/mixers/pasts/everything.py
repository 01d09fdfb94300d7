"""A past of all tokens."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_memory.cache import Spec, State, States
from hf_memory.mixers.attention_blocks import Columns, Scores, full_attention
from hf_memory.mixers.base import Context, written
from hf_memory.mixers.pasts.rows import Before, New, Past, Seen, states_of_rows
from hf_memory.ops.masks import Tokens, causal


class Everything(NamedTuple):
    """All tokens. The names of the states begin with `prefix`; `kind` is what `cache_bits` calls them."""

    kind: str | None = "memory"
    prefix: str = ""

    def spec(self, heads: int, K: int, V: int) -> Spec:
        """The states `keys` and `values` [B, tokens, H, D], and `positions` [B, tokens], -1 at padding."""
        keys, values = states_of_rows(self.kind, (heads,), K, V, growth="token")
        positions = State((), torch.int32, "token", absent=-1)
        return self._named(keys, values, positions)

    @property
    def names(self) -> tuple[str, str, str]:
        """The names of the states."""
        return f"{self.prefix}keys", f"{self.prefix}values", f"{self.prefix}positions"

    def _named(self, keys: Any, values: Any, positions: Any) -> dict[str, Any]:
        return dict(zip(self.names, (keys, values, positions)))

    def before(self, new: New, context: Context) -> Before | None:
        """The tokens before new ones; None if there are none."""
        if not context.states:
            return None
        keys, values, positions = (context.states[name] for name in self.names)
        return Before(*new.before(keys, values), positions >= 0)

    def read_many(self, new: New, tokens: Tokens, context: Context) -> Past:
        """Add new tokens."""
        positions = tokens.position.expand(new.keys.shape[0], -1).int()
        stored = self._named(new.stored_keys, new.stored_values, positions)
        past, states = context.grown(stored)
        keys, values, position = past.values()
        if new.rows.is_packed:
            T = new.keys.shape[1]
            before = new.before(keys[:, : keys.shape[1] - T], values[:, : keys.shape[1] - T])
            keys, values = (torch.cat(x, 1) for x in zip(before, new.seen))
        near = Columns(Tokens(position, tokens.sequence), keys, values, causal)
        return Past(near, None, states, keys, values)

    def read_one(self, new: New, context: Context) -> Seen:
        """Add one token of each row to the states, in their dict."""
        states = context.states
        added = self._named(
            new.stored_keys, new.stored_values, states["tokens_read"][:, None].int()
        )
        for name, x in added.items():
            if context.room is None:
                states[name] = torch.cat([states[name], x.to(states[name].dtype)], 1)
            else:
                states[name] = written(states[name], 1, context.room[None], x)
        keys, values, positions = (states[name] for name in added)
        visible = None
        if context.uniform_length is None:
            visible = (positions >= 0)[:, None]
        return Seen(
            keys.transpose(1, 2), values.transpose(1, 2), visible, new.rows, context.backend
        )

    def attend(
        self, q: Tensor, new: New, tokens: Tokens, context: Context, scores: Scores
    ) -> tuple[Tensor, States]:
        """The outputs [B, T, HQ, V] of queries [B, T, HQ, D] of new tokens, and the states after these."""
        past = self.read_many(new, tokens, context)
        o = full_attention(q, tokens, past.near, scores, is_whole=context.is_whole)
        return o, past.states

    def attend_one(self, q: Tensor, new: New, context: Context, scores: Scores) -> Tensor:
        """The same for one token of each row, q [B, 1, H, groups, D], which changes the states in their dict."""
        return self.read_one(new, context).attend(q, scores)
