"""A conversion that is killed, goes on elsewhere than it began, or stops being finite."""

import gc
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import TrainerCallback

from cases import random_tokens
from hf_memory.conversion import Run, TokenWindows
from hf_memory.conversion.run_identity import last_whole_checkpoint
from hf_memory.conversion.stages.divergence import divergence
from hf_memory.conversion.stages.trainer import train
from teachers import RUN, SCHEDULE, convert, make_teacher, same, text

ALL_STAGES = RUN | {"keep": "auto:1/2", "fine_tuning": SCHEDULE._replace(length=32), "lora_rank": 2}


class Slow(TrainerCallback):
    """Leaves time for a kill between two steps."""

    def on_step_end(self, args, state, control, **kwargs):
        """Wait."""
        time.sleep(0.05)


def convert_and_save(folder, *callbacks):
    made = convert(
        make_teacher(), text(), run=Run(folder / "checkpoints", callbacks=callbacks), **ALL_STAGES
    )
    made.student.save_pretrained(folder / "student")


def kill_and_convert(folder):
    """Kill a conversion at random moments of its stages, each time as a process of its own; then let it end."""
    torch.set_num_threads(1)
    gc.freeze()  # accelerate collects garbage at each stage, which takes as long as the stage
    moments = random.Random(0)
    checkpoints = folder / "killed" / "checkpoints"
    for stage, kills in (
        ("transfer", 4),
        ("distillation", 3),
        ("fine_tuning", 3),
    ):
        for step in sorted(moments.sample(range(1, SCHEDULE.steps - 1), kills)):
            process = (
                os.fork()
            )  # not a new interpreter, which would take longer than its conversion
            if not process:
                convert_and_save(folder / "killed", Slow())
                os._exit(1)  # too late to be killed
            wait_for(checkpoints / stage / f"checkpoint-{step}", process)
            time.sleep(moments.uniform(0, 0.1))  # a step and a checkpoint take longer
            os.kill(process, signal.SIGKILL)
            _, status = os.waitpid(process, 0)
            assert os.WIFSIGNALED(status), f"not killed at step {step} of {stage}"
    assert not (folder / "killed" / "student").exists()
    convert_and_save(folder / "killed")
    convert_and_save(folder / "whole")


def wait_for(path, process, timeout=120):
    end = time.monotonic() + timeout
    while not path.exists():
        assert os.waitpid(process, os.WNOHANG) == (0, 0), f"the conversion ended before {path}"
        assert time.monotonic() < end, f"no {path} in {timeout} seconds"
        time.sleep(0.001)


@pytest.mark.slow
def test_a_conversion_that_is_killed_ten_times_comes_to_the_same_weights(tmp_path):
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    code = "import sys, pathlib, test_conversion_runs as t; t.kill_and_convert(pathlib.Path(sys.argv[1]))"
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", code, tmp_path], env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    weights, expected = (
        load_file(tmp_path / x / "student" / "model.safetensors") for x in ("killed", "whole")
    )
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)


def test_a_checkpoint_that_is_half_written_is_left_out(tmp_path):
    for step, state in ((2, "{}"), (4, '{"epo'), (6, None)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if state:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    assert last_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]
    assert last_whole_checkpoint(tmp_path / "none") is None


class Interrupt(TrainerCallback):
    """Stops a stage after the first checkpoint."""

    def on_save(self, args, state, control, **kwargs):
        """As Ctrl-C does."""
        raise KeyboardInterrupt


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A folder with the checkpoint of a stage that was stopped."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.raises(KeyboardInterrupt):
        train(make_teacher(), text(), SCHEDULE, run=Run(folder, callbacks=(Interrupt(),)))
    return folder


def other_state(content):
    saved = torch.load(io.BytesIO(content), weights_only=False)
    other = io.BytesIO()
    torch.save({"state": {}, "param_groups": []} if "state" in saved else {"x": 1}, other)
    return other.getvalue()


def step_of(step):
    return lambda content: json.dumps(json.loads(content) | {"global_step": step}).encode()


DAMAGES = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[: len(content) // 2],
    "zeros": lambda content: bytes(len(content)),
    "flipped": lambda content: (
        content[: len(content) // 2] + b"\xff\0\xff" + content[len(content) // 2 + 3 :]
    ),
}
LOST = [DAMAGES[name] for name in ("empty", "truncated", "zeros")]
FILES = [
    *product(
        ["optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors", "config.json"], LOST
    )
]
FILES += product(["optimizer.pt", "rng_state.pth"], [DAMAGES["flipped"]])
FILES += product(["optimizer.pt", "rng_state.pth"], [other_state])
FILES += product(
    ["trainer_state.json"],
    [lambda content: b"[]", lambda content: b"{}", *map(step_of, ("1", -1, 10**9))],
)


@pytest.mark.parametrize(("name", "damage"), FILES)
def test_a_damaged_checkpoint_is_refused_in_one_sentence(name, damage, stopped, tmp_path):
    shutil.copytree(stopped, tmp_path / "run")
    (checkpoint,) = (tmp_path / "run").glob("checkpoint-*")
    (checkpoint / name).write_bytes(damage((checkpoint / name).read_bytes()))
    with pytest.raises(
        ValueError,
        match=rf"{checkpoint}.* is damaged \(.*\): delete the folder {checkpoint.name}, and",
    ):
        train(make_teacher(), text(), SCHEDULE, run=Run(tmp_path / "run"))
    shutil.rmtree(checkpoint)
    assert last_whole_checkpoint(tmp_path / "run") is None


def test_a_changed_state_of_an_optimizer_that_is_used_is_seen(stopped, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_memory.conversion.stages.trainer.check_checkpoint", lambda folder: None)
    with pytest.raises((pytest.fail.Exception, AssertionError)):
        test_a_damaged_checkpoint_is_refused_in_one_sentence(
            "optimizer.pt", DAMAGES["flipped"], stopped, tmp_path
        )


@pytest.mark.parametrize("content", ["", "[]", "[" * 100_000, "\0" * 9])
def test_a_damaged_record_of_a_run_is_refused_in_one_sentence(content, stopped, tmp_path):
    shutil.copytree(stopped, tmp_path / "run")
    (tmp_path / "run" / "fingerprint.json").write_text(content)
    with pytest.raises(
        ValueError,
        match=r"fingerprint.json is damaged: delete the folder .*run, and the run begins again",
    ):
        train(make_teacher(), text(), SCHEDULE, run=Run(tmp_path / "run"))


def other_teacher():
    teacher = make_teacher()
    teacher.model.norm.weight.data[3] += 1e-3
    return teacher


@pytest.mark.parametrize(
    ("teacher", "tokens", "change", "name"),
    [
        (make_teacher, text(), {"seed": 2}, "seed"),
        (make_teacher, text(), {"distillation": SCHEDULE._replace(warmup=0.1)}, "distillation"),
        (make_teacher, text(), {"gate": "scalar", "keep": (0,)}, "gate and keep"),
        (make_teacher, text().flip(0), {}, "tokens"),
        (other_teacher, text(), {}, "teacher"),
    ],
)
def test_checkpoints_of_another_run_are_refused(tmp_path, teacher, tokens, change, name):
    short = RUN | {
        "transfer": SCHEDULE._replace(steps=1),
        "distillation": SCHEDULE._replace(steps=0),
    }
    with pytest.raises(ValueError, match="options must be"):
        convert(make_teacher(), text(), run=Run(tmp_path), gaet="scalar", **short)  # claims nothing
    convert(make_teacher(), text(), run=Run(tmp_path), **short)
    convert(make_teacher(), text(), run=Run(tmp_path), **short | {"keep": [1]})
    with pytest.raises(
        ValueError, match=f"checkpoints must be of the same run, got .* with another {name}$"
    ):
        convert(teacher(), tokens, run=Run(tmp_path), **short | change)


def test_checkpoints_of_a_run_that_keeps_another_share_of_the_heads_are_refused(tmp_path):
    one_step = SCHEDULE._replace(steps=1)
    recipe = {"to": "attention", "transfer": one_step, "distillation": one_step}
    convert(make_teacher(), text(), run=Run(tmp_path), keep="heads:1/4", sliding_window=6, **recipe)
    with pytest.raises(ValueError, match="with another keep"):
        convert(
            make_teacher(), text(), run=Run(tmp_path), keep="heads:1/2", sliding_window=6, **recipe
        )


class Worsen(TrainerCallback):
    """Spoils the weights in the sixth step of distillation; before that, may interrupt it."""

    def __init__(self, *, stops=False):
        self.stops = stops

    def on_step_end(self, args, state, control, model, **kwargs):
        """Before the step is evaluated."""
        if args.run_name == "distillation" and state.global_step == 5 and self.stops:
            raise KeyboardInterrupt
        if args.run_name == "distillation" and state.global_step == 6:
            model.lm_head.weight.data *= 3


def test_the_weights_that_are_best_on_other_text_are_kept(tmp_path):
    training = {"eval_steps": 2, "load_best_model_at_end": True}
    run = Run(callbacks=(Worsen(),), training=training, validation=random_tokens(100, seed=2))
    teacher = make_teacher()
    whole = convert(make_teacher(), text(), run=run, **RUN)
    found = {x["step"]: x["eval_loss"] for x in whole.losses["distillation"] if "eval_loss" in x}
    assert list(found) == [2, 4, 6, 8]
    assert min(found, key=found.get) == 4
    rows = torch.stack(
        [x["input_ids"] for x in TokenWindows(text(), SCHEDULE, 2).for_evaluation(run.validation)]
    )
    with torch.no_grad():
        loss = (
            divergence(*(x(rows).logits[:, :-1].flatten(0, 1) for x in (whole.student, teacher)))
            / rows[:, 1:].numel()
        )
    assert loss.item() == pytest.approx(found[4], rel=1e-4)

    run = replace(run, checkpoints=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        convert(teacher, text(), run=replace(run, callbacks=(Worsen(stops=True),)), **RUN)
    resumed = convert(teacher, text(), run=run, **RUN)
    assert same(resumed.student, whole.student)
    assert resumed.losses == whole.losses


class Break(TrainerCallback):
    """Makes a weight, or what reaches it on the way back, something that is not a number."""

    def __init__(self, stage, name, *, weight):
        self.stage = stage
        self.name = name
        self.weight = weight

    def on_step_end(self, args, state, control, model, **kwargs):
        """After the third step."""
        if args.run_name == self.stage and state.global_step == 3:
            parameter = model.get_parameter(self.name)
            if self.weight:
                nn.init.constant_(parameter, float("nan"))
            else:
                parameter.register_hook(lambda gradient: gradient * float("inf"))


@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize(
    ("stage", "name"),
    [
        ("attention transfer", "learned.0.q_proj.weight"),
        ("distillation", "model.layers.1.mlp.up_proj.weight"),
    ],
)
def test_a_step_that_is_not_finite_stops_the_stage(stage, name, weight):
    before = (
        "the weight {} is not finite" if weight else "weights are finite, the gradient of {} is not"
    )
    with pytest.raises(
        ValueError, match=f"must be finite, got loss .* in step 4 of {stage}; {before.format(name)}"
    ):
        convert(
            make_teacher(), text(), run=Run(callbacks=(Break(stage, name, weight=weight),)), **RUN
        )
