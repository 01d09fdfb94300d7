"""Texts: how files of all kinds become tokens, and how windows are drawn from them."""

import json
import sys

import pyarrow
import pytest
import torch
from pyarrow import parquet

from hf_memory import conversion
from hf_memory.conversion import Schedule
from hf_memory.files.fingerprints import tokens_fingerprint
from hf_memory.files.text import hold_out, start_of
from teachers import SCHEDULE, make_tokenizer


def test_text_windows_are_a_function_of_the_seed():
    schedule = Schedule(steps=10, learning_rate=0.0, batch_size=2, length=8)
    windows = [conversion.TokenWindows(torch.arange(50), schedule, seed) for seed in (0, 0, 1)]
    starts = [[x["input_ids"][0].item() for x in (data[i] for i in range(20))] for data in windows]
    assert starts[0] == starts[1] != starts[2]
    assert windows[0][3]["input_ids"].diff().eq(1).all()
    with pytest.raises(ValueError, match="one window of 8 tokens, got 7"):
        conversion.TokenWindows(torch.arange(7), schedule)


def test_windows_of_a_mixture_are_drawn_by_weight(tmp_path):
    (tmp_path / "a.txt").write_text(" ".join(["w5"] * 300))
    (tmp_path / "b.txt").write_text(" ".join(["w6"] * 50))
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    schedule = SCHEDULE._replace(steps=500)
    mixed = conversion.read_tokens(files, make_tokenizer(), weights=[1, 3])
    assert [len(part) for part in mixed.parts] == [301, 51]
    rows = torch.stack([row["input_ids"] for row in conversion.TokenWindows(mixed, schedule, 1)])
    assert not ((rows == 5).any(1) & (rows == 6).any(1)).any()
    assert (rows == 6).any(1).float().mean().item() == pytest.approx(0.75, abs=0.05)
    train, held_out = hold_out(
        conversion.read_tokens(files * 9, make_tokenizer(), weights=[1, 3] * 9)
    )
    assert train.mixture == ((271, 1), (46, 3)) * 9
    assert held_out.mixture == ((30, 1), (5, 3)) * 9
    limited = conversion.read_tokens(files, make_tokenizer(), weights=[1, 3], limit=40)
    assert limited.mixture == ((10, 1), (30, 3))
    assert tokens_fingerprint(limited) != tokens_fingerprint(conversion.Text(limited.tokens))
    with pytest.raises(
        ValueError, match=r"weights must be numbers above 0, one for each of 2 texts, got \[1, 0\]"
    ):
        conversion.read_tokens(files, make_tokenizer(), weights=[1, 0])
    with pytest.raises(ValueError, match="one window of 60 tokens, got 51"):
        conversion.TokenWindows(mixed, schedule._replace(length=60))


def test_some_windows_end_in_what_they_began_with():
    tokens = torch.arange(50)
    schedule = Schedule(steps=4, learning_rate=0.0, batch_size=2, length=9, repeats=0.25)
    rows = [x["labels"] for x in conversion.TokenWindows(tokens, schedule, 0)]
    assert [i for i, row in enumerate(rows) if torch.equal(row[-2:], row[:2])] == [3, 7]
    assert all(row[:7].diff().eq(1).all() for row in rows)
    assert {len(row) for row in rows} == {9}


def test_windows_grow_in_equal_shares_of_the_steps():
    schedule = Schedule(steps=7, learning_rate=0.0, batch_size=2, length=20, start_length=5)
    rows = [len(row["labels"]) for row in conversion.TokenWindows(torch.arange(50), schedule, 0)]
    assert rows == [5] * 6 + [10] * 4 + [20] * 4
    assert schedule.tokens == sum(rows)
    assert "of 5, then 10, then 20 tokens, learning" in str(schedule)


def test_text_files_are_read_in_order(tmp_path):
    (tmp_path / "a.txt").write_text("w4 w5")
    (tmp_path / "b.txt").write_text("w6")
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    assert conversion.read_tokens(files, make_tokenizer()).tokens.tolist() == [4, 5, 2, 6, 2]
    files[0].write_bytes(b"\xff")
    with pytest.raises(ValueError, match="must be text in UTF-8, got byte 0xff"):
        conversion.read_tokens(files, make_tokenizer())


def test_a_folder_of_plain_files_is_a_document_each(tmp_path):
    (tmp_path / "part").mkdir()
    for name, content in (
        ("b.txt", "w4\nw5\n"),
        ("part/a.md", "w6"),
        (".hidden", "w7"),
        ("c", "w8"),
    ):
        (tmp_path / name).write_text(content)
    assert conversion.read_tokens([tmp_path], make_tokenizer()).tokens.tolist() == [
        4,
        5,
        2,
        8,
        2,
        6,
        2,
    ]


def test_a_folder_of_texts_and_data_is_read_whole_and_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes("w4".encode("utf-8-sig"))
    (tmp_path / "b.jsonl").write_bytes('{"text": "w5"}'.encode("utf-8-sig"))
    (tmp_path / "c.py").write_text("w6")
    assert conversion.read_tokens([tmp_path], make_tokenizer()).tokens.tolist() == [
        4,
        2,
        5,
        2,
        6,
        2,
    ]
    (tmp_path / "a.txt").rename(tmp_path / "README.md")  # describes the data
    (tmp_path / "c.py").unlink()
    assert conversion.read_tokens([tmp_path], make_tokenizer()).tokens.tolist() == [5, 2]
    (tmp_path / "test.jsonl").write_text('{"text": ')
    with pytest.raises(ValueError, match="must be a data set that can be loaded"):
        conversion.read_tokens([tmp_path], make_tokenizer())


@pytest.fixture
def written(tmp_path):
    """Three documents, one of them empty, as each kind of file, and as a folder that `datasets` loads."""
    texts = ["w4 w5", "", "w6"]
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"id": 1, "text": x}) + "\n" for x in texts) + "\n"
    )
    parquet.write_table(pyarrow.table({"id": [1, 2, 3], "text": texts}), tmp_path / "a.parquet")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.jsonl").write_bytes((tmp_path / "a.jsonl").read_bytes())
    return tmp_path


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "folder"])
def test_documents_of_every_kind_of_source_end_with_the_end_of_text(written, name, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(written / "cache"))
    assert conversion.read_tokens([written / name], make_tokenizer()).tokens.tolist() == [
        4,
        5,
        2,
        6,
        2,
    ]
    assert conversion.read_tokens(
        [str(written / name)] * 2, make_tokenizer(), limit=4
    ).tokens.tolist() == [4, 5, 2, 6]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_talks_go_through_the_chat_template(tmp_path, name):
    talk = [{"role": "user", "content": "w7"}, {"role": "assistant", "content": "w8"}]
    rows = [{"messages": talk}, {"messages": talk[:1]}]
    tokenizer = make_tokenizer()
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(
        ValueError, match="messages need a tokenizer with a chat template, got one without"
    ):
        conversion.read_tokens([tmp_path / name], tokenizer)
    turn = "{{ 'w4' if m.role == 'user' else 'w5' }} {{ m.content }} w2"
    tokenizer.chat_template = f"{{% for m in messages %}}{turn} {{% endfor %}}"
    assert conversion.read_tokens([tmp_path / name], tokenizer).tokens.tolist() == [
        4,
        7,
        2,
        5,
        8,
        2,
        4,
        7,
        2,
    ]


USER = "{% if m.role == 'user' %}w4 {{ m.content }} w2 {% else %}w5 "
TEMPLATES = {  # with marks of the assistant's turns by its author, and without
    "marked": "{% generation %}{{ m.content }} w2{% endgeneration %} {% endif %}{% endfor %}",
    "plain": "{{ m.content }} w2 {% endif %}{% endfor %}{% if add_generation_prompt %}w5 {% endif %}",
}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_only_what_the_assistant_writes_is_a_target(tmp_path, kind):
    turns = [("user", "w7"), ("assistant", "w8 w9"), ("user", "w6"), ("assistant", "w3")]
    talk = [{"role": role, "content": content} for role, content in turns]
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"messages": talk}) + "\n" + json.dumps({"text": "w7 w7"})
    )
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}" + USER + TEMPLATES[kind]
    read = conversion.read_tokens([tmp_path / "a.jsonl"], tokenizer, assistant_only=True)
    assert read.tokens.tolist() == [4, 7, 2, 5, 8, 9, 2, 4, 6, 2, 5, 3, 2, 7, 7, 2]
    assert read.tokens[read.targets].tolist() == [8, 9, 2, 3, 2, 7, 7, 2]
    assert read[3:9].targets.tolist() == [False, True, True, True, False, False]


def test_a_template_that_renders_a_beginning_otherwise_is_explained(tmp_path):
    talk = [{"role": "user", "content": "w7"}, {"role": "assistant", "content": "w8"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": talk}))
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}"
    with pytest.raises(ValueError, match="chat template must mark the assistant's turns"):
        conversion.read_tokens([tmp_path / "a.jsonl"], tokenizer, assistant_only=True)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"text": "w4"}\n{"text": ',
            "a.jsonl must have JSON in each line, got none in line 2",
        ),
        (
            "a.jsonl",
            b'{"body": "w4"}\n',
            "line 1 of .*a.jsonl must have a text in its field text, or .*, got body",
        ),
        (
            "a.jsonl",
            b'{"messages": [{"role": "user"}]}\n',
            "roles and contents in messages, got messages",
        ),
        ("a.jsonl", b"[1]\n", "must have a text in its field text, or .*, got list"),
        ("a.parquet", b"PAR1", "a.parquet must be a parquet file"),
        ("a.txt", b"  \n", "text must not be empty, got no tokens from .*a.txt"),
        (
            "a.json",
            b'{"text": "w4"}',
            "text must be a plain file, .jsonl or .parquet, got .*a.json, which is .json",
        ),
        (
            "a.csv",
            b"text\nw4\n",
            "text must be a plain file, .jsonl or .parquet, got .*a.csv, which is .csv",
        ),
        ("a", b"w4 \0 w5", "a must be text, got a binary file"),
        (
            "a.jsonl",
            b'{"text": "\\ud800 w4"}',
            "line 1 of .*a.jsonl must be text in Unicode, got half of a pair",
        ),
        (
            "a.jsonl",
            b'{"messages": [{"role": "user", "content": "\\udc00"}]}',
            "line 1 of .*a.jsonl must be text in Unicode",
        ),
        (
            "a.jsonl",
            10**5 * b"[" + 10**5 * b"]",
            "a.jsonl must have JSON in each line, got none in line 1",
        ),
        ("", b"{", "a.jsonl must have JSON in each line, got none in line 1"),
        ("/dev/null", b"", "text must be a file, .*, got the device /dev/null"),
    ],
)
def test_unreadable_data_is_explained(tmp_path, name, content, message):
    (tmp_path / (name or "a.jsonl")).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        conversion.read_tokens([tmp_path / name], make_tokenizer())


def test_a_parquet_file_without_text_and_a_missing_file_are_explained(tmp_path):
    parquet.write_table(pyarrow.table({"id": [1], "body": ["w4"]}), tmp_path / "a.parquet")
    with pytest.raises(
        ValueError, match=r"a.parquet must have a column text or messages, got id, body"
    ):
        conversion.read_tokens([tmp_path / "a.parquet"], make_tokenizer())
    for name in (tmp_path / "no", "no.txt", "../no"):
        with pytest.raises(FileNotFoundError, match="No such file or directory"):
            conversion.read_tokens([name], make_tokenizer())


def test_a_parquet_file_that_is_damaged_inside_is_explained(tmp_path):
    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["w4 w5"]}), file, compression="none")
    file.write_bytes(file.read_bytes().replace(b"w4 w5", b"w4\xffw5"))
    with pytest.raises(
        ValueError, match=r"a.parquet must be a parquet file, got something else or a damaged one"
    ):
        conversion.read_tokens([file], make_tokenizer())


def test_a_library_that_is_not_installed_is_named(written, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    for name in ("a.parquet", "folder"):
        with pytest.raises(ValueError, match="pip install datasets"):
            conversion.read_tokens([written / name], make_tokenizer())


class FirstWordDiffers:
    """A tokenizer that writes a first word otherwise without what begins a text."""

    all_special_ids = [1]

    def __call__(self, text, *, add_special_tokens):
        return {"input_ids": [1, 7] if add_special_tokens else [5]}


def test_what_begins_a_text_is_found_where_the_first_word_differs():
    assert start_of(FirstWordDiffers()) == [1]
