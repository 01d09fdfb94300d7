"""What a conversion keeps, what it learns, and what it leaves on disk."""

import json
from dataclasses import replace

import pytest
import torch
from huggingface_hub import ModelCard
from tokenizers import processors
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    MistralConfig,
    TrainerCallback,
)
from transformers.cache_utils import DynamicCache

from cases import SIZES, random_tokens
from comparing import assert_close, in_float64
from hf_memory import conversion
from hf_memory.conversion import (
    Recipe,
    Run,
    Schedule,
    attention_transfer,
    carry_over,
    distill,
    make_student,
    report,
    resolve,
)
from hf_memory.conversion.defaults import SERVABLE
from hf_memory.conversion.stages.divergence import divergence, last_hidden_states
from hf_memory.conversion.stages.transfer import AttentionTransfer, attention_seen
from hf_memory.conversion.students import STUDENTS, is_exact
from hf_memory.conversion.students.starts import match_scale, start_near, start_open
from hf_memory.evaluation import OF_CARD, Subject, agreement, evaluate, lengths_beyond
from hf_memory.files.text import start_of
from hf_memory.modeling import delta_net, gated_linear_attention
from hf_memory.modeling.any_model import head
from teachers import (
    BOTH_STAGES,
    SCHEDULE,
    TEACHERS,
    convert,
    every_teacher,
    make_teacher,
    make_tokenizer,
    same,
    text,
    with_long_rope,
)


@every_teacher
def test_a_student_that_keeps_all_layers_is_its_teacher(name):
    teacher = make_teacher(name)
    tokens = random_tokens(2, 24)
    student = make_student(teacher, "linear", keep=(0, 1))
    weights = carry_over(student, teacher)
    assert weights.new == weights.dropped == []
    assert set(weights.used) == set(teacher.state_dict())
    assert_close(teacher(tokens).logits, in_float64(student)(tokens).logits, student(tokens).logits)


LONG_ROPE_STUDENTS = [
    ("linear", {"keep": (0, 1)}),
    ("attention", {"keep": (0,), "sliding_window": 4096, "cache_bits": None}),
]


def assert_reads_pieces(student, tokens):
    cache = DynamicCache(config=student.config)
    pieces = [student(x, past_key_values=cache).logits for x in tokens.split(10, 1)]
    assert_close(torch.cat(pieces, 1), in_float64(student)(tokens).logits, student(tokens).logits)


def student_with_positions(teacher, to, options, positions, tokens):
    """One of a teacher with LongRoPE, which predicts these tokens as its teacher does."""
    student = make_student(teacher, to, **options, max_position_embeddings=positions)
    carry_over(student, teacher)
    assert student.config.max_position_embeddings == positions
    expected = teacher(tokens).logits
    assert_close(expected, in_float64(student)(tokens).logits, student(tokens).logits)
    return student


PART = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "phi3"])
def test_a_factor_of_rope_that_a_teacher_ignores_is_ignored_in_its_student(name, monkeypatch):
    config, model, options = TEACHERS[name]
    kinds = {"full_attention", "sliding_attention"}
    rope = dict.fromkeys(kinds, PART) if name == "gemma3" else PART
    monkeypatch.setitem(TEACHERS, "part", (config, model, options | {"rope_parameters": rope}))
    teacher = make_teacher("part")
    student = make_student(teacher, "linear", keep=(0, 1))
    carry_over(student, teacher)
    tokens = text(40)[None]
    torch.testing.assert_close(student(tokens).logits, teacher(tokens).logits, rtol=1e-4, atol=1e-4)


def test_angles_of_a_student_are_as_exact_as_those_of_its_teacher(tmp_path):
    make_teacher("llama").save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    cast = make_teacher("llama").to(torch.bfloat16)
    for teacher, dtype in ((loaded, torch.float32), (cast, torch.bfloat16)):
        student = make_student(teacher, "attention")
        assert student.dtype == torch.bfloat16
        angles = student.model.rotary_emb.inv_freq
        torch.testing.assert_close(angles, teacher.model.rotary_emb.inv_freq, rtol=0, atol=0)
        assert angles.dtype == dtype


def test_a_student_with_other_angles_than_its_teacher_is_refused():
    teacher = make_teacher("llama")
    student = make_student(teacher, "attention")
    student.model.rotary_emb.inv_freq.mul_(0.9)
    with pytest.raises(ValueError, match="rope_parameters of the student must be those of the an"):
        carry_over(student, teacher)


@pytest.mark.filterwarnings("ignore:the text has more tokens")
@pytest.mark.parametrize("positions", [24, 96])
@pytest.mark.parametrize(("to", "options"), LONG_ROPE_STUDENTS)
@torch.no_grad()
def test_a_student_of_a_teacher_with_long_rope_has_its_angles_up_to_where_they_change(
    to, options, positions
):
    teacher = with_long_rope(positions)
    student = student_with_positions(teacher, to, options, 24, random_tokens(2, 24))
    assert_reads_pieces(student, random_tokens(1, 40))


@pytest.mark.filterwarnings("ignore:the text has more tokens")
@pytest.mark.parametrize("positions", [25, 96])
@pytest.mark.parametrize(("to", "options"), LONG_ROPE_STUDENTS)
@torch.no_grad()
def test_a_student_with_more_positions_has_the_angles_of_its_teacher_in_longer_texts(
    to, options, positions
):
    teacher = with_long_rope(96)
    tokens = random_tokens(2, 40)
    student = student_with_positions(teacher, to, options, positions, tokens)
    assert_reads_pieces(student, tokens)
    assert is_exact(student.config, teacher.config, 25)
    assert not is_exact(student.config, teacher.config, 24)


def test_positions_of_a_student_are_asked_for_where_the_angles_of_its_teacher_change():
    teacher = with_long_rope(96)
    both = "max_position_embeddings must be given .* LongRoPE, .*=24 .*=96 .* got None"
    with pytest.raises(ValueError, match=both):
        make_student(teacher, "linear")
    with pytest.raises(ValueError, match=both):
        resolve(Recipe("linear", keep="none", **BOTH_STAGES), teacher.config, text())
    with pytest.raises(
        ValueError, match=r"max_position_embeddings .* at most the teacher's 96, got 97"
    ):
        make_student(teacher, "linear", max_position_embeddings=97)
    with pytest.raises(ValueError, match=r"max_position_embeddings must be int.* got '16'"):
        make_student(teacher, "linear", max_position_embeddings="16")
    longer = {"distillation": SCHEDULE._replace(length=32), "transfer": SCHEDULE}
    options = {"max_position_embeddings": 24}
    recipe = Recipe("linear", keep="none", options=options, **longer)
    with pytest.raises(ValueError, match="length must be at most the model's 24 positions"):
        resolve(recipe, teacher.config, text())


def test_a_teacher_whose_angles_change_with_each_text_is_refused():
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    config = LlamaConfig(**{**SIZES, "rope_parameters": rope})
    expected = "rope_type of rope_parameters of the teacher must be one .* got 'dynamic'"
    with pytest.raises(ValueError, match=expected):
        resolve(Recipe("linear", keep="none", **BOTH_STAGES), config, text())


def with_another_head(name, folder):
    """A teacher whose config ties its head to its embeddings, in a folder with another head."""
    made = make_teacher(name)
    original = type(made)(replaced(made.config, tie_word_embeddings=False)).eval()
    original.load_state_dict(made.state_dict())
    nn.init.normal_(original.lm_head.weight)
    original.save_pretrained(folder)
    described = json.loads((folder / "config.json").read_text())
    described["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(described))
    return original


def replaced(config, **fields):
    return type(config)(**config.to_dict() | fields)


@every_teacher
def test_a_head_that_a_config_ties_in_vain_is_the_teachers_and_the_students(name, tmp_path):
    original = with_another_head(name, tmp_path)
    tokens = random_tokens(2, 24)
    assert not conversion.load_config(str(tmp_path)).tie_word_embeddings
    teacher = conversion.load_teacher(str(tmp_path))
    student = make_student(teacher, "linear", keep=(0, 1))
    carry_over(student, teacher)
    expected = original(tokens).logits
    assert torch.equal(teacher(tokens).logits, expected)
    assert_close(expected, in_float64(student)(tokens).logits, student(tokens).logits)
    student.save_pretrained(tmp_path / "student")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "student")
    assert torch.equal(loaded.lm_head.weight, student.lm_head.weight)


@every_teacher
def test_a_teacher_with_two_tensors_for_one_of_its_student_is_refused(name, tmp_path):
    with_another_head(name, tmp_path)
    teacher = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert teacher.config.tie_word_embeddings
    student = make_student(teacher, "linear", keep=(0, 1))
    expected = "lm_head.weight are one tensor in the student, and differ .* set tie_word_embeddings"
    with pytest.raises(ValueError, match=expected):
        carry_over(student, teacher)


@every_teacher
def test_a_deltaformer_starts_as_its_teacher(name):
    teacher = make_teacher(name)
    tokens = random_tokens(2, 24)
    student = make_student(teacher, "deltaformer")
    weights = carry_over(student, teacher)
    assert weights.dropped == []
    assert {new.split("mixer.")[1] for new in weights.new} == {"b_proj.weight", "b_proj.bias"}
    assert_close(teacher(tokens).logits, in_float64(student)(tokens).logits, student(tokens).logits)
    written = [
        model.generate(tokens, max_new_tokens=6, do_sample=False) for model in (student, teacher)
    ]
    assert torch.equal(*written)


@pytest.mark.parametrize("variant", ["mag", "mal"])
@pytest.mark.parametrize(
    "name", ["llama", "llama-tied", "mistral", "mistral-window", "qwen2", "qwen3"]
)
def test_titans_with_attention_start_as_their_teacher(name, variant):
    teacher = make_teacher(name)
    tokens = random_tokens(2, 24)
    student = make_student(teacher, "titans", variant=variant)
    start_near(student, teacher, text(), 16, is_exact=True)
    with torch.no_grad():
        assert_close(
            teacher(tokens).logits, in_float64(student)(tokens).logits, student(tokens).logits
        )


@every_teacher
def test_every_teacher_becomes_a_memory_that_can_be_loaded(name, tmp_path):
    schedule = Schedule(steps=2, learning_rate=1e-3, batch_size=2, length=16)
    tokens = random_tokens(1, 9)
    made = convert(
        make_teacher(name), text(), to="deltanet", transfer=schedule, distillation=schedule
    )
    assert set(made.weights.used) == set(make_teacher(name).state_dict())
    assert all(".mixer." in new for new in made.weights.new)
    made.student.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(tokens).logits, made.student(tokens).logits)
    assert loaded.generate(tokens, min_new_tokens=3, max_new_tokens=3, do_sample=False).shape == (
        1,
        12,
    )


GATES = {"gated": gated_linear_attention.GATES, "deltanet": delta_net.MIXERS}
EVERY_STUDENT = [
    (to, {"gate": gate} if gate else {}) for to in STUDENTS for gate in GATES.get(to, ("",))
]
EVERY_STUDENT += [
    ("transformer", {"past": "memorizing", "sliding_window": 4, "memory_size": 8}),
    ("attention", {"sliding_window": 2, "num_sink_tokens": 1, "num_kept_tokens": 0}),
]
every_student = pytest.mark.parametrize(
    ("to", "options"), EVERY_STUDENT, ids=[f"{a}{b}" for a, b in EVERY_STUDENT]
)


def test_a_memory_behind_a_short_window_learns_from_the_attention_that_sees_more():
    schedule = Schedule(steps=20, learning_rate=2e-2, batch_size=4, length=16)
    made = convert(
        make_teacher(),
        text(),
        to="titans",
        sliding_window=4,
        transfer=schedule,
        distillation=schedule,
    )
    transfer = made.losses["attention transfer"]
    assert transfer[-1]["loss"] < 0.9 * transfer[0]["loss"]
    assert made.student.model.layers[0].mixer.gate.abs().max() > 0


def test_the_gate_of_a_store_learns_what_a_window_does_not_see():
    schedule = Schedule(steps=20, learning_rate=2e-2, batch_size=4, length=16)
    options = {"past": "memorizing", "sliding_window": 4, "memory_size": 16}
    made = convert(
        make_teacher(),
        text(),
        to="transformer",
        transfer=schedule,
        distillation=schedule,
        **options,
    )
    transfer = made.losses["attention transfer"]
    assert transfer[-1]["loss"] < 0.9 * transfer[0]["loss"]
    assert made.student.model.layers[0].mixer.memory_gate.abs().max() > 0.1


@every_student
def test_every_memory_takes_a_teacher_over_and_learns(to, options):
    teacher = make_teacher("qwen3")
    start = make_student(teacher, to, keep=(1,), **options)
    carry_over(start, teacher)
    schedule = Schedule(steps=20, learning_rate=2e-3, batch_size=4, length=16)
    made = convert(
        teacher, text(), to=to, keep=(1,), transfer=schedule, distillation=schedule, **options
    )
    new = "sliding_heads" if to == "attention" else "memory"
    assert made.student.config.layer_types == [new, "full_attention"]
    assert made.student.config.model_type == STUDENTS[to].config.model_type
    assert made.weights.used["model.layers.0.self_attn.q_norm.weight"] == (
        "model.layers.0.mixer.q_norm.weight",
    )
    assert all(name.startswith("model.layers.0.mixer.") for name in made.weights.new)
    before, after = (
        agreement(student, teacher, text(), length=16).kl for student in (start, made.student)
    )
    if (
        made.plan.is_exact
    ):  # nothing to learn from the teacher: it learns the text, and opens where it was closed
        opened = [
            made.student.get_parameter(x)
            for x in made.weights.new
            if x.endswith(("gate", "b_proj.weight"))
        ]
        assert [bool(x.abs().max() > 0) for x in opened] == [True] * (
            to not in ("transformer", "attention")
        )
    else:
        assert after < 0.8 * before


GATED = [(to, options) for to, options in EVERY_STUDENT if to in GATES]


@pytest.mark.parametrize(("to", "options"), GATED, ids=[f"{a}{b}" for a, b in GATED])
def test_the_first_output_of_a_gated_memory_is_as_large_as_the_teachers(to, options):
    """Other memories weigh values as attention does, or have a gate beside it."""
    teacher = make_teacher()
    student = make_student(teacher, to, **options)
    carry_over(student, teacher)
    start_open(student, half_life=16)
    match_scale(student, teacher, text()[None])
    for mixer, output, target in AttentionTransfer(student, teacher).outputs(text()[None]):
        mine, theirs = ((x - mixer.o_proj.bias).square().mean().item() for x in (output, target))
        assert mine == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("to", [to for to in SERVABLE if to != "attention"])
@torch.no_grad()
def test_a_gate_that_would_start_closed_is_steady_and_the_output_near_the_attention(to):
    teacher = make_teacher()
    teacher.get_input_embeddings().weight.data += (
        1  # hidden states of trained models have much in common, too
    )
    students = [make_student(teacher, to, **SERVABLE[to]) for _ in range(2)]
    carry_over(students[0], teacher)
    start_open(students[0], half_life=16)
    match_scale(students[0], teacher, text()[None])
    start_near(students[1], teacher, text(400), 100)
    errors = []
    for student in students:
        outputs = AttentionTransfer(student, teacher).outputs(random_tokens(2, 100, seed=2))
        errors.append([float((x - y).square().mean() / y.square().mean()) for _, x, y in outputs])
    assert all(after < min(0.5, 0.3 * before) for before, after in zip(*errors)), errors
    hidden_states = attention_seen(teacher, text()[None])[0][0]["hidden_states"]
    mixer = students[1].model.layers[0].mixer
    opened = (mixer.output_gate.proj if to == "deltanet" else mixer.g_proj)(hidden_states)
    assert (opened - 1).square().mean().sqrt() < 0.2


@pytest.mark.parametrize("variant", ["mag", "mal"])
def test_a_memory_starts_as_large_as_what_it_must_learn(variant):
    """Beside a window all of attention, and the window small; before it, what the window leaves out."""
    teacher = make_teacher().double()
    tokens = text()[None]
    student = make_student(teacher, "titans", variant=variant, sliding_window=4).double()
    start_near(student, teacher, text(), tokens.shape[1])
    transfer = AttentionTransfer(student, teacher)
    mixers = [layer.mixer for layer in student.model.layers]
    share = 0.1 if variant == "mag" else 1.0
    for mixer, layer in zip(mixers, teacher.model.layers):
        assert_close(mixer.o_proj.weight, share * layer.self_attn.o_proj.weight)
        mixer.o_proj.weight.data /= share
    gates = [mixer.gate.clone() for mixer in mixers]
    outputs = []
    for value in (0, 1):
        for mixer in mixers:
            mixer.gate.data.fill_(value)
        outputs.append(list(transfer.outputs(tokens)))
    for gate, (_, closed, target), (_, opened, _) in zip(gates, *outputs):
        assert 0 < gate.min() == gate.max()
        missing = target if variant == "mag" else target - closed
        assert_close(gate[0] * (opened - closed).norm(), missing.norm())


@pytest.mark.parametrize(
    ("to", "gate"), [("gated", "scalar"), ("gated", "vector"), ("deltanet", "scalar")]
)
def test_an_open_gate_forgets_half_in_its_half_life(to, gate):
    student = make_student(make_teacher(), to, gate=gate).double()
    start_open(student, half_life=16)
    g = student.model.layers[0].mixer.decay(torch.zeros(1, 16, 32).double())
    g = g[0] if isinstance(g, tuple) else g  # some give their steps too
    assert_close(g.sum(1).exp(), torch.full_like(g[:, 0], 0.5))


def test_open_convolutions_pass_the_present_token():
    student = make_student(make_teacher(), "deltanet")
    start_open(student, half_life=16)
    mixer = student.model.layers[0].mixer
    x = torch.randn(1, 9, 32)
    assert torch.equal(mixer.q_conv1d(mixer.q_proj(x))[0], mixer.q_proj(x))


def test_a_weight_without_a_place_is_an_error():
    teacher = make_teacher()
    teacher.model.layers[1].self_attn.sinks = nn.Parameter(torch.ones(4))
    student = make_student(teacher, "linear")
    with pytest.raises(
        ValueError, match=r"teacher's model.layers.1.self_attn.sinks has no counterpart"
    ):
        carry_over(student, teacher)


def test_a_weight_of_another_shape_is_an_error():
    teacher = make_teacher()
    with pytest.raises(
        ValueError, match=r"q_proj.weight is \(32, 32\) in the teacher and \(16, 32\)"
    ):
        carry_over(
            make_student(teacher, "gated", linear_key_head_dim=4, memory_rope=False), teacher
        )


def test_a_start_does_not_depend_on_names_of_attributes():
    starts = []
    for names in ({}, {"gate": 1.0, "start_steady": None}):
        student = make_student(make_teacher(), "linear")
        for mixer in (layer.mixer for layer in student.model.layers):
            vars(mixer).update(names)
        start_near(student, make_teacher(), text(), 16)
        starts.append(student)
    assert same(*starts)


def test_a_new_weight_outside_the_mixers_is_an_error():
    teacher = make_teacher()
    student = make_student(teacher, "linear")
    student.model.layers[0].mlp.gate = nn.Linear(2, 2)
    with pytest.raises(
        ValueError, match=r"student's model.layers.0.mlp.gate.weight has no counterpart"
    ):
        carry_over(student, teacher)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"to": "lstm"}, "to must be one of attention, .*, got 'lstm'"),
        ({"to": None}, "steps of fine-tuning must be at least 1, got 0"),
        ({"keep": (2,)}, r"keep must name layers from 0 to 1, got \[2\]"),
        (
            {"options": {"featuremap": "elu"}},
            r"fields of LinearTransformerConfig, got featuremap; did you mean feature_map\?",
        ),
        (
            {"options": {"window_size": 64}},
            r"fields of .*, got window_size; did you mean sliding_window\?",
        ),
        (
            {"options": {"model_type": "llama"}},
            "options must be fields of LinearTransformerConfig, got model_type",
        ),
        (
            {"options": {"sliding_window": 8, "num_sink_tokens": 256}},
            "must be fewer than the 16 tokens of a training window",
        ),
        (
            {"to": "transformer", "keep": "heads:1/2"},
            "keep must be layers for a student of this kind, got 'heads:1/2': full_attention_heads must be None",
        ),
    ],
)
def test_wrong_arguments_are_explained(wrong, message):
    with pytest.raises(ValueError, match=message):
        resolve(
            Recipe(**{"to": "linear", "keep": "none"} | BOTH_STAGES | wrong),
            make_teacher().config,
            text(),
        )


@pytest.mark.parametrize(
    ("name", "to"), [*((name, "linear") for name in TEACHERS), *(("llama", to) for to in STUDENTS)]
)
def test_a_plan_counts_what_a_conversion_makes(name, to):
    teacher = make_teacher(name)
    plan = resolve(Recipe(to, keep=(0,), **BOTH_STAGES), teacher.config, text())
    rows = conversion.plan_rows(plan)
    student = make_student(teacher, to, keep=(0,))
    kind = STUDENTS[to].config.model_type
    assert ("student", f"{kind}, {student.num_parameters():,} parameters") in rows
    assert ("attention kept", "0") in rows
    assert ("attention transfer" in dict(rows)) != plan.is_exact
    assert ("", "256 tokens, 1.3 times the text") in rows


def test_an_unsupported_teacher_is_told_which_ones_are():
    teacher = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=64))
    with pytest.raises(
        ValueError, match=r"one of llama, .*, granite, qwen3_moe, got a model of type 'gpt2'"
    ):
        convert(teacher, text(), **BOTH_STAGES)


@every_teacher
def test_a_head_on_the_last_hidden_states_is_the_whole_model(name):
    teacher = make_teacher(name).double()
    tokens = random_tokens(2, 9)
    assert_close(head(teacher, last_hidden_states(teacher, tokens)), teacher(tokens).logits)
    assert not teacher.model._forward_hooks


@every_teacher
def test_attention_seen_is_what_attention_did(name):
    teacher = make_teacher(name)
    tokens = random_tokens(2, 4)  # no longer than the windows, so that no mask is needed
    student = make_student(teacher, "linear", keep=(0, 1))
    carry_over(student, teacher)
    seen = attention_seen(teacher, tokens)
    for (inputs, output), layer in zip(seen, student.model.layers, strict=True):
        given = {
            name: inputs[name]
            for name in ("hidden_states", "position_embeddings", "attention_mask")
        }
        expected, _ = in_float64(layer.mixer)(**in_float64(given))
        assert_close(output, expected, layer.mixer(**given)[0])
    assert not teacher.model.layers[0].self_attn._forward_hooks


def test_the_transfer_loss_is_relative_and_summed_over_memory_layers():
    teacher = make_teacher()
    tokens = random_tokens(2, 16)
    student = make_student(teacher, "linear", keep=(0,))
    with torch.no_grad():
        student.model.layers[1].mixer.o_proj.weight.zero_()
        student.model.layers[1].mixer.o_proj.bias.zero_()
    loss = AttentionTransfer(student, teacher)(tokens)["loss"]
    assert loss.item() == pytest.approx(1)  # an output of zero misses all of the teacher's


def test_attention_transfer_changes_the_memory_layers_and_nothing_else():
    teacher = make_teacher()
    before = make_student(teacher, "linear", keep=(1,))
    student = make_student(teacher, "linear", keep=(1,))
    carry_over(before, teacher)
    carry_over(student, teacher)
    attention_transfer(student, teacher, text(), SCHEDULE)
    changed = {
        name
        for name, x in student.state_dict().items()
        if not torch.equal(x, before.state_dict()[name])
    }
    learns = {
        name for name, _ in student.named_parameters() if name.startswith("model.layers.0.mixer.")
    }
    assert changed == learns
    assert same(teacher, make_teacher())


def test_distillation_of_a_copy_has_nothing_to_learn():
    teacher = make_teacher()
    student = make_student(teacher, "linear", keep=(0, 1))
    carry_over(student, teacher)
    losses = distill(student, teacher, text(), SCHEDULE)
    assert (
        abs(losses[0]["loss"]) < 1e-5
    )  # later ones are Adam's, which makes steps of rounding errors


@pytest.mark.parametrize("part", [0.0, 0.25, 1.0])
def test_the_loss_of_a_distillation_is_that_of_its_definition(part):
    teacher = make_teacher()
    schedule = SCHEDULE._replace(steps=1)
    student = make_student(teacher, "linear")
    carry_over(student, teacher)
    data = conversion.TokenWindows(text(), schedule, 0)
    tokens = torch.stack([data[i]["input_ids"] for i in range(len(data))])
    with torch.no_grad():
        logits, target = (model(tokens).logits for model in (student, teacher))
        own = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        kl = (
            divergence(*(x[:, :-1].flatten(0, 1) for x in (logits, target)), 2.0)
            / tokens[:, 1:].numel()
        )
        expected = (1 - part) * kl + part * own
    losses = distill(student, teacher, text(), schedule, temperature=2.0, cross_entropy=part)
    assert losses[0]["loss"] == pytest.approx(expected.item(), rel=1e-3)


def with_dropout():
    """A teacher as it is while it learns itself."""
    teacher = make_teacher()
    for layer in teacher.model.layers:
        layer.self_attn.attention_dropout = 0.5
    return teacher.train()


def test_a_teacher_reads_without_dropout():
    student = make_student(make_teacher(), "linear", keep=(0, 1))
    schedule = SCHEDULE._replace(steps=1)
    carry_over(student, make_teacher())
    assert abs(distill(student, with_dropout(), text(), schedule)[0]["loss"]) < 1e-5
    pairs = [
        (make_student(make_teacher(), "linear"), teacher)
        for teacher in (make_teacher(), with_dropout())
    ]
    losses = [attention_transfer(student, teacher, text(), schedule) for student, teacher in pairs]
    assert losses[0] == losses[1]


def test_distillation_moves_every_weight():
    teacher = make_teacher("llama-tied")
    before = make_student(teacher, "linear")
    student = make_student(teacher, "linear")
    distill(student, teacher, text(), SCHEDULE)
    for name, parameter in student.named_parameters():
        assert not torch.equal(parameter, before.get_parameter(name)), name


@pytest.mark.parametrize("window", [{}, {"sliding_window": 4}])
def test_memories_have_a_learning_rate_of_their_own(window):
    """Adam's first step moves each weight by its learning rate."""
    start, student = (
        make_student(make_teacher(), "deltanet", keep=(1,), **window) for _ in range(2)
    )
    schedule = SCHEDULE._replace(steps=1, learning_rate=1e-3, warmup=0.0, memory_factor=8.0)
    distill(student, make_teacher(), text(), schedule)
    own = start.model.layers[0].mixer.new_part.state_dict().keys()
    prefix = "model.layers.0.mixer." + "far." * bool(window)
    for name, x in student.named_parameters():
        moved = (x - start.get_parameter(name)).abs().max().item()
        assert moved == pytest.approx(
            8e-3 if name.removeprefix(prefix) in own else 1e-3, rel=0.01
        ), name


def test_the_same_seed_gives_the_same_student():
    students = [
        convert(make_teacher(), text(), to="deltanet", seed=seed, **BOTH_STAGES).student
        for seed in (0, 0, 1)
    ]
    assert same(students[0], students[1])
    assert not same(students[0], students[2])


class Stop(TrainerCallback):
    """Interrupts a stage after so many steps."""

    def __init__(self, stage, step):
        self.stage = stage
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if args.run_name == self.stage and state.global_step == self.step:
            raise KeyboardInterrupt


class Steps(TrainerCallback):
    """Remembers the steps of a stage."""

    def __init__(self, stage):
        self.stage = stage
        self.taken = []

    def on_step_end(self, args, state, control, **kwargs):
        if args.run_name == self.stage:
            self.taken.append(state.global_step)


@pytest.mark.parametrize("stage", ["attention transfer", "distillation"])
def test_a_stopped_conversion_goes_on_as_if_it_had_not_been_stopped(tmp_path, stage):
    steps = Steps(stage)
    whole = convert(make_teacher(), text(), **BOTH_STAGES)
    with pytest.raises(KeyboardInterrupt):
        convert(
            make_teacher(), text(), run=Run(tmp_path, callbacks=(Stop(stage, 5),)), **BOTH_STAGES
        )
    resumed = convert(make_teacher(), text(), run=Run(tmp_path, callbacks=(steps,)), **BOTH_STAGES)
    assert steps.taken == [5, 6, 7, 8]  # from its last checkpoint
    assert same(resumed.student, whole.student)
    assert resumed.losses == whole.losses


def test_a_conversion_in_chunks_has_the_same_student():
    students = []
    for chunk_length, lengths in ((0, {16}), (7, {7, 2})):
        teacher = make_teacher()
        seen = set()
        student = conversion.make_student(teacher, "deltanet")
        student.model.layers[0].register_forward_hook(
            lambda *args, seen=seen: seen.add(args[-1].shape[1])
        )
        once = SCHEDULE._replace(steps=1, chunk_length=chunk_length)
        conversion.distill(student, teacher, text(), once)
        conversion.fine_tune(student, text(), once)
        assert seen == lengths
        students.append(student)
    for x, y in zip(*(student.parameters() for student in students), strict=True):
        assert (
            x - y
        ).abs().max() <= 1e-3 * y.abs().max()  # Adam makes much of the rounding of small gradients


def test_a_conversion_in_chunks_does_not_see_that_the_cache_is_rounded():
    students = []
    for bits in (None, 8):
        teacher = make_teacher()
        options = {"sliding_window": 4, "num_kept_tokens": 4, "kept_block_size": 4}
        student = conversion.make_student(teacher, cache_bits=bits, **options)
        conversion.distill(student, teacher, text(), SCHEDULE._replace(steps=1, chunk_length=8))
        assert student.config.cache_bits == bits
        students.append(student)
    assert same(*students)


def test_a_loss_is_of_targets_alone_and_every_window_has_one():
    tokens = torch.arange(60)
    targets = torch.zeros(60, dtype=torch.bool)
    targets[[20, 21, 40]] = True
    for start in ([], [63]):
        chosen = conversion.Text(tokens, torch.tensor(start, dtype=torch.long), targets)
        data = conversion.TokenWindows(
            chosen, Schedule(steps=30, learning_rate=0.0, batch_size=2, length=9), 0
        )
        labels = torch.stack([row["labels"] for row in data])
        assert (
            (labels == -100) | (labels == torch.stack([row["input_ids"] for row in data]))
        ).all()
        assert (labels[:, 1:] != -100).any(1).all()
        assert labels.unique().tolist() == [-100, 20, 21, 40]
    with pytest.raises(ValueError, match="text must have messages of an assistant"):
        conversion.TokenWindows(chosen[:20], SCHEDULE)

    teacher = make_teacher()
    rows = torch.stack([data[i]["input_ids"] for i in range(2)])
    labels = torch.stack([data[i]["labels"] for i in range(2)])[:, 1:]
    student = make_student(teacher, "linear")
    schedule = data.schedule._replace(steps=1)
    carry_over(student, teacher)
    with torch.no_grad():
        pairs = [model(rows).logits[:, :-1][labels != -100] for model in (student, teacher)]
    losses = distill(student, teacher, chosen, schedule)
    data = conversion.TokenWindows(chosen, schedule, 0)
    assert losses[0]["loss"] == pytest.approx(divergence(*pairs).item() / len(pairs[0]), rel=1e-4)


@pytest.mark.parametrize(
    ("tokens", "length", "message"),
    [
        (
            torch.tensor([1, 64]),
            2,
            "tokens of the text must be from 0 to 63, as the model's tokenizer has them, got 64",
        ),
        (torch.tensor([-1, 63]), 2, "tokens of the text must be from 0 to 63, .* got -1"),
        (torch.arange(9), 16, "at least one window of 16 tokens, got 9"),
        (
            torch.ones(9999, dtype=torch.long),
            4096,
            "length must be at most the model's 2048 positions, got 4096",
        ),
    ],
)
def test_a_text_that_does_not_fit_the_teacher_is_explained(tokens, length, message):
    with pytest.raises(ValueError, match=message):
        convert(
            make_teacher(), tokens, transfer=SCHEDULE._replace(length=length), distillation=SCHEDULE
        )


def test_what_is_written_can_be_loaded_and_read(tmp_path):
    teacher = make_teacher()
    teacher.generation_config.temperature = 0.5
    teacher.generation_config.do_sample = True
    made = convert(teacher, text(), **BOTH_STAGES)
    held_out = text(600)
    rows = {
        "teacher": evaluate(Subject(teacher, held_out, lengths=(64, 128)), OF_CARD),
        "student": evaluate(Subject(made.student, held_out, teacher, lengths=(64, 128)), OF_CARD),
    }
    names = {"teacher": "someone/llama", "text": "a.txt, someone/words:en", "training": {}}
    terms = {"license": "apache-2.0", "language": ["en"]}
    results = conversion.results_of(made.plan, made.losses, rows, **names, terms=terms)
    with conversion.new_folder(tmp_path / "student") as folder:
        conversion.write_report(folder, made.student, make_tokenizer(), results)

    student = AutoModelForCausalLM.from_pretrained(tmp_path / "student")
    assert same(student, made.student)
    assert student.config.use_cache
    assert student.generation_config.temperature == 0.5
    assert AutoTokenizer.from_pretrained(tmp_path / "student")("w7")["input_ids"] == [7]
    card = ModelCard.load(tmp_path / "student" / "README.md")
    assert card.data.base_model == "someone/llama"
    assert card.data.base_model_relation == "finetune"
    assert card.data.datasets == ["someone/words"]
    assert terms.items() <= card.data.to_dict().items()
    measured = rows["student"]["agreement"]["128"]
    figures = {result.metric_type: result for result in card.data.eval_results}
    assert list(figures) == ["perplexity", "kl", "agreement"]
    assert figures["kl"].metric_value == round(measured["KL"]["value"], 4)
    assert figures["kl"].dataset_type == "text"  # of files and of a data set
    alone = report.eval_results(replace(results, text="someone/words:en"))
    assert {result.dataset_type for result in alone} == {"someone/words"}
    assert "perplexity" in card.text
    assert "sees the last" not in card.text
    assert (
        "sees the last 33 tokens exactly" in report.model_card(replace(results, window=33)).text
    )  # of 128
    shares = {f"layer {i:02}": {"share": {"value": i / 8}} for i in (0, 2)}
    remembering = replace(results, rows=rows | {"student": rows["student"] | {"memory": shares}})
    card_of_it = report.model_card(remembering).text
    assert "12% in the mean over layers, from 0% (layer 0) to 25% (layer 2)" in card_of_it
    assert "What the memory gives" not in card.text  # all layers are memory alone
    assert lengths_beyond(LlamaConfig(), 10**6)[-1] == 8192
    assert lengths_beyond(MistralConfig(sliding_window=4097), 10**6)[-1] == 32768
    assert f"{rows['student']['perplexity']['128']['perplexity']['value']:.2f}" in card.text
    assert json.loads((tmp_path / "student" / "results.json").read_text())["rows"] == rows
    assert [path.name for path in tmp_path.iterdir()] == ["student"]


def test_measuring_keeps_to_its_budget(monkeypatch):
    read = []
    told = []
    teacher = make_teacher()
    monkeypatch.setattr("hf_memory.evaluation.tasks.cost", lambda model, context: {})
    teacher.register_forward_pre_hook(lambda module, args: read.append(args[0].numel()))
    evaluate(
        Subject(teacher, text(9000), lengths=(64, 512), max_tokens=8192),
        OF_CARD,
        report=told.append,
    )
    assert 4096 < sum(read) <= 8192
    assert len(told) > len(read)


def test_mse_of_the_transfer_is_that_of_the_definition():
    teacher = make_teacher().double()
    tokens = random_tokens(2, 16)
    student = make_student(teacher, "linear").double()
    carry_over(student, teacher)
    expected = 0
    for (inputs, output), layer in zip(
        attention_seen(teacher, tokens), student.model.layers, strict=True
    ):
        made, _ = layer.mixer(
            inputs["hidden_states"], position_embeddings=inputs["position_embeddings"]
        )
        expected += F.mse_loss(made, output) / output.square().mean()
    assert_close(AttentionTransfer(student, teacher)(tokens)["loss"], expected, expected.float())


def bos_tokenizer():
    """One that writes w1 before a text, as its chat template does."""
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="w1 $A", special_tokens=[("w1", 1)]
    )
    tokenizer.chat_template = "w1 {% for m in messages %}{{ m.content }} w2 {% endfor %}"
    return tokenizer


def test_every_window_begins_as_the_tokenizer_begins_a_text(tmp_path, monkeypatch):
    talk = [{"role": "user", "content": "w7"}]
    lines = [
        {"text": "w1 w4 w5"},
        {"messages": talk},
        {"messages": talk},
        *[{"text": "w8 w9"}] * 90,
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    text = conversion.read_tokens([tmp_path / "a.jsonl"], bos_tokenizer())
    assert text.start.tolist() == [1] != start_of(make_tokenizer())
    assert text.tokens.tolist() == [
        4,
        5,
        2,
        7,
        2,
        7,
        2,
        *[8, 9, 2] * 90,
    ]  # the template's own is not a second one

    read = []
    teacher = make_teacher()
    schedule = SCHEDULE._replace(steps=2, repeats=0.5)
    teacher.register_forward_pre_hook(
        lambda module, args, given: read.append((*args, *given.values())[0]), with_kwargs=True
    )
    convert(teacher, text, to="deltanet", keep="auto:1/2", transfer=schedule, distillation=schedule)
    convert(
        teacher,
        text,
        to="deltanet",
        keep="heads:1/2",
        transfer=schedule._replace(steps=0),
        distillation=schedule,
    )
    monkeypatch.setattr("hf_memory.evaluation.tasks.cost", lambda model, context: {})
    evaluate(Subject(teacher, text, lengths=(64, 256), max_tokens=2048), OF_CARD)
    assert {rows.shape[1] for rows in read} > {16, 256}
    assert all(
        (rows[:, 0] == 1).all() and (rows[:, :-1][rows[:, 1:] == 1] == 2).all() for rows in read
    )
    again = conversion.TokenWindows(
        conversion.Text(torch.arange(50), text.start + 59), schedule, 0
    )[1]["labels"]
    assert again[0] == 60
    assert torch.equal(again[-4:], again[1:5])
