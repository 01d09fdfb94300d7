"""States of our models in vLLM's pages, and how a mixer reads the tokens of a step. This module needs no vLLM."""

import math
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from hf_memory.cache import Spec, States, flat, nested
from hf_memory.mixers.base import Context, MemoryMixer
from hf_memory.mixers.positions import Positions

ALIGNMENT = 8  # bytes of the widest number


class Place(NamedTuple):
    """Where a state of a sequence is in its page."""

    bytes: slice
    shape: tuple[int, ...]
    dtype: torch.dtype


def places_of(spec: Spec, dtype: torch.dtype) -> dict[str, Place]:
    """The place of each state of fixed size, one after the other, by name; `dtype` is that of the model.

    Empty states are left out.
    """
    found: dict[str, Place] = {}
    end = 0
    for name, state in spec.items():
        if state.growth == "fixed" and (count := math.prod(state.shape)):
            kind = state.dtype or dtype
            start, end = aligned(end), aligned(end) + count * kind.itemsize
            found[name] = Place(slice(start, end), state.shape, kind)
    return found


def page_size(spec: Spec, dtype: torch.dtype) -> int:
    """Bytes of a page for these states."""
    return aligned(max((place.bytes.stop for place in places_of(spec, dtype).values()), default=0))


def aligned(place: int) -> int:
    """The first place after this one, or this, where any number can begin."""
    return place + -place % ALIGNMENT


class Reading(NamedTuple):
    """Sequences that a mixer reads in one call, with the same number of tokens each."""

    sequences: Tensor  # [N], numbers of the sequences in the step
    tokens: Tensor  # [N, T], positions in the row of all tokens
    known: int | None  # number of tokens that each sequence has read before, if they agree; 0: none has read any

    def of(self, x: Tensor) -> Tensor:
        """Rows x [tokens of the step, ...] of these tokens, [N, T, ...]; a view if these are all."""
        return x.unflatten(0, self.tokens.shape) if self.tokens.numel() == len(x) else x[self.tokens]


def readings(bounds: Tensor, lengths: Tensor) -> list[Reading]:
    """Group the sequences of a step by their number of new tokens.

    Args:
        bounds: [N + 1], where the tokens of each sequence begin in the row, and where those of the last one end.
        lengths: [N], number of tokens of each sequence, including those of this step.

    Returns:
        As few groups as possible; all sequences that decode one token are in one group.
    """
    alike: dict[tuple[int, bool], dict[int, int]] = {}
    for i, ((start, end), length) in enumerate(zip(pairwise(bounds.tolist()), lengths.tolist())):
        if (new := end - start) > 0:
            alike.setdefault((new, length == new), {})[i] = length - new
    found = []
    for (new, _), before in alike.items():
        sequences = torch.tensor([*before], device=bounds.device)
        tokens = bounds[sequences, None] + torch.arange(new, device=bounds.device)
        known = {*before.values()}
        found.append(Reading(sequences, tokens, known.pop() if len(known) == 1 else None))
    return found


class Pages:
    """The states of one mixer for all sequences, with a page for each sequence, and the mixer's forward with them."""

    stored: States  # of all pages

    def __init__(self, mixer: MemoryMixer, dtype: torch.dtype):
        self.mixer, self.dtype = mixer, dtype
        self.places = places_of(mixer.spec, dtype)

    def bind(self, pages: Tensor) -> None:
        """Store states in pages [sequences, bytes], which may be longer than the states."""
        of_states = {name: pages[:, place.bytes].view(place.dtype) for name, place in self.places.items()}
        self.stored = {name: x.view(-1, *self.places[name].shape) for name, x in of_states.items()}
        for name, state in self.mixer.spec.items():
            if state.growth == "fixed" and name not in self.stored:  # it is empty
                self.stored[name] = pages.new_empty(len(pages), *state.shape, dtype=state.dtype or self.dtype)

    def _load(self, rows: Tensor) -> States:
        """The states in some pages: on a CPU views of that of one sequence, otherwise copies."""
        if len(rows) == 1 and rows.device.type == "cpu":
            return {name: x.narrow(0, int(rows), 1) for name, x in self.stored.items()}
        return {name: x.index_select(0, rows) for name, x in self.stored.items()}

    def _save(self, rows: Tensor, states: States) -> None:
        """Write states to some pages, unless they were changed there."""
        for name, page in self.stored.items():
            if states[name].data_ptr() != page[rows[0]].data_ptr():
                page.index_copy_(0, rows, states[name].to(page.dtype))

    def read(
        self,
        hidden_states: Tensor,
        angles: tuple[Tensor, Tensor],
        steps: list[Reading],
        slots: Tensor,
        attended: Tensor | None = None,
    ) -> Tensor:
        """The mixer's outputs for the tokens of all sequences in one row, each with the state of its own sequence.

        Args:
            hidden_states: [1, T, hidden_size]; the output is zero for tokens that are in no reading.
            angles: cosines and sines of the tokens' positions, [1, T, channels] each.
            steps: the result of `readings`.
            slots: [N], the page of each sequence.
            attended: [T, heads, V], outputs of the queries of heads that keep everything, see `Context`.
        """
        output = torch.zeros_like(hidden_states[0])
        for step in steps:
            rows = slots[step.sequences].long()
            positions = Positions(*(step.of(x[0]) for x in angles)) if self.mixer.sees_positions else None
            states = {} if step.known == 0 else nested(self._load(rows))
            full = None if attended is None else step.of(attended)
            context = Context(positions, None, None, states, known=step.known, attended=full)
            mixed, states = self.mixer.mix(step.of(hidden_states[0]), context)
            self._save(rows, flat(states))
            output[step.tokens] = mixed
        return output[None]
