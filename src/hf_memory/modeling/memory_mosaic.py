"""Memory Mosaics: https://arxiv.org/abs/2405.06394."""

from hf_memory.mixers.memory_mosaic import MemoryMosaicMixer
from hf_memory.modeling import base
from hf_memory.modeling.checks import check, strict
from hf_memory.modeling.configuration import of_mixers
from hf_memory.modeling.whole_layers import WholeLayersConfig


@strict
class MemoryMosaicConfig(WholeLayersConfig):
    """Config of Memory Mosaics; all its options are those of `MemoryConfig`.

    Args:
        intermediate_size (`int`, defaults to 2816): number of learned key-value pairs in each head's persistent memory;
            if `layer_types` has attention layers, also the width of their MLP.
    """

    model_type = "hf_memory_mosaic"
    mixers = {**WholeLayersConfig.mixers, "memory": MemoryMosaicMixer}
    base_model_tp_plan = {
        **WholeLayersConfig.base_model_tp_plan,
        **of_mixers(
            local_params=("key_average", "query_average", "value_average", "persistent"),
            colwise=("persistent.keys", "persistent.values", "persistent.scale"),
            rowwise=("persistent_o_proj",),
        ),
        **of_mixers(
            colwise=tuple(
                f"{x}_average.{name}" for x in ("key", "query") for name in ("rate", "scale")
            )
        ),
        **of_mixers(colwise=("value_average.share", "value_average.scale")),
    }

    def validate_architecture(self):
        """Check the size of the persistent memory, too."""
        super().validate_architecture()
        check(self.intermediate_size > 0, "intermediate_size", "at least 1", self.intermediate_size)


class MemoryMosaicModel(base.MemoryModel):
    """A Memory Mosaic without a head."""


class MemoryMosaicForCausalLM(base.MemoryForCausalLM):
    """A Memory Mosaic with a head that predicts the next token."""

    model_class = MemoryMosaicModel


class MemoryMosaicForSequenceClassification(base.MemoryForSequenceClassification):
    """A Memory Mosaic with a head that classifies sequences."""


class MemoryMosaicForTokenClassification(base.MemoryForTokenClassification):
    """A Memory Mosaic with a head that classifies tokens."""
