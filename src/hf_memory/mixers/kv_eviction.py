"""A memory of the exact keys and values of tokens that received attention, beside a window and the first tokens.

Tokens are read in blocks, counted from the beginning of the sequence. All queries of a block see the same entries of
the memory, and of their own block the tokens up to themselves:

    p_ij = softmax_j(s_ij),   o_i = sum_j p_ij v_j,   over the entries j that exist at token i
    u_j <- decay u_j + sum_i p_ij,   over the queries i of a block, and of a group of heads

After a block the first tokens, those of the window, and the tokens with the largest u among the others stay, and the
rest is dropped for good. A sink or a virtual token beside the entries takes its share of the output alone: p_ij are
shares among the entries, so that queries that see mostly the sink count as much as others.

That received attention tells which tokens will be needed is the observation of H2O
(https://arxiv.org/abs/2306.14048); a moving average takes the place of its sum, and has no parameters either.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.utils.import_utils import is_tracing

from hf_memory.cache import Spec, State, States
from hf_memory.layers import upcast
from hf_memory.mixers.attention_blocks import Scores
from hf_memory.mixers.base import Context
from hf_memory.mixers.pasts import take
from hf_memory.ops.attention_in_bits import attention_in_bits, reads_bytes
from hf_memory.ops.bits import pack_both, rounded, unpack
from hf_memory.ops.dispatch import Backend
from hf_memory.ops.exported import first_tokens
from hf_memory.ops.kv_eviction import places_that_stay, retained_attention, rows_at
from hf_memory.ops.layout import expand_dims_like
from hf_memory.ops.soft_cap import soft_capped

DECAY = 0.8  # of the received attention, for each block


class Entries(NamedTuple):
    """What a memory holds: `stay` entries in the order of their positions, and then those of a block."""

    keys: Tensor  # [B, H, stay + block, D], rotated
    values: Tensor  # [B, H, stay + block, V]
    number: Tensor  # [B, H, stay + block] int32, of the token in the sequence, from 1; 0: no token
    received: Tensor  # [B, H, stay + block] float32, the attention that an entry has received

    @classmethod
    def among(cls, states: States) -> "Entries":
        """Those of the states of a layer."""
        return cls(states["keys"], states["values"], states["number"], states["received"])

    def of(self, places: slice) -> "Entries":
        """Some of the entries."""
        return Entries(*(x[:, :, places] for x in self))

    def with_block(self, block: "Entries") -> "Entries":
        """Those that stay, and then those of a block."""
        return Entries(*(torch.cat(x, 2) for x in zip(self, block)))

    def without(self, is_left: Tensor) -> "Entries":
        """The same with zeros where `is_left` [B, 1 or H, 1 or n]."""
        return Entries(*(x.masked_fill(expand_dims_like(is_left, x), 0) for x in self))

    def select(self, order: Tensor) -> "Entries":
        """The entries at places [B, H, n]."""
        return Entries(*(rows_at(x, order) for x in self))


class Written(NamedTuple):
    """Entries in which one token of each row has been written."""

    seen: Entries  # what the token may see, itself included
    hidden: Tensor | None  # [B, H, n] bool, which of these are no tokens; None: none
    ends: Tensor | None  # [B or 1, 1, 1] bool, whose blocks end with the token; None: no block does


class KVEviction(NamedTuple):
    """The tokens that stay for each head: the first ones, those of the window, and `kept` others."""

    size: int  # number of last tokens that stay; queries later in a block see more, since its tokens join them
    first: int  # number of first tokens that stay
    kept: int  # number of other tokens that stay
    block: int  # number of tokens after which it is decided which ones stay
    needs_mass: bool = False  # whether the masses of the softmax are asked for
    backend: Backend = "auto"
    bits: int | None = (
        None  # of each number of the states' keys and values, see `hf_memory.ops.bits`
    )

    @property
    def stay(self) -> int:
        """Number of tokens that stay after a block."""
        return self.first + self.kept + self.size

    def spec(self, heads: int, D: int) -> Spec:
        """The states, those of `Entries`."""
        shape = heads, self.stay + self.block
        numbers = {"number": State(shape, torch.int32), "received": State(shape)}
        rows = State((*shape, D), None).in_bits(self.bits)
        return {"keys": rows, "values": rows, **numbers}

    def read_many(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, context: Context
    ) -> tuple[Sequence[Tensor], States]:
        """Read new tokens.

        Args:
            q: queries [B, T, HQ, D], rotated.
            k: keys [B, T, H, D], rotated.
            v: values [B, T, H, D].
            scores: how scores are computed.
            context: the padding, which is at the ends of rows, the packing, and the states.

        Returns:
            The outputs [B, T, HQ, D], with the logarithms of their mass in the softmax [B, T, HQ] if they are asked
            for; and the states, none if packed.
        """
        if context.cu_seqlens is not None:
            apart = [
                self.read_many(q[:, i], k[:, i], v[:, i], scores, alone)[0]
                for i, alone in context.apart()
            ]
            return [torch.cat(x, 1) for x in zip(*apart)], {}
        attended, entries = self._blocks(q, k, v, scores, context)
        return attended, entries._asdict()

    def read_one(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, context: Context
    ) -> tuple[Sequence[Tensor], States]:
        """The same for one token of each row, which follows others; the states are changed in place."""
        keys, values = self._stored(k, v)
        if context.rows is None:
            return self._read_stored(q, keys, values, scores, context), {}
        if scores.gates is None and (self.bits is None or reads_bytes(q, self.backend)):
            return self._read_rows(q, keys, values, scores, context.rows), {}
        rows = zip(q.split(1), keys.split(1), values.split(1), context.rows)
        attended = [
            self._read_stored(query, key, value, scores, alone) for query, key, value, alone in rows
        ]
        return [torch.cat(x) for x in zip(*attended)], {}

    def _read_stored(
        self, q: Tensor, keys: Tensor, values: Tensor, scores: Scores, context: Context
    ) -> Sequence[Tensor]:
        """The outputs of `read_one`, for keys and values as the states have them."""
        held = Entries.among(context.states)
        if context.uniform_length is None:
            written = self._write_padded(held, keys, values, context.states["tokens_read"])
        else:
            written = self._write_uniform(held, keys, values, context.uniform_length)
        attended, weights = self._attended_to_stored(q, written.seen, written.hidden, scores)
        written.seen.received.add_(weights)
        if written.ends is not None:
            self._end_blocks(held, written.ends)
        return attended

    def _read_rows(
        self, q: Tensor, keys: Tensor, values: Tensor, scores: Scores, rows: list[Context]
    ) -> Sequence[Tensor]:
        """The same for rows whose states are apart: what is small is computed for all of them at once."""
        held = [Entries.among(alone.states) for alone in rows]
        places = [
            self._write_one(entries, key, value, alone.uniform_length or 0)
            for entries, key, value, alone in zip(held, keys.split(1), values.split(1), rows)
        ]
        hidden = torch.cat([entries.number for entries in held]) == 0
        if self.bits is None:
            attended, weights = self._attended_rows(q, held, hidden, scores)
        else:
            of_keys = [entries.keys[0] for entries in held]
            of_values = [entries.values[0] for entries in held]
            attended, weights = self._attended_in_bits(q, of_keys, of_values, hidden, scores)
        for entries, more, place in zip(held, weights.split(1), places):
            entries.received.add_(more)
            if place == self.block - 1:
                self._end_blocks(entries, hidden.new_ones(1, 1, 1))
        return attended

    def _attended_rows(
        self, q: Tensor, rows: list[Entries], hidden: Tensor, scores: Scores
    ) -> tuple[list[Tensor], Tensor]:
        """See `_attended`, of rows that are anywhere in memory."""
        B, H, n = hidden.shape
        by_group = (scores.scaling * q).reshape(B, H, -1, q.shape[3])
        asked = q.new_empty(*by_group.shape[:3], n)
        for one, row, out in zip(by_group, rows, asked):
            torch.matmul(one, row.keys[0].to(q.dtype).mT, out=out)
        asked = soft_capped(upcast(asked), scores.softcap)
        asked = asked.masked_fill_(hidden[:, :, None], -torch.inf)
        weights = asked.softmax(-1)
        o = torch.empty_like(by_group)
        for one, row, out in zip(weights.to(q.dtype), rows, o):
            torch.matmul(one, row.values[0].to(q.dtype), out=out)
        return self._of_tokens(q, o, asked, weights)

    def _write_one(self, held: Entries, k: Tensor, v: Tensor, position: int) -> int:
        """Write keys and values [B, 1, H, D] of tokens at the same position of each row: their place in the block."""
        place = position % self.block
        at = self.stay + place
        held.keys.select(2, at).copy_(k.select(1, 0))
        held.values.select(2, at).copy_(v.select(1, 0))
        held.number.select(2, at).fill_(position + 1)
        if place == 0:
            held.received.mul_(DECAY)
        return place

    def _write_uniform(self, held: Entries, k: Tensor, v: Tensor, position: int) -> "Written":
        """Write the same, for what the token may see."""
        place = self._write_one(held, k, v, position)
        seen = Entries(*(x.narrow(2, 0, self.stay + place + 1) for x in held))
        # When a block begins after `stay` tokens or more, none of the entries that stay is empty.
        read_before_block = position - place
        hidden = None if read_before_block >= self.stay else seen.number == 0
        ends = None
        if place == self.block - 1:
            ends = torch.ones(1, 1, 1, dtype=torch.bool, device=k.device)
        return Written(seen, hidden, ends)

    def _write_padded(self, held: Entries, k: Tensor, v: Tensor, tokens_read: Tensor) -> "Written":
        """The same for rows that may have read different numbers of tokens [B] before."""
        position = tokens_read[:, None]
        place = position % self.block
        at = (self.stay + place)[:, None]
        new = (k.transpose(1, 2), v.transpose(1, 2), (position + 1)[:, None])
        for x, y in zip(held, new):
            _write(x, at, y)
        begins = (place == 0)[..., None]
        held.received.copy_(torch.where(begins, DECAY * held.received, held.received))
        ends = (place == self.block - 1)[..., None]
        may_end = is_tracing(ends) or ends.device.type != "cpu" or bool(ends.any())
        return Written(held, held.number == 0, ends if may_end else None)

    def _end_blocks(self, held: Entries, ends: Tensor) -> None:
        """Keep, in place, the best entries of rows whose blocks end, [B or 1, 1, 1] bool."""
        n = self.stay
        best = self._after(held, ends)
        for x, stay in zip(held, best):
            x[:, :, :n] = stay
            x[:, :, n:].masked_fill_(expand_dims_like(ends, x), 0)

    def _stored(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [..., D] as the states have them."""
        return (k, v) if self.bits is None else pack_both(k, v, self.bits)

    def _numbers(self, entries: Entries, like: Tensor) -> Entries:
        """Entries of the states with numbers for keys and values, as many and in the dtype of rows `like` [..., D]."""
        keys, values = entries.keys, entries.values
        if self.bits is None:
            return entries._replace(keys=keys.to(like.dtype), values=values.to(like.dtype))
        rows = (unpack(x, like.shape[-1], self.bits, like.dtype) for x in (keys, values))
        return entries._replace(**dict(zip(("keys", "values"), rows)))

    def _entries(self, stored: Tensor, wide: torch.dtype, context: Context) -> Entries:
        """The entries before new keys [B, T, H, ...] as they are stored; if there are none, empty ones."""
        if context.states:
            keys, values, *numbers = (context.states[name] for name in Entries._fields)
            return Entries(keys.to(stored.dtype), values.to(stored.dtype), *numbers)
        B, _, H, D = stored.shape
        shape = B, H, self.stay + self.block
        keys, values = (stored.new_zeros(*shape, D) for _ in range(2))
        number, received = (stored.new_zeros(shape, dtype=x) for x in (torch.int32, wide))
        return Entries(keys, values, number, received)

    def _blocks(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, context: Context):
        """Read tokens block by block; the first block begins with those of its tokens that were read before."""
        # For blocks of c = 4, after 6 tokens, 3 new ones are read as two blocks whose first one has begun:
        #   offset 2             tokens of the first block that were read before
        #   place  0 1 2 3 4 5 6 7   in these blocks
        #   number 5 6 7 8 9 0 0 0   of the token in the text, from 1; 0: none
        #   back  -2-1 0 1 2 2 2 2   place among the new tokens, negative for those before
        #   token  0 1 4 5 6 6 6 6   place among the c entries of the begun block and then the new tokens
        #   last           4 5 6 7   places of the block that goes on, which is the next call's begun block
        T = q.shape[1]
        c = self.block
        before, after = context.counts(q)
        offset = before % c
        stored = self._stored(k, v)
        entries = self._entries(stored[0], upcast(q[:0]).dtype, context)
        width = T + (c - 1 if context.states else 0)  # a piece may begin anywhere in a block
        place = torch.arange((width + c - 1) // c * c, device=q.device)
        number = torch.where(place < offset + after - before, before - offset + place + 1, 0).int()
        back = (place - offset).clamp(max=T - 1)  # to the new tokens
        token = torch.where(back < 0, place, c + back)
        beyond = (0, 0, 0, 0, 0, place.shape[0] - T)  # padding of rows [B, T, H, D]

        def with_new(entries: Entries, rows: Sequence[Tensor]) -> Entries:
            begun = entries.of(slice(self.stay, None))
            if context.states:
                rows = [
                    take(torch.cat([x.transpose(1, 2), y], 1), token) for x, y in zip(begun, rows)
                ]
            else:
                rows = [F.pad(x, beyond) for x in rows]
            received = F.pad(begun.received, (0, place.shape[0] - c))
            keys, values = (x.transpose(1, 2) for x in rows)
            new = Entries(keys, values, number[:, None].expand_as(received), received)
            return entries.of(slice(self.stay)).with_block(new)

        seen = with_new(entries, stored)
        query_mask = ((place >= offset) & (number > 0)).to(seen.received.dtype)
        q = take(q, back.clamp(min=0)) if context.states else F.pad(q, beyond)
        held = seen
        if self.bits is not None:
            numbers = [rounded(x, y, self.bits) for x, y in zip((k, v), stored)]
            seen = with_new(self._numbers(entries, k), numbers)
        n = self.stay
        o, mass, stays, received = retained_attention(
            q,
            *seen,
            query_mask,
            block=c,
            first=self.first,
            window=self.size,
            decay=DECAY,
            scale=scores.scaling,
            softcap=scores.softcap,
            gates=scores.gates,
            needs_mass=self.needs_mass,
            backend=self.backend,
        )
        attended = [o, mass] if self.needs_mass and mass is not None else [o]
        new = held.of(slice(n, None))._replace(received=received[:, :, n:])
        held = held.select(stays)._replace(received=received[:, :, :n])
        if context.states:
            attended = [take(x, offset + torch.arange(T, device=q.device)) for x in attended]
        last = (offset + after - before) // c * c + torch.arange(
            c, device=q.device
        )  # places of a block that goes on
        block = new.select(last.clamp(max=place.shape[0] - 1)[:, None].expand(-1, k.shape[2], -1))
        return [first_tokens(x, T) for x in attended], held.with_block(
            block.without((block.number == 0) | (last >= place.shape[0])[:, None])
        )

    def _attended_to_stored(
        self, q: Tensor, seen: Entries, hidden: Tensor | None, scores: Scores
    ) -> tuple[list[Tensor], Any]:
        """See `_attended`, of entries as the states have them."""
        if self.bits is not None and scores.gates is None and reads_bytes(q, self.backend):
            return self._attended_in_bits(q, seen.keys, seen.values, hidden, scores)
        return self._attended(q, self._numbers(seen, q), hidden, scores)

    def _attended(self, q: Tensor, entries: Entries, hidden: Tensor | None, scores: Scores):
        """Attention of a query of each row [B, 1, HQ, D] to entries, except for hidden ones [B, H, n].

        Returns the output, with its mass if that is asked for, and weights [B, H, n], sums over the queries of a group.
        """
        B, H = entries.number.shape[:2]
        asked = scores.of_heads(q.view(B, H, -1, 1, q.shape[3]), entries.keys).squeeze(3)
        if hidden is not None:
            asked = asked.masked_fill(hidden[:, :, None], -torch.inf)
        weights = asked.softmax(-1)
        return self._of_tokens(q, weights.to(q.dtype) @ entries.values, asked, weights)

    def _of_tokens(
        self, q: Tensor, o: Tensor, asked: Tensor, weights: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        """The results of `_attended`, from outputs [B, H, G, D], and scores and weights [B, H, G, n]."""
        attended = [o.view(*q.shape[:3], -1)]
        if self.needs_mass:
            attended.append(asked.logsumexp(-1).view(q.shape[:3]))
        return attended, weights.sum(2)

    def _attended_in_bits(
        self, q: Tensor, keys: Any, values: Any, hidden: Tensor | None, scores: Scores
    ) -> tuple[list[Tensor], Any]:
        """The same for keys and values that are packed rows, which are not unpacked; see `attention_in_bits`."""
        B, _, HQ, D = q.shape
        H = keys[0].shape[0]
        bits: Any = self.bits
        o, mass, weights = attention_in_bits(
            q.view(B, H, HQ // H, D),
            keys,
            values,
            None if hidden is None else ~hidden,
            bits=bits,
            scale=scores.scaling,
            softcap=scores.softcap,
            needs_weights=True,
            needs_mass=self.needs_mass,
            backend=self.backend,
        )
        attended = [o.view(*q.shape[:3], -1)]
        if self.needs_mass:
            attended.append(mass.view(q.shape[:3]))
        return attended, weights

    def _after(self, entries: Entries, ends: Tensor) -> Entries:
        """Those that stay: after a block that ends, [B or 1, 1, 1] bool, the best, otherwise those before it."""
        given = entries.number, entries.received, ends
        return entries.select(places_that_stay(*given, self.stay, self.first, self.size))


def _write(x: Tensor, at: Tensor, new: Tensor) -> None:
    """Write into entries x [B, H, n, ...] a new one [B, 1 or H, 1, ...] at places [B, 1, 1]."""
    new = new.to(x.dtype).expand(-1, x.shape[1], *new.shape[2:])
    x.scatter_(2, expand_dims_like(at, x).expand_as(new), new)
