"""A conversion that is killed, goes on elsewhere than it began, or stops being finite."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from cases import SIZES, random_tokens
from hf_memory.conversion import Schedule, convert
from hf_memory.conversion.checkpoints import last_whole_checkpoint

SCHEDULE = Schedule(steps=10, learning_rate=1e-2, batch_size=2, length=16)
RUN = {"to": "gated", "keep": (1,), "transfer": SCHEDULE, "distillation": SCHEDULE, "seed": 1}


def make_teacher():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def text():
    return random_tokens(200, seed=1)


class Slow(TrainerCallback):
    """Leaves time for a kill between two steps."""

    def on_step_end(self, args, state, control, **kwargs):
        """Wait."""
        time.sleep(0.05)


def convert_and_save(folder, *callbacks):
    torch.set_num_threads(1)
    made = convert(
        make_teacher(), text(), checkpoints=folder / "checkpoints", callbacks=callbacks, **RUN | {"keep": "auto:1/2"}
    )
    made.student.save_pretrained(folder / "student")


def start(folder):
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    code = "import sys, pathlib, test_conversion_runs as t; t.convert_and_save(pathlib.Path(sys.argv[1]), t.Slow())"
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", code, str(folder)], env=environment, stderr=subprocess.PIPE)


def kill_when_there_is(path, process, timeout=60):
    end = time.monotonic() + timeout
    while not path.exists():
        assert process.poll() is None, process.stderr.read().decode()
        assert time.monotonic() < end, f"no {path} in {timeout} seconds"
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.stderr.close()


@pytest.mark.slow
def test_a_killed_conversion_goes_on_to_the_same_weights(tmp_path):
    threads = torch.get_num_threads()
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    for checkpoint in (
        "placement/checkpoint-3",
        "transfer/checkpoint-4/model.safetensors",
        "distillation/checkpoint-7",
    ):
        kill_when_there_is(killed / "checkpoints" / checkpoint, start(killed))
    assert not (killed / "student").exists()
    try:
        convert_and_save(killed)
        convert_and_save(whole)
    finally:
        torch.set_num_threads(threads)
    weights, expected = (load_file(folder / "student" / "model.safetensors") for folder in (killed, whole))
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
    short = RUN | {"transfer": SCHEDULE._replace(steps=1), "distillation": SCHEDULE._replace(steps=0)}
    with pytest.raises(ValueError, match="options must be"):
        convert(make_teacher(), text(), checkpoints=tmp_path, gaet="scalar", **short)  # claims nothing
    convert(make_teacher(), text(), checkpoints=tmp_path, **short)
    convert(make_teacher(), text(), checkpoints=tmp_path, **short | {"keep": [1]})
    with pytest.raises(ValueError, match=f"checkpoints must be of the same run, got .* with another {name}$"):
        convert(teacher(), tokens, checkpoints=tmp_path, **short | change)


class Break(TrainerCallback):
    """Makes a weight, or what reaches it on the way back, something that is not a number."""

    def __init__(self, stage, name, *, weight):
        self.stage, self.name, self.weight = stage, name, weight

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
    [("attention transfer", "mixers.0.q_proj.weight"), ("distillation", "model.layers.1.mlp.up_proj.weight")],
)
def test_a_step_that_is_not_finite_stops_the_stage(stage, name, weight):
    before = "the weight {} is not finite" if weight else "weights are finite, the gradient of {} is not"
    with pytest.raises(ValueError, match=f"must be finite, got loss .* in step 4 of {stage}; {before.format(name)}"):
        convert(make_teacher(), text(), callbacks=(Break(stage, name, weight=weight),), **RUN)
