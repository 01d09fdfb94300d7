"""DeltaFormer: attention over values from which earlier values of similar keys were subtracted.

https://arxiv.org/abs/2505.19488."""

from hf_memory.mixers.deltaformer import DeltaFormerMixer
from hf_memory.modeling import base
from hf_memory.modeling.checks import check_values, check_word, strict
from hf_memory.modeling.configuration import MemoryConfig
from hf_memory.ops.deltaformer import BETA_MODES, KERNELS


@strict
class DeltaFormerConfig(MemoryConfig):
    """Config of DeltaFormer; its other options are those of `MemoryConfig`.

    In `layer_types`, `"memory"` means a DeltaFormer layer, and `"sliding_memory"` one that sees the last
    `sliding_window` tokens only.

    Args:
        write_kernel (`str`, defaults to `"softmax"`): kernel that compares a new key with earlier keys: `"softmax"`,
            `"linear"`, `"relu"` or `"round"`. The last three compare keys of unit length.
        read_kernel (`str`, defaults to `"softmax"`): kernel that compares a query with keys; the same choices.
        beta_mode (`str`, defaults to `"erase"`): where the write strength beta enters, r being what the past says of
            the key: `"erase"` (u = v - beta r), `"delta"` (u = beta (v - r)) or `"none"` (u = v - r).
        beta_activation (`str`, defaults to `"sigmoid"`): activation of the projection to beta. With `"tanh"` or
            `"identity"` beta starts at zero, and with `beta_mode="erase"` the model then starts as a Transformer.
        write_rope (`bool`, defaults to `True`): whether the keys that a write compares are rotated. If not, the cache
            keeps keys twice.
    """

    model_type = "hf_memory_deltaformer"
    mixers = {**MemoryConfig.mixers, "memory": DeltaFormerMixer, "sliding_memory": DeltaFormerMixer}
    heads_types = ("sliding_heads",)
    base_model_tp_plan = {**MemoryConfig.base_model_tp_plan, "layers.*.mixer.b_proj": "colwise"}

    write_kernel: str = "softmax"
    read_kernel: str = "softmax"
    beta_mode: str = "erase"
    beta_activation: str = "sigmoid"
    write_rope: bool = True

    def validate_architecture(self):
        """Check kernels and the write strength, too."""
        super().validate_architecture()
        check_word("write_kernel", self.write_kernel, KERNELS)
        check_word("read_kernel", self.read_kernel, KERNELS)
        check_word("beta_mode", self.beta_mode, BETA_MODES)
        check_word("beta_activation", self.beta_activation, ("sigmoid", "tanh", "identity"))
        if self.beta_mode == "none":
            check_values(self, "with beta_mode='none'", beta_activation="sigmoid")
        if self.read_kernel != "softmax" and {*self.layer_types} <= {"memory", "sliding_memory"}:
            here = f"with read_kernel={self.read_kernel!r}, which compares keys of unit length"
            check_values(self, here, query_pre_attn_scalar=None, attn_logit_softcapping=None)


class DeltaFormerModel(base.MemoryModel):
    """DeltaFormer without a head."""


class DeltaFormerForCausalLM(base.MemoryForCausalLM):
    """DeltaFormer with a head that predicts the next token."""

    model_class = DeltaFormerModel


class DeltaFormerForSequenceClassification(base.MemoryForSequenceClassification):
    """DeltaFormer with a head that classifies sequences."""


class DeltaFormerForTokenClassification(base.MemoryForTokenClassification):
    """DeltaFormer with a head that classifies tokens."""
