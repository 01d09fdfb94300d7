"""What students learn after distillation, and distillation from a teacher that is not there whole."""

import os
import resource
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, TrainerCallback

from hf_memory import conversion
from hf_memory.cli.run_file import read_schedule
from hf_memory.conversion import (
    Recipe,
    Run,
    Schedule,
    attention_transfer,
    check_space,
    defaults,
    distill,
    fine_tune,
    make_student,
    resolve,
    train,
)
from hf_memory.conversion.students.starts import start_near
from hf_memory.conversion.teachers import loading as of_few_bits
from hf_memory.evaluation import agreement
from teachers import FAST, SCHEDULE, convert, make_teacher, same
from teachers import text as tokens

pytestmark = pytest.mark.usefixtures("without_pictures")

NONE = SCHEDULE._replace(steps=0)
FEW = SCHEDULE._replace(steps=3)


def student_of(teacher):
    student = make_student(teacher, "gated")
    start_near(student, teacher, tokens(), 16)
    return student


def test_fine_tuning_reaches_further_than_the_teacher():
    teacher = make_teacher()
    teacher.config.max_position_embeddings = 16
    schedule = Schedule(steps=20, learning_rate=1e-2, batch_size=4, length=48)
    made = convert(
        teacher,
        tokens(),
        to="gated",
        keep=(1,),
        transfer=FEW,
        distillation=FEW,
        fine_tuning=schedule,
    )
    losses = [x["loss"] for x in made.losses["fine-tuning"]]
    assert losses[-1] < losses[0] - 1
    assert made.student.config.max_position_embeddings == 48
    assert made.student.config.use_cache


def test_fine_tuning_of_a_conversion_is_that_of_its_student():
    run = {"to": "gated", "transfer": FEW, "distillation": FEW, "seed": 3}
    made = convert(make_teacher(), tokens(), fine_tuning=FEW, lora_rank=2, **run)
    student = convert(make_teacher(), tokens(), **run).student
    fine_tune(student, tokens(), FEW, lora_rank=2, seed=5)
    assert same(made.student, student)


def test_lora_learns_updates_that_become_the_weights(tmp_path):
    teacher = make_teacher()
    before = student_of(teacher)
    student = student_of(teacher)
    fine_tune(student, tokens(), FEW, lora_rank=2, adapter=tmp_path)
    linear = {
        f"{name}.weight" for name, x in before.named_modules() if isinstance(x, nn.Linear)
    } - {"lm_head.weight"}
    weights = before.state_dict()
    assert {
        name for name, x in student.state_dict().items() if not torch.equal(x, weights[name])
    } == linear
    update = student.model.layers[0].mlp.up_proj.weight - before.model.layers[0].mlp.up_proj.weight
    assert torch.linalg.matrix_rank(update, rtol=1e-3) == 2
    assert all(x.requires_grad for x in student.parameters())
    assert same(PeftModel.from_pretrained(before, tmp_path).merge_and_unload(), student)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora_rank": 0}, "lora_rank must be at least 1, got 0"),
        ({"adapter": Path("a")}, "adapter must not be given without lora_rank, got a"),
        (
            {"schedule": FEW._replace(length=999)},
            "tokens must be at least one window of 999 tokens, got 200",
        ),
        (
            {"schedule": FEW._replace(batch_size=0)},
            "batch_size of fine-tuning must be at least 1, got 0",
        ),
        ({"schedule": FEW._replace(steps=-1)}, "steps of fine-tuning must be at least 0, got -1"),
    ],
)
def test_what_cannot_be_fine_tuned_is_explained(change, message):
    with pytest.raises(ValueError, match=message):
        fine_tune(student_of(make_teacher()), tokens(), **{"schedule": FEW, **change})


def test_a_rope_that_is_made_for_its_positions_stays_within_them():
    student = student_of(make_teacher())
    student.config.max_position_embeddings = 16
    student.config.rope_parameters = {"rope_type": "yarn", "factor": 2.0}
    with pytest.raises(
        ValueError,
        match="at most the model's 16 positions, which its RoPE of type yarn is made for",
    ):
        fine_tune(student, tokens(), FEW._replace(length=17))


class Fail(TrainerCallback):
    """Stops the run as an error would, after some steps."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        """After the checkpoint."""
        if state.global_step == self.step:
            raise RuntimeError


def test_lora_that_fails_leaves_the_student_and_goes_on(tmp_path):
    teacher = make_teacher()
    student = student_of(teacher)
    whole = student_of(teacher)
    with pytest.raises(RuntimeError):
        fine_tune(student, tokens(), FEW, lora_rank=2, run=Run(tmp_path, callbacks=(Fail(2),)))
    assert same(student, whole)
    fine_tune(student, tokens(), FEW, lora_rank=2, run=Run(tmp_path))
    fine_tune(whole, tokens(), FEW, lora_rank=2)
    assert same(student, whole)


def test_training_attention_leaves_embeddings_and_feed_forward_layers_as_they_are():
    run = {"to": "gated", "keep": (1,), "transfer": NONE}
    start = convert(make_teacher(), tokens(), **run, distillation=NONE).student.state_dict()
    made = convert(make_teacher(), tokens(), **run, distillation=FEW, train="attention")
    stayed = {name for name, x in made.student.state_dict().items() if torch.equal(x, start[name])}
    assert stayed == {
        name for name in start if ".mlp." in name or "embed" in name or "lm_head" in name
    }
    assert made.plan.stages[0].learned == sum(
        x.numel() for name, x in start.items() if name not in stayed
    )


@pytest.mark.parametrize("train", ["new", "lora:2"])
def test_what_the_teacher_has_stays_or_changes_by_updates_of_low_rank(tmp_path, train):
    run = {"to": "gated", "keep": (1,), "transfer": NONE}
    start = convert(make_teacher(), tokens(), **run, distillation=NONE).student
    run |= {"distillation": FEW, "train": train}
    whole = convert(make_teacher(), tokens(), **run).student
    with pytest.raises(RuntimeError):
        convert(make_teacher(), tokens(), run=Run(tmp_path, callbacks=(Fail(2),)), **run)
    student = convert(make_teacher(), tokens(), run=Run(tmp_path), **run).student
    assert same(student, whole)
    assert all(x.requires_grad for x in student.parameters())

    new = "model.layers.0.mixer."
    changed = {
        name
        for name, x in start.state_dict().items()
        if not torch.equal(x, whole.state_dict()[name])
    }
    assert changed >= {name for name in whole.state_dict() if name.startswith(new)}
    linear = {f"{name}.weight" for name, x in whole.named_modules() if isinstance(x, nn.Linear)} - {
        "lm_head.weight"
    }
    assert {x for x in changed if not x.startswith(new)} == {
        x for x in linear if train != "new" and not x.startswith(new)
    }
    for name in linear & changed:
        update = whole.get_parameter(name) - start.get_parameter(name)
        assert torch.linalg.matrix_rank(update, rtol=1e-3) == 2 or name.startswith(new)


def test_a_student_of_a_quantised_teacher_has_the_weights_of_the_whole_one():
    whole = make_teacher()
    rounded = make_teacher()
    with torch.no_grad():
        for weight in rounded.parameters():
            weight.copy_((weight * 8).round() / 8)
    made = convert(
        whole,
        tokens(),
        to="gated",
        keep="auto:1/2",
        transfer=NONE,
        distillation=NONE,
        quantized=rounded,
    )
    kinds = enumerate(made.student.config.layer_types)
    fitted = {f"model.layers.{i}.mixer.o_proj.weight" for i, kind in kinds if kind == "memory"}
    for name, names in made.weights.used.items():
        assert (
            torch.equal(whole.state_dict()[name], made.student.state_dict()[names[0]])
            or names[0] in fitted
        )
    learned = convert(
        whole, tokens(), to="gated", transfer=FEW, distillation=FEW, quantized=rounded
    ).student
    student = make_student(whole, "gated")
    start_near(student, whole, tokens(), 16, observed=rounded)
    attention_transfer(student, rounded, tokens(), FEW)
    distill(student, rounded, tokens(), FEW, seed=1)
    assert same(learned, student)


def test_a_student_can_learn_from_another_model_of_the_same_vocabulary():
    larger = make_teacher("qwen3")
    student = convert(make_teacher(), tokens(), to="gated", transfer=FEW, distillation=NONE).student
    before = agreement(student, larger, tokens(), length=16).kl
    distill(student, larger, tokens(), SCHEDULE)
    assert agreement(student, larger, tokens(), length=16).kl < before


def test_bits_that_cannot_be_had_are_explained(monkeypatch):
    with pytest.raises(ValueError, match="teacher_bits must be 8 or 4, got 3"):
        conversion.load_quantized("teacher", 3, "cpu")
    monkeypatch.setattr(of_few_bits, "is_bitsandbytes_available", lambda: False)
    with pytest.raises(
        ValueError, match="a teacher in 4 bits needs bitsandbytes: pip install bitsandbytes"
    ):
        conversion.load_quantized("teacher", 4, "cpu")


@pytest.mark.parametrize(
    ("stage", "change"),
    [
        (lambda teacher, **run: attention_transfer(student_of(teacher), teacher, **run), "seed"),
        (lambda teacher, **run: distill(student_of(teacher), teacher, **run), "schedule"),
        (lambda teacher, **run: train(student_of(teacher), **run), "tokens"),
        (lambda teacher, **run: fine_tune(student_of(teacher), **run), "student"),
    ],
    ids=["attention transfer", "distillation", "training", "fine-tuning"],
)
def test_checkpoints_of_a_stage_are_its_own(tmp_path, stage, change):
    run = {"tokens": tokens(), "schedule": FEW, "seed": 0, "run": Run(tmp_path)}
    first = stage(make_teacher(), **run)
    assert stage(make_teacher(), **run) == first
    teacher = make_teacher()
    others = {"tokens": tokens().flip(0), "schedule": SCHEDULE, "seed": 1}
    teacher.model.norm.weight.data[3] += float(change == "student")
    with pytest.raises(ValueError, match=f"must be of the same run, got .* with another {change}"):
        stage(teacher, **run | {change: others[change]} if change in others else run)


@contextmanager
def room_for(size):
    """As if the disk were full: no file of this process can have more bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class FillDisk(TrainerCallback):
    """Leaves room for files of some size from the third step on."""

    def __init__(self, size):
        self.size = size

    def on_step_begin(self, args, state, control, **kwargs):
        """After the second checkpoint."""
        if state.global_step == 2:
            resource.setrlimit(
                resource.RLIMIT_FSIZE, (self.size, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
            )


@pytest.mark.parametrize("part", [0.5, 1.5], ids=["weights", "moments"])
def test_a_full_disk_costs_no_more_than_one_checkpoint(tmp_path, part):
    student = student_of(make_teacher())
    whole = student_of(make_teacher())
    size = int(part * 4 * student.num_parameters())
    full = r"checkpoint-3 of fine-tuning could not be written to .*, with [\d,.]+ MB free: .*; the checkpoint before it"
    with room_for(resource.RLIM_INFINITY), pytest.raises(OSError, match=full):
        fine_tune(student, tokens(), FEW, run=Run(tmp_path, callbacks=(FillDisk(size),)))
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["checkpoint-2"]
    student = student_of(make_teacher())
    fine_tune(student, tokens(), FEW, run=Run(tmp_path))
    fine_tune(whole, tokens(), FEW)
    assert same(student, whole)


def test_a_full_disk_leaves_the_result_that_was_there(run, teacher, text, tmp_path):
    student = tmp_path / "student"
    command = ["convert", teacher, "--text", text, "--output", student, *FAST]
    assert run(*command)[0] == 0
    before = {path: path.read_bytes() for path in student.iterdir()}
    with room_for(2000):
        code, _, err = run(*command, "--overwrite", "--seed", 5)
    assert code == 2
    assert err.startswith("Error: result could not be written to")
    assert err.count("\n") == 1
    assert {path: path.read_bytes() for path in student.iterdir()} == before
    assert os.listdir(tmp_path) == ["student"]


def test_a_room_that_is_too_small_is_known_before(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    plan = resolve(
        Recipe(keep="none", transfer=FEW, distillation=FEW), make_teacher().config, tokens()
    )
    with pytest.raises(OSError, match=r"must have 0.1 MB free for student, got 0.0 MB"):
        check_space(plan, Run(), output=tmp_path / "no" / "student")
    with pytest.raises(OSError, match=r"must have \d.\d MB free for student and work, got 0.0 MB"):
        check_space(plan, Run(tmp_path / "work"), output=tmp_path / "student")


def test_fine_tune_goes_on_from_a_student(run, teacher, text, tmp_path):
    student, first, second = (tmp_path / name for name in ("student", "first", "second"))
    assert run("convert", teacher, "--text", text, "--output", student, *FAST)[0] == 0
    flags = ["--steps", 3, "--batch-size", 2, "--length", 64, "--lora-rank", 2]
    command = [
        "fine-tune",
        student,
        "--text",
        text,
        "--output",
        first,
        "--checkpoints",
        tmp_path / "run",
        *flags,
    ]
    code, out, err = run(*command, "--dry-run")
    assert err == ""
    assert code == 0
    assert (
        "3 steps of 2 windows of 64 tokens, learning rate 0.0001 falling as a cosine, LoRA of rank 2"
        in out
    )
    assert not first.exists()
    code, out, err = run(*command)
    assert err == ""
    assert code == 0
    assert " before " in out
    assert " after " in out
    merged = AutoModelForCausalLM.from_pretrained(first)
    base = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(student), first / "adapter"
    )
    assert same(base.merge_and_unload(), merged)
    assert f"fine-tuned from {student}" in (first / "README.md").read_text()
    assert run("generate", first, "--prompt", "the snake", "--max-new-tokens", 2)[0] == 0
    assert run("fine-tune", "--config", first / "run.yaml", "--output", second)[0] == 0
    assert (second / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()
    settings = yaml.safe_load((first / "run.yaml").read_text())
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(settings | {"seed": 1}))
    code, _, err = run(
        "fine-tune", "--config", tmp_path / "other.yaml", "--output", tmp_path / "third"
    )
    assert code == 2
    assert "with another seed" in err


def test_each_stage_has_a_block_and_the_command_line_wins(run, teacher, text, tmp_path):
    file = tmp_path / "my.yaml"
    output = tmp_path / "student"
    blocks = {
        "transfer": {"steps": 1, "learning_rate": "1e-4", "batch_size": 2, "length": 32},
        "distillation": {"steps": 2, "batch_size": 1, "length": 16},
        "fine_tuning": {"steps": 2, "length": 128, "batch_size": 1},
    }
    given = {"teacher": str(teacher), "text": str(text), "lora-rank": 2}
    given |= {"to": "linear", "keep": "none"}
    file.write_text(yaml.safe_dump({**given, **blocks}))
    typed = ["--distillation", "learning_rate=1e-5,steps=3"]
    code, out, err = run("convert", "--config", file, "--output", output, *typed)
    assert err == ""
    assert code == 0
    assert "fine-tuning" in (output / "README.md").read_text()
    described = yaml.safe_load((output / "run.yaml").read_text())
    schedules = [
        Schedule(**described[name]) for name in ("transfer", "distillation", "fine-tuning")
    ]
    transfer = defaults.TRANSFER_SCHEDULE._replace(
        steps=1, learning_rate=1e-4, batch_size=2, length=32
    )
    distillation = defaults.DISTILLATION_SCHEDULE._replace(
        steps=3, learning_rate=1e-5, batch_size=1, length=16
    )
    assert schedules == [transfer, distillation, Schedule(2, 1e-4, 1, 128)]
    code, out, _ = run(
        "convert",
        "--config",
        output / "run.yaml",
        "--output",
        tmp_path / "b",
        "--dry-run",
    )
    assert code == 0
    assert (
        "2 steps of 1 window of 128 tokens, learning rate 0.0001 falling as a cosine, LoRA of rank 2"
        in out
    )


def test_a_plan_has_all_that_a_conversion_would_hold(run, teacher, text, tmp_path, monkeypatch):
    monkeypatch.setattr(of_few_bits, "is_bitsandbytes_available", lambda: True)
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
    code, out, _ = run(*command, "--teacher-bits", 8)
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert any(line.startswith("teacher in 8 bits 0.01 MB, beside 0.02 MB") for line in lines)
    assert not any(line.startswith("fine-tuning") for line in lines)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (
            "steps",
            "transfer must have name=value with names from steps, .*, repeats, .*got 'steps'",
        ),
        ("lr=1", "with names from steps, .*, repeats, .*got 'lr=1'"),
        ("steps=many", "steps of transfer must be a number, got 'many'"),
        ("steps=1e999", "steps of transfer must be a number, got '1e999'"),
        ("steps=1.5", "steps of transfer must be a whole number, got '1.5'"),
    ],
)
def test_a_wrong_block_is_explained(pair, message):
    with pytest.raises(ValueError, match=message):
        read_schedule("transfer", ["steps=1", pair])
