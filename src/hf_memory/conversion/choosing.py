"""Choosing by a teacher's weights which layers or heads keep their attention, and how many older tokens layers keep."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from accelerate.utils import broadcast_object_list
from torch import Tensor
from transformers import PreTrainedModel

from hf_memory.conversion.choice import Choice, choice_by_ranking
from hf_memory.conversion.plan import Plan, resolve
from hf_memory.conversion.run import Run
from hf_memory.conversion.run_identity import FINGERPRINT
from hf_memory.conversion.stages.sharding import processes
from hf_memory.conversion.students import SINKS, WINDOW, build
from hf_memory.conversion.students.heads import (
    HeadScore,
    rank_heads_by_predictions,
    rank_heads_by_retrieval,
)
from hf_memory.conversion.students.kept_tokens import spread_kept_tokens
from hf_memory.conversion.students.starts import start_near
from hf_memory.conversion.students.weights import CarriedWeights
from hf_memory.files.folders import replaced
from hf_memory.files.text import Text
from hf_memory.modeling.base import MemoryForCausalLM
from hf_memory.progress import Progress, silent

RANKING = "heads.json"  # file beside checkpoints


def choose(
    teacher: PreTrainedModel,
    tokens: Text | Tensor,
    plan: Plan,
    run: Run = Run(),
    *,
    quantized: PreTrainedModel | None = None,
) -> Choice:
    """Decide what a plan without a choice leaves open: rank layers or heads, then spread the tokens that layers keep.

    Args:
        teacher: the teacher; it is not changed.
        tokens: [T], the training text.
        plan: the plan; its own choice is returned if it is final.
        run: its `checkpoints` have the ranking of a run that is resumed; its `report` is called with the progress.
        quantized: the teacher with quantised weights.
    """
    if plan.is_final:
        return plan.choice
    observed = quantized or teacher.eval()
    choice = plan.choice
    if plan.keep.is_ranked:
        (ranking,) = broadcast_object_list([_ranked_once(observed, tokens, plan, run)])
        choice = choice_by_ranking(plan.recipe, plan.teacher, ranking)
    if plan.recipe.spread_kept:
        alike = resolve(plan.recipe, plan.teacher, tokens, plan.scorer, choice=choice)
        student, _ = untrained_student(teacher, tokens, alike, quantized=quantized)
        length = plan.recipe.distillation.length
        numbers = spread_kept_tokens(student, observed, tokens, length=length, report=run.report)
        (numbers,) = broadcast_object_list([numbers])
        choice = replace(choice, kept_tokens=tuple(numbers))
    return choice


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
        plan: the final plan, as `convert` returns it.
        quantized: the teacher with quantised weights.
    """
    observed = quantized or teacher.eval()
    student = build(plan.student, teacher, plan.recipe.seed)
    student.to(observed.device)  # type: ignore[arg-type]
    weights = start_near(
        student, teacher, tokens, plan.window, observed=observed, is_exact=plan.is_exact
    )
    return student, weights


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
    mean_kept = sum(config.kept_tokens) // config.num_hidden_layers
    window = (config.sliding_window or WINDOW) + mean_kept
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
        before = json.loads(file.read_text(encoding="utf-8"))
        if before["run"] == this_run:
            return [HeadScore(*row) for row in before["heads"]]
    heads = ranked_heads(teacher, tokens, plan, report=run.report)
    if processes().is_main_process:
        with replaced(file) as partial:
            partial.write_text(json.dumps({"run": this_run, "heads": heads}), encoding="utf-8")
    return heads
