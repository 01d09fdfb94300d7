"""What a conversion decides before it begins: what it refuses, what it shows, and what it says of itself afterwards."""

import math
import os
from dataclasses import replace

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, MistralConfig

from cases import PRODUCT_KEYS
from hf_memory import DeltaNetConfig, conversion
from hf_memory.cli.progress import Lines
from hf_memory.conversion import (
    SIZES,
    Recipe,
    Run,
    Schedule,
    check_run,
    make_student,
    plan_rows,
    resolve,
    results_of,
)
from hf_memory.conversion.describe import ways_to_serve
from hf_memory.conversion.report import model_card
from hf_memory.conversion.students import STUDENTS
from hf_memory.conversion.students.starts import start_near
from hf_memory.evaluation.efficiency import BYTES, READ, WRITTEN, cache_share
from hf_memory.evaluation.scores import CANNOT
from hf_memory.progress import Progress
from teachers import SCHEDULE, convert, make_teacher, text

NONE = SCHEDULE._replace(steps=0)
STAGES = {"transfer": SCHEDULE, "distillation": SCHEDULE}
MEMORIZING = {"past": "memorizing", "memory_join": "attention", "sliding_window": 12}
ALONE = {"num_kept_tokens": 0, "cache_bits": None}  # a window
FIXED = "a fixed size"
GROWS = "grows with the text as fast as its teacher's"
TRANSFER = "attention transfer"
KL = "KL divergence of the logits"


def planned(**recipe):
    return resolve(
        Recipe(**{"to": "linear", "keep": "none"} | STAGES | recipe), make_teacher().config, text()
    )


def test_one_step_of_one_window_is_in_the_singular():
    one = SCHEDULE._replace(steps=1, batch_size=1)
    assert str(one).startswith("1 step of 1 window of")


@pytest.mark.parametrize(
    ("recipe", "true", "false"),
    [
        ({}, (FIXED, TRANSFER, KL), (GROWS, "trained on the text", "cross-entropy with")),
        (
            {"to": "deltaformer"},
            (
                "grows with the text at 106% of",
                "its teacher before any training",
                "trained on the text",
            ),  # and positions
            (FIXED, TRANSFER, KL),
        ),
        (
            {"to": "titans"},
            (FIXED, "its teacher before any training", "trained on the text"),
            (TRANSFER, KL),
        ),
        (
            {"to": "titans", "options": {"sliding_window": 4}},
            (FIXED, TRANSFER, KL),
            ("before any training",),
        ),
        ({"cross_entropy": 1.0}, (TRANSFER, "trained on the text, without"), (KL, "distillation")),
        (
            {"cross_entropy": 0.25},
            (TRANSFER, KL, "cross-entropy with the text with a weight of 0.25"),
            ("trained on the text",),
        ),
        (
            {"transfer": NONE, "distillation": NONE},
            ("not trained after that",),
            (TRANSFER, KL, "distillation"),
        ),
        ({"keep": (1,)}, ("grows with the text at 50% of the rate of its teacher's",), (FIXED,)),
        ({"fine_tuning": SCHEDULE, "lora_rank": 2}, ("fine-tuned on the text", "LoRA"), ()),
        (
            {"train": "new"},
            ("the parts that its teacher does not have were trained to predict",),
            ("the whole student",),
        ),
        (
            {"train": "attention"},
            ("without its embeddings and feed-forward layers was trained",),
            ("the whole student",),
        ),
        (
            {"train": "lora:2"},
            ("and LoRA of rank 2 of the others, were trained",),
            ("the whole student",),
        ),
    ],
)
def test_a_card_says_what_was_done_and_no_more(recipe, true, false):
    card = model_card(results_with(planned(**recipe), row_of(2.0))).content
    about = card[: card.index("## Results")]  # what follows explains columns
    assert [words for words in true if words not in about] == []
    assert [words for words in false if words in about] == []


@pytest.mark.parametrize("steps", [0, 1])
def test_a_card_tells_of_training_only_what_was_trained(steps):
    stage = SCHEDULE._replace(steps=steps)
    card = model_card(results_with(planned(transfer=NONE, distillation=stage), row_of(2.0))).content
    assert "it has learnt" not in card
    assert ("length of the training windows" in card) == bool(steps)
    assert "\n![by length]" in card


def row_of(recall, at=(256,), speed=2.0, low=None, high=None):
    """What was found of a model whose recall is this number, or these at each length."""
    recalls = recall if isinstance(recall, list) else [recall] * len(at)
    figures = {"perplexity": ("perplexity",), "speed": (BYTES, READ, WRITTEN)}
    found = {
        task: {str(x): {name: {"value": speed, "samples": [2.0]} for name in names} for x in at}
        for task, names in figures.items()
    }
    interval = {"low": low, "high": high, "samples": [2.0]}
    found["recall"] = {str(x): {"recall": {"value": y, **interval}} for x, y in zip(at, recalls)}
    return found


def results_with(plan, student, teacher=None):
    names = {"teacher": "someone/llama", "text": "random words", "training": {}}
    rows = {"teacher": teacher or student, "student": student}
    return results_of(plan, {stage.name: [] for stage in plan.stages}, rows, **names)


@pytest.mark.parametrize(
    ("recipe", "sentence"),
    [
        ({"to": "linear"}, "Its past has a size that does not grow, so it recalls less"),
        ({"to": "attention", "options": {"num_kept_tokens": 8}}, "Its past has a size that does"),
        ({"to": "linear", "keep": (1,)}, "It keeps less of older tokens than its teacher does"),
        ({"to": "deltaformer"}, ""),
    ],
)
def test_a_card_says_of_the_memory_what_is_so(recipe, sentence):
    card = model_card(results_with(planned(**recipe), row_of(2.0))).content
    limits = card[card.index("## Limits") :]
    assert sentence in limits
    assert ("recalls less" in limits) is bool(sentence)


@pytest.mark.parametrize(
    ("recalls", "at"),
    [
        ([2.0, 1.0, 0.1], 1024),
        ([2.0, 0.1, 0.1], 512),
        ([2.0, 0.1, 1.0], None),
        ([0.1, 0.1, 0.1], 256),
        ([2.0, 1.9, 1.8], None),
    ],
)
def test_a_card_says_from_where_on_a_student_recalls_nothing(recalls, at):
    lengths = (256, 512, 1024)
    results = results_with(planned(), row_of(recalls, lengths), row_of(2.0, lengths))
    card = model_card(results).content
    assert ("recalls nothing" in card) is (at is not None)
    assert at is None or f"From {at:,} tokens on the student recalls nothing" in card


def test_where_a_teacher_recalls_nothing_a_student_cannot_forget():
    lengths = (256, 512)
    results = results_with(planned(), row_of([2.0, 0.0], lengths), row_of([2.0, 0.05], lengths))
    assert "recalls nothing" not in model_card(results).content


def test_figures_of_a_card_have_intervals_and_commas():
    card = model_card(
        results_with(planned(), row_of(2.5, speed=73583.4, low=2.25, high=2.75))
    ).content
    assert "| 2.500 [2.250, 2.750] |" in card
    assert "| 73,583 | 73,583 |" in card


def test_kinds_of_questions_that_a_teacher_cannot_answer_are_a_line():
    score = {"score": {"value": 0.1, "low": 0.0, "high": 0.2, "samples": [0.1]}}
    kinds = {f"kind {i}": score | {"win and tie": {"value": CANNOT}} for i in range(18)}
    student = row_of(2.0) | {"instructions": kinds}
    teacher = row_of(2.0) | {"instructions": dict.fromkeys(kinds, score)}
    card = model_card(results_with(planned(), student, teacher)).content
    assert "The teacher answers none of 18 kinds of questions well above chance" in card
    assert "kind 3" not in card
    compared = score | {"win and tie": {"value": 1.0}, "score / teacher's": {"value": 1.0}}
    student["instructions"] = kinds | {"kind 0": compared}
    card = model_card(results_with(planned(), student, teacher)).content
    assert "| kind 0 | 0.1 [0, 0.2] | 0.1 [0, 0.2] | 1 | 1 |" in card
    assert "| kind 1 |" not in card
    assert "cannot answer well above chance: kind 1, kind 2, " in card


@pytest.mark.parametrize(
    ("recipe", "true", "false"),
    [
        (
            {"to": "deltaformer"},
            ("cannot be exported", "vLLM does not run it"),
            ("hf-memory export", "vllm serve"),
        ),
        ({"to": "gated"}, ("cannot be exported", "vllm serve FOLDER"), ("llama-server",)),
        (
            {"to": "attention", "keep": "heads:1/2"},
            ("cannot be exported", "vllm serve FOLDER"),
            ("llama-server",),
        ),
    ],
)
def test_a_card_says_how_this_model_is_served(recipe, true, false):
    said = " ".join(ways_to_serve(planned(**recipe).student))
    assert [words for words in true if words not in said] == []
    assert [words for words in false if words in said] == []


@pytest.mark.parametrize("to", [to for to in STUDENTS if to != "attention"])
def test_a_student_that_keeps_all_layers_says_how_it_is_served(to):
    said = list(ways_to_serve(planned(to=to, keep="1/1").student))
    assert "no architecture of the engines" in said[0] or "hf-memory export" in said[0]
    assert said[-1].startswith("`transformers serve")


def test_a_card_names_the_engines_of_an_export():
    said = " ".join(ways_to_serve(DeltaNetConfig(gate="scalar")))
    assert "as `qwen3_5_text` with the same logits" in said
    assert "`vllm serve served`" in said
    assert "llama-server" not in said  # values are wider than keys


@pytest.mark.parametrize(
    ("to", "kept"),
    [
        ("attention", "heads:1/11"),
        ("deltanet", "heads:1/11"),
        ("titans", "none"),
        ("transformer", "none"),
    ],
)
def test_what_is_kept_by_default_depends_on_the_family(to, kept):
    plan = resolve(Recipe(to), make_teacher().config, text(4000))
    assert str(plan.keep) == kept
    assert bool(plan.num_heads_to_rank) is (kept != "none")


@pytest.mark.parametrize(
    ("to", "options", "train"),
    [
        ("attention", {}, "attention"),
        ("attention", {"attention_sinks": True}, "attention"),
        ("deltanet", {}, "all"),
    ],
)
def test_only_attention_learns_where_the_teacher_has_all_parts(to, options, train):
    plan = resolve(Recipe(to, options=options), make_teacher("llama").config, text(4000))
    assert plan.recipe.train == train
    assert (plan.stages[-1].learned < plan.student_parameters) is (train == "attention")


DEFAULT = {
    "sliding_window": 64,
    "num_sink_tokens": 4,
    "num_kept_tokens": 371,
    "eviction": "change_of_output",
    "kept_block_size": 16,
    "cache_bits": 8,
}
LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
MIXED = {"layer_types": [*["sliding_attention"] * 5, "full_attention"], "sliding_window": 512}
TEACHERS_WITH_WINDOWS = {
    "none": LlamaConfig(**LLAMA),
    "some": Gemma3TextConfig(**LLAMA, **MIXED),
    "all": MistralConfig(**LLAMA, sliding_window=1024),
    "all, short": MistralConfig(**LLAMA, sliding_window=100),
    "all, no longer than the student's": MistralConfig(**LLAMA, sliding_window=8),
}


def made(teacher=TEACHERS_WITH_WINDOWS["none"], **recipe):
    """What a recipe makes of a teacher with long windows: the student's options, and its distillation."""
    plan = resolve(Recipe(**recipe), teacher, text(4000))
    options = {name: getattr(plan.student, name, None) for name in DEFAULT}
    return options, plan.recipe.distillation


@pytest.mark.parametrize("name", DEFAULT)
@pytest.mark.parametrize("keep", [None, "none", "auto", "1/2", "heads:1/2"])
def test_an_option_at_its_default_value_changes_nothing(name, keep):
    default = made(keep=keep)
    assert default[0] == DEFAULT
    assert made(keep=keep, options={name: DEFAULT[name]}) == default


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sliding_window", 128),
        ("num_sink_tokens", 8),
        ("num_kept_tokens", 96),
        ("num_kept_tokens", 0),
        ("kept_block_size", 32),
        ("cache_bits", None),
        ("cache_bits", 4),
        ("full_attention_window", 2560),
        ("attention_dropout", 0.5),
    ],
)
def test_an_option_changes_what_it_names(name, value):
    options, distillation = made(options={name: value})
    assert options == {**DEFAULT, **({name: value} if name in DEFAULT else {})}
    assert distillation.steps == (250 if options["num_kept_tokens"] == 0 else 20)


@pytest.mark.parametrize("to", [to for to in STUDENTS if to != "attention"])
def test_a_preset_at_its_default_value_changes_nothing(to):
    teacher = make_teacher().config
    default = resolve(Recipe(to), teacher, text(4000))
    for name, value in default.recipe.options.items():
        again = resolve(Recipe(to, options={name: value}), teacher, text(4000))
        assert again.student.to_dict() == default.student.to_dict()
        assert again.recipe == default.recipe


def test_a_window_of_none_is_not_given():
    for to in ("attention", "deltanet"):
        assert made(to=to, options={"sliding_window": None}) == made(to=to)


def test_a_recipe_that_is_changed_is_one_that_is_made_so():
    for to in STUDENTS:
        changed = replace(Recipe(), to=to)
        assert changed == Recipe(to)
        plans = [resolve(x, make_teacher().config, text(4000)) for x in (changed, Recipe(to))]
        assert plans[0].recipe == plans[1].recipe


@pytest.mark.parametrize(
    ("teacher", "layers", "options", "full_window", "keep"),
    [
        ("none", {"sliding_heads"}, DEFAULT, None, "heads:1/11"),
        (
            "some",
            {"sliding_attention", "sliding_heads"},
            DEFAULT | {"sliding_window": 512},
            None,
            "heads:2/3",
        ),
        ("all", {"sliding_heads"}, DEFAULT, 1024, "heads:1/11"),
        ("all, short", {"sliding_heads"}, DEFAULT | {"num_kept_tokens": 16}, 100, "heads:1/11"),
        (
            "all, no longer than the student's",
            {"sliding_heads"},
            DEFAULT | {"num_kept_tokens": 0, "num_sink_tokens": 0, "sliding_window": 8},
            8,
            "heads:1/11",
        ),
    ],
)
def test_a_default_is_that_of_the_teacher(teacher, layers, options, full_window, keep):
    plan = resolve(Recipe(), TEACHERS_WITH_WINDOWS[teacher], text(4000))
    assert {*plan.student.layer_types} == layers
    assert {name: getattr(plan.student, name) for name in DEFAULT} == options
    assert plan.student.full_attention_window == full_window
    assert str(plan.keep) == keep
    assert plan.recipe.distillation.steps == (20 if options["num_kept_tokens"] else 250)
    assert cache_share(plan.student, plan.teacher, 32768) <= 1


@pytest.mark.parametrize(
    ("recipe", "teacher", "said"),
    [
        ({"options": {"attention_sinks": True}}, "none", "num_sink_tokens is 0, since"),
        ({"options": {"num_kept_tokens": 0}}, "none", "distillation has 250 steps, since"),
        ({}, "some", "keep is heads:2/3, since few layers"),
        ({}, "all", "full_attention_window is 1024, since no layer"),
        ({"transfer": SCHEDULE}, "none", "--transfer has no effect"),
        ({"to": "gated", "options": {"gate": "mamba2"}}, "none", "output_gate is its default"),
        ({"to": "titans", "options": {"variant": "mal"}}, "none", "memory_gate is its default"),
    ],
)
def test_a_plan_says_what_changed_a_default_and_why(recipe, teacher, said):
    rows = plan_rows(resolve(Recipe(**recipe), TEACHERS_WITH_WINDOWS[teacher], text(4000)))
    notes = [words for name, words in rows if name == "note"]
    assert any(said in words for words in notes)


def test_a_usual_plan_has_nothing_to_note():
    for to in STUDENTS:
        rows = plan_rows(resolve(Recipe(to), make_teacher().config, text(4000)))
        assert [words for name, words in rows if name == "note"] == []


def test_a_plan_has_all_options_of_its_student():
    rows = dict(
        plan_rows(
            resolve(Recipe(options={"cache_bits": 4}), TEACHERS_WITH_WINDOWS["none"], text(4000))
        )
    )
    assert rows["options given"] == "cache_bits=4"
    assert "sliding_window=64, num_sink_tokens=4, num_kept_tokens=371" in rows["options by default"]


def test_a_resolved_recipe_is_its_own_default():
    """What is written of a run makes the same run under other defaults."""
    for to, options in (("attention", {}), ("deltanet", {"gate": "scalar"}), ("titans", {})):
        plan = resolve(Recipe(to, options=options), make_teacher().config, text(4000))
        again = resolve(plan.recipe, plan.teacher, text(4000))
        assert again.recipe == plan.recipe
        assert again.stages == plan.stages
        decided = plan.recipe.keep, plan.recipe.train, plan.recipe.cross_entropy
        assert None not in {*decided, *plan.recipe.transfer, *plan.recipe.distillation}


def test_heads_that_are_given_are_not_chosen_again():
    heads = [[], [1], [], [], [0], []]
    plan = resolve(
        Recipe(options={"full_attention_heads": heads}), TEACHERS_WITH_WINDOWS["none"], text(4000)
    )
    assert plan.student.full_attention_heads == heads
    assert plan.num_heads_to_rank == 0
    given = {"full_attention_heads": heads, "num_kept_tokens": 371}
    assert resolve(Recipe(options=given), TEACHERS_WITH_WINDOWS["none"], text(4000)).is_final
    with pytest.raises(ValueError, match="full_attention_heads must be None with keep=heads:1/4"):
        made(keep="heads:1/4", options={"full_attention_heads": heads})


@pytest.mark.parametrize("keep", ["1/2", "auto", "0,1", (1,)])
def test_a_size_that_does_not_grow_keeps_no_whole_layers(keep):
    teacher = make_teacher().config
    for size in ("small", "smallest", "constant"):
        with pytest.raises(ValueError, match=f"keep must be heads .* with size={size}, which no"):
            resolve(Recipe(size=size, keep=keep), teacher)
        assert resolve(Recipe(size=size, keep="none"), teacher).student.layer_types
    assert resolve(Recipe(size="near", keep=keep), teacher).student.layer_types


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", TEACHERS_WITH_WINDOWS)
def test_a_size_in_a_word_fits_each_teacher(size, name):
    teacher = TEACHERS_WITH_WINDOWS[name]
    plan = resolve(Recipe(size=size), teacher, text(4000))
    if name == "none":
        assert [plan.student.num_kept_tokens] == [SIZES[size]["num_kept_tokens"]]
        assert plan.student.full_attention_window == SIZES[size].get("full_attention_window")
        assert made(size=size, options={"num_kept_tokens": 7})[0]["num_kept_tokens"] == 7
    assert plan.student.layer_types.count("sliding_attention") == (5 if name == "some" else 0)
    assert cache_share(plan.student, teacher, 2**17) <= 1


MEAN = "371 of each head in the mean, more where predictions need them, beside a window of 64"


@pytest.mark.parametrize(
    ("keep", "said"),
    [("heads:1/2", MEAN), ("heads:1/1", None)],
)
def test_a_plan_says_how_many_tokens_heads_keep(keep, said):
    plan = resolve(Recipe(keep=keep), make_teacher("llama").config, text(4000))
    assert dict(plan_rows(plan)).get("older tokens kept") == said


@pytest.mark.parametrize(("positions", "length"), [(4096, 3000), (512, 512)])
def test_windows_of_the_default_length_fit_teacher_and_text(positions, length):
    teacher = make_teacher().config
    teacher.max_position_embeddings = positions
    plan = resolve(Recipe(), teacher, text(3000))
    assert plan.recipe.distillation.length == min(2048, length)
    with pytest.raises(ValueError, match=r"length must be at most the model's|at least one window"):
        resolve(Recipe(distillation=Schedule.with_some(length=4000)), teacher, text(3000))


@pytest.mark.parametrize(
    ("teacher", "to", "options", "exact"),
    [
        ("llama", "linear", {"sliding_window": 12}, True),  # and four tokens at the beginning
        ("llama", "linear", {"sliding_window": 11}, False),
        ("llama", "attention", {"sliding_window": 12, **ALONE}, True),
        ("llama", "attention", {"sliding_window": 11, **ALONE}, False),
        ("mistral-window", "linear", {"sliding_window": 4}, False),  # and a memory of what left it
        ("mistral-window", "titans", {}, True),
        ("mistral-window", "titans", {"sliding_window": 8}, False),  # more than the teacher
        (
            "gemma2",
            "titans",
            {"sliding_window": 16},
            False,
        ),  # more than every second layer of the teacher
        ("gemma2", "deltaformer", {}, True),
        ("llama", "deltaformer", {"beta_activation": "sigmoid"}, False),
        ("llama", "transformer", {**MEMORIZING, "memory_top_k": 4}, True),
        ("llama", "transformer", {**MEMORIZING, "memory_top_k": 3}, False),
        (
            "llama",
            "deltaformer",
            {"mlp_types": 2 * ["mlp_and_memory"], **PRODUCT_KEYS},
            True,
        ),  # memories are silent
    ],
)
@torch.no_grad()
def test_a_student_is_called_exact_where_it_is(teacher, to, options, exact):
    teacher = make_teacher(teacher)
    tokens = text()[:16][None]
    plan = resolve(Recipe(to=to, keep="none", options=options, **STAGES), teacher.config, text())
    student = make_student(teacher, to, **options)
    start_near(student, teacher, text(), plan.training_length, is_exact=True)
    difference = (student(tokens).logits - teacher(tokens).logits).abs().max()
    assert plan.is_exact is exact is bool(difference < 1e-4)


@pytest.mark.parametrize(
    "recipe", [{"to": "deltaformer"}, {"cross_entropy": 1.0}, {"fine_tuning": SCHEDULE}]
)
def test_what_is_planned_is_what_runs(recipe):
    short = SCHEDULE._replace(steps=1)
    recipe = {
        name: short if value is SCHEDULE else value for name, value in (STAGES | recipe).items()
    }
    made = convert(make_teacher(), text(), **recipe)
    assert list(made.losses) == [stage.name for stage in planned(**recipe).stages]


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"temperature": -1.0}, "temperature must be above 0, got -1.0"),
        ({"temperature": float("nan")}, "temperature must be above 0, got nan"),
        ({"cross_entropy": 2.0}, "cross_entropy must be from 0 to 1, got 2.0"),
        ({"seed": -1}, "seed must be from 0 to 4294967292, got -1"),
        ({"seed": 2**32}, "seed must be from 0 to"),
        ({"lora_rank": 2}, "lora_rank must be None without steps of fine_tuning, got 2"),
        ({"lora_rank": 0, "fine_tuning": SCHEDULE}, "lora_rank must be at least 1, got 0"),
        (
            {"train": "lora"},
            "train must be all, attention, new, or lora:RANK such as lora:8, got 'lora'",
        ),
        (
            {"train": "lora:0"},
            "train must be all, attention, new, or lora:RANK such as lora:8, got 'lora:0'",
        ),
        (
            {"train": "new", "keep": (0, 1)},
            "train must not be new for a student without parts that are new",
        ),
        ({"teacher_bits": 3}, "teacher_bits must be 8 or 4, got 3"),
        ({"options": {"hidden_size": 64}}, "options must not change hidden_size, .* got 64"),
        (
            {"options": {"vocab_size": 9, "head_dim": 4}},
            "options must not change head_dim and vocab_size",
        ),
        (
            {"options": {"max_position_embeddings": 10}},
            "options must not change max_position_embeddings",
        ),
        ({"options": {"layer_types": ["memory"]}}, "options must not have layer_types"),
        (
            {"to": "gated", "options": {"linear_key_head_dim": 4, "memory_rope": False}},
            r"\(32, 32\) in the teacher",
        ),
        (
            {"transfer": SCHEDULE._replace(learning_rate=float("inf"))},
            "learning_rate of transfer must be at least 0",
        ),
        (
            {"transfer": SCHEDULE._replace(memory_factor=2)},
            "memory_factor of transfer must be 1, since that stage",
        ),
        (
            {"transfer": SCHEDULE._replace(chunk_length=4)},
            "chunk_length of transfer must be 0, since that stage",
        ),
        (
            {"distillation": SCHEDULE._replace(chunk_length=-1)},
            "chunk_length of distillation must be at least 0, got -1",
        ),
        (
            {"distillation": SCHEDULE._replace(start_length=17)},
            "start_length of distillation must be at most its length 16",
        ),
        (
            {"distillation": SCHEDULE._replace(repeats=1.5)},
            "repeats of distillation must be from 0 to 1, got 1.5",
        ),
        (
            {"options": {"sparse_memory_gradients": True}},
            "sparse_memory_gradients must be False in a conversion",
        ),
        (
            {"to": "deltaformer", "keep": "auto"},
            "keep must not be auto for a student that equals its teacher",
        ),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(recipe, message):
    with pytest.raises(ValueError, match=message):
        planned(**recipe)


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"bf16": "maybe"}, "bf16 of training must be bool, got 'maybe'"),
        ({"weight_decay": "much"}, "weight_decay of training must be float, got 'much'"),
        ({"optim": "sgdd"}, "sgdd is not a valid OptimizerNames"),
        ({"optim": "apollo_adamw"}, "optim must be an optimizer that is installed"),
        ({"report_to": "nobody"}, "nobody is not supported"),
        ({"report_to": "comet_ml"}, "report_to must be a logger that is installed, .*, got "),
        ({"max_steps": 3}, "training must be arguments of transformers .*, got max_steps"),
        (
            {"weight_decoy": 0.1},
            r"training must be arguments of transformers .*, got weight_decoy; did you mean weight_decay\?",
        ),
        (
            {"resume_from_checkpoint": "x"},
            "training must be arguments of transformers .*, got resume_from_checkpoint",
        ),
        (
            {"deepspeed": "x", "label_smoothing_factor": 0.5},
            "got deepspeed, label_smoothing_factor",
        ),
        ({"bf61": True}, r"got bf61; did you mean bf16\?$"),
        ({"max_grad_norm": math.nan}, "max_grad_norm of training must be at least 0, got nan"),
        (
            {"gradient_accumulation_steps": 0},
            "gradient_accumulation_steps of training must be at least 1, got 0",
        ),
        ({"adam_beta1": 1.0}, "adam_beta1 of training must be less than 1, got 1.0"),
        ({"fp16": True}, "fp16 of training needs a GPU"),
        (
            {"torch_compile_mode": "nope"},
            "torch_compile must be possible with this backend and mode, got .*nope",
        ),
        ({"gradient_accumulation_steps": 3}, "batch_size must be a multiple of 3"),
        (
            {"report_to": "tensorboard"},
            "report_to=tensorboard needs checkpoints, beside which it writes, or",
        ),
        ({"eval_steps": 0}, "eval_steps of training must be at least 1, got 0"),
        (
            {"eval_steps": 2},
            "validation must be given together with eval_steps of training, got none",
        ),
        (
            {"load_best_model_at_end": True},
            "load_best_model_at_end of training needs eval_steps, got none",
        ),
    ],
)
def test_arguments_of_training_that_cannot_be_are_refused(training, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=message):
        check_run(planned(), Run(training=training))


@pytest.fixture
def places(tmp_path):
    """A folder, a file, a link to a folder, one to nothing, and a folder with the checkpoints of who knows whom."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    (tmp_path / "others" / "run" / "checkpoint-5").mkdir(parents=True)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "transfer").symlink_to(tmp_path / "folder")
    return tmp_path


@pytest.mark.parametrize(
    ("output", "checkpoints", "message"),
    [
        ("run", "run", "output must not contain checkpoints or be inside it"),
        ("run/student", "run", "output must not contain checkpoints or be inside it"),
        ("run", "run/checkpoints", "output must not contain checkpoints or be inside it"),
        ("folder/../run", "run", "output must not contain checkpoints or be inside it"),
        ("link", None, "output must be a folder, not a link to one"),
        ("dangling", None, "output must be a folder, not a link to one"),
        ("file", None, "output must be a folder, got .*file, where .*file is a file"),
        ("file/student", None, "output must be a folder, got .*student, where .*file is a file"),
        ("x" * 240, None, "output must have a name of at most 230 bytes"),
        ("x" * 300, None, "output must have a name of at most 230 bytes"),
        ("student", "file", "checkpoints must be a folder, got"),
        (
            "student",
            "linked",
            "checkpoints must be in a folder without symbolic links, got .*linked with transfer",
        ),
        (
            "student",
            "others",
            "checkpoints must be in a folder of their own, got .*, which has a checkpoint-5",
        ),
        (
            "student",
            "others/run",
            "checkpoints must be in a folder of their own, got .*, which has a checkpoint-5",
        ),
    ],
)
def test_folders_that_cannot_be_written_to_are_refused(places, output, checkpoints, message):
    before = sorted(places.rglob("*"))
    with pytest.raises(ValueError, match=message):
        check_run(planned(), Run(checkpoints and places / checkpoints), output=places / output)
    assert sorted(places.rglob("*")) == before


def test_checkpoints_that_no_run_has_claimed_are_left_alone(places):
    with pytest.raises(ValueError, match="checkpoints must be in a folder of their own"):
        convert(make_teacher(), text(), run=Run(places / "others" / "run"), **STAGES)
    assert os.listdir(places / "others" / "run") == ["checkpoint-5"]


def test_validation_that_cannot_be_is_refused():
    for run, message in (
        (
            Run(validation=text(20)),
            "validation must be given together with eval_steps of training, got 20 tokens",
        ),
        (
            Run(training={"eval_steps": 2}, validation=text(9)),
            "at least one window of 16 tokens, got 9",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            check_run(planned(), run)


def test_a_plan_is_of_one_teacher_and_one_text():
    plan = planned()
    teacher = make_teacher("qwen3")
    for wrong, message in (
        ((teacher, text()), "teacher must be the one of the plan"),
        ((make_teacher(), text(9)), "tokens must be the 200 of the plan, got 9"),
    ):
        with pytest.raises(ValueError, match=message):
            conversion.convert(*wrong, plan)


def test_a_log_has_a_line_every_tenth_and_every_minute(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    lines = Lines()
    for step in range(101):
        lines(Progress("distillation", step, 100, tokens=32, loss=2.0))
        now[0] += 1.0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 10
    assert printed[4] == "distillation: 50/100, loss 2.000, 32 tokens/s, 0:00:50 left"
    lines(Progress("transfer", 0, 10))
    now[0] += 10.0
    lines(Progress("transfer", 5, 10, later=3.0, memory=2_000_000_000))
    assert (
        capsys.readouterr().out == "transfer: 5/10, 0:00:10 left, 0:01:10 left of the run, 2.0 GB\n"
    )
    for step in range(3):
        lines(Progress("measuring", step, 1000))
        now[0] += 61.0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_log_does_not_repeat_a_line(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    lines = Lines()
    for done in (0, 0, 0, 0, 1, 2, 2):
        lines(Progress("measuring", done, 2))
        now[0] += 70.0 if done == 0 else 1.0
    printed = [line.partition(",")[0] for line in capsys.readouterr().out.splitlines()]
    assert printed == ["measuring: 0/2", "measuring: 1/2", "measuring: 2/2"]


def test_a_plan_says_of_memories_only_what_its_student_has():
    text = torch.zeros(300, dtype=torch.long)
    teacher = make_teacher().config
    for to, has_new_parts in (("attention", False), ("linear", True)):
        rows = plan_rows(resolve(Recipe(to=to), teacher, text))
        words = " ".join(words for _, words in rows)
        assert ("parts that the teacher does not have" in words) == has_new_parts
        assert "e+" not in words  # numbers are written out


@pytest.mark.parametrize("stage", ["transfer", "distillation", "fine_tuning"])
@pytest.mark.parametrize("name", ["steps", "batch_size", "length"])
def test_a_schedule_that_memory_cannot_hold_is_refused_by_the_name_of_its_largest_number(
    stage, name, monkeypatch
):
    monkeypatch.setattr("hf_memory.conversion.recipe.memory_for", lambda device: 10**10)
    schedule = SCHEDULE._replace(steps=10)._replace(**{name: 2**31 - 1})
    with pytest.raises(
        ValueError, match=f"^{name} of {stage} must be less, since .* got 2147483647"
    ):
        Recipe(**{stage: schedule}).check()
    with pytest.raises(ValueError, match=f"^{name} of {stage} must be at most 2147483647"):
        Recipe(**{stage: schedule._replace(**{name: 2**31})}).check()


def test_the_tokens_of_a_schedule_are_those_of_its_steps():
    for steps in (0, 1, 7, 12, 100):
        schedule = SCHEDULE._replace(steps=steps, batch_size=3, length=100, start_length=16)
        assert schedule.tokens == 3 * sum(schedule.length_in(step) for step in range(steps))
