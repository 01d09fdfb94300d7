"""A whole conversion in one call."""

from typing import NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from hf_memory.conversion.choosing import final_plan
from hf_memory.conversion.costs import check_memory
from hf_memory.conversion.plan import Plan, Stage, check_run, check_space, resolve
from hf_memory.conversion.recipe import Recipe
from hf_memory.conversion.run import Run
from hf_memory.conversion.run_identity import record_run
from hf_memory.conversion.stages.distillation import distill
from hf_memory.conversion.stages.fine_tuning import fine_tune
from hf_memory.conversion.stages.sharding import processes
from hf_memory.conversion.stages.transfer import attention_transfer
from hf_memory.conversion.students.weights import CarriedWeights
from hf_memory.conversion.teachers import check_teacher, shared_options
from hf_memory.conversion.untrained import untrained_student
from hf_memory.files.text import Text
from hf_memory.modeling.base import MemoryForCausalLM
from hf_memory.modeling.checks import check_type
from hf_memory.progress import History


class Conversion(NamedTuple):
    """The result of a conversion.

    Attributes:
        student: the student.
        plan: the final plan, with the layers and heads that a ranking has chosen.
        weights: which weights came from the teacher.
        losses: the losses of each stage, by its name.
    """

    student: MemoryForCausalLM
    plan: Plan
    weights: CarriedWeights
    losses: dict[str, History]


def convert(
    teacher: PreTrainedModel,
    tokens: Text | Tensor,
    recipe: Recipe | Plan,
    run: Run = Run(),
    *,
    quantized: PreTrainedModel | None = None,
) -> Conversion:
    """Convert a Transformer into a memory model.

    All that can be wrong is found first (`resolve`, `check_run`). Then the teacher's weights decide what the recipe
    leaves open (`choose`), the plan is made with this choice, and its stages run. The same recipe gives the same
    student. If torchrun or accelerate started several processes, all of them call this with the same arguments, and all
    get the student.

    Args:
        teacher: a causal language model of a type in TEACHERS; it is not changed.
        tokens: [T], the training text, tokenised by the teacher's tokenizer.
        recipe: the recipe; or a plan that `resolve` made of one for this teacher and this text.
        run: checkpoints, progress reports and options of the Trainer.
        quantized: the teacher with quantised weights (see `load_quantized`). The student then learns from it, on its
            device, and still gets its weights from `teacher`.

    Raises:
        ValueError: for what `resolve` refuses, if a plan is of another teacher or text, the checkpoints are of another
            recipe, or a loss is not finite.
        OSError: if a file cannot be written.
    """
    check_teacher("teacher", teacher)
    check_type("run", run, Run)
    plan = recipe if isinstance(recipe, Plan) else resolve(recipe, teacher.config, tokens)
    _check_same(plan, teacher, tokens)
    observed = teacher.eval() if quantized is None else quantized
    check_run(plan, run)
    check_space(plan, run)
    check_memory(plan, run, observed.device)
    if run.checkpoints and processes().is_main_process:
        models: dict = {"teacher": teacher, "quantized": quantized}
        models |= {"tokens": tokens, "validation": run.validation}
        record_run(run.checkpoints, plan.describe(run) | models)
    if run.checkpoints:
        processes().wait_for_everyone()  # until the run is recorded
    plan = final_plan(teacher, tokens, plan, run, quantized=quantized)
    run.chosen(plan)
    student, weights = untrained_student(teacher, tokens, plan, quantized=quantized)
    losses = {}
    for stage in plan.stages:
        losses[stage.name] = _learn(
            stage, student, observed, tokens, plan, run.of(stage.slot, plan.later(stage))
        )
    student.config.use_cache = True  # the Trainer turns it off
    return Conversion(student, plan, weights, losses)


def _check_same(plan: Plan, teacher: PreTrainedModel, tokens: Text | Tensor) -> None:
    planned, given = (
        shared_options(config) | {"dtype": None} for config in (plan.teacher, teacher.config)
    )
    if others := sorted(name for name in given if given[name] != planned.get(name)):
        raise ValueError(
            f"teacher must be the one of the plan, got one with another {' and '.join(others)}"
        )
    if len(tokens) != plan.num_tokens:
        raise ValueError(f"tokens must be the {plan.num_tokens} of the plan, got {len(tokens)}")


def _learn(
    stage: Stage,
    student: MemoryForCausalLM,
    teacher: PreTrainedModel,
    tokens: Text | Tensor,
    plan: Plan,
    run: Run,
) -> History:
    """Run one stage."""
    schedule = stage.schedule
    seed = stage.seed
    temperature = plan.recipe.temperature
    if stage.slot == "transfer":
        return attention_transfer(student, teacher, tokens, schedule, seed=seed, run=run)
    if stage.slot == "fine_tuning":
        return fine_tune(student, tokens, schedule, lora_rank=stage.lora_rank, seed=seed, run=run)
    loss: dict = {
        "temperature": temperature,
        "cross_entropy": stage.cross_entropy,
        "train": str(plan.recipe.train),
    }
    return distill(student, teacher, tokens, schedule, **loss, seed=seed, run=run)
