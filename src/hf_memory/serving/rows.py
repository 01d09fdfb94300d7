"""Rows of a running batch: caches of single texts are joined into one, and taken out again.

Rows of unequal length are padded on the left, like a batch of prompts. States of fixed size need no padding.
"""

import copy

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from hf_memory.cache import MemoryLayer, owned


def check_layers(cache: Cache, model: PreTrainedModel) -> None:
    """Raise ValueError unless a cache has the layers that this model's DynamicCache has."""
    kinds = [type(layer).__name__ for layer in DynamicCache(config=model.config).layers]
    given = [type(layer).__name__ for layer in cache.layers]
    if given != kinds:
        raise ValueError(f"cache must be a DynamicCache(config=model.config), with layers {kinds}, got {given}")


def join(cache: DynamicCache, other: DynamicCache) -> DynamicCache:
    """Append the rows of another cache; the shorter one is padded on the left."""
    length = max(cache.get_seq_length(), other.get_seq_length())
    for one, more in zip(cache.layers, other.layers, strict=True):
        if isinstance(one, MemoryLayer):
            one.join(more, length)
            continue
        for name in ("keys", "values"):
            setattr(one, name, torch.cat([_padded(one, name, length), _padded(more, name, length)]))
        if isinstance(one, DynamicSlidingWindowLayer):
            one.cumulative_length = length
    return cache


def keep(cache: DynamicCache, rows: list[int], length: int) -> None:
    """Keep some rows, and the last `length` tokens of keys and values."""
    cache.batch_select_indices(torch.tensor(rows))
    for layer in cache.layers:
        if isinstance(layer, MemoryLayer):
            layer.keep_last(length)
            continue
        kept = min(length, held(layer, length))
        layer.keys, layer.values = (owned(x[..., -kept:, :]) for x in (layer.keys, layer.values))
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = length


def take(cache: DynamicCache, row: int, length: int) -> DynamicCache:
    """A copy of one row, without its padding."""
    alone = copy.deepcopy(cache)
    keep(alone, [row], length)
    return alone


def held(layer: DynamicLayer, length: int) -> int:
    """Number of tokens whose keys a layer holds after it has seen `length` tokens."""
    return min(length, layer.sliding_window - 1) if isinstance(layer, DynamicSlidingWindowLayer) else length


def _padded(layer: DynamicLayer, name: str, length: int) -> Tensor:
    x = getattr(layer, name)
    return F.pad(x, (0, 0, held(layer, length) - x.shape[-2], 0))
