"""How many heads must keep everything, so that a student is near enough to its teacher before it is trained."""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor
from transformers import PreTrainedModel

from hf_memory.conversion.choice import Tried, choice_by_ranking
from hf_memory.conversion.plan import Plan, resolve
from hf_memory.conversion.recipe import Recipe
from hf_memory.conversion.students import usual_window
from hf_memory.conversion.students.heads import HeadScore
from hf_memory.conversion.untrained import ranked_heads, untrained_student
from hf_memory.evaluation import agreement, cache_share
from hf_memory.files.text import Text
from hf_memory.progress import Progress, silent

SHARES = ("1/25", "2/25", "3/25", "4/25", "6/25", "9/25", "1/2")
WINDOWS = (128, 256, 512)  # tokens of which the other heads hold as many bytes, see `usual_window`
CONTEXT = 8192
ROWS = (
    6  # tokens after which caches are compared, windows of the text on which students are measured
)


def smallest_student(
    recipe: Recipe,
    kl: float,
    teacher: PreTrainedModel,
    tokens: Text | Tensor,
    *,
    quantized: PreTrainedModel | None = None,
    report: Callable[[Progress], None] = silent,
) -> list[Tried]:
    """Measure untrained students in which a share of the heads keeps everything, up to the first that is near enough.

    The student with the smallest cache is measured first. In each, 4 to 50 % of the heads keep everything, which
    are the first ones of `ranked_heads`; the other heads have windows and kept tokens of as many bytes as 128, 256 and
    512 tokens, or the window of the recipe or the teacher. `choose` calls this for a recipe with a goal.

    Args:
        recipe: the recipe of the student, whose `keep` and `goal` are not used.
        kl: largest KL divergence from the teacher before training, in nats per token.
        teacher: the teacher; it is not changed.
        tokens: [T], the training text; its last six windows are read.
        quantized: the teacher with quantised weights, from which the distance is then measured.
        report: is called with the progress.

    Raises:
        ValueError: if no student is near enough, or the window is not shorter than the windows of the text.
    """
    usual = [usual_window(teacher.config, str(recipe.to), recipe.options, size) for size in WINDOWS]
    given = [{**x, **recipe.options} for x in usual]
    sizes = [
        x for i, x in enumerate(given) if x not in given[:i]
    ]  # one, if the recipe or the teacher has a window
    wanted = [
        replace(recipe, keep=f"heads:{share}", options=options, goal=None)
        for share in SHARES
        for options in sizes
    ]
    plans = [
        plan for plan in (resolve(x, teacher.config, tokens) for x in wanted) if not plan.is_exact
    ]
    distinct = {
        (plan.num_heads_to_rank, str(plan.recipe.options)): plan for plan in reversed(plans)
    }  # least share first
    plans = list(distinct.values())
    observed = quantized or teacher
    heads = dict[int, list[HeadScore]]()  # by the window of the others
    tried = list[Tried]()
    for i, plan in enumerate(sorted(plans, key=_cache)):
        report(Progress("measuring untrained students", i, len(plans)))
        size = plan.student.sliding_window  # type: ignore[attr-defined]
        heads[size] = heads.get(size) or ranked_heads(observed, tokens, plan, report=report)
        choice = choice_by_ranking(plan.recipe, teacher.config, heads[size])
        final = resolve(plan.recipe, teacher.config, tokens, choice=choice)
        student, _ = untrained_student(teacher, tokens, final, quantized=quantized)
        length = plan.recipe.distillation.length
        found = agreement(
            student, observed, tokens[-ROWS * length :], length=length, max_tokens=None
        ).kl
        decided = replace(choice, keep=plan.keep, options=plan.recipe.options)
        tried.append(Tried(plan.recipe, _cache(plan), float(found), decided))
        if found <= kl:
            return tried
    least = min((x.kl for x in tried), default=None)
    raise ValueError(
        f"goal must be a KL that half of the heads reach before training, got {kl:g}, where {least} is"
    )


def _cache(plan: Plan) -> float:
    return cache_share(plan.student, plan.teacher, CONTEXT)
