"""Text on its way to a model: documents in rows, and tokens on a disk."""

import hashlib
import json
import os
import warnings

import pytest
import torch
from torch.nn import functional as F

from comparing import assert_close, in_float64
from hf_memory.conversion import (
    Schedule,
    Text,
    TokenWindows,
    carry_over,
    distill,
    fine_tune,
    make_student,
    read_tokens,
)
from hf_memory.conversion.stages.divergence import divergence
from hf_memory.conversion.stages.transfer import AttentionTransfer
from hf_memory.files import tokenised
from hf_memory.files.fingerprints import tokens_fingerprint
from teachers import SCHEDULE, make_teacher, make_tokenizer

ALONE = {"sliding_window": 2, "num_sink_tokens": 0, "num_kept_tokens": 0, "cache_bits": None}
HEADS = {**ALONE, "full_attention_heads": [[0], []]}


def documents_of(lengths, start=()):
    """A text of documents whose tokens count from 10 on."""
    size = sum(lengths)
    begins = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    return Text(10 + torch.arange(size), torch.tensor(start, dtype=torch.long), documents=begins)


def test_documents_of_a_row_begin_as_texts():
    text = documents_of([3, 5, 20], start=[1])
    row = text.row(1, 10)
    assert row["input_ids"].tolist() == [1, 11, 12, 1, 13, 14, 15, 16, 17, 1]
    assert row["position_ids"].tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5, 0]
    assert row["labels"].tolist() == [1, 11, 12, -100, 13, 14, 15, 16, 17, -100]
    assert documents_of([3, 5])[2:].row(0, 4)["labels"].tolist() == [12, -100, 14, 15]
    assert text.row(1, 10, whole=True)["input_ids"].tolist() == [1, *range(11, 20)]
    mixed = Text.mixed([text, text[2:9]], [1, 1])
    assert mixed.documents.tolist() == [0, 3, 8, 29, 34]
    rows = [
        TokenWindows(text, SCHEDULE._replace(length=10, repeats=0.5), seed)[1] for seed in range(9)
    ]
    assert all(
        torch.equal(row["position_ids"], torch.arange(10)) for row in rows
    )  # these repeat a passage
    assert set(TokenWindows(text, SCHEDULE._replace(length=10, chunk_length=5))[0]) == {
        "input_ids",
        "labels",
    }


@pytest.mark.parametrize(
    "options", [{"to": "deltanet"}, {"to": "attention", **HEADS}], ids=["memory", "heads"]
)
def test_no_document_of_a_row_sees_another(options):
    """Losses of all stages are the means of those of documents alone."""
    lengths = [5, 6, 4]
    teacher = make_teacher()
    whole = documents_of(lengths)
    once = Schedule(steps=1, learning_rate=1e-9, batch_size=1, length=15)
    alone = whole.tokens.split(lengths)
    student = make_student(teacher, **options)
    carry_over(student, teacher)
    with torch.no_grad():
        rows = [
            (student(x[None]).logits[0, :-1], teacher(x[None]).logits[0, :-1], x[1:]) for x in alone
        ]
    kl = sum(divergence(student, teacher) for student, teacher, _ in rows) / 12
    ce = sum(F.cross_entropy(student, x, reduction="sum") for student, _, x in rows) / 12
    assert distill(student, teacher, whole, once)[0]["loss"] == pytest.approx(kl.item(), rel=1e-4)
    assert fine_tune(student, whole, once)[0]["loss"] == pytest.approx(ce.item(), rel=1e-4)
    transfer = AttentionTransfer(in_float64(student), in_float64(teacher))
    row = whole.row(0, 15)
    packed = transfer.outputs(row["input_ids"][None], row["position_ids"][None])
    apart = [list(transfer.outputs(x[None])) for x in alone]
    for i, (_, output, target) in enumerate(packed):
        assert_close([output, target], [torch.cat([x[i][j] for x in apart], 1) for j in (1, 2)])


def test_tokens_are_read_again_from_their_cache(tmp_path, monkeypatch):
    file = tmp_path / "a.jsonl"
    tokenizer = make_tokenizer()
    file.write_text("".join(json.dumps({"text": f"w{i} w{i + 1}"}) + "\n" for i in range(3, 40)))
    first = read_tokens([file], tokenizer, cache=tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(tokenised, "_encoded", None)
        again = read_tokens([file], tokenizer, cache=tmp_path / "cache")
    assert tokens_fingerprint(again) == tokens_fingerprint(first)
    assert torch.equal(again.documents, first.documents)
    assert len(first.documents) == 37
    assert len(read_tokens([file], tokenizer, cache=tmp_path / "cache", limit=7)) == 7
    file.write_text('{"text": "w5"}')
    changed = read_tokens([file], tokenizer, cache=tmp_path / "cache")
    assert changed.tokens.tolist() == [5, 2]
    assert changed.documents is None
    assert len(list((tmp_path / "cache").iterdir())) == 3


def test_tokens_with_other_targets_have_a_cache_of_their_own(tmp_path):
    file = tmp_path / "a.jsonl"
    tokenizer = make_tokenizer()
    turn = "{% if m.role == 'user' %}w4 {{ m.content }} w2 {% else %}w5 "
    marked = "{% generation %}{{ m.content }} w2{% endgeneration %} {% endif %}{% endfor %}"
    tokenizer.chat_template = "{% for m in messages %}" + turn + marked
    talk = [{"role": "user", "content": "w7"}, {"role": "assistant", "content": "w8"}]
    file.write_text(json.dumps({"messages": talk}))
    for assistant_only in (False, True, False):
        how = {"assistant_only": assistant_only}
        read = read_tokens([file], tokenizer, cache=tmp_path / "cache", **how)
        alone = read_tokens([file], tokenizer, **how)
        assert tokens_fingerprint(read) == tokens_fingerprint(alone)
        assert (read.targets is None) == (alone.targets is None)
        if assistant_only:
            assert read.targets.tolist() == alone.targets.tolist()
            assert not read.targets.all()


@pytest.mark.parametrize("where", ["the source", "a file of a folder"])
def test_a_text_of_the_same_size_that_was_written_later_is_read_again(where, tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    file = folder / "a.txt"
    source = file if where == "the source" else folder
    file.write_text("w4 w5")
    os.utime(file, ns=(0, 10**9))
    read_tokens([source], make_tokenizer(), cache=tmp_path / "cache")
    file.write_text("w6 w7")
    os.utime(file, ns=(0, 10**9 + 1000))
    read = read_tokens([source], make_tokenizer(), cache=tmp_path / "cache")
    assert read.tokens.tolist() == [6, 7, 2]


def changed(file, change):
    content = bytearray(file.read_bytes())
    file.write_bytes(change(content))


DAMAGES = {
    "truncated": lambda content: content[: len(content) // 2],
    "cut within a number": lambda content: content[:-1],
    "empty": lambda content: b"",
    "zeros": lambda content: bytes(len(content)),
    "longer": lambda content: content + bytes(8),
    "flipped": lambda content: content[:8] + bytes([content[8] ^ 1]) + content[9:],
    "negative": lambda content: b"\xff" * 4 + content[4:],
    "beyond the vocabulary": lambda content: b"\xff\xff\xff\x7f" + content[4:],
}


@pytest.mark.parametrize("name", ["tokens", "documents", "targets", "checksums.json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_tokens_are_read_again_and_this_is_said(damage, name, tmp_path):
    file = tmp_path / "a.jsonl"
    tokenizer = make_tokenizer()
    file.write_text("".join(json.dumps({"text": f"w{i} w{i + 1}"}) + "\n" for i in range(3, 40)))
    first = tokens_fingerprint(
        read_tokens([file], tokenizer, cache=tmp_path / "cache", assistant_only=True)
    )
    (folder,) = (tmp_path / "cache").iterdir()
    changed(folder / name, DAMAGES[damage])
    with pytest.warns(
        UserWarning, match=f"tokens in {folder} are damaged, so the text is read again: .*{name}"
    ):
        again = read_tokens([file], tokenizer, cache=tmp_path / "cache", assistant_only=True)
    assert tokens_fingerprint(again) == first
    assert list((tmp_path / "cache").iterdir()) == [folder]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = read_tokens([file], tokenizer, cache=tmp_path / "cache", assistant_only=True)
    assert tokens_fingerprint(whole) == first


def test_tokens_of_an_earlier_version_or_beyond_the_vocabulary_are_read_again(tmp_path):
    file = tmp_path / "a.txt"
    tokenizer = make_tokenizer()
    file.write_text("w4 w5")
    read_tokens([file], tokenizer, cache=tmp_path / "cache")
    (folder,) = (tmp_path / "cache").iterdir()
    (folder / "checksums.json").unlink()
    with pytest.warns(UserWarning, match=r"there is no file checksums.json"):
        read_tokens([file], tokenizer, cache=tmp_path / "cache")
    changed(folder / "tokens", DAMAGES["beyond the vocabulary"])
    checksums = {x.name: hashlib.sha256(x.read_bytes()).hexdigest() for x in folder.iterdir()}
    (folder / "checksums.json").write_text(json.dumps(checksums))
    with pytest.warns(UserWarning, match=r"tokens must be from 0 to \d+, got 2 to 2147483647"):
        read = read_tokens([file], tokenizer, cache=tmp_path / "cache")
    assert read.tokens.tolist() == [4, 5, 2]


@pytest.mark.filterwarnings("ignore:tokens in")
def test_damaged_tokens_that_are_used_are_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenised, "_fault", lambda folder, tokenizer: None)
    with pytest.raises(pytest.fail.Exception):
        test_damaged_tokens_are_read_again_and_this_is_said("flipped", "tokens", tmp_path)


def test_several_threads_tokenise_as_one_does(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"w{i} w{i + 1}"}) + "\n" for i in range(3, 40))
    )
    texts = []
    for number, batch in ((1, 2**20), (1, 20), (3, 20)):
        monkeypatch.setattr(tokenised, "THREADS", number)
        monkeypatch.setattr("os.cpu_count", lambda: 3)
        monkeypatch.setattr(tokenised, "BATCH", batch)
        texts.append(read_tokens([tmp_path / "a.jsonl"], make_tokenizer()))
    assert len({tokens_fingerprint(text) for text in texts}) == 1


def test_a_long_file_is_several_documents(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_memory.files.documents.PART", 8)
    (tmp_path / "a.txt").write_text("w4 w5 w6\nw7 w8\nw9\n")
    text = read_tokens([tmp_path / "a.txt"], make_tokenizer())
    assert text.tokens.tolist() == [4, 5, 6, 2, 7, 8, 9, 2]
    assert text.documents.tolist() == [0, 4]


@pytest.mark.parametrize("name", ["tokens", "documents", "targets"])
def test_a_large_file_of_tokens_that_becomes_shorter_while_it_is_read_is_an_error(
    name, tmp_path, monkeypatch
):
    monkeypatch.setattr(tokenised, "IN_MEMORY", 0)
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": f"w{i} w{i + 1}"}) + "\n" for i in range(3, 40)))
    text = read_tokens([file], make_tokenizer(), cache=tmp_path / "cache", assistant_only=True)
    places = torch.tensor([0, 50])
    (folder,) = (tmp_path / "cache").iterdir()
    (folder / name).rename(folder / "before")
    (folder / name).write_bytes(b"")
    assert text.windows(places, 4).shape == (2, 4)  # a file in its place changes nothing
    (folder / "before").replace(folder / name)
    changed(folder / name, lambda content: content[:8])
    said = rf"{name} must keep its \d+ bytes while its tokens are read, got 8"
    for use in (
        lambda: text.row(50, 4),
        lambda: text.windows(places, 4),
        lambda: text.predicts(places, 4),
        lambda: text[4:].windows(places, 4),
    ):
        with pytest.raises(OSError, match=said):
            use()


def test_a_file_of_tokens_that_becomes_shorter_after_it_was_checked_ends_no_process(
    tmp_path, monkeypatch
):
    file = tmp_path / "a.txt"
    file.write_text(" ".join(f"w{i % 60}" for i in range(20_000)))  # several pages of a disk
    text = read_tokens([file], make_tokenizer(), cache=tmp_path / "cache")
    places = torch.tensor([0, 15_000])
    before = text.windows(places, 4)
    (folder,) = (tmp_path / "cache").iterdir()
    os.truncate(folder / "tokens", 0)
    monkeypatch.setattr(Text, "check_files", lambda self: None)  # as if it came just before
    assert torch.equal(text.windows(places, 4), before)
    assert len(text.row(15_000, 8)["input_ids"]) == 8
