"""What a model's past costs: bytes of its cache, tokens a second."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.initialization import no_init_weights

from hf_memory.cache import MemoryLayer, state_bytes


@dataclass(frozen=True)
class Cost:
    """What one sequence of `context` tokens costs."""

    context: int
    cache_bytes: int  # once it is read
    reading: float  # tokens a second, all at once
    writing: float  # tokens a second, one by one, once it is read


def cost_by_context(model: PreTrainedModel, contexts: Iterable[int], *, new_tokens: int = 16) -> tuple[Cost, ...]:
    """Speed and memory of a model at several lengths; one sequence, the best of three runs."""
    return tuple(_cost(model, context, new_tokens) for context in contexts)


def _cost(model: PreTrainedModel, context: int, new_tokens: int) -> Cost:
    runs = [_reading_and_writing(model, context, new_tokens) for _ in range(3)]
    reading, writing = (max(rates) for rates in zip(*runs))
    return Cost(context, cache_bytes_after(model, context), reading, writing)


@torch.no_grad()
def cache_bytes_after(model: PreTrainedModel, num_tokens: int) -> int:
    """Bytes that a model's cache holds after it has read one sequence of so many tokens."""
    cache = DynamicCache(config=model.config)
    model(torch.zeros(1, num_tokens, dtype=torch.long, device=model.device), past_key_values=cache, use_cache=True)
    return state_bytes(cache)


@torch.no_grad()
def cache_bytes(config: PreTrainedConfig, num_tokens: int) -> int:
    """Bytes that the cache of a model with this config needs for one sequence of so many tokens; no weights needed.

    Attention layers keep the keys and values of all tokens, or of a window; a memory has the same size at any length.
    """
    kinds = layer_types(config)
    sizes = {"num_hidden_layers": len(set(kinds)), "vocab_size": 1, "layer_types": list(dict.fromkeys(kinds))}
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "mixer_types"))
    own = {name: x for name, x in (tokens | sizes).items() if name in config.to_dict()}
    sample = type(config)(**config.to_dict() | own)  # one layer of each type, without a vocabulary
    with torch.random.fork_rng(devices=[]), no_init_weights():
        model = AutoModelForCausalLM.from_config(sample)
    cache = DynamicCache(config=sample)
    model(torch.zeros(1, 1, dtype=torch.long), past_key_values=cache, use_cache=True)
    each = zip(dict.fromkeys(kinds), cache.layers)
    return sum(kinds.count(kind) * _layer_bytes(layer, num_tokens) for kind, layer in each)


def layer_types(config: PreTrainedConfig) -> list[str]:
    """The type of each layer; a config that does not say has attention of one kind."""
    given = getattr(config, "mixer_types", None) or getattr(config, "layer_types", None)
    return list(given or ["full_attention"] * config.num_hidden_layers)


def _layer_bytes(layer, num_tokens: int) -> int:
    if isinstance(layer, MemoryLayer):
        return sum(x.numel() * x.element_size() for x in layer.states.values())
    window = getattr(layer, "sliding_window", None)
    kept = num_tokens if window is None else min(num_tokens, window - 1)
    return kept * sum(x.numel() * x.element_size() for x in (layer.keys, layer.values))


def kv_cache_bytes(config: PreTrainedConfig, num_tokens: int) -> int:
    """Bytes of keys and values of so many tokens, if every layer of a model with this config were full attention."""
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    channels = config.num_key_value_heads * head_dim(config)
    return 2 * config.num_hidden_layers * channels * num_tokens * dtype.itemsize


def head_dim(config: PreTrainedConfig) -> int:
    """Channels of a head of attention; not every config says."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


@torch.no_grad()
def _reading_and_writing(model: PreTrainedModel, context: int, new_tokens: int) -> tuple[float, float]:
    """Tokens a second of a prefill, and of greedy decoding after it."""
    input_ids = torch.arange(context, device=model.device)[None] % model.config.vocab_size
    cache = DynamicCache(config=model.config)
    start = time.perf_counter()
    token = model(input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits.argmax(-1)
    token.cpu()  # wait for the device
    read = time.perf_counter()
    for _ in range(new_tokens):
        token = model(token, past_key_values=cache, use_cache=True).logits.argmax(-1)
    token.cpu()
    return context / (read - start), new_tokens / (time.perf_counter() - read)
