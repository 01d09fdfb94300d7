"""Choosing by a teacher's weights what keeps its attention, and how many older tokens heads keep."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from accelerate.utils import broadcast_object_list
from torch import Tensor
from transformers import PreTrainedModel

from hf_memory.conversion.choice import Choice, choice_by_ranking
from hf_memory.conversion.goal import smallest_student
from hf_memory.conversion.plan import Plan
from hf_memory.conversion.run import Run
from hf_memory.conversion.run_identity import FINGERPRINT
from hf_memory.conversion.stages.sharding import processes
from hf_memory.conversion.students.kept_tokens import kept_by_head
from hf_memory.conversion.untrained import ranked_heads
from hf_memory.files.folders import replaced
from hf_memory.files.text import Text

CHOICE = "choice.json"  # file beside checkpoints


def choose(
    teacher: PreTrainedModel,
    tokens: Text | Tensor,
    plan: Plan,
    run: Run = Run(),
    *,
    quantized: PreTrainedModel | None = None,
) -> Choice:
    """Decide what a plan without a choice leaves open.

    The smallest student that reaches a goal is found; else layers or heads are ranked. Then it is
    decided how many older tokens each head keeps. If there are several processes, all get the choice of the first one.

    Args:
        teacher: the teacher; it is not changed.
        tokens: [T], the training text.
        plan: the plan; its own choice is returned if it is final.
        run: its `checkpoints` have the choice of a run that is resumed; its `report` is called with the progress.
        quantized: the teacher with quantised weights.

    Raises:
        ValueError: if no student reaches the goal, see `smallest_student`.
    """
    if plan.is_final:
        return plan.choice
    decide = partial(_decided, teacher, tokens, plan, run, quantized)
    choice = decide() if run.checkpoints is None else _decided_once(decide, run.checkpoints)
    (choice,) = broadcast_object_list([choice])
    return choice


def final_plan(
    teacher: PreTrainedModel,
    tokens: Text | Tensor,
    plan: Plan,
    run: Run,
    *,
    quantized: PreTrainedModel | None = None,
) -> Plan:
    """The plan with what `choose` decides, whose arguments these are; the plan itself if it is final."""
    if plan.is_final:
        return plan
    return plan.with_choice(choose(teacher, tokens, plan, run, quantized=quantized))


def _decided(
    teacher: PreTrainedModel,
    tokens: Text | Tensor,
    plan: Plan,
    run: Run,
    quantized: PreTrainedModel | None,
) -> Choice:
    observed = quantized or teacher.eval()
    choice = plan.choice
    if plan.goal is not None:
        choice = smallest_student(plan, teacher, tokens, quantized=quantized, report=run.report)
    elif plan.keep.is_ranked:
        ranking = ranked_heads(observed, tokens, plan, report=run.report)
        choice = choice_by_ranking(plan.recipe, plan.teacher, ranking)
    if plan.recipe.kept_by_head:
        alike = plan.with_choice(choice)
        # rows are as long as windows of distillation, whether or not it has steps
        how: dict = {"length": plan.recipe.distillation.length, "seed": plan.recipe.seed}
        numbers = kept_by_head(observed, tokens, alike.student, **how, report=run.report)
        choice = replace(choice, kept_tokens=tuple(map(tuple, numbers)))
    return choice


def _decided_once(decide: Callable[[], Choice], checkpoints: Path) -> Choice:
    """The choice, which a run that is resumed finds beside its checkpoints."""
    file = checkpoints / CHOICE
    this_run = (checkpoints / FINGERPRINT).read_text(encoding="utf-8")
    if file.exists():
        before = json.loads(file.read_text(encoding="utf-8"))
        if before["run"] == this_run:
            return Choice.of_json(before["choice"])
    choice = decide()
    if processes().is_main_process:
        with replaced(file) as new_file:
            content = {"run": this_run, "choice": choice.to_json()}
            new_file.write_text(json.dumps(content), encoding="utf-8")
    return choice
