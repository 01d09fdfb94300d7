"""A conversion from files to a folder in one call, as a program and as the command line make it."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from hf_memory.conversion import (
    Recipe,
    Request,
    Run,
    Schedule,
    choose,
    convert_and_save,
    dry_run,
    load_teacher,
    load_tokenizer,
    read_tokens,
    resolve,
    saving,
)
from hf_memory.evaluation import tasks
from hf_memory.files.text import hold_out
from teachers import FAST, make_teacher

pytestmark = pytest.mark.usefixtures("without_pictures")
NONE = Schedule(0, 1e-3)
SHORT = Schedule(2, 1e-3, batch_size=1, length=64)
GOAL = Recipe(goal=9.0, options={"sliding_window": 16}, transfer=NONE, distillation=SHORT)
FLAGS = [
    *("--transfer", "steps=0,learning_rate=1e-3,batch_size=8,length=256,warmup=0.05,repeats=0"),
    *("--distillation", "steps=2,learning_rate=1e-3,batch_size=1,length=64,warmup=0.05,repeats=0"),
    *("--distillation", "memory_factor=1"),
]
WEIGHTS = "model.safetensors"
FEW = "--max-tokens", 2600


def request(teacher, text, output, recipe=GOAL, **how):
    return Request(str(teacher), [str(text)], Path(output), recipe, **{"items": 0} | how)


def test_a_program_makes_the_student_of_the_command_line(run, teacher, text, tmp_path):
    recipe = Recipe("deltanet", "auto:1/2", transfer=NONE, distillation=SHORT)
    saved = convert_and_save(request(teacher, text, tmp_path / "program", recipe))
    flags = "--to", "deltanet", "--keep", "auto:1/2", *FLAGS
    command = "convert", teacher, "--text", text, "--output", tmp_path / "command", *flags
    assert run(*command)[0] == 0
    programs = (tmp_path / "program" / WEIGHTS).read_bytes()
    assert programs == (tmp_path / "command" / WEIGHTS).read_bytes()
    assert list(saved.results.rows) == ["teacher", "before training", "student"]
    assert saved.plan.is_final
    assert (tmp_path / "program" / "README.md").exists()
    assert not (tmp_path / "program" / "evaluation.json").exists()
    with pytest.raises(ValueError, match="output must be a new folder"):
        convert_and_save(request(teacher, text, tmp_path / "program", recipe))


def test_a_recipe_without_a_student_fine_tunes(teacher, text, tmp_path):
    recipe = Recipe(None, transfer=NONE, distillation=NONE, fine_tuning=SHORT, lora_rank=2)
    saved = convert_and_save(request(teacher, text, tmp_path / "tuned", recipe))
    assert list(saved.results.rows) == ["before", "after"]
    assert (tmp_path / "tuned" / "adapter" / "adapter_model.safetensors").exists()


def test_a_goal_is_met_by_what_is_chosen(teacher, text, tmp_path):
    of_files = request(teacher, text, tmp_path / "student")
    planned = dry_run(of_files)
    assert list(tmp_path.iterdir()) == []
    model = load_teacher(str(teacher))
    tokens, _ = hold_out(read_tokens([text], load_tokenizer(str(teacher))))
    draft = resolve(GOAL, model.config, tokens)
    assert not draft.is_final
    choice = choose(model, tokens, draft)
    assert choice == planned.choice
    assert choice.tried[-1].kl <= GOAL.goal
    final = draft.with_choice(choice)
    assert final.is_final
    assert final.recipe.goal is None
    assert final.keep == choice.keep
    assert final.student.to_dict() == planned.student.to_dict()


def test_a_goal_must_not_be_given_with_what_is_kept(teacher):
    for other in ({"keep": "heads:1/4"}, {"servable": True}, {"size": "small"}):
        with pytest.raises(ValueError, match="goal must be given without keep, servable and size"):
            Recipe(**other, goal=1.0).check()


@pytest.mark.parametrize("checkpoints", [True, False])
def test_a_conversion_with_a_goal_goes_on_where_it_was_stopped(
    checkpoints, teacher, text, tmp_path, monkeypatch
):
    """It chooses and trains nothing again once the model is saved, and measures no model twice for the card."""

    def no_time(*args, **kwargs):
        raise OSError("no time")

    told = []
    run = Run(tmp_path / "checkpoints" if checkpoints else None, report=told.append)
    asked = request(teacher, text, tmp_path / "student", run=run)
    with monkeypatch.context() as patch:
        patch.setattr(tasks, "cost", no_time)
        with pytest.raises(OSError, match="no time"):
            convert_and_save(asked)
    weights = (tmp_path / "student" / WEIGHTS).read_bytes()
    assert "measuring untrained students" in {now.task for now in told}
    told.clear()
    other = request(teacher, text, tmp_path / "student", run=run, measure_tokens=2048)
    with pytest.raises(ValueError, match="output must be a new folder"):
        convert_and_save(other)
    saved = convert_and_save(asked)
    again = {now.task for now in told}
    assert not again & {"measuring untrained students", "ranking heads", "distillation"}
    assert saved.plan.choice.tried[-1].kl <= GOAL.goal
    assert (tmp_path / "student" / WEIGHTS).read_bytes() == weights
    assert list(saved.results.rows) == ["teacher", "before training", "student"]


def test_the_run_file_of_a_goal_has_what_the_goal_decided(run, teacher, text, tmp_path):
    first = tmp_path / "first"
    command = "convert", teacher, "--text", text, "--output", first, "-o", "sliding_window=16"
    assert run(*command, *FLAGS, "--goal", "kl=9")[0] == 0
    described = yaml.safe_load((first / "run.yaml").read_text())
    assert described["keep"] == "heads:1/25"
    assert "goal" not in described


def stop(*args, **kwargs):
    raise KeyboardInterrupt


COMMANDS = {
    "convert": ["--keep", "heads:1/2", "-o", "sliding_window=16", *FLAGS],
    "fine-tune": ["--steps", 3, "--length", 16, "--batch-size", 1],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_is_stopped_after_its_model_was_saved_goes_on_measuring(
    command, run, teacher, text, tmp_path, monkeypatch
):
    made = tmp_path / "made"
    file = tmp_path / "few.yaml"
    file.write_text("items: 0\nmax-tokens: 2600")
    words = command, teacher, "--text", text, "--output", made, *COMMANDS[command], "--config", file
    with monkeypatch.context() as patch:
        cost = tasks.cost

        def stops_later(*args, **kwargs):
            return cost(*args, **kwargs) if not (made / "config.json").exists() else stop()

        patch.setattr(tasks, "cost", stops_later)
        code, out, err = run(*words)
    assert code != 0
    said = " ".join(err.split())
    assert f"Stopped: The model is saved in {made}. The same command goes on with measuring" in said
    assert f"hf-memory evaluate {made} --held-out" in said
    card = (made / "README.md").read_text()
    assert f"Made of `{teacher}`." in card
    weights = (made / WEIGHTS).read_bytes()
    code, out, err = run(*words)
    assert err == ""
    assert code == 0
    assert f"{made} has the model of the same run, which was stopped" in out
    assert not [x for x in ("ranking heads", "distillation:", "fine-tuning:") if x in out]
    assert (made / WEIGHTS).read_bytes() == weights
    losses = json.loads((made / "results.json").read_text())["losses"]
    assert all(losses.values())
    assert not (made / "evaluation.json").exists()


@pytest.mark.parametrize("changed", ["model", "text"])
@pytest.mark.parametrize("command", ["convert", "fine-tune"])
def test_a_stopped_command_does_not_go_on_with_the_model_of_another_teacher_or_text(
    command, changed, run, teacher, text, tmp_path, monkeypatch
):
    shutil.copytree(teacher, tmp_path / "teacher")
    shutil.copy(text, tmp_path / "text.txt")
    student = tmp_path / "student"
    flags = FAST if command == "convert" else COMMANDS[command]
    given = tmp_path / "teacher", "--text", tmp_path / "text.txt", "--output", student
    asked = command, *given, *flags
    with monkeypatch.context() as patch:
        patch.setattr(saving, "results_of", stop)
        assert run(*asked)[0] == 130
    weights = (student / WEIGHTS).read_bytes()
    if changed == "text":
        words = text.read_text().split()
        (tmp_path / "text.txt").write_text(" ".join(reversed(words)))
    else:
        model = load_teacher(str(teacher))
        model.model.norm.weight.data.mul_(1.5)
        model.save_pretrained(tmp_path / "teacher")
    code, _, err = run(*asked)
    assert code == 2
    assert f"got {student} of a run that was stopped, with another {changed};" in err
    assert (student / WEIGHTS).read_bytes() == weights
    code, out, err = run(*asked, "--overwrite")
    assert err == ""
    assert code == 0
    assert "nothing is trained" not in out
    assert (student / WEIGHTS).read_bytes() != weights
    found = json.loads((student / "results.json").read_text())["rows"]
    shutil.rmtree(student)
    assert run(*asked)[0] == 0
    anew = json.loads((student / "results.json").read_text())["rows"]
    assert all(found[name]["perplexity"] == row["perplexity"] for name, row in anew.items())


def test_a_goal_that_no_student_reaches_says_what_was_measured(run, teacher, text, tmp_path):
    command = "convert", teacher, "--text", text, "--output", tmp_path / "student", *FLAGS, *FEW
    window = "-o", "sliding_window=16", "-o", "num_kept_tokens=0"
    for flags in ([], ["--dry-run"]):
        code, out, err = run(*command, *window, "--goal", "kl=0.0000001", *flags)
        assert code == 2
        assert "students that were measured for the goal" in out
        assert out.count("heads:") >= 2
        said = " ".join(err.split())
        assert "goal must be a KL that a student reaches before training, got 1e-07: the" in said
        assert "with a window of 16 and 0 kept tokens, has" in said
    assert list(tmp_path.iterdir()) == []


def test_a_goal_is_said_before_the_training_and_in_the_card(run, teacher, text, tmp_path):
    student = tmp_path / "student"
    command = "convert", teacher, "--text", text, "--output", student, *FLAGS, *FEW
    window = "-o", "sliding_window=16", "-o", "num_kept_tokens=0"
    code, out, err = run(*command, *window, "--goal", "kl=9")
    assert err == ""
    assert code == 0
    chosen = "For a KL of at most 9 before training, 1 untrained student with more"
    assert 0 < out.index("students that were measured") < out.index(chosen)
    assert out.index(chosen) < out.index("distillation: 2/2")
    card = (student / "README.md").read_text()
    assert chosen in card
    assert "| goal | 9.0 |" in card


def test_a_run_file_repeats_its_run_from_another_folder(run, teacher, text, tmp_path, monkeypatch):
    here = tmp_path / "here"
    there = tmp_path / "there"
    here.mkdir()
    there.mkdir()
    (here / "teacher").symlink_to(teacher)
    (here / "text.txt").write_text(Path(text).read_text())
    monkeypatch.chdir(here)
    command = "convert", "teacher", "--text", "text.txt=0.5", "--output", "first", *FLAGS, *FEW
    assert run(*command, "--checkpoints", "steps", "-o", "sliding_window=16")[0] == 0
    described = yaml.safe_load((here / "first" / "run.yaml").read_text())
    assert described["teacher"] == str(here / "teacher")
    assert described["text"] == [f"{here / 'text.txt'}=0.5"]
    assert described["checkpoints"] == str(here / "steps")
    assert described["output"] == str(here / "first")
    monkeypatch.chdir(there)
    again = "convert", "--config", here / "first" / "run.yaml", "--output", "second"
    code, _, err = run(*again)
    assert err == ""
    assert code == 0
    weights = (there / "second" / WEIGHTS).read_bytes()
    assert weights == (here / "first" / WEIGHTS).read_bytes()


def test_a_run_file_repeats_its_run_under_other_defaults(run, teacher, text, tmp_path, monkeypatch):
    command = "convert", teacher, "--text", text, "--distillation", "steps=2,length=64", *FEW
    assert run(*command, "--output", tmp_path / "first")[0] == 0
    described = json.loads((tmp_path / "first" / "results.json").read_text())["recipe"]
    used = {"num_kept_tokens": 371, "sliding_window": 64, "cache_bits": 8, "train": "attention"}
    assert used.items() <= described.items()
    other = Schedule(1, 1.0, batch_size=3, length=77)
    changed = {
        "NEAR_SCHEDULE": other,
        "DISTILLATION_SCHEDULE": other,
        "WINDOW": 99,
        "SHARE": "none",
        "BLOCK": 32,
    }
    for name, value in changed.items():
        monkeypatch.setattr(f"hf_memory.conversion.defaults.{name}", value)
    again = "convert", "--config", tmp_path / "first" / "run.yaml", "--output", tmp_path / "second"
    assert run(*again)[0] == 0
    for name in (WEIGHTS, "config.json"):
        assert (tmp_path / "second" / name).read_bytes() == (tmp_path / "first" / name).read_bytes()
    plan = dry_run(request(teacher, text, tmp_path / "third", Recipe()), uses_weights=False)
    assert plan.student.num_kept_tokens != 371


@pytest.mark.parametrize("to", ["linear", "attention"])
def test_a_student_that_keeps_all_layers_is_converted_and_reported(to, teacher, text, tmp_path):
    recipe = Recipe(to, "1/1", transfer=NONE, distillation=SHORT)
    saved = convert_and_save(request(teacher, text, tmp_path / "student", recipe))
    assert set(saved.model.config.layer_types) == {"full_attention"}
    assert saved.plan.is_exact
    assert "equalled its teacher" in (tmp_path / "student" / "README.md").read_text()


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_a_teacher_that_engines_cannot_have_is_told_what_to_do(name, text, tmp_path):
    make_teacher(name).save_pretrained(tmp_path / "teacher")
    recipe = Recipe(servable=True, distillation=SHORT)
    with pytest.raises(ValueError, match="no target represents the model exactly") as refused:
        convert_and_save(request(tmp_path / "teacher", text, tmp_path / "student", recipe))
    assert "Leave out --servable" in str(refused.value)
    assert "again with --servable" not in str(refused.value)
    field = {"qwen3": "use_qk_norm=False", "gemma3": "norm_placement='pre'"}[name]
    assert field in str(refused.value)
