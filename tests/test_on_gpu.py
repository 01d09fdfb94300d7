"""What benchmarks/on_gpu.py does on a machine with a GPU, tried with interpreted kernels: every failure is a row."""

import importlib
import json
from pathlib import Path

import pytest
import torch


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    return importlib.import_module("on_gpu")


@pytest.fixture
def table(on_gpu, tmp_path):
    return on_gpu.Table("cpu", tmp_path / "on_gpu.json")


def in_place_of_jobs(on_gpu, monkeypatch, folder, *lines):
    script = folder / "job.py"
    script.write_text("\n".join(["import time", *lines]))
    monkeypatch.setattr(on_gpu, "__file__", str(script))


def test_a_job_in_a_process_of_its_own_says_whether_an_op_is_right(on_gpu, table):
    number = next(n for n, call in enumerate(on_gpu.CALLS) if "gates" in call.name)
    on_gpu.measure(table, [on_gpu.Job("right", (number, 16, "float32"))])
    (row,) = table.rows
    assert row["right"] is (row["error"] < on_gpu.TOLERANCE["float32"])


def test_what_fails_is_a_row_and_the_others_go_on(on_gpu, table, monkeypatch, tmp_path):
    in_place_of_jobs(on_gpu, monkeypatch, tmp_path, "raise RuntimeError('no kernel image')")
    jobs = [on_gpu.Job("ops", ("RWKV-7", "PyTorch")), on_gpu.Job("kernels", ("first / second",))]
    on_gpu.measure(table, jobs)
    assert [row["failed"] for row in table.rows] == [
        "ops RWKV-7 PyTorch: RuntimeError: no kernel image",
        "kernels first / second: RuntimeError: no kernel image",
    ]
    assert json.loads(table.file.read_text())["rows"] == table.rows


def test_rows_of_a_job_that_is_stopped_stay(on_gpu, table, monkeypatch, tmp_path):
    in_place_of_jobs(on_gpu, monkeypatch, tmp_path, "print('{}', flush=True)", "time.sleep(60)")
    table.run(on_gpu.Job("ops", ("RWKV-7", "PyTorch")), table.seconds + 3)
    assert table.rows == [
        {"part": "ops"},
        {"part": "ops", "failed": "no time was left for the rest of ops RWKV-7 PyTorch"},
    ]


def test_a_part_ends_after_its_own_seconds(on_gpu, table, monkeypatch):
    """What comes after it has the time that it was given."""
    parts = on_gpu.parts("cpu")
    given = {"right": parts["right"]._replace(seconds=0), "kernels": parts["kernels"]}
    monkeypatch.setattr(on_gpu, "parts", lambda device: given)
    left = []
    monkeypatch.setattr(on_gpu, "run", lambda job, device, seconds: left.append(seconds) or [])
    on_gpu.measure(table, [on_gpu.Job("right", (0, 16, "float32")), on_gpu.Job("kernels", ("x",))])
    assert left[0] <= 0
    assert left[1] > 50


def test_no_job_starts_after_the_time_is_up(on_gpu, table, monkeypatch):
    monkeypatch.setattr(on_gpu, "SECONDS", 0)
    on_gpu.measure(table, [on_gpu.Job("models", ("GLA",))])
    assert table.rows == [{"part": "models", "failed": "no time was left for models GLA"}]


def test_jobs_are_every_kernel_and_every_op(on_gpu):
    parts = on_gpu.parts("cuda")
    kernels = {n for n, call in enumerate(on_gpu.CALLS) if "triton" in call.forms}
    assert {number for number, *_ in parts["right"].jobs} == kernels
    assert {name for name, _ in parts["ops"].jobs} == set(on_gpu.NINE)
    assert set(on_gpu.NINE) <= {form.name for form in on_gpu.ops.FORMS}
    names = [on_gpu.Job(name, x).name for name, part in parts.items() for x in part.jobs]
    assert len(set(names)) == len(names)


def test_what_failed_on_a_gpu_is_first_and_what_tunes_itself_is_after_all_of_ours(on_gpu):
    parts = on_gpu.parts("cuda")
    first = [on_gpu.CALLS[number].name for number, *_ in parts["right"].jobs]
    assert set(first[:5]) == {"neural_memory"}
    assert list(parts)[:5] == ["right", "prepare", "students", "ops", "steps"]


def test_an_op_is_beside_flash_linear_attention_or_beside_all_others(on_gpu, monkeypatch):
    form = on_gpu.ops.FORMS[0]._replace(peers={"fla": print, "Mamba-2 (transformers)": print})
    monkeypatch.setattr(on_gpu.ops, "FORMS", (form,))
    assert {*on_gpu.form_of(form.name, "PyTorch").peers} == {"PyTorch", "Mamba-2 (transformers)"}
    assert {*on_gpu.form_of(form.name, "fla").peers} == {"fla"}


@pytest.mark.parametrize(
    ("part", "given"),
    [
        ("ops", ("linear attention", "PyTorch")),
        ("kernels", ("delta rule in segments / whole",)),
        ("models", ("Gated DeltaNet",)),
    ],
)
def test_a_dry_run_of_a_job_makes_rows(on_gpu, table, part, given):
    table.run_here(on_gpu.Job(part, given))
    assert table.rows
    assert not table.wrong


def test_a_token_that_waits_for_numbers_is_seen(on_gpu):
    """As it could not be captured in a CUDA graph."""
    model = on_gpu.model_of("Gated DeltaNet", "cpu")
    token = torch.ones(1, 1, dtype=torch.long)
    on_gpu.without_waiting(model, token, None)
    model.register_forward_pre_hook(lambda module, given: given[0].sum().item())
    with pytest.raises(RuntimeError, match="meta tensors"):
        on_gpu.without_waiting(model, token, None)
