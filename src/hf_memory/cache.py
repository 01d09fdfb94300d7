"""The recurrent part of a transformers cache: named states of fixed size instead of growing keys and values.

A config that lists "memory" in `layer_types` gets a `MemoryLayer` at that place of every `DynamicCache(config=...)`
and `StaticCache(config=...)`; generate makes these caches by itself.
"""

import torch
from torch import Tensor
from transformers.cache_utils import (
    STATIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    LinearAttentionCacheLayerMixin,
)
from transformers.masking_utils import LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING, create_recurrent_attention_mask


class MemoryLayer(LinearAttentionCacheLayerMixin, CacheLayerMixin):
    """States of one mixer by name, the batch in their first dimension, and the number of tokens they have seen.

    Outside autograd a state is overwritten in place, so its address is fixed from the first write on; with gradients
    enabled it is replaced, since the graph may still need the old one.
    """

    _layer_type = "memory"  # registers the class with DynamicCache
    is_compileable = False
    is_croppable = False
    is_sliding = False

    def __init__(self, **kwargs):
        CacheLayerMixin.__init__(self, **kwargs)
        self.states: dict[str, Tensor] = {}
        self.seen_tokens = 0
        self.device: torch.device | None = None

    def read(self) -> dict[str, Tensor]:
        """The states by name; empty before the first write and after a reset, which means an empty memory."""
        return self.states if self.seen_tokens else {}

    def write(self, num_tokens: int, **states: Tensor) -> None:
        """Take over the states of a mixer that has consumed `num_tokens` more tokens."""
        for name, state in states.items():
            old = self.states.get(name)
            if old is not None and _alike(old, state) and not torch.is_grad_enabled():
                old.copy_(state)
            else:
                self.states[name] = state
        self.seen_tokens += num_tokens
        self.is_initialized = True

    @property
    def batch_size(self) -> int:
        """Rows of the states. Absent before the first write, as for transformers' own layers."""
        if not self.states:
            raise AttributeError("an empty memory has no batch size")
        return next(iter(self.states.values())).shape[0]

    @property
    def has_previous_state(self) -> dict[int, bool]:
        """Whether anything was written, in the form that `Cache.has_previous_state` asks for."""
        return {0: self.seen_tokens > 0}

    def get_seq_length(self) -> int:
        """Tokens seen so far."""
        return self.seen_tokens

    def get_max_length(self) -> int:
        """-1: there is no maximum."""
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.13

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) of the padding mask that covers the past and the query."""
        return self.seen_tokens + query_length, 0

    def reset(self) -> None:
        """Forget everything; the tensors stay where they are."""
        for state in self.states.values():
            state.zero_()
        self.seen_tokens = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` was."""
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, copies side by side."""
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def offload(self) -> None:
        """Move the states to the CPU until `prefetch`."""
        if self.states:
            self.device = next(iter(self.states.values())).device
        self._map(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Bring offloaded states back to their device."""
        if self.device is not None:
            self._map(lambda x: x.to(self.device, non_blocking=True))

    def activate_past_recording(self) -> None:
        """Refused: see `crop`."""
        self.crop(0)

    def crop(self, tokens_to_remove: int) -> None:
        """A state cannot be read backwards.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("a memory layer cannot be cropped: its state does not keep the tokens it was made from")

    def _map(self, change) -> None:
        self.states = {name: change(state) for name, state in self.states.items()}

    def update(self, *args, **kwargs):
        """Refused: a memory has states, not keys and values."""
        raise RuntimeError("a memory layer has no keys and values; use read() and write()")

    def lazy_initialization(self, *args, **kwargs) -> None:
        """Nothing to allocate: a missing state means an empty memory."""

    update_conv_state = update
    update_recurrent_state = update


class StaticMemoryLayer(MemoryLayer):
    """The same in a StaticCache, whose attention layers need masks that are made only if every layer says so here."""

    _layer_type = None
    is_compileable = True


STATIC_LAYER_TYPE_MAPPING["memory"] = StaticMemoryLayer
LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING["memory"] = create_recurrent_attention_mask


def _alike(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype and x.device == y.device


def memory_layer(cache: Cache, layer_idx: int) -> MemoryLayer:
    """The memory layer of a cache.

    Raises:
        ValueError: if the cache was not made for the model's config.
    """
    if layer_idx >= len(cache.layers) or not isinstance(cache.layers[layer_idx], MemoryLayer):
        raise ValueError(
            f"past_key_values must hold a memory at layer {layer_idx}: make it with "
            f"DynamicCache(config=model.config), got {cache}"
        )
    return cache.layers[layer_idx]


def state_bytes(cache: Cache) -> int:
    """Bytes of all tensors that a cache holds: memories, keys and values."""
    return sum(x.numel() * x.element_size() for layer in cache.layers for x in _tensors(layer))


def _tensors(layer) -> list[Tensor]:
    if isinstance(layer, MemoryLayer):
        return list(layer.states.values())
    return [x for x in (layer.keys, layer.values) if x is not None]
