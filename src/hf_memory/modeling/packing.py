"""What a batch may be; boundaries of packed sequences in it, and positions of tokens."""

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache
from transformers.utils.import_utils import is_tracing

from hf_memory.ops.masks import packed

PACKING = (
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "seq_idx",
)  # arguments of trainers


def packed_boundaries(
    inputs_embeds, attention_mask, position_ids, cache, kwargs: dict
) -> Tensor | None:
    """Boundaries [N + 1] int32 of packed sequences in the B * T tokens of a batch, or None if nothing is packed.

    Trainers declare packing by `cu_seq_lens_q`, by `seq_idx`, or by `position_ids` that start again; the first of these
    that is given decides for all layers. Positions start again at a token whose position is not larger than that of the
    token before it; positions that jump ahead do not. They count as packing only without a mask and a cache, which can
    have other reasons for such positions.

    Raises:
        ValueError: if `cu_seq_lens_q` does not divide the rows, `cu_seq_lens_k` is given without it or differs from it,
            or a mask or a cache is given with it or `seq_idx`.
    """
    B, T = inputs_embeds.shape[:2]
    cu_seqlens = kwargs.get("cu_seq_lens_q")
    seq_idx = kwargs.get("seq_idx")
    _check_keys(cu_seqlens, kwargs.get("cu_seq_lens_k"))
    if cu_seqlens is None and seq_idx is None:
        if position_ids is None or attention_mask is not None or cache is not None:
            return None
        starts_again = position_ids.expand(B, T).diff() <= 0
        if not is_tracing(starts_again) and not starts_again.any():
            return None
        return _boundaries(starts_again)
    if isinstance(attention_mask, dict) or not (attention_mask is None or attention_mask.all()):
        raise ValueError(
            "attention_mask must be all ones or None when cu_seq_lens_q or seq_idx packs sequences"
        )
    if cache is not None:
        raise ValueError("cache must be None when cu_seq_lens_q or seq_idx packs sequences")
    if cu_seqlens is None:
        return _boundaries(seq_idx.expand(B, T).diff() != 0)
    if not is_tracing(cu_seqlens):
        _check_cu_seq_lens(cu_seqlens, B, T)
    return cu_seqlens.to(torch.int32)


def _boundaries(is_another: Tensor) -> Tensor:
    """Boundaries [N + 1] int32, from whether each token [B, T - 1] is of another sequence than the one before it."""
    starts = F.pad(is_another, (1, 0), value=True)
    boundaries = starts.flatten().nonzero().flatten()
    return F.pad(boundaries, (0, 1), value=starts.numel()).to(torch.int32)


def _check_keys(of_queries: Tensor | None, of_keys: Tensor | None) -> None:
    """Refuse boundaries of keys that are not those of queries, since these alone are read."""
    if of_keys is None or is_tracing(of_keys):
        return
    if of_queries is None or not torch.equal(of_queries, of_keys.to(of_queries)):
        queries = None if of_queries is None else of_queries.tolist()
        raise ValueError(
            f"cu_seq_lens_k must be the same as cu_seq_lens_q={queries}, got {of_keys.tolist()}"
        )


def _check_cu_seq_lens(cu_seqlens: Tensor, B: int, T: int) -> None:
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != B * T or bounds != sorted(bounds):
        raise ValueError(
            f"cu_seq_lens_q must increase from 0 to the number of tokens, {B * T}, got {bounds}"
        )
    if missing := set(range(0, B * T, T)).difference(bounds):
        raise ValueError(
            f"cu_seq_lens_q must have the beginning of each row, such as {min(missing)}, got {bounds}"
        )


def flash_arguments(cu_seqlens: Tensor) -> dict[str, Any]:
    """What attention of transformers that computes no mask needs to know of packed sequences."""
    longest = int(cu_seqlens.diff().max())
    return {
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def check_ids(input_ids: Any) -> None:
    """Raise ValueError unless tokens are a tensor [B, T] with at least one."""
    if not isinstance(input_ids, Tensor) or input_ids.ndim != 2:
        given = (
            f"shape {tuple(input_ids.shape)}"
            if isinstance(input_ids, Tensor)
            else type(input_ids).__name__
        )
        raise ValueError(f"input_ids must be a tensor [B, T], a row for each text, got {given}")
    check_some_tokens("input_ids", input_ids)


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


def check_generate_inputs(name: str, rows: Any, attention_mask: Any) -> None:
    """Raise ValueError unless a call of `generate` has a token in each row, and a mask of as many rows, or of one.

    transformers drops a mask of ones before a forward pass could see it, but not the positions that it counts.
    """
    check_mask_type(attention_mask)
    if not isinstance(rows, Tensor):
        return
    check_some_tokens(name, rows)
    is_plain = isinstance(attention_mask, Tensor) and attention_mask.ndim == 2
    if is_plain and len(attention_mask) not in (1, len(rows)):
        raise ValueError(
            f"attention_mask must have a row for each text, [{len(rows)}, ...], got shape {tuple(attention_mask.shape)}"
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


def packed_positions(cu_seqlens: Tensor, inputs_embeds: Tensor) -> Tensor:
    """[B, T]: the position of each token in its own sequence."""
    B, T = inputs_embeds.shape[:2]
    return packed(cu_seqlens, B * T).position.view(B, T)


def are_finite(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[B, T]: whether all numbers x [B, T, D] of a token's packed sequence are finite."""
    largest = torch.linalg.vector_norm(x.detach(), torch.inf, -1)
    broken = F.pad((~largest.isfinite()).flatten().cumsum(0), (1, 0))[cu_seqlens].diff()
    return torch.repeat_interleave(
        broken == 0, cu_seqlens.diff(), output_size=largest.numel()
    ).view_as(largest)


def default_positions(inputs_embeds: Tensor, attention_mask, cache: Cache | None) -> Tensor:
    """[1 or B, T], positions counted without padding, so that padding does not change the rotation of a row."""
    T = inputs_embeds.shape[1]
    past = 0 if cache is None else cache.get_seq_length()
    if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
        return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -T:]
    return (torch.arange(T, device=inputs_embeds.device) + past)[None]
