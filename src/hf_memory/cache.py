"""The recurrent part of a transformers cache: named states of fixed size instead of growing keys and values.

Where a config's `layer_types` has "memory", `DynamicCache(config=...)` and `StaticCache(config=...)` have a
`MemoryLayer`. `generate` creates these caches itself.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)
from transformers.utils.import_utils import is_tracing

__all__ = ["MemoryLayer", "State", "StaticMemoryLayer", "memory_layer", "state_bytes"]

Growth = Literal["fixed", "log", "token"]  # how a state grows with the number of tokens
States = dict[str, Tensor]  # states of a mixer by name, each [B, ...]
Inputs = dict[str, Tensor]  # inputs of a mixer by name, each [B, T, ...]


@dataclass  # neither frozen nor a tuple, since transformers' exporters set the attributes of a cache
class State:
    """The declaration of a state of a mixer: a tensor whose first dimension is the batch, with a row for each sequence.

    Attributes:
        shape: shape of a row, or of each entry of a row if the state grows.
        dtype: its dtype; None: that of the model.
        growth: how the number of entries grows with the number of tokens: not at all, with its logarithm, or with it.
        at_most: number of tokens after which it stops growing; None: it does not.
        absent: value of entries that belong to no token of a row.
        largest: the largest value of whole numbers; None: the number of tokens.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None = torch.float32
    growth: Growth = "fixed"
    at_most: int | None = None
    absent: int = 0
    largest: int | None = None

    def places(self, num_tokens: int) -> tuple[int, ...]:
        """The number of entries of a row after some tokens, as a shape; empty if the state does not grow."""
        tokens = num_tokens if self.at_most is None else min(num_tokens, self.at_most)
        return {"fixed": (), "log": (tokens.bit_length(),), "token": (tokens,)}[self.growth]

    def nbytes(self, num_tokens: int, dtype: torch.dtype) -> int:
        """Bytes of this state after `num_tokens` tokens of one sequence, in a model of a dtype."""
        return math.prod((*self.places(num_tokens), *self.shape)) * (self.dtype or dtype).itemsize


Spec = dict[str, State]


@dataclass
class Stretch:
    """States, and recorded inputs that were read after them."""

    before: States
    inputs: list[Inputs] = field(default_factory=list)
    num_tokens: int = 0  # tokens of all inputs

    def cut(self, num_tokens: int) -> None:
        """Keep the inputs of the first `num_tokens` tokens."""
        kept, self.num_tokens = [], num_tokens
        for inputs in self.inputs:
            if num_tokens > 0:
                kept.append({name: x[:, :num_tokens] for name, x in inputs.items()})
            num_tokens -= _length(inputs)
        self.inputs = kept


class MemoryLayer(LinearAttentionCacheLayerMixin, CacheLayerMixin):
    """A cache layer with the states of one mixer by name, and the number of tokens that they have seen.

    The first dimension of each state is the batch. Without gradients a state is overwritten in place, so that its
    address does not change after the first write; with gradients it is replaced, since the graph may need the old one.

    A recurrent state cannot be rolled back by itself. To undo tokens, `activate_past_recording` keeps a copy of the
    states and, from then on, the inputs of the mixer. `crop` restores the copy, and the mixer replays the inputs of
    the tokens that stay before it reads new ones. At least the last `window` tokens since the recording began, or since
    the last crop, can be undone. What is recorded is reordered, copied and moved together with the states.
    """

    window = 256

    _layer_type = "memory"  # registers the class with DynamicCache
    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, **kwargs):
        CacheLayerMixin.__init__(self, **kwargs)
        self.states: States = {}
        self.spec: Spec = {}
        self.seen_tokens = 0
        self.record_past = False
        self.recorded: list[Stretch] = []
        self.is_behind = False  # the states are those before the last stretch, and its inputs must be replayed
        self.device: torch.device | None = None

    def read(self, num_tokens: int = 0) -> States:
        """The states by name, with room for `num_tokens` more tokens.

        Without an entry, which is so before the first write and after a reset, a memory is empty.
        """
        return self._with_room(self.states, self.seen_tokens + num_tokens) if self.is_initialized else {}

    def write(self, num_tokens: int, states: States, spec: Spec) -> None:
        """Store the states of a mixer after it has read `num_tokens` more tokens."""
        self.spec = spec
        self._store(states)
        self.seen_tokens += num_tokens
        self.is_initialized = True

    def record(self, inputs: Inputs) -> None:
        """Record the inputs that led to these states, and drop those that are too old to be undone."""
        last = self.recorded[-1]
        last.inputs.append({name: owned(x.detach()) for name, x in inputs.items()})
        last.num_tokens += _length(inputs)
        if last.num_tokens >= self.window:
            self.recorded = [last, Stretch(self._copied())]

    def _store(self, states: States) -> None:
        for name, state in states.items():
            old = self.states.get(name)
            if old is state:  # an op has updated it in place
                continue
            if old is not None and _alike(old, state) and not torch.is_grad_enabled():
                old.copy_(state)
            else:
                self.states[name] = owned(state)

    def _with_room(self, states: States, num_tokens: int) -> States:
        """Extend states that grow with the logarithm of tokens to `num_tokens`, by empty entries."""
        roomy = {}
        for name, x in states.items():
            state = self.spec[name]
            if state.growth == "log" and (missing := state.places(num_tokens)[0] - x.shape[1]) > 0:
                roomy[name] = F.pad(x, (*(0, 0) * len(state.shape), 0, missing))
        return states | roomy

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
        return self.seen_tokens

    def get_max_length(self) -> int:
        """-1: there is no maximum."""
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.13

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) of the padding mask that covers the past and the query."""
        return self.seen_tokens + query_length, 0

    def fill(self, states: States, seen_tokens: int) -> None:
        """Set the states, and the number of tokens that they have seen."""
        self._stop_recording()
        self.states = {name: owned(x) for name, x in states.items()}
        self.seen_tokens, self.is_initialized = seen_tokens, True

    def join(self, other: "MemoryLayer", length: int) -> None:
        """Append the rows of another layer. States that grow with the text are left-padded to `length` tokens."""
        ours, theirs = (layer._with_room(layer.states, length) for layer in (self, other))
        self.fill({name: self._joined(name, x, theirs[name]) for name, x in ours.items()}, length)

    def keep_last(self, length: int) -> None:
        """Keep the last `length` tokens of growing states, and drop entries that are empty at this length."""
        states = dict(self.states)
        for name, x in self.states.items():
            state = self.spec[name]
            if state.growth == "token":
                states[name] = x[:, -length:]
            elif state.growth == "log":
                states[name] = x[:, : state.places(length)[0]]
        self.fill(states, length)

    def _joined(self, name: str, *both: Tensor) -> Tensor:
        state = self.spec[name]
        if state.growth != "token":
            return torch.cat(both)
        length = max(x.shape[1] for x in both)
        before = [(*(0, 0) * len(state.shape), length - x.shape[1], 0) for x in both]
        return torch.cat([F.pad(x, pad, value=state.absent) for x, pad in zip(both, before)])

    def reset(self) -> None:
        """Empty the memory; the tensors keep their addresses."""
        for state in self.states.values():
            state.zero_()
        self.seen_tokens, self.is_initialized = 0, False
        self._stop_recording()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` was."""
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    batch_select_indices = reorder_cache

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
        """Undo the last tokens. When the mixer has replayed the remaining inputs, the recording starts anew.

        Args:
            tokens_to_remove: the number of tokens, as a negative number.

        Raises:
            RuntimeError: if so many tokens were not recorded.
            ValueError: if the number is positive.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove must be negative or 0, got {tokens_to_remove}")
        recorded = sum(stretch.num_tokens for stretch in self.recorded)
        if recorded < -tokens_to_remove:
            raise RuntimeError(
                f"a memory layer cannot undo {-tokens_to_remove} tokens: {recorded} were recorded since "
                "activate_past_recording() or the last crop()"
            )
        if tokens_to_remove:
            self._go_back(-tokens_to_remove)
            self.seen_tokens += tokens_to_remove
        elif self.record_past:
            self.activate_past_recording()

    def _go_back(self, num_tokens: int) -> None:
        while self.recorded[-1].num_tokens < num_tokens:
            num_tokens -= self.recorded.pop().num_tokens
        last = self.recorded[-1]
        last.cut(last.num_tokens - num_tokens)
        self._store(last.before)
        self.is_initialized, self.is_behind = bool(last.before), True

    @torch.no_grad()
    def catch_up(self, read: Callable[[Inputs, States], States]) -> None:
        """Let a mixer replay, from earlier states, the inputs that `crop` has kept."""
        states = self.read()
        for inputs in self.recorded[-1].inputs:
            states = read(inputs, self._with_room(states, self.seen_tokens))
        self._store(states)
        self.is_initialized, self.is_behind, self.recorded = bool(states), False, []
        if self.record_past:
            self.activate_past_recording()

    def _copied(self) -> States:
        return {name: state.detach().clone() for name, state in self.read().items()}

    def _stop_recording(self) -> None:
        self.record_past, self.recorded, self.is_behind = False, [], False

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        def changed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: change(x) for name, x in tensors.items()}

        self.states = changed(self.states)
        for stretch in self.recorded:
            stretch.before, stretch.inputs = changed(stretch.before), [changed(x) for x in stretch.inputs]

    def update(self, *args, **kwargs):
        """Not supported: a memory has states, not keys and values."""
        raise RuntimeError("a memory layer has no keys and values; use read() and write()")

    def lazy_initialization(self, *args, **kwargs) -> None:
        """Nothing to allocate: a missing state means an empty memory."""

    update_conv_state = update
    update_recurrent_state = update


class StaticMemoryLayer(MemoryLayer):
    """A `MemoryLayer` for a StaticCache, for torch.compile and CUDA graphs: its number of tokens is a tensor."""

    _layer_type = None
    is_compileable = True

    def __init__(self, max_cache_len: int = -1, **kwargs):
        super().__init__(**kwargs)
        self.seen_tokens = torch.zeros((), dtype=torch.long)

    def _store(self, states: States) -> None:
        super()._store(self._with_room(states, 0))
        if not self.is_initialized and not torch.compiler.is_compiling():
            self.seen_tokens = self.seen_tokens.to(next(iter(states.values())).device)
            for tensor in (self.seen_tokens, *self.states.values()):
                torch._dynamo.mark_static_address(tensor)

    def _with_room(self, states: States, num_tokens: int) -> States:
        """Extend states to the largest number of entries that they can have, so that no shape changes."""
        return super()._with_room(states, torch.iinfo(torch.long).max)

    def reset(self) -> None:
        """Empty the memory; the tensors keep their addresses."""
        seen = self.seen_tokens.zero_()
        super().reset()
        self.seen_tokens = seen


def padding_mask(config, inputs_embeds: Tensor, attention_mask: Tensor | None, **kwargs) -> Tensor | None:
    """A mask [B, T] that is false at padding among the present tokens; None without padding."""
    if attention_mask is None or attention_mask.ndim != 2:
        return None
    present = attention_mask[:, -inputs_embeds.shape[1] :]
    if not is_tracing(present) and present.all():
        return None
    return present.contiguous()  # or its strides change with the past, and graphs are recompiled


def _length(inputs: Inputs) -> int:
    return next(iter(inputs.values())).shape[1]


def _alike(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype and x.device == y.device


def memory_layer(cache: Cache, layer_idx: int) -> MemoryLayer:
    """The `MemoryLayer` of a cache at an index.

    Raises:
        ValueError: if the cache was not made for the model's config.
    """
    if layer_idx >= len(cache.layers) or not isinstance(cache.layers[layer_idx], MemoryLayer):
        raise ValueError(
            f"past_key_values must hold a memory at layer {layer_idx}: make it with "
            f"DynamicCache(config=model.config), got {cache}"
        )
    return cache.layers[layer_idx]


def update(cache: Cache, layer_idx: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """`Cache.update`, after which a layer with a window holds the tokens of its window only.

    transformers' own holds views of all keys and values that it has just read, until it reads the next token.
    """
    seen, layer = cache.update(keys, values, layer_idx), cache.layers[layer_idx]
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.keys, layer.values = owned(layer.keys), owned(layer.values)
    return seen


def owned(x: Tensor) -> Tensor:
    """x, or a copy if x is a part of a larger tensor, which it would keep in memory."""
    return x.clone() if x.untyped_storage().size() > x.numel() * x.element_size() else x


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
    held = [getattr(layer, name, None) for name in ("keys", "values", "conv_states", "recurrent_states")]
    return [x for part in held for x in (part.values() if isinstance(part, dict) else [part]) if x is not None]
