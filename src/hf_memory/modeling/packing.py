"""Boundaries of packed sequences in a batch, and positions of tokens."""

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache
from transformers.masking_utils import find_packed_sequence_indices

from hf_memory.ops.masks import packed


def packed_boundaries(inputs_embeds, attention_mask, position_ids, cache, kwargs: dict) -> Tensor | None:
    """Boundaries [N + 1] int32 of packed sequences in the B * T tokens of a batch, or None if nothing is packed.

    Trainers declare packing by `cu_seq_lens_q`, by `seq_idx`, or by `position_ids` that restart at zero. The last one
    counts as packing only without a mask and a cache, which can have other reasons for such positions.
    """
    B, T = inputs_embeds.shape[:2]
    cu_seqlens, seq_idx = kwargs.get("cu_seq_lens_q"), kwargs.get("seq_idx")
    if cu_seqlens is None and seq_idx is None:
        if position_ids is None or attention_mask is not None or cache is not None:
            return None
        seq_idx = find_packed_sequence_indices(position_ids.expand(B, T))
        if seq_idx is None:
            return None
    elif isinstance(attention_mask, Tensor) and not attention_mask.all():
        raise ValueError("attention_mask must be all ones or None when cu_seq_lens_q or seq_idx packs sequences")
    elif cache is not None:
        raise ValueError("cache must be None when cu_seq_lens_q or seq_idx packs sequences")
    if cu_seqlens is not None:
        if cu_seqlens[-1] != B * T:
            raise ValueError(f"cu_seq_lens_q must end at the number of tokens, {B * T}, got {int(cu_seqlens[-1])}")
        return cu_seqlens.to(torch.int32)
    starts = torch.ones(B, T, dtype=torch.bool, device=inputs_embeds.device)
    starts[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    starts = starts.flatten().nonzero().flatten()
    return torch.cat([starts, starts.new_full((1,), B * T)]).to(torch.int32)


def packed_positions(cu_seqlens: Tensor, inputs_embeds: Tensor) -> Tensor:
    """[B, T]: the position of each token in its own sequence."""
    B, T = inputs_embeds.shape[:2]
    return packed(cu_seqlens, B * T).position.view(B, T)


def are_finite(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[B, T]: whether all numbers x [B, T, D] of a token's packed sequence are finite."""
    largest = torch.linalg.vector_norm(x.detach(), torch.inf, -1)
    broken = F.pad((~largest.isfinite()).flatten().cumsum(0), (1, 0))[cu_seqlens].diff()
    return torch.repeat_interleave(broken == 0, cu_seqlens.diff(), output_size=largest.numel()).view_as(largest)


def default_positions(inputs_embeds: Tensor, attention_mask, cache: Cache | None) -> Tensor:
    """[1 or B, T], positions counted without padding, so that padding does not change the rotation of a row."""
    T = inputs_embeds.shape[1]
    past = 0 if cache is None else cache.get_seq_length()
    if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
        return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -T:]
    return (torch.arange(T, device=inputs_embeds.device) + past)[None]
