"""Students: the families that a teacher can be converted into, and preset options for each of them."""

import copy
from collections.abc import Collection, Mapping

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_memory.cache import LAYER_TYPES
from hf_memory.conversion.keep import Keep
from hf_memory.conversion.teachers import shared_options, with_one_rope
from hf_memory.files.names import nearest
from hf_memory.modeling import FAMILIES, Family
from hf_memory.modeling.any_model import check_model, layer_types
from hf_memory.modeling.base import MemoryForCausalLM
from hf_memory.modeling.configuration import MemoryConfig

PREFIX = "hf_memory_"
MEMORIES = {
    family.config.model_type.removeprefix(PREFIX): family
    for family in FAMILIES
    if family.is_student
}
STUDENTS = {
    "attention": MEMORIES["transformer"],
    **MEMORIES,
}  # the first has attention over windows, and no memory
HEAD_SIZES = (
    "linear_key_head_dim",
    "linear_value_head_dim",
)  # the teacher's head size, so that its projections fit
OPEN = (
    "sliding_window",
    "attention_dropout",
    "initializer_range",
)  # options that may differ from the teacher's
ATTENTION = ("full_attention", "sliding_attention")  # layer types of teachers
WINDOW = 256  # tokens that heads beside full heads see, or keep and see
BLOCK = 16  # tokens that heads which keep some read at once
SINKS = 4  # first tokens that a window also sees: trained heads attend to them by default (attention sinks)
PRESETS: dict[str, dict] = {
    "linear": {"feature_map": "hedgehog"},  # learned to imitate softmax
    "gated": {"output_gate": "sigmoid"},  # starts half open; silu starts closed
    "deltanet": {"output_gate": "sigmoid"},
    "deltaformer": {
        "beta_activation": "tanh"
    },  # beta starts at zero: the student equals its teacher
    "titans": {  # equals its teacher within its window; beyond it, one matrix learns faster than a deeper memory
        "memory_gate": "add",
        "memory_depth": 1,
        "memory_unit_values": True,
        "num_persistent_tokens": 0,
        "output_gate": "sigmoid",
    },
}
SERVABLE: dict[
    str, dict
] = {  # options with which inference engines can run the student, for most teachers
    "attention": {"attention_sinks": True},  # for teachers without q/k norm, with whole layers kept
    "deltanet": {
        "gate": "scalar",
        "output_gate": "silu",
        "memory_rope": False,
        "memory_qk_norm": False,
    },
    "gated": {"gate": "mamba2", "memory_rope": False},  # for teachers without q/k norm
}


def is_exact(config: MemoryConfig, teacher: PreTrainedConfig, length: int) -> bool:
    """Whether a student equals its teacher before any training, because its memory layers start as the same attention.

    Args:
        config: the student's config.
        teacher: the teacher's config.
        length: tokens of the texts that they read.
    """
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


def find_student(name: str) -> Family:
    """The family with a given name.

    Raises:
        ValueError: if there is none.
    """
    if name not in STUDENTS:
        raise ValueError(f"to must be one of {', '.join(STUDENTS)}, got {name!r}")
    return STUDENTS[name]


def keeps_tokens(options: Mapping) -> bool:
    """Whether heads of a student without another memory keep tokens beside their window.

    They do by default, unless options have a window or what stands for the first tokens.
    """
    others = ("sliding_window", "num_kept_tokens", "attention_sinks")
    has_others = any(options.get(name, False) is not False for name in others)
    return bool(options.get("num_kept_tokens")) or not has_others


def usual_window(
    teacher: PreTrainedConfig, to: str, options: Mapping, tokens: int = WINDOW
) -> dict[str, int]:
    """What heads that do not keep everything see, as options of the student that hold as many bytes as these tokens.

    It is the teacher's own window if it has one; a window and kept tokens in 8 bits for students without another
    memory, unless options have a window or what stands for the first tokens; and otherwise a window, if the family has
    one beside its memory. The tokens have 16 bits a number.
    """
    if not can_have_windows(to):
        return {}
    own = own_window(teacher)
    if own or to != "attention" or "num_kept_tokens" in options or not keeps_tokens(options):
        return {"sliding_window": own or tokens}
    near = tokens // 4
    entries = tokens * 16 // 9  # a number in 8 bits takes 9 with its scales
    return {
        "sliding_window": near,
        "num_kept_tokens": entries - near - SINKS - BLOCK,
        "kept_block_size": BLOCK,
        "cache_bits": 8,
    }


def student_config(
    teacher: PreTrainedConfig, to: str, kept: tuple[int, ...], options: Mapping
) -> MemoryConfig:
    """The config of a student that keeps some layers of its teacher's attention.

    Raises:
        ValueError: if the teacher or the family is not supported, or an option does not exist or must be the teacher's.
    """
    family = find_student(to)
    positions = options.get("max_position_embeddings")
    shared = with_one_rope(shared_options(teacher), teacher, positions)
    kinds = layer_types(teacher)
    far_memory = getattr(family.config, "far_memory", None)
    has_window = "sliding_window" in options and far_memory is not None
    # Layers that are not kept become `new`. A teacher's layers with a window may become another type:
    # DeltaFormer has the same window in a layer type of its own; and where a teacher has both kinds of layers and the
    # student's window is the teacher's, these layers stay as they are, since the window has nothing to make shorter.
    new = "memory"
    if to == "attention":
        new = "sliding_heads"
    elif has_window:
        new = "sliding_memory"
    own = own_window(teacher)
    in_place_of = {"sliding_attention": "sliding_memory"} if to == "deltaformer" else {}
    if new != "memory" and {*kinds} == {*ATTENTION} and options.get("sliding_window", own) == own:
        in_place_of = {"sliding_attention": "sliding_attention"}
    shared["layer_types"] = [
        kind if i in kept else in_place_of.get(kind, new) for i, kind in enumerate(kinds)
    ]
    presets = {name: shared["head_dim"] for name in HEAD_SIZES if hasattr(family.config, name)}
    presets |= {
        "memory_rope": True,
        "num_sink_tokens": SINKS if new != "memory" else 0,
    } | PRESETS.get(to, {})
    presets |= usual_window(teacher, to, options) if to == "attention" else {}
    if options.get("attention_sinks"):
        presets["num_sink_tokens"] = 0
    if options.get("gate") in ("mamba2", "mamba3"):
        presets["linear_num_value_heads"] = shared["num_key_value_heads"]
        presets.pop("output_gate", None)  # they have one of their own
    if options.get("variant", "mag") != "mag":
        presets.pop("memory_gate", None)
    _check_options(family, shared, options)
    config = family.config(**{**shared, **presets, **options})
    sliding = [i for i in kept if kinds[i] == "sliding_attention"]
    if sliding and config.sliding_window != teacher.sliding_window:
        raise ValueError(
            f"keep must not have layers with a window of sliding_window={teacher.sliding_window} in the teacher beside "
            f"layers with one of {config.sliding_window}, got {sliding}"
        )
    return config  # type: ignore[return-value]


def changed_layers(config: PreTrainedConfig, teacher: PreTrainedConfig) -> list[int]:
    """The layers of a student that are not as in its teacher."""
    kinds = zip(config.layer_types or (), layer_types(teacher))
    return [i for i, (ours, theirs) in enumerate(kinds) if ours != theirs]


def make_student(
    teacher: PreTrainedModel,
    to: str = "attention",
    *,
    keep: Keep | str | Collection[int] = (),
    seed: int = 0,
    **options,
) -> MemoryForCausalLM:
    """A student with the sizes of its teacher and random weights; `carry_over` then copies the teacher's weights.

    Args:
        teacher: a causal language model of a type in TEACHERS.
        to: the student's family, a name in STUDENTS.
        keep: the layers that keep the teacher's attention, as numbers or words; see `Keep.parse`.
        seed: seed for the random weights.
        **options: fields of the family's config, such as `gate`, which replace the presets of a student.

    Raises:
        ValueError: if the teacher or the family is not supported, or a layer does not exist.
    """
    check_model("teacher", teacher)
    kept = Keep.parse(keep).layers_of(teacher.config.num_hidden_layers)
    return build(student_config(teacher.config, to, kept, options), teacher, seed)


def build(config: PreTrainedConfig, teacher: PreTrainedModel, seed: int) -> MemoryForCausalLM:
    """A student of this config with random weights, on its teacher's device and in its dtype."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        family = next(family for family in FAMILIES if family.config is type(config))
        student = family.causal_lm(copy.deepcopy(config))  # type: ignore[arg-type]
    student.generation_config = copy.deepcopy(teacher.generation_config)
    return student.to(teacher.device, teacher.dtype).eval()  # type: ignore[arg-type]


def _check_options(family: Family, shared: Mapping, options: Mapping) -> None:
    inherited = set(PreTrainedConfig.__dataclass_fields__) - set(shared) - {"layer_types"}
    own = set(family.config.__dataclass_fields__) - inherited
    if unknown := sorted(set(options) - own):
        suggested = nearest(unknown[0], own)
        raise ValueError(
            f"options must be fields of {family.config.__name__}, got {', '.join(unknown)}{suggested}"
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
