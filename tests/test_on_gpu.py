"""What benchmarks/on_gpu.py does on a machine with a GPU, tried with interpreted kernels: every failure is a row."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from transformers import StaticCache


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


def test_what_failed_on_a_gpu_or_has_not_run_on_one_is_first(on_gpu):
    jobs = on_gpu.parts("cuda")["right"].jobs
    calls = [(on_gpu.CALLS[number].name, dtype) for number, _, dtype in jobs]
    assert set(calls[:10]) == {("neural_memory", "bfloat16"), ("neural_memory", "float32")}
    is_known = [name in ("linear_attention", "delta_rule", "deltaformer") for name, _ in calls]
    assert is_known.index(True) > max(n for n, (name, _) in enumerate(calls) if "token" in name)


def test_what_is_worth_most_has_its_time_even_if_every_part_takes_all_of_its_own(on_gpu):
    parts = on_gpu.parts("cuda")
    first = list(parts)[: 1 + list(parts).index("steps")]
    assert {"right", "ops", "fla", "students"} < {*first}
    assert sum(parts[name].seconds for name in first) <= on_gpu.SECONDS


def test_replays_of_a_token_have_room_in_its_cache(on_gpu):
    """A GPU would write beyond it, or stop all that follows."""
    model = on_gpu.model_of("Llama", "cpu")
    token = torch.ones(2, 1, dtype=torch.long)
    cache = StaticCache(config=model.config, max_cache_len=4 + on_gpu.ROOM)
    model(token.expand(2, 4), **{on_gpu.CACHE: cache}, use_cache=True)
    (row,) = on_gpu.in_graph({"what": "token"}, model, token, cache)
    assert 4 + on_gpu.REPLAYS < cache.get_seq_length() <= 4 + on_gpu.ROOM
    assert row["ms"] > 0


def test_heads_of_the_default_student_keep_as_many_tokens_as_with_equal_numbers(on_gpu):
    models = on_gpu.students_and_teacher("cpu")
    equal = models["student, equal numbers"].config
    by_head = models["student"].config.num_kept_tokens
    assert equal.eviction == models["student"].config.eviction == "change_of_output"
    near = on_gpu.near_heads(equal)
    kept = [by_head[layer][head] for layer, head in near]
    assert sum(kept) == equal.num_kept_tokens * len(near)
    assert len(set(kept)) > 1


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


def test_a_dry_run_says_what_failed_and_writes_no_result(on_gpu, monkeypatch, capsys):
    before = on_gpu.RESULT.read_text()
    chosen = "kernels .* in segments|shares linear attention$"
    monkeypatch.setattr("sys.argv", ["on_gpu.py", "--dry-run", "--only", chosen])
    with pytest.raises(SystemExit) as whole:
        on_gpu.main()
    assert whole.value.code == 0
    assert "3 rows, 0 of them wrong or failed" in capsys.readouterr().out
    monkeypatch.setattr(on_gpu.ops, "shares_of", lambda *given: 1 / 0)
    with pytest.raises(SystemExit) as broken:
        on_gpu.main()
    assert broken.value.code == 1
    printed = capsys.readouterr().out
    assert "shares linear attention, failed ZeroDivisionError" in printed
    assert "3 rows, 1 of them wrong or failed" in printed
    assert on_gpu.RESULT.read_text() == before


def test_a_token_that_waits_for_numbers_is_seen(on_gpu):
    """As it could not be captured in a CUDA graph."""
    model = on_gpu.model_of("Gated DeltaNet", "cpu")
    token = torch.ones(1, 1, dtype=torch.long)
    on_gpu.without_waiting(model, token, None)
    model.register_forward_pre_hook(lambda module, given: given[0].sum().item())
    with pytest.raises(RuntimeError, match="meta tensors"):
        on_gpu.without_waiting(model, token, None)
