"""The measurements of a model for a model card: some of the tasks, without intervals."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_memory.evaluation.efficiency import Cost
from hf_memory.evaluation.language import BUDGET
from hf_memory.evaluation.tasks import BYTES, GAP, LENGTHS, READ, WINDOW, WRITTEN, Subject, evaluate
from hf_memory.files.text import Text
from hf_memory.progress import Progress, silent

OF_CARD = ("agreement", "perplexity", "copying", "positions", "recall", "speed")


@dataclass(frozen=True)
class ModelResult:
    """The measurements of one model, a row of the table of results.

    Attributes:
        name: name of the row.
        perplexity: perplexity of held-out text.
        copy_gain: recall in nats per token, see `copy_gain`.
        kl: KL divergence from the teacher in nats per token; None for the teacher itself.
        agreement: fraction of tokens with the teacher's most likely prediction; None for the teacher itself.
        perplexity_by_position: {last position: perplexity of held-out text}.
        recall_by_distance: {tokens from the first reading to the second: copy_gain}.
        costs: costs by context.
    """

    name: str
    perplexity: float
    copy_gain: float
    kl: float | None
    agreement: float | None
    perplexity_by_position: dict[int, float]
    recall_by_distance: dict[int, float]
    costs: tuple[Cost, ...]


def measure(
    name: str,
    model: PreTrainedModel,
    held_out: Text | Tensor,
    teacher: PreTrainedModel | None,
    *,
    contexts: Iterable[int] = LENGTHS,
    max_tokens: int | None = BUDGET,
    report: Callable[[Progress], None] = silent,
) -> ModelResult:
    """Measure a model for a model card.

    Args:
        name: name of the row in tables.
        model: the model.
        held_out: a text that it was not trained on.
        teacher: the teacher to compare it with; None if it is the teacher.
        contexts: context lengths; those that are too long for the model or the text are left out.
        max_tokens: largest number of tokens to read for all measures except speed; None: as many as they can use.
        report: is called with the progress.
    """
    subject = Subject(model, held_out, teacher, tuple(contexts), max_tokens)
    found = evaluate(subject, OF_CARD, name=name, report=report)

    def curve(task: str, figure: str) -> dict[int, Any]:
        return {int(tokens): figures[figure]["value"] for tokens, figures in found.get(task, {}).items()}

    columns = [curve("speed", figure) for figure in (BYTES, READ, WRITTEN)]
    return ModelResult(
        name=name,
        perplexity=curve("perplexity", "perplexity")[WINDOW],
        copy_gain=curve("copying", "recall")[GAP],
        kl=curve("agreement", "KL").get(WINDOW),
        agreement=curve("agreement", "same choice").get(WINDOW),
        perplexity_by_position=curve("positions", "perplexity"),
        recall_by_distance=curve("recall", "recall"),
        costs=tuple(Cost(context, *(column[context] for column in columns)) for context in columns[0]),
    )
