"""Boundaries of packed sequences in a batch, and positions of tokens."""

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
