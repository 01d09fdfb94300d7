"""Linear Transformer: softmax attention's kernel replaced by one of finite features. https://arxiv.org/abs/2006.16236."""

from huggingface_hub.dataclasses import strict
from transformers import GenerationMixin
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from hf_memory.mixers.far_memory import SlotMemory
from hf_memory.mixers.linear_attention import LinearAttentionMixer
from hf_memory.modeling.base import MemoryForCausalLM, MemoryModel, MemoryPreTrainedModel
from hf_memory.modeling.configuration import MemoryConfig, check_word
from hf_memory.ops.feature_maps import FEATURE_MAPS, RANDOM_FEATURE_MAPS


@strict
class LinearTransformerConfig(MemoryConfig):
    """Options of the linear attention mixer; the others are those of `MemoryConfig`.

    Args:
        feature_map (`str`, defaults to `"elu"`): features of queries and keys, one of `FEATURE_MAPS`.
        feature_dim (`int`, *optional*): random features a head, for `"favor"` and `"rfa"`.
        dpfp_nu (`int`, defaults to 3): rolled products, for `"dpfp"`.
        normalize (`bool`, defaults to `True`): divide by the sum of the weights, as softmax does.
        output_norm (`bool`, defaults to `False`): RMS norm of each head's output.
    """

    model_type = "hf_memory_linear"
    mixers = {**MemoryConfig.mixers, "memory": LinearAttentionMixer}
    far_memory = SlotMemory
    base_model_tp_plan = {
        **MemoryConfig.base_model_tp_plan,
        "layers.*.mixer.feature_map": "local_params",
        "layers.*.mixer.feature_map.q_weight": "colwise",
        "layers.*.mixer.feature_map.k_weight": "colwise",
        "layers.*.mixer.o_norm": "replicated_with_grad_allreduce",
    }

    feature_map: str = "elu"
    feature_dim: int | None = None
    dpfp_nu: int = 3
    normalize: bool = True
    output_norm: bool = False

    def validate_feature_map(self):
        """Check the words of this family."""
        check_word("feature_map", self.feature_map, FEATURE_MAPS)
        if self.feature_map in RANDOM_FEATURE_MAPS and not self.feature_dim:
            raise ValueError(
                f"feature_dim must be set when feature_map is {self.feature_map!r}, got {self.feature_dim}"
            )


class LinearTransformerPreTrainedModel(MemoryPreTrainedModel):
    """What transformers must know of this family."""

    config: LinearTransformerConfig


class LinearTransformerModel(MemoryModel):
    """The Linear Transformer without a head."""

    config: LinearTransformerConfig


class LinearTransformerForCausalLM(MemoryForCausalLM, GenerationMixin):
    """The Linear Transformer that predicts the next token."""

    config: LinearTransformerConfig
    model_class = LinearTransformerModel


class LinearTransformerForSequenceClassification(GenericForSequenceClassification, LinearTransformerPreTrainedModel):
    """The Linear Transformer that puts a label on a sequence."""


class LinearTransformerForTokenClassification(GenericForTokenClassification, LinearTransformerPreTrainedModel):
    """The Linear Transformer that puts a label on each token."""
