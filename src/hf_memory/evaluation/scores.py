"""Scores of what models write: a model and its teacher answer the same questions, and the answers are checked.

**Win and tie** is the rate of https://arxiv.org/abs/2603.15590 (appendix A): the share of cases in which the student's
score is at least (1 - tolerance) times the teacher's. There, a case is a benchmark; here it is a question, and in the
summary also a task. Where the teacher is not well above chance, a student cannot be compared with it.
"""

from collections.abc import Callable, Mapping
from itertools import chain, cycle
from random import Random
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from hf_memory.evaluation.estimates import Estimate, Share, ratio_of_sums
from hf_memory.evaluation.questions import (
    INSTRUCTIONS,
    LONG_ANSWERS,
    REASONING,
    RETRIEVAL,
    TURNS,
    Kind,
    Question,
)
from hf_memory.evaluation.writing import greedy
from hf_memory.files.chat_template import apply_template
from hf_memory.modeling.checks import check

SCORE = "score"
TEACHERS = "teacher's score"
RATIO = "score / teacher's"
WIN = "win and tie"
UNANSWERED = "Not compared, since the teacher cannot answer them well above chance: "
TASKS_WON = "tasks won or tied"
CANNOT = "the teacher cannot"
SUMMARY = "scores"
ALL = "all"  # task and place of the summary in a record
FLOOR = 0.1  # the teacher's interval must be so far above chance
FEW = 8  # filler sentences in examples
KINDS = {
    "instructions": INSTRUCTIONS,
    "retrieval": RETRIEVAL,
    "long_answers": LONG_ANSWERS,
    "turns": TURNS,
    "reasoning": REASONING,
}


class Place(NamedTuple):
    """A kind of question, at a length of the prompt in tokens if it has filler text."""

    kind: str
    length: int | None = None

    def __str__(self):
        return self.kind if self.length is None else f"{self.kind} at {self.length}"


def check_tolerance(tolerance: float) -> None:
    """Raise ValueError unless a tolerance is a part of a score."""
    check(0 <= tolerance <= 1, "tolerance", "from 0 to 1", tolerance)


def places(group: str, lengths: tuple[int, ...]) -> list[Place]:
    """The places of a group of questions."""
    return [
        Place(name, x)
        for name, kind in KINDS[group].items()
        for x in (lengths if kind.has_length else [None])
    ]


def ask(tokenizer, kind: Kind, place: Place, key: str) -> tuple[list[int], Question]:
    """The prompt of a question with its examples in tokens, of about the place's length, and the question.

    Both are the same for the same key.
    """

    def made(room: int) -> tuple[list[int], Question]:
        dice = Random(f"{place} {key}")
        examples = [kind.make(dice, FEW) for _ in range(kind.shots)]
        question = kind.make(dice, room)
        return prompt_of(tokenizer, question, examples), question

    if place.length is None:
        return made(0)
    short, long = (len(made(room)[0]) for room in (FEW, 5 * FEW))
    return made(max(1, FEW + int(4 * FEW * (place.length - short) / (long - short))))


def prompt_of(tokenizer, question: Question, examples: list[Question]) -> list[int]:
    """The tokens of a question after examples, with the chat template if there is one, else as plain text."""
    shown = ((*x.before, x.asked, x.begun + x.answer) for x in examples)
    turns = [*chain.from_iterable(shown), *question.before, question.asked]
    if tokenizer.chat_template is None:
        pairs = zip(turns[::2], [*turns[1::2], question.begun])
        text = "\n\n".join(
            f"Question: {asked}\nAnswer: {answer}".rstrip() for asked, answer in pairs
        )
        return tokenizer(text)["input_ids"]
    messages = [
        {"role": role, "content": turn} for role, turn in zip(cycle(["user", "assistant"]), turns)
    ]
    text = apply_template(tokenizer, messages, add_generation_prompt=True) + question.begun
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def score(
    model: PreTrainedModel,
    tokenizer,
    group: str,
    place: Place,
    *,
    items: int,
    seed: int = 0,
    tell: Callable[[int], object] = lambda tokens: None,
) -> Share:
    """The mean score of a model's greedy answers.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        group: a group of `KINDS`.
        place: the kind of question.
        items: number of questions.
        seed: questions are the same for the same seed.
        tell: is called with the number of tokens of each batch.
    """
    kind = KINDS[group][place.kind]
    prompts, questions = zip(*(ask(tokenizer, kind, place, f"{seed} {i}") for i in range(items)))
    texts = greedy(model, tokenizer, prompts, kind.new_tokens, tell)
    return Share(
        [x.score(text.split("\nQuestion:")[0].rstrip()) for x, text in zip(questions, texts)]
    )


def compared(
    ours: Share, theirs: Mapping[str, Any], chance: float, tolerance: float
) -> dict[str, Any]:
    """The figures of a student's score, beside its teacher's as it is in a record."""
    if theirs["low"] < chance + FLOOR:
        return {SCORE: ours, WIN: CANNOT}
    teachers = torch.tensor(theirs["samples"], dtype=torch.float64)
    won = ours.samples >= (1 - tolerance) * teachers
    return {SCORE: ours, RATIO: Estimate(ours.samples, teachers, of=ratio_of_sums), WIN: Share(won)}


def is_unanswered(figures: Mapping[str, Any]) -> bool:
    """Whether the teacher cannot answer a kind of question well above chance, by its row of a record."""
    return figures.get(WIN, {}).get("value") == CANNOT


def summary(ours: Mapping[str, Any], theirs: Mapping[str, Any], tolerance: float) -> dict[str, Any]:
    """The figures over all tasks that the teacher can do, from the records of a student and its teacher.

    Scores are means over tasks, and their intervals resample tasks; win and tie is that of all questions.
    """
    rows = [
        (row, theirs[group][at])
        for group in KINDS
        for at, row in ours.get(group, {}).items()
        if RATIO in row
    ]
    if not rows:
        return {}
    scores = torch.tensor(
        [[row[SCORE]["value"] for row in pair] for pair in rows], dtype=torch.float64
    )
    return {
        TEACHERS: Estimate(scores[:, 1]),
        SCORE: Estimate(scores[:, 0]),
        RATIO: Estimate(scores[:, 0], scores[:, 1], of=ratio_of_sums),
        WIN: Share([won for row, _ in rows for won in row[WIN]["samples"]]),
        TASKS_WON: Share(scores[:, 0] >= (1 - tolerance) * scores[:, 1]),
    }
