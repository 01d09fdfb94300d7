"""Config fields of families whose memory may have other heads than attention. Names are as in transformers."""

import warnings

from transformers import PreTrainedConfig

from hf_memory.mixers.base import MemoryMixer
from hf_memory.modeling.checks import check, check_values, check_word, strict
from hf_memory.modeling.configuration import MemoryConfig, of_mixers


@strict
class MemoryHeadsConfig(MemoryConfig):
    """Options of families whose memory may have other heads and channels than attention.

    Args:
        linear_num_key_heads (`int`, *optional*): number of query heads and of key heads in memory layers; default:
            those of attention, `num_attention_heads` and `num_key_value_heads`.
        linear_num_value_heads (`int`, *optional*): number of value heads, a multiple or a divisor of the number of
            query heads; default: the number of key heads.
        linear_key_head_dim (`int`, *optional*): channels of each query and key head.
        linear_value_head_dim (`int`, *optional*): channels of each value head.
        linear_conv_kernel_dim (`int`, *optional*): width, in tokens, of the short convolutions of q, k and v; 0: none.
        output_gate (`str`, *optional*): activation of the gate that multiplies the normalised output: `"silu"`,
            `"sigmoid"`, or `"none"` for no gate.
        output_gate_low_rank_dim (`int`, *optional*): rank of the projection to that gate, as in Kimi Linear; default:
            full rank.
        output_gate_bias (`bool`, defaults to `False`): bias of that projection.
        output_norm_eps (`float`, *optional*): epsilon of the norm of the output; default: `rms_norm_eps`.
        memory_qk_norm (`bool`, *optional*): apply an RMS norm to each head's queries and keys in memory layers;
            default: as `use_qk_norm`, which otherwise applies to attention layers only.
    """

    base_model_tp_plan = {
        **MemoryConfig.base_model_tp_plan,
        **of_mixers(
            local_params=("q_conv1d", "k_conv1d", "v_conv1d", "decay"),
            colwise=(
                "b_proj",
                "w_proj",
                "decay.A_log",
                "decay.dt_bias",
                "decay.proj",
                "output_gate.proj",
            ),
            replicated_with_grad_allreduce=("output_gate.norm",),
        ),
        **of_mixers(colwise=("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight")),
    }

    linear_num_key_heads: int | None = None
    linear_num_value_heads: int | None = None
    linear_key_head_dim: int | None = None
    linear_value_head_dim: int | None = None
    linear_conv_kernel_dim: int | None = None
    output_gate: str | None = None
    output_gate_low_rank_dim: int | None = None
    output_gate_bias: bool = False
    output_norm_eps: float | None = None
    memory_qk_norm: bool | None = None

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        has_own_heads = self.mixers["memory"].heads is MemoryMixer.heads
        has_attention = {*self.layer_types} != {"memory"} or not has_own_heads
        heads = self.num_key_value_heads
        if self.linear_num_key_heads and heads != self.num_attention_heads and not has_attention:
            warnings.warn(
                f"num_key_value_heads={heads} has no effect in a model without attention, whose memory has "
                f"linear_num_key_heads={self.linear_num_key_heads}",
                stacklevel=4,
            )

    @property
    def has_memory_qk_norm(self) -> bool:
        """Whether queries and keys of memory layers have a norm."""
        return self.use_qk_norm if self.memory_qk_norm is None else self.memory_qk_norm

    @property
    def memory_heads(self) -> tuple[int, int, int, int, int]:
        """Numbers of query, key and value heads, and of channels of a key and of a value, in memory layers."""
        query_heads = self.linear_num_key_heads or self.num_attention_heads
        key_heads = self.linear_num_key_heads or self.num_key_value_heads
        value_heads = self.linear_num_value_heads or key_heads
        return (
            query_heads,
            key_heads,
            value_heads,
            self.linear_key_head_dim,
            self.linear_value_head_dim,
        )

    def validate_architecture(self):
        """Check that heads and channels of the memory fit together, too."""
        check_word("output_gate", self.output_gate, ("silu", "sigmoid", "none"))
        super().validate_architecture()
        heads, _, values, key_dim, _ = self.memory_heads
        is_grouped = max(heads, values) % min(heads, values) == 0
        check(
            is_grouped,
            "linear_num_value_heads",
            f"a multiple or a divisor of the {heads} query heads",
            values,
        )
        if self.output_gate == "none":
            here = "with output_gate='none'"
            check_values(self, here, output_gate_low_rank_dim=None, output_gate_bias=False)
        is_rotated = f"head_dim={self.head_dim} when memory_rope rotates it"
        check(
            not self.memory_rope or key_dim == self.head_dim,
            "linear_key_head_dim",
            is_rotated,
            key_dim,
        )


class Levels(PreTrainedConfig):
    """Log-linear attention, for families that can have it.

    Args:
        levels (`str`, defaults to `"one"`): `"one"`: one memory of the whole past; `"log"`: log-linear attention
            (https://arxiv.org/abs/2506.04761), a memory for each of log2 T blocks of the past, with learned weights of
            the blocks for each token. The weights start at one, which gives the same model as `"one"`. A block has
            at most `max_position_embeddings` tokens. There are no Triton kernels for it.
    """

    base_model_tp_plan = {
        **MemoryHeadsConfig.base_model_tp_plan,
        **of_mixers(colwise=("level_weights.proj",)),
    }

    levels: str = "one"

    @property
    def num_levels(self) -> int:
        """Largest number of blocks of the past that have a memory."""
        return max(1, (self.max_position_embeddings - 1).bit_length())

    def validate_architecture(self):
        """Check that the memory can have levels, too."""
        check_word("levels", self.levels, ("one", "log"))
        super().validate_architecture()
        can_have = "sliding_memory" not in self.layer_types and getattr(
            self.mixers["memory"], "has_levels", False
        )
        only = "'one' with 'sliding_memory' layers or a memory that is neither linear attention nor the delta rule"
        check(self.levels == "one" or can_have, "levels", only, self.levels)
