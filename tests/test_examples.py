"""Examples run, with small models in place of those that they are meant for."""

import json
import re
import runpy
import tomllib
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi
from transformers import AutoModelForCausalLM, AutoTokenizer

from comparing import assert_close
from hf_memory.conversion import load_teacher, make_student

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


@pytest.mark.parametrize(("teacher", "tokens"), [("smollm2", 20 * 2048), ("gemma3", 0)])
def test_tokens_that_a_real_teachers_student_learns_on_are_read_off_its_recipe(teacher, tokens):
    """A stage that a recipe switches off names nothing but its steps."""
    example = runpy.run_path(str(EXAMPLES / "real_teacher.py"))
    assert example["tokens_to_learn"](example["RECIPES"] / f"{teacher}.yaml") == tokens


@pytest.fixture
def example(monkeypatch, tmp_path):
    """Runs an example with words of a command line, in an empty folder; returns its variables."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)

    def run(name, *words):
        monkeypatch.setattr("sys.argv", [name, *map(str, words)])
        return runpy.run_path(str(EXAMPLES / f"{name}.py"))

    return run


def test_a_model_that_is_trained_from_scratch_reads_its_documents_apart(example):
    documents = [f"This is document {i}. " * (3 + i % 5) for i in range(60)]
    lines = (json.dumps({"text": text}) for text in documents)
    Path("text.jsonl").write_text("\n".join(lines), encoding="utf-8")
    sizes = {"vocab_size": 300, "hidden_size": 64, "num_layers": 1, "length": 64}
    words = [word for name, size in sizes.items() for word in (f"--{name}", size)]
    trained = ("--max_steps", 2, "--report_to", "none", "--use_cpu", "--disable_tqdm", "True")
    found = example(
        "train_from_scratch", "--text", "text.jsonl", "--output_dir", "out", *words, *trained
    )
    model = AutoModelForCausalLM.from_pretrained("out").double()
    row = found["rows"][0]
    (start, *_) = (row["position_ids"] == 0).nonzero()[1]  # of the second document
    with torch.no_grad():
        packed = model(row["input_ids"][None], position_ids=row["position_ids"][None]).logits
        alone = model(
            row["input_ids"][None, start:], position_ids=row["position_ids"][None, start:]
        )
    assert row["labels"][start] == -100
    assert_close(packed[:, start:], alone.logits)
    assert (
        AutoTokenizer.from_pretrained("out")
        .decode(row["input_ids"])
        .startswith("This is document 0.")
    )


@pytest.mark.filterwarnings("default:the text has more tokens than the model's max_position")
def test_a_converted_model_reads_a_document_and_is_asked_later(example, teacher, text, capsys):
    example("convert_a_model", teacher, text, "student", "--steps", 2, "--length", 64)
    assert re.search(r"KL from the teacher: 0\.\d{3}", capsys.readouterr().out)
    with pytest.warns(
        UserWarning, match="more tokens than the model's max_position_embeddings=2048"
    ):
        example("long_document", "student", "read", text, "memory.safetensors")
    assert capsys.readouterr().out.startswith("4,000 tokens are ")
    example("long_document", "student", "ask", "memory.safetensors", "the")
    assert capsys.readouterr().out.strip()


def test_a_served_student_writes_what_the_student_writes(example, teacher, capsys):
    sinks = {
        "num_sink_tokens": 0,
        "attention_sinks": True,
        "num_kept_tokens": 0,
        "cache_bits": None,
        "sliding_window": 8,
    }
    student = make_student(load_teacher(str(teacher)), keep=(0,), **sinks)
    student.save_pretrained("student")
    AutoTokenizer.from_pretrained(teacher).save_pretrained("student")
    example("serve_a_student", "student", "served", "the", "the end of the")
    assert "both write the same: True" in capsys.readouterr().out


def test_a_page_shows_which_tokens_heads_hold_by_each_policy(example, teacher, capsys):
    keeps = {"sliding_window": 2, "num_sink_tokens": 1, "kept_block_size": 2}
    student = make_student(load_teacher(str(teacher)), num_kept_tokens=[[1, 2], [2, 2]], **keeps)
    student.save_pretrained("student")
    AutoTokenizer.from_pretrained(teacher).save_pretrained("student")
    words = ["the", "end", "of", "the", "text", ".", "the", "end", "of", "a", "text"]
    Path("text.txt").write_text(" ".join(words), encoding="utf-8")
    example("kept_tokens", "student", "text.txt", "kept.html")["main"]()
    assert "kept.html has the page" in capsys.readouterr().out
    page = Path("kept.html").read_text(encoding="utf-8")
    assert re.findall(r"<h2>(\w+)</h2>", page) == ["received_attention", "change_of_output"]
    for column in page.split("<section>")[1:]:
        shares = [int(x) for x in re.findall(r'title="(\d+)% of the heads"', column)]
        assert len(shares) == len(words)
        assert shares[0] == shares[-1] == shares[-2] == 100
        assert sum(shares) == 25 * (4 * (1 + 2 + len(words) % 2) + 1 + 2 + 2 + 2)


def test_a_page_of_a_student_that_keeps_no_tokens_is_refused(example, teacher):
    student = make_student(load_teacher(str(teacher)), num_kept_tokens=0, cache_bits=None)
    student.save_pretrained("student")
    AutoTokenizer.from_pretrained(teacher).save_pretrained("student")
    Path("text.txt").write_text("the end", encoding="utf-8")
    with pytest.raises(ValueError, match="the model must have heads that keep tokens"):
        example("kept_tokens", "student", "text.txt", "kept.html")["main"]()


def test_the_delta_rule_in_a_module_learns_to_look_values_up(example, capsys):
    example("op_in_a_module")
    assert capsys.readouterr().out.endswith("step 100: 100% of answers right\n")


def test_a_job_converts_and_uploads_to_a_repository_that_it_made_before(
    example, teacher, text, monkeypatch
):
    calls = []
    monkeypatch.setattr(HfApi, "create_repo", lambda *_, **options: calls.append(options))
    monkeypatch.setattr(HfApi, "upload_folder", lambda *_, **options: calls.append(options))
    monkeypatch.setattr("subprocess.run", lambda words, check: calls.append(words))
    options = ["--text", str(text), "-t", "bf16=true"]
    example("convert_job")["main"]([str(teacher), "me/student", *options])
    made, (_, *converted), uploaded = calls
    command = ["-m", "hf_memory", "convert", str(teacher), "--output", "student"]
    assert made == {"private": True, "exist_ok": True}
    assert converted == command + options
    assert uploaded == {"repo_id": "me/student", "folder_path": "student"}


def test_a_job_takes_this_package_from_its_wheel_alone():
    """No other package may have its name."""
    script = (EXAMPLES / "convert_job.py").read_text(encoding="utf-8")
    block = re.match(r"# /// script\n((?:#.*\n)+?)# ///\n", script)[1]
    metadata = tomllib.loads(re.sub(r"^# ?", "", block, flags=re.MULTILINE))
    project = tomllib.loads((EXAMPLES.parent / "pyproject.toml").read_text())["project"]
    (needed,) = metadata["dependencies"]
    assert metadata["requires-python"] == project["requires-python"]
    assert needed.startswith(project["name"])
    (index,) = metadata["tool"]["uv"]["index"]
    assert metadata["tool"]["uv"]["sources"] == {project["name"]: {"index": index["name"]}}
    assert index["explicit"]
    assert metadata["tool"]["hf-jobs"]["volumes"] == [f"./wheels:{index['url']}"]
