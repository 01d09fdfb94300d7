"""States of our models in vLLM's pages, and how a mixer reads the tokens of a step. This module needs no vLLM."""

import math
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from hf_memory.cache import Spec, States, flat, nested
from hf_memory.mixers.base import Context, MemoryMixer
from hf_memory.mixers.positions import Positions


def kept_states(spec: Spec, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each state of a sequence, by name; `dtype` is that of the model.

    Integers have four bytes, so that each state is aligned to the size of its numbers. Empty states are left out.
    """
    narrow = {torch.long: torch.int32}
    of_state = {name: state.dtype or dtype for name, state in spec.items() if math.prod(state.shape)}
    return {name: (spec[name].shape, narrow.get(kind, kind)) for name, kind in of_state.items()}


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
    """The states of one mixer for all sequences, with a row for each sequence, and the mixer's forward with them."""

    kv_cache: tuple[Tensor, ...]  # in the order of `kept`

    def __init__(self, mixer: MemoryMixer, dtype: torch.dtype):
        self.mixer, self.dtype = mixer, dtype
        self.kept = kept_states(mixer.spec, dtype)

    def load(self, rows: Tensor) -> States:
        """The states in some rows."""
        found = {name: page[rows] for name, page in zip(self.kept, self.kv_cache)}
        for name, state in self.mixer.spec.items():
            dtype = state.dtype or self.dtype
            found[name] = (
                found[name].to(dtype) if name in found else rows.new_empty(len(rows), *state.shape, dtype=dtype)
            )
        return found

    def save(self, rows: Tensor, states: States) -> None:
        """Write states to some rows."""
        for name, page in zip(self.kept, self.kv_cache):
            page[rows] = states[name].to(page.dtype)

    def read(self, hidden_states: Tensor, angles: tuple[Tensor, Tensor], steps: list[Reading], slots: Tensor) -> Tensor:
        """The mixer's outputs for the tokens of all sequences in one row, each with the state of its own sequence.

        Args:
            hidden_states: [1, T, hidden_size]; the output is zero for tokens that are in no reading.
            angles: cosines and sines of the tokens' positions, [1, T, channels] each.
            steps: the result of `readings`.
            slots: [N], the row of the states of each sequence.
        """
        positions = Positions(*angles) if self.mixer.sees_positions else None
        output = torch.zeros_like(hidden_states)
        for sequences, tokens, begins in steps:
            rows = slots[sequences]
            places = None if positions is None else positions.gather(tokens)
            context = Context(places, None, None, {} if begins else nested(self.load(rows)))
            output[0, tokens], states = self.mixer.mix(hidden_states[0, tokens], context)
            self.save(rows, flat(states))
        return output
