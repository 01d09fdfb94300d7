"""What vLLM keeps of a sequence for a model of ours, and how a mixer reads the tokens of a step; without vLLM."""

import math
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from hf_memory.cache import Spec, States
from hf_memory.mixers.attention import AttentionMixer
from hf_memory.mixers.base import Context, MemoryMixer
from hf_memory.mixers.positions import Positions
from hf_memory.modeling.configuration import MemoryConfig

ELSEWHERE = "generate and serve of transformers run it, and hf_memory.generate_stream does for many texts at once"


def check(config: MemoryConfig) -> None:
    """Raise ValueError unless vLLM has a place for all that the model keeps of a sequence."""
    for i, spec in enumerate(config.state_specs):
        growing = [name for name, state in spec.items() if state.growth != "fixed"]
        if growing and config.mixer_class(i) is not AttentionMixer:
            raise ValueError(
                "vLLM has a place for states of fixed size, and for keys and values of attention alone: layer "
                f"{i} of {config.model_type} keeps {' and '.join(growing)}, which grows with the text. {ELSEWHERE}"
            )
    kept = [config.state_specs[i] for i in memory_layers(config)]
    if any(spec != kept[0] for spec in kept):
        raise ValueError(
            "vLLM has pages of one size for all memory layers: full_attention_heads must be as many in each layer, got "
            f"{config.full_attention_heads}. {ELSEWHERE}"
        )


def memory_layers(config: MemoryConfig) -> list[int]:
    """Layers whose past is a memory; the others are attention, whose keys and values vLLM keeps."""
    return [i for i in range(config.num_hidden_layers) if config.mixer_class(i) is not AttentionMixer]


def kept_states(spec: Spec, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of what is kept of a sequence in a model of a dtype, by name.

    Whole numbers have four bytes, so that each state begins at a multiple of its own numbers' bytes; nothing is kept
    of states without numbers.
    """
    narrow = {torch.long: torch.int32}
    of_state = {name: state.dtype or dtype for name, state in spec.items() if math.prod(state.shape)}
    return {name: (spec[name].shape, narrow.get(kind, kind)) for name, kind in of_state.items()}


class Reading(NamedTuple):
    """Sequences that a mixer reads at once: equally many tokens of each."""

    sequences: Tensor  # [N], which of the step's
    tokens: Tensor  # [N, T], places in the step's row
    begins: bool  # whether nothing was read of them before


def readings(bounds: Tensor, lengths: Tensor) -> list[Reading]:
    """How to read the tokens of a step.

    Args:
        bounds: where each sequence's tokens begin in the row, and where the last's end [N + 1].
        lengths: tokens of each sequence, those of this step included [N].

    Returns:
        The fewest readings of equally many tokens; so all that are being written to are one of them.
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
    """The states of one mixer, a row of each for a sequence, and the mixer's forward with them."""

    kv_cache: tuple[Tensor, ...]  # in the order of `kept`

    def __init__(self, mixer: MemoryMixer, dtype: torch.dtype):
        self.mixer, self.dtype = mixer, dtype
        self.kept = kept_states(mixer.spec, dtype)

    def load(self, rows: Tensor) -> States:
        """The states of some sequences."""
        found = {name: page[rows] for name, page in zip(self.kept, self.kv_cache)}
        for name, state in self.mixer.spec.items():
            dtype = state.dtype or self.dtype
            found[name] = (
                found[name].to(dtype) if name in found else rows.new_empty(len(rows), *state.shape, dtype=dtype)
            )
        return found

    def save(self, rows: Tensor, states: States) -> None:
        """Keep the states of some sequences."""
        for name, page in zip(self.kept, self.kv_cache):
            page[rows] = states[name].to(page.dtype)

    def read(self, hidden_states: Tensor, angles: tuple[Tensor, Tensor], steps: list[Reading], slots: Tensor) -> Tensor:
        """Mix one row of all sequences' tokens [1, T, hidden_size], each with its own past.

        Args:
            hidden_states: [1, T, hidden_size]; what is in no reading comes out as zeros.
            angles: cosines and sines of the tokens' positions [1, T, channels].
            steps: what `readings` gives.
            slots: the row of each sequence of the step [N].
        """
        positions = Positions(*angles) if self.mixer.sees_positions else None
        output = torch.zeros_like(hidden_states)
        for sequences, tokens, begins in steps:
            rows = slots[sequences]
            places = None if positions is None else positions.gather(tokens)
            context = Context(places, None, None, {} if begins else self.load(rows))
            output[0, tokens], states = self.mixer.mix(hidden_states[0, tokens], context)
            self.save(rows, states)
        return output
