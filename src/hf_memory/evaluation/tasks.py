"""The tasks of `hf-memory evaluate`. To add a task, add a function and an entry of TASKS in this file."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from hf_memory.evaluation.counts import check_counts
from hf_memory.evaluation.efficiency import cost
from hf_memory.evaluation.estimates import Estimate, described
from hf_memory.evaluation.language import (
    BUDGET,
    Tell,
    agreement_by_position,
    copy_gain,
    perplexity_by_position,
    say_nothing,
)
from hf_memory.evaluation.needles import MULTIKEY, PASSKEY, SINGLE, Hunt, hunt, samples_of, shortest
from hf_memory.evaluation.scores import (
    ALL,
    KINDS,
    SCORE,
    SUMMARY,
    Place,
    check_tolerance,
    compared,
    places,
    score,
    summary,
)
from hf_memory.evaluation.shares import memory_shares, mixers_with_memory
from hf_memory.evaluation.writing import PROMPTS, TEXTS, answers, words_alike
from hf_memory.files.text import Text
from hf_memory.progress import Progress, silent

LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
SCORED_AT = (512, 2048)
ITEMS = 32
TOLERANCE = 0.05
SHORTEST = 64  # tokens in which recall is measured
SHARED_IN = 1024  # tokens in which the share of a memory is measured, or fewer
TRIALS = 16  # largest number of passages for recall
QUALITY = ("agreement", "perplexity", "recall")
OF_CARD = (
    "instructions",
    "retrieval",
    "long_answers",
    "turns",
    *QUALITY,
    "memory",
    "speed",
)  # tasks for a model card
WINDOWS = ("full_attention_window", "sliding_window")  # fields of configs
FACTOR = 4  # a model is measured on texts of so many windows, if the teacher's positions and the text allow it
Figures = dict[str, Any]  # arguments of `described`, by name
Found = dict[str, dict[str, dict]]  # {task: {tokens: {figure: described}}}, for JSON


@dataclass(frozen=True)
class Subject:
    """A model to be evaluated, with the text and the settings.

    Args:
        model: the model.
        tokens: [T], a text that it was not trained on.
        teacher: the teacher to compare it with.
        lengths: context lengths in tokens; those that are too long for the model or the text are left out.
        max_tokens: largest number of tokens that the tasks of a model card read in total, except to measure speed;
            None: no limit.
        tokenizer: the model's tokenizer, for tasks that need words.
        samples: number of needles for each length.
        seed: seed for the needles.
        prompts: prompts of the task `answers`.
        new_tokens: tokens of an answer.
        theirs: the results of the teacher, to compare answers and scores with.
        items: number of questions of each kind that are scored.
        score_lengths: lengths of their prompts in tokens; those that are too long for the model are left out.
        tolerance: part of the teacher's score by which the student's may be less for a tie.
        tell: is called with the number of tokens of each batch.

    Raises:
        ValueError: if a number is out of its range.
    """

    model: PreTrainedModel
    tokens: Text | Tensor
    teacher: PreTrainedModel | None = None
    lengths: tuple[int, ...] = LENGTHS
    max_tokens: int | None = BUDGET
    tokenizer: Any = None
    samples: int = 10
    seed: int = 0
    prompts: Sequence[str] = PROMPTS
    new_tokens: int = 48
    theirs: Found = field(default_factory=dict)
    items: int = ITEMS
    score_lengths: tuple[int, ...] = SCORED_AT
    tolerance: float = TOLERANCE
    tell: Tell = say_nothing

    def __post_init__(self):
        names = "lengths", "max_tokens", "samples", "new_tokens", "items", "score_lengths"
        check_counts(**{name: getattr(self, name) for name in names})
        check_tolerance(self.tolerance)

    @property
    def contexts(self) -> list[int]:
        """The lengths that model and text are long enough for."""
        longest = getattr(self.model.config, "max_position_embeddings", None) or len(self.tokens)
        return [x for x in self.lengths if x <= min(longest, len(self.tokens))]

    def reading(self, part: float) -> dict[str, Any]:
        """Arguments of a measure: a fraction of the largest number of tokens, and the progress report."""
        return {
            "max_tokens": self.max_tokens and int(part * self.max_tokens),
            "progress": self.tell,
        }


class Task(NamedTuple):
    """A task of `hf-memory evaluate`.

    Args:
        says: what the task measures, for the help text.
        places: the numbers of tokens (lengths, distances) or kinds of questions to measure at; each result is saved.
        measure: a function of a subject and one of these places that returns figures by name, by place.
    """

    says: str
    places: Callable[[Subject], Sequence[Any]]
    measure: Callable[[Subject, Any], Mapping[Any, Figures]]


def _agreement(subject: Subject, length: int) -> dict[int, Figures]:
    assert subject.teacher is not None  # without a teacher there are no places
    both = subject.model, subject.teacher
    found = agreement_by_position(*both, subject.tokens, length=length, **subject.reading(1 / 4))
    return {
        end: {"KL": x.kl, "same choice": x.top1, "perplexity ratio": x.ratio}
        for end, x in found.items()
    }


def _perplexity(subject: Subject, length: int) -> dict[int, Figures]:
    found = perplexity_by_position(
        subject.model, subject.tokens, length=length, **subject.reading(1 / 4)
    )
    return {end: {"perplexity": figure} for end, figure in found.items()}


def _recall(subject: Subject, length: int) -> dict[int, Figures]:
    """Recall of the first eighth of a text of so many tokens, which is read again at its end."""
    how = subject.reading(1 / 2)
    passage = length // 8
    begun = len(Text.of(subject.tokens).start)
    most = how.pop("max_tokens")
    trials = TRIALS if most is None else max(1, min(TRIALS, most // (2 * sum(subject.contexts))))
    gap = length - begun - 2 * passage - passage // 2
    found = copy_gain(
        subject.model,
        subject.tokens,
        passage=passage,
        gap=gap,
        trials=trials,
        max_tokens=None,
        **how,
    )
    return {length: {"recall": found}}


def _memory(subject: Subject, _: str) -> dict[str, Figures]:
    """The shares of all layers."""
    length = min(SHARED_IN, max(subject.contexts))
    rows = Text.of(subject.tokens).windows(torch.zeros(1, dtype=torch.long), length)
    return {_layer(i): {"share": share} for i, share in memory_shares(subject.model, rows).items()}


def _layer(index: int) -> str:
    return f"layer {index:02}"


def _answers(subject: Subject, new_tokens: int) -> dict[int, Figures]:
    texts = list(
        answers(subject.model, subject.tokenizer, subject.prompts, new_tokens, subject.tell)
    )
    figures: Figures = {TEXTS: texts}
    if theirs := subject.theirs.get("answers", {}).get(str(new_tokens)):
        pairs = zip(texts, theirs[TEXTS]["value"])
        figures["words before they differ from the teacher's"] = Estimate(
            [words_alike(*pair) for pair in pairs]
        )
    return {new_tokens: figures}


def _scored(group: str, says: str) -> Task:
    """The task of answering questions of a group; there are none without a tokenizer."""

    def where(subject: Subject) -> list[Place]:
        longest = getattr(subject.model.config, "max_position_embeddings", None) or math.inf
        # there must be room for the answer
        fitting = tuple(x for x in subject.score_lengths if x < longest)
        return places(group, fitting) if subject.items and subject.tokenizer else []

    def measure(subject: Subject, place: Place) -> dict[Place, Figures]:
        how: dict = {"items": subject.items, "seed": subject.seed, "tell": subject.tell}
        ours = score(subject.model, subject.tokenizer, group, place, **how)
        theirs = subject.theirs.get(group, {}).get(str(place))
        chance = KINDS[group][place.kind].chance
        return {
            place: compared(ours, theirs[SCORE], chance, subject.tolerance)
            if theirs
            else {SCORE: ours}
        }

    return Task(says, where, measure)


def _search(says: str, kind: Hunt) -> Task:
    """The task of finding needles of a kind, at lengths at which at least half of the context is filler text."""

    def measure(subject: Subject, length: int) -> dict[int, Figures]:
        how = {"count": subject.samples, "seed": subject.seed}
        samples = samples_of(subject.tokenizer, subject.tokens, kind, length, **how)
        return {length: hunt(subject.model, subject.tokenizer, samples, subject.tell)}

    return Task(
        says, lambda x: [n for n in x.contexts if n >= shortest(x.tokenizer, kind)], measure
    )


def largest_power(number: int) -> int:
    """The largest power of two that is not larger than a number."""
    return 2 ** (number.bit_length() - 1)


def _whole_window(subject: Subject) -> list[int]:
    return [largest_power(longest) for longest in sorted(subject.contexts)[-1:]]


TASKS = {
    "instructions": _scored("instructions", "scores of short answers"),
    "retrieval": _scored("retrieval", "scores of what is found in a text"),
    "long_answers": _scored("long_answers", "scores of long answers"),
    "turns": _scored("turns", "scores of answers about the first turn of a conversation"),
    "reasoning": _scored("reasoning", "scores of puzzles, if reasoning-gym is installed"),
    "agreement": Task(
        "KL from the teacher, and how often both choose the same next token",
        lambda x: _whole_window(x) if x.teacher else [],
        _agreement,
    ),
    "perplexity": Task("perplexity, by position", _whole_window, _perplexity),
    "recall": Task(
        "how much better a passage is predicted when it is read again",
        lambda x: [length for length in x.contexts if length >= SHORTEST],
        _recall,
    ),
    "memory": Task(
        "how much of each layer's output its memory gives",
        lambda x: [
            _layer(mixer.layer_idx) for mixer in mixers_with_memory(x.model)[-1:] if x.contexts
        ],
        _memory,
    ),
    "niah_single": _search("a number hidden in the text", SINGLE),
    "niah_multikey": _search("one of four hidden numbers", MULTIKEY),
    "passkey": _search("a number hidden among repetitions of a sentence", PASSKEY),
    "answers": Task("greedy answers to prompts, side by side", lambda x: [x.new_tokens], _answers),
    "speed": Task(
        "tokens a second, and size of the cache",
        lambda x: x.contexts,
        lambda subject, context: {context: cost(subject.model, context)},
    ),
}


def evaluate(
    subject: Subject,
    tasks: Iterable[str],
    found: Found | None = None,
    *,
    keep: Callable[[], object] = lambda: None,
    name: str = "model",
    report: Callable[[Progress], None] = silent,
) -> Found:
    """Run tasks and collect their results.

    Args:
        subject: the model, the text and the settings.
        tasks: names in `TASKS`.
        found: earlier results, which are not measured a second time; new results are added to it.
        keep: is called after each result, for example to save them.
        name: the model's name in progress reports.
        report: is called with the progress.
    """
    found = {} if found is None else found
    todo = [(task, place) for task in tasks for place in TASKS[task].places(subject)]
    for done, (task, place) in enumerate(todo):

        def tell(read: int = 0, done: int = done) -> None:
            report(Progress(f"measuring {name}", done, len(todo)))

        tell()
        known = found.setdefault(task, {})
        if str(place) in known:
            continue
        measured = TASKS[task].measure(replace(subject, tell=tell), place)
        for at, figures in measured.items():
            known[str(at)] = {label: described(figure) for label, figure in figures.items()}
        if task in KINDS and (total := summary(found, subject.theirs, subject.tolerance)):
            found[SUMMARY] = {ALL: {label: described(figure) for label, figure in total.items()}}
        keep()
    report(Progress(f"measuring {name}", len(todo), len(todo)))
    return found


def longest_window(config: PreTrainedConfig) -> int:
    """Tokens of the longest window of attention in a model; 0 if it has none."""
    return max(getattr(config, name, None) or 0 for name in WINDOWS)


def lengths_beyond(config: PreTrainedConfig, num_tokens: int) -> tuple[int, ...]:
    """LENGTHS, continued to at least four times the longest window: within it, a student equals its teacher.

    Args:
        config: the config of the student.
        num_tokens: tokens of the text. If it or the positions are fewer than each of LENGTHS, there is one length: the
            largest power of two that fits.
    """
    positions = getattr(config, "max_position_embeddings", None) or num_tokens
    longest = min(positions, num_tokens)
    if longest < LENGTHS[0]:
        return (largest_power(longest),)
    lengths = list(LENGTHS)
    while lengths[-1] < FACTOR * longest_window(config):
        lengths.append(2 * lengths[-1])
    return tuple(lengths)
