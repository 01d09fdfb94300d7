"""`hf-memory evaluate`: what it finds is what the measures find, and nothing is measured twice."""

import json
import math
import random
import shutil
from types import SimpleNamespace

import pytest
import torch
import yaml
from rich.table import Table
from tokenizers import pre_tokenizers
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

from cases import CASE, SIZES, make_model, word_tokenizer
from hf_memory.cli import terminal
from hf_memory.conversion import read_tokens
from hf_memory.evaluation import OF_CARD, Subject, record, tasks
from hf_memory.evaluation.needles import MULTIKEY, PASSKEY, ROOM, SINGLE, hide, hunt, samples_of
from hf_memory.evaluation.writing import greedy, words_alike
from hf_memory.files.folders import folder_lock

TEXT = [
    "the",
    "a",
    "number",
    "is",
    "for",
    "key",
    "magic",
    "pass",
    "One",
    "of",
    "quiet",
    "river",
    "golden",
    ".",
    ":",
]
WORDS = ["?", *"0123456789", *TEXT]
KINDS = {"single": SINGLE, "multikey": MULTIKEY, "passkey": PASSKEY}
SHORT = ["--lengths", 256, "--items", 2]


def make_tokenizer():
    tokenizer = word_tokenizer(WORDS, unk_token="?")
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), digits]
    )
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama and a DeltaNet with a tokenizer, a text and prompts."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    made = {
        "teacher": LlamaForCausalLM(LlamaConfig(**SIZES)),
        "student": make_model(CASE["deltanet"]),
    }
    for name, model in made.items():
        model.save_pretrained(folder / name)
        make_tokenizer().save_pretrained(folder / name)
    dice = random.Random(0)
    (folder / "text.txt").write_text(" ".join(dice.choice(TEXT) for _ in range(1500)))
    (folder / "prompts.txt").write_text("the key is\nthe magic number is\n")
    return folder


@pytest.fixture
def evaluate(run, folder, tmp_path, monkeypatch):
    """Types `hf-memory evaluate student --against teacher`; returns its output and the record."""

    monkeypatch.setattr(
        record, "plot_task", lambda path, models: path.write_text(str(list(models)))
    )

    def type_command(*flags, **settings):
        models = (folder / "student", "--against", folder / "teacher")
        given = {"prompts": str(folder / "prompts.txt"), "max_new_tokens": 3, "samples": 2}
        given |= {"measure-tokens": 2048, **settings}
        (tmp_path / "settings.yaml").write_text(yaml.safe_dump(given))
        code, *output = run(
            "evaluate",
            *models,
            "--text",
            folder / "text.txt",
            "--output",
            tmp_path / "out",
            *SHORT,
            *flags,
            "--config",
            tmp_path / "settings.yaml",
        )
        file = tmp_path / "out" / "evaluation.json"
        record = json.loads(file.read_text()) if file.exists() else {"models": {}}
        return (
            code,
            *(" ".join(x.split()) for x in output),
            [row["found"] for row in record["models"].values()],
        )

    return type_command


def test_a_student_beside_its_teacher_has_the_figures_of_its_card(evaluate, folder, tmp_path):
    chosen = ["instructions", "agreement", "perplexity", "recall", "passkey", "answers", "speed"]
    code, out, err, (theirs, ours) = evaluate("--tasks", ",".join(chosen))
    assert err == ""
    assert code == 0
    assert list(ours) == chosen
    assert list(theirs) == [x for x in chosen if x != "agreement"]
    assert all(
        (tmp_path / "out" / f"{task}.png").read_text() == "['teacher', 'student']"
        for task in chosen[2:]
    )
    assert (tmp_path / "out" / "scores.png").read_bytes()[:4] == b"\x89PNG"
    assert len(ours["instructions"]["copying"]["score"]["samples"]) == 2
    assert "since the teacher cannot answer them well above chance: " in out
    assert "win and tie" not in out
    assert len(ours["answers"]["3"]["texts"]["value"]) == 2
    assert "the magic number is" in out

    models = {
        name: AutoModelForCausalLM.from_pretrained(folder / name) for name in ("student", "teacher")
    }
    tokens = read_tokens([folder / "text.txt"], make_tokenizer())
    subject = Subject(models["student"], tokens, models["teacher"], lengths=(256,), max_tokens=2048)
    card = tasks.evaluate(subject, OF_CARD)

    assert all(ours[task] == card[task] for task in ("agreement", "perplexity", "recall"))
    assert (
        ours["speed"]["256"]["cache bytes in 16 bits"]
        == card["speed"]["256"]["cache bytes in 16 bits"]
    )
    recall = ours["recall"]["256"]["recall"]
    assert recall["low"] < recall["value"] < recall["high"]
    assert f"{recall['value']:.3g} [{recall['low']:.3g}, {recall['high']:.3g}]" in out


def test_a_student_in_few_bits_is_another_row(evaluate):
    """Bits are those of the student; its teacher is measured as it is."""
    *_, found = evaluate("--tasks", "speed")
    assert len(found) == 2
    code, _, err, found = evaluate("--tasks", "speed", "--cache-bits", '{"recurrent_states": 8}')
    assert err == ""
    assert code == 0
    assert len(found) == 3


def test_what_a_stopped_call_has_found_is_not_measured_again(evaluate, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("stopped")

    chosen = ["--tasks", "perplexity,recall,speed"]
    with monkeypatch.context() as patch:
        patch.setattr(tasks, "cost", fail)
        code, *_, (stopped,) = evaluate(*chosen)
    assert list(stopped) == ["perplexity", "recall"]
    assert code == 2
    counted = []
    monkeypatch.setattr(
        tasks, "perplexity_by_position", lambda *args, **kwargs: counted.append(1) or {256: 1.0}
    )
    code, *_, (theirs, ours) = evaluate(*chosen)
    assert len(counted) == 1  # of the student alone
    assert code == 0
    assert theirs["perplexity"] == stopped["perplexity"]
    assert set(theirs["speed"]) == set(ours["speed"]) == {"256"}

    code, _, err, _ = evaluate(
        "--lengths", "256,512", seed=1
    )  # recall divides its passages among lengths
    assert code == 2
    assert "with another lengths and seed" in err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--tasks", "perplexity,chess"], "tasks must be from instructions, retrieval,"),
        (
            ["--lengths", "256,long"],
            "lengths must be numbers with commas between them, got '256,long'",
        ),
        (["--lengths", "256,-5"], "lengths must be at least 2 tokens, got '256,-5'"),
        (
            {"prompts": "/dev/null"},
            "prompts must be a file, not a pipe or a device, got the device /dev/null",
        ),
        (["--lengths", "4096"], "lengths must be at most the model's 2048 positions, got 4096"),
    ],
)
def test_what_cannot_be_measured_is_refused(evaluate, flags, sentence):
    given = {} if isinstance(flags, list) else flags
    code, _, err, _ = evaluate(*([] if given else flags), **given)
    assert code == 2
    assert sentence in err


def test_scores_need_no_text(run, folder, tmp_path):
    model = folder / "teacher"
    out = tmp_path / "out"
    code, _, err = run("evaluate", model, "--tasks", "turns,recall", "--output", out)
    assert code == 2
    assert "text must be given for recall; of all tasks only instructions, retrieval, " in err
    settings = tmp_path / "settings.yaml"
    settings.write_text("score-lengths: 200,9999")
    code, shown, err = run(
        "evaluate",
        model,
        "--tasks",
        "turns",
        "--items",
        2,
        "--config",
        settings,
        "--output",
        out,
    )
    assert err == ""
    assert code == 0
    assert "first turn at 200" in " ".join(shown.split())
    assert "9999" not in shown  # more than the model has positions


@pytest.mark.parametrize(
    "flags", [["--tasks", "agreement"], ["--tasks", "passkey", "--lengths", 8]]
)
def test_a_call_that_measures_nothing_is_refused(run, folder, tmp_path, flags):
    model = folder / "student"
    text = folder / "text.txt"
    code, _, err = run("evaluate", model, "--text", text, "--output", tmp_path / "out", *flags)
    assert code == 2
    assert (
        f"tasks must have one that can be measured at these lengths, agreement only with --against, got {flags[1]} at"
        in err
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_a_needle_is_where_it_should_be(kind, depth):
    tokenizer = make_tokenizer()
    text = torch.full((50,), WORDS.index("river"))
    kind = KINDS[kind]
    prompt, words = hide(tokenizer, text, kind, 400, depth, random.Random(0))
    assert tokenizer.decode(words.answer) == " ".join(words.number)
    assert len(prompt) + len(words.answer) + ROOM == 400
    first = words.needles[0]
    opening = len(words.opening)
    question = len(words.question)
    hay = prompt[opening : len(prompt) - question]
    start = next(i for i in range(len(hay)) if hay[i : i + len(first)] == first)
    others = sum(map(len, words.needles[1:]))
    assert abs(start - depth * (len(hay) - len(first))) <= others + 1
    assert all(any(hay[i : i + len(x)] == x for i in range(len(hay))) for x in words.needles)
    assert len(words.needles) == kind.keys
    again, other = (hide(tokenizer, text, kind, 400, depth, random.Random(seed)) for seed in (0, 1))
    assert again[0] == prompt != other[0]


class Reader(nn.Module):
    """A model of which is known what it predicts of tokens [1, T], and what it writes."""

    device = torch.device("cpu")
    generation_config = GenerationConfig()

    def __init__(self, predict, write):
        super().__init__()
        self.predict = predict
        self.write = write

    def forward(self, input_ids, use_cache, logits_to_keep):
        return SimpleNamespace(logits=self.predict(input_ids)[:, -logits_to_keep:])

    def generate(self, input_ids, **options):
        return torch.cat([input_ids, torch.tensor([self.write(input_ids[0].tolist())])], dim=1)


def know_nothing(input_ids):
    return torch.zeros(*input_ids.shape, len(WORDS))


def know_all(input_ids):
    return 100.0 * nn.functional.one_hot(input_ids.roll(-1, dims=1), len(WORDS)).float()


def the_passkey(prompt):
    """What stands in the text behind "pass key is", after a word that was not asked for."""
    words = [WORDS[token] for token in prompt]
    start = next(i for i in range(len(words)) if words[i - 1] == "is" and words[i].isdigit())
    return [WORDS.index("the"), *prompt[start : start + 5]]


def test_needles_are_scored_by_what_is_written_and_by_what_is_predicted():
    def found(predict, write):
        model = Reader(predict, write)
        text = torch.full((50,), WORDS.index("river"))
        samples = samples_of(make_tokenizer(), text, PASSKEY, 128, count=3)
        return hunt(model, make_tokenizer(), samples).values()

    # digits of a word level tokenizer are written apart, so that the number itself is in no text
    assert list(found(know_nothing, the_passkey)) == pytest.approx([0, 0, -math.log(len(WORDS))])
    assert list(found(know_all, None)) == pytest.approx([1, 1, 0])  # needs not write


@pytest.mark.parametrize(
    "own",
    [
        {"do_sample": True, "temperature": 5.0, "repetition_penalty": 9.0},
        {"suppress_tokens": [*range(20)], "no_repeat_ngram_size": 1},
        {"num_beams": 3, "num_return_sequences": 2, "return_dict_in_generate": True},
    ],
)
def test_an_answer_is_greedy_whatever_the_model_would_do(own):
    model = make_model(CASE["deltanet"])
    model.generation_config.update(**own)
    prompt = torch.tensor([[3, 4, 5]])
    expected = prompt
    for _ in range(5):
        expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], dim=1)
    tokenizer = make_tokenizer()
    longer = [7, 3, 8, 9, 3, 4, 5]
    alone = greedy(model, tokenizer, [longer], 5)
    assert greedy(model, tokenizer, [prompt[0].tolist(), longer], 5) == [
        tokenizer.decode(expected[0, 3:]),
        *alone,
    ]


def test_words_alike_are_those_before_the_first_that_differs():
    assert [words_alike("a b c", x) for x in ("", "b", "a b", "a  b\nd", "a b c d")] == [
        0,
        0,
        2,
        2,
        3,
    ]


@pytest.mark.parametrize("path", ["{folder}/student", "{folder}/../{folder.name}/student"])
def test_a_model_is_not_compared_with_itself(evaluate, folder, path):
    code, _, err, _ = evaluate("--tasks", "recall", "--against", path.format(folder=folder))
    assert code == 2
    assert "student with the same weights" in err


def test_the_same_weights_with_another_tokenizer_have_answers_of_their_own(run, folder, tmp_path):
    other = tmp_path / "other"
    tokenizer = make_tokenizer()
    shutil.copytree(folder / "student", other)
    tokenizer.chat_template = "the river is quiet . {{ messages[0].content }}"
    tokenizer.save_pretrained(other)
    settings = tmp_path / "settings.yaml"
    settings.write_text(f"prompts: {folder / 'prompts.txt'}\nmax-new-tokens: 3")
    for model in (folder / "student", other, folder / "student"):
        texts = "--text", folder / "text.txt", "--config", settings
        assert (
            run(
                "evaluate",
                model,
                *texts,
                "--output",
                tmp_path / "out",
                "--tasks",
                "answers",
                *SHORT,
            )[0]
            == 0
        )
    known = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    (plain, _), (told, _) = (
        [*row["found"]["answers"]["3"]["texts"]["value"]] for row in known["models"].values()
    )
    assert plain != told


def test_a_folder_that_another_process_writes_to_is_refused(evaluate, tmp_path):
    with folder_lock(tmp_path / "out"):
        code, _, err, found = evaluate("--tasks", "recall")
        assert found == []
        assert code == 2
        assert "to which process" in err
    assert not (tmp_path / "out").exists()
    with folder_lock(tmp_path / "out"):
        pass


def test_results_of_a_model_are_found_again_under_another_path():
    models = {
        "a/model": {"weights": "1", "found": {"recall": {}}},
        "b/model": {"weights": "2", "found": {}},
    }
    known = {"settings": {}, "models": models}
    assert record.row_of(known, "./a/model", "1") is models["a/model"]["found"]
    assert record.row_of(known, "c/mod\x1bel", "3") == {}
    assert record.labels(known) == {
        "a/model": "a/model",
        "b/model": "b/model",
        "c/mod\x1bel": r"mod\x1bel",
    }


@pytest.mark.parametrize(
    "text",
    ["{}", "[]", "{", '{"settings": {}, "models": []}', '{"settings": {}, "models": {"x": 1}}'],
)
def test_a_file_that_is_no_record_is_refused(tmp_path, text):
    (tmp_path / "evaluation.json").write_text(text)
    with pytest.raises(ValueError, match=r"evaluation.json must be the record of an evaluation"):
        record.open_record(tmp_path, {})


def test_lists_of_numbers_are_lines_of_a_record(tmp_path):
    found = {
        "samples": [1.0, -0.5, 1e-12],
        "texts": ["[\n 1,  2\n]", "[ 3 ]"],
        "none": [],
        "gap": [None, 1],
    }
    known = {"settings": {}, "models": {"x": {"weights": "", "found": found}}}
    record.keep(tmp_path, known)
    assert record.open_record(tmp_path, {}) == known
    assert "[ 1.0, -0.5, 1e-12 ]" in (tmp_path / record.FILE).read_text()


def test_names_cannot_control_the_terminal(capsys, wide_console):
    rows = Table("col\x1b[31m", title="title\x1b[0m")
    rows.add_row("cell\x9b5m")
    terminal.console.print(rows)
    terminal.console.out("line\x1b]0;x\x07")
    out = capsys.readouterr().out
    assert not any(code in out for code in "\x1b\x9b\x07")
    assert r"cell\x9b5m" in out


def test_short_lengths_are_measured_or_refused():
    model = make_model(CASE["deltanet"])
    tokens = torch.arange(300) % 20
    found = tasks.evaluate(
        tasks.Subject(model, tokens, lengths=(2, 40, 64)), ["perplexity", "recall", "speed"]
    )
    assert {task: list(places) for task, places in found.items()} == {
        "perplexity": ["32", "64"],
        "recall": ["64"],
        "speed": ["2", "40", "64"],
    }
    too_long = tasks.Subject(model, tokens, lengths=(301,))
    assert tasks.evaluate(too_long, ["perplexity"]) == {}
    with pytest.raises(ValueError, match="lengths must be whole numbers of at least 2, got"):
        tasks.Subject(model, tokens, lengths=(-5, 0, 64))


MEASURED = [task for task in tasks.TASKS if task != "reasoning"]  # which needs a package


@pytest.mark.parametrize("task", MEASURED)
def test_a_model_that_is_measured_while_it_trains_evaluates(task, monkeypatch):
    places = tasks.places
    monkeypatch.setattr(tasks, "places", lambda *given: places(*given)[:1])
    model = make_model(CASE["attention-kept"]).train()
    frozen = model.model.layers[0].mlp.eval()
    modes = []
    model.model.register_forward_pre_hook(
        lambda *_: modes.append({x.training for x in model.modules()})
    )
    how = {
        "lengths": (512,),
        "max_tokens": 4096,
        "items": 1,
        "samples": 1,
        "new_tokens": 2,
        "score_lengths": (300,),
    }
    subject = tasks.Subject(
        model,
        torch.arange(600) % len(WORDS),
        teacher=make_model(CASE["deltanet"]).train(),
        tokenizer=make_tokenizer(),
        prompts=["the key is"],
        **how,
    )
    assert tasks.evaluate(subject, [task])[task]
    assert set(map(frozenset, modes)) == {frozenset({False})}
    assert {x for x in model.modules() if not x.training} == set(frozen.modules())
    assert subject.teacher.training
