"""Linear Transformer: attention with a feature map in place of softmax. https://arxiv.org/abs/2006.16236."""

from hf_memory.mixers.far_memory import SlotMemory
from hf_memory.mixers.linear_attention import LinearAttentionMixer
from hf_memory.mixers.windowed import WindowedMixer
from hf_memory.modeling import base
from hf_memory.modeling.checks import check, check_word, strict
from hf_memory.modeling.configuration import MemoryConfig, of_mixers
from hf_memory.ops.feature_maps import FEATURE_MAPS, RANDOM_FEATURE_MAPS


@strict
class LinearTransformerConfig(MemoryConfig):
    """Config of the Linear Transformer; its other options are those of `MemoryConfig`.

    Args:
        feature_map (`str`, defaults to `"elu"`): feature map of queries and keys: `"elu"`, `"relu"`, `"identity"`,
            `"exp"`, `"dpfp"`, `"hedgehog"` (learned), `"taylor"`, `"favor"` or `"rfa"`.
        feature_dim (`int`, *optional*): number of random features of each head, for `"favor"` and `"rfa"`.
        normalize (`bool`, defaults to `True`): divide the output by the sum of the weights, as softmax does.
        output_norm (`bool`, defaults to `False`): apply an RMS norm to each head's output.
    """

    model_type = "hf_memory_linear"
    mixers = {
        **MemoryConfig.mixers,
        "memory": LinearAttentionMixer,
        "sliding_memory": WindowedMixer,
    }
    far_memory = SlotMemory
    base_model_tp_plan = {
        **MemoryConfig.base_model_tp_plan,
        **of_mixers(
            local_params=("feature_map",), colwise=("feature_map.q_weight", "feature_map.k_weight")
        ),
        **of_mixers(replicated_with_grad_allreduce=("o_norm",)),
    }

    feature_map: str = "elu"
    feature_dim: int | None = None
    normalize: bool = True
    output_norm: bool = False

    def validate_architecture(self):
        """Check the feature map, too."""
        super().validate_architecture()
        check_word("feature_map", self.feature_map, FEATURE_MAPS)
        is_set = self.feature_map not in RANDOM_FEATURE_MAPS or self.feature_dim
        check(
            is_set, "feature_dim", f"set when feature_map is {self.feature_map!r}", self.feature_dim
        )


class LinearTransformerModel(base.MemoryModel):
    """The Linear Transformer without a head."""


class LinearTransformerForCausalLM(base.MemoryForCausalLM):
    """The Linear Transformer with a head that predicts the next token."""

    model_class = LinearTransformerModel


class LinearTransformerForSequenceClassification(base.MemoryForSequenceClassification):
    """The Linear Transformer with a head that classifies sequences."""


class LinearTransformerForTokenClassification(base.MemoryForTokenClassification):
    """The Linear Transformer with a head that classifies tokens."""
