"""A whole conversion in one call."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from accelerate.utils import broadcast_object_list
from torch import Tensor
from transformers import PreTrainedModel

from hf_memory.conversion.claims import FINGERPRINT, claim
from hf_memory.conversion.costs import check_memory
from hf_memory.conversion.plan import Plan, Stage, check_run, check_space
from hf_memory.conversion.run import Run
from hf_memory.conversion.stages.distillation import distill
from hf_memory.conversion.stages.fine_tuning import fine_tune
from hf_memory.conversion.stages.sharding import processes
from hf_memory.conversion.stages.transfer import attention_transfer
from hf_memory.conversion.students import SINKS, WINDOW, build
from hf_memory.conversion.students.heads import (
    HeadScore,
    rank_heads_by_predictions,
    rank_heads_by_retrieval,
)
from hf_memory.conversion.students.kept_tokens import spread_kept_tokens
from hf_memory.conversion.students.starts import start_near
from hf_memory.conversion.students.weights import CarriedWeights
from hf_memory.conversion.teachers import shared_options
from hf_memory.files.folders import replaced
from hf_memory.files.text import Text
from hf_memory.modeling.base import MemoryForCausalLM
from hf_memory.progress import History, Progress, silent

RANKING = "heads.json"  # file beside checkpoints


class Conversion(NamedTuple):
    """The result of a conversion.

    Attributes:
        student: the student.
        plan: the plan, with the layers and heads that a ranking has chosen.
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
    plan: Plan,
    run: Run = Run(),
    *,
    quantized: PreTrainedModel | None = None,
    scorer: PreTrainedModel | None = None,
) -> Conversion:
    """Convert a Transformer into a memory model, according to a plan of `resolve`.

    The same plan gives the same student. If torchrun or accelerate started several processes, all of them call this
    with the same arguments, and all get the student.

    Args:
        teacher: the causal language model for which the plan was made; it is not changed.
        tokens: [T], the training text for which the plan was made.
        plan: the plan.
        run: checkpoints, progress reports and options of the Trainer.
        quantized: the teacher with quantised weights (see `load_quantized`). The student then learns from it, on its
            device, and still gets its weights from `teacher`.
        scorer: the model of the plan's `scorer`, which scores in distillation.

    Raises:
        ValueError: if the plan is of another teacher or text, the checkpoints are of another plan, or a loss is not
            finite.
        OSError: if a file cannot be written.
    """
    _check_same(plan, teacher, tokens)
    if (scorer and scorer.config.vocab_size) != (plan.scorer and plan.scorer.vocab_size):
        raise ValueError(f"scorer must be the one of the plan, got {type(scorer).__name__}")
    observed = teacher.eval() if quantized is None else quantized
    check_run(plan, run)
    check_space(plan, run)
    check_memory(plan, run, observed.device)
    if run.checkpoints and processes().is_main_process:
        models: dict = {"teacher": teacher, "quantized": quantized, "scorer": scorer}
        models |= {"tokens": tokens, "validation": run.validation}
        claim(run.checkpoints, plan.describe(run) | models)
    if run.checkpoints:
        processes().wait_for_everyone()  # until the folder is claimed
    if plan.ranked or plan.ranked_heads:
        (heads,) = broadcast_object_list([_ranked_once(observed, tokens, plan, run)])
        plan = plan.choosing(heads)
    student, weights = untrained_student(teacher, tokens, plan, quantized=quantized)
    if plan.recipe.spread_kept:
        how: dict = {"length": plan.recipe.distillation.length, "report": run.report}
        (kept,) = broadcast_object_list([spread_kept_tokens(student, observed, tokens, **how)])
        plan = plan.with_kept_tokens(kept)
        student, weights = untrained_student(teacher, tokens, plan, quantized=quantized)
    losses = {}
    for stage in plan.stages:
        scores = scorer if scorer and stage.slot == "distillation" else observed
        losses[stage.name] = _learn(
            stage, student, scores, tokens, plan, run.of(stage.slot, plan.later(stage))
        )
    student.config.use_cache = True  # the Trainer turns it off
    return Conversion(student, plan, weights, losses)


def untrained_student(
    teacher: PreTrainedModel,
    tokens: Text | Tensor,
    plan: Plan,
    *,
    quantized: PreTrainedModel | None = None,
) -> tuple[MemoryForCausalLM, CarriedWeights]:
    """The student of a plan as it is before its stages, to compare it with the trained one.

    Args:
        teacher: the teacher.
        tokens: the training text.
        plan: the plan, with its layers and heads chosen, as `convert` returns it.
        quantized: the teacher with quantised weights.
    """
    observed = quantized or teacher.eval()
    student = build(plan.student, teacher, plan.recipe.seed)
    student.to(observed.device)  # type: ignore[arg-type]
    return student, start_near(
        student, teacher, tokens, plan.window, observed=observed, is_exact=plan.is_exact
    )


def ranked_heads(
    teacher: PreTrainedModel,
    tokens: Text | Tensor,
    plan: Plan,
    *,
    report: Callable[[Progress], None] = silent,
) -> list[HeadScore]:
    """All heads of a teacher, those first that should keep everything in the student of a plan.

    Args:
        teacher: the teacher, or its quantised form.
        tokens: the training text.
        plan: a plan that keeps heads, or layers because of their heads.
        report: is called with the progress.
    """
    if plan.keep.ranking == "retrieval":
        return rank_heads_by_retrieval(teacher, tokens)
    config: Any = plan.student
    window = (config.sliding_window or WINDOW) + sum(config.kept_tokens) // config.num_hidden_layers
    in_their_place = SINKS if config.attention_sinks or config.virtual_token else 0
    first = config.num_sink_tokens or in_their_place
    return rank_heads_by_predictions(teacher, tokens, window=window, first=first, report=report)


def _ranked_once(
    teacher: PreTrainedModel, tokens: Text | Tensor, plan: Plan, run: Run
) -> list[HeadScore]:
    """The ranking of heads, which a run that is resumed finds beside its checkpoints."""
    if run.checkpoints is None:
        return ranked_heads(teacher, tokens, plan, report=run.report)
    file = run.checkpoints / RANKING
    this_run = (run.checkpoints / FINGERPRINT).read_text(encoding="utf-8")
    if file.exists():
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept["run"] == this_run:
            return [HeadScore(*row) for row in kept["heads"]]
    heads = ranked_heads(teacher, tokens, plan, report=run.report)
    if processes().is_main_process:
        with replaced(file) as partial:
            partial.write_text(json.dumps({"run": this_run, "heads": heads}), encoding="utf-8")
    return heads


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
        "train": plan.recipe.train,
    }
    return distill(student, teacher, tokens, schedule, **loss, seed=seed, run=run)
