"""How many older tokens each layer of a student keeps."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from cases import random_tokens
from hf_memory.conversion import Recipe, Schedule, convert, make_student, plan_rows, resolve
from hf_memory.conversion.students import kept_tokens
from hf_memory.conversion.students.kept_tokens import spread_kept_tokens
from hf_memory.conversion.students.weights import carry_over
from hf_memory.evaluation import cache_bytes
from hf_memory.mixers.windowed import WindowedMixer
from teachers import make_teacher

T = 32
OPTIONS = {"sliding_window": 4, "num_sink_tokens": 1, "num_kept_tokens": 8, "kept_block_size": 4}


def make(teacher, **options):
    student = make_student(teacher, "attention", **{**OPTIONS, **options})
    carry_over(student, teacher)
    return student.eval()


@pytest.mark.parametrize(
    ("distances", "heads", "expected"),
    [
        (
            [8, 9, 7.5, 8.1, 4],
            [[], []],
            [2, 14],
        ),  # the second layer gains most by more, and the first loses least
        (
            [8, 9, 7.5, 8.1, 4],
            [[], [1]],
            [2, 20],
        ),  # of its one head; both of the first layer give 6
        (
            [8, 8.1, 6, 8.3, 7.9],
            [[], []],
            [14, 2],
        ),  # more tokens bring the first layer more than the same ones
        ([8, 8, 8, 8, 8], [[], []], None),
    ],
    ids=["few and many", "a full head", "not convex", "no difference"],
)
def test_tokens_go_where_the_divergence_falls_most(distances, heads, expected, monkeypatch):
    """With a distance of the student, then of each layer with a quarter of the tokens, and with 2.5 times as many."""
    teacher = make_teacher("llama")
    student = make(teacher, full_attention_heads=heads)
    measured = iter(distances)
    monkeypatch.setattr(kept_tokens, "divergence", lambda *_: torch.tensor(float(next(measured))))
    found = spread_kept_tokens(student, teacher, random_tokens(3 * T), length=T)
    assert expected is None or found == expected
    near = [2 - len(layer) for layer in heads]
    assert (
        8 * sum(near) - max(near) < sum(n * kept for n, kept in zip(near, found)) <= 8 * sum(near)
    )
    mixers = [x for x in student.modules() if isinstance(x, WindowedMixer)]
    assert [x.parts[0].past.kept for x in mixers] == [8, 8]


@pytest.mark.parametrize("bits", [None, 8])
def test_layers_are_measured_as_students_that_keep_so_many(monkeypatch, bits):
    teacher = make_teacher("llama").double()
    seen = []
    divergence = kept_tokens.divergence
    monkeypatch.setattr(kept_tokens, "divergence", lambda s, t: seen.append(s) or divergence(s, t))
    tokens = random_tokens(T)
    spread_kept_tokens(make(teacher, cache_bits=bits), teacher, tokens, length=T)
    for kept, found in zip(([8, 8], [2, 8], [20, 8], [8, 2], [8, 20]), seen, strict=True):
        with torch.no_grad():
            student = make(teacher, num_kept_tokens=kept, cache_bits=bits)
            assert torch.equal(found, student(tokens[None]).logits[0])


def test_a_layer_that_keeps_everything_leaves_the_others_their_places(monkeypatch):
    """The last layer gains from more tokens, and the middle one loses nothing by fewer."""
    config = make_teacher("llama").config
    config.num_hidden_layers = 3
    teacher = AutoModelForCausalLM.from_config(config).eval()
    student = make(teacher, full_attention_heads=[[0, 1], [], []])
    measured = iter([8.0, 8.0, 8.0, 9.0, 4.0])
    monkeypatch.setattr(kept_tokens, "divergence", lambda *_: torch.tensor(next(measured)))
    found = spread_kept_tokens(student, teacher, random_tokens(3 * T), length=T)
    assert found == [8, 2, 14]


def test_a_student_whose_layers_keep_different_numbers():
    teacher = make_teacher("llama")
    tokens = random_tokens(8 * T)
    schedule = Schedule(1, 1e-3, batch_size=1, length=T)
    how = {
        "keep": "heads:1/4",
        "options": OPTIONS,
        "transfer": schedule._replace(steps=0),
        "distillation": schedule,
    }
    equal, spread = (Recipe(**how, spread_kept=x) for x in (False, True))
    made = convert(teacher, tokens, resolve(spread, teacher.config, tokens))
    assert "8 of each head in the mean" in dict(plan_rows(made.plan))["older tokens kept"]
    kept = made.student.config.num_kept_tokens
    plan = resolve(equal, teacher.config, tokens)
    assert kept == made.plan.student.num_kept_tokens
    assert len(set(kept)) == 2
    before, after = (cache_bytes(config, 100) for config in (plan.student, made.student.config))
    assert 0 <= before - after <= 2 * cache_bytes(plan.student, 100) / 100
    with pytest.raises(ValueError, match="num_kept_tokens must be one number to spread, got 0"):
        resolve(Recipe(spread_kept=True, options={"num_kept_tokens": 0}), teacher.config, tokens)
