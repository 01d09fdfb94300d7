"""Scores of answers: what is right scores 1 and what is wrong scores less, for the same questions of all models."""

import json
import math
import sys
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import GenerationConfig

from hf_memory.evaluation import questions, scores
from hf_memory.evaluation.estimates import Share, described
from hf_memory.evaluation.questions import alike, same_fields, same_set, says, so_many
from hf_memory.evaluation.scores import (
    CANNOT,
    KINDS,
    RATIO,
    SCORE,
    TASKS_WON,
    WIN,
    ask,
    compared,
    places,
    summary,
)

GROUPS = [group for group in KINDS if group != "reasoning"]
PLACES = [(group, place) for group in GROUPS for place in places(group, (3000,))]


class Characters:
    """A tokenizer of characters."""

    chat_template = None
    pad_token_id = eos_token_id = 0

    def __call__(self, text, **options):
        return {"input_ids": [ord(x) for x in text]}

    def batch_decode(self, rows, **options):
        return ["".join(chr(x) for x in row if x) for row in rows.tolist()]


class Knows(nn.Module):
    """A model that gives the same answers to the same prompts, whatever stands before them."""

    device = torch.device("cpu")
    generation_config = GenerationConfig()

    def __init__(self, answers: Mapping[tuple[int, ...], str]):
        super().__init__()
        self.answers = answers

    def generate(self, read, attention_mask, max_new_tokens, **options):
        rows = [
            self.answers[tuple(row[mask.bool()].tolist())]
            for row, mask in zip(read, attention_mask)
        ]
        made = torch.zeros(len(rows), 1 + max(map(len, rows)), dtype=torch.long)
        for row, text in zip(made, rows):
            row[: len(text)] = torch.tensor([ord(x) for x in text])
        return torch.cat([read, made], dim=1)


@pytest.mark.parametrize(
    ("scorer", "answers"),
    [
        (
            says("Paris"),
            {
                "Paris": 1,
                " paris.\nRome": 1,
                "It is Paris.": 1,
                "Rome. Paris": 0,
                "a b c Paris": 0,
                "": 0,
            },
        ),
        (
            alike(["a", "b", "c"], str.split),
            {"a b c": 1, "a c": 4 / 5, "a b c x": 6 / 7, "c b a": 1 / 3, "A B C": 0},
        ),
        (
            same_set(["12", "34"], r"\d+"),
            {"34, 12": 1, "12 and 12": 2 / 3, "12, 34, 56": 4 / 5, "123 4": 0, "": 0},
        ),
        (
            same_fields({"name": "Ann", "age": 3}),
            {
                '{"age": 3, "name": "Ann"}': 1,
                '{"age": 4, "name": "Ann"}': 1 / 2,
                '{"name": "Ann"}': 0,
                '{"age": 3, "name": "Ann", "x": 1}': 0,
                '{"age": 3, "name": "Ann"': 0,
                "[3]": 0,
            },
        ),
        (
            so_many(3),
            {
                "dog, cat, sea horse.": 1,
                "dog, cat": 0,
                "dog, cat, Dog": 0,
                "dog, , cat": 0,
                "a b c, d, e": 0,
            },
        ),
    ],
)
def test_right_answers_score_1_and_wrong_ones_less(scorer, answers):
    assert {text: scorer(text) for text in answers} == pytest.approx(answers)


@pytest.mark.parametrize(("group", "place"), PLACES, ids=lambda x: str(x))
def test_who_knows_the_answers_scores_1_and_who_answers_another_question_does_not(group, place):
    tokenizer = Characters()
    kind = KINDS[group][place.kind]
    asked = [ask(tokenizer, kind, place, f"0 {i}") for i in range(4)]
    again, other = (
        [ask(tokenizer, kind, place, f"{seed} {i}")[0] for i in range(4)] for seed in (0, 1)
    )
    assert [prompt for prompt, _ in asked] == again != other
    if place.length:
        assert all(0.75 * place.length < len(prompt) < 1.25 * place.length for prompt, _ in asked)

    def found(answers):
        known = {
            tuple(prompt): answer + "\n\nQuestion: and?"
            for (prompt, _), answer in zip(asked, answers)
        }
        return scores.score(Knows(known), tokenizer, group, place, items=4)

    right = [question.answer for _, question in asked]
    assert found(right) == found([f" {answer}" for answer in right]) == 1
    assert found(["?"] * 4) == 0
    if place.kind != "items":  # any three things are right
        assert found([*right[1:], right[0]]) < 1


def test_a_conversation_goes_through_the_chat_template():
    tokenizer = Characters()
    tokenizer.chat_template = "{{ add_generation_prompt }}{{ messages | tojson }}"
    tokenizer.get_chat_template, tokenizer.special_tokens_map = lambda: tokenizer.chat_template, {}
    one, two = (questions.Question(x, x.upper(), says(x), ("hi", "ho"), begun="So ") for x in "ab")
    text = "".join(map(chr, scores.prompt_of(tokenizer, two, [one])))
    said = ["hi", "ho", "a", "So A", "hi", "ho", "b"]
    assert json.loads(text.removeprefix("True").removesuffix("So ")) == [
        {"role": role, "content": x} for role, x in zip(["user", "assistant"] * 4, said)
    ]


@pytest.mark.parametrize("count", [1, 3, 10, 33])
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_an_interval_of_shares_ends_where_shares_do(value, count):
    low, high = Share([value] * count).interval()
    assert low == 0 or value
    assert low >= 0
    assert high <= 1


def test_shares_have_wilsons_interval():
    low, high = Share([1.0] * 20).interval()
    assert (low, high) == pytest.approx((20 / (20 + 1.96**2), 1.0))
    low, high = Share([0.0, 1.0] * 8).interval()  # the roots of (x - p)^2 = z^2 x (1 - x) / N
    for x in (low, high):
        assert (x - 0.5) ** 2 == pytest.approx(1.96**2 * x * (1 - x) / 16)
    assert low < 0.5 < high


def test_a_student_wins_or_ties_within_the_tolerance_and_only_where_the_teacher_can():
    theirs = [1.0, 1.0, 0.8, 0.0, 1.0, 1.0] * 4
    ours = [1.0, 0.94, 0.76, 0.0, 0.0, 0.95] * 4
    figures = compared(Share(ours), described(Share(theirs)), 0.0, 0.05)
    assert figures[WIN] == 4 / 6
    assert figures[RATIO] == pytest.approx(sum(ours) / sum(theirs))
    low, high = figures[RATIO].interval()
    assert low < figures[RATIO] < high
    assert compared(Share(ours), described(Share(theirs)), 0.0, 0.0)[WIN] == 2 / 6
    hard = compared(
        Share(ours), described(Share(theirs)), 0.7, 0.05
    )  # of a task with so good chances
    assert hard == {SCORE: figures[SCORE], WIN: CANNOT}

    rows = {"needle": (ours, figures), "variables": (ours, hard)}
    records = {at: {name: described(x) for name, x in row.items()} for at, (_, row) in rows.items()}
    teacher = {"retrieval": {at: {SCORE: described(Share(theirs))} for at in rows}}
    total = summary({"retrieval": records}, teacher, 0.05)
    assert (total[SCORE], total[WIN], total[TASKS_WON]) == pytest.approx((sum(ours) / 24, 4 / 6, 0))
    assert summary({"retrieval": {"variables": records["variables"]}}, teacher, 0.05) == {}
    assert math.isfinite(
        compared(Share([0.0] * 9), described(Share([1.0] * 9)), 0.0, 0.05)[RATIO].interval()[1]
    )


def test_puzzles_of_reasoning_gym_are_scored_by_it_and_need_it(monkeypatch):
    """With a stand-in for reasoning-gym, which is not installed where these tests run."""

    class Made:
        def __init__(self, name, size, seed, **options):
            self.entry = {"question": f"{name} {seed}?", "answer": str(seed)}

        def __getitem__(self, i):
            return self.entry

        def score_answer(self, text, entry):
            return float(text == entry["answer"])

    place = places("reasoning", ())[0]
    tokenizer = Characters()
    monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(create_dataset=Made))
    _, question = ask(tokenizer, KINDS["reasoning"][place.kind], place, "0 0")
    assert question.asked == f"{place.kind} {question.answer}?"
    assert question.score(f" {question.answer}\n") == 1
    assert question.score("?") == 0
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(
        ValueError, match=r"reasoning needs reasoning-gym: pip install reasoning-gym$"
    ):
        ask(tokenizer, KINDS["reasoning"][place.kind], place, "0 0")
