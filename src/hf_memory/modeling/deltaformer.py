"""DeltaFormer: a Transformer whose values are corrected by what was written before. https://arxiv.org/abs/2505.19488."""

from huggingface_hub.dataclasses import strict
from transformers import GenerationMixin
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from hf_memory.mixers.deltaformer import DeltaFormerMixer
from hf_memory.modeling.base import MemoryForCausalLM, MemoryModel, MemoryPreTrainedModel
from hf_memory.modeling.configuration import MemoryConfig, check_word
from hf_memory.ops.deltaformer import BETA_MODES, KERNELS

CACHES = {"memory": "full_attention", "sliding_memory": "sliding_attention"}  # a memory here is a growing KV cache


@strict
class DeltaFormerConfig(MemoryConfig):
    """Options of the DeltaFormer mixer; the others are those of `MemoryConfig`.

    In `layer_types`, `"memory"` is a DeltaFormer layer and `"sliding_memory"` one that sees `sliding_window` tokens.
    The config then keeps these words as `mixer_types`, and in `layer_types` the kind of cache and mask of each layer.

    Args:
        write_kernel (`str`, defaults to `"softmax"`): what the past says of a new key: `"softmax"`, `"linear"`,
            `"relu"` or `"round"`; with the last three, keys have unit length in it.
        read_kernel (`str`, defaults to `"softmax"`): the same for queries.
        beta_mode (`str`, defaults to `"erase"`): `"erase"` (u = v - beta ...), `"delta"` (u = beta (v - ...)) or
            `"none"` (beta = 1).
        beta_activation (`str`, defaults to `"sigmoid"`): of the projection to beta. With `"tanh"` or `"identity"` it
            starts at zero, and an erasing DeltaFormer as a Transformer.
        write_rope (`bool`, defaults to `True`): rotate the keys of the write too. Without, the cache keeps keys twice.
        mixer_types (`list[str]`, *optional*): set from `layer_types`.
    """

    model_type = "hf_memory_deltaformer"
    mixers = {**MemoryConfig.mixers, "memory": DeltaFormerMixer, "sliding_memory": DeltaFormerMixer}
    base_model_tp_plan = {**MemoryConfig.base_model_tp_plan, "layers.*.mixer.b_proj": "colwise"}

    write_kernel: str = "softmax"
    read_kernel: str = "softmax"
    beta_mode: str = "erase"
    beta_activation: str = "sigmoid"
    write_rope: bool = True
    mixer_types: list[str] | None = None

    def __post_init__(self, **kwargs):
        if self.mixer_types is None:
            self.mixer_types = self.layer_types or ["memory"] * self.num_hidden_layers
        self.layer_types = [CACHES.get(kind, kind) for kind in self.mixer_types]
        super().__post_init__(**kwargs)

    def attends(self, layer_idx: int, length: int) -> int | None:
        """With a closed activation and a read by softmax it starts as attention."""
        is_closed = self.beta_activation != "sigmoid" and self.beta_mode == "erase" and self.read_kernel == "softmax"
        if not is_closed or self.attention_window is not None:
            return super().attends(layer_idx, length)
        is_sliding = self.mixer_types[layer_idx] == "sliding_memory"
        return min(length, self.sliding_window or length) if is_sliding else length

    def validate_kernels(self):
        """Check the words of this family."""
        check_word("write_kernel", self.write_kernel, KERNELS)
        check_word("read_kernel", self.read_kernel, KERNELS)
        check_word("beta_mode", self.beta_mode, BETA_MODES)
        check_word("beta_activation", self.beta_activation, ("sigmoid", "tanh", "identity"))


class DeltaFormerPreTrainedModel(MemoryPreTrainedModel):
    """What transformers must know of this family."""

    config: DeltaFormerConfig
    _supports_flex_attn = False  # the write must know what is padding, which a mask of blocks does not say


class DeltaFormerModel(DeltaFormerPreTrainedModel, MemoryModel):
    """DeltaFormer without a head."""


class DeltaFormerForCausalLM(DeltaFormerPreTrainedModel, MemoryForCausalLM, GenerationMixin):
    """DeltaFormer that predicts the next token."""

    model_class = DeltaFormerModel


class DeltaFormerForSequenceClassification(GenericForSequenceClassification, DeltaFormerPreTrainedModel):
    """DeltaFormer that puts a label on a sequence."""


class DeltaFormerForTokenClassification(GenericForTokenClassification, DeltaFormerPreTrainedModel):
    """DeltaFormer that puts a label on each token."""
