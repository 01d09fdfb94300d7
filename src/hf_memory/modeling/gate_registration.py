"""Gates that a user adds to a family, in a file outside this package."""

from hf_memory.mixers.base import MemoryMixer
from hf_memory.modeling import delta_net, gated_linear_attention
from hf_memory.modeling.checks import check
from hf_memory.modeling.configuration import MemoryConfig

TABLES = {
    gated_linear_attention.GatedLinearAttentionConfig: gated_linear_attention.MIXERS,
    delta_net.DeltaNetConfig: delta_net.MIXERS,
}


def register_gate(config: type[MemoryConfig], name: str, mixer: type[MemoryMixer]) -> None:
    """Let `gate=name` in a config of a family choose a mixer.

    A saved model names its gate, not its code, so the file that registers a gate must be imported before such a model
    is loaded.

    Args:
        config: the config class of the family: GatedLinearAttentionConfig or DeltaNetConfig.
        name: the name of the gate, which no other gate of the family has.
        mixer: the mixer, usually a subclass of one of the family's.

    Raises:
        ValueError: if the family has no gates, the name is taken, or `mixer` is no class of a mixer.
    """
    check(config in TABLES, "config", " or ".join(family.__name__ for family in TABLES), config)
    check(
        isinstance(mixer, type) and issubclass(mixer, MemoryMixer),
        "mixer",
        "a subclass of MemoryMixer",
        mixer,
    )
    known = TABLES[config].get(name)
    # as when a cell of a notebook runs again
    is_again = known is not None and known.__qualname__ == mixer.__qualname__
    check(known is None or is_again, "name", "one that no gate of this family has", name)
    TABLES[config][name] = mixer
