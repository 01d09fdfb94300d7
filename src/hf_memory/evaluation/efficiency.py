"""What a model's past costs: bytes of its cache, tokens a second."""

import time

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache

from hf_memory.cache import MemoryLayer, state_bytes


@torch.no_grad()
def cache_bytes_after(model: PreTrainedModel, num_tokens: int) -> int:
    """Bytes that a model's cache holds after it has read one sequence of so many tokens."""
    cache = DynamicCache(config=model.config)
    model(torch.zeros(1, num_tokens, dtype=torch.long, device=model.device), past_key_values=cache, use_cache=True)
    return state_bytes(cache)


def cache_bytes(config: PreTrainedConfig, num_tokens: int) -> int:
    """Bytes that the cache of a model with this config needs for one sequence of so many tokens; no weights needed.

    Attention layers keep the keys and values of all tokens, or of a window; a memory has the same size at any length.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        cache = DynamicCache(config=config)
        model(torch.zeros(1, 1, dtype=torch.long), past_key_values=cache, use_cache=True)
    return sum(_layer_bytes(layer, num_tokens) for layer in cache.layers)


def _layer_bytes(layer, num_tokens: int) -> int:
    if isinstance(layer, MemoryLayer):
        return sum(x.numel() * x.element_size() for x in layer.states.values())
    window = getattr(layer, "sliding_window", None)
    kept = num_tokens if window is None else min(num_tokens, window - 1)
    return kept * sum(x.numel() * x.element_size() for x in (layer.keys, layer.values))


def kv_cache_bytes(config: PreTrainedConfig, num_tokens: int) -> int:
    """Bytes of keys and values of so many tokens, if every layer of a model with this config were full attention."""
    channels = config.num_key_value_heads * config.head_dim
    return 2 * config.num_hidden_layers * channels * num_tokens * (config.dtype or torch.float32).itemsize


@torch.no_grad()
def tokens_per_second(model: PreTrainedModel, *, prompt: int = 128, new_tokens: int = 64) -> float:
    """Tokens a second of greedy decoding with a cache, one sequence, after a prompt of so many tokens."""
    input_ids = torch.arange(prompt, device=model.device)[None] % model.config.vocab_size
    cache = DynamicCache(config=model.config)
    token = model(input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits.argmax(-1)
    start = time.perf_counter()
    for _ in range(new_tokens):
        token = model(token, past_key_values=cache, use_cache=True).logits.argmax(-1)
    token.cpu()  # wait for the device
    return new_tokens / (time.perf_counter() - start)
