"""The measurements of a model for a model card: some of the tasks, without intervals."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig

from hf_memory.evaluation.efficiency import Cost
from hf_memory.evaluation.scores import ALL, SUMMARY
from hf_memory.evaluation.tasks import BYTES, LENGTHS, READ, WRITTEN, Found, Subject, evaluate
from hf_memory.progress import Progress, silent

QUALITY = ("agreement", "perplexity", "recall")
SCORED = ("instructions", "retrieval", "long_answers", "turns")
OF_CARD = (*SCORED, *QUALITY, "speed")
WINDOWS = ("full_attention_window", "sliding_window")  # fields of configs
FACTOR = 4  # a model is measured on texts of so many windows, if the teacher's positions and the text allow it


@dataclass(frozen=True)
class ModelResult:
    """The measurements of one model at several lengths of text in tokens.

    Attributes:
        name: name of the model in tables.
        perplexity: {last position: perplexity of held-out text from half of this position on}.
        recall: {length: by how many nats per token the loss on the end of a text falls if it repeats the beginning}.
        kl: {last position: KL divergence from the teacher in nats per token}; empty for the teacher itself.
        agreement: {last position: fraction of tokens with the teacher's most likely prediction}; empty for the teacher.
        costs: costs by length.
        windows: number of windows of text in which perplexity, KL and agreement were measured.
        passages: number of passages in the texts of each length that were read twice.
        scores: {kind of question: figures with their intervals}; of a student, compared with its teacher.
        summary: figures over all kinds of questions that the teacher can answer.
    """

    name: str
    perplexity: dict[int, float]
    recall: dict[int, float]
    kl: dict[int, float]
    agreement: dict[int, float]
    costs: tuple[Cost, ...]
    windows: int
    passages: int
    scores: dict[str, dict] = field(default_factory=dict)
    summary: dict[str, dict] = field(default_factory=dict)


def measure(
    name: str,
    subject: Subject,
    *,
    tasks: Iterable[str] = OF_CARD,
    found: Found | None = None,
    keep: Callable[[], object] = lambda: None,
    report: Callable[[Progress], None] = silent,
) -> ModelResult:
    """Measure a model for a model card.

    Args:
        name: name of the row in tables.
        subject: the model, a text that it was not trained on, and the teacher to compare it with, unless it is the
            teacher; see `lengths_beyond` for the lengths.
        tasks: what is measured, names from OF_CARD.
        found: earlier results, which are not measured again; new ones are added.
        keep: is called after each result.
        report: is called with the progress.
    """
    found = evaluate(subject, tasks, found, keep=keep, name=name, report=report)

    def curve(task: str, figure: str, part: str = "value") -> dict[int, Any]:
        return {int(tokens): figures[figure][part] for tokens, figures in found.get(task, {}).items()}

    columns = [curve("speed", figure) for figure in (BYTES, READ, WRITTEN)]
    return ModelResult(
        name=name,
        perplexity=curve("perplexity", "perplexity"),
        recall=curve("recall", "recall"),
        kl=curve("agreement", "KL"),
        agreement=curve("agreement", "same choice"),
        costs=tuple(Cost(context, *(column[context] for column in columns)) for context in columns[0]),
        windows=[len(x) for x in curve("perplexity", "perplexity", "samples").values()][-1],
        passages=[len(x) for x in curve("recall", "recall", "samples").values()][-1],
        scores={at: figures for task in SCORED for at, figures in found.get(task, {}).items()},
        summary=found.get(SUMMARY, {}).get(ALL, {}),
    )


def longest_window(config: PreTrainedConfig) -> int:
    """Tokens of the longest window of attention in a model; 0 if it has none."""
    return max(getattr(config, name, None) or 0 for name in WINDOWS)


def lengths_beyond(config: PreTrainedConfig) -> tuple[int, ...]:
    """LENGTHS, continued to at least four times the longest window: within it, a student equals its teacher."""
    lengths = list(LENGTHS)
    while lengths[-1] < FACTOR * longest_window(config):
        lengths.append(2 * lengths[-1])
    return tuple(lengths)
