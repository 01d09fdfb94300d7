"""Checks of what a model is given: tokens, masks and positions."""

import warnings
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache
from transformers.utils.import_utils import is_tracing

from hf_memory.ops.inputs import shape_or_type


def check_rows(name: str, rows: Any) -> None:
    """Raise ValueError unless rows, tokens [B, T] or embeddings [B, T, hidden_size], are a tensor with a token."""
    is_embedded = name == "inputs_embeds"
    shape = "[B, T, hidden_size]" if is_embedded else "[B, T]"
    if not isinstance(rows, Tensor) or rows.ndim != 2 + is_embedded:
        raise ValueError(
            f"{name} must be a tensor {shape}, a row for each text, got {shape_or_type(rows)}"
        )
    check_some_tokens(name, rows)


def check_some_tokens(name: str, rows: Tensor) -> None:
    """Raise ValueError unless rows [B, T, ...] have a token."""
    if 0 in rows.shape:
        raise ValueError(
            f"{name} must have at least one row and one token, got shape {tuple(rows.shape[:2])}"
        )


def check_mask_length(inputs_embeds: Tensor, attention_mask, cache: Cache | None) -> None:
    """Raise ValueError unless an attention_mask of two dimensions covers the tokens of the past and the new ones.

    Its rows are those of the tokens, or one for all of them.
    """
    check_mask_type(attention_mask)
    if (
        not isinstance(attention_mask, Tensor)
        or attention_mask.ndim != 2
        or is_tracing(attention_mask)
    ):
        return
    B, T = inputs_embeds.shape[:2]
    rows, length = attention_mask.shape
    past = 0 if cache is None else int(cache.get_seq_length())
    if length != past + T or rows not in (1, B):
        raise ValueError(
            f"attention_mask must be [B, past + T], [{B}, {past + T}] for {past} tokens in the cache and {T} new ones, "
            f"got shape {tuple(attention_mask.shape)}"
        )


def of_bools(attention_mask: Any) -> Any:
    """A mask, as bools if it has two dimensions: what is not 0 is a token, as in transformers."""
    is_plain = isinstance(attention_mask, Tensor) and attention_mask.ndim == 2
    return attention_mask.bool() if is_plain else attention_mask


def check_generate_inputs(name: str, rows: Any, attention_mask: Any) -> None:
    """Raise ValueError unless a call of `generate` has a token in each row, and a mask of as many rows, or of one.

    transformers drops a mask of ones before a forward pass could see it, but not the positions that it counts.
    """
    check_mask_type(attention_mask)
    if not name:
        return
    check_rows(name, rows)
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2:
        return
    B, T = rows.shape[:2]
    given = tuple(attention_mask.shape)
    if given[0] not in (1, B):
        raise ValueError(
            f"attention_mask must have a row for each text, [{B}, ...], got shape {given}"
        )
    if given[1] < T:
        raise ValueError(
            f"attention_mask must cover all tokens, [{B}, {T}] and those of a cache before them, got shape {given}"
        )


def check_positions(inputs_embeds: Tensor, position_ids: Tensor | None) -> None:
    """Raise ValueError unless positions are those of the new tokens, in one row for all or in a row for each."""
    if position_ids is None or is_tracing(position_ids):
        return
    B, T = inputs_embeds.shape[:2]
    if tuple(position_ids.shape) not in ((1, T), (B, T)):
        raise ValueError(
            f"position_ids must be [1 or B, T], [{B}, {T}], got shape {tuple(position_ids.shape)}"
        )


def warn_beyond_positions(config: Any, inputs_embeds: Tensor, cache: Cache | None) -> None:
    """Warn, once, where a text is read that is longer than the positions with which a model was trained.

    A token that is decoded alone is not looked at: `generate` of transformers says it, and a static cache has its
    length on the GPU.
    """
    T = inputs_embeds.shape[1]
    if T == 1 or is_tracing(inputs_embeds):
        return
    past = 0 if cache is None else int(cache.get_seq_length())
    most = config.max_position_embeddings
    if past + T > most:
        warnings.warn(
            f"the text has more tokens than the model's max_position_embeddings={most}, for which it was trained: it "
            "is read, but how good predictions are beyond them is unknown",
            stacklevel=2,
        )


def check_mask_type(attention_mask: Any) -> None:
    """Raise ValueError unless a mask is a tensor, or a dict with one for each layer type, or None."""
    if not (attention_mask is None or isinstance(attention_mask, Tensor | dict)):
        raise ValueError(
            "attention_mask must be a tensor [B, past + T], zero at padding, or a dict with one for each layer type, "
            f"got {type(attention_mask).__name__}"
        )
