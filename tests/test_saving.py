"""A conversion from files to a folder in one call, as a program and as the command line make it."""

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
)
from hf_memory.evaluation import tasks
from hf_memory.files.text import hold_out

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
