"""States of our models in vLLM's pages, and how a mixer reads the tokens of a step. This module needs no vLLM."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_memory.cache import Spec, States, as_stored, flat, in_numbers, nested
from hf_memory.mixers.base import Context, Projected
from hf_memory.mixers.pasts.kept import Kept
from hf_memory.mixers.pasts.kept_by_head import KeptByHead
from hf_memory.mixers.positions import Positions
from hf_memory.mixers.transformer.forgetting import ForgettingHeads
from hf_memory.mixers.windowed import WindowedMixer

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
        self.bindings = 0  # how often pages were given
        self._states: dict[int, States] = {}
        self._apart: dict[int, dict[tuple[int, ...], States]] = {}  # of the last step, by layer
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
        self.bindings += 1
        self._states.clear()
        self._apart.clear()

    def states(self, layer: int) -> States:
        """The states of a layer in all pages, as views."""
        if layer not in self._states:
            places = self.places[layer].items()
            found = {name: self._pages[x.page][:, x.bytes].view(x.dtype) for name, x in places}
            self._states[layer] = {
                name: found[name].view(len(found[name]), *x.shape) for name, x in places
            }
        return self._states[layer]

    def apart(self, layer: int, numbers: Mapping[int, list[int]]) -> list[States]:
        """The states of a layer for each sequence [1, ...], as views, where its pages have these numbers by layer."""
        places = self.places[layer].values()
        keys = [*zip(*(numbers[place.page] for place in places))]
        known = self._apart.get(layer, {})
        found = [known[key] if key in known else self._views(layer, key) for key in keys]
        self._apart[layer] = dict(zip(keys, found))
        return found

    def _views(self, layer: int, key: tuple[int, ...]) -> States:
        stored = self.states(layer).items()
        return {name: x.narrow(0, number, 1) for (name, x), number in zip(stored, key)}


def shelves(parts: Sequence[Mapping[int, Spec]], dtype: torch.dtype) -> list[Shelf]:
    """The pages of each process, for the states by layer of its part of a model: all have the size of the largest.

    Processes have different states where heads that keep everything are not divided evenly.
    """
    found = [Shelf(specs, dtype) for specs in parts]
    size = max(shelf.size for shelf in found)
    for shelf in found:
        shelf.size = size
    return found


class Reading(NamedTuple):
    """Sequences that a mixer reads in one call, with the same number of tokens each."""

    tokens: Tensor  # [N, T], positions in the row of all tokens
    rows: dict[int, Tensor]  # [N], the page of each sequence, by layer
    before: list[int]  # number of tokens that each sequence has read before; all zero or none
    numbers: dict[int, list[int]]  # `rows` on the host; on a CPU alone

    @property
    def uniform_length(self) -> int | None:
        """The number of tokens that each sequence has read before, if they agree; 0: none has read any."""
        return self.before[0] if len({*self.before}) == 1 else None

    def of(self, x: Tensor) -> Tensor:
        """Rows x [tokens of the step, ...] of these tokens, [N, T, ...]; a view if these are all."""
        if self.tokens.numel() < x.shape[0]:
            return x[self.tokens]
        return x.view(*self.tokens.shape, *x.shape[1:])


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
        pages = {id(x): x[sequences].long() for x in slots.values()}  # many layers share them
        rows = {layer: pages[id(x)] for layer, x in slots.items()}
        numbers: dict[int, list[int]] = {}
        if bounds.device.type == "cpu":
            on_host = {key: x.tolist() for key, x in pages.items()}
            numbers = {layer: on_host[id(x)] for layer, x in slots.items()}
        found.append(Reading(tokens, rows, [*before.values()], numbers))
    return found


class Pages:
    """The states of one layer for all sequences, and the second step of its mixer with them.

    The mixer's first and third step read no states: an engine can compile them. Heads that keep everything are the
    engine's own attention, whose outputs the third step puts in their places.
    """

    def __init__(self, mixer: Any, layer: int, shelf: Shelf):
        self.mixer = mixer
        self.shelf = shelf
        self.layer = layer
        self.bits = mixer.default_bits
        self.spec = mixer.spec
        self.backend = mixer.backend
        self._own_pages = sorted({place.page for place in shelf.places.get(layer, {}).values()})
        self._pages_of_reader: list[list[int]] = []
        self._reader: Any = None
        self._counts: list[Tensor] = []
        self._has_rounded_states = any(state.numbers is not None for state in self.spec.values())
        grows = any(state.growth != "fixed" for state in self.spec.values())
        # the parts of its heads that it reads itself, if the engine has attention of its own for others
        self.parts: Any = [x for x in self.mixer.parts if x.is_near] if grows else None

    @property
    def width(self) -> int:
        """The number of channels of what the second step gives for each token."""
        return self.mixer.width if self.parts is None else sum(self._widths)

    @property
    def _widths(self) -> list[int]:
        """Those of each part of the heads."""
        channels = self.mixer.num_key_value_groups * self.mixer.value_dim
        return [channels * len(part.heads) for part in self.parts]

    @property
    def _can_be_apart(self) -> bool:
        """Whether the mixer reads one token of each sequence with states that are anywhere in memory."""
        is_window = isinstance(self.mixer, WindowedMixer)
        if not is_window or isinstance(self.mixer, ForgettingHeads) or self._has_rounded_states:
            return False
        parts = self.mixer.parts if self.parts is None else self.parts
        return all(isinstance(part.past, Kept | KeptByHead) for part in parts)

    @property
    def _stored(self) -> States:
        return self.shelf.states(self.layer)

    def _located(self, rows: dict[int, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """The states in all pages, with their names and the pages [N] that each is in."""
        places = self.shelf.places[self.layer]
        return ((name, x, rows[places[name].page]) for name, x in self._stored.items())

    def _load(self, rows: dict[int, Tensor]) -> States:
        """Copies of the states in some pages."""
        return {name: x.index_select(0, page) for name, x, page in self._located(rows)}

    def _save(self, rows: dict[int, Tensor], states: States) -> None:
        """Write states to some pages."""
        for name, stored, page in self._located(rows):
            stored.index_copy_(0, page, states[name].to(stored.dtype))

    def read(
        self,
        hidden_states: Tensor,
        angles: tuple[Tensor, Tensor],
        steps: list[Reading],
        attended: Tensor | None = None,
    ) -> Tensor:
        """The mixer's outputs for the tokens of all sequences in one row, each with the state of its own sequence.

        Args:
            hidden_states: [1, T, hidden_size]; the output is that of zeros for tokens that are in no reading.
            angles: cosines and sines of the tokens' positions, [1, T, channels] each.
            steps: the result of `readings`.
            attended: see `finish`.
        """
        projected = self.project(hidden_states, angles)
        mixed = hidden_states.new_empty(hidden_states.shape[1], self.width)
        self.mix(projected, steps, mixed)
        return self.finish(mixed, attended)

    def project(self, hidden_states: Tensor, angles: tuple[Tensor, Tensor]) -> Projected:
        """The first step, for hidden states [1, T, hidden_size] and the angles of `read`: tensors [T, ...] by name."""
        positions = Positions(*angles) if self.mixer.sees_positions else None
        projected = self.mixer.project(hidden_states, positions)
        if positions is not None and not self.mixer.projects_positions:
            projected = projected | positions._asdict()
        return {name: x[0] for name, x in projected.items()}

    def mix(self, projected: Projected, steps: list[Reading] | None, mixed: Tensor) -> None:
        """The second step, into `mixed` [T, width]. Without steps the tokens are one text that is not kept."""
        T = mixed.shape[0]
        if steps is None:
            tokens = torch.arange(T, device=mixed.device)[None]
            found, _ = self._mixed(projected, Reading(tokens, {}, [0], {}), {}, 0)
            mixed.copy_(found[0])
            return
        if len(steps) == 1 and self._read_token(projected, steps[0], mixed):
            return
        if sum(step.tokens.numel() for step in steps) < T:
            mixed.zero_()
        for step in steps:
            found = self._mixed_step(projected, step)
            if step.tokens.numel() == T:  # in order
                mixed.copy_(found.flatten(0, 1))
            else:
                mixed[step.tokens] = found

    def _read_token(self, projected: Projected, step: Reading, mixed: Tensor) -> bool:
        """Let compiled code read one token of each sequence into `mixed`; whether it takes the states of this layer."""
        N, T = step.tokens.shape
        if T > 1 or mixed.shape[0] > N or not step.numbers or not step.before[0]:
            return False
        # in other memory the same pages need another reader
        pages = [[self.shelf.bindings], *(step.numbers[page] for page in self._own_pages)]
        if pages != self._pages_of_reader:
            self._pages_of_reader = pages
            self._reader = self._new_reader(projected, step)
        if self._reader is None:
            return False
        q, k, v = (projected[name] for name in "qkv")
        self._reader(q, k, v, tuple(step.before), mixed)
        for count in self._counts:
            count.add_(1)
        return True

    def _new_reader(self, projected: Projected, step: Reading) -> Any:
        """What reads tokens of these sequences, or None."""
        if not self._can_be_apart:
            return None
        parts = self.mixer.parts if self.parts is None else self.parts
        if len(parts) != 1:
            return None
        rows = self.shelf.apart(self.layer, step.numbers)
        states = {name: [row[name] for row in rows] for name in rows[0]}
        context = Context(
            None,
            None,
            None,
            states,
            uniform_length=step.before,
            bits=self.bits,
            backend=self.backend,
        )
        self._counts = states["tokens_read"]
        return self.mixer.reader(parts[0], step.of(projected["q"]), context)

    def _mixed_step(self, projected: Projected, step: Reading) -> Tensor:
        """Results [N, T, width] for the tokens of a reading, with the states in their pages.

        On a CPU one sequence has views of its pages, and each of several where the mixer reads them apart.
        """
        N, T = step.tokens.shape
        length = step.uniform_length
        is_begun = length != 0
        if N == 1 and step.numbers:
            (own,) = self.shelf.apart(self.layer, step.numbers)
            mixed, states = self._mixed(projected, step, own if is_begun else {}, length)
            _write(own, states)
            return mixed
        if T == 1 and is_begun and step.numbers and self._can_be_apart:
            rows = self.shelf.apart(self.layer, step.numbers)
            apart = {name: [row[name] for row in rows] for name in rows[0]}
            return self._mixed(projected, step, apart, step.before)[0]
        states = self._load(step.rows) if is_begun else {}
        mixed, states = self._mixed(projected, step, states, length)
        self._save(step.rows, states)
        return mixed

    def finish(self, mixed: Tensor, attended: Tensor | None = None) -> Tensor:
        """The third step: outputs of the mixer [1, T, ...] from the results of the second [T, width].

        `attended` [T, HQ, V] are outputs of the engine's attention, of the queries of heads that keep everything.
        """
        if attended is None:
            return self.mixer.finish(mixed[None])
        heads = -1, self.mixer.num_key_value_groups, self.mixer.value_dim
        parts = [*mixed.split(self._widths, 1), attended]
        outputs = [x.reshape(1, len(x), *heads) for x in parts]
        return self.mixer.finish(self.mixer.in_order(outputs).flatten(2))

    def _mixed(
        self, projected: Projected, step: Reading, states: States, before: Any
    ) -> tuple[Tensor, States]:
        """Results [N, T, width] for the tokens of a reading, and the states after them as pages have them.

        Args:
            projected: of all tokens of the step.
            step: the reading.
            states: those before these tokens as pages have them, or none; a list of rows each if they are apart, which
                change in place.
            before: the number of tokens that each sequence has read, if they agree; or a list, if states are lists.
        """
        of_step = {name: step.of(x) for name, x in projected.items()}
        angles = [of_step.pop(name) for name in Positions._fields if name in of_step]
        positions = Positions(*angles) if angles else None
        like = next(iter(of_step.values()))
        if self._has_rounded_states:
            states = in_numbers(states, self.spec, like.dtype)
        context = Context(
            positions,
            None,
            None,
            nested(states) if self.mixer.has_parts else states,
            uniform_length=before,
            bits=self.bits,
            backend=self.backend,
        )
        if self.parts is None:
            mixed, after = self.mixer.mix(of_step, context)
        else:
            outputs, after = self.mixer.attend(self.parts, of_step, context)
            nothing = like.new_empty(*like.shape[:2], 0)
            found = [x.flatten(2) for x in outputs] or [nothing]
            mixed = found[0] if len(found) == 1 else torch.cat(found, -1)
        after = flat(after) if self.mixer.has_parts else after
        return mixed, as_stored(after, self.spec) if self._has_rounded_states else after


def _write(own: States, states: States) -> None:
    """Write states into the views of one sequence, unless they were changed there."""
    for name, x in own.items():
        after = states[name]
        if x is not after and x.data_ptr() != after.data_ptr():
            x.copy_(after)
