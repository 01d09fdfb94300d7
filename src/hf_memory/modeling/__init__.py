"""The families. Importing this package registers each with transformers' Auto classes.

Every entry of FAMILIES is a config class and its heads; contract tests, conversion and the Hub run over this tuple.
"""

from typing import NamedTuple

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from hf_memory.modeling import delta_net as delta
from hf_memory.modeling import deltaformer, titans
from hf_memory.modeling import gated_linear_attention as gated
from hf_memory.modeling import linear_transformer as linear
from hf_memory.modeling.base import MemoryConfig, MemoryForCausalLM, MemoryModel, MemoryPreTrainedModel


class Family(NamedTuple):
    """One family's classes; the Auto class that finds each is in AUTO_CLASSES under the same name."""

    config: type[MemoryConfig]
    model: type[MemoryModel]
    causal_lm: type[MemoryForCausalLM]
    sequence_classifier: type[MemoryPreTrainedModel]
    token_classifier: type[MemoryPreTrainedModel]


AUTO_CLASSES = {
    "config": AutoConfig,
    "model": AutoModel,
    "causal_lm": AutoModelForCausalLM,
    "sequence_classifier": AutoModelForSequenceClassification,
    "token_classifier": AutoModelForTokenClassification,
}

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
    ),
    Family(
        titans.TitansConfig,
        titans.TitansModel,
        titans.TitansForCausalLM,
        titans.TitansForSequenceClassification,
        titans.TitansForTokenClassification,
    ),
)

for family in FAMILIES:
    AutoConfig.register(family.config.model_type, family.config)
    for name in Family._fields[1:]:
        AUTO_CLASSES[name].register(family.config, getattr(family, name))
