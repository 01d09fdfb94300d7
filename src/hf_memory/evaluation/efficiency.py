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
    with torch.random.fork_rng(devices=[]):
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
def tokens_per_second(model: PreTrainedModel, *, prompt: int = 128, new_tokens: int = 32, repeats: int = 3) -> float:
    """Tokens a second of greedy decoding with a cache, one sequence, after a prompt of so many tokens; the best run."""
    return max(_decoding_rate(model, prompt, new_tokens) for _ in range(repeats))


def _decoding_rate(model: PreTrainedModel, prompt: int, new_tokens: int) -> float:
    input_ids = torch.arange(prompt, device=model.device)[None] % model.config.vocab_size
    cache = DynamicCache(config=model.config)
    token = model(input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits.argmax(-1)
    start = time.perf_counter()
    for _ in range(new_tokens):
        token = model(token, past_key_values=cache, use_cache=True).logits.argmax(-1)
    token.cpu()  # wait for the device
    return new_tokens / (time.perf_counter() - start)
