"""The keys and values of tokens that attention sees, whether they are stored as numbers or packed in few bits."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_memory.cache import State, storage_of
from hf_memory.mixers.attention_blocks import Attended, Blocks, Columns, Scores, near_blocks
from hf_memory.mixers.base import Context
from hf_memory.ops.attention_in_bits import attention_in_bits, reads_bytes, seen_by_queries
from hf_memory.ops.dispatch import Backend
from hf_memory.ops.layout import expand_dims_like
from hf_memory.ops.masks import Tokens
from hf_memory.ops.rows import Rows


class New(NamedTuple):
    """The keys and values of new tokens, also as they are stored."""

    keys: Tensor  # [B, T, H, K]
    values: Tensor  # [B, T, H, V]
    stored_keys: Tensor
    stored_values: Tensor
    rows: Rows

    @classmethod
    def of(cls, k: Tensor, v: Tensor, kind: str | None, context: Context) -> "New":
        """New keys and values, for states of a kind that `cache_bits` can name."""
        rows = storage_of(context.bits, kind)
        if not rows.is_packed:
            return cls(k, v, k, v, rows)
        return cls(k, v, *rows.stored(k, v), rows)

    @classmethod
    def of_keys(cls, k: Tensor, v: Tensor, kind: str | None, context: Context) -> "New":
        """The same where values keep all their bits."""
        rows = Rows(storage_of(context.bits, kind).key_bits)
        return cls(k, v, *rows.stored(k, v), rows)

    def map(self, change: Callable[[Tensor], Tensor]) -> "New":
        """The same function applied to keys and values."""
        keys = change(self.keys)
        values = change(self.values)
        if not self.rows.is_packed:
            return New(keys, values, keys, values, self.rows)
        return New(keys, values, change(self.stored_keys), change(self.stored_values), self.rows)

    def row(self, i: int) -> "New":
        """Those of one row."""
        return self.map(lambda x: x[i : i + 1])

    def part(self, tokens: slice) -> "New":
        """Those of some of the tokens."""
        return self.map(lambda x: x[:, tokens])

    @property
    def seen(self) -> tuple[Tensor, Tensor]:
        """The numbers that queries see."""
        return self.rows.seen(*self[:4])

    def before(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers of keys and values that were stored earlier."""
        return self.rows.numbers(keys, values, self.keys, self.values)


def states_of_rows(
    kind: str | None, shape: tuple[int, ...], K: int, V: int, **growth: Any
) -> list[State]:
    """The states of keys and of values of a kind, [B, *shape, channels] each."""
    return [
        State((*shape, channels), None, kind=kind and f"{kind}.{part}", **growth)
        for part, channels in (("keys", K), ("values", V))
    ]


class Seen(NamedTuple):
    """What one token of each row sees, itself included, as it is stored."""

    keys: Any  # [B, H, S, D]; or those of each row, [H, S, D], anywhere in memory
    values: Any
    visible: Tensor | None  # [B or 1, 1 or H, S] bool, which of them exist; None: all
    rows: Rows
    backend: Backend
    # if heads have different numbers of entries: these, which are S together; H is 1 then
    sizes: tuple[int, ...] | None = None

    def attend(self, q: Tensor, scores: Scores) -> Tensor:
        """Attention of queries [B, 1, H, groups, D]: outputs [B, 1, H, groups, V]."""
        if self._are_bytes_read(q, scores):
            return self._attend_to_bytes(q, scores, needs_mass=False)[0]
        if not isinstance(self.keys, Tensor):
            return torch.cat(
                [row.attend(x, scores) for row, x in zip(self._each_row(), q.split(1))]
            )
        if not scores.is_plain:
            return self.attend_with_mass(q, scores)[0].unflatten(2, q.shape[2:4])
        keys, values = self._numbers(q)
        return scores.attend_one(q, keys, values, self._seen_by(q))

    def attend_with_mass(self, q: Tensor, scores: Scores) -> Attended:
        """Outputs [B, 1, HQ, V] of queries [B, 1, H, groups, D], and the logarithms of their mass [B, 1, HQ]."""
        if self._are_bytes_read(q, scores):
            o, mass = self._attend_to_bytes(q, scores, needs_mass=True)
            return o.flatten(2, 3), mass
        if not isinstance(self.keys, Tensor):
            rows = zip(self._each_row(), q.split(1))
            outputs, masses = zip(*(row.attend_with_mass(x, scores) for row, x in rows))
            return torch.cat(outputs), torch.cat(masses)
        keys, values = (x.transpose(1, 2) for x in self._numbers(q))
        visible = self._seen_by(q)
        if visible is not None:
            if visible.shape[1] * visible.shape[2] > 1:
                visible = visible.expand(-1, *q.shape[2:4], -1)
            visible = visible.flatten(1, 2)[:, :, None]
        by_head = q.flatten(2, 3)
        return scores.attend_with_mass(Blocks(by_head, keys, values, visible, None, None))  # type: ignore[arg-type]

    def _are_bytes_read(self, q: Tensor, scores: Scores) -> bool:
        """Whether packed rows are read as they are."""
        rows = self.rows
        if rows.key_bits is None or rows.value_bits is None:
            return False
        return scores.is_product and reads_bytes(q, self.backend)

    def _attend_to_bytes(self, q: Tensor, scores: Scores, needs_mass: bool) -> tuple[Tensor, Any]:
        """Outputs [B, 1, H, groups, V], and the logarithms of their mass [B, 1, HQ] if they are asked for."""
        o, mass = attention_in_bits(
            q[:, 0],
            self.keys,
            self.values,
            self.visible,
            rows=self.rows,
            scale=scores.scaling,
            softcap=scores.softcap,
            needs_mass=needs_mass,
            sizes=self.sizes,
            backend=self.backend,
        )
        return o[:, None], None if mass is None else mass.flatten(1)[:, None]

    def _seen_by(self, q: Tensor) -> Tensor | None:
        """Which entries queries [B, 1, H, groups, D] see, [B or 1, 1 or H, 1 or groups, S] bool; None: all."""
        return seen_by_queries(self.visible, self.sizes, q[:, 0])

    def _numbers(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, S, D] with as many channels as queries have, in their dtype."""
        return self.rows.numbers(self.keys, self.values, q, q)

    def _each_row(self) -> list["Seen"]:
        """Of each row, whose keys and values are apart."""
        visible = [None] * len(self.keys) if self.visible is None else self.visible.split(1)
        return [
            self._replace(keys=k[None], values=v[None], visible=x)
            for k, v, x in zip(self.keys, self.values, visible)
        ]


class Before(NamedTuple):
    """The numbers of the tokens before new ones, in their order."""

    keys: Tensor  # [B, S, H, K]
    values: Tensor  # [B, S, H, V]
    exists: Tensor  # [1 or B, S] bool, which of them are tokens


class Past(NamedTuple):
    """The keys and values that the queries of new tokens can see, and the states after these tokens."""

    near: Columns  # of tokens before the new ones, and of these
    first: Any  # columns of the first tokens of the sequence, or None
    states: dict[str, Tensor]
    keys: Any  # [B, size + T, H, D], of all tokens that are kept and the new ones
    values: Any

    def blocks(self, q: Tensor, queries: Tokens) -> list[Blocks]:
        """Queries [B, T, HQ, D] with what they see; see `near_blocks`."""
        return near_blocks(q, queries, self.near, self.first)


def first_of_packed(new: New, place: Tensor, cu_seqlens: Tensor, sees: Any) -> Columns:
    """The tokens at these places [n] of each packed sequence."""
    starts = cu_seqlens[:-1, None].long()
    size = cu_seqlens.diff()[:, None]
    keys, values = new.seen
    index = (starts + place).clamp(max=keys.shape[1] - 1).flatten()[None]
    sequence = torch.arange(1, len(size) + 1, device=keys.device).repeat_interleave(len(place))
    tokens = Tokens(torch.where(place < size, place, -1).flatten()[None], sequence[None])
    return Columns(tokens, take(keys, index), take(values, index), sees)


def take(x: Tensor, places: Tensor) -> Tensor:
    """Select x [B, S, ...] at places [B, n]: [B, n, ...]"""
    return x.gather(1, expand_dims_like(places, x).expand(-1, -1, *x.shape[2:]))
