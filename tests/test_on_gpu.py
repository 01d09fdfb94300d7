"""What benchmarks/on_gpu.py does on a machine with a GPU, tried with interpreted kernels: every failure is a row."""

import importlib
import json
from pathlib import Path

import pytest


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    return importlib.import_module("on_gpu")


@pytest.fixture
def table(on_gpu, tmp_path):
    return on_gpu.Table("cpu", tmp_path / "on_gpu.json")


def test_what_fails_is_a_row_and_the_others_go_on(on_gpu, table):
    jobs = [
        on_gpu.Job("second GPU", (), 60),
        on_gpu.Job("right", (0, 16, "float32"), 60),
        on_gpu.Job("model", ("Llama", ""), 0.01),
    ]
    on_gpu.measure(table, jobs)
    (right,) = (row for row in table.rows if row["part"] == "right")
    assert right["right"] is (right["error"] < on_gpu.TOLERANCE["float32"])
    assert {row["failed"] for row in table.rows if "failed" in row} == {
        "second GPU: RuntimeError: there is one GPU at most",
        "model Llama  was stopped after 0.01 s",
    }
    assert json.loads(table.file.read_text())["rows"] == table.rows


def test_no_job_starts_after_the_time_is_up(on_gpu, table, monkeypatch):
    monkeypatch.setattr(on_gpu, "SECONDS", 0)
    on_gpu.measure(table, [on_gpu.Job("graph", (), 60)])
    assert table.rows == [{"part": "graph", "failed": "no time was left for graph"}]


def test_jobs_are_every_kernel_and_every_op(on_gpu):
    jobs = on_gpu.jobs_of("cuda")
    kernels = {n for n, call in enumerate(on_gpu.CALLS) if "triton" in call.forms}
    assert {job.given[0] for job in jobs if job.part == "right"} == kernels
    assert {job.part for job in jobs} | {"shares"} == set(on_gpu.PARTS)
    assert len({job.name for job in jobs}) == len(jobs)


def test_jobs_beside_flash_linear_attention_are_the_last_and_no_others_run_its_ops(
    on_gpu, monkeypatch
):
    jobs = on_gpu.jobs_of("cuda")
    assert [job.order for job in jobs] == sorted(job.order for job in jobs)
    assert {job.part for job in jobs if job.order == 2} == {"peers"}
    assert on_gpu.Job("model", ("GLA", "fla"), 120).order == 2
    form = on_gpu.ops.FORMS[0]._replace(peers={"fla": print, "Mamba-2 (transformers)": print})
    monkeypatch.setattr(on_gpu.ops, "FORMS", (form,))
    assert {*on_gpu.form_of(form.name).peers} == {"Mamba-2 (transformers)"}
    assert {*on_gpu.form_of(form.name, "fla").peers} == {"fla"}
