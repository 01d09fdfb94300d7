"""Kept tokens of heads that keep different numbers of them.

Entries of all heads are rows of one tensor, those of a head after those of the head before it. So what adjacent heads
with equal numbers hold is a view, which `Kept` reads and changes. On a CPU the queries of one token of all heads are
read in one product instead: each sees the rows of its head.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from hf_memory.cache import Spec, State, States
from hf_memory.mixers.attention_blocks import Attended, Scores
from hf_memory.mixers.base import Context
from hf_memory.mixers.pasts.kept import (
    Entries,
    Kept,
    ending,
    if_any,
    read_by_compiled_code,
    write_each_row,
    write_rows,
)
from hf_memory.mixers.pasts.rows import New, Seen, states_of_rows
from hf_memory.ops import cpu
from hf_memory.ops.masks import Tokens


@dataclass(frozen=True)
class Run:
    """Adjacent heads that keep as many tokens, and where their entries are."""

    past: Kept
    heads: slice
    rows: slice  # among the entries of all heads
    stays: slice  # among those that stay

    @property
    def count(self) -> int:
        """The number of heads."""
        return self.heads.stop - self.heads.start

    def of_heads(self, x: Tensor) -> Tensor:
        """Its heads of x [B, T, H, ...], a view."""
        return x[:, :, self.heads]

    def of_queries(self, x: Tensor) -> Tensor:
        """Its heads of x [B, T, HQ, ...], a view."""
        groups = self.past.groups
        return x[:, :, groups * self.heads.start : groups * self.heads.stop]

    def entries(self, whole: Entries) -> Entries:
        """Its part, as views [B, heads, entries, ...]."""
        of_tokens = (x[:, self.rows].unflatten(1, (self.count, -1)) for x in whole.of_tokens)
        score = whole.score[:, self.stays].unflatten(1, (self.count, -1))
        groups = self.past.groups
        queries = whole.queries[:, groups * self.heads.start : groups * self.heads.stop]
        keys, values, number = of_tokens
        return Entries(keys, values, number, score, queries)


class KeptByHead(NamedTuple):
    """The tokens that stay for each head, as of `Kept`, whose numbers differ.

    Its states are those of `Entries` without a dimension for heads: keys, values and numbers [B, entries, ...] of all
    heads in turn, scores [B, entries that stay], and queries [B, HQ, block, D].
    """

    runs: tuple[Run, ...]
    sizes: tuple[int, ...]  # the number of entries of each head
    blocks: tuple[int, ...]  # where the block of each head begins among all entries

    @classmethod
    def of(cls, past: Kept, numbers: Sequence[int]) -> Self:
        """Heads that keep these numbers of tokens; all else is as `past` says."""
        runs: list[Run] = []
        sizes: list[int] = []
        head = row = stay = 0
        for number, alike in groupby(numbers):
            count = len([*alike])
            of_run = past._replace(kept=number)
            rows = count * of_run.size
            stays = count * of_run.stay
            where = slice(head, head + count), slice(row, row + rows), slice(stay, stay + stays)
            runs.append(Run(of_run, *where))
            sizes += [of_run.size] * count
            head += count
            row += rows
            stay += stays
        blocks = (end - past.block for end in accumulate(sizes))
        return cls(tuple(runs), tuple(sizes), tuple(blocks))

    @property
    def kind(self) -> str | None:
        """What `cache_bits` calls its states."""
        return self.runs[0].past.kind

    @property
    def prefix(self) -> str:
        """Of the names of its states."""
        return self.runs[0].past.prefix

    def spec(self, heads: int, K: int, V: int) -> Spec:
        """The states."""
        last = self.runs[-1]
        of_queries = last.past.spec(heads, K, V)[f"{self.prefix}queries"]
        keys, values = states_of_rows(self.kind, (last.rows.stop,), K, V)
        number = State((last.rows.stop,), torch.int32)
        score = State((last.stays.stop,))
        return Entries(keys, values, number, score, of_queries).states(self.prefix)

    def attend(
        self, q: Tensor, new: New, tokens: Tokens, context: Context, scores: Scores
    ) -> tuple[Tensor, States]:
        """See `Kept.attend`."""
        if found := read_by_compiled_code(self, q, new, context, scores):
            return found
        read = [
            run.past.attend(of_run, new_of_run, tokens, within, scores)
            for run, of_run, new_of_run, within in self._each_run(q, new, context)
        ]
        outputs, states = zip(*read)
        return torch.cat(outputs, 2), self._joined(states)

    def attend_with_mass(
        self, q: Tensor, new: New, tokens: Tokens, context: Context, scores: Scores
    ) -> tuple[Attended, States]:
        """See `Kept.attend_with_mass`."""
        read = [
            run.past.attend_with_mass(of_run, new_of_run, tokens, within, scores)
            for run, of_run, new_of_run, within in self._each_run(q, new, context)
        ]
        attended, states = zip(*read)
        return _of_heads(attended), self._joined(states)

    def attend_one(self, q: Tensor, new: New, context: Context, scores: Scores) -> Tensor:
        """See `Kept.attend_one`."""
        if self._are_read_together(q, context, scores):
            seen, ends = self._write(q, new, context)
            o = seen.attend(q.flatten(2, 3)[:, :, None], scores)
            self._end_blocks(new, context, scores, ends)
            return o.view(*q.shape[:4], -1)
        read = [
            run.past.attend_one(x.unflatten(2, (run.count, -1)), new_of_run, within, scores)
            for run, x, new_of_run, within in self._each_run(q.flatten(2, 3), new, context)
        ]
        return torch.cat(read, 2)

    def attend_one_with_mass(
        self, q: Tensor, new: New, context: Context, scores: Scores
    ) -> Attended:
        """See `Kept.attend_one_with_mass`."""
        if self._are_read_together(q, context, scores):
            seen, ends = self._write(q, new, context)
            attended = seen.attend_with_mass(q.flatten(2, 3)[:, :, None], scores)
            self._end_blocks(new, context, scores, ends)
            return attended
        read = [
            run.past.attend_one_with_mass(
                x.unflatten(2, (run.count, -1)), new_of_run, within, scores
            )
            for run, x, new_of_run, within in self._each_run(q.flatten(2, 3), new, context)
        ]
        return _of_heads(read)

    def reader(
        self, q: Tensor, context: Context, scores: Scores, among: slice
    ) -> cpu.TokenReader | cpu.TokenReaderInGraph | None:
        """See `Kept.reader`."""
        return self.runs[0].past.reader_of(self.sizes, q, context, scores, among)

    def numbers(self, states: States) -> Sequence[Tensor]:
        """See `Kept.numbers`."""
        return states[f"{self.prefix}number"].split(self.sizes, 1)

    def of_entries(self, x: Tensor) -> Tensor:
        """What belongs to heads, [B, H, ...], as what belongs to their entries, [B, entries, ...]."""
        # without a copy from the host, which a CUDA graph cannot have
        of_heads = zip(x.split(1, 1), self.sizes)
        return torch.cat([each.expand(-1, size, *x.shape[2:]) for each, size in of_heads], 1)

    def _are_read_together(self, q: Tensor, context: Context, scores: Scores) -> bool:
        """Whether queries of all heads are read in one product: on a CPU, of entries in one tensor, without gates."""
        return q.device.type == "cpu" and context.backend != "triton" and scores.is_product

    def _each_run(
        self, q: Tensor, new: New, context: Context
    ) -> Iterator[tuple[Run, Tensor, New, Context]]:
        """Each run with its queries [B, T, HQ, D], its new tokens, and the context with views of its states."""
        for run in self.runs:
            states = context.states
            if states:
                states = states | self._of_run(run, states)
            yield (
                run,
                run.of_queries(q),
                new.map(run.of_heads),
                context._replace(states=states),
            )

    def _of_run(self, run: Run, states: States) -> dict[str, Any]:
        """Views of the states of a run, which are lists where rows are apart."""
        whole = Entries.among(states, self.prefix)
        if not isinstance(whole.number, list):
            return run.entries(whole).states(self.prefix)
        rows = [run.entries(Entries(*row)) for row in zip(*whole)]
        return Entries(*map(list, zip(*rows))).states(self.prefix)

    def _joined(self, of_runs: Sequence[States]) -> States:
        """The states of all runs; none for packed sequences."""
        if not of_runs[0]:
            return {}
        of_queries = f"{self.prefix}queries"
        return {
            name: torch.cat(
                [x[name] if name == of_queries else x[name].flatten(1, 2) for x in of_runs], 1
            )
            for name in of_runs[0]
        }

    def _write(self, q: Tensor, new: New, context: Context) -> tuple[Seen, Any]:
        """Write one token of each row in place: what it sees, and whose blocks end with it, as `Kept` has them."""
        if isinstance(context.states[f"{self.prefix}number"], list):
            return self._write_apart(q, new, context)
        held = Entries.among(context.states, self.prefix)
        if context.uniform_length is None:
            ends = self._write_padded(held, q, new, context)
        else:
            ends = self._write_at(held, q, new, context.uniform_length)
        keys, values, number = (x.unsqueeze(1) for x in held.of_tokens)
        seen = Seen(keys, values, number > 0, new.rows, context.backend, self.sizes)
        return seen, ends

    def _write_at(self, held: Entries, q: Tensor, new: New, position: int) -> Tensor | None:
        """Write tokens at the same position of each row; the result says if blocks end."""
        block = self.runs[0].past.block
        place = position % block
        at = torch.tensor([x + place for x in self.blocks], device=q.device)
        held.keys.index_copy_(1, at, new.stored_keys.select(1, 0).to(held.keys.dtype))
        held.values.index_copy_(1, at, new.stored_values.select(1, 0).to(held.values.dtype))
        held.number.index_fill_(1, at, position + 1)
        held.queries.select(2, place).copy_(q.flatten(1, 3))
        return held.number.new_ones(1, 1, 1, dtype=torch.bool) if place == block - 1 else None

    def _write_apart(self, q: Tensor, new: New, context: Context) -> tuple[Seen, Any]:
        """The same for rows whose states are anywhere in memory."""
        held, ends = write_each_row(self.prefix, self._write_at, q, new, context)
        keys, values = ([x[i] for x in held] for i in range(2))
        visible = torch.cat([entries.number for entries in held])[:, None] > 0
        return Seen(keys, values, visible, new.rows, context.backend, self.sizes), ends

    def _write_padded(self, held: Entries, q: Tensor, new: New, context: Context) -> Tensor | None:
        """The same for rows that may have read different numbers of tokens before."""
        block = self.runs[0].past.block
        read = context.states["tokens_read"][:, None]
        place = read % block
        at = place + torch.tensor(self.blocks, device=q.device)
        rows = (x.select(1, 0) for x in (new.stored_keys, new.stored_values))
        for x, y in zip(held.of_tokens, (*rows, (read + 1).int())):
            write_rows(x, at, y, dim=1)
        write_rows(held.queries, place[:, None], q.flatten(2, 3).transpose(1, 2), dim=2)
        return ending(place[:, None], block)

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
            for run in self.runs:
                run.past.keep_best(run.entries(Entries(*held)), new.rows, scores, ends)

        if_any(ends, keep_best, Entries.among(context.states, self.prefix))


def _of_heads(attended: Sequence[Attended]) -> Attended:
    """The outputs of all heads, and the logarithms of their mass."""
    outputs, masses = zip(*attended)
    return torch.cat(outputs, 2), torch.cat(masses, 2)
