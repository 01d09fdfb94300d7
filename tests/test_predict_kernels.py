"""The parts of the command that predicts kernel times which need no compiler."""

import importlib
from collections import namedtuple
from pathlib import Path

import pytest
import torch

LOOPS = """
    %c32 = arith.constant 32 : i64 loc(#loc)
    %c0 = arith.constant 0 : i64 loc(#loc)
    %n = tt.get_program_id x : i32 loc(#loc)
    %length = arith.extsi %T : i32 to i64 loc(#loc)
    %start = arith.muli %n, %length : i64 loc(#loc)
    %end = arith.addi %start, %length : i64 loc(#loc)
    %S = scf.for %first = %start to %end step %c32 iter_args(%x = %y) -> (tensor<16xf32>)  : i64 {
      scf.for %before = %c0 to %first step %c32  : i64 {
"""


@pytest.fixture
def part(monkeypatch):
    """Something of a module of the benchmarks, by the names of both."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    return lambda module, name: getattr(importlib.import_module(module), name)


def test_trips_follow_from_the_arguments_and_an_inner_loop_counts_as_in_the_middle_of_the_outer(part):
    trips = part("loop_trips", "trips")
    assert trips(LOOPS, {"T": 4096}, programs=1) == [128, 64]
    call = namedtuple("Call", "T")
    assert trips(LOOPS.replace("%T", "%call.T"), {"call": call(4096)}, programs=1) == [128, 64]


def test_trips_of_programs_of_different_length_are_their_mean(part):
    trips = part("loop_trips", "trips")
    code = LOOPS.replace("%first = %start", "%first = %c0")
    assert trips(code, {"T": 32}, programs=4)[0] == (1 + 2 + 3 + 4) / 4


def test_a_loop_whose_bound_is_in_memory_is_refused(part):
    trips = part("loop_trips", "trips")
    with pytest.raises(ValueError, match="the bound %start of a loop is not known"):
        trips(LOOPS, {"T": None}, programs=1)


def test_a_chain_of_instructions_takes_the_sum_of_latencies_and_a_loop_repeats_it(part):
    instruction, cycles = part("machine_code", "Instruction"), part("machine_code", "cycles")
    totals = part("predict_kernels", "totals")
    add = instruction("FADD", "R0, R0, R1", ("R0",), ("R0", "R1"))
    assert cycles([add] * 10) == 50
    alone, looped = (totals([add] * 10, loops, (0, 9)) for loops in ({}, {(2, 7): 100}))
    assert alone[1] == 10
    assert looped[1] == 4 + 6 * 100


def test_a_last_wave_takes_as_long_as_a_full_one(part):
    waves = part("predict_kernels", "waves")
    assert waves(264, 2, lambda blocks: 10.0) == 10
    assert waves(265, 2, lambda blocks: 10.0) == 20


def test_a_panel_moves_its_own_tokens_and_those_that_it_sums_over(part):
    """Float32 of 4,096 tokens with one head of one channel: 512 tokens of `out`, and 3 x 512 of `k`."""
    moved, Launch = part("predict_kernels", "moved"), part("kernel_report", "Launch")
    system, meta = namedtuple("System", "k"), namedtuple("Meta", "BACKWARDS")
    place = namedtuple("Place", "panel end T")
    given = {"system": system(torch.empty(1, 4096, 1, 1)), "out": torch.empty(1, 4096, 1, 1), "meta": meta(False)}
    assert moved(Launch("normalizer_kernel", None, given, {}, (1,))) == 4 * 2 * 4096
    panel = {**given, "place": place(1024, 1536, 4096)}
    assert moved(Launch("gather_kernel", None, panel, {}, (1,))) == 4 * (512 + 3 * 512)
    assert moved(Launch("substitute_kernel", None, panel, {}, (1,))) == 4 * 2 * 512
