"""The Transformer, with the positions that the literature of longer contexts gave it, as options."""

from typing import Any

from huggingface_hub.dataclasses import strict
from torch import Tensor
from transformers import GenerationMixin
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from hf_memory.mixers.relations import EMBEDDED, POSITIONS, RELATIONS
from hf_memory.mixers.transformer import TransformerMixer
from hf_memory.modeling.base import MemoryForCausalLM, MemoryModel, MemoryPreTrainedModel
from hf_memory.modeling.configuration import MemoryConfig, check_word

BY_HEAD = ("content_bias", "distance_bias", "distance_proj", "rate", "bound")  # parameters of positions


@strict
class MemoryTransformerConfig(MemoryConfig):
    """Config of the Memory Transformer; its other options are those of `MemoryConfig`.

    Args:
        position (`str`, defaults to `"rope"`): how tokens know where they are: `"rope"`, `"none"`, `"sinusoidal"` and
            `"learned"` (added to the embeddings), or in the scores of attention `"relative"` (Shaw), `"xl"`, `"alibi"`
            or `"distance_aware"`.
        max_relative_distance (`int`, defaults to 16): distance from which on `"relative"` treats all distances alike.
    """

    model_type = "hf_memory_transformer"
    mixers = {**MemoryConfig.mixers, "memory": TransformerMixer}
    base_model_tp_plan = {
        **MemoryConfig.base_model_tp_plan,
        "layers.*.mixer.relation": "local_params",
        **{f"layers.*.mixer.relation.{name}": "colwise" for name in BY_HEAD},
        **{f"layers.*.mixer.relation.{name}": "replicated_with_grad_allreduce" for name in ("keys", "values")},
    }

    position: str = "rope"
    max_relative_distance: int = 16

    def rotating_channels(self, layer_idx: int) -> int:
        """None, where positions are not rotations."""
        return super().rotating_channels(layer_idx) if self.position == "rope" else 0

    def attends(self, layer_idx: int, length: int) -> int | None:
        """All, where positions are those of its teacher."""
        return length if self.position == "rope" else None

    def validate_transformer(self):
        """Check the words of this family."""
        check_word("position", self.position, POSITIONS)
        if self.max_relative_distance < 1:
            raise ValueError(f"max_relative_distance must be at least 1, got {self.max_relative_distance}")
        if self.attention_window is not None:
            raise ValueError(f"attention_window must be None for {self.model_type}, got {self.attention_window}")
        if self.position in RELATIONS and set(self.mixer_types) != {"memory"}:
            raise ValueError(
                f"layer_types must all be 'memory' with position={self.position!r}, got {self.layer_types}"
            )


class MemoryTransformerPreTrainedModel(MemoryPreTrainedModel):
    """What transformers must know of this family."""

    config: MemoryTransformerConfig


class MemoryTransformerModel(MemoryModel):
    """The Transformer without a head."""

    config: MemoryTransformerConfig

    def __init__(self, config: MemoryTransformerConfig):
        super().__init__(config)
        self.embed_positions: Any = EMBEDDED[config.position](config) if config.position in EMBEDDED else None
        self.post_init()

    def run_layers(self, hidden_states: Tensor, masks: list, **kwargs) -> Tensor:
        """As the others', after positions are added where they are embedded."""
        if self.embed_positions is not None:
            hidden_states = hidden_states + self.embed_positions(kwargs["position_ids"]).to(hidden_states.dtype)
        return super().run_layers(hidden_states, masks, **kwargs)


class MemoryTransformerForCausalLM(MemoryForCausalLM, GenerationMixin):
    """The Transformer that predicts the next token."""

    config: MemoryTransformerConfig
    model_class = MemoryTransformerModel


class MemoryTransformerForSequenceClassification(GenericForSequenceClassification, MemoryTransformerPreTrainedModel):
    """The Transformer that puts a label on a sequence."""


class MemoryTransformerForTokenClassification(GenericForTokenClassification, MemoryTransformerPreTrainedModel):
    """The Transformer that puts a label on each token."""
