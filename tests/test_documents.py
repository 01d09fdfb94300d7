"""Which files are read as text, and how."""

import json
import os
from itertools import chain
from pathlib import Path

import pytest

from hf_memory.files import documents as module
from hf_memory.files.documents import documents, read_prompts

ROW = json.dumps({"text": "a row"}) + "\n"
HIDDEN = (
    ".git/HEAD",
    ".git/index",
    ".ipynb_checkpoints/story.txt",
    ".cache/huggingface/rows.jsonl",
    "part/.hidden/x",
)


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


@pytest.mark.parametrize("name", HIDDEN)
def test_what_is_hidden_in_a_folder_is_not_read(name, tmp_path):
    files = {"story.txt": "a story", "part/rows.jsonl": ROW, ".notes": "b", name: "hidden\0"}
    assert sorted(documents(write(tmp_path / ".home", files))) == ["a row", "a story"]


def test_text_that_is_hidden_and_read_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(
        module, "files_of", lambda folder: sorted(x for x in folder.rglob("*") if x.is_file())
    )
    with pytest.raises((AssertionError, ValueError)):
        test_what_is_hidden_in_a_folder_is_not_read(HIDDEN[2], tmp_path)


@pytest.mark.parametrize(
    "suffix", [".jsonl", ".JSONL", ".JsonL", ".ndjson", ".NDJSON", ".jsonlines"]
)
def test_lines_of_json_are_rows_whatever_the_case_of_their_name(suffix, tmp_path):
    folder = write(tmp_path, {f"rows{suffix}": ROW * 2})
    assert list(documents(folder / f"rows{suffix}")) == ["a row"] * 2
    assert list(documents(folder)) == ["a row"] * 2


@pytest.mark.parametrize(
    "suffix", [".json", ".JSON", ".csv", ".Csv", ".TSV", ".ipynb", ".arrow", ".GZ", ".xlsx", ".pdf"]
)
def test_other_formats_are_refused_alone_and_beside_text(suffix, tmp_path):
    folder = write(tmp_path, {f"rows{suffix}": "a,b\n", "story.txt": "a story"})
    for source in (folder / f"rows{suffix}", folder):
        with pytest.raises(
            ValueError, match=rf"text must be a plain file, .jsonl or .parquet, got .*rows{suffix}"
        ):
            list(documents(source))


@pytest.mark.parametrize("name", ["rows", "rows.txt", "rows.jsonl.bak", "rows.jl"])
def test_rows_in_a_file_with_another_name_are_no_text(name, tmp_path):
    with pytest.raises(ValueError, match=rf"got .*{name}, whose first line is JSON"):
        list(documents(write(tmp_path, {name: ROW}) / name))
    plain = '{"a": 1\n{}\n'
    assert list(documents(write(tmp_path, {"plain.txt": plain}) / "plain.txt")) == [plain]


def talk(content):
    return {
        "messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "yes"}]
    }


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("one", "one"),
        (None, None),
        ([{"type": "text", "text": "one"}], "one"),
        (
            [{"type": "text", "text": "one "}, {"type": "text", "text": "two", "image": None}],
            "one two",
        ),
        ([], ""),
    ],
)
def test_parts_of_text_are_one_text(content, text, tmp_path):
    (found,) = documents(write(tmp_path, {"a.jsonl": json.dumps(talk(content))}) / "a.jsonl")
    assert [message["content"] for message in found] == [text, "yes"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ([{"type": "image", "url": "a"}], "or parts of type text, got type image"),
        (
            [{"type": "text", "text": "a"}, {"type": "audio"}],
            "or parts of type text, got type audio",
        ),
        ([{"type": "text"}], "or parts of type text, got type text"),
        ([{"text": "a"}], "or parts of type text, got type None"),
        (["a"], "or parts of type text, got type str"),
        ({"type": "text", "text": "a"}, "whose content is text, got dict"),
        (5, "whose content is text, got int"),
    ],
)
def test_parts_that_are_no_text_are_refused(content, sentence, tmp_path):
    file = write(tmp_path, {"a.jsonl": json.dumps(talk(content))}) / "a.jsonl"
    with pytest.raises(ValueError, match=f"line 1 of {file} must have messages .*{sentence}"):
        list(documents(file))


def test_parts_that_become_their_representation_are_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_content_of", lambda content, where: str(content))
    with pytest.raises(AssertionError):
        test_parts_of_text_are_one_text([{"type": "text", "text": "one"}], "one", tmp_path)


def test_pipes_and_devices_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    os.symlink("/dev/zero", tmp_path / "link")
    for path in (tmp_path / "pipe", tmp_path / "link", Path("/dev/zero")):
        with pytest.raises(
            ValueError, match=f"text must be a file, .*, got the (pipe|device) {path}"
        ):
            documents(path)
        with pytest.raises(ValueError, match="prompts must be a file, not a pipe"):
            read_prompts(path)
    (tmp_path / "a.txt").write_text("a story")
    assert list(chain(documents(tmp_path))) == ["a story"]
