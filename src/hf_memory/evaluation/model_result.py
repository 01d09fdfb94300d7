"""What the card of a conversion says of a model: some of the tasks, without their intervals."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_memory.evaluation.efficiency import Cost
from hf_memory.evaluation.language import BUDGET
from hf_memory.evaluation.tasks import BYTES, GAP, LENGTHS, READ, WINDOW, WRITTEN, Subject, evaluate
from hf_memory.progress import Progress, silent

OF_CARD = ("agreement", "perplexity", "copying", "positions", "recall", "speed")


@dataclass(frozen=True)
class ModelResult:
    """One row of the table of results."""

    name: str
    perplexity: float  # held-out
    copy_gain: float  # nats a token
    kl: float | None  # from the teacher, nats a token; None for the teacher itself
    agreement: float | None  # with the teacher's most likely token
    perplexity_by_position: dict[int, float]  # held-out, {last position: perplexity}
    recall_by_distance: dict[int, float]  # {tokens from one reading to the next: copy_gain}
    costs: tuple[Cost, ...]


def measure(
    name: str,
    model: PreTrainedModel,
    held_out: Tensor,
    teacher: PreTrainedModel | None,
    *,
    contexts: Iterable[int] = LENGTHS,
    max_tokens: int | None = BUDGET,
    report: Callable[[Progress], None] = silent,
) -> ModelResult:
    """All that a card says of one model; the teacher itself has none to be compared with.

    Args:
        name: the row's name in tables.
        model: to measure.
        held_out: [T] of text that it has not seen.
        teacher: to compare with.
        contexts: lengths to measure at, of which those are left out that the model or the text is too short for.
        max_tokens: that the model reads to be measured, beside what it takes to time it; None: as many as a measure
            can use.
        report: is told how far it is.
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
