"""The examples that need no model."""

import json
import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
PRACTICE = EXAMPLES / "practice.py"


def test_answers_of_the_practice_stand_in_what_was_said_before(tmp_path):
    """Numbers and made words of each last answer were said, and a conversation has whole paragraphs of the text."""
    paragraphs = [f"This is paragraph {i} of a text. It says nothing." for i in range(40)]
    text = tmp_path / "prose.txt"
    output = tmp_path / "practice.jsonl"
    text.write_text("\n\n".join(paragraphs), encoding="utf-8")
    practice = runpy.run_path(str(PRACTICE))
    practice["main"](text, output)
    rows = [
        json.loads(line)["messages"] for line in output.read_text(encoding="utf-8").splitlines()
    ]
    assert len(rows) == practice["CONVERSATIONS"]
    common = set(
        re.findall(
            r"\w+",
            "The price of one is crowns and You need to buy were born in have a friend called",
        )
    )
    for messages in rows:
        assert [x["role"] for x in messages] == ["user", "assistant"] * (len(messages) // 2)
        before = " ".join(x["content"] for x in messages[:-1])
        assert set(re.findall(r"\w+", messages[-1]["content"])) - common <= set(
            re.findall(r"\w+", before)
        )
        assert sum(paragraph in before for paragraph in paragraphs) >= 3


def test_practice_refuses_a_text_that_is_too_short(tmp_path):
    text = tmp_path / "prose.txt"
    text.write_text("One paragraph.\n\nAnother.", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"more than 12 paragraphs .* got 2"):
        runpy.run_path(str(PRACTICE))["main"](text, tmp_path / "practice.jsonl")


@pytest.mark.parametrize(("teacher", "tokens"), [("smollm2", 30 * 2048), ("gemma3", 0)])
def test_tokens_that_a_real_teachers_student_learns_on_are_read_off_its_recipe(teacher, tokens):
    """A stage that a recipe switches off names nothing but its steps."""
    example = runpy.run_path(str(EXAMPLES / "real_teacher.py"))
    assert example["tokens_to_learn"](example["RECIPES"] / f"{teacher}.yaml") == tokens
