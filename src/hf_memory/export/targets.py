"""The table of export targets: architectures that inference engines have, and which models they represent exactly."""

from hf_memory.export.delta import Kimi
from hf_memory.export.granite_swa import GraniteSWA
from hf_memory.export.mamba import Granite, Mamba2
from hf_memory.export.qwen3_5 import Qwen35
from hf_memory.export.target import Target
from hf_memory.modeling.configuration import MemoryConfig
from hf_memory.modeling.delta_net import DeltaNetConfig

TARGETS: tuple[Target, ...] = (Qwen35(), Granite(), Mamba2(), Kimi(), GraniteSWA())
NAMES = tuple(target.name for target in TARGETS)
SERVABLE = {"attention": GraniteSWA(), "deltanet": Qwen35()}  # by what `--to` names
WITHOUT_EXPORT = (
    "Without an export transformers runs it, and so does vLLM if hf_memory is installed there"
)


class NotExportable(ValueError):
    """Raised if no architecture of the inference engines represents a model exactly."""


def servable_memory(config: MemoryConfig) -> str | None:
    """What the teacher of a student can become so that engines have it, as `--to` names it; None: nothing."""
    return next((to for to, target in SERVABLE.items() if target.has_shape(config)), None)


def find_target(config: MemoryConfig, name: str = "auto", *, advice: str = "") -> Target:
    """The target of a name, or the first that represents a model exactly.

    Args:
        config: the model's config.
        name: the target's name; default: the first that represents the model exactly.
        advice: a sentence about what to do if there is none; default: how to convert again.

    Raises:
        NotExportable: if the target, or no target, represents the model exactly; the message says which fields of the
            config differ.
        ValueError: if there is no target of that name, or it is for other families.
    """
    if name not in ("auto", *NAMES):
        raise ValueError(f"target must be one of auto, {', '.join(NAMES)}, got {name!r}")
    has_memory = {"memory", "sliding_memory"} & set(config.layer_types or ())
    if (
        has_memory
        and not isinstance(config, DeltaNetConfig)
        and getattr(config, "gate", None) != "mamba2"
    ):
        gate = f" with gate={config.gate!r}" if hasattr(config, "gate") else ""
        raise NotExportable(
            f"no engine has the memory of {config.model_type}{gate}. Convert again with --to deltanet --servable. "
            f"{WITHOUT_EXPORT} and the memory does not grow"
        )
    of_family = [
        target
        for target in TARGETS
        if type(config) is target.family and name in ("auto", target.name)
    ]
    if not of_family and name == "auto":
        raise NotExportable(
            f"no engine has models of type {config.model_type}, also without layers of its memory. {WITHOUT_EXPORT}"
        )
    if not of_family:
        family = next(target.family.model_type for target in TARGETS if target.name == name)
        raise ValueError(f"target {name} is for models of type {family}, got {config.model_type}")
    faults = {target.name: target.faults(config) for target in of_family}
    exact = [target for target in of_family if not faults[target.name]]
    if exact:
        return exact[0]
    nearest = sorted(faults, key=lambda name: len(faults[name]))
    needs = "; ".join(f"{name} needs {', and '.join(faults[name])}" for name in nearest)
    to = servable_memory(config)
    again = "No engine has students of such a teacher, however it is converted"
    if to is not None:
        again = f"Convert the teacher again with --to {to} --servable, which sets the options that engines have"
    advice = advice or f"{again}. {WITHOUT_EXPORT}"
    raise NotExportable(f"no target represents the model exactly. {advice}. In detail: {needs}")
