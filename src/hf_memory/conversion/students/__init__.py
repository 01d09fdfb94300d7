"""Students: the families that a teacher can be converted into, and their configs."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from hf_memory.cache import LAYER_TYPES
from hf_memory.conversion.teachers import rotates_alike, shared_options, with_one_rope
from hf_memory.modeling import FAMILIES, Family
from hf_memory.modeling.any_model import layer_types
from hf_memory.modeling.base import MemoryForCausalLM
from hf_memory.modeling.checks import suggested
from hf_memory.modeling.configuration import MemoryConfig

PREFIX = "hf_memory_"
MEMORIES = {
    family.config.model_type.removeprefix(PREFIX): family
    for family in FAMILIES
    if family.is_student
}
# the first has attention over windows, and no memory
STUDENTS = {
    "attention": MEMORIES["transformer"],
    **MEMORIES,
}
# options that may differ from the teacher's
OPEN = (
    "sliding_window",
    "attention_dropout",
    "initializer_range",
)
ATTENTION = ("full_attention", "sliding_attention")  # layer types of teachers
SINKS = 4  # first tokens that a window also sees: trained heads attend to them by default (attention sinks)


def is_exact(config: MemoryConfig, teacher: PreTrainedConfig, length: int) -> bool:
    """Whether a student equals its teacher before any training, because its memory layers start as the same attention.

    Args:
        config: the student's config.
        teacher: the teacher's config.
        length: tokens of the texts that they read.
    """
    if not rotates_alike(config, teacher, length):
        return False
    seen = [
        teacher.sliding_window if kind == "sliding_attention" else length
        for kind in layer_types(teacher)
    ]
    replaced = [i for i, kind in enumerate(config.layer_types or ()) if kind in LAYER_TYPES]
    return all(config.exact_up_to(i, length) == min(length, seen[i]) for i in replaced)


def can_have_windows(to: str) -> bool:
    """Whether the layers of a student can have windows beside heads that keep everything."""
    return to == "attention" or getattr(find_student(to).config, "far_memory", None) is not None


def own_window(teacher: PreTrainedConfig) -> int | None:
    """Tokens of the window that layers of a teacher have; None if all its layers see everything."""
    return teacher.sliding_window if "sliding_attention" in layer_types(teacher) else None


def is_mixed(teacher: PreTrainedConfig) -> bool:
    """Whether some layers of a teacher have a window and the others see everything."""
    return {*layer_types(teacher)} == {*ATTENTION}


def find_student(name: str) -> Family:
    """The family with a given name.

    Raises:
        ValueError: if there is none.
    """
    if name not in STUDENTS:
        raise ValueError(f"to must be one of {', '.join(STUDENTS)}, got {name!r}")
    return STUDENTS[name]


def student_config(
    teacher: PreTrainedConfig, to: str, kept: tuple[int, ...], options: Mapping
) -> MemoryConfig:
    """The config of a student that keeps some layers of its teacher's attention.

    Args:
        teacher: the teacher's config.
        to: the student's family, a name in STUDENTS.
        kept: numbers of the layers that keep the teacher's attention.
        options: all that the student does not have from its teacher, see `defaults.student_options`.

    Raises:
        ValueError: if the teacher or the family is not supported, or an option does not exist or must be the teacher's.
    """
    family = find_student(to)
    positions = options.get("max_position_embeddings")
    shared = with_one_rope(shared_options(teacher), teacher, positions)
    kinds = layer_types(teacher)
    has_window = options.get("sliding_window") is not None and can_have_windows(to)
    # Layers that are not kept become `new`. A teacher's layers with a window may become another type:
    # DeltaFormer has the same window in a layer type of its own; and where a teacher has both kinds of layers and the
    # student's window is the teacher's, these layers stay as they are, since the window has nothing to make shorter.
    new = "memory"
    if to == "attention":
        new = "sliding_heads"
    elif has_window:
        new = "sliding_memory"
    in_place_of = {"sliding_attention": "sliding_memory"} if to == "deltaformer" else {}
    if has_window and is_mixed(teacher) and options["sliding_window"] == own_window(teacher):
        in_place_of = {"sliding_attention": "sliding_attention"}
    shared["layer_types"] = [
        kind if i in kept else in_place_of.get(kind, new) for i, kind in enumerate(kinds)
    ]
    _check_options(family, shared, options)
    config = family.config(**{**shared, **options})
    sliding = [i for i in kept if kinds[i] == "sliding_attention"]
    if sliding and config.sliding_window != teacher.sliding_window:
        raise ValueError(
            f"keep must not have layers with a window of sliding_window={teacher.sliding_window} in the teacher beside "
            f"layers with one of {config.sliding_window}, got {sliding}: keep none, or give the teacher's window"
        )
    return config  # type: ignore[return-value]


def changed_layers(config: PreTrainedConfig, teacher: PreTrainedConfig) -> list[int]:
    """The layers of a student that are not as in its teacher."""
    kinds = zip(config.layer_types or (), layer_types(teacher))
    return [i for i, (ours, theirs) in enumerate(kinds) if ours != theirs]


def build(config: PreTrainedConfig, teacher: PreTrainedModel, seed: int) -> MemoryForCausalLM:
    """A student of this config with random weights, on its teacher's device and in its dtype."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        family = next(family for family in FAMILIES if family.config is type(config))
        student = family.causal_lm(copy.deepcopy(config))  # type: ignore[arg-type]
    student.generation_config = copy.deepcopy(teacher.generation_config)
    exact = _angles(student)
    student.to(teacher.device, teacher.dtype)  # type: ignore[arg-type]
    # a teacher that was loaded in 16 bits has angles in float32, and one that was cast has not
    dtype = next((x.dtype for x in _angles(teacher).values()), teacher.dtype)
    for name, x in exact.items():
        place, _, own_name = name.rpartition(".")
        rotary = student.get_submodule(place)
        setattr(rotary, own_name, x.to(teacher.device, dtype))
    return student.eval()


def _angles(model: PreTrainedModel) -> dict[str, Tensor]:
    """The angles of rotations in a model, by the names of their buffers."""
    return {name: x for name, x in model.named_buffers() if name.endswith("inv_freq")}


def _check_options(family: Family, shared: Mapping, options: Mapping) -> None:
    inherited = set(PreTrainedConfig.__dataclass_fields__) - set(shared) - {"layer_types"}
    own = set(family.config.__dataclass_fields__) - inherited
    if unknown := sorted(set(options) - own):
        meant = suggested(unknown[0], own)
        raise ValueError(
            f"options must be fields of {family.config.__name__}, got {', '.join(unknown)}{meant}"
        )
    if "layer_types" in options:
        raise ValueError(
            "options must not have layer_types: keep says which layers keep their attention"
        )
    if options.get("sparse_memory_gradients"):
        raise ValueError(
            "sparse_memory_gradients must be False in a conversion, which trains with AdamW, got True"
        )
    taken = sorted(
        name
        for name in options
        if name in shared and name not in OPEN and options[name] != shared[name]
    )
    if taken:
        raise ValueError(
            f"options must not change {' and '.join(taken)}, which the student has from its teacher, "
            f"got {options[taken[0]]!r}"
        )
