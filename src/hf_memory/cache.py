"""The recurrent part of a transformers cache: named states, most of them of fixed size, instead of keys and values.

Where a config's `layer_types` has a name in LAYER_TYPES, `DynamicCache(config=...)` and `StaticCache(config=...)` have
a `MemoryLayer`. `generate` creates these caches itself.
"""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from transformers.utils.import_utils import is_tracing

from hf_memory.cache_bits import ALL_BITS, RECURRENT, ROWS, CacheBits
from hf_memory.ops.bits import pack, packed_bytes, unpack
from hf_memory.ops.rows import PLAIN, Rows

__all__ = ["MemoryLayer", "State", "StaticMemoryLayer", "memory_layer", "state_bytes"]

# names in configs of layers with named states
LAYER_TYPES = ("memory", "sliding_memory", "sliding_heads")
Growth = Literal["fixed", "log", "token"]  # how a state grows with the number of tokens
States = dict[str, Any]  # states of a mixer by name, each [B, ...], or those of a part of it
Inputs = dict[str, Tensor]  # inputs of a mixer by name, each [B, T, ...]


@dataclass  # neither frozen nor a tuple, since transformers' exporters set the attributes of a cache
class State:
    """The declaration of a state of a mixer: a tensor whose first dimension is the batch, with a row for each sequence.

    Attributes:
        shape: shape of a row, or of each entry of a row if the state grows.
        dtype: its dtype; None: that of the model.
        growth: how the number of entries grows with the number of tokens: not at all, with its logarithm, or with it.
        at_most: number of tokens after which it stops growing; None: it does not.
        absent: the smallest value of whole numbers, such as that of entries that belong to no token of a row.
        largest: their largest value; None: the number of tokens that were read. Only a saved memory that is loaded is
            compared with both: a state with other numbers can be saved, and is refused when it is loaded.
        kind: what `cache_bits` calls it, such as "window.keys", if it can be stored in few bits; None: it cannot.
        is_recurrent: whether it is a matrix that each token changes. Its kind is then "recurrent_states".
        bits: the bits of each number of a packed state, with `shape` and `dtype` of what is stored; None: not packed.
        numbers: the declaration of what mixers see of a state that the cache packs and unpacks; None: what is stored.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None = torch.float32
    growth: Growth = "fixed"
    at_most: int | None = None
    absent: int = 0
    largest: int | None = None
    kind: str | None = None
    is_recurrent: bool = False
    bits: int | None = None
    numbers: "State | None" = None

    @property
    def name_of_kind(self) -> str | None:
        """What `cache_bits` calls it; None: it cannot be stored in few bits."""
        return RECURRENT if self.is_recurrent else self.kind

    def stored(self, cache_bits: CacheBits) -> "State":
        """The same numbers as a cache of these bits stores them.

        Keys and values of tokens are packed by the mixer, which sees packed rows, see `hf_memory.ops.rows`. Recurrent
        matrices are packed by the cache, in 8 bits or in bfloat16: a call computes with numbers as without bits, and
        what it leaves is rounded once, at its end. So results depend on how a text is divided into calls, by what
        rounding changes.
        """
        bits = cache_bits.of(self.name_of_kind)
        if bits is None:
            return self
        numbers = self if self.is_recurrent else None
        if bits == 16:
            return replace(self, dtype=torch.bfloat16, bits=bits, numbers=numbers)
        *rows, channels = self.shape
        shape = *rows, packed_bytes(channels, bits)
        return replace(
            self, shape=shape, dtype=torch.uint8, largest=255, bits=bits, numbers=numbers
        )

    def grown_shape(self, tokens_read: int) -> tuple[int, ...]:
        """The number of entries of a row after some tokens, as a shape; empty if the state does not grow."""
        tokens = tokens_read if self.at_most is None else min(tokens_read, self.at_most)
        grown = {"fixed": (), "log": (tokens.bit_length(),), "token": (tokens,)}
        return grown[self.growth]

    def nbytes(self, tokens_read: int, dtype: torch.dtype) -> int:
        """Bytes of this state after some tokens of one sequence, in a model of a dtype."""
        return (
            math.prod((*self.grown_shape(tokens_read), *self.shape))
            * (self.dtype or dtype).itemsize
        )


Spec = dict[str, Any]  # the State, or the Spec of a part, by name


@dataclass
class Stretch:
    """States, and recorded inputs that were read after them."""

    before: States
    inputs: list[Inputs] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Number of tokens of all inputs."""
        return sum(map(_length, self.inputs))


class MemoryLayer(LinearAttentionCacheLayerMixin, CacheLayerMixin):
    """A cache layer with the states of one mixer by name, and `tokens_read`, the number of tokens that led to them.

    A mixer calls `read`, and then `write` with the states after its tokens. The layer goes on in the `bits` in which it
    begins: those that it was given, or else those of the first model that reads with it.

    The first dimension of each state is the batch. Without gradients a state is overwritten in place, so that its
    address does not change after the first write; with gradients it is replaced, since the graph may need the old one.

    A recurrent state cannot be rolled back by itself. To undo tokens, `activate_past_recording` keeps a copy of the
    states and, from then on, what is written. `crop` restores the copy; a mixer reads the inputs of the tokens that
    stay, which `replay` has, before new ones. At least the last `undoable_tokens` since the recording began, or since
    the last crop, can be undone. What is recorded is reordered, copied and moved together with the states.
    """

    undoable_tokens = 256

    is_compileable = False
    is_croppable = True
    is_sliding = False
    # where the next token goes among the entries of states that have room for later ones; None: they have none
    room: Any = None

    def __init__(self, **kwargs):
        CacheLayerMixin.__init__(self, **kwargs)
        self.states: States = {}
        self.spec: Spec = {}
        self.mixer: str | None = None  # the class of the mixer that reads and writes the states
        # in which it stores its states; None: not known before the first call
        self.bits: CacheBits | None = None
        self.needs_room = False  # whether a state gets room for tokens before they are read
        self.has_rounded_states = False  # whether the cache packs states, see `State.stored`
        self.tokens_read = 0
        self.is_padded = False  # whether rows may have read fewer tokens
        self.record_past = False
        self.recorded: list[Stretch] = []
        # whether the states are those before the last stretch, whose inputs must be replayed
        self.is_behind = False
        self.device: torch.device | None = None

    def make_writable(self) -> None:
        """Copy states that were made under `torch.inference_mode()`, which nothing outside it may write."""
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return
        for x in (self.tokens_read, *self.states.values()):
            if isinstance(x, Tensor) and x.is_inference():
                self._copy_all()
                return

    def _copy_all(self) -> None:
        self._map(_writable)

    def holds(self, bits: CacheBits) -> bool:
        """Whether its states are stored in some bits."""
        return all(bits.of(state.name_of_kind) == state.bits for state in self.spec.values())

    def own_bits(self, default: CacheBits) -> CacheBits:
        """The bits in which it stores its states; those by default if it has none yet, which it has from now on."""
        if self.bits is None and not torch.compiler.is_compiling():
            self.bits = default
        return self.bits or default

    def read(
        self,
        inputs: Inputs | None = None,
        spec: Spec | None = None,
        mixer: str | None = None,
    ) -> States:
        """The states by name, which may be overwritten.

        Without an entry, which is so before the first write and after a reset, a memory is empty.

        Args:
            inputs: what a mixer reads next, [B, T, ...] each; states that grow get room for it. Default: nothing.
            spec: the declaration of the states in the bits of this layer; default: that of the last call.
            mixer: the class of the mixer.
        """
        if spec is not None and spec is not self.spec:
            self.check(spec, mixer)
            self.spec = spec
            self.mixer = mixer
            self.needs_room = any(state.growth == "log" for state in spec.values())
            self.has_rounded_states = any(state.numbers is not None for state in spec.values())
        if not self.is_initialized:
            return {}
        if not self.needs_room:
            return dict(self.states)
        more = 0 if inputs is None else _length(inputs)
        return self._with_room(self.states, self.tokens_read + more)

    def check(self, spec: Spec, mixer: str | None) -> None:
        """Raise ValueError unless the states, if there are any, are those that a mixer of this class declares."""
        if spec is self.spec or not self.spec or not self.is_initialized:
            return
        if self.mixer not in (mixer, None) or self.spec != spec:
            raise ValueError(
                f"cache must be one that this model has filled, with states {', '.join(spec)} of {mixer} in this "
                f"layer, got one of another model, with states {', '.join(self.spec)} of {self.mixer}"
            )

    def write(self, inputs: Inputs, states: States, output: Tensor) -> Tensor:
        """Keep the states after some inputs.

        Args:
            inputs: what was read since the last write, [B, T, ...] each; all but the first may have one row for all.
            states: the states by name, as declared.
            output: the output [B, T, ...] for these inputs.

        Returns:
            The output to go on with. A layer whose states go elsewhere changes its graph, so that gradients come back.
        """
        self.is_padded |= "attention_mask" in inputs
        self._store(states)
        self.tokens_read += output.shape[1]
        self.is_initialized = True
        if self.record_past:
            self._record(inputs)
        return output

    def parts(self, inputs: Inputs) -> list[Inputs]:
        """Inputs [B, T, ...] in parts that a mixer reads one after the other.

        With a recording, tokens that are too old to be undone later are a part of their own.
        """
        early = _length(inputs) - self.undoable_tokens if self.record_past else 0
        if early <= 0:
            return [inputs]
        return [_tokens(inputs, slice(early)), _tokens(inputs, slice(early, None))]

    def replay(self) -> Iterator[Inputs]:
        """The inputs that stay after tokens were undone, which must be read and written again before others.

        When they all are, the recording starts anew.
        """
        stretch = self.recorded[-1]
        was_recording = self.record_past
        self._stop_recording()
        yield from stretch.inputs
        if was_recording:
            self.activate_past_recording()

    def _record(self, inputs: Inputs) -> None:
        last = self.recorded[-1]
        B = next(iter(inputs.values())).shape[0]
        last.inputs.append(
            {name: owned(x.detach().expand(B, *x.shape[1:])) for name, x in inputs.items()}
        )
        if last.length >= self.undoable_tokens:  # what came before is too old to be undone
            self.recorded = [last, Stretch(self._copied())]

    @property
    def uniform_length(self) -> int | None:
        """The number of tokens that each row has read, if it is a number of Python, so that nothing must be masked."""
        is_number = isinstance(self.tokens_read, int) and not torch.compiler.is_compiling()
        return self.tokens_read if is_number and not self.is_padded else None

    def _store(self, states: States) -> None:
        for name, state in states.items():
            old = self.states.get(name)
            if old is state:  # an op has updated it in place
                continue
            alike = old is not None and (old.shape, old.dtype, old.device) == (
                state.shape,
                state.dtype,
                state.device,
            )
            if alike and not torch.is_grad_enabled():
                old.copy_(state)
            else:
                self.states[name] = owned(state)

    def _with_room(self, states: States, tokens_read: int) -> States:
        """Extend states that grow with the logarithm of the tokens by empty entries."""
        return states | {
            name: _extended(x, self.spec[name], tokens_read)
            for name, x in states.items()
            if self.spec[name].growth == "log"
        }

    @property
    def batch_size(self) -> int:
        """Number of rows of the states; AttributeError before the first write, as in transformers' own layers."""
        if not self.states:
            raise AttributeError("an empty memory has no batch size")
        return next(iter(self.states.values())).shape[0]

    @property
    def has_previous_state(self) -> dict[int, bool]:
        """Whether anything was written, in the form that `Cache.has_previous_state` expects."""
        return {0: self.is_initialized}

    def get_seq_length(self) -> int:
        """Number of tokens seen so far."""
        return self.tokens_read + self.recorded[-1].length if self.is_behind else self.tokens_read

    def get_max_length(self) -> int:
        """-1: there is no maximum."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) of the padding mask that covers the past and the query."""
        return self.get_seq_length() + query_length, 0

    def fill(self, states: States, tokens_read: int) -> None:
        """Set the states, and the number of tokens that led to them."""
        self._stop_recording()
        self.states = {name: owned(x) for name, x in states.items()}
        self.tokens_read = tokens_read
        self.is_initialized = True
        counts = [x for name, x in states.items() if name.rpartition(".")[2] == "tokens_read"]
        self.is_padded = any(bool((x != tokens_read).any()) for x in counts)

    def reset(self) -> None:
        """Empty the memory; the tensors keep their addresses, but for those that a graph of gradients may need."""
        self.make_writable()
        for name, state in self.states.items():
            if state.requires_grad:
                self.states[name] = torch.zeros_like(state)
            else:
                state.zero_()
        self.tokens_read -= self.tokens_read  # in place, if it is a tensor
        self.is_initialized = self.is_padded = False
        self._stop_recording()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` was."""
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: Any) -> None:
        """Keep some rows: `indices` is a tensor, a list or a tuple of their numbers, or a mask [B] of them."""
        self._map(lambda x: x[_on_device(indices, x.device), ...])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row; copies are adjacent."""
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def offload(self) -> None:
        """Move the states to the CPU."""
        if self.states:
            self.device = next(iter(self.states.values())).device
        self._map(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Bring offloaded states back to their device."""
        if self.device is not None:
            self._map(lambda x: x.to(self.device, non_blocking=True))

    def activate_past_recording(self) -> None:
        """Start to record the inputs that `crop` needs."""
        self.record_past = True
        if not self.is_behind:
            self.recorded = [Stretch(self._copied())]

    @torch.no_grad()
    def crop(self, tokens_to_remove: int) -> None:
        """Undo the last tokens. When the inputs that stay are replayed, the recording starts anew.

        Args:
            tokens_to_remove: the number of tokens, as a negative number.

        Raises:
            RuntimeError: if so many tokens were not recorded.
            ValueError: if the number is positive.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove must be negative or 0, got {tokens_to_remove}")
        recorded = sum(stretch.length for stretch in self.recorded)
        if recorded < -tokens_to_remove:
            raise RuntimeError(
                f"a memory layer cannot undo {-tokens_to_remove} tokens: {recorded} were recorded since "
                "activate_past_recording() or the last crop()"
            )
        if not tokens_to_remove:
            if self.record_past:
                self.activate_past_recording()
            return
        self.make_writable()
        length = self.get_seq_length() + tokens_to_remove
        to_undo = -tokens_to_remove
        while self.recorded[-1].length < to_undo:  # this stretch is undone as a whole
            to_undo -= self.recorded.pop().length
        last = self.recorded[-1]
        staying = last.length - to_undo
        inputs = last.inputs
        last.inputs = []
        for part in inputs:
            if staying > last.length:
                last.inputs.append(_tokens(part, slice(staying - last.length)))
        self._store(last.before)
        self.is_initialized = bool(last.before)
        self.tokens_read += length - staying - self.tokens_read  # in place, if it is a tensor
        self.is_behind = True

    def _copied(self) -> States:
        return {name: state.detach().clone() for name, state in self.read().items()}

    def _stop_recording(self) -> None:
        self.record_past = False
        self.recorded = []
        self.is_behind = False

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        def changed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: change(x) for name, x in tensors.items()}

        self.states = changed(self.states)
        for stretch in self.recorded:
            stretch.before = changed(stretch.before)
            stretch.inputs = [changed(x) for x in stretch.inputs]

    def update(self, *args, **kwargs):
        """Not supported: a memory has states, not keys and values.

        Raises:
            ValueError: always, since attention got the cache of another model.
        """
        raise ValueError(
            "cache must hold keys and values in layers of attention: make it with DynamicCache(config=model.config), "
            "got one of another model, with a memory"
        )

    def lazy_initialization(self, *args, **kwargs) -> None:
        """Nothing to allocate: a missing state means an empty memory."""

    update_conv_state = update
    update_recurrent_state = update


class StaticMemoryLayer(MemoryLayer):
    """A `MemoryLayer` for a StaticCache, for torch.compile and CUDA graphs.

    Its number of tokens is a tensor, and each state has its full length, and its address, from the first write on.
    """

    is_compileable = True

    def __init__(self, max_cache_len: int = -1, **kwargs):
        super().__init__(**kwargs)
        self.most_tokens = max_cache_len if max_cache_len > 0 else torch.iinfo(torch.long).max
        self.tokens_read = torch.zeros((), dtype=torch.long)

    @property
    def room(self) -> Tensor | None:  # type: ignore[override]
        """See `MemoryLayer.room`."""
        grows = any(state.growth == "token" for state in self.spec.values())
        return self.tokens_read if grows and self.is_initialized else None

    def read(
        self,
        inputs: Inputs | None = None,
        spec: Spec | None = None,
        mixer: str | None = None,
    ) -> States:
        """See `MemoryLayer.read`.

        Raises:
            ValueError: if a state that grows has no room for the inputs. On a GPU and in graphs, which would have to
                wait for the number of tokens, that is not looked at.
        """
        states = super().read(inputs, spec, mixer)
        is_known = self.tokens_read.device.type == "cpu" and not is_tracing(self.tokens_read)
        if inputs is not None and is_known:
            tokens = int(self.tokens_read) + _length(inputs)
            if any(
                x.grown_shape(tokens) > x.grown_shape(self.most_tokens) for x in self.spec.values()
            ):
                raise ValueError(
                    f"cache must have room for all tokens, StaticCache(..., max_cache_len={tokens}) or more, got "
                    f"max_cache_len={self.most_tokens}"
                )
        return states

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; states keep their dtypes: exporters of transformers cast all tensors of an example."""
        if name == "states" and self.__dict__.get("spec"):
            value = {key: _in_own_dtype(x, self.spec.get(key)) for key, x in value.items()}
        super().__setattr__(name, value)

    def _copy_all(self) -> None:
        super()._copy_all()
        self.tokens_read = _writable(self.tokens_read)
        self._mark_addresses()

    def _store(self, states: States) -> None:
        super()._store(self._with_room(states, self.most_tokens))
        if not self.is_initialized and not torch.compiler.is_compiling():
            self.tokens_read = self.tokens_read.to(next(iter(states.values())).device)
            self._mark_addresses()

    def _mark_addresses(self) -> None:
        for tensor in (self.tokens_read, *self.states.values()):
            torch._dynamo.mark_static_address(tensor)

    def _with_room(self, states: States, tokens_read: int) -> States:
        """Extend states to the largest number of entries that they can have, so that no shape changes."""
        return {name: _extended(x, self.spec[name], self.most_tokens) for name, x in states.items()}


def _extended(x: Tensor, state: State, tokens_read: int) -> Tensor:
    """A state that grows, x [B, n, ...], with as many entries as it has after some tokens, empty ones among them.

    They follow the others, or come before them where the last tokens alone stay.
    """
    if state.growth == "fixed":
        return x
    missing = state.grown_shape(tokens_read)[0] - x.shape[1]
    if missing <= 0:
        return x
    is_last = state.growth == "token" and state.at_most is not None
    sides = (missing, 0) if is_last else (0, missing)
    return F.pad(x, (*(0, 0) * len(state.shape), *sides), value=state.absent)


class Packed:
    """Keys and values of a layer of transformers' caches, which are stored as `rows` says; attention sees numbers."""

    rows: Rows

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make room for keys and values [B, H, T, D] that are packed, or still to be packed."""
        super().lazy_initialization(*self.rows.stored(key_states, value_states))  # type: ignore[misc]

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        """Add keys and values [B, H, T, D]; those of all tokens [B, H, tokens, D] are returned."""
        new = key_states, value_states
        stored = self.rows.stored(*new)
        held = super().update(*stored, *args, **kwargs)  # type: ignore[misc]
        return self.rows.seen_among(new, stored, held, self._end(held[0]))

    def _end(self, held: Tensor) -> int:
        """The place after the last token among keys [B, H, tokens, ...] that are seen."""
        is_static = isinstance(self, StaticLayer) and torch.is_grad_enabled()
        return min(int(self.get_seq_length()), held.shape[2]) if is_static else held.shape[2]


class DynamicLayerInBits(Packed, DynamicLayer):
    """See `Packed`."""


class DynamicSlidingWindowLayerInBits(Packed, DynamicSlidingWindowLayer):
    """See `Packed`."""


class StaticLayerInBits(Packed, StaticLayer):
    """See `Packed`."""


class StaticSlidingWindowLayerInBits(Packed, StaticSlidingWindowLayer):
    """See `Packed`."""


PACKED = {
    DynamicLayer: DynamicLayerInBits,
    DynamicSlidingWindowLayer: DynamicSlidingWindowLayerInBits,
    StaticLayer: StaticLayerInBits,
    StaticSlidingWindowLayer: StaticSlidingWindowLayerInBits,
}


def padding_mask(
    config, inputs_embeds: Tensor, attention_mask: Tensor | None, **kwargs
) -> Tensor | None:
    """A mask [B, T] that is false at padding among the present tokens; None without padding."""
    if attention_mask is None or attention_mask.ndim != 2:
        return None
    present = attention_mask[:, -inputs_embeds.shape[1] :]
    if not is_tracing(present) and present.all():
        return None
    return present.contiguous()  # or its strides change with the past, and graphs are recompiled


def _in_own_dtype(x: Tensor, state: State | None) -> Tensor:
    """A state in the dtype that is declared, or in a wider one, which a model in float64 has."""
    if state is None or state.dtype is None or not state.dtype.is_floating_point:
        return x
    is_rounded = state.bits is not None
    return x.to(state.dtype if is_rounded else torch.promote_types(state.dtype, x.dtype))


def _on_device(indices: Any, device: torch.device) -> Any:
    return indices.to(device) if isinstance(indices, Tensor) else indices


def _length(inputs: Inputs) -> int:
    return next(iter(inputs.values())).shape[1]


def _tokens(inputs: Inputs, tokens: slice) -> Inputs:
    return {name: x[:, tokens] for name, x in inputs.items()}


def as_declared(states: States, before: States, spec: Spec, dtype: torch.dtype) -> States:
    """States in the dtypes that `spec` declares for a model of a dtype, which differ from those that autocast computes.

    A model in float64 has float64 where float32 is declared. States that are among those `before` have them already.

    Raises:
        ValueError: if a state is not declared.
    """
    if not torch.compiler.is_compiling() and states is before:
        return states
    cast = {}
    for name, x in states.items():
        if x is not before.get(name):
            if name not in spec:
                declared = ", ".join(spec) or "none"
                raise ValueError(f"states must be declared by state_spec ({declared}), got {name}")
            if x.is_floating_point():
                seen = spec[name].numbers or spec[name]
                x = x.to(torch.promote_types(seen.dtype or dtype, dtype))
        cast[name] = x
    return cast


def in_numbers(stored: States, spec: Spec, dtype: torch.dtype) -> States:
    """States as the mixers of a model of a dtype see them: those that the cache packs are unpacked."""
    states = dict(stored)
    for name, state in spec.items():
        if state.numbers is not None and name in stored:
            wide = torch.promote_types(state.numbers.dtype, dtype)
            rows = stored[name]
            channels = state.numbers.shape[-1]
            states[name] = rows.to(wide) if state.bits == 16 else unpack(rows, channels, 8, wide)
    return states


def as_stored(states: States, spec: Spec) -> States:
    """The inverse of `in_numbers`; states get no gradient through it."""
    stored = dict(states)
    for name, state in spec.items():
        if state.numbers is not None and name in states:
            x = states[name]
            stored[name] = x.detach().to(state.dtype) if state.bits == 16 else pack(x, 8)
    return stored


def flat(parts: dict[str, Any]) -> dict[str, Any]:
    """Nested dicts as one, by joined names such as "memory.weights": a cache has the states of all parts of a mixer."""
    found: dict[str, Any] = {}
    for name, x in parts.items():
        found |= (
            {f"{name}.{inner}": y for inner, y in flat(x).items()}
            if isinstance(x, dict)
            else {name: x}
        )
    return found


def nested(states: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `flat`."""
    parts: dict[str, Any] = {}
    for name, x in states.items():
        *outer, last = name.split(".")
        place = parts
        for part in outer:
            place = place.setdefault(part, {})
        place[last] = x
    return parts


def memory_layer(cache: Cache, layer_idx: int) -> MemoryLayer:
    """The `MemoryLayer` of a cache at an index, whose states may be written.

    Raises:
        ValueError: if the cache was not made for the model's config.
    """
    layer = held_memory(cache, layer_idx)
    layer.make_writable()
    return layer


def held_memory(cache: Cache, layer_idx: int) -> MemoryLayer:
    """The same as it is, to look at."""
    if layer_idx >= len(cache.layers) or not isinstance(cache.layers[layer_idx], MemoryLayer):
        raise ValueError(
            f"cache must hold a memory at layer {layer_idx}: make it with "
            f"DynamicCache(config=model.config), got {cache}"
        )
    return cache.layers[layer_idx]


def hold_a_memory(cache: Cache, layer_idx: int) -> None:
    """Replace an empty layer of a cache for linear attention of transformers by a `MemoryLayer`.

    Raises:
        ValueError: if it is not empty.
    """
    layer = cache.layers[layer_idx] if layer_idx < len(cache.layers) else None
    if not isinstance(layer, LinearAttentionLayer):
        return
    if any(layer.has_previous_state.values()):
        raise ValueError(
            "cache must be empty or filled after use_memory_ops(model), got one that the model filled before"
        )
    memory = StaticMemoryLayer() if isinstance(cache, StaticCache) else MemoryLayer()
    memory.is_sliding = True  # so that masks are as long as the keys of a layer of full attention
    if layer.record_past:
        memory.activate_past_recording()
    cache.layers[layer_idx] = memory


def storage_of(bits: CacheBits, kind: str | None) -> Rows:
    """How keys and values of a kind are stored in a cache of these bits; None: of no kind that can have few bits."""
    if kind is None or bits is ALL_BITS:
        return PLAIN
    return Rows(bits.of(f"{kind}.keys"), bits.of(f"{kind}.values"))


def keep_keys_and_values(cache: Cache, layer_idx: int, default: CacheBits) -> None:
    """Let an empty layer of attention of a cache store keys and values in the bits by default, unless it has bits.

    Raises:
        ValueError: if it is none that can have few bits.
    """
    layers = cache.layers
    if layer_idx < len(layers) and hasattr(layers[layer_idx], "rows"):
        return
    rows = storage_of(default, "attention")
    if layer_idx >= len(layers):
        if rows.is_packed:
            layers.extend(DynamicLayer() for _ in range(layer_idx + 1 - len(layers)))
            _pack_layer(cache, layer_idx, rows)
        return
    if layers[layer_idx].get_seq_length() == 0:
        _pack_layer(cache, layer_idx, rows)


def _pack_layer(cache: Cache, layer_idx: int, rows: Rows) -> None:
    layer = cache.layers[layer_idx]
    if rows.is_packed:
        if type(layer) not in PACKED:
            expected = "DynamicCache(config=model.config) or StaticCache(config=model.config, ...)"
            raise ValueError(
                f"cache must be a {expected} to have keys and values in few bits, got {cache}"
            )
        layer = _empty_like(layer, PACKED[type(layer)])
        cache.layers[layer_idx] = layer
    layer.rows = rows


def _empty_like(layer: Any, kind: type) -> Any:
    """An empty layer of another kind with the options of one that has read nothing."""
    other = kind.__new__(kind)
    other.__dict__.update(layer.__dict__)
    other.keys = other.values = None
    other.is_initialized = False
    return other


def set_bits(cache: Cache, bits: CacheBits) -> None:
    """Let an empty cache store its states in some bits; one that was filled goes on in those that it has.

    Raises:
        ValueError: if it was filled in other bits.
    """
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, MemoryLayer):
            if layer.is_initialized and not layer.holds(bits):
                _refuse_bits(i, layer.bits, bits)
            layer.bits = bits
        elif isinstance(layer, DynamicLayer | StaticLayer):
            wanted = storage_of(bits, "attention")
            if not layer.is_initialized or layer.get_seq_length() == 0:
                _pack_layer(cache, i, wanted)
            elif getattr(layer, "rows", PLAIN) != wanted:
                _refuse_bits(i, getattr(layer, "rows", PLAIN), wanted)


def keep_all(cache: Cache) -> None:
    """Let an empty cache store all bits of its states, through which gradients flow."""
    set_bits(cache, ALL_BITS)


def held_bits(cache: Cache) -> CacheBits:
    """The bits by kind of the states of a cache that are stored in few."""
    found: dict[Any, int] = {}
    for layer in cache.layers:
        if isinstance(layer, MemoryLayer):
            stored = layer.spec.values()
            found |= {state.name_of_kind: state.bits for state in stored if state.bits}
        elif rows := getattr(layer, "rows", None):
            parts = zip(ROWS, (rows.key_bits, rows.value_bits))
            found |= {f"attention.{part}": bits for part, bits in parts if bits}
    return CacheBits(tuple(sorted(found.items())))


def _refuse_bits(layer_idx: int, held: Any, wanted: Any) -> None:
    raise ValueError(
        f"cache_bits must be those of the cache, which goes on in the bits in which it began, got {wanted} for layer "
        f"{layer_idx} with {held}; leave cache_bits out, or make a new cache"
    )


def update(cache: Cache, layer_idx: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """`Cache.update`, after which a layer with a window holds the tokens of its window only.

    transformers' own holds views of all keys and values that it has just read, until it reads the next token.
    """
    held = cache.layers[layer_idx] if layer_idx < len(cache.layers) else None
    if held is not None and held.is_initialized and held.keys.ndim == 4:
        _check_rows(held, keys)
    seen = cache.update(keys, values, layer_idx)
    layer = cache.layers[layer_idx]
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.keys = owned(layer.keys)
        layer.values = owned(layer.values)
    return seen


def _check_rows(layer: Any, new: Tensor) -> None:
    """Raise ValueError if a layer holds keys of other heads or channels than new ones [B, H, T, D]."""
    held = layer.keys
    bits = getattr(layer, "rows", PLAIN).key_bits
    channels = new.shape[3] if bits is None else packed_bytes(new.shape[3], bits)
    if (held.shape[1], held.shape[3]) != (new.shape[1], channels):
        raise ValueError(
            f"cache must be one that this model has filled, with keys of {new.shape[1]} heads of {channels} in each "
            f"layer of attention, got one of another model, with {held.shape[1]} of {held.shape[3]}"
        )


def _writable(x: Tensor) -> Tensor:
    return x.clone() if x.is_inference() else x


def owned(x: Tensor) -> Tensor:
    """x, or a copy if x is a part of a larger tensor, which it would keep in memory."""
    functorch = torch._C._functorch
    if not torch.compiler.is_compiling() and functorch.is_functorch_wrapped_tensor(x):
        return x  # it does not show what it is a part of
    return x.clone() if x.untyped_storage().size() > x.numel() * x.element_size() else x


def check_has_layers(cache: Any, most: int) -> None:
    """Raise ValueError unless a cache is one of transformers with at most so many layers."""
    layers = getattr(cache, "layers", None)
    if not isinstance(cache, Cache) or layers is None:
        raise ValueError(
            f"cache must be made by DynamicCache(config=model.config) or be None, got {type(cache).__name__}"
        )
    if len(layers) > most:
        raise ValueError(
            f"cache must have the model's number of layers, {most}: make it with DynamicCache(config=model.config), "
            f"got one of another model, with {len(layers)}"
        )


def check_keys_and_values(cache: Cache, layer_idx: int, window: int | None) -> None:
    """Raise ValueError unless the layer of a cache holds keys and values for attention over a window, or over all."""
    if layer_idx >= len(cache.layers):
        is_made_when_written = cache.layer_class_to_replicate is not None
        if is_made_when_written:
            return
        found = f"{len(cache.layers)} layers"
    else:
        layer = cache.layers[layer_idx]
        has_keys = isinstance(layer, CacheLayerMixin) and not isinstance(
            layer, LinearAttentionCacheLayerMixin
        )
        held = getattr(layer, "sliding_window", window) if has_keys else None
        if has_keys and (held == window or not layer.is_sliding):
            return
        found = repr(layer)
    raise ValueError(
        f"cache must hold keys and values of {window or 'all'} tokens at layer {layer_idx}: make it with "
        f"DynamicCache(config=model.config), got one of another model, with {found}"
    )


def check_texts(cache: Cache, number: int) -> None:
    """Raise ValueError if the first layer of a cache has read another number of rows than `number`."""
    layer = cache.layers[0] if cache.layers else None
    if layer is None or not layer.is_initialized:
        return
    if isinstance(layer, MemoryLayer):
        found = layer.batch_size
    else:
        found = layer.keys.shape[0] if layer.keys.ndim == 4 else number
    if found != number:
        raise ValueError(
            f"cache must be of as many texts as there are rows of tokens, {number}, got one of {found}"
        )


def branch(cache: Cache) -> Cache:
    """A cache that goes on from the states of another: what it reads does not change the other."""
    other = copy.copy(cache)
    other.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in other.layers:
        if isinstance(layer, MemoryLayer):
            layer.states = dict(layer.states)
    return other


def copied(cache: Cache) -> Cache:
    """A copy of a cache, without gradients: `copy.deepcopy` refuses states that have them."""
    states = [x for layer in cache.layers for x in _tensors(layer)]
    return copy.deepcopy(cache, {id(x): x.detach().clone() for x in states})


def state_bytes(cache: Cache) -> int:
    """Bytes of memory that a cache holds for memories, keys and values.

    A tensor that is a part of a larger one counts as the larger one, since that stays in memory with it.
    """
    storages = [x.untyped_storage() for layer in cache.layers for x in _tensors(layer)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _tensors(layer) -> list[Tensor]:
    if isinstance(layer, MemoryLayer):
        return list(layer.states.values())
    held = [
        getattr(layer, name, None) for name in ("keys", "values", "conv_states", "recurrent_states")
    ]
    return [
        x
        for part in held
        for x in (part.values() if isinstance(part, dict) else [part])
        if x is not None
    ]
