"""The cost of a context: bytes of the cache, and tokens per second."""

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from hf_memory.cache import state_bytes
from hf_memory.cache_argument import cache_name
from hf_memory.evaluation.counts import check_counts
from hf_memory.evaluation.estimates import Estimate, best
from hf_memory.modeling.any_model import (
    check_config,
    head_dim,
    in_eval_mode,
    layer_types,
)
from hf_memory.modeling.configuration import MemoryConfig

LONG = 2048  # number of tokens beyond which speed is measured once
BYTES = "cache bytes in 16 bits"
READ = "tokens/s read"
WRITTEN = "tokens/s written"
FAR = 2**24  # number of tokens that is longer than any window


def cost(model: PreTrainedModel, context: int, *, new_tokens: int = 16) -> dict[str, Any]:
    """The cost of one sequence of some length, of which the last `new_tokens` are decoded; the best of three runs.

    Contexts of more than 2,048 tokens are read once, which takes long enough to be measured well.

    Returns:
        Bytes of the cache after all tokens in 16 bits, and estimates of the tokens per second of a prefill, and of
        decoding.
    """
    check_counts(context=context, new_tokens=new_tokens)
    runs = 3 if context <= LONG else 1
    caches, read, written = zip(
        *(_read_and_write(model, context, new_tokens, time.perf_counter) for _ in range(runs))
    )
    size = bytes_in_16_bits(model.config, caches[0], context)
    return {BYTES: size, READ: Estimate(read, of=best), WRITTEN: Estimate(written, of=best)}


def bytes_in_16_bits(config: PreTrainedConfig, cache: Cache, num_tokens: int) -> int:
    """Bytes of a cache that has read so many tokens, as if its model ran in 16 bits, in which caches are compared.

    States of ours that are not in the model's dtype keep theirs, as do those of other recurrent layers.
    """
    if isinstance(config, MemoryConfig):
        return cache_bytes(in_16_bits(config), num_tokens)
    layers: list[Any] = [x for x in cache.layers if getattr(x, "keys", None) is not None]
    rows = [x for layer in layers for x in (layer.keys, layer.values)]
    # of four bytes a number two, of eight six
    beyond = [x.untyped_storage().nbytes() * (1 - 2 / x.dtype.itemsize) for x in rows]
    return state_bytes(cache) - round(sum(beyond))


def reading_and_writing(
    model: PreTrainedModel,
    context: int,
    new_tokens: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[int, float, float]:
    """Bytes of the cache at the end, tokens per second of a prefill, and tokens per second of greedy decoding after it.

    Args:
        model: any causal model of transformers.
        context: tokens of the whole sequence.
        new_tokens: number of tokens at its end that are decoded one by one.
        clock: a clock in seconds: `time.perf_counter`, or `time.process_time` on a machine with other work.
    """
    check_counts(context=context, new_tokens=new_tokens)
    cache, read, written = _read_and_write(model, context, new_tokens, clock)
    return state_bytes(cache), read, written


@in_eval_mode
@torch.no_grad()
def _read_and_write(
    model: PreTrainedModel, context: int, new_tokens: int, clock: Callable[[], float]
) -> tuple[DynamicCache, float, float]:
    """The cache at the end, and what `reading_and_writing` returns after it."""
    new_tokens = min(new_tokens, context - 1)
    prompt = context - new_tokens  # some models have positions for `context` tokens only
    input_ids = torch.arange(prompt, device=model.device)[None] % model.config.vocab_size
    cache, past = empty_cache(model)
    start = clock()
    token = model(input_ids, **past, logits_to_keep=1).logits.argmax(-1)
    token.cpu()  # wait for the device
    read = clock()
    for _ in range(new_tokens):
        token = model(token, **past).logits.argmax(-1)
    token.cpu()
    return cache, prompt / (read - start), new_tokens / (clock() - read)


@in_eval_mode
@torch.no_grad()
def cache_bytes_after(model: PreTrainedModel, num_tokens: int) -> int:
    """Bytes that a model's cache holds after a sequence of `num_tokens` tokens, found by reading one."""
    check_counts(num_tokens=num_tokens)
    cache, past = empty_cache(model)
    model(torch.zeros(1, num_tokens, dtype=torch.long, device=model.device), **past)
    return state_bytes(cache)


def empty_cache(model: PreTrainedModel) -> tuple[DynamicCache, dict[str, Any]]:
    """An empty cache, and the arguments that pass it to a model, which differ in Mamba models."""
    cache = DynamicCache(config=model.config)
    return cache, {cache_name(model): cache, "use_cache": True}


def cache_bytes(config: PreTrainedConfig, num_tokens: int) -> int:
    """Bytes that the cache of a model with this config needs for a sequence of `num_tokens` tokens.

    Layers of this package declare their states. Layers of other models must be full or sliding attention.
    """
    check_config("config", config)
    check_counts(num_tokens=num_tokens)
    dtype = _dtype(config)
    if isinstance(config, MemoryConfig):
        return sum(
            state.nbytes(num_tokens, dtype)
            for spec in config.state_specs
            for state in spec.values()
        )
    kinds = layer_types(config)
    seen = {
        "full_attention": num_tokens,
        "sliding_attention": min(num_tokens, (getattr(config, "sliding_window", None) or 1) - 1),
    }
    if not set(kinds) <= set(seen):
        raise ValueError(
            f"config must have layers of attention or of hf_memory, got {', '.join(sorted(set(kinds)))}"
        )
    return sum(seen[kind] for kind in kinds) * _token_bytes(config)


def cache_share(student: PreTrainedConfig, teacher: PreTrainedConfig, num_tokens: int) -> float:
    """Bytes of a student's cache relative to its teacher's after `num_tokens` tokens, if both run in bfloat16."""
    check_config("student", student)
    check_config("teacher", teacher)
    ours, theirs = (cache_bytes(in_16_bits(config), num_tokens) for config in (student, teacher))
    return ours / theirs


def in_16_bits(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the same model in bfloat16."""
    config = copy.deepcopy(config)
    config.dtype = torch.bfloat16
    return config


def bytes_per_token(config: PreTrainedConfig) -> int:
    """Bytes by which the cache of a model with this config grows per token, once its windows are full."""
    return cache_bytes(config, FAR + 1) - cache_bytes(config, FAR)


def _dtype(config: PreTrainedConfig) -> torch.dtype:
    return config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32


def _token_bytes(config: PreTrainedConfig) -> int:
    """Bytes of the keys and values of a token in one layer."""
    return 2 * config.num_key_value_heads * head_dim(config) * _dtype(config).itemsize


def kv_cache_bytes(config: PreTrainedConfig, num_tokens: int) -> int:
    """Bytes of the keys and values of `num_tokens` tokens if all layers of this config had full attention."""
    check_config("config", config)
    check_counts(num_tokens=num_tokens)
    return config.num_hidden_layers * num_tokens * _token_bytes(config)
