"""The claims' machinery: runs are kept one by one, small settings run, and the page says what the results say."""

import importlib
import json
import math
import runpy
from pathlib import Path

import pytest
import torch

CLAIMS = Path(__file__).parents[1] / "benchmarks" / "papers"
RESULTS = CLAIMS.parent / "results" / "claims"


@pytest.fixture
def module(monkeypatch):
    """Import a file of the claims by its name."""
    monkeypatch.syspath_prepend(CLAIMS)
    return importlib.import_module


def test_a_stopped_claim_goes_on_with_the_run_that_is_missing(module, tmp_path):
    stop = [1]
    ran = []

    def measure(*, seed):
        ran.append(seed)
        if seed in stop:
            raise KeyboardInterrupt
        return {"accuracy": seed / 3}

    def draw(rows, figure):
        figure.subplots().plot([row["accuracy"] for row in rows])

    claim = module("claim").Claim(
        "small",
        "",
        "",
        3,
        lambda rows: ({"seed": i} for i in range(3)),
        measure,
        list,
        draw,
        lambda rows: ("", ""),
    )
    with pytest.raises(KeyboardInterrupt):
        claim.go_on(tmp_path)
    assert claim.rows(tmp_path) == [{"seed": 0, "accuracy": 0}]
    assert claim.minutes_left(claim.rows(tmp_path)) == 2
    stop.clear()
    rows = claim.go_on(tmp_path)
    assert ran == [0, 1, 1, 2]
    assert [row["seed"] for row in rows] == [0, 1, 2]
    assert claim.rows(tmp_path) == [
        {**row, "accuracy": pytest.approx(row["accuracy"], rel=1e-4)} for row in rows
    ]
    assert sorted(x.name for x in tmp_path.iterdir()) == ["small.jsonl", "small.png"]


def test_other_seeds_have_the_rate_that_was_best(module):
    sweep = module("claim").sweep
    rows = [
        {"model": "a", "lr": lr, "seed": 0, "accuracy": accuracy}
        for lr, accuracy in ((1, 0.5), (2, 0.9))
    ]
    assert [(x["lr"], x["seed"]) for x in sweep("a", (1, 2), 3, rows[:1])] == [(1, 0), (2, 0)]
    assert [(x["lr"], x["seed"]) for x in sweep("a", (1, 2), 3, rows)] == [
        (1, 0),
        (2, 0),
        (2, 1),
        (2, 2),
    ]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("parity", {"model": "DeltaNet, [-1, 1]", "lr": 0.01, "seed": 0, "length": 4, "steps": 2}),
        ("recall", {"model": "softmax attention", "lr": 0.01, "seed": 0, "steps": 1}),
        ("cost", {"model": "GLA", "tokens": 32}),
        ("groups", {"group": "S3", "model": "RWKV-7, [-1, 1], two tokens", "seed": 0, "steps": 2}),
        ("levels", {"model": "Mamba-2, log-linear", "lr": 0.01, "seed": 0, "steps": 1}),
        ("facts", {"model": "16,384 slots", "seed": 0, "facts": 64, "steps": 1}),
        ("regression", {"keys": "equal", "noise": 0.5, "memory": "MesaNet", "seed": 0}),
        (
            "groups",
            {"group": "Z3", "model": "DeltaProduct, [-1, 1], two steps", "seed": 0, "steps": 2},
        ),
        ("context", {"rule": "network", "memory": "TTT-Linear", "seed": 0}),
        ("positions", {"position": "alibi", "seed": 0, "steps": 1}),
        ("pasts", {"model": "window of 32", "seed": 0, "steps": 1}),
        ("mosaics", {"model": "Memory Mosaic, one layer", "lr": 0.01, "seed": 0, "most": 1}),
        ("copying", {"model": "DeltaNet", "seed": 0, "steps": 1}),
        ("reach", {"word": "bigbird", "layers": 1, "seed": 0}),
    ],
)
def test_a_small_setting_measures_what_the_results_have(module, name, options):
    row = options | module(name).measure(**options)
    kept = [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]
    assert row.keys() in [x.keys() for x in kept]
    assert all(math.isfinite(x) for x in row.values() if isinstance(x, float))


def test_a_product_is_a_sum_modulo_three_where_the_group_is_one(module):
    groups = module("groups")
    tokens, targets = groups.products(
        groups.GROUPS["Z3"], 2, 8, 4, torch.Generator().manual_seed(0), last=5
    )
    elements = tokens[:, ::2]
    assert tokens[:, 1::2].equal(elements + 3)
    assert targets[:, 7::2].equal((elements.cumsum(1) % 3)[:, 3:])
    assert (targets[:, :7] == -100).all()
    assert (targets[:, ::2] == -100).all()


def test_the_page_says_what_the_results_say(module):
    claims = runpy.run_path(str(CLAIMS / "__main__.py"), run_name="claims")["CLAIMS"]
    stale = [
        file.name
        for file, text in module("page").texts(claims.values()).items()
        if file.read_text() != text
    ]
    assert not stale, "run python benchmarks/papers --page"
