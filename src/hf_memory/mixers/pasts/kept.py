"""A past of exact keys and values of the tokens that are worth most, beside a window and the first tokens.

Tokens are read in blocks, counted from the beginning of the sequence. All queries of a block see the same entries of
the memory, and of their own block the tokens up to themselves:

    p_ij = softmax_j(s_ij),   o_i = sum_j p_ij v_j,   over the entries j that exist at token i

After a block a policy says what each entry is worth. The first tokens, those of the window, and the best of the others
stay, and the rest is dropped for good. A sink beside the entries takes its share of the output alone: p_ij are shares
among the entries, so that queries that see mostly the sink count as much as others.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.utils.import_utils import is_tracing

from hf_memory.cache import Spec, State, States, storage_of
from hf_memory.cache_bits import CacheBits
from hf_memory.layers import upcast
from hf_memory.mixers.attention_blocks import Attended, Scores
from hf_memory.mixers.base import Context
from hf_memory.mixers.pasts.policy import POLICIES
from hf_memory.mixers.pasts.rows import New, Seen, states_of_rows, take
from hf_memory.ops import cpu
from hf_memory.ops.exported import first_tokens
from hf_memory.ops.kv_eviction import Rule, retained_attention
from hf_memory.ops.kv_eviction.chunk import places_that_stay, rows_at, score_after
from hf_memory.ops.layout import expand_dims_like
from hf_memory.ops.masks import Tokens
from hf_memory.ops.rows import Rows


class Entries(NamedTuple):
    """What is held: `stay` entries in the order of their positions, and then those of a block."""

    keys: Any  # [B, H, stay + block, D], rotated
    values: Any  # [B, H, stay + block, V]
    number: Any  # [B, H, stay + block] int32, of the token in the sequence, from 1; 0: no token
    score: Any  # [B, H, stay] float32, what the first entries are worth
    queries: Any  # [B, HQ, block, D], rotated, of the tokens of the block

    @classmethod
    def among(cls, states: States, prefix: str) -> "Entries":
        """Those of the states of a layer whose names begin with a prefix."""
        return cls(
            states[f"{prefix}keys"],
            states[f"{prefix}values"],
            states[f"{prefix}number"],
            states[f"{prefix}score"],
            states[f"{prefix}queries"],
        )

    def states(self, prefix: str) -> dict[str, Any]:
        """The inverse of `among`."""
        return {prefix + name: x for name, x in self._asdict().items()}

    @property
    def of_tokens(self) -> tuple[Any, Any, Any]:
        """What each entry has: key, value and number."""
        return self.keys, self.values, self.number


class Kept(NamedTuple):
    """The tokens that stay for each head: the first ones, those of the window, and `kept` others."""

    window: int  # number of last tokens that stay; queries later in a block see more, since its tokens join them
    first: int  # number of first tokens that stay
    kept: int  # number of other tokens that stay
    block: int  # number of tokens after which it is decided which ones stay
    policy: str = "received_attention"
    kind: str | None = "window"  # what `cache_bits` calls its states
    prefix: str = ""  # of the names of its states
    groups: int = 1  # number of queries of each key-value head

    @property
    def stay(self) -> int:
        """Number of tokens that stay after a block."""
        return self.first + self.kept + self.window

    @property
    def size(self) -> int:
        """Number of entries of a head: those that stay, and a block."""
        return self.stay + self.block

    def spec(self, heads: int, K: int, V: int) -> Spec:
        """The states, those of `Entries`."""
        keys, values = states_of_rows(self.kind, (heads, self.size), K, V)
        number = State((heads, self.size), torch.int32)
        queries = State((heads * self.groups, self.block, K), None)
        score = State((heads, self.stay))
        return Entries(keys, values, number, score, queries).states(self.prefix)

    def attend(
        self, q: Tensor, new: New, tokens: Tokens, context: Context, scores: Scores
    ) -> tuple[Tensor, States]:
        """The outputs [B, T, HQ, V] of queries [B, T, HQ, D] of new tokens, and the states after these."""
        if found := read_by_compiled_code(self, q, new, context, scores):
            return found
        (o, _), states = self._attend(q, new, context, scores, needs_mass=False)
        return o, states

    def attend_with_mass(
        self, q: Tensor, new: New, tokens: Tokens, context: Context, scores: Scores
    ) -> tuple[Attended, States]:
        """The same with the logarithms of the outputs' mass [B, T, HQ]."""
        return self._attend(q, new, context, scores, needs_mass=True)

    def attend_one(self, q: Tensor, new: New, context: Context, scores: Scores) -> Tensor:
        """`attend` for one token of each row, q [B, 1, H, groups, D], which changes the states in place."""
        seen, ends = self._write(q, new, context)
        o = seen.attend(q, scores)
        self._end_blocks(new, context, scores, ends)
        return o

    def attend_one_with_mass(
        self, q: Tensor, new: New, context: Context, scores: Scores
    ) -> Attended:
        """The same with the logarithms of the outputs' mass; both by query head."""
        seen, ends = self._write(q, new, context)
        attended = seen.attend_with_mass(q, scores)
        self._end_blocks(new, context, scores, ends)
        return attended

    def reader(
        self, q: Tensor, context: Context, scores: Scores, among: slice
    ) -> cpu.TokenReader | cpu.TokenReaderInGraph | None:
        """What reads new tokens of each row, queries q [B, T, heads, groups, D] of these and other heads.

        It changes the states of the context. None: compiled code does not; it does on a CPU.
        """
        heads = len(range(among.start, among.stop, among.step))
        return self.reader_of((self.size,) * heads, q, context, scores, among)

    def reader_of(
        self, sizes: tuple[int, ...], q: Tensor, context: Context, scores: Scores, among: slice
    ) -> cpu.TokenReader | cpu.TokenReaderInGraph | None:
        """The same for heads with these numbers of entries."""
        held = Entries.among(context.states, self.prefix)
        rows = storage_of(context.bits, self.kind)
        bits = rows.key_bits, rows.value_bits
        is_product = scores.is_product and context.backend == "auto"
        if not is_product or not cpu.reads_tokens(held, q, bits, self.policy):
            return None
        is_graph = context.uniform_length is None and torch.compiler.is_compiling()
        reader: Any = cpu.TokenReaderInGraph if is_graph else cpu.TokenReader
        return reader(
            held,
            sizes,
            bits=bits,
            first=self.first,
            window=self.window,
            policy=self.policy,
            scale=scores.scaling,
            softcap=scores.softcap,
            among=among,
        )

    def numbers(self, states: States) -> Sequence[Tensor]:
        """The numbers of the tokens that each head holds, from 1, [B, entries] each; 0: no token."""
        return states[f"{self.prefix}number"].unbind(1)

    def of_entries(self, x: Tensor) -> Tensor:
        """What belongs to heads, [B, H, ...], as what belongs to their entries, [B, H, 1, ...]."""
        return x.unsqueeze(2)

    def _rule(self, scores: Scores, needs_mass: bool = False) -> Rule:
        return Rule(
            self.block,
            self.first,
            self.window,
            POLICIES[self.policy],
            scores.scaling,
            scores.softcap or 0.0,
            scores.gates,
            needs_mass,
        )

    def _attend(
        self, q: Tensor, new: New, context: Context, scores: Scores, needs_mass: bool
    ) -> tuple[Any, States]:
        if context.cu_seqlens is not None:
            parts = []
            for here, alone in context.apart():
                of_part = new.part(here)
                parts.append(self._attend(q[:, here], of_part, alone, scores, needs_mass)[0])
            joined = [None if x[0] is None else torch.cat(x, 1) for x in zip(*parts)]
            return joined, {}
        attended, entries = self._blocks(q, new, scores, context, needs_mass)
        return attended, entries.states(self.prefix)

    def _entries(self, q: Tensor, new: New, context: Context) -> Entries:
        """The entries before new tokens; if there are none, empty ones."""
        if context.states:
            held = Entries.among(context.states, self.prefix)
            keys, values = new.stored_keys, new.stored_values
            return held._replace(keys=held.keys.to(keys.dtype), values=held.values.to(values.dtype))
        B, _, H, _ = new.keys.shape
        n = self.size
        keys, values = (
            x.new_zeros(B, H, n, x.shape[-1]) for x in (new.stored_keys, new.stored_values)
        )
        number = keys.new_zeros(B, H, n, dtype=torch.int32)
        score = keys.new_zeros(B, H, self.stay, dtype=upcast(q[:0]).dtype)
        queries = q.new_zeros(B, q.shape[2], self.block, q.shape[3])
        return Entries(keys, values, number, score, queries)

    def _blocks(
        self, q: Tensor, new: New, scores: Scores, context: Context, needs_mass: bool
    ) -> tuple[Any, Entries]:
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
        n = self.stay
        before, after = context.counts(q)
        offset = before % c
        entries = self._entries(q, new, context)
        width = T + (c - 1 if context.states else 0)  # a piece may begin anywhere in a block
        place = torch.arange((width + c - 1) // c * c, device=q.device)
        number = torch.where(place < offset + after - before, before - offset + place + 1, 0).int()
        back = (place - offset).clamp(max=T - 1)  # to the new tokens
        token = torch.where(back < 0, place, c + back)
        beyond = (0, 0, 0, 0, 0, place.shape[0] - T)  # padding of rows [B, T, H, D]

        def of_blocks(begun: Tensor, x: Tensor) -> Tensor:
            """Rows x [B, T, H, D] after those of the begun block [B, H, c, D]: [B, places, H, D]."""
            if not context.states:
                return F.pad(x, beyond)
            return take(torch.cat([begun.transpose(1, 2), x], 1), token)

        def with_new(held: Tensor, x: Tensor) -> Tensor:
            """The entries that are held [B, H, stay + c, D], and then the blocks."""
            blocks = of_blocks(held[:, :, n:], x)
            return torch.cat([held[:, :, :n], blocks.transpose(1, 2)], 2)

        of_entries = number[:, None].expand(*entries.number.shape[:2], -1)
        numbers = torch.cat([entries.number[:, :, :n], of_entries], 2)
        keys, values = map(with_new, entries.of_tokens[:2], (new.stored_keys, new.stored_values))
        seen = keys, values
        if new.rows.is_packed:
            held = new.before(*entries.of_tokens[:2])
            k, v = map(with_new, held, new.seen)
            seen = k, v
        queries = of_blocks(entries.queries.to(q.dtype), q)
        o, mass, stays, score = retained_attention(
            queries,
            *seen,
            numbers,
            entries.score,
            self._rule(scores, needs_mass),
            backend=context.backend,
        )
        attended = [o, mass if needs_mass else None]
        if context.states:
            of_new = offset + torch.arange(T, device=q.device)
            attended = [None if x is None else take(x, of_new) for x in attended]
        attended = [None if x is None else first_tokens(x, T) for x in attended]
        # the places of a block that goes on
        last = (offset + after - before) // c * c + torch.arange(c, device=q.device)
        inside = last.clamp(max=place.shape[0] - 1)
        is_empty = (last >= place.shape[0]) | (number.gather(1, inside) == 0)

        def going_on(x: Tensor) -> Tensor:
            """Of entries [B, H, stay + places, ...] those that are held, and then the block that goes on."""
            block = rows_at(x[:, :, n:], inside[:, None].expand(-1, x.shape[1], -1))
            block = block.masked_fill(expand_dims_like(is_empty[:, None], block), 0)
            return torch.cat([rows_at(x, stays), block], 2)

        keys, values, numbers = map(going_on, (keys, values, numbers))
        begun = take(queries.detach(), inside)
        begun = begun.masked_fill(expand_dims_like(is_empty, begun), 0)
        begun = begun.transpose(1, 2).contiguous()
        return attended, Entries(keys, values, numbers, score, begun)

    def _write(self, q: Tensor, new: New, context: Context) -> tuple[Seen, Any]:
        """Write one token of each row in place: what it sees, and whose blocks end with it, [B or 1, 1, 1] bool.

        The latter is None if none does.
        """
        if isinstance(context.states[self.prefix + "number"], list):
            return self._write_apart(q, new, context)
        held = Entries.among(context.states, self.prefix)
        position = context.uniform_length
        if position is None:
            return self._write_padded(held, q, new, context)
        ends = self._write_at(held, q, new, position)
        place = position % self.block
        end = self.stay + place + 1
        keys = held.keys[:, :, :end]
        values = held.values[:, :, :end]
        # When a block begins after `stay` tokens or more, none of the entries that stay is empty.
        visible = None if position - place >= self.stay else held.number[:, :, :end] > 0
        return Seen(keys, values, visible, new.rows, context.backend), ends

    def _write_at(self, held: Entries, q: Tensor, new: New, position: int) -> Tensor | None:
        """Write tokens at the same position of each row; the result says if blocks end, as that of `_write`."""
        place = position % self.block
        at = self.stay + place
        held.keys.select(2, at).copy_(new.stored_keys.select(1, 0))
        held.values.select(2, at).copy_(new.stored_values.select(1, 0))
        held.number.select(2, at).fill_(position + 1)
        held.queries.select(2, place).copy_(q.flatten(1, 3))
        if place < self.block - 1:
            return None
        return torch.ones(1, 1, 1, dtype=torch.bool, device=q.device)

    def _write_apart(self, q: Tensor, new: New, context: Context) -> tuple[Seen, Any]:
        """The same for rows whose states are anywhere in memory."""
        held, ends = write_each_row(self.prefix, self._write_at, q, new, context)
        keys, values = ([x[i][0] for x in held] for i in range(2))
        visible = torch.cat([entries.number for entries in held]) > 0
        return Seen(keys, values, visible, new.rows, context.backend), ends

    def _write_padded(
        self, held: Entries, q: Tensor, new: New, context: Context
    ) -> tuple[Seen, Any]:
        """The same for rows that may have read different numbers of tokens before."""
        position = context.states["tokens_read"][:, None]
        place = (position % self.block)[:, None]
        at = self.stay + place
        rows = (x.transpose(1, 2) for x in (new.stored_keys, new.stored_values))
        for x, y in zip(held.of_tokens, (*rows, (position + 1)[:, None])):
            write_rows(x, at, y, dim=2)
        write_rows(held.queries, place, q.flatten(2, 3).transpose(1, 2), dim=2)
        keys, values, number = held.of_tokens
        seen = Seen(keys, values, number > 0, new.rows, context.backend)
        return seen, ending(place, self.block)

    def _end_blocks(self, new: New, context: Context, scores: Scores, ends: Any) -> None:
        """Keep, in place, the best entries of rows whose blocks end."""
        if ends is None:
            return
        if isinstance(ends, list):
            for alone, of_row in zip(context.each_row(), ends):
                self._end_blocks(new, alone, scores, of_row)
            return

        def keep_best(*given: Tensor) -> None:
            *held, ends = given
            self.keep_best(Entries(*held), new.rows, scores, ends)

        if_any(ends, keep_best, Entries.among(context.states, self.prefix))

    def keep_best(self, held: Entries, rows: Rows, scores: Scores, ends: Tensor) -> None:
        """Keep, in place, the best of entries as they are stored, where a block ends, [B or 1, 1, 1] bool."""
        number = held.number
        n = self.stay
        queries, k, v = rows.rotated(upcast(held.queries), held.keys, held.values)
        B, H = number.shape[:2]
        q = queries.reshape(B, H, -1, queries.shape[3])
        before = F.pad(held.score, (0, self.block))
        now = score_after(q, k, v, number, before, self._rule(scores))
        worth = torch.where(ends, now, before)
        best = places_that_stay(number, worth, ends, n, self.first, self.window)
        held.score.copy_(worth.gather(2, best))
        for x in held.of_tokens:
            x[:, :, :n] = rows_at(x, best)
            x[:, :, n:].masked_fill_(expand_dims_like(ends, x), 0)
        held.queries.masked_fill_(ends[..., None], 0)


def read_by_compiled_code(
    past: Any, q: Tensor, new: New, context: Context, scores: Scores
) -> tuple[Tensor, States] | None:
    """`past.attend` for a `Kept` or `KeptByHead`; None if compiled code does not read these tokens."""
    D = q.shape[3]
    H = new.keys.shape[2]
    bits = new.rows.key_bits, new.rows.value_bits
    are_alike = all((x.shape[3], x.dtype) == (D, q.dtype) for x in (new.keys, new.values))
    if context.cu_seqlens is not None or not are_alike or not cpu.takes_rows(q, *bits):
        return None
    q = q.unflatten(2, (H, -1))
    spec = past.spec(H, D, D)
    states = context.states or empty_states(spec, q, context.bits)
    reader = past.reader(q, context._replace(states=states), scores, slice(0, H, 1))
    if reader is None:
        return None
    before, after = context.counts(q)
    o = torch.zeros_like(q, memory_format=torch.contiguous_format)
    counts = tuple((after - before).flatten().tolist())
    reader(q, new.keys, new.values, before.flatten(), o, counts)
    return o.flatten(2, 3), {name: states[name] for name in spec}


def empty_states(spec: Spec, q: Tensor, bits: CacheBits) -> States:
    """States before the first token, stored in these bits, for queries [B, ...]."""
    stored = {name: state.stored(bits) for name, state in spec.items()}
    return {
        name: q.new_zeros(q.shape[0], *state.shape, dtype=state.dtype or q.dtype)
        for name, state in stored.items()
    }


def if_any(ends: Tensor, change: Callable[..., None], held: Sequence[Tensor]) -> None:
    """`change(*held, ends)`, which changes what is held in place, if any block ends."""
    if not torch.compiler.is_compiling() or torch.compiler.is_exporting():
        change(*held, ends)
        return

    def changed(*given: Tensor) -> Tensor:
        change(*given)
        return given[-1].any()

    def unchanged(*given: Tensor) -> Tensor:
        return given[-1].any()

    # in a graph, which has both branches; what is changed in place is not copied
    torch.cond(ends.any(), changed, unchanged, (*held, ends))


def write_each_row(
    prefix: str,
    write_at: Callable[[Entries, Tensor, New, int], Tensor | None],
    q: Tensor,
    new: New,
    context: Context,
) -> tuple[list[Entries], list[Tensor | None] | None]:
    """Write one token of each row by `write_at` where its states are: these, and whose blocks end, or None."""
    rows = context.each_row()
    held = [Entries.among(alone.states, prefix) for alone in rows]
    ends = [
        write_at(entries, q[i : i + 1], new.row(i), alone.uniform_length)
        for i, (entries, alone) in enumerate(zip(held, rows))
    ]
    return held, None if all(x is None for x in ends) else ends


def ending(place: Tensor, block: int) -> Tensor | None:
    """Whether a block ends with the token at each place of a block; None if it is known that none does."""
    ends = place == block - 1
    may_end = is_tracing(ends) or ends.device.type != "cpu" or bool(ends.any())
    return ends if may_end else None


def write_rows(x: Tensor, at: Tensor, new: Tensor, dim: int) -> None:
    """Write new rows into x along a dimension, at places [...] that have one in it for each of them."""
    places = at.expand(*x.shape[:dim], -1)
    shape = *places.shape, *x.shape[dim + 1 :]
    x.scatter_(dim, expand_dims_like(places, x).expand(shape), new.to(x.dtype).expand(shape))
