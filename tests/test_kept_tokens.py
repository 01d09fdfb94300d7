"""How many older tokens each head of a student keeps."""

import copy
import json
from contextlib import ExitStack

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from cases import random_tokens
from hf_memory.conversion import (
    Recipe,
    Run,
    Schedule,
    carry_over,
    convert,
    make_student,
    plan_rows,
    resolve,
)
from hf_memory.conversion.students.kept_tokens import (
    errors_of,
    kept_by_head,
    numbers_of,
    rows_of,
)
from hf_memory.evaluation import cache_bytes
from hf_memory.files.text import Text
from teachers import make_teacher

OPTIONS = {"sliding_window": 4, "num_sink_tokens": 1, "num_kept_tokens": 45, "kept_block_size": 4}
LEVELS = [16, 32, 64, 128]  # of 45 tokens
T = 160
HEADS = 4  # of a Llama of tests: two in each of two layers


def llama(**options):
    """Another teacher of the sizes of tests."""
    config = copy.deepcopy(make_teacher().config)
    for name, value in options.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def make(teacher, **options):
    student = make_student(teacher, "attention", **{**OPTIONS, "cache_bits": None, **options})
    carry_over(student, teacher)
    return student.eval()


def deaf(teacher, layer, head):
    """The teacher, all of whose key-value heads but one are not heard."""
    heads = teacher.config.num_attention_heads // teacher.config.num_key_value_heads
    for i, of_layer in enumerate(teacher.model.layers):
        heard = of_layer.self_attn.o_proj.weight.data.unflatten(1, (2, heads, -1))
        for h in range(2):
            if (i, h) != (layer, head):
                heard[:, h] = 0
    return teacher


@pytest.mark.parametrize(("layer", "head"), [(0, 1), (1, 0)])
def test_the_one_head_that_predictions_need_keeps_most(layer, head):
    teacher = deaf(make_teacher("llama"), layer, head)
    student = make(teacher).config
    found = kept_by_head(teacher, random_tokens(3 * T), student, length=T)
    expected = [[16 + 4, 16], [16, 16]]  # what is left goes to any head
    expected[layer][head] = 128
    assert found == expected
    assert sum(map(sum, found)) == 45 * HEADS


def test_full_heads_are_not_counted_and_keep_their_number():
    teacher = make_teacher("llama")
    student = make(teacher, full_attention_heads=[[0], []]).config
    found = kept_by_head(teacher, random_tokens(3 * T), student, length=T)
    others = [found[0][1], *found[1]]
    assert found[0][0] == 45
    assert len([number for number in others if number not in LEVELS]) <= 1
    assert sum(others) == 3 * 45
    assert min(others) >= LEVELS[0]
    assert max(others) <= LEVELS[-1]


def test_texts_that_heads_see_whole_leave_equal_numbers():
    student = make(make_teacher("llama")).config
    found = kept_by_head(make_teacher("llama"), random_tokens(40), student, length=20)
    assert found == []


def test_no_head_sees_more_than_the_window_of_its_teacher():
    mistral = copy.deepcopy(make_teacher("mistral").config)
    mistral.sliding_window = 80
    teacher = deaf(AutoModelForCausalLM.from_config(mistral).eval(), 0, 0)
    student = make(teacher).config
    found = kept_by_head(teacher, random_tokens(3 * T), student, length=T)
    room = 80 - OPTIONS["sliding_window"] - OPTIONS["num_sink_tokens"] - OPTIONS["kept_block_size"]
    assert found[0][0] == room
    assert sum(map(sum, found)) <= 45 * HEADS


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([[9, 1, 1], [9, 5, 1]], [20, 40]),
        ([[9, 8, 0], [9, 8, 7]], [40, 20]),  # not convex: both steps at once
        ([[9, 9.5, 9.5], [9, 5, 4]], [20, 40]),  # more tokens are never worse
        ([[9, 5, 4], [0, 0, 0]], [40, 20]),
    ],
    ids=["few and many", "not convex", "noise", "no error"],
)
def test_tokens_go_where_they_remove_most_error(errors, expected):
    columns = torch.tensor(errors, dtype=torch.float64).T
    assert numbers_of(dict(zip((10, 20, 40), columns)), 60) == expected


def test_what_is_left_of_the_total_goes_to_the_next_step():
    errors = {10: [9.0, 9.0, 9.0], 20: [8.9, 8.0, 9.0], 40: [0.0, 7.9, 9.0]}
    errors = {number: torch.tensor(x) for number, x in errors.items()}
    assert numbers_of(errors, 59) == [39, 10, 10]


def test_one_head_alone_keeps_what_all_keep():
    errors = {number: torch.tensor([1.0 / number]) for number in (16, 32, 64, 128)}
    assert numbers_of(errors, 45) == [45]


@pytest.mark.parametrize("eviction", ["received_attention", "change_of_output"])
def test_errors_are_the_changes_of_a_student_by_the_gradient_of_drawn_labels(eviction):
    """With one layer, a student reads what its teacher reads there."""
    teacher = llama(num_hidden_layers=1).double()
    row = random_tokens(T)[None]
    student = make(teacher, eviction=eviction, num_kept_tokens=16).double()
    found = errors_of(teacher, row, student.config, [16, 200], seed=3)
    seen = []
    with ExitStack() as hooks:
        for layer in (teacher.model.layers[0].self_attn, student.model.layers[0].mixer):
            keep = lambda _, given: seen.append(given[0])  # noqa: E731
            hooks.enter_context(layer.o_proj.register_forward_pre_hook(keep))
        logits = teacher(row).logits[0]
        student(row)
    dice = torch.Generator().manual_seed(3)
    labels = torch.multinomial(logits.softmax(-1), 1, generator=dice)[:, 0]
    (gradient,) = torch.autograd.grad(F.cross_entropy(logits, labels, reduction="sum"), seen[0])
    change = ((seen[1] - seen[0]) * gradient)[0]
    expected = change.unflatten(1, (2, -1)).sum(-1).square().sum(0)
    assert expected.min() > 0
    # both turn keys by angles in float32, and each rounds them in its own way
    assert torch.allclose(found[16], expected, rtol=1e-5, atol=0)
    assert found[200].max() < 1e-20


def test_rows_are_prose_a_passage_again_and_pieces_again():
    text = Text(torch.arange(1000), start=torch.tensor([7777]))
    rows = rows_of(text, 256)
    assert [row.shape for row in rows] == [(1, 256)] * 4
    assert all(row[0, 0] == 7777 for row in rows)
    first, last, passage, pieces = (row[0] for row in rows)
    assert torch.equal(first[1:], torch.arange(255))
    assert len(last.unique()) == 256
    assert torch.equal(passage[-64:], passage[1:65])
    assert len(pieces.unique()) == 256 - 64
    for piece in pieces[-64:].split(32):
        assert torch.equal(piece.diff(), torch.ones(31, dtype=torch.long))


def test_a_conversion_gives_heads_what_they_need_and_finds_its_choice_again(tmp_path):
    teacher = deaf(make_teacher("llama"), 1, 0)
    tokens = random_tokens(3 * T)
    schedule = Schedule(1, 1e-3, batch_size=1, length=T)
    how = {
        "keep": "none",
        "options": OPTIONS,
        "transfer": schedule._replace(steps=0),
        "distillation": schedule,
    }
    alike, by_head = (Recipe(**how, kept_by_head=x) for x in (None, True))
    seen = []
    run = Run(tmp_path, report=lambda progress: seen.append(progress.task))
    made = convert(teacher, tokens, resolve(by_head, teacher.config, tokens), run)
    kept = [[16 + 4, 16], [128, 16]]
    assert made.student.config.num_kept_tokens == kept
    assert made.plan.recipe.options["num_kept_tokens"] == OPTIONS["num_kept_tokens"]
    assert made.plan.recipe.kept_by_head
    assert "45 of each head in the mean" in dict(plan_rows(made.plan))["older tokens kept"]
    equal = resolve(alike, teacher.config, tokens)
    assert equal.is_final
    before, after = (cache_bytes(x, 1000) for x in (equal.student, made.student.config))
    assert before == after
    weighing = "weighing what heads keep"
    rows, layers = 4, 2
    assert seen.count(weighing) == rows * layers + 1
    choice = json.loads((tmp_path / "choice.json").read_text())["choice"]
    assert choice["kept_tokens"] == kept
    again = convert(teacher, tokens, resolve(by_head, teacher.config, tokens), run)
    assert again.student.config.num_kept_tokens == kept
    assert seen.count(weighing) == rows * layers + 1


def test_numbers_by_head_are_the_default_where_nobody_says_how_many():
    config = make_teacher("llama").config
    assert resolve(Recipe(), config).recipe.kept_by_head
    assert resolve(Recipe(size="small"), config).recipe.kept_by_head
    given = {"num_kept_tokens": 7}
    assert not resolve(Recipe(options=given), config).recipe.kept_by_head
    assert resolve(Recipe(options=given, kept_by_head=True), config).recipe.kept_by_head
    assert not resolve(Recipe(kept_by_head=False), config).recipe.kept_by_head
    assert not resolve(Recipe(to="deltanet"), config).recipe.kept_by_head


@pytest.mark.parametrize(
    ("options", "given"),
    [({"num_kept_tokens": 0}, "0"), ({"num_kept_tokens": [4, 8]}, r"\[4, 8\]")],
)
def test_there_must_be_one_number_to_divide(options, given):
    recipe = Recipe(kept_by_head=True, options=options)
    message = f"num_kept_tokens must be one number, the mean, with kept_by_head, got {given}"
    with pytest.raises(ValueError, match=message):
        resolve(recipe, make_teacher("llama").config)
