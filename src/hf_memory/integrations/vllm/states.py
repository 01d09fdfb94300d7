"""States of our models in vLLM's pages, and how a mixer reads the tokens of a step. This module needs no vLLM."""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from hf_memory.cache import Spec, States, flat, nested
from hf_memory.mixers.base import Context, MemoryMixer
from hf_memory.mixers.positions import Positions

ALIGNMENT = 8  # bytes of the widest number


class Place(NamedTuple):
    """Where a state of a sequence is."""

    page: int  # the layer whose page it is in
    bytes: slice
    shape: tuple[int, ...]
    dtype: torch.dtype


class Shelf:
    """The pages of a model: each layer with a memory has one for each sequence, all of one size.

    A state may be in any layer's page: the largest is put first, and each where most room is left, so that pages are
    hardly larger than they must be if layers keep different states.
    """

    def __init__(self, specs: Mapping[int, Spec], dtype: torch.dtype):
        """States of fixed size by layer; `dtype` is that of the model."""
        self.places: dict[int, dict[str, Place]] = {layer: {} for layer in specs}
        self._pages: dict[int, Tensor] = {}
        self._states: dict[int, States] = {}
        ends = dict.fromkeys(specs, 0)
        sizes = [
            (math.prod(state.shape) * (state.dtype or dtype).itemsize, layer, name)
            for layer, spec in specs.items()
            for name, state in spec.items()
            if state.growth == "fixed"
        ]
        for size, layer, name in sorted(sizes, reverse=True):
            page = min(ends, key=ends.__getitem__)
            state = specs[layer][name]
            taken = slice(ends[page], ends[page] + size)
            self.places[layer][name] = Place(page, taken, state.shape, state.dtype or dtype)
            ends[page] += size + -size % ALIGNMENT
        self.size = max(ends.values(), default=0)

    def bind(self, layer: int, pages: Tensor) -> None:
        """Use a layer's pages [sequences, bytes] of uint8, which may be longer than `size`."""
        self._pages[layer] = pages
        self._states.clear()

    def states(self, layer: int) -> States:
        """The states of a layer in all pages, as views."""
        if layer not in self._states:
            places = self.places[layer].items()
            found = {name: self._pages[x.page][:, x.bytes].view(x.dtype) for name, x in places}
            self._states[layer] = {
                name: found[name].view(len(found[name]), *x.shape) for name, x in places
            }
        return self._states[layer]


class Reading(NamedTuple):
    """Sequences that a mixer reads in one call, with the same number of tokens each."""

    tokens: Tensor  # [N, T], positions in the row of all tokens
    rows: dict[int, Tensor]  # [N], the page of each sequence, by layer
    uniform_length: (
        int | None
    )  # number of tokens that each sequence has read before, if they agree; 0: none has read any

    def of(self, x: Tensor) -> Tensor:
        """Rows x [tokens of the step, ...] of these tokens, [N, T, ...]; a view if these are all."""
        return (
            x.unflatten(0, self.tokens.shape) if self.tokens.numel() == len(x) else x[self.tokens]
        )


def readings(bounds: Tensor, lengths: Tensor, slots: Mapping[int, Tensor]) -> list[Reading]:
    """Group the sequences of a step by their number of new tokens.

    Args:
        bounds: [N + 1], where the tokens of each sequence begin in the row, and where those of the last one end.
        lengths: [N], number of tokens of each sequence, including those of this step.
        slots: by layer the page of each sequence [N].

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
        rows = {layer: x[sequences].long() for layer, x in slots.items()}
        uniform_length = {*before.values()}
        found.append(
            Reading(tokens, rows, uniform_length.pop() if len(uniform_length) == 1 else None)
        )
    return found


class Pages:
    """The states of one layer for all sequences, and its mixer's forward with them."""

    def __init__(self, mixer: MemoryMixer, layer: int, shelf: Shelf):
        self.mixer = mixer
        self.shelf = shelf
        self.layer = layer

    @property
    def _stored(self) -> States:
        return self.shelf.states(self.layer)

    def _own(self, rows: dict[int, Tensor]) -> States:
        """The states of one sequence on a CPU, as views of its pages; none otherwise, where a place is not known."""
        here = rows[self.layer]
        if len(here) > 1 or here.device.type != "cpu":
            return {}
        places = self.shelf.places[self.layer]
        return {
            name: x.narrow(0, int(rows[places[name].page]), 1) for name, x in self._stored.items()
        }

    def _load(self, rows: dict[int, Tensor]) -> States:
        """The states in some pages: views if there is one sequence, on a CPU, otherwise copies."""
        places = self.shelf.places[self.layer]
        return self._own(rows) or {
            name: x.index_select(0, rows[places[name].page]) for name, x in self._stored.items()
        }

    def _save(self, rows: dict[int, Tensor], states: States) -> None:
        """Write states to some pages, unless they were changed there."""
        places = self.shelf.places[self.layer]
        own = self._own(rows)
        for name, stored in self._stored.items():
            if not own:
                stored.index_copy_(0, rows[places[name].page], states[name].to(stored.dtype))
            elif own[name].data_ptr() != states[name].data_ptr():
                own[name].copy_(states[name])

    def read(
        self,
        hidden_states: Tensor,
        angles: tuple[Tensor, Tensor],
        steps: list[Reading],
        attended: Tensor | None = None,
    ) -> Tensor:
        """The mixer's outputs for the tokens of all sequences in one row, each with the state of its own sequence.

        Args:
            hidden_states: [1, T, hidden_size]; the output is zero for tokens that are in no reading.
            angles: cosines and sines of the tokens' positions, [1, T, channels] each.
            steps: the result of `readings`.
            attended: [T, heads, V], outputs of the queries of heads that keep everything, see `Context`.
        """
        output = torch.zeros_like(hidden_states[0])
        for step in steps:
            positions = (
                Positions(*(step.of(x[0]) for x in angles)) if self.mixer.sees_positions else None
            )
            states = {} if step.uniform_length == 0 else nested(self._load(step.rows))
            full = None if attended is None else step.of(attended)
            context = Context(
                positions, None, None, states, uniform_length=step.uniform_length, attended=full
            )
            mixed, states = self.mixer.mix_after(step.of(hidden_states[0]), context)
            self._save(step.rows, flat(states))
            output[step.tokens] = mixed
        return output[None]
