"""A teacher that writes the text its student learns on."""

import json
from itertools import pairwise

import pytest

from hf_memory.conversion import read_tokens, teacher_text
from hf_memory.conversion.teacher_text import parse_source, write_text
from hf_memory.progress import Progress
from teachers import FAST, make_teacher, make_tokenizer

pytestmark = pytest.mark.usefixtures("without_pictures")

TEMPLATE = """{% for m in messages %}{{ 'w4' if m.role == 'user' else 'w5' }} {{ m.content }} w2 {% endfor %}
{%- if add_generation_prompt %}w5 {% endif %}"""


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    for name, value in {"BATCH": 3, "LENGTH": 12, "QUESTION": 4}.items():
        monkeypatch.setattr(teacher_text, name, value)


def rows(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("template", [None, TEMPLATE])
@pytest.mark.parametrize("prompts", [(), ("w7", "w8 w9")])
def test_a_text_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path, template, prompts):
    model = make_teacher()
    tokenizer = make_tokenizer()
    reports = []
    tokenizer.chat_template = template
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    how = {"prompts": prompts, "seed": 3}
    whole = write_text(tmp_path / "a", model, tokenizer, 100, **how, report=reports.append)
    assert len(read_tokens([whole], tokenizer)) >= 100
    assert reports[-1] == Progress("the teacher writes", 100, 100, 1)
    assert len(rows(whole)) == len(set(map(str, rows(whole))))
    for i, row in enumerate(rows(whole)):
        assert list(row) == ["messages" if template else "text"]
        if template:
            question, answer = row["messages"]
            assert [x["role"] for x in row["messages"]] == ["user", "assistant"]
            assert answer["content"]
            assert question["content"] == prompts[i % 2] if prompts else question["content"]
        elif prompts:
            assert row["text"].startswith(prompts[i % 2])

    (tmp_path / "b").mkdir()
    cut = whole.read_bytes()[: len(whole.read_bytes()) * 2 // 3]
    (tmp_path / "b" / whole.with_suffix(".partial").name).write_bytes(cut)
    assert (
        write_text(tmp_path / "b", model, tokenizer, 100, **how).read_bytes() == whole.read_bytes()
    )
    assert [path.name for path in (tmp_path / "b").iterdir()] == [whole.name]
    before = whole.stat().st_mtime_ns
    assert write_text(tmp_path / "a", model, tokenizer, 100, **how).stat().st_mtime_ns == before
    assert write_text(tmp_path / "a", model, tokenizer, 100, **how | {"seed": 4}) != whole


def test_what_was_written_stays_in_the_file_at_each_moment(tmp_path):
    """A process that is killed leaves what is in the file then, and no buffer."""
    model = make_teacher()
    tokenizer = make_tokenizer()
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    whole = write_text(tmp_path / "whole", model, tokenizer, 150).read_bytes()
    (tmp_path / "killed").mkdir()
    partial = (
        tmp_path / "killed" / next((tmp_path / "whole").iterdir()).with_suffix(".partial").name
    )
    batch = b"".join(whole.splitlines(keepends=True)[: teacher_text.BATCH])
    partial.write_bytes(batch + b'{"text": "not whol')
    seen = []
    write_text(
        tmp_path / "killed",
        model,
        tokenizer,
        150,
        report=lambda now: seen.append(partial.read_bytes()),
    )
    assert seen[0] == batch
    assert all(after.startswith(before) for before, after in pairwise(seen))
    assert seen[-1] == whole
    assert len(seen) > 3


def test_the_sampling_is_the_teachers(tmp_path):
    model = make_teacher()
    tokenizer = make_tokenizer()
    model.generation_config.update(eos_token_id=None, pad_token_id=None, top_k=1)
    texts = map(str, rows(write_text(tmp_path, model, tokenizer, 30)))
    assert len(set(texts)) == 1  # of one start the most likely token each time


def test_a_source_names_tokens_and_prompts(tmp_path):
    (tmp_path / "prompts.txt").write_text("one\n\ntwo\n")
    assert parse_source("teacher:500k") == (500_000, [])
    assert parse_source(f"teacher:2M:{tmp_path}/prompts.txt") == (2_000_000, ["one", "two"])
    assert parse_source("teacher:3K") == (3000, [])
    assert parse_source("teacher.txt") is parse_source("other:500k") is None
    with pytest.raises(ValueError, match=r"text must be teacher:500k or .* got teacher:many"):
        parse_source("teacher:many")
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(
        ValueError, match=r"prompts must be a file with a prompt in each line, got .*empty.txt"
    ):
        parse_source(f"teacher:7:{tmp_path}/empty.txt")
    with pytest.raises(FileNotFoundError):
        parse_source("teacher:7:nothing.txt")


def test_a_conversion_without_text(run, teacher, tmp_path):
    command = ["convert", teacher, "--text", "teacher:3k", "--output", tmp_path / "student", *FAST]
    code, _, err = run(*command, "--dry-run")
    assert code == 2
    assert "text must exist for a dry run, got teacher:3k" in err
    code, _, err = run(*command)
    assert code == 0, err
    (file,) = (tmp_path / "student-text").iterdir()
    assert "teacher:3k" in (tmp_path / "student" / "README.md").read_text()
    assert len(rows(file)) > 100
