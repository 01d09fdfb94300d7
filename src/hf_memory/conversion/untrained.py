"""Students as they are before their stages, and the ranking of its teacher's heads."""

from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_memory.conversion.defaults import WINDOW, student_options
from hf_memory.conversion.keep import Keep
from hf_memory.conversion.plan import Plan
from hf_memory.conversion.recipe import Recipe
from hf_memory.conversion.students import SINKS, build, student_config
from hf_memory.conversion.students.heads import (
    HeadScore,
    rank_heads_by_predictions,
    rank_heads_by_retrieval,
)
from hf_memory.conversion.students.starts import start_near
from hf_memory.conversion.students.weights import CarriedWeights
from hf_memory.files.text import Text
from hf_memory.modeling.any_model import check_model
from hf_memory.modeling.base import MemoryForCausalLM
from hf_memory.progress import Progress, silent


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
        **options: fields of the family's config, such as `gate`, which replace the presets of a student. `cache_bits`,
            of which no weight depends, is none unless it is given.

    Raises:
        ValueError: if the teacher or the family is not supported, or a layer does not exist.
    """
    check_model("teacher", teacher)
    config = teacher.config
    given = Keep.parse(keep)
    kept = given.layers_of(config.num_hidden_layers)
    in_all_bits: dict[str, Any] = {"cache_bits": None}
    all_options = student_options(Recipe(to, given, in_all_bits | options), given, config)
    return build(student_config(config, to, kept, all_options), teacher, seed)


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
        student, teacher, tokens, plan.training_length, observed=observed, is_exact=plan.is_exact
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
    # In the ranking, a longer window stands for kept tokens: which tokens a head would keep is not known in a teacher
    # with plain attention, but the head then sees as many. Likewise first tokens stand for sinks.
    config: Any = plan.student
    kept = [number for numbers in config.kept_tokens for number in numbers]
    mean_kept = sum(kept) // len(kept)
    window = (config.sliding_window or WINDOW) + mean_kept
    in_their_place = SINKS if config.attention_sinks else 0
    first = config.num_sink_tokens or in_their_place
    return rank_heads_by_predictions(teacher, tokens, window=window, first=first, report=report)
