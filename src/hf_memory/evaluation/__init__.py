"""Evaluation: plain functions of a model and tokens, for perplexity, agreement, recall and cost."""

from hf_memory.evaluation.efficiency import (
    bytes_per_token,
    cache_bytes,
    cache_bytes_after,
    cache_share,
    cost,
    kv_cache_bytes,
)
from hf_memory.evaluation.estimates import Estimate
from hf_memory.evaluation.held import coloured_text, held_tokens, text_of_tokens
from hf_memory.evaluation.language import (
    Agreement,
    agreement,
    agreement_by_position,
    copy_gain,
    perplexity,
    perplexity_by_position,
    recall_by_distance,
)
from hf_memory.evaluation.plots import plot_conversion, plot_heads, plot_task
from hf_memory.evaluation.tasks import (
    ITEMS,
    LENGTHS,
    OF_CARD,
    TASKS,
    Subject,
    evaluate,
    lengths_beyond,
    longest_window,
)
from hf_memory.evaluation.writing import PROMPTS
from hf_memory.modeling.any_model import layer_types

__all__ = [
    "ITEMS",
    "LENGTHS",
    "OF_CARD",
    "PROMPTS",
    "TASKS",
    "Agreement",
    "Estimate",
    "Subject",
    "agreement",
    "agreement_by_position",
    "bytes_per_token",
    "cache_bytes",
    "cache_bytes_after",
    "cache_share",
    "coloured_text",
    "copy_gain",
    "cost",
    "evaluate",
    "held_tokens",
    "kv_cache_bytes",
    "layer_types",
    "lengths_beyond",
    "longest_window",
    "perplexity",
    "perplexity_by_position",
    "plot_conversion",
    "plot_heads",
    "plot_task",
    "recall_by_distance",
    "text_of_tokens",
]
