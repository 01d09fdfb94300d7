"""RWKV-7, "Goose": https://arxiv.org/abs/2503.14456."""

import torch
from torch import Tensor, nn

from hf_memory.mixers.rwkv7 import Rwkv7Mixer
from hf_memory.modeling import base
from hf_memory.modeling.checks import check_values, strict
from hf_memory.modeling.configuration import of_mixers
from hf_memory.modeling.whole_layers import WholeLayersConfig

RANKS = {  # default ranks: this factor times the square root of hidden_size, rounded to a multiple of 32
    "decay_low_rank_dim": 2.5,
    "a_low_rank_dim": 2.5,
    "v_low_rank_dim": 1.7,
    "gate_low_rank_dim": 5.0,
}


@strict
class Rwkv7Config(WholeLayersConfig):
    """Config of RWKV-7. Options that are not given follow its paper. Memory layers have no positions or grouped heads.

    Args:
        intermediate_size (`int`, defaults to 4096): width of the channel mix, four times `hidden_size` in the published
            models; if `layer_types` has attention layers, also the width of their MLP.
        layer_norm_eps (`float`, defaults to 1e-5): epsilon of all norms except those of attention layers; the norm of
            each head has `head_dim` times this epsilon.
        decay_low_rank_dim (`int`, *optional*): rank of the projection to the decay. The default of this and of the
            other ranks grows with `hidden_size`.
        a_low_rank_dim (`int`, *optional*): rank of the projection to the in-context learning rate a.
        v_low_rank_dim (`int`, *optional*): rank of the projection to the gate that interpolates between a layer's
            values and those of the first memory layer.
        gate_low_rank_dim (`int`, *optional*): rank of the projection to the output gate.
        allow_negative_eigenvalues (`bool`, defaults to `False`): let a write erase up to twice what the memory holds
            for a key. A write can then negate it, so that the memory can count modulo two
            (https://arxiv.org/abs/2411.12537).
    """

    model_type = "hf_memory_rwkv7"
    mixers = {**WholeLayersConfig.mixers, "memory": Rwkv7Mixer}
    base_model_pp_plan = None  # the values of the first layer do not travel from process to process
    base_model_tp_plan = {
        **WholeLayersConfig.base_model_tp_plan,
        **of_mixers(
            local_params=("", "w_lora", "a_lora", "v_lora", "g_lora", "o_norm"),
            colwise=("k_k", "k_a", "r_k", "o_norm.weight", "o_norm.bias", "mlp.up_proj"),
            rowwise=("mlp.down_proj",),
        ),
        **of_mixers(colwise=tuple(f"{x}_lora.up_proj" for x in "wavg")),
    }

    intermediate_size: int = 4096
    layer_norm_eps: float = 1e-5
    decay_low_rank_dim: int | None = None
    a_low_rank_dim: int | None = None
    v_low_rank_dim: int | None = None
    gate_low_rank_dim: int | None = None
    allow_negative_eigenvalues: bool = False

    def set_defaults(self) -> None:
        """See `MemoryConfig.set_defaults`."""
        super().set_defaults()
        self.fill(
            **{
                x: max(32, 32 * round(factor * self.hidden_size**0.5 / 32))
                for x, factor in RANKS.items()
            }
        )

    def validate_architecture(self) -> None:
        """Refuse a factor that memory layers do not have, too."""
        super().validate_architecture()
        if "memory" in self.layer_types:
            check_values(self, "with memory layers", residual_multiplier=1.0)


class Rwkv7DecoderLayer(base.MemoryDecoderLayer):
    """A layer that passes on the values of the first memory layer [B, T, H * V] together with the hidden states."""

    def forward(
        self, hidden_states: Tensor, first_values: Tensor, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Run the layer; attention layers only pass the values on."""
        if not isinstance(self.mixer, Rwkv7Mixer):
            return super().forward(hidden_states, **kwargs), first_values
        width = hidden_states.shape[-1]
        output, _ = self.mixer(torch.cat([hidden_states, first_values], dim=-1), **kwargs)
        return hidden_states + output[..., :width], output[..., width:]


class Rwkv7Model(base.MemoryModel):
    """RWKV-7 without a head."""

    config: Rwkv7Config
    layer_class = Rwkv7DecoderLayer
    _no_split_modules = ["Rwkv7DecoderLayer"]

    def __init__(self, config: Rwkv7Config):
        super().__init__(config)
        self.embed_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_init()

    def run_layers(
        self, hidden_states: Tensor, masks: list, own_losses: list[Tensor], **kwargs
    ) -> Tensor:
        """Run each layer with its mask on [B, T, hidden_size]; none has a loss of its own."""
        hidden_states = self.embed_norm(hidden_states)
        heads, *_, V = self.config.memory_heads
        first_values = hidden_states.new_zeros(*hidden_states.shape[:2], heads * V)
        for layer, mask in zip(self.layers, masks):
            hidden_states, first_values = layer(
                hidden_states, first_values, attention_mask=mask, **kwargs
            )
        return hidden_states


class Rwkv7ForCausalLM(base.MemoryForCausalLM):
    """RWKV-7 with a head that predicts the next token."""

    model_class = Rwkv7Model
    _pp_plan = None


class Rwkv7ForSequenceClassification(base.MemoryForSequenceClassification):
    """RWKV-7 with a head that classifies sequences."""


class Rwkv7ForTokenClassification(base.MemoryForTokenClassification):
    """RWKV-7 with a head that classifies tokens."""
