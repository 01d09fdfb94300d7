"""What a recipe leaves open: every default of a conversion that depends on more than the recipe is computed here.

`student_keep` and `student_options` see the recipe and the teacher; `with_stages` sees the student that they describe,
and the text; `with_loss` sees whether that student equals its teacher. `Plan.recipe` has all of them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from hf_memory.conversion.keep import Keep
from hf_memory.conversion.recipe import STAGES, Recipe, Schedule
from hf_memory.conversion.students import (
    SINKS,
    can_have_windows,
    find_student,
    is_mixed,
    own_window,
)
from hf_memory.files.text import TextFacts
from hf_memory.modeling.any_model import head_dim, layer_types
from hf_memory.modeling.checks import check, check_word

WINDOW = 256  # tokens in 16 bits of which heads that do not keep everything hold as many bytes
BLOCK = 16  # tokens that heads which keep some read at once
SHARE = "heads:1/11"  # of the heads keep everything
SHARE_OF_FEW = "heads:2/3"  # where few layers see everything: with one of its three heads Gemma 3 recalls nothing
# the teacher's, so that its projections fit
HEAD_SIZES = (
    "linear_key_head_dim",
    "linear_value_head_dim",
)
PRESETS: dict[str, dict] = {
    # learned to imitate softmax
    "linear": {"feature_map": "hedgehog"},
    # starts half open; silu starts closed
    "gated": {"output_gate": "sigmoid"},
    "deltanet": {"output_gate": "sigmoid"},
    # beta starts at zero: the student equals its teacher
    "deltaformer": {"beta_activation": "tanh"},
    # equals its teacher within its window; beyond it, one matrix learns faster than a deeper memory
    "titans": {
        "memory_gate": "add",
        "memory_depth": 1,
        "memory_unit_values": True,
        "num_persistent_tokens": 0,
        "output_gate": "sigmoid",
    },
}
# options with which inference engines can run the student, for most teachers
SERVABLE: dict[str, dict] = {
    # for teachers without q/k norm, with whole layers kept
    "attention": {"attention_sinks": True, "num_kept_tokens": 0, "cache_bits": None},
    "deltanet": {
        "gate": "scalar",
        "output_gate": "silu",
        "memory_rope": False,
        "memory_qk_norm": False,
    },
    # for teachers without q/k norm
    "gated": {"gate": "mamba2", "memory_rope": False},
}
# what both have that hold least
OF_FEW_BYTES = {
    "full_attention_window": 2560,
    "sliding_window": 32,
    # of 16 tokens, a block and its queries would take the room of 20 kept tokens more
    "kept_block_size": 8,
}
# those of the recipes of SmolLM2, without its layers and heads
SIZES: dict[str, dict] = {
    "near": {"num_kept_tokens": 505},
    "small": {"num_kept_tokens": 360, "full_attention_window": 2560},
    "smallest": OF_FEW_BYTES
    | {
        "num_kept_tokens": 238,
        "cache_bits": {"full_attention_heads": {"keys": 8, "values": 4}, "window": 8},
    },
    "constant": OF_FEW_BYTES
    | {
        "num_kept_tokens": 158,
        "cache_bits": {"full_attention_heads": 4, "window": {"keys": 8, "values": 4}},
    },
}
TRANSFER_SCHEDULE = Schedule(100, 3e-3, batch_size=1, length=1024, warmup=0.1, repeats=0.25)
DISTILLATION_SCHEDULE = Schedule(
    250, 1e-4, batch_size=1, length=2048, warmup=0.1, memory_factor=20.0, repeats=0.3
)
# of students that begin near their teacher
NEAR_SCHEDULE = DISTILLATION_SCHEDULE._replace(steps=20, learning_rate=3e-5)
FINE_TUNING_SCHEDULE = Schedule(steps=0, learning_rate=1e-4, length=1024)
SHORTEST = 128  # tokens of a window of the default length that was shortened for a text


def student_keep(recipe: Recipe, teacher: PreTrainedConfig) -> Keep:
    """What of the teacher keeps its attention."""
    has_heads = recipe.options.get("full_attention_heads") is not None
    if isinstance(recipe.keep, Keep):
        given = recipe.options.get("full_attention_heads")
        wanted = f"None with keep={recipe.keep}, which chooses them"
        check(not (has_heads and recipe.keep.is_heads), "full_attention_heads", wanted, given)
        return recipe.keep
    to = str(recipe.to)
    if recipe.servable:
        return Keep.parse("auto" if to == "attention" else "none")
    if has_heads or not can_have_windows(to):
        return Keep.parse("none")
    return Keep.parse(SHARE_OF_FEW if is_mixed(teacher) else SHARE)


def student_options(recipe: Recipe, keep: Keep, teacher: PreTrainedConfig) -> dict[str, Any]:
    """All options of the student's config that it does not have from its teacher: presets, and those that are given.

    A given option takes the place of the preset of its name. It changes no other, except for those in `changes`.
    """
    options = _presets(recipe, keep, teacher)
    for change in changes(recipe, teacher):
        options[change.name] = change.value
        if change.value is None:
            del options[change.name]
    return options | _given_options(recipe)


def window_options(to: str, tokens: int = WINDOW, *, keeps: bool = True) -> dict[str, Any]:
    """What heads that do not keep everything see, as options of the student.

    Args:
        to: the student's memory.
        tokens: they hold as many bytes as these tokens in 16 bits.
        keeps: whether heads of students without another memory keep tokens beside their window, in 8 bits.
    """
    if to != "attention" or not keeps:
        return {"sliding_window": tokens, "num_sink_tokens": SINKS}
    near = tokens // 4
    held = tokens * 16 // 9  # what numbers in 8 bits leave is for what belongs to a block
    return {
        "sliding_window": near,
        "num_sink_tokens": SINKS,
        "num_kept_tokens": held - near - SINKS - BLOCK,
        "eviction": "change_of_output",
        "kept_block_size": BLOCK,
        "cache_bits": 8,
    }


def within_teacher(options: dict[str, Any], teacher: PreTrainedConfig) -> dict[str, Any]:
    """Options of windows for a teacher that may have windows of its own.

    If all its layers have one, its cache does not grow: no head of the student sees more, or holds more. If only some
    have one, these stay, and heads in the others have a window of the same length.
    """
    own = own_window(teacher)
    if own is None:
        return options
    reach = options.get("full_attention_window")
    if is_mixed(teacher):
        longer = {} if reach is None else {"full_attention_window": max(reach, own)}
        return options | {"sliding_window": own} | longer
    near = min(options["sliding_window"], own)
    sinks = min(options["num_sink_tokens"], own - near)
    kept = min(options.get("num_kept_tokens", 0), own - near - sinks - BLOCK)
    bounded = {
        "sliding_window": near,
        "num_sink_tokens": sinks,
        "num_kept_tokens": max(0, kept),
        "full_attention_window": min(reach or own, own),
    }
    return options | {x: y for x, y in bounded.items() if y or x in options}


def kept_by_head(recipe: Recipe, given: Recipe) -> bool:
    """Whether weights decide how many older tokens each head keeps: by default if nobody has said how many.

    Args:
        recipe: the recipe with the student's options, and with what a choice has decided.
        given: the recipe as it was given.
    """
    kept = recipe.options.get("num_kept_tokens", 0)
    is_number = type(kept) is int and kept > 0
    if recipe.kept_by_head:
        check(is_number, "num_kept_tokens", "one number, the mean, with kept_by_head", kept)
    if recipe.kept_by_head is not None:
        return recipe.kept_by_head
    return is_number and "num_kept_tokens" not in given.options


def with_stages(
    recipe: Recipe,
    student: PreTrainedConfig,
    text: TextFacts,
    *,
    has_new_parts: bool,
    is_open: bool = False,
) -> Recipe:
    """The recipe with schedules and with what is trained.

    Args:
        recipe: the recipe.
        student: the student's config, which has no more positions than its teacher.
        text: the text.
        has_new_parts: whether the student has parts that its teacher does not have.
        is_open: whether a choice is to come, which reads windows of distillation whether or not it has steps.
    """
    distillation = NEAR_SCHEDULE if begins_near(recipe, student) else DISTILLATION_SCHEDULE
    usual = dict(zip(STAGES, (TRANSFER_SCHEDULE, distillation, FINE_TUNING_SCHEDULE)))
    least = shortest_text(student)
    positions = getattr(student, "max_position_embeddings", None) or len(text)
    fixed: dict[str, dict[str, Any]] = {}
    if not has_new_parts:
        fixed = {"transfer": {"steps": 0}, "distillation": {"memory_factor": 1.0}}
    stages = dict[str, Schedule]()
    for name, schedule in recipe.schedules.items():
        given = {**schedule.given, **fixed.get(name, {})}
        is_read = given.get("steps", usual[name].steps) or (is_open and name == "distillation")
        if is_read and "length" not in given:
            wanted = f"at least {least}, unless {name} has a length"
            check(len(text) >= least, "tokens", wanted, len(text))
        stages[name] = _filled(given, usual[name], positions, text)
    for name, schedule in stages.items():
        schedule.check(name)
    has_memory = recipe.to != "attention" and has_new_parts
    train = recipe.train or ("all" if has_memory else "attention")
    return replace(recipe, train=train, **stages)  # type: ignore[arg-type]


def shortest_text(student: PreTrainedConfig) -> int:
    """Tokens that a text must have for windows of the usual lengths, which become shorter for it and the student."""
    return min(SHORTEST, getattr(student, "max_position_embeddings", None) or SHORTEST)


def begins_near(recipe: Recipe, student: PreTrainedConfig) -> bool:
    """Whether heads of a student keep older tokens beside their window, with which it begins near its teacher."""
    keeps = any(any(numbers) for numbers in getattr(student, "kept_tokens", ()))
    return recipe.to == "attention" and keeps


def with_loss(recipe: Recipe, *, is_exact: bool) -> Recipe:
    """The recipe with the part of cross-entropy: there is nothing else to learn for a student that is its teacher."""
    if recipe.cross_entropy is not None:
        return recipe
    return replace(recipe, cross_entropy=float(is_exact))


class Change(NamedTuple):
    """A preset that a given option changes, since they do not fit together."""

    name: str
    value: Any  # None: the default of the config
    reason: str


def changes(recipe: Recipe, teacher: PreTrainedConfig) -> Iterator[Change]:
    """The presets that given options change."""
    given = {**_named_options(recipe), **_given_options(recipe)}
    if given.get("attention_sinks"):
        yield Change("num_sink_tokens", 0, "attention_sinks take the place of the first tokens")
        yield Change("full_attention_window", None, "heads with it cannot have attention_sinks")
    gate = given.get("gate")
    if gate in ("mamba2", "mamba3"):
        heads = teacher.num_key_value_heads
        yield Change("linear_num_value_heads", heads, f"gate={gate} has a step for each of them")
        yield Change("output_gate", None, f"gate={gate} has one of its own")
    if given.get("variant", "mag") != "mag":
        yield Change("memory_gate", None, "it is of variant=mag")


def notes(
    given: Recipe, recipe: Recipe, teacher: PreTrainedConfig, student: PreTrainedConfig
) -> Iterator[str]:
    """Sentences about defaults that are not the usual ones, and why.

    Args:
        given: the recipe as it was given.
        recipe: the same with a value for each default.
        teacher: the teacher's config.
        student: the student's config.
    """
    own = own_window(teacher)
    window = recipe.options.get("sliding_window")
    if given.keep is None and str(recipe.keep) == SHARE_OF_FEW:
        yield (
            f"keep is {recipe.keep}, since few layers of the teacher see everything; its others see {own} tokens, and "
            "stay as they are."
        )
    is_given = "full_attention_window" in given.options
    if own is not None and not is_given and recipe.options.get("full_attention_window") == own:
        yield f"full_attention_window is {own}, since no layer of the teacher sees more tokens."
    presets = _presets(given, _keep(recipe), teacher)
    for change in changes(given, teacher):
        is_other = presets.get(change.name) != change.value
        if is_other and change.name not in given.options:
            value = "its default" if change.value is None else change.value
            yield f"{change.name} is {value}, since {change.reason}."
    keeps_none = recipe.to == "attention" and window and not begins_near(recipe, student)
    if keeps_none and given.distillation.steps is None:
        steps = recipe.distillation.steps
        yield f"distillation has {steps} steps, since heads keep no older tokens beside their window."
    if given.transfer.steps and not recipe.transfer.steps:
        yield "There is no attention transfer, since no layer has a memory to train: --transfer has no effect."


def _keep(recipe: Recipe) -> Keep:
    assert isinstance(recipe.keep, Keep)
    return recipe.keep


def _given_options(recipe: Recipe) -> dict[str, Any]:
    """The options of the recipe; a window of None is none, where layers can do without one."""
    return {
        name: x
        for name, x in recipe.options.items()
        if name != "sliding_window" or x is not None or not can_have_windows(str(recipe.to))
    }


def _named_options(recipe: Recipe) -> dict[str, Any]:
    """The options of `servable` and `size`."""
    to = str(recipe.to)
    options = dict[str, Any]()
    if recipe.servable:
        check(to in SERVABLE, "to", f"{' or '.join(SERVABLE)} for a servable student", to)
        options |= SERVABLE[to]
    if recipe.size is not None:
        check_word("size", recipe.size, tuple(SIZES))
        is_possible = to == "attention" and not recipe.servable
        check(is_possible, "size", "None with a memory or servable", recipe.size)
        options |= SIZES[recipe.size]
    return options


def _presets(recipe: Recipe, keep: Keep, teacher: PreTrainedConfig) -> dict[str, Any]:
    """The options of a student for which the recipe gives none."""
    to = str(recipe.to)
    family = find_student(to)
    presets = {name: head_dim(teacher) for name in HEAD_SIZES if hasattr(family.config, name)}
    presets |= {"memory_rope": True, **PRESETS.get(to, {})}
    named = _named_options(recipe)
    is_constant = "full_attention_window" in named
    wanted = f"heads such as heads:1/11, or none, with size={recipe.size}, which no layer outgrows"
    check(not (is_constant and keep.has_layers), "keep", wanted, str(keep))
    window = _given_options(recipe).get("sliding_window")
    has_window = to == "attention" or keep.is_heads or window is not None
    if not (has_window and can_have_windows(to) and _replaces_layers(keep, teacher, window)):
        return presets | ({} if to == "attention" else named)
    usual = window_options(to, keeps=not recipe.servable)
    options = within_teacher(usual | named, teacher)
    reach = options.get("full_attention_window")
    if window is not None and reach is not None:
        options["full_attention_window"] = max(window, reach)
    return presets | options


def _replaces_layers(keep: Keep, teacher: PreTrainedConfig, window: int | None) -> bool:
    """Whether layers of the teacher get heads with windows: those that are not kept, and have no such window."""
    own = own_window(teacher)
    stays = "sliding_attention" if is_mixed(teacher) and window in (None, own) else None
    changing = [i for i, kind in enumerate(layer_types(teacher)) if kind != stays]
    if keep.is_ranked:
        return keep.is_heads or keep.count(len(changing)) < len(changing)
    return not {*changing} <= {*keep.layers_of(teacher.num_hidden_layers)}


def _filled(given: Mapping[str, Any], usual: Schedule, positions: int, text: TextFacts) -> Schedule:
    """The usual schedule with the fields that are given; windows of the usual length fit the teacher and the text."""
    if "length" not in given:
        usual = usual._replace(length=min(usual.length, positions, len(text)))
    return usual._replace(**given)
