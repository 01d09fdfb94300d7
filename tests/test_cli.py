"""The commands as a user types them."""

import json
import os
import re
import shutil
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
import yaml
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, pipeline

from hf_memory.cli.options import read_goal, read_pairs, read_weights
from hf_memory.conversion import Schedule, defaults
from hf_memory.demo import MuonWithAdamW, Settings, make_corpus, run_demo
from hf_memory.evaluation import evaluate, tasks
from hf_memory.files.folders import folder_lock
from hf_memory.files.manual import sections, unwrap
from teachers import FAST, SHORT


def test_convert_info_generate(run, teacher, text, tmp_path):
    student = tmp_path / "student"
    keep = "--keep", 1, "--items", 2
    code, out, err = run("convert", teacher, "--text", text, "--output", student, *FAST, *keep)
    assert err == ""
    assert code == 0
    assert 0 < out.index("Not compared, since the teacher") < out.index("perplexity")
    card = (student / "README.md").read_text()
    results = json.loads((student / "results.json").read_text())
    places = [card.index(x) for x in ("| 256 | teacher", "compare nothing", "## Speed")]
    assert places == sorted(places)
    scored = ["retrieval" in row for row in results["rows"].values()]
    assert scored == [True, False, True]  # the student before training has no scores
    assert (student / "scores.png").exists()

    code, out, _ = run("info", student)
    assert code == 0
    assert "hf_memory_linear" in out
    assert "1 memory, 1 full_attention" in out
    assert "131,072" in out
    assert "each more" in out

    code, out, _ = run("generate", student, "--prompt", "the snake", "--max-new-tokens", 4)
    assert code == 0
    assert out.startswith("the snake")


def test_the_default_is_what_the_documentation_advises(run, teacher, text, tmp_path):
    output = tmp_path / "student"
    short = "--distillation", "steps=2,length=64", "-o", "sliding_window=16", "--items", 0
    code, out, err = run("convert", teacher, "--text", text, "--output", output, *short)
    assert err == ""
    assert code == 0
    run_file = yaml.safe_load((output / "run.yaml").read_text())
    assert run_file["to"] == "attention"
    assert run_file["keep"] == "heads:1/11"
    assert run_file["transfer"]["steps"] == run_file["fine-tuning"]["steps"] == 0
    assert run_file["train"] == "attention"
    options = read_pairs(run_file["option"])
    assert options["num_kept_tokens"] == 371
    assert options["cache_bits"] == 8
    distillation = {"learning_rate": 3e-5, "batch_size": 1, "length": 64, "repeats": 0.3}
    assert distillation.items() <= run_file["distillation"].items()
    config = json.loads((output / "config.json").read_text())
    assert sum(map(len, config["full_attention_heads"])) == 1
    (kept,) = [
        f"{i}/{head}" for i, heads in enumerate(config["full_attention_heads"]) for head in heads
    ]
    assert "layer/head" in out
    assert kept in out
    assert f"{kept} (" in (output / "README.md").read_text()
    assert (output / "heads.png").exists()


def test_a_goal_decides_what_is_kept(run, teacher, text, tmp_path):
    command = (
        "convert",
        teacher,
        "--text",
        text,
        "--output",
        tmp_path / "student",
        "-o",
        "sliding_window=16",
    )
    short = "--distillation", "steps=2,length=64", "--dry-run"
    code, out, err = run(*command, *short, "--goal", "kl=9")
    assert err == ""
    assert code == 0
    plan = out.index("\nplan\n")
    assert out.index("1/25") < plan
    assert plan < out.index("key-value heads ", plan)
    assert list(tmp_path.iterdir()) == []
    for flags, message in (
        (["kl=x"], "goal must be kl=NUMBER"),
        (["kl=1", "--keep", "1"], "goal must be given without keep"),
    ):
        code, _, err = run(*command, *short, "--goal", *flags)
        assert message in err
        assert code == 2


@pytest.mark.usefixtures("without_pictures")
def test_a_student_is_saved_before_it_is_measured_and_measuring_goes_on(
    run, teacher, text, tmp_path, monkeypatch
):
    def no_time(*args, **kwargs):
        raise OSError("no time")

    asked = []
    command = ["convert", teacher, "--text", text, "--output", tmp_path / "student", *FAST]
    with monkeypatch.context() as patch:
        patch.setattr(tasks, "cost", no_time)
        assert run(*command)[0] == 2
    assert (
        run("generate", tmp_path / "student", "--prompt", "the snake", "--max-new-tokens", 2)[0]
        == 0
    )
    weights = (tmp_path / "student" / "model.safetensors").read_bytes()
    assert "nothing was measured" in (tmp_path / "student" / "README.md").read_text()
    code, _, err = run(*command, "--seed", 1)
    assert "output must be a new folder" in err  # this is another run
    assert code == 2
    again = tasks.perplexity_by_position
    monkeypatch.setattr(
        tasks, "perplexity_by_position", lambda *args, **how: asked.append(1) or again(*args, **how)
    )
    assert run(*command)[0] == 0
    assert len(asked) == 2  # the student's, before and after: the teacher's is known
    assert (tmp_path / "student" / "model.safetensors").read_bytes() == weights
    assert {"README.md", "evaluation.json"} & {
        x.name for x in (tmp_path / "student").iterdir()
    } == {"README.md"}
    assert run(*command)[0] == 2  # now it is finished


def test_an_output_is_claimed_before_any_work(run, teacher, text, tmp_path, monkeypatch):
    command = ("convert", teacher, *FAST)
    tune = ("fine-tune", teacher, "--steps", 1, "--length", 32)
    lock = tmp_path / ".student.lock"
    lock.write_text("process 1 on a machine")  # of a process that was killed
    with folder_lock(tmp_path / "student"):
        for words in (command, tune, ["demo"]):
            text_of = [] if words == ["demo"] else ["--text", text]
            code, _, err = run(*words, *text_of, "--output", tmp_path / "student")
            assert "output must not be in use" in err
            assert f"to which process {os.getpid()}" in err
            assert code == 2
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "student").mkdir()
    (tmp_path / "student" / "results.json").write_text("{}")
    code, out, err = run("demo", "--output", tmp_path / "student")  # a student, not a demo
    assert out == ""
    assert "output must be a new folder or the result of an earlier run" in err
    assert code == 2


@pytest.mark.usefixtures("without_pictures")
def test_the_table_of_a_card_shows_what_a_window_does_not_see(run, teacher, text, tmp_path):
    student = tmp_path / "student"
    window = ["-o", "sliding_window=32", "-o", "num_kept_tokens=0", "-o", "cache_bits=null"]
    code, out, _ = run(
        "convert", teacher, "--text", text, "--output", student, *FAST, "--to", "attention", *window
    )
    assert code == 0
    models = ["teacher", "before training", "student"]
    lines = [" ".join(line.split()) for line in out.splitlines()]
    shown = [line for line in lines if line.startswith("256 ")]
    assert [
        line.startswith(f"256 {name} ") for line, name in zip(shown, models, strict=True)
    ] == 3 * [True]
    rows = json.loads((student / "results.json").read_text())["rows"]
    assert list(rows) == models
    untrained = rows["before training"]
    near, beyond = (untrained["agreement"][at]["KL"]["value"] for at in ("32", "64"))
    assert near < beyond / 100  # within its window it is its teacher
    assert set(untrained["recall"]) == set(untrained["speed"]) == {"256"}
    assert (
        "those of tokens N/2 + 1 to N, in 16 windows of 256 tokens"
        in (student / "README.md").read_text()
    )


@pytest.mark.usefixtures("without_pictures")
def test_layers_are_ranked_before_some_are_kept(run, teacher, text, tmp_path):
    student = tmp_path / "student"
    code, *_ = run(
        "convert",
        teacher,
        "--text",
        text,
        "--output",
        student,
        *FAST,
        "--keep",
        "auto:1/2",
    )
    assert code == 0
    assert re.search(r"keeps_everything \| [01] \(auto:1/2\)", (student / "README.md").read_text())


def test_a_dry_run_shows_the_plan_and_writes_nothing(run, teacher, text, tmp_path):
    command = [
        "convert",
        teacher,
        "--text",
        text,
        "--output",
        tmp_path / "student",
        *FAST,
        "--dry-run",
    ]
    code, out, err = run(*command, "--keep", "1/2")
    assert err == ""
    assert code == 0
    weights = sum(x.numel() for x in LlamaForCausalLM.from_pretrained(teacher).parameters())
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert f"teacher llama, {weights:,} parameters" in lines
    assert "saved in float32, 0.02 MB" in lines
    assert "attention kept 1" in lines
    assert "128 tokens, 0.036 times the text" in lines
    assert "cache of 1,024 tokens 0.07 MB, 50.9% of the teacher's 0.13 MB in 16 bits" in lines
    assert list(tmp_path.iterdir()) == []
    code, out, err = run(*command, "--transfer", "length=4096")
    assert out == ""
    assert code == 2
    assert "length must be at most the model's 2048 positions, got 4096" in err
    settings = "option: {cache_bits: {attention: 4}, sliding_window: 8}\nto: attention"
    (tmp_path / "settings.yaml").write_text(settings)
    code, out, err = run(*command, "--config", tmp_path / "settings.yaml", "--keep", "1/2")
    assert err == ""
    assert "bits of the cache attention: 4" in " ".join(out.split())
    (tmp_path / "settings.yaml").write_text("cross-entropy: 2")
    code, out, err = run(*command, "--config", tmp_path / "settings.yaml")
    assert out == ""
    assert code == 2
    assert "cross_entropy must be from 0 to 1, got 2" in err


@pytest.fixture
def teacher_without_weights(teacher, tmp_path_factory):
    """A folder with the config and the tokenizer of `teacher` alone."""
    folder = tmp_path_factory.mktemp("described") / "teacher"
    shutil.copytree(teacher, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


HEADS = "--distillation", "steps=2,length=64", "-o", "sliding_window=16", "--keep", "heads:1/2"


@pytest.mark.usefixtures("without_pictures")
def test_a_dry_run_chooses_heads_as_the_run_does(run, teacher, text, tmp_path):
    output = tmp_path / "student"
    command = "convert", teacher, "--text", text, "--output", output, *HEADS
    code, out, err = run(*command, "--dry-run")
    assert err == ""
    assert code == 0
    assert list(tmp_path.iterdir()) == []
    assert run(*command)[0] == 0
    kept = json.loads((output / "config.json").read_text())["full_attention_heads"]
    named = [f"{layer}/{head}" for layer, heads in enumerate(kept) for head in heads]
    assert f"key-value heads {', '.join(named)} (layer/head)" in " ".join(out.split())


@pytest.mark.parametrize("flags", [(), ("--gpu", "h100")])
def test_a_dry_run_without_weights_shows_how_many_heads_would_be_kept(
    flags, run, teacher, teacher_without_weights, text, tmp_path
):
    model = teacher if flags else teacher_without_weights  # what a GPU holds is asked elsewhere
    command = "convert", model, "--text", text, "--output", tmp_path / "student", *HEADS
    code, out, err = run(*command, "--dry-run", *flags)
    assert err == ""
    assert code == 0
    assert "in 2 key-value heads" in out
    assert "layer/head" not in out


def test_a_goal_without_weights_is_refused(run, teacher_without_weights, text, tmp_path):
    model = teacher_without_weights
    command = "convert", model, "--text", text, "--output", tmp_path / "student", *HEADS[:4]
    code, out, err = run(*command, "--goal", "kl=9", "--dry-run")
    assert "Error: " in err
    assert "plan" not in out
    assert code == 2


@pytest.mark.usefixtures("without_pictures")
def test_a_file_describes_a_run_and_the_command_line_wins(run, teacher, text, tmp_path):
    file, first, second = (tmp_path / name for name in ("my.yaml", "first", "second"))
    flags = {"to": "gated", "keep": [1], "transfer": [SHORT], "cross-entropy": 0.5}
    flags["distillation"] = {"steps": 9, "batch_size": 2, "length": 32}
    options = {"gate": "scalar", "memory_rope": False}
    file.write_text(
        yaml.safe_dump(
            {"teacher": str(teacher), "text": {str(text): 0.5}, "option": options, **flags}
        )
    )
    code, _, err = run(
        "convert", "--config", file, "--output", first, "--distillation", "steps=2", "--seed", 3
    )
    assert err == ""
    assert code == 0
    config = AutoConfig.from_pretrained(first)
    assert config.model_type == "hf_memory_gated"
    assert config.gate == "scalar"
    assert config.memory_rope is False
    described = yaml.safe_load((first / "run.yaml").read_text())
    assert described["teacher"] == str(teacher)
    assert described["text"] == [f"{text}=0.5"]
    assert read_pairs(described["option"]) == {
        "gate": "scalar",
        "memory_rope": False,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "output_gate": "sigmoid",
    }
    assert described["keep"] == "1"
    assert described["seed"] == 3
    assert described["cross-entropy"] == 0.5
    assert json.loads((first / "results.json").read_text())["recipe"]["cross_entropy"] == 0.5
    given = {"steps": 2, "batch_size": 2, "length": 32}  # other fields have their defaults
    assert described["transfer"] == {**defaults.TRANSFER_SCHEDULE._asdict(), **given}
    assert described["distillation"] == {**defaults.DISTILLATION_SCHEDULE._asdict(), **given}
    assert not {"config", "overwrite"} & set(described)

    assert run("convert", "--config", first / "run.yaml", "--output", second)[0] == 0
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    assert yaml.safe_load((second / "run.yaml").read_text()) == described | {"output": str(second)}


@pytest.mark.usefixtures("without_pictures")
def test_words_of_a_run_file_stay_what_they_are_beside_files_of_their_names(
    run, teacher, text, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name in ("small", "attention", "eviction=received_attention"):
        (tmp_path / name).mkdir()
    shutil.copy(text, "text.txt")
    os.symlink(teacher, "teacher")
    words = "--size", "small", "--to", "attention", "-o", "eviction=received_attention"
    short = "--distillation", "steps=1,batch_size=1,length=16"
    command = "convert", "teacher", "--text", "text.txt=1", "--output", "small/student"
    code, _, err = run(*command, *words, *short)
    assert err == ""
    assert code == 0
    described = yaml.safe_load((tmp_path / "small" / "student" / "run.yaml").read_text())
    assert (described["size"], described["to"]) == ("small", "attention")
    assert "eviction=received_attention" in described["option"]
    assert described["teacher"] == str(tmp_path / "teacher")
    assert described["text"] == [f"{tmp_path / 'text.txt'}=1"]
    assert described["output"] == str(tmp_path / "small" / "student")


def test_a_typed_option_leaves_the_others_of_a_file(run, teacher, text, tmp_path):
    file = tmp_path / "my.yaml"
    settings = {
        "option": {"full_attention_window": 40, "sliding_window": 9},
        "training": {"weight_decay": 0.1, "adam_beta2": 0.9},
    }
    file.write_text(yaml.safe_dump(settings))
    student = tmp_path / "student"
    command = "convert", teacher, "--text", text, "--output", student, "--config", file
    short = "--distillation", "steps=1,batch_size=1,length=16"
    typed = "-o", "sliding_window=8", "-t", "adam_beta2=0.8"
    code, _, err = run(*command, *short, *typed)
    assert err == ""
    assert code == 0
    config = AutoConfig.from_pretrained(student)
    assert config.full_attention_window == 40
    assert config.sliding_window == 8
    described = yaml.safe_load((student / "run.yaml").read_text())
    assert read_pairs(described["training"]) == {"weight_decay": 0.1, "adam_beta2": 0.8}
    code, _, err = run(*command[:-2], *short, "--overwrite", "--config", student / "run.yaml")
    assert err == ""
    assert code == 0
    again = yaml.safe_load((student / "run.yaml").read_text())
    assert again == described


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("sede: 1", "config must have names from teacher, text, output, to, keep,"),
        ("sede: 1", ", got sede"),
        ("overwrite: true", "got overwrite"),
        ("- 1", "config must be a YAML file of names and values"),
        ("a: [", "config must be a YAML file, got"),
        ("[" * 999, "config must be a YAML file, got"),
        ("a: &a [x, x]\nb: *a", "config must be a YAML file, got .*run.yaml: it has an alias"),
        ("seed: " + "9" * 9999, "config must be a YAML file, got"),
        (
            "seed: 1\n" + "#" * 2**16,
            "config must be a file of at most 65,536 bytes, got .*run.yaml of 65,544 bytes",
        ),
    ],
)
def test_a_wrong_file_is_explained(run, teacher, text, tmp_path, content, sentence):
    (tmp_path / "run.yaml").write_text(content)
    command = [
        "convert",
        teacher,
        "--text",
        text,
        "--output",
        tmp_path / "student",
        "--config",
        tmp_path / "run.yaml",
    ]
    code, out, err = run(*command)
    assert out == ""
    assert code == 2
    assert re.search(sentence, " ".join(err.split()))


def test_a_run_file_that_is_a_pipe_or_stands_for_very_much_is_refused_at_once(
    run, teacher, text, tmp_path
):
    os.mkfifo(tmp_path / "pipe")
    bomb = "a: &a [x, x]\n" + "".join(
        f"{y}: &{y} [{', '.join([f'*{x}'] * 9)}]\n" for x, y in pairwise("abcdefghijkl")
    )
    (tmp_path / "bomb.yaml").write_text(bomb)
    for name, sentence in (
        ("pipe", "config must be a file, not a pipe"),
        ("bomb.yaml", "it has an alias"),
    ):
        code, _, err = run(
            "convert",
            teacher,
            "--text",
            text,
            "--output",
            tmp_path / "x",
            "--config",
            tmp_path / name,
        )
        assert code == 2
        assert sentence in " ".join(err.split())


def test_a_student_is_exported_or_the_option_to_change_is_named(run, teacher, text, tmp_path):
    student = tmp_path / "student"
    folder = tmp_path / "export"
    code, _, err = run("convert", teacher, "--servable", "--text", text, "--output", student, *FAST)
    assert not student.exists()
    assert code == 2
    assert "to must be attention or deltanet or gated for a servable student, got 'linear'" in err
    servable = ["--to", "gated", "--servable"]
    code, _, err = run(
        "convert", teacher, *servable, "-o", "memory_rope=true", "--text", text, "--output", student
    )
    assert not student.exists()
    assert code == 2
    assert "granite needs memory_rope=False" in err
    assert run("convert", teacher, "--text", text, "--output", student, *FAST, *servable)[0] == 0
    code, _, err = run("export", student, "--output", folder, "--to", "qwen3_5")
    assert not folder.exists()
    assert code == 2
    assert "target qwen3_5 is for models of type hf_memory_deltanet" in err
    code, out, err = run("export", student, "--output", folder)
    assert err == ""
    assert code == 0
    assert re.search(
        "granitemoehybrid, whose logits differ from the student's by .e-0[5-8] .*vLLM: supported.*MLX: not supported",
        out,
        re.DOTALL,
    )
    assert (
        "generated_text"
        in pipeline("text-generation", str(folder))("the snake", max_new_tokens=4)[0]
    )


def test_options_reach_the_config(run, teacher, text, tmp_path):
    student = tmp_path / "student"
    options = ["--to", "gated", "-o", "gate=scalar", "-o", "gate_logit_normalizer=8"]
    code, _, err = run("convert", teacher, "--text", text, "--output", student, *FAST, *options)
    assert err == ""
    assert code == 0
    config = AutoConfig.from_pretrained(student)
    assert config.gate == "scalar"
    assert config.gate_logit_normalizer == 8


def test_values_are_read_as_what_they_look_like():
    pairs = [
        "bf16=False",
        "a=true",
        "lr=1e-3",
        "n=2",
        "gate=none",
        "past=[cache, xl]",
        "heads=[[1, 2], []]",
        "bits=None",
        "size=1_000",
        "factor=nan",
        "more=-.5",
        "less=+2.",
    ]
    assert read_pairs(pairs) == {
        "bf16": False,
        "a": True,
        "lr": 1e-3,
        "n": 2,
        "gate": "none",
        "past": ["cache", "xl"],
        "heads": [[1, 2], []],
        "bits": None,
        "size": "1_000",  # no number, so that the option refuses it
        "factor": "nan",
        "more": -0.5,
        "less": 2.0,
    }


def test_goals_and_weights_are_numbers_in_any_form(tmp_path):
    assert read_goal("kl=1e-9") == 1e-9
    assert read_goal("kl=.5") == 0.5
    for wrong in ("kl=nan", "kl=inf", "kl=-1", "kl=", "0.5"):
        with pytest.raises(ValueError, match=f"goal must be kl=NUMBER .* got {wrong}"):
            read_goal(wrong)
    assert read_weights(["a.txt=1e-3", "b.txt=2."]) == (["a.txt", "b.txt"], [1e-3, 2.0])
    assert read_weights(["a=b.txt"]) == (["a=b.txt"], None)
    file = tmp_path / "run=3"  # a name
    file.write_text("words")
    assert read_weights([str(file)]) == ([str(file)], None)
    assert read_weights([f"{file}=2"]) == ([str(file)], [2.0])


@pytest.mark.usefixtures("without_pictures")
def test_an_output_is_replaced_only_when_asked(run, teacher, text, tmp_path):
    student = tmp_path / "student"
    command = ["convert", teacher, "--text", text, "--output", student, *FAST]
    assert run(*command)[0] == 0
    code, _, err = run(*command)
    assert code == 2
    assert "is not empty; --overwrite replaces it" in err
    assert run(*command, "--overwrite")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["generate", "no/such/model", "--prompt", "a"], "Error: "),
        (["info", "/no/such/folder"], "model must be a folder that exists"),
        (
            ["convert", "TEACHER", "--text", "TEXT", "--output", "OUT", "--to", "lstm"],
            "to must be one of attention,",
        ),
        (
            ["convert", "TEACHER", "--text", "TEXT", "--output", "OUT", "-o", "gate"],
            "option must look like name=value",
        ),
        (
            [
                "convert",
                "TEACHER",
                "--text",
                "TEXT",
                "--output",
                "OUT",
                "--to",
                "linear",
                "-o",
                "feature_map=x",
            ],
            "feature_map must be one",
        ),
        (
            ["convert", "TEACHER", "--text", "/no/such/file", "--output", "OUT"],
            "No such file or directory",
        ),
        (
            ["convert", "TEACHER", "--text", "TEACHER/config.json", "--output", "OUT"],
            "text must be a plain file",
        ),
        (
            ["convert", "TEACHER", "--text", "TEXT", "--text", "b=0.3", "--output", "OUT"],
            "all texts or none must have a",
        ),
        *(
            (
                ["convert", "TEACHER", "--text", f"TEXT={weight}", "--output", "OUT"],
                f"text.txt must be a number above 0, as in a.txt=0.7, got '{weight}'",
            )
            for weight in ("nan", "-1", "0", "inf", "x")
        ),
        (
            ["demo", "--output", "TEACHER"],
            "output must be a new folder or the result of an earlier run",
        ),
    ],
)
def test_errors_are_sentences(run, teacher, text, tmp_path, arguments, sentence):
    names = {"TEACHER": str(teacher), "TEXT": str(text), "OUT": str(tmp_path / "student")}
    for name, path in names.items():
        arguments = [argument.replace(name, path) for argument in arguments]
    code, _, err = run(*arguments)
    assert code == 2
    assert err.startswith("Error: ")
    assert sentence in " ".join(err.split())
    assert "Traceback" not in err
    assert not (tmp_path / "student").exists()


def test_the_demo_writes_what_it_shows_and_can_run_again(run, tmp_path, monkeypatch):
    short = Schedule(steps=2, learning_rate=1e-3, batch_size=2, length=64)
    settings = Settings(300, 32, 2, short, short, short)
    monkeypatch.setattr("hf_memory.cli.demo.run_demo", partial(run_demo, settings=settings))
    monkeypatch.setattr("hf_memory.demo.sections", lambda: sections()[:8])
    monkeypatch.setattr(
        "hf_memory.demo.evaluate",
        lambda x, *given, **how: evaluate(replace(x, max_tokens=2048), *given, **how),
    )
    output = tmp_path / "demo_output"
    for _ in range(2):
        code, out, err = run("demo", "--output", output)
        assert err == ""
        assert code == 0
    for name in ("teacher", "before training", "student"):
        assert re.search(rf"\n 2,048 +{name} ", out)
    assert str(output / "student") in out
    assert {"README.md", "conversion.png", "results.json", "tokenizer.json"} <= {
        path.name for path in (output / "student").iterdir()
    }
    made = pipeline("text-generation", model=str(output / "student"))(
        "The with statement", max_new_tokens=4
    )
    assert made[0]["generated_text"].startswith("The with statement")


def test_held_out_text_is_not_in_the_training_text():
    texts = sections()
    paragraphs = [paragraph for text in texts for paragraph in text.split("\n\n") if paragraph]
    assert len(paragraphs) == len(set(paragraphs))
    corpus = make_corpus(300, sections())
    assert 0.05 < len(corpus.held_out) / len(corpus.training) < 0.2
    assert corpus.tokenizer.decode(corpus.held_out).startswith(texts[5][:100])


def test_prose_is_unwrapped_and_code_is_not():
    prose = f"   {'word ' * 12}\n   {'more ' * 3}".rstrip()
    assert unwrap(prose) == f"   {'word ' * 12} {'more ' * 3}".rstrip()
    code = "for x in y:\n    print(x)"
    assert unwrap(code) == code


def test_the_teachers_optimizer_is_scheduled_as_one_also_after_a_reload():
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True))
    optimizer = MuonWithAdamW(model, lr=1e-2)
    model(torch.arange(16)[None], labels=torch.arange(16)[None]).loss.backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = [parameter.clone() for parameter in model.parameters()]
    optimizer.step()
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert len(optimizer.param_groups[0]["params"]) == 7  # the matrices of a layer
