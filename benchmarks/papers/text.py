"""Bytes of Python's language reference, which every Python has: a text to learn, and its end to be asked about."""

from functools import cache

import torch
from torch import Tensor

from hf_memory.files.manual import sections

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


@cache
def text() -> tuple[Tensor, Tensor]:
    """Nine tenths to learn, and the rest."""
    tokens = torch.tensor(list("".join(sections()).encode()))
    return tuple(tokens.split([len(tokens) * 9 // 10, len(tokens) - len(tokens) * 9 // 10]))


def passages(
    length: int, rows: int, generator: torch.Generator, *, held_out: bool = False
) -> tuple[Tensor, Tensor]:
    """Bytes [B, T] from random places, and the byte after each."""
    tokens = text()[held_out]
    starts = torch.randint(len(tokens) - length, (rows, 1), generator=generator)
    both = tokens[starts + torch.arange(length + 1)]
    return both[:, :-1], both[:, 1:]
