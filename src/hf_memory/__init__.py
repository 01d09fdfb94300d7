"""Language models whose past is a memory instead of a growing KV cache.

Importing this package registers every family with transformers' Auto classes.
"""

from importlib import import_module
from typing import Any

from hf_memory.export import export_model
from hf_memory.feed_forward import parameter_groups
from hf_memory.integrations.native import use_memory_ops
from hf_memory.modeling import FAMILIES, Family
from hf_memory.modeling.context_parallel import context_parallel
from hf_memory.modeling.delta_net import (
    DeltaNetConfig,
    DeltaNetForCausalLM,
    DeltaNetForSequenceClassification,
    DeltaNetForTokenClassification,
    DeltaNetModel,
)
from hf_memory.modeling.deltaformer import (
    DeltaFormerConfig,
    DeltaFormerForCausalLM,
    DeltaFormerForSequenceClassification,
    DeltaFormerForTokenClassification,
    DeltaFormerModel,
)
from hf_memory.modeling.gated_linear_attention import (
    GatedLinearAttentionConfig,
    GatedLinearAttentionForCausalLM,
    GatedLinearAttentionForSequenceClassification,
    GatedLinearAttentionForTokenClassification,
    GatedLinearAttentionModel,
)
from hf_memory.modeling.linear_transformer import (
    LinearTransformerConfig,
    LinearTransformerForCausalLM,
    LinearTransformerForSequenceClassification,
    LinearTransformerForTokenClassification,
    LinearTransformerModel,
)
from hf_memory.modeling.memory_mosaic import (
    MemoryMosaicConfig,
    MemoryMosaicForCausalLM,
    MemoryMosaicForSequenceClassification,
    MemoryMosaicForTokenClassification,
    MemoryMosaicModel,
)
from hf_memory.modeling.rwkv7 import (
    Rwkv7Config,
    Rwkv7ForCausalLM,
    Rwkv7ForSequenceClassification,
    Rwkv7ForTokenClassification,
    Rwkv7Model,
)
from hf_memory.modeling.titans import (
    TitansConfig,
    TitansForCausalLM,
    TitansForSequenceClassification,
    TitansForTokenClassification,
    TitansModel,
)
from hf_memory.modeling.transformer import (
    MemoryTransformerConfig,
    MemoryTransformerForCausalLM,
    MemoryTransformerForSequenceClassification,
    MemoryTransformerForTokenClassification,
    MemoryTransformerModel,
)
from hf_memory.serving import Conversation, load_memory, save_memory

__version__ = "0.2.0"

__all__ = [
    "FAMILIES",
    "Conversation",
    "DeltaFormerConfig",
    "DeltaFormerForCausalLM",
    "DeltaFormerForSequenceClassification",
    "DeltaFormerForTokenClassification",
    "DeltaFormerModel",
    "DeltaNetConfig",
    "DeltaNetForCausalLM",
    "DeltaNetForSequenceClassification",
    "DeltaNetForTokenClassification",
    "DeltaNetModel",
    "Family",
    "GatedLinearAttentionConfig",
    "GatedLinearAttentionForCausalLM",
    "GatedLinearAttentionForSequenceClassification",
    "GatedLinearAttentionForTokenClassification",
    "GatedLinearAttentionModel",
    "LinearTransformerConfig",
    "LinearTransformerForCausalLM",
    "LinearTransformerForSequenceClassification",
    "LinearTransformerForTokenClassification",
    "LinearTransformerModel",
    "MemoryMosaicConfig",
    "MemoryMosaicForCausalLM",
    "MemoryMosaicForSequenceClassification",
    "MemoryMosaicForTokenClassification",
    "MemoryMosaicModel",
    "MemoryTransformerConfig",
    "MemoryTransformerForCausalLM",
    "MemoryTransformerForSequenceClassification",
    "MemoryTransformerForTokenClassification",
    "MemoryTransformerModel",
    "Rwkv7Config",
    "Rwkv7ForCausalLM",
    "Rwkv7ForSequenceClassification",
    "Rwkv7ForTokenClassification",
    "Rwkv7Model",
    "TitansConfig",
    "TitansForCausalLM",
    "TitansForSequenceClassification",
    "TitansForTokenClassification",
    "TitansModel",
    "context_parallel",
    "export_model",
    "load_memory",
    "parameter_groups",
    "save_memory",
    "shrink_cache",
    "use_memory_ops",
]


def __getattr__(name: str) -> Any:
    """Import what needs the conversion or decoding when it is asked for: that import takes a second."""
    if name in ("conversion", "decoding"):
        return import_module(f"{__name__}.{name}")
    if name != "shrink_cache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hf_memory.conversion.shrinking import shrink_cache

    return shrink_cache
