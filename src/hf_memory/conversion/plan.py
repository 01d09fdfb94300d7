"""Plans: a recipe and a choice become what will run, and errors that can be foreseen are raised here."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hf_memory.conversion import defaults
from hf_memory.conversion.choice import Choice, chosen_student, likely_choice
from hf_memory.conversion.defaults import (
    kept_by_head,
    student_keep,
    student_options,
    with_loss,
    with_stages,
)
from hf_memory.conversion.keep import Keep
from hf_memory.conversion.recipe import Recipe, Schedule, lora_rank_of
from hf_memory.conversion.run import Run
from hf_memory.conversion.run_identity import check_run_folder
from hf_memory.conversion.stages.distillation import loss_name
from hf_memory.conversion.stages.fine_tuning import (
    FINE_TUNING,
    check_fine_tuning,
    num_learned,
    own_learners,
)
from hf_memory.conversion.stages.trainer import new_parameters
from hf_memory.conversion.stages.transfer import TRANSFER, AttentionTransfer
from hf_memory.conversion.students import is_exact
from hf_memory.conversion.students.heads import HeadScore
from hf_memory.conversion.students.weights import carry_over
from hf_memory.conversion.teachers import check_teacher_config
from hf_memory.conversion.teachers.loading import check_bits, num_quantized
from hf_memory.files.folders import check_folder, check_output, check_room, size_of
from hf_memory.files.text import ANY_TEXT, Text, TextFacts, check_text, check_tokens
from hf_memory.modeling.checks import check, check_type
from hf_memory.modeling.chunks import check_passes_gradients

BYTES = 4  # size of a float32 number
NOTHING = Choice()  # keeps no attention


@dataclass(frozen=True)
class Stage:
    """A stage that will run."""

    slot: str  # the stage's name in the recipe
    name: str
    schedule: Schedule
    seed: int
    learned: int  # number of trained parameters
    cross_entropy: float = 0.0  # weight of the cross-entropy with the text in the loss
    lora_rank: int | None = None


@dataclass(frozen=True)
class Plan:
    """A recipe that was resolved for one teacher and one text, with all that was decided about it.

    Attributes:
        given: the recipe as it was given.
        recipe: the recipe with a value for each of its defaults, and with what the choice has decided.
        teacher: config of the teacher.
        student: config of the student.
        stages: the stages, in order.
        text: what is known of the text.
        student_parameters: number of the student's parameters.
        choice: what keeps the teacher's attention. In a plan that is not final, a stand-in: the first layers or heads,
            as many as the ranking will choose.
        is_final: whether nothing is left for `choose` to decide.
        is_exact: whether the student equals its teacher before any training.
        training_length: tokens of the longest window before fine-tuning.
        teacher_parameters: number of the teacher's parameters; 0 in fine-tuning, which has none.
        quantized_parameters: number of the teacher's parameters that are quantised.
    """

    given: Recipe
    recipe: Recipe
    teacher: PreTrainedConfig
    student: PreTrainedConfig
    stages: tuple[Stage, ...]
    text: TextFacts
    student_parameters: int
    choice: Choice = NOTHING
    is_final: bool = True
    is_exact: bool = True
    training_length: int = 0
    teacher_parameters: int = 0
    quantized_parameters: int = 0

    def with_text(self, tokens: Text | Tensor) -> "Plan":
        """The plan for a text that was read after the recipe was resolved; raises what `resolve` raises."""
        return _planned(self.given, self.teacher, TextFacts.of(tokens), None)

    def with_choice(self, choice: Choice) -> "Plan":
        """The final plan, by what the teacher's weights have decided; raises what `resolve` raises."""
        return _planned(self.given, self.teacher, self.text, choice)

    @property
    def num_tokens(self) -> int:
        """Tokens of the text."""
        return len(self.text)

    @property
    def goal(self) -> float | None:
        """The goal that `choose` has yet to meet."""
        return self.recipe.goal

    @property
    def teacher_bytes(self) -> int:
        """Bytes of the teacher that the student learns from."""
        whole = BYTES * self.teacher_parameters
        return (
            whole - self.quantized_parameters * (8 * BYTES - (self.recipe.teacher_bits or 0)) // 8
        )

    @property
    def keep(self) -> Keep:
        """What keeps its attention; no layer of a model that is fine-tuned, which has all that it had."""
        return Keep.parse(self.recipe.keep or ())

    def later(self, stage: Stage) -> float:
        """About how much work follows a stage, in multiples of its own: tokens times the weights that they meet."""
        works = [self._work(x) for x in self.stages]
        place = self.stages.index(stage)
        return sum(works[place + 1 :]) / works[place]

    def _work(self, stage: Stage) -> float:
        if stage.slot == "transfer":
            return stage.schedule.tokens * (self.teacher_parameters + 3 * stage.learned)
        is_scored = stage.slot == "distillation" and stage.cross_entropy < 1
        teacher = self.teacher_parameters if is_scored else 0
        return stage.schedule.tokens * (teacher + 3 * self.student_parameters)

    @property
    def kept_layers(self) -> tuple[int, ...]:
        """The layers that keep the teacher's attention, without those that a ranking has yet to choose."""
        return () if self._awaits_ranking else self.choice.layers

    @property
    def num_layers_to_rank(self) -> int:
        """The number of layers that a ranking has yet to choose."""
        return len(self.choice.layers) if self._awaits_ranking else 0

    @property
    def num_heads_to_rank(self) -> int:
        """The number of key-value heads that a ranking has yet to choose."""
        return len(self.choice.heads) if self._awaits_ranking else 0

    @property
    def _awaits_ranking(self) -> bool:
        return self.keep.is_ranked and not self.is_final

    @property
    def chosen_heads(self) -> list[HeadScore]:
        """The heads that a ranking has chosen to keep everything, with their scores, the best first."""
        return [x for x in self.choice.scores if (x.layer, x.head) in self.choice.heads]

    def describe(self, run: Run) -> dict[str, Any]:
        """The settings to which checkpoints of a run belong, without models and tokens."""
        recipe = {x.name: getattr(self.recipe, x.name) for x in fields(Recipe)}
        options = recipe.pop("options")
        kept: Any = str(self.keep) if self.keep.is_ranked else self.kept_layers
        return recipe | {"keep": kept, **options, **run.training}


def resolve(
    recipe: Recipe,
    teacher: PreTrainedConfig,
    tokens: Text | Tensor | TextFacts = ANY_TEXT,
) -> Plan:
    """Make the plan of a recipe for a teacher and a text, and refuse what cannot work. No weights are needed.

    The plan of a recipe that leaves something to the teacher's weights is not final: its sizes and costs are right, and
    its layers or heads are the first. `Plan.with_choice` makes it final. Only with a goal, which decides the sizes too,
    they are those of the default for `keep`.

    Args:
        recipe: the recipe.
        teacher: config of the teacher, or of the model to fine-tune if `recipe.to` is None.
        tokens: [T], the training text, tokenised by the teacher's tokenizer, or what is known of it; without it, the
            plan is for any text that is long enough, see `Plan.with_text`.

    Raises:
        ValueError: if the teacher, the family, a layer or an option is not supported, the text does not fit, or an
            argument is of another type.
    """
    check_type("recipe", recipe, Recipe)
    check_type("teacher", teacher, PreTrainedConfig)
    check_text(tokens)
    recipe.check()
    if recipe.to is not None:
        _check_models(recipe, teacher)
    return _planned(recipe, teacher, TextFacts.of(tokens), None)


def _planned(
    given: Recipe,
    teacher: PreTrainedConfig,
    text: TextFacts,
    choice: Choice | None,
) -> Plan:
    """The plan of a recipe; without a choice, of a likely one."""
    if given.to is None:
        return _fine_tuning_plan(given, teacher, text)
    recipe = given if choice is None else choice.applied_to(given)
    keep = student_keep(recipe, teacher)
    recipe = replace(recipe, keep=keep, options=student_options(recipe, keep, teacher))
    recipe = replace(recipe, kept_by_head=kept_by_head(recipe, given))
    is_open = recipe.goal is not None or keep.is_ranked or bool(recipe.kept_by_head)
    is_final = choice is not None or not is_open
    choice = likely_choice(recipe, teacher) if choice is None else choice
    config = chosen_student(recipe, choice, teacher)
    whole = _on_meta(teacher)
    student = _on_meta(config)
    carry_over(student, whole)
    has_new_parts = bool(new_parameters(student))
    recipe = with_stages(recipe, config, text, has_new_parts=has_new_parts, is_open=is_open)
    training_length = _training_length(recipe, config, text)
    exact = is_exact(config, teacher, training_length)
    if exact and not is_final and keep.kind == "auto":
        raise ValueError(
            "keep must not be auto for a student that equals its teacher whatever layers it keeps"
        )
    recipe = with_loss(recipe, is_exact=exact)
    return Plan(
        given,
        recipe,
        teacher,
        config,
        tuple(_stages(recipe, exact, student, whole)),
        text,
        _count(student),
        choice=choice,
        is_final=is_final,
        is_exact=exact,
        training_length=training_length,
        teacher_parameters=_count(whole),
        quantized_parameters=num_quantized(whole) if recipe.teacher_bits else 0,
    )


def check_run(plan: Plan, run: Run, *, output: Path | None = None, overwrite: bool = False) -> None:
    """Check, before any work, that a plan can be run.

    Args:
        plan: the plan.
        run: how it will be run.
        output: folder for the result.
        overwrite: whether the result of an earlier run in that folder may be replaced.

    Raises:
        ValueError: if a training argument is wrong, or a folder cannot be written to or has files of another run.
    """
    run.check(*(stage.schedule for stage in plan.stages))
    if run.checkpoints is not None:
        check_folder("checkpoints", run.checkpoints)
        check_run_folder(run.checkpoints)
    if output is not None:
        check_output(output, overwrite=overwrite, beside={"checkpoints": run.checkpoints})


def check_space(plan: Plan, run: Run, *, output: Path | None = None) -> None:
    """Raise OSError if a disk has too little free space for a run; the arguments are those of `check_run`."""
    learned = [stage.learned for stage in plan.stages]
    needs = {} if output is None else {output: BYTES * plan.student_parameters}
    if run.checkpoints and learned:
        written = sum(map(size_of, run.checkpoints.glob("*/checkpoint-*")))
        # a checkpoint has weights and both moments of AdamW
        needs[run.checkpoints] = max(0, 3 * BYTES * (sum(learned) + max(learned)) - written)
    check_room(needs)


def _check_models(recipe: Recipe, teacher: PreTrainedConfig) -> None:
    check_teacher_config("teacher", teacher)
    if recipe.teacher_bits is not None:
        check_bits(recipe.teacher_bits)


def _training_length(recipe: Recipe, student: PreTrainedConfig, text: TextFacts) -> int:
    """Tokens of the longest window before fine-tuning, after a check that the student, which has no more positions than
    its teacher, can read it."""
    lengths = [
        schedule.length for schedule in (recipe.transfer, recipe.distillation) if schedule.steps
    ]
    check_tokens(text, student, *lengths)
    check_fine_tuning(text, student, recipe.fine_tuning)
    length = max(lengths, default=recipe.transfer.length)
    sinks = getattr(student, "num_sink_tokens", 0)
    wanted = f"fewer than the {length} tokens of a training window"
    check(sinks < length, "num_sink_tokens", wanted, sinks)
    return length


def _stages(
    recipe: Recipe, exact: bool, student: PreTrainedModel, teacher: PreTrainedModel
) -> Iterator[Stage]:
    transfer, distillation, fine_tuning = recipe.schedules.values()
    seed = recipe.seed
    learner = AttentionTransfer(student, teacher)  # type: ignore[arg-type]
    if transfer.steps and len(learner.mixers) and not exact:
        yield Stage("transfer", TRANSFER, transfer, seed, _count(learner))
    if distillation.steps:
        if distillation.chunk_length:
            check_passes_gradients(student.model, "chunk_length of distillation must be 0")  # type: ignore[attr-defined]
        part = recipe.cross_entropy or 0.0
        own = own_learners(student, str(recipe.train))
        if recipe.train == "new" and not own:
            raise ValueError(
                "train must not be new for a student without parts that are new, got new"
            )
        learned = num_learned(student, lora_rank_of(str(recipe.train)), own)
        yield Stage("distillation", loss_name(part), distillation, seed + 1, learned, part)
    if fine_tuning.steps:
        yield _fine_tuning(recipe, fine_tuning, student, seed + 2)


def _fine_tuning_plan(given: Recipe, config: PreTrainedConfig, text: TextFacts) -> Plan:
    """The plan of a recipe without a student."""
    schedule = defaults.FINE_TUNING_SCHEDULE._replace(**given.fine_tuning.given)
    recipe = replace(given, fine_tuning=schedule)
    check(schedule.steps > 0, "steps of fine-tuning", "at least 1", schedule.steps)
    check_fine_tuning(text, config, schedule)
    model = _on_meta(config)
    stages = (_fine_tuning(recipe, schedule, model, recipe.seed),)
    return Plan(given, recipe, config, config, stages, text, _count(model))


def _fine_tuning(recipe: Recipe, schedule: Schedule, model: PreTrainedModel, seed: int) -> Stage:
    if schedule.chunk_length:
        check_passes_gradients(model.model, "chunk_length of fine_tuning must be 0")  # type: ignore[attr-defined]
    whole = () if recipe.lora_rank else set(model.parameters())
    learned = num_learned(model, recipe.lora_rank, whole)
    return Stage("fine_tuning", FINE_TUNING, schedule, seed, learned, 1.0, recipe.lora_rank)


def _on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    config = copy.deepcopy(config)
    config.dtype = torch.float32
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _count(model: nn.Module) -> int:
    return sum(x.numel() for x in model.parameters())
