"""What `hf-memory check` compares, and that a form that is wrong, crashes or hangs is named."""

import os
import time
from pathlib import Path

import pytest
import torch

from hf_memory import check, ops
from hf_memory.check import CALLS, Size, Task
from hf_memory.ops import OPS, linear_attention
from hf_memory.ops.linear_attention import kernels

SMALL = Size(1, 20, 1, 2, 16, "float32")
FIRST = CALLS[0]


def wrong_chunks(*args, backend, **given):
    """Linear attention whose chunks have an error of one part in a hundred."""
    o, state = linear_attention(*args, **given, backend=backend)
    return (o if backend == "reference" else 1.01 * o), state


def act(task):
    """What the name of a call says."""
    if task.call.name == "crash":
        os.abort()
    if task.call.name == "hang":
        time.sleep(60)
    return task.row | {"right": True}


def named(name):
    return Task(FIRST._replace(name=name, variant={}), SMALL, "cpu")


def test_all_forms_of_this_machine_are_right_and_the_exit_code_says_so(run, monkeypatch):
    monkeypatch.setitem(check.SIZES, "cpu", (SMALL,))
    code, out, err = run("check")
    assert code == 0
    assert err == ""
    assert "No GPU" in out
    assert all(op.name in out for op in OPS)


@pytest.mark.parametrize("fault", ["wrong", "fails"])
def test_a_form_that_is_wrong_is_named_with_what_to_do(fault, run, monkeypatch):
    def fails(*args, backend, **given):
        raise RuntimeError("PassManager::run failed")

    broken = FIRST._replace(run=wrong_chunks if fault == "wrong" else fails)
    tasks = [Task(call, SMALL, "cpu") for call in (broken, CALLS[1])]
    monkeypatch.setattr(check, "tasks_of", lambda device: tasks)
    code, out, _ = run("check")
    assert code == 1
    (line,) = [line for line in out.splitlines() if line.startswith("WRONG")]
    assert FIRST.title in line
    assert 'mixer_backend="reference"' in line
    assert ("PassManager::run failed" in line) is (fault == "fails")


KERNELS_ALONE = [call for call in CALLS if call.name not in {op.name for op in OPS}]


@pytest.mark.parametrize("call", [FIRST, *KERNELS_ALONE], ids=lambda call: call.title)
def test_a_kernel_is_compared_with_its_reference(call):
    assert check.difference(call, SMALL, "cpu", "triton") < check.TOLERANCE["float32"]


@pytest.mark.parametrize("dtype", check.TOLERANCE)
@pytest.mark.parametrize("size", [0.3, 0.03, 0.01])
def test_an_error_in_small_numbers_is_not_hidden_by_large_ones(size, dtype):
    def run(x, backend):
        return x if backend == "reference" else torch.cat([x[:1], 0 * x[1:]])

    def inputs(**sizes):
        return {"x": torch.tensor([[1.0, -1.0], [size, -size]])}

    call = FIRST._replace(run=run, inputs=inputs, variant={}, has_gradients=False)
    found = check.difference(call, SMALL._replace(dtype=dtype), "cpu", "chunk")
    assert found > check.TOLERANCE[dtype]


@pytest.mark.parametrize("fault", [1.01, torch.nan, None])
def test_a_kernel_with_a_wrong_gradient_is_seen(fault, monkeypatch):
    backward = check.gradients

    def planted(outputs, inputs):
        found = backward(outputs, inputs)
        return [None if fault is None else found[0] * fault, *found[1:]]

    monkeypatch.setattr(
        check,
        "gradients",
        lambda o, x: (planted if o[0].dtype == torch.float32 else backward)(o, x),
    )
    assert not check.difference(FIRST, SMALL, "cpu", "triton") < check.TOLERANCE["float32"]


def test_a_kernel_with_a_wrong_output_is_seen(monkeypatch):
    forward = kernels.linear_attention

    def planted(*args):
        o, state = forward(*args)
        return o.roll(1, 1), state

    monkeypatch.setattr(kernels, "linear_attention", planted)
    assert not check.difference(FIRST, SMALL, "cpu", "triton") < check.TOLERANCE["float32"]


def test_a_process_that_crashes_or_hangs_is_a_row_and_the_others_run_in_new_ones():
    worker = check.Worker(act)
    rows = [worker.ask(named(name)) for name in ("crash", "right")]
    worker.seconds = 0.1
    rows.append(worker.ask(named("hang")))
    assert worker.process is None
    assert [row["call"] for row in rows] == ["crash", "right", "hang"]
    assert [row["right"] for row in rows] == [False, True, False]
    assert "exit code -6" in rows[0]["failed"]
    assert rows[2]["failed"] == "it was stopped after 0.1 s"


class Here:
    """A worker without a process, on a GPU whose kernels are right."""

    def __init__(self, function, seconds):
        pass

    def ask(self, task):
        if task.is_timed:
            return task.row | {"ms": 0.125, "pytorch_ms": 8.5}
        is_wrong = task.call.name == "neural_memory" and task.size.dtype == "float32"
        return task.row | {"error": 0.5 if is_wrong else 1e-7, "right": not is_wrong}

    def stop(self):
        pass


def test_on_a_gpu_kernels_are_timed_and_the_wrong_ones_have_a_way_around(run, monkeypatch):
    monkeypatch.setattr(check, "Worker", Here)
    monkeypatch.setattr(check, "device_here", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    code, out, _ = run("check")
    assert code == 1
    assert "GPU: H200" in out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "selective_scan PyTorch 1.0e-07 1.0e-07" in lines
    assert "gates of RWKV-7 kernel 1.0e-07 1.0e-07 0.125 8.5" in lines
    wrong = [line for line in lines if line.startswith("WRONG")]
    assert len(wrong) == len([call for call in CALLS if call.name == "neural_memory"])
    assert all("float32 has an error of 5.0e-01" in line for line in wrong)
    assert all('mixer_backend="chunk"' in line for line in wrong)


def test_every_kernel_is_in_the_table():
    sources = {path.parent.name for path in Path(ops.__file__).parent.rglob("kernels*")}
    named = {
        call.name.partition(",")[0].replace(" ", "_") for call in CALLS if "triton" in call.forms
    }
    others = {"kept_tokens": "kv_eviction", "gates_of_RWKV-7": "rwkv7_gates"}
    assert {others.get(name, name) for name in named} == sources
