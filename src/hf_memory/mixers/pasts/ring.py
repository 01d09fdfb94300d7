"""A past of the last tokens, in which a new token replaces the oldest one, and of the first tokens."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.cache import Spec, States
from hf_memory.mixers.attention_blocks import (
    BLOCK,
    Attended,
    Columns,
    Scores,
    attended_rows,
    full_attention,
    near_blocks,
    rows_of,
)
from hf_memory.mixers.base import Context
from hf_memory.mixers.pasts.rows import (
    Before,
    New,
    Past,
    Seen,
    first_of_packed,
    states_of_rows,
    take,
)
from hf_memory.ops.exported import varies
from hf_memory.ops.layout import expand_dims_like
from hf_memory.ops.masks import Mask, Tokens, causal, older, window


class Ring(NamedTuple):
    """A causal window and the first tokens of the sequence.

    The states [B, first + size, H, D] have the `first` tokens of the sequence, and then the last `size` tokens after
    these: a token at position p >= first is the entry first + (p - first) % size. Their names begin with `prefix`, and
    `kind` is what `cache_bits` calls them.
    """

    size: int
    first: int = 0
    kind: str | None = "window"
    prefix: str = ""
    # whether few blocks of queries share keys, so that each gets its own slice
    is_long: bool = False

    def spec(self, heads: int, K: int, V: int) -> Spec:
        """The states `keys` and `values`."""
        keys, values = states_of_rows(self.kind, (self.first + self.size, heads), K, V)
        return self._named(keys, values)

    @property
    def names(self) -> tuple[str, str]:
        """The names of the states."""
        return f"{self.prefix}keys", f"{self.prefix}values"

    def _named(self, keys: Any, values: Any) -> dict[str, Any]:
        return dict(zip(self.names, (keys, values)))

    def attend(
        self, q: Tensor, new: New, tokens: Tokens, context: Context, scores: Scores
    ) -> tuple[Tensor, States]:
        """The outputs [B, T, HQ, V] of queries [B, T, HQ, D] of new tokens, and the states after these."""
        past = self.read_many(new, tokens, context)
        if self.is_long:
            near, first = past.near, past.first
            o = full_attention(q, tokens, near, scores, first=first, window=self.size)
            return o, past.states
        return rows_of(map(scores.attend, past.blocks(q, tokens)), q), past.states

    def attend_with_mass(
        self, q: Tensor, new: New, tokens: Tokens, context: Context, scores: Scores
    ) -> tuple[Attended, States]:
        """The same with the logarithms of the outputs' mass [B, T, HQ]."""
        past = self.read_many(new, tokens, context)
        return attended_rows(map(scores.attend_with_mass, past.blocks(q, tokens)), q), past.states

    def attend_one(self, q: Tensor, new: New, context: Context, scores: Scores) -> Tensor:
        """`attend` for one token of each row, q [B, 1, H, groups, D], which changes the states in place."""
        return self.read_one(new, context).attend(q, scores)

    def attend_one_with_mass(
        self, q: Tensor, new: New, context: Context, scores: Scores
    ) -> Attended:
        """The same with the logarithms of the outputs' mass; both by query head."""
        return self.read_one(new, context).attend_with_mass(q, scores)

    def before(self, new: New, context: Context) -> Before | None:
        """The tokens before new ones that the first of them sees; None if there are none."""
        if not context.states:
            return None
        position = context.states["tokens_read"][:, None] + torch.arange(
            1 - self.size, 0, device=new.keys.device
        )
        order = self._places(position).clamp(min=0)
        stored = (take(context.states[name], order) for name in self.names)
        return Before(*new.before(*stored), position >= 0)

    def read_many(
        self, new: New, tokens: Tokens, context: Context, sees: Mask | None = None
    ) -> Past:
        """Add new tokens; `sees` says which tokens see which, if it is not all of the window."""
        before = self._in_numbers(new, context)
        keys, values = (
            self._in_order(x, context._replace(states=before), name)
            for name, x in self._named(*new.seen).items()
        )
        stored = self._named(new.stored_keys, new.stored_values)
        states = {} if context.cu_seqlens is not None else self._after(stored, context)
        sees = causal & window(self.size) if sees is None else sees
        near = columns(tokens, context.states.get("tokens_read"), keys[:, 1:], values[:, 1:], sees)
        first = self._first_tokens(new, before, context) if self.first else None
        return Past(near, first, states, keys, values)

    def read_one(self, new: New, context: Context) -> Seen:
        """Add one token of each row in place; the states have the entries that precede it."""
        self.replace(self._named(new.stored_keys, new.stored_values), context)
        return self.seen_after(new, context)

    def seen_after(self, new: New, context: Context) -> Seen:
        """What one token of each row sees, which is among the states already."""
        keys, values = (context.states[name] for name in self.names)
        size = keys.shape[1]
        visible = None
        if context.uniform_length is None:
            position = context.states["tokens_read"][:, None]
            visible = (torch.arange(size, device=keys.device) <= position)[:, None]
        elif (seen := context.uniform_length + 1) < size:
            keys = keys[:, :seen]
            values = values[:, :seen]
        return Seen(
            keys.transpose(1, 2), values.transpose(1, 2), visible, new.rows, context.backend
        )

    def extend(self, new: States, context: Context) -> tuple[list[Tensor], States]:
        """Add states [B, T, ...] of new tokens, which are neither keys nor values, by name.

        Returns:
            The tokens with those of the ring in front, [B, size + T, ...] in the order of their positions. And the
            states after the tokens; none for packed sequences.
        """
        seen = [self._in_order(x, context, name) for name, x in new.items()]
        return seen, {} if context.cu_seqlens is not None else self._after(new, context)

    def replace(self, new: States, context: Context) -> None:
        """Write one token of each row [B, 1, ...] by name in place of the oldest one."""
        states = context.states
        if context.uniform_length is not None:
            place = self._place(context.uniform_length)
            for name, x in new.items():
                states[name].select(1, place).copy_(x.select(1, 0))
            return
        places = self._places(states["tokens_read"][:, None])
        for name, x in new.items():
            state = states[name]
            at = expand_dims_like(places, x).expand_as(x)
            state.scatter_(1, at, x.to(state.dtype))

    def oldest(self, names: Sequence[str], context: Context) -> list[Tensor]:
        """The entries [B, 1, ...] of some states that the next token of each row replaces."""
        states = context.states
        if context.uniform_length is not None:
            place = self._place(context.uniform_length)
            return [states[name][:, place : place + 1].clone() for name in names]
        places = self._places(states["tokens_read"][:, None])
        return [take(states[name], places) for name in names]

    def leaving(self, new: New, context: Context) -> tuple[Tensor, Tensor]:
        """The key and the value [B, 1, H, D], as numbers, that the next token of each row replaces."""
        return new.before(*self.oldest(self.names, context))

    def _in_numbers(self, new: New, context: Context) -> States:
        """The states before the new tokens with numbers for keys and values."""
        states = context.states
        if not states or not new.rows.is_packed:
            return states
        names = self.names
        return states | dict(zip(names, new.before(*(states[name] for name in names))))

    def _in_order(self, x: Tensor, context: Context, name: str) -> Tensor:
        """Tokens x [B, T, ...] of a state with those of the ring in front, [B, size + T, ...] by position."""
        states = context.states
        if context.cu_seqlens is not None or not states:
            return F.pad(x, (0, 0) * (x.ndim - 2) + (self.size, 0))
        # Tokens before the first one have a negative position; any entry does, since attention hides them.
        before, _ = context.counts(x)
        position = before + torch.arange(-self.size, 0, device=x.device)
        order = self._places(position).clamp(min=0)
        return torch.cat([take(states[name], order).to(x.dtype), x], 1)

    def _after(self, new: States, context: Context) -> States:
        """The states after new tokens [B, T, ...] by name."""
        like = next(iter(new.values()))
        before, after = context.counts(like)
        # Each place has the last token that belongs there, so many tokens before the newest one. It is a new one, or
        # what the state has already; a place that no token has reached stays empty.
        place = torch.arange(self.first + self.size, device=like.device)
        newest = after - 1
        back = torch.where(place < self.first, newest - place, (newest - place) % self.size)
        token = newest - back
        is_new = (token >= before) & (place < after)
        among_new = (token - before).clamp(0, like.shape[1] - 1)
        return {
            name: torch.where(
                expand_dims_like(is_new, x), take(x, among_new), context.states.get(name, 0)
            )
            for name, x in new.items()
        }

    def _first_tokens(self, new: New, before: States, context: Context) -> Columns:
        """The first tokens of each sequence, which are seen by those that they have left the window of."""
        keys, values = new.seen
        place = torch.arange(self.first, device=keys.device)
        sees = older(self.size)
        if context.cu_seqlens is not None:
            return first_of_packed(new, place, context.cu_seqlens, sees)
        read_before, read_after = context.counts(keys)
        at = (place - read_before).clamp(0, keys.shape[1] - 1)
        firsts = [take(x, at) for x in (keys, values)]
        if context.states:
            is_old = (place < read_before)[..., None, None]
            old = (before[name][:, : self.first] for name in self.names)
            firsts = [torch.where(is_old, x.to(y.dtype), y) for x, y in zip(old, firsts)]
        position = torch.where(place < read_after, place, -1)
        return Columns(Tokens(position), firsts[0], firsts[1], sees)

    def _place(self, position: int) -> int:
        if position < self.first:
            return position
        return self.first + (position - self.first) % self.size

    def _places(self, position: Tensor) -> Tensor:
        if not self.first:
            return position % self.size
        later = self.first + (position - self.first) % self.size
        return torch.where(position < self.first, position, later)


class Window(NamedTuple):
    """An attention pattern: tokens within `reach`, and possibly the first tokens of the sequence, in a `Ring`."""

    sees: Mask  # which tokens a token sees within reach
    reach: int  # length of the window in which all but the first tokens are seen, including the token itself
    first: int = 0  # number of first tokens that are seen from everywhere
    prefix: str = ""  # of the names of its states
    spare: int = 0  # number of tokens that are kept before the window
    # whether a text that is no longer than `reach` has tokens that are not seen
    has_gaps: bool = False
    kinds: int = 1  # number of heads with different masks; further heads repeat these
    kind: str | None = "window"  # what `cache_bits` calls its states

    @classmethod
    def of_last(cls, tokens: int, first: int = 0, **more) -> "Window":
        """The last tokens, and the first ones."""
        return cls(causal & window(tokens), tokens, first, **more)

    @property
    def ring(self) -> Ring:
        """What holds its tokens."""
        return Ring(self.reach + self.spare, self.first, self.kind, self.prefix)

    def spec(self, heads: int, K: int, V: int) -> Spec:
        """See `Ring.spec`."""
        return self.ring.spec(heads, K, V)

    def read_many(
        self, new: New, tokens: Tokens, context: Context, *, reach: int | None = None
    ) -> Past:
        """Add new tokens, which see at most `reach` tokens of the window.

        `keys` and `values` of the past are of the `reach` + `spare` - 1 tokens before the new ones, and of these.
        """
        past = self.ring.read_many(new, tokens, context, self.sees)
        keys, values = (x[:, 1:] for x in (past.keys, past.values))
        unseen = self.spare + self.reach - min(self.reach, reach or self.reach)
        near = past.near
        if unseen:
            tokens_read = context.states.get("tokens_read")
            near = columns(tokens, tokens_read, keys[:, unseen:], values[:, unseen:], self.sees)
        first = past.first
        if first is not None and self.spare:
            first = first._replace(sees=older(self.reach))
        return Past(near, first, past.states, keys, values)


def window_attention(
    q: Tensor,
    new: New,
    context: Context,
    window: Window,
    scores: Scores,
    *,
    always: Columns | None = None,
    reach: int | None = None,
) -> tuple[Tensor, States]:
    """Each token attends to a window that ends with it, and maybe to the first tokens or to persistent ones.

    Args:
        q: [B, T, HQ, D], HQ a multiple of H.
        new: keys and values [B, T, H, D].
        context: the padding, at the ends of rows, the packing, and the states.
        window: the window.
        scores: how scores are computed.
        always: keys and values of persistent tokens, which precede every sequence, or None; not with first tokens.
        reach: number of tokens of the window that any of these queries sees; default: all.

    Returns:
        o [B, T, HQ, D], and the states after the tokens: those of the window, and `tokens_read` [B].
    """
    tokens, tokens_read = context.tokens_and_count(q)
    past = window.read_many(new, tokens, context, reach=reach)
    groups = near_blocks(q, tokens, past.near, past.first if window.first else always)
    return rows_of(map(scores.attend, groups), q), past.states | {"tokens_read": tokens_read}


def columns(
    tokens: Tokens, tokens_read: Tensor | None, keys: Tensor, values: Tensor, sees: Mask
) -> Columns:
    """Keys and values [B, W + T, H, D] of the new tokens and of the W before them, of which `tokens_read` [B] exist.

    If `tokens_read` is None, nothing was read before, and these W columns are left out, unless blocks need them.
    """
    T = tokens.position.shape[1]
    W = keys.shape[1] - T
    if tokens_read is not None:
        before = tokens_read[:, None] - torch.arange(W, 0, -1, device=keys.device)
        return Columns(Tokens(torch.cat([before, tokens.position], 1)), keys, values, sees)
    if not varies(T) and max(W + 1, BLOCK) < T:
        return Columns(tokens.map(lambda x: F.pad(x, (W, 0), value=-1)), keys, values, sees)
    return Columns(tokens, keys[:, W:], values[:, W:], sees)


def last_tokens(
    states: States, new: States, W: int, lengths: Tensor | None
) -> tuple[list[Tensor], States]:
    """New tokens [B, T, ...] by name, with the W tokens of `states` in front, [B, W + T, ...]; and the new states.

    For `lengths` see `last`.
    """
    if not states:
        seen = [F.pad(x, (0, 0) * (x.ndim - 2) + (W, 0)) for x in new.values()]
    else:
        seen = [torch.cat([states[name].to(x.dtype), x], 1) for name, x in new.items()]
    return seen, {name: last(x, lengths, W) for name, x in zip(new, seen)}


def last(x: Tensor, lengths: Tensor | None, W: int) -> Tensor:
    """The last W real tokens of x [B, W + T, ...]; `lengths` [B] of the T new tokens are real, or all if it is None."""
    if lengths is None:
        return x[:, x.shape[1] - W :]
    return take(x, lengths[:, None] + torch.arange(W, device=x.device))
