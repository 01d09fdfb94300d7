"""What a language model has lost or kept: plain functions of a model and tokens."""

from hf_memory.evaluation.efficiency import (
    cache_bytes,
    cache_bytes_after,
    kv_cache_bytes,
    layer_types,
    tokens_per_second,
)
from hf_memory.evaluation.language import Agreement, agreement, copy_gain, perplexity
from hf_memory.evaluation.plots import plot_conversion

__all__ = [
    "Agreement",
    "agreement",
    "cache_bytes",
    "cache_bytes_after",
    "copy_gain",
    "kv_cache_bytes",
    "layer_types",
    "perplexity",
    "plot_conversion",
    "tokens_per_second",
]
