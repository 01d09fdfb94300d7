"""How many heads must keep everything, so that a student is near enough to its teacher before it is trained."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from torch import Tensor
from transformers import PreTrainedModel

from hf_memory.conversion.choice import CONTEXT, Choice, Tried, choice_by_ranking, likely_choice
from hf_memory.conversion.defaults import window_options, within_teacher
from hf_memory.conversion.keep import Keep
from hf_memory.conversion.plan import Plan
from hf_memory.conversion.students.heads import HeadScore
from hf_memory.conversion.untrained import ranked_heads, untrained_student
from hf_memory.evaluation import agreement, cache_share
from hf_memory.files.text import Text
from hf_memory.progress import Progress, silent

SHARES = ("1/25", "2/25", "3/25", "4/25", "6/25", "9/25", "1/2", "2/3")
# tokens of which the other heads hold as many bytes, see `window_options`
WINDOWS = (
    128,
    256,
    512,
)
SIZES = ("sliding_window", "num_kept_tokens")  # options that a goal decides
ROWS = 6  # windows of the text on which students are measured


class GoalNotReached(ValueError):
    """Raised if no student is as near to its teacher as a goal says.

    Attributes:
        tried: the students that were measured.
    """

    def __init__(self, goal: float, tried: Sequence[Tried]):
        self.tried = tuple(tried)
        nearest = min(tried, key=lambda x: x.kl, default=None)
        found = "heads with windows see all of a window of training, so that there is nothing to measure"
        if nearest is not None:
            found = (
                f"the nearest of {len(tried)} students, {nearest.keep} with a window of {nearest.window} and "
                f"{nearest.kept_tokens} kept tokens, has {nearest.kl:.3g}"
            )
        super().__init__(
            f"goal must be a KL that a student reaches before training, got {goal:g}: {found}"
        )


def smallest_student(
    plan: Plan,
    teacher: PreTrainedModel,
    tokens: Text | Tensor,
    *,
    quantized: PreTrainedModel | None = None,
    report: Callable[[Progress], None] = silent,
) -> Choice:
    """Measure untrained students in which a share of the heads keeps everything, up to the first that is near enough.

    The student with the smallest cache is measured first. In each, 4 to 67 % of the heads keep everything, which
    are the first ones of `ranked_heads`; the other heads have windows and kept tokens of as many bytes as 128, 256 and
    512 tokens, except for what the recipe or the teacher says. `choose` calls this for a plan with a goal.

    Args:
        plan: a plan with a goal.
        teacher: the teacher; it is not changed.
        tokens: [T], the training text; its last six windows are read.
        quantized: the teacher with quantised weights, from which the distance is then measured.
        report: is called with the progress.

    Raises:
        GoalNotReached: if no student is near enough.
    """
    goal = plan.goal
    assert goal is not None
    observed = quantized or teacher
    length = plan.recipe.distillation.length
    candidates = sorted(_candidates(plan), key=_cache)
    heads = dict[int, list[HeadScore]]()  # by the window of the others
    tried = list[Tried]()
    for i, candidate in enumerate(candidates):
        report(Progress("measuring untrained students", i, len(candidates)))
        window = candidate.student.sliding_window  # type: ignore[attr-defined]
        heads[window] = heads.get(window) or ranked_heads(
            observed, tokens, candidate, report=report
        )
        ranked = choice_by_ranking(candidate.recipe, plan.teacher, heads[window])
        choice = replace(ranked, keep=candidate.keep, options=candidate.choice.options)
        decided = plan.with_choice(choice)
        student, _ = untrained_student(teacher, tokens, decided, quantized=quantized)
        rows = tokens[-ROWS * length :]
        found = agreement(student, observed, rows, length=length, max_tokens=None).kl
        tried.append(_tried(decided, float(found)))
        if found <= goal:
            return replace(choice, tried=tuple(tried))
    raise GoalNotReached(goal, tried)


def _candidates(plan: Plan) -> Iterator[Plan]:
    """Plans of all shares and sizes, with the first heads in place of the best; none twice, or equal to the teacher."""
    given = plan.given.options
    to = str(plan.recipe.to)
    known = set[tuple[int, str]]()
    for share in SHARES:
        keep = Keep.parse(f"heads:{share}")
        for tokens in WINDOWS:
            usual = within_teacher(window_options(to, tokens), plan.teacher)
            options = {name: usual[name] for name in SIZES if name in usual and name not in given}
            decided = Choice(keep=keep, options=options)
            heads = likely_choice(decided.applied_to(plan.recipe), plan.teacher).heads
            kind = len(heads), str(options)
            if kind in known:
                continue
            known.add(kind)
            candidate = plan.with_choice(replace(decided, heads=heads))
            if not candidate.is_exact:
                yield candidate


def _tried(plan: Plan, kl: float) -> Tried:
    window = plan.student.sliding_window  # type: ignore[attr-defined]
    kept_tokens = plan.recipe.options.get("num_kept_tokens", 0)
    return Tried(str(plan.keep), window, kept_tokens, _cache(plan), kl)


def _cache(plan: Plan) -> float:
    return cache_share(plan.student, plan.teacher, CONTEXT)
