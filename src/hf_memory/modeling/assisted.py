"""Assisted decoding and prompt lookup after a cache that has read the beginning of the text.

transformers reads the whole text once more behind such a cache. Its loop passes the arguments that it was called with
to two methods of the model, in this order; so the first one notes there what was read, for the second one.
"""

from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from hf_memory.cache_argument import CACHE

READ = "num_tokens_read"  # name of the note


def note_read(arguments: dict[str, Any], config: GenerationConfig, input_ids: Tensor) -> None:
    """Note how many tokens a cache has read, in arguments of a forward pass, if `input_ids` [1, T] have these too.

    Raises:
        ValueError: if they are new tokens alone, with a mask that has padding.
    """
    cache = arguments.get(CACHE)
    read = 0 if cache is None else cache.get_seq_length()
    if not read:
        return
    embeds = arguments.get("inputs_embeds")
    given = (input_ids if embeds is None else embeds).shape[1]
    mask = arguments.get("attention_mask")
    covered = getattr(config, "_mask_length", -1) if mask is None else mask.shape[1]
    if covered == given:
        arguments[READ] = read
    elif mask is not None:
        raise ValueError(
            "attention_mask must have no padding, if assisted decoding or prompt lookup gets new tokens alone after a "
            "cache; got a mask with padding"
        )


def sequence_length(
    arguments: dict[str, Any], input_ids: Tensor, next_sequence_length: int | None
) -> int | None:
    """How many of the last tokens [1, T] a forward pass reads, by the note, which is removed; None: all."""
    read = arguments.pop(READ, None)
    if read is None or not arguments.get("is_first_iteration", False):
        return next_sequence_length
    embeds = arguments.get("inputs_embeds")
    return (input_ids if embeds is None else embeds).shape[1] - read
