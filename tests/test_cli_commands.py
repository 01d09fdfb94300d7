"""What all commands have in common: few flags in groups, settings in files, and where results go."""

import re
import shlex
import warnings
from pathlib import Path

import pytest
import yaml

from hf_memory.cli import load, terminal
from hf_memory.cli.command import GROUPS
from hf_memory.cli.progress import WHY, explained
from hf_memory.progress import Progress
from hf_memory_cli import COMMANDS
from teachers import FAST

pytestmark = pytest.mark.usefixtures("without_pictures")
SHORT = "steps=1,batch_size=1,length=16"
SETTINGS = {
    "convert": {"cross-entropy": 0.5, "temperature": 2.0, "measure-tokens": 2048},
    "fine-tune": {"seed": 7, "items": 0, "max-tokens": 3000, "measure-tokens": 2048},
}


def in_words(text):
    return " ".join(re.sub(r"[^\x20-\x7e]", " ", text).split())


@pytest.mark.parametrize(
    ("command", "most"), [("convert", 22), ("evaluate", 14), ("fine-tune", 14)]
)
def test_a_command_has_few_arguments(command, most):
    assert len(load(command).params) <= most


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_groups_and_an_example_that_parses(command, run, monkeypatch):
    code, out, err = run(command, "--help")
    assert err == ""
    assert code == 0
    (example,) = re.findall(rf"Example: hf-memory {command} ([^\u2500-\u257f]*?) *\n *\n", out)
    assert load(command).make_context(command, shlex.split(example))
    titles = re.findall("\u256d\u2500 ([A-Z][^\u2500]*) \u2500", out)
    places = [GROUPS.index(x) for x in titles if x in GROUPS]
    assert places == sorted(places)
    assert set(titles) <= {*GROUPS, "Arguments", "Options"}


def test_a_flag_has_the_same_meaning_in_all_commands():
    parameters = [x for command in COMMANDS for x in load(command).params]
    for name in ("device", "dtype", "gpu", "checkpoints", "config", "overwrite", "cache_bits"):
        assert len({x.help for x in parameters if x.name == name}) == 1
    assert all(len([name for name in x.opts if name.startswith("--")]) < 2 for x in parameters)


@pytest.mark.parametrize(
    ("command", "setting"),
    [("convert", "temperature"), ("evaluate", "prompts"), ("fine-tune", "max-tokens")],
)
def test_a_setting_that_is_typed_is_said_to_belong_into_a_file(command, setting, run, tmp_path):
    code, _, err = run(command, tmp_path, f"--{setting}", 1)
    wanted = f'--{setting} must be given in a file: --config FILE, with the line "{setting}: VALUE"'
    assert wanted in in_words(err)
    assert code == 2


@pytest.mark.parametrize("command", SETTINGS)
def test_settings_of_a_file_are_in_the_run_file_which_repeats_the_run(
    command, run, teacher, text, tmp_path
):
    first = tmp_path / "first"
    flags = {
        "convert": [*FAST, "--distillation", SHORT],
        "fine-tune": ["--steps", 1, "--length", 16, "--batch-size", 1],
    }
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(SETTINGS[command]))
    given = "--config", tmp_path / "settings.yaml"
    code, _, err = run(command, teacher, "--text", text, "--output", first, *flags[command], *given)
    assert err == ""
    assert code == 0
    described = yaml.safe_load((first / "run.yaml").read_text())
    assert SETTINGS[command].items() <= described.items()
    second = tmp_path / "second"
    assert run(command, "--config", first / "run.yaml", "--output", second)[0] == 0
    again = yaml.safe_load((second / "run.yaml").read_text())
    assert again == described | {"output": str(second)}
    names = "model.safetensors", "config.json"
    assert all((first / x).read_bytes() == (second / x).read_bytes() for x in names)


def test_a_run_file_of_an_earlier_version_is_read_unless_it_asks_for_what_is_gone(
    run, teacher, text, tmp_path
):
    file = tmp_path / "run.yaml"
    described = {"teacher": str(teacher), "text": str(text), "spread-kept": False}
    file.write_text(yaml.safe_dump(described))
    code, _, err = run("convert", "--config", file, "--dry-run")
    assert err == ""
    assert code == 0
    for name in ("spread-kept", "scored-by"):
        file.write_text(yaml.safe_dump(described | {name: "larger"}))
        code, _, err = run("convert", "--config", file, "--dry-run")
        assert f"config must not have {name} since 0.2.0: " in in_words(err)
        assert code == 2


@pytest.mark.parametrize(
    ("command", "flags", "made"),
    [
        ("convert", ["--dry-run"], "teacher-attention"),
        ("convert", ["--to", "gated", "--keep", "none", "--dry-run"], "teacher-gated"),
        ("fine-tune", ["--length", 64, "--dry-run"], "teacher-fine-tuned"),
    ],
)
def test_a_result_is_named_after_its_model_and_never_written_over_another(
    command, flags, made, run, teacher, text, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("teacher").symlink_to(teacher)
    code, out, err = run(command, "teacher", "--text", text, *flags)
    assert err == ""
    assert code == 0
    assert f"The result will be in {made}" in in_words(out)
    assert not Path(made).exists()
    Path(made).mkdir()
    (Path(made) / "notes.txt").write_text("mine")
    code, _, err = run(command, "teacher", "--text", text, *flags)
    assert "output must be a new folder" in in_words(err)
    assert code == 2
    assert (Path(made) / "notes.txt").read_text() == "mine"


def test_the_run_file_says_of_all_stages_whether_they_ran(run, teacher, text, tmp_path):
    output = tmp_path / "student"
    stages = "--transfer", "steps=0", "--distillation", SHORT
    command = "convert", teacher, "--text", text, "--output", output, "--to", "linear"
    assert run(*command, "--keep", "none", *stages)[0] == 0
    described = yaml.safe_load((output / "run.yaml").read_text())
    stages = ("transfer", "distillation", "fine-tuning")
    assert [described[name]["steps"] for name in stages] == [0, 1, 0]


def test_each_kind_of_long_task_is_explained_once(capsys):
    reported = []
    report = explained(reported.append)
    for task in (
        "ranking heads",
        "measuring a",
        "measuring a",
        "measuring b",
        "measuring untrained students",
    ):
        report(Progress(task, 0, 2))
    lines = capsys.readouterr().out.splitlines()
    begun = ["ranking heads", "measuring a", "measuring untrained students"]
    assert [line.partition(":")[0] for line in lines] == begun
    assert len(reported) == 5


def test_all_tasks_that_are_reported_are_explained():
    source = Path(terminal.__file__).parents[1]
    files = [x.read_text(encoding="utf-8") for x in source.rglob("*.py")]
    tasks = [x for file in files for x in re.findall(r'Progress\(f?"([^"{]+)', file)]
    stages = ["attention transfer", "distillation", "fine-tuning"]
    assert len(tasks) > 5
    assert [x for x in [*tasks, *stages] if not any(x.strip().startswith(y) for y in WHY)] == []


def test_commands_say_what_was_made_and_what_to_try_next(run, teacher, text, tmp_path):
    student = tmp_path / "a student"
    command = "convert", teacher, "--text", text, "--output", student, *FAST
    code, out, err = run(*command, "--distillation", SHORT)
    assert err == ""
    assert code == 0
    assert out.endswith(f"\nNext: hf-memory chat '{student}'\n")
    assert f"Wrote {student}: the model, README.md" in out
    assert "ranking" not in out
    store = tmp_path / "store"
    made = run("datastore", student, "--text", text, "--max-tokens", 300, "--output", store)[1]
    assert f"Next: hf-memory generate '{student}' --datastore {store} --prompt The\n" in made
    found = tmp_path / "found"
    measured = "--tasks", "speed", "--lengths", 256, "--text", text, "--output", found
    assert f"Wrote {found}: evaluation.json" in run("evaluate", student, *measured)[1]


def test_warnings_for_developers_of_libraries_are_not_shown(recwarn):
    load("info")
    warnings.warn("an argument will be renamed", FutureWarning, stacklevel=1)
    warnings.warn("a file is damaged", stacklevel=1)
    assert [str(x.message) for x in recwarn] == ["a file is damaged"]
