"""The families. Importing this package registers each with transformers' Auto classes.

Tests, conversion and the Hub code loop over FAMILIES, which has an entry with the classes of each family.
"""

from hf_memory.modeling import delta_net as delta
from hf_memory.modeling import deltaformer, rwkv7, titans, transformer
from hf_memory.modeling import gated_linear_attention as gated
from hf_memory.modeling import linear_transformer as linear
from hf_memory.modeling import memory_mosaic as mosaic
from hf_memory.modeling.registration import AUTO_CLASSES, Family, register

__all__ = ["AUTO_CLASSES", "FAMILIES", "Family"]

FAMILIES = (
    Family(
        linear.LinearTransformerConfig,
        linear.LinearTransformerModel,
        linear.LinearTransformerForCausalLM,
        linear.LinearTransformerForSequenceClassification,
        linear.LinearTransformerForTokenClassification,
    ),
    Family(
        gated.GatedLinearAttentionConfig,
        gated.GatedLinearAttentionModel,
        gated.GatedLinearAttentionForCausalLM,
        gated.GatedLinearAttentionForSequenceClassification,
        gated.GatedLinearAttentionForTokenClassification,
    ),
    Family(
        delta.DeltaNetConfig,
        delta.DeltaNetModel,
        delta.DeltaNetForCausalLM,
        delta.DeltaNetForSequenceClassification,
        delta.DeltaNetForTokenClassification,
    ),
    Family(
        deltaformer.DeltaFormerConfig,
        deltaformer.DeltaFormerModel,
        deltaformer.DeltaFormerForCausalLM,
        deltaformer.DeltaFormerForSequenceClassification,
        deltaformer.DeltaFormerForTokenClassification,
        growth="token",
    ),
    Family(
        mosaic.MemoryMosaicConfig,
        mosaic.MemoryMosaicModel,
        mosaic.MemoryMosaicForCausalLM,
        mosaic.MemoryMosaicForSequenceClassification,
        mosaic.MemoryMosaicForTokenClassification,
        growth="token",
        is_student=False,
    ),
    Family(
        rwkv7.Rwkv7Config,
        rwkv7.Rwkv7Model,
        rwkv7.Rwkv7ForCausalLM,
        rwkv7.Rwkv7ForSequenceClassification,
        rwkv7.Rwkv7ForTokenClassification,
        is_student=False,
    ),
    Family(
        titans.TitansConfig,
        titans.TitansModel,
        titans.TitansForCausalLM,
        titans.TitansForSequenceClassification,
        titans.TitansForTokenClassification,
    ),
    Family(
        transformer.MemoryTransformerConfig,
        transformer.MemoryTransformerModel,
        transformer.MemoryTransformerForCausalLM,
        transformer.MemoryTransformerForSequenceClassification,
        transformer.MemoryTransformerForTokenClassification,
        growth="token",
    ),
)

for family in FAMILIES:
    register(family)
