"""A comparison of a model that is about to be built with the memory that there is."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from hf_memory.files.ram import memory_for

SPANS = (  # options that are numbers of tokens whose keys and values a layer holds at once
    "full_attention_window",
    "kept_block_size",
    "memory_chunk_size",
    "memory_window",
    "num_sink_tokens",
    "past_window",
    "pattern_size",
    "segment_length",
    "sliding_window",
)


def check_room(config: Any, *parts: Callable[[], nn.Module]) -> None:
    """Raise ValueError if a model would need more memory than its device has, which is found without allocating it.

    Counted are the embedding, the parts, and the keys and values of one sequence in the widest window of one layer.

    Args:
        config: the config of the model.
        *parts: each makes a part of the model, which is made without data here, on the meta device.
    """
    here = torch.empty(0)
    if here.is_meta or isinstance(here, FakeTensor):
        return
    free = memory_for(here.device)
    needed = {"weights": _weights(config, parts), "its widest window": _window(config)}
    if (total := sum(needed.values())) > free:
        sizes = {**config.numbers, "vocab_size": config.vocab_size}
        numbers = {name: x for name, x in sizes.items() if type(x) is int}
        largest = max(numbers, key=lambda name: numbers[name])
        listed = ", ".join(f"{size / 1e9:,.1f} GB of {name}" for name, size in needed.items())
        raise ValueError(
            f"the config must describe a model that fits into memory, got at least {total / 1e9:,.1f} GB ({listed}) "
            f"for {free / 1e9:,.1f} GB of {here.device.type}; its largest number is {largest}={numbers[largest]}"
        )


def _weights(config: Any, parts: tuple[Callable[[], nn.Module], ...]) -> int:
    """Bytes of the embedding and of some parts."""
    try:
        with torch.device("meta"):
            modules = [make() for make in parts]
    except RuntimeError as error:  # a tensor of more bytes than 64 bits can count
        raise ValueError(
            f"the config must describe a model that fits into memory, got {error}"
        ) from error
    numbers = sum(x.numel() for part in modules for x in (*part.parameters(), *part.buffers()))
    return (numbers + config.vocab_size * config.hidden_size) * torch.get_default_dtype().itemsize


def _window(config: Any) -> int:
    """Bytes of the keys and values of a sequence in the widest window of a layer."""
    _, key_heads, value_heads, K, V = config.attention_heads
    longest = max(getattr(config, name, None) or 0 for name in SPANS)
    return longest * (key_heads * K + value_heads * V) * torch.get_default_dtype().itemsize
