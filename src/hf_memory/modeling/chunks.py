"""Long rows in the memory of short ones: a row is read in chunks, which are computed again in the backward pass."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache, DynamicCache

from hf_memory.cache import branch, keep_all
from hf_memory.modeling.inputs import check_mask_length
from hf_memory.modeling.packing import packed_boundaries


def read_in_chunks(
    model,
    inputs_embeds: Tensor,
    chunk_length: int,
    attention_mask: Tensor | dict | None,
    position_ids: Tensor | None,
    given: Cache | None,
    **kwargs,
) -> tuple[Tensor, Cache, Tensor | None]:
    """Read rows [B, T, hidden_size] chunk by chunk, each after the states of a cache that has read those before.

    Gradients flow through the states, which have all their bits, and are those of whole rows without `cache_bits`.
    Between the forward and the backward pass only outputs and these states are held.

    Args:
        model: a `MemoryModel`.
        inputs_embeds: the embedded tokens.
        chunk_length: tokens of a chunk.
        attention_mask: [B, T], zero at padding, or None.
        position_ids: [1 or B, T], or None.
        given: the cache that the model was given, of which there must be none.
        **kwargs: further arguments of the model.

    Returns:
        The last hidden states [B, T, hidden_size], the cache, and losses of the model's own [B, T], if it has any.

    Raises:
        ValueError: if the model or the rows cannot be divided.
    """
    if given is not None:
        raise ValueError(
            "chunk_length must be None with a cache, since the chunks have one of their own"
        )
    for name in ("output_hidden_states", "output_attentions"):
        if kwargs.get(name, getattr(model.config, name, False)):
            raise ValueError(f"chunk_length must be None with {name}, which is not kept of chunks")
    check_divisible(
        model, inputs_embeds, attention_mask, position_ids, kwargs, "chunk_length must be None"
    )

    def read(x: Tensor, start: int, cache: Cache) -> tuple[Tensor, Tensor | None, Cache]:
        here = slice(start, start + x.shape[1])
        cache = branch(cache)
        mask = None if attention_mask is None else attention_mask[:, : here.stop]
        positions = None if position_ids is None else position_ids[:, here]
        out = model(
            inputs_embeds=x, attention_mask=mask, position_ids=positions, cache=cache, **kwargs
        )
        return out.last_hidden_state, out.own_losses, cache

    T = inputs_embeds.shape[1]
    cache = DynamicCache(config=model.config)
    if torch.is_grad_enabled():
        keep_all(cache)
    outputs = []
    losses = []
    for start, x in zip(range(0, T, chunk_length), inputs_embeds.split(chunk_length, 1)):
        if torch.is_grad_enabled():
            output, own_losses, cache = checkpoint(read, x, start, cache, use_reentrant=False)
        else:
            output, own_losses, cache = read(x, start, cache)
        outputs.append(output)
        losses += [] if own_losses is None else [own_losses]
    return torch.cat(outputs, 1), cache, torch.cat(losses, 1) if losses else None


def check_divisible(
    model, rows: Tensor, attention_mask, position_ids: Tensor | None, kwargs: dict, otherwise: str
) -> None:
    """Raise ValueError, which begins with `otherwise`, unless a model can read rows [B, T, ...] in parts."""
    check_mask_length(rows, attention_mask, None)
    if torch.is_grad_enabled():
        check_passes_gradients(model, otherwise)
    if model.training and any(layer.gradient_checkpointing for layer in model.layers):
        raise ValueError(
            f"{otherwise} with activation_checkpointing, which computes layers again without a cache"
        )
    if packed_boundaries(rows, attention_mask, position_ids, None, kwargs) is not None:
        raise ValueError(f"{otherwise} with packed sequences, which a cache does not separate")
    if not (attention_mask is None or isinstance(attention_mask, Tensor)):
        raise ValueError(f"{otherwise} with a mask for each layer type")


def check_passes_gradients(model, otherwise: str) -> None:
    """Raise ValueError, which begins with `otherwise`, unless parts of a row give the gradients of the whole row."""
    if stops := {
        type(layer.mixer).__name__ for layer in model.layers if not layer.mixer.passes_gradients
    }:
        raise ValueError(
            f"{otherwise} with {', '.join(sorted(stops))}: keys before a segment get gradients of their own, "
            "which do not flow through states"
        )
