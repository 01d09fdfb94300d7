"""Which layers or heads keep their attention: the words for it, and the rankings."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from cases import random_tokens
from comparing import in_float64
from hf_memory import conversion
from hf_memory.conversion import (
    GoalNotReached,
    Keep,
    Recipe,
    Run,
    Schedule,
    carry_over,
    choose,
    make_student,
    resolve,
    smallest_student,
)
from hf_memory.conversion.choosing import ranked_heads
from hf_memory.conversion.defaults import WINDOW
from hf_memory.conversion.stages.divergence import divergence
from hf_memory.conversion.students.heads import (
    layers_by_heads,
    passages,
    rank_heads_by_predictions,
    rank_heads_by_retrieval,
    ranked,
    window_divergences,
)
from hf_memory.evaluation import bytes_per_token, cache_bytes
from hf_memory.files.text import Text
from teachers import convert, make_teacher, same

SCHEDULE = Schedule(steps=4, learning_rate=1e-2, batch_size=2, length=16)
BOTH_STAGES = {"transfer": SCHEDULE, "distillation": SCHEDULE}


@pytest.mark.parametrize(
    ("keep", "num_layers", "layers"),
    [
        ("1/4", 8, (3, 7)),
        ("1/4", 10, (3, 7)),
        ("3/4", 8, (1, 2, 3, 5, 6, 7)),
        ("2/7", 7, (3, 6)),
        ("1/1", 3, (0, 1, 2)),
        ("1/2", 5, (1, 3)),
        ("3,0", 4, (0, 3)),
        ("2", 4, (2,)),
        ("none", 4, ()),
        ([3, 0, 3], 4, (0, 3)),
        ((), 4, ()),
    ],
)
def test_words_for_layers(keep, num_layers, layers):
    assert Keep.parse(keep).layers_of(num_layers) == layers


@pytest.mark.parametrize(
    ("keep", "count"), [("auto", 2), ("auto:1/2", 5), ("auto:1/99", 1), ("1/4", 0), ((0,), 0)]
)
def test_how_many_layers_auto_keeps(keep, count):
    assert Keep.parse(keep).count(10) == count


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ("some", "keep must be none, .*, got 'some'"),
        ("0,4", r"keep must name layers from 0 to 3, got \[0, 4\]"),
        ("1/5", "keep must be a fraction that keeps at least one of 4 layers, got '1/5'"),
        ("5/4", "keep must have a fraction from 0 to 1 such as 1/4, got '5/4'"),
        ("1/0", "got '1/0'"),
        ("auto", "only convert can rank layers, got 'auto'"),
    ],
)
def test_wrong_words_are_explained(keep, message):
    with pytest.raises(ValueError, match=message):
        Keep.parse(keep).layers_of(4)


ALONE = {"num_kept_tokens": 0, "cache_bits": None}  # a window


@pytest.mark.parametrize("words", ["none", "0,3", "1/4", "auto", "auto:1/8", "heads:1/11"])
def test_what_is_kept_is_written_as_it_was_read(words):
    assert str(Keep.parse(words)) == words


def test_what_is_kept_is_one_value_however_it_is_written():
    assert Keep.parse("auto") == Keep.parse("auto:2/8")
    assert Keep.parse("none") == Keep.parse(())
    assert Keep.parse("3,0") == Keep.parse([0, 3, 3])
    assert Recipe(keep="1/2") == Recipe(keep=Keep.parse("1/2"))


def test_layers_come_by_the_sum_of_their_heads_and_not_by_their_best_head():
    scores = torch.tensor([[5.0, 0.0, 0.0], [3.0, 3.0, 3.0], [2.0, 2.0, 2.0]])
    assert layers_by_heads(ranked(scores)) == [1, 2, 0]


@pytest.mark.parametrize(("window", "between"), [(0, 100), (130, 130), (900, 150)])
def test_what_stands_between_two_readings_is_text_from_elsewhere(window, between):
    """As many tokens as two passages, or as a window, up to half of a text."""
    first, middle, last = passages(Text.of(torch.arange(400)), window)
    passage = [*range(50)]
    other = [*range(50 + between, 50 + 2 * between)]
    assert first[0].tolist() == [*passage, *other, *passage]
    for row, start in ((middle, (300 - 2 * between) // 2), (last, 300 - 2 * between)):
        assert (row - first).unique().tolist() == [start]


def test_a_conversion_chooses_its_layers_and_can_be_resumed(tmp_path):
    teacher = make_teacher()
    tokens = random_tokens(200)
    made = convert(teacher, tokens, keep="auto:1/2", run=Run(tmp_path), **BOTH_STAGES)
    assert made.plan.kept_layers == (
        layers_by_heads(rank_heads_by_predictions(teacher, tokens, window=WINDOW))[0],
    )
    assert made.student.config.layer_types[made.plan.kept_layers[0]] == "full_attention"
    again = convert(teacher, tokens, keep="auto:1/2", run=Run(tmp_path), **BOTH_STAGES)
    assert same(again.student, made.student)
    chosen = convert(teacher, tokens, keep=made.plan.kept_layers, **BOTH_STAGES)
    assert same(chosen.student, made.student)


def test_the_steps_of_a_conversion_are_those_of_one_call():
    teacher = make_teacher()
    tokens = random_tokens(1, 400)[0]
    recipe = Recipe(keep="heads:1/4", options={"sliding_window": 6}, **BOTH_STAGES)
    made = conversion.convert(teacher, tokens, recipe)
    draft = resolve(recipe, teacher.config, tokens)
    choice = choose(teacher, tokens, draft)
    final = draft.with_choice(choice)
    assert not draft.is_final
    assert final.is_final
    assert choice == made.plan.choice
    assert final.student.to_dict() == made.plan.student.to_dict()
    assert choose(teacher, tokens, final) is choice


def test_a_final_plan_makes_the_same_student_without_a_ranking():
    teacher = make_teacher()
    tokens = random_tokens(1, 400)[0]
    recipe = Recipe(keep="auto:1/2", options={"sliding_window": 6, "attention_sinks": True})
    recipe = replace(recipe, **BOTH_STAGES)
    told = []
    made = conversion.convert(teacher, tokens, recipe)
    again = conversion.convert(teacher, tokens, made.plan, Run(report=told.append))
    assert not any("ranking" in progress.task for progress in told)
    assert same(again.student, made.student)


def test_heads_that_retrieve_most_are_found():
    """A head whose queries match the key of the token after an earlier reading is put first."""
    teacher = make_teacher()
    scores = rank_heads_by_retrieval(teacher, random_tokens(1, 400)[0])
    config = teacher.config
    assert len(scores) == config.num_hidden_layers * config.num_key_value_heads
    assert [x.score for x in scores] == sorted((x.score for x in scores), reverse=True)
    assert all(0 <= x.score <= 1 for x in scores)
    assert teacher.config._attn_implementation == make_teacher().config._attn_implementation


@pytest.mark.parametrize(
    ("to", "longest", "expected"),
    [
        ("attention", None, ("hf_memory_transformer", {"sliding_heads"})),
        ("gated", 9, ("hf_memory_gated", {"sliding_memory"})),
        ("deltanet", None, ("hf_memory_deltanet", {"sliding_memory"})),
    ],
)
def test_a_fraction_of_the_heads_keeps_everything(to, longest, expected):
    teacher = make_teacher()
    tokens = random_tokens(1, 400)[0]
    kept = {
        "sliding_window": 6,
        "full_attention_window": longest,
        **(ALONE if to == "attention" else {}),
    }
    made = convert(teacher, tokens, to=to, keep="heads:1/4", **BOTH_STAGES, **kept)
    config = made.student.config
    heads = config.num_hidden_layers * config.num_key_value_heads
    assert sum(map(len, config.full_attention_heads)) == heads // 4
    model_type, layer_types = expected
    assert config.model_type == model_type
    assert {*config.layer_types} == layer_types
    assert config.sliding_window == 6
    assert config.num_sink_tokens == 4
    assert (bytes_per_token(config) == 0) is (longest is not None)
    best = rank_heads_by_predictions(teacher, tokens, window=6, first=4)[0]
    assert best.head in config.full_attention_heads[best.layer]


@pytest.mark.parametrize(
    ("window", "stays"), [({}, True), ({"sliding_window": 4}, True), ({"sliding_window": 3}, False)]
)
def test_layers_that_have_windows_keep_them_beside_layers_that_get_some(window, stays):
    teacher = make_teacher("gemma3")
    tokens = random_tokens(1, 400)[0]
    made = convert(teacher, tokens, to="attention", keep="heads:1/2", **BOTH_STAGES, **window)
    config = made.student.config
    assert config.layer_types == [
        "sliding_attention" if stays else "sliding_heads",
        "sliding_heads",
    ]
    assert config.sliding_window == window.get("sliding_window", teacher.config.sliding_window)
    if stays:  # one of the heads that see everything in the teacher
        assert [len(heads) for heads in config.full_attention_heads] == [0, 1]


@pytest.mark.parametrize("option", ["attention_sinks", None])
def test_a_ranking_shows_the_first_tokens_where_something_stands_for_them(option):
    teacher = make_teacher()
    tokens = random_tokens(1, 400)[0]
    options = {"sliding_window": 6, **ALONE} | ({option: True} if option else {})
    recipe = Recipe(keep="heads:1/4", options=options, transfer=SCHEDULE, distillation=SCHEDULE)
    found = ranked_heads(teacher, tokens, resolve(recipe, teacher.config, tokens))
    assert found == rank_heads_by_predictions(teacher, tokens, window=6, first=4)
    assert found != rank_heads_by_predictions(teacher, tokens, window=6)


def test_layers_of_a_student_without_memory_are_those_that_predictions_need():
    teacher = make_teacher()
    tokens = random_tokens(1, 400)[0]
    made = convert(
        teacher,
        tokens,
        to="attention",
        keep="auto:1/2",
        sliding_window=6,
        attention_sinks=True,
        **ALONE,
    )
    sums = [0.0] * teacher.config.num_hidden_layers
    for score in rank_heads_by_predictions(teacher, tokens, window=6, first=4):
        sums[score.layer] += score.score
    assert made.plan.kept_layers == (sums.index(max(sums)),)
    kinds = {0: "sliding_heads"} | dict.fromkeys(made.plan.kept_layers, "full_attention")
    assert made.student.config.layer_types == [
        kinds.get(i, "sliding_heads") for i in range(len(sums))
    ]
    assert made.losses.keys() == {
        "attention transfer",
        "distillation",
    }  # sinks are not what a teacher has


def test_transfer_leaves_all_but_a_memory_beside_a_window_alone():
    teacher = make_teacher()
    tokens = random_tokens(1, 400)[0]
    beside = {"sliding_window": 6, "num_memory_slots": 4}
    none = Schedule(steps=0, learning_rate=1e-3, length=16)
    before, after = (
        convert(
            teacher, tokens, to="deltanet", transfer=schedule, distillation=none, **beside
        ).student.state_dict()
        for schedule in (none, SCHEDULE)
    )
    changed = {
        name.split(".mixer.")[1].split(".")[0]
        for name in before
        if not torch.equal(before[name], after[name])
    }
    assert changed == {"far"}


def test_heads_are_ranked_by_what_a_window_in_them_changes():
    """Scores add up to KL(teacher || windows in all heads), and a head without any say has none."""
    teacher = in_float64(make_teacher())
    tokens = random_tokens(1, 400)[0]
    config = teacher.config
    output = teacher.model.layers[0].self_attn.o_proj.weight
    with torch.no_grad():
        output[:, : output.shape[1] // config.num_key_value_heads] = 0
    rows = [(x, torch.arange(20, x.shape[1])) for x in passages(Text.of(tokens))]
    scores = window_divergences(teacher, rows, window=6, first=1)
    assert scores.shape == (config.num_hidden_layers, config.num_key_value_heads)
    assert scores[0, 0] == 0
    student = make_student(teacher, "attention", sliding_window=6, num_sink_tokens=1, **ALONE)
    carry_over(student.double(), teacher)
    with torch.no_grad():
        kl = [
            divergence(student(x).logits[0, y], teacher(x).logits[0, y]).item() / len(y)
            for x, y in rows
        ]
    assert scores.sum().item() == pytest.approx(sum(kl) / len(kl), rel=0.1)


def test_heads_that_predictions_need_are_ranked_on_passages_longer_than_the_window():
    """A passage and its second reading are a window apart; if a window sees all that is read, retrieval decides."""
    teacher = make_teacher()
    tokens = random_tokens(1, 400)[0]
    rows = list(passages(Text.of(tokens), 120))
    assert [x.shape for x in rows] == [(1, 2 * 50 + 120)] * 3
    assert all(torch.equal(x[0, :50], x[0, 170:]) for x in rows)
    scores = window_divergences(
        teacher, [(x, torch.arange(220)) for x in rows], window=120, first=1
    )
    assert rank_heads_by_predictions(teacher, tokens, window=120, first=1) == ranked(scores)
    assert rank_heads_by_predictions(teacher, tokens, window=400) == rank_heads_by_retrieval(
        teacher, tokens
    )


@pytest.mark.parametrize("length", [16, 32])
def test_a_goal_is_a_distance_on_windows_of_the_length_of_training(length):
    teacher = make_teacher()
    tokens = random_tokens(1, 400)[0]
    schedule = SCHEDULE._replace(length=length)
    stages = {"transfer": schedule._replace(steps=0), "distillation": schedule._replace(steps=0)}
    options = {"sliding_window": 6, "num_kept_tokens": 0}
    plan = resolve(Recipe(options=options, **stages, goal=10.0), teacher.config, tokens)
    choice = smallest_student(plan, teacher, tokens)
    (found,) = choice.tried
    made = convert(teacher, tokens, to="attention", keep=found.keep, **stages, **options)
    rows = tokens[-6 * length :].view(6, length)
    with torch.no_grad():
        logits = [model(rows).logits[:, :-1].log_softmax(-1) for model in (made.student, teacher)]
    kl = F.kl_div(*logits, reduction="none", log_target=True).sum(-1).mean().item()
    assert found.kl == pytest.approx(kl, rel=1e-4)


def test_the_cache_of_a_student_for_a_goal_is_counted_in_its_bits():
    teacher = make_teacher()
    tokens = random_tokens(1, 400)[0]
    sizes = {}
    for bits in (None, 8, 4):
        options = {"sliding_window": 6, "cache_bits": bits}
        draft = resolve(Recipe(options=options, goal=10.0), teacher.config, tokens)
        choice = smallest_student(draft, teacher, tokens)
        plan = draft.with_choice(choice)
        (found,) = choice.tried
        sizes[bits] = found.cache
        ours, theirs = (copy.deepcopy(x) for x in (plan.student, teacher.config))
        ours.dtype = theirs.dtype = torch.bfloat16
        assert found.cache == cache_bytes(ours, 8192) / cache_bytes(theirs, 8192)
    assert sizes[4] < sizes[8] < sizes[None]


def test_the_smallest_student_that_reaches_a_goal_is_found():
    teacher = make_teacher()
    tokens = random_tokens(1, 400)[0]
    options = {"sliding_window": 6, "num_kept_tokens": 0}

    def tried_for(goal):
        plan = resolve(Recipe(options=options, goal=goal), teacher.config, tokens)
        return smallest_student(plan, teacher, tokens).tried

    far = tried_for(10.0)
    assert [x.keep for x in far] == ["heads:1/25"]
    near = tried_for(far[0].kl * 0.99)
    assert [x.cache for x in near] == sorted(x.cache for x in near)
    assert all(x.kl > far[0].kl * 0.99 for x in near[:-1])
    assert near[-1].kl <= far[0].kl * 0.99
    assert near[0].kl == far[0].kl
    with pytest.raises(GoalNotReached, match="goal must be a KL that a student reaches") as failed:
        tried_for(1e-9)
    assert failed.value.tried[: len(near)] == near
    nearest = min(failed.value.tried, key=lambda x: x.kl)
    assert f"{nearest.keep} with a window of 6 and 0 kept tokens, has" in str(failed.value)
