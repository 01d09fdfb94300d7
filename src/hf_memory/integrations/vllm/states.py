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
            start, end = end, end + count * kind.itemsize
            found[name] = Place(slice(start, end), state.shape, kind)
            end += -end % ALIGNMENT
    return found


def page_size(spec: Spec, dtype: torch.dtype) -> int:
    """Bytes of a page for these states."""
    return max((place.bytes.stop for place in places_of(spec, dtype).values()), default=0)


class Reading(NamedTuple):
    """Sequences that a mixer reads in one call, with the same number of tokens each."""

    sequences: Tensor  # [N], numbers of the sequences in the step
    tokens: Tensor  # [N, T], positions in the row of all tokens
    begins: bool  # whether these are the first tokens of the sequences


def readings(bounds: Tensor, lengths: Tensor) -> list[Reading]:
    """Group the sequences of a step by their number of new tokens.

    Args:
        bounds: [N + 1], where the tokens of each sequence begin in the row, and where those of the last one end.
        lengths: [N], number of tokens of each sequence, including those of this step.

    Returns:
        As few groups as possible; all sequences that decode one token are in one group.
    """
    alike: dict[tuple[int, bool], list[int]] = {}
    for i, ((start, end), length) in enumerate(zip(pairwise(bounds.tolist()), lengths.tolist())):
        if end > start:
            alike.setdefault((end - start, length == end - start), []).append(i)
    found = []
    for (new, begins), rows in alike.items():
        sequences = torch.tensor(rows, device=bounds.device)
        found.append(Reading(sequences, bounds[sequences, None] + torch.arange(new, device=bounds.device), begins))
    return found


class Pages:
    """The states of one mixer for all sequences, with a page for each sequence, and the mixer's forward with them."""

    pages: Tensor  # [sequences, bytes] uint8

    def __init__(self, mixer: MemoryMixer, dtype: torch.dtype):
        self.mixer, self.dtype = mixer, dtype
        self.places = places_of(mixer.spec, dtype)

    def load(self, rows: Tensor) -> States:
        """The states in some pages."""
        pages, found = self.pages[rows], {}
        for name, state in self.mixer.spec.items():
            if place := self.places.get(name):
                found[name] = pages[:, place.bytes].contiguous().view(place.dtype).view(-1, *place.shape)
            elif state.growth == "fixed":
                found[name] = rows.new_empty(len(rows), *state.shape, dtype=state.dtype or self.dtype)
        return found

    def save(self, rows: Tensor, states: States) -> None:
        """Write states to some pages."""
        for name, place in self.places.items():
            self.pages[rows, place.bytes] = states[name].to(place.dtype).reshape(len(rows), -1).view(torch.uint8)

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
        positions = Positions(*angles) if self.mixer.sees_positions else None
        output = torch.zeros_like(hidden_states)
        for sequences, tokens, begins in steps:
            rows = slots[sequences]
            places = None if positions is None else positions.gather(tokens)
            states = {} if begins else nested(self.load(rows))
            context = Context(places, None, None, states, attended=None if attended is None else attended[tokens])
            output[0, tokens], states = self.mixer.mix(hidden_states[0, tokens], context)
            self.save(rows, flat(states))
        return output
