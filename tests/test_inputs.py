"""What a user may ask for: it works, or it is refused in one sentence before any work."""

import copy
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matplotlib.colors import to_rgb
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
)

import hf_memory
from cases import (
    WORDS,
    Case,
    every_family,
    make_config,
    make_model,
    random_tokens,
    word_tokenizer,
)
from hf_memory import conversion, decoding, evaluation
from hf_memory.conversion import (
    GoalNotReached,
    Recipe,
    Run,
    Schedule,
    Text,
    convert,
    costs,
    read_tokens,
    resolve,
    smallest_student,
)
from hf_memory.conversion.request import check_servable
from hf_memory.conversion.teachers import loading as of_few_bits
from hf_memory.evaluation import (
    Subject,
    agreement,
    cache_bytes,
    copy_gain,
    cost,
    lengths_beyond,
    perplexity,
    perplexity_by_position,
    plots,
    recall_by_distance,
)
from hf_memory.evaluation.estimates import Share
from hf_memory.export import NotExportable, find_target
from hf_memory.ops import OPS
from teachers import FAST, make_teacher

STEP = "steps=1,batch_size=1,length=8"
PLAIN = Case("", "hf_memory_linear", {})
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"rope_type": "longrope", "rope_theta": 10.0, "original_max_position_embeddings": 16}
LONG |= {"short_factor": [1.0] * 4, "long_factor": [1.0] * 4, "factor": 4.0}
LEARN = {
    "convert": ("--distillation", STEP, "-o", "sliding_window=4"),
    "fine-tune": ("--steps", 1, "--batch-size", 1, "--length", 8),
}


@pytest.fixture(scope="module", params=[8, 32, 100])
def short_teacher(request, tmp_path_factory):
    """A folder with a Llama of few positions."""
    folder = tmp_path_factory.mktemp("teacher")
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    torch.manual_seed(0)
    config = LlamaConfig(
        **sizes, num_attention_heads=2, max_position_embeddings=request.param, eos_token_id=0
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    word_tokenizer(WORDS, eos_token="end", unk_token="end").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("command", LEARN)
def test_a_teacher_with_few_positions_gives_a_model_with_a_card(
    run, short_teacher, text, tmp_path, command
):
    output = tmp_path / "student"
    code, _, err = run(command, short_teacher, "--text", text, "--output", output, *LEARN[command])
    assert err == ""
    assert code == 0
    assert (output / "README.md").exists()


def test_models_are_measured_at_lengths_that_positions_and_text_allow():
    assert lengths_beyond(LlamaConfig(max_position_embeddings=255), 10**6) == (128,)
    assert lengths_beyond(LlamaConfig(), 250) == (128,)
    assert lengths_beyond(LlamaConfig(), 256)[0] == 256


WRONG_ROPES = [
    ({"rope_type": "none", "rope_theta": 10.0}, "rope_type of {} must be one of 'default'"),
    ({"rope_type": "default", "rope_theta": 0}, "rope_theta of {} must be a number from 1e-30"),
    ({"rope_type": "default", "rope_theta": -5.0}, "rope_theta of {} must be a number from 1e-30"),
    (
        {"rope_type": "default", "rope_theta": math.nan},
        "rope_theta of {} must be a number from 1e-30",
    ),
    ({"rope_type": "default", "rope_theta": "10"}, "rope_theta of {} must be a number from 1e-30"),
    (
        {"rope_type": "default", "rope_theta": 10.0, "partial_rotary_factor": 1.5},
        "partial_rotary_factor of {} must",
    ),
    ({"rope_type": "linear", "rope_theta": 10.0}, "factor"),
    (
        {"rope_type": "linear", "rope_theta": 10.0, "factor": 0},
        "factor of {} must be a number from 1e-30",
    ),
    (
        {
            "rope_type": "yarn",
            "rope_theta": 10.0,
            "factor": 2.0,
            "original_max_position_embeddings": -1,
        },
        "original_max",
    ),
    (
        LLAMA3 | {"high_freq_factor": 1.0},
        "high_freq_factor of {} must be above low_freq_factor=1.0",
    ),
    (LONG | {"short_factor": [1.0]}, "short_factor of {} must be a list of 4 numbers"),
    (LONG | {"long_factor": [1.0, 1.0, 1.0, 0.0]}, "long_factor of {} must be a list of 4 numbers"),
    (LONG | {"long_factor": [2.0] * 4}, "long_factor of {} must be short_factor=.* got .2.0, 2.0"),
    (
        {"rope_type": "dynamic", "rope_theta": 10.0, "factor": 4.0},
        "rope_type of {} must be one with the same angles .* got 'dynamic'",
    ),
]


@pytest.mark.parametrize("name", ["rope_parameters", "local_rope_parameters"])
@pytest.mark.parametrize(("rope", "message"), WRONG_ROPES)
def test_parameters_of_rope_that_give_no_angles_are_refused(name, rope, message):
    local = {"local_rope_layers": [0, 1]} if name == "local_rope_parameters" else {}
    with pytest.raises(ValueError, match=message.format(name)):
        make_config(PLAIN, **{name: dict(rope)}, **local)


@pytest.mark.parametrize("rope", [{}, {"rope_theta": 10.0}, {"rope_type": "default"}, LLAMA3, LONG])
def test_local_rope_parameters_have_the_defaults_of_transformers(rope):
    config = make_config(PLAIN, local_rope_layers=[1, 1], local_rope_parameters=dict(rope))
    plain = make_config(PLAIN, rope_parameters=dict(rope))
    assert config.local_rope_parameters.items() >= plain.rope_parameters.items()


def test_a_token_uses_no_more_experts_than_there_are():
    with pytest.raises(
        ValueError, match="num_experts_per_tok must be at most num_experts=2, got 3"
    ):
        make_config(PLAIN, mlp_types=["mlp", "experts"], num_experts=2, num_experts_per_tok=3)


HUGE_OPTIONS = [
    Case("vocabulary", "hf_memory_linear", {"vocab_size": 2**31 - 1}),
    Case("mlp", "hf_memory_gated", {"intermediate_size": 2**31 - 1}),
    Case(
        "heads", "hf_memory_deltanet", {"linear_num_key_heads": 2**30, "linear_key_head_dim": 2**30}
    ),
    Case(
        "window",
        "hf_memory_linear",
        {"layer_types": ["sliding_memory"] * 2, "sliding_window": 2**31 - 1},
    ),
    Case("experts", "hf_memory_gated", {"mlp_types": ["mlp", "experts"], "num_experts": 2**31 - 1}),
    Case(
        "keys", "hf_memory_gated", {"mlp_types": ["mlp", "memory"], "num_product_keys": 2**31 - 1}
    ),
    Case(
        "positions",
        "hf_memory_transformer",
        {"position": "learned", "max_position_embeddings": 2**31 - 1},
    ),
    Case("segment", "hf_memory_titans", {"variant": "mac", "segment_length": 2**31 - 1}),
    Case("later-layers", "hf_memory_rwkv7", {"v_low_rank_dim": 2**31 - 1}),
]


@pytest.mark.parametrize("case", HUGE_OPTIONS, ids=lambda case: case.name)
def test_a_model_that_does_not_fit_into_memory_is_refused_before_it_is_built(case):
    config = make_config(case)
    with pytest.raises(
        ValueError, match="the config must describe a model that fits into memory, got"
    ):
        AutoModelForCausalLM.from_config(config)
    with torch.device("meta"):
        assert AutoModelForCausalLM.from_config(make_config(PLAIN)).num_parameters() > 0


TEXT = torch.randint(64, (512,), generator=torch.Generator().manual_seed(0))
WRONG_MEASURES = {
    "length must be a whole number of at least 2, got 0": lambda model: perplexity(
        model, TEXT, length=0
    ),
    "length must be a whole number of at least 2, got -8": lambda model: agreement(
        model, model, TEXT, length=-8
    ),
    "length must be a whole number of at least 2, got 8.5": lambda model: perplexity_by_position(
        model, TEXT, length=8.5
    ),
    "max_tokens must be a whole number of at least 1, got 0": lambda model: perplexity(
        model, TEXT, max_tokens=0
    ),
    "windows must be a whole number of at least 1, got 0": lambda model: perplexity_by_position(
        model, TEXT, length=8, windows=0
    ),
    "trials must be a whole number of at least 1, got 0": lambda model: copy_gain(
        model, TEXT, trials=0
    ),
    "gap must be a whole number of at least 0, got -1": lambda model: copy_gain(
        model, TEXT, gap=-1
    ),
    "passage must be a whole number of at least 2, got 0": lambda model: copy_gain(
        model, TEXT, passage=0
    ),
    "distances must be at least the 32 tokens": lambda model: recall_by_distance(model, TEXT, [8]),
    "context must be a whole number of at least 2, got -1": lambda model: cost(model, -1),
    "new_tokens must be a whole number of at least 1, got 0": lambda model: cost(
        model, 8, new_tokens=0
    ),
    "num_tokens must be a whole number of at least 0, got -1": lambda model: cache_bytes(
        model.config, -1
    ),
    "lengths must be whole numbers of at least 2, got": lambda model: Subject(
        model, TEXT, lengths=(1,)
    ),
    "samples must be a whole number of at least 1": lambda model: Subject(model, TEXT, samples=0),
    "items must be a whole number of at least 0": lambda model: Subject(model, TEXT, items=-1),
    "tolerance must be from 0 to 1, got 2": lambda model: Subject(model, TEXT, tolerance=2),
    "tolerance must be from 0 to 1, got nan": lambda model: Subject(
        model, TEXT, tolerance=math.nan
    ),
}


@pytest.mark.parametrize("message", WRONG_MEASURES)
def test_measures_refuse_numbers_out_of_their_range(message):
    with pytest.raises(ValueError, match=message):
        WRONG_MEASURES[message](make_model(PLAIN))


STUDENT = Recipe(
    "linear", keep="none", transfer=Schedule(2, 1e-3, 2, 8), distillation=Schedule(2, 1e-3, 2, 8)
)
WRONG_RECIPES = [
    ({"to": 5}, "to must be str | None, got 5"),
    ({"keep": 2.5}, "keep must be"),
    ({"options": ["gate"]}, "options must be names with values"),
    ({"transfer": {"steps": 1}}, "transfer must be Schedule, got"),
    ({"transfer": Schedule(1.5, 1e-3)}, "steps of transfer must be int, got 1.5"),
    ({"transfer": Schedule(1, 1e-3, length=8.5)}, "length of transfer must be int, got 8.5"),
    ({"transfer": Schedule(1, "fast")}, "learning_rate of transfer must be float, got 'fast'"),
    ({"distillation": Schedule(True, 1e-3)}, "steps of distillation must be int, got True"),
    ({"distillation": Schedule(2**40, 1e-3)}, "steps of distillation must be at most 2147483647"),
    ({"train": 5}, "train must be str | None, got 5"),
    ({"lora_rank": "8"}, "lora_rank must be int | None, got '8'"),
    ({"temperature": "1"}, "temperature must be float, got '1'"),
    ({"teacher_bits": "4"}, "teacher_bits must be int | None, got '4'"),
    ({"seed": 1.0}, "seed must be int, got 1.0"),
    ({"kept_by_head": "yes"}, "kept_by_head must be bool | None, got 'yes'"),
]


@pytest.mark.parametrize(("options", "message"), WRONG_RECIPES)
def test_a_recipe_of_wrong_types_is_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(STUDENT, **options).check()


def test_resolve_refuses_what_is_no_recipe_no_config_and_no_text():
    teacher = make_teacher("llama")
    assert resolve(STUDENT, teacher.config, TEXT).num_tokens == 512
    wrong = {
        "teacher must be PreTrainedConfig, got LlamaForCausalLM": (STUDENT, teacher, TEXT),
        "recipe must be Recipe, got LlamaConfig": (teacher.config, teacher.config, TEXT),
        "recipe must be Recipe": ({"to": "linear"}, teacher.config, TEXT),
        "tokens must be a Text or a tensor [T] of whole numbers, got list": (
            STUDENT,
            teacher.config,
            [1, 2],
        ),
        "got (512,) of torch.float32": (STUDENT, teacher.config, TEXT.float()),
        "got (1, 512) of torch.int64": (STUDENT, teacher.config, TEXT[None]),
    }
    for message, arguments in wrong.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            resolve(*arguments)


@pytest.mark.parametrize(
    "weights", [["1", "2"], [1.0], [1.0, -1.0], [1.0, math.nan], [1.0, math.inf], None, 5, [[1], 2]]
)
def test_a_mixture_has_a_weight_above_zero_for_each_text(weights):
    with pytest.raises(
        ValueError, match="weights must be numbers above 0, one for each of 2 texts"
    ):
        Text.mixed([Text(TEXT), Text(TEXT)], weights)


@pytest.mark.parametrize("texts", [[], TEXT, [TEXT, TEXT], "a.txt", None])
def test_a_mixture_is_of_texts(texts):
    with pytest.raises(ValueError, match="texts must be a list of at least one Text"):
        Text.mixed(texts, [1.0, 1.0])


def test_read_tokens_takes_a_list_of_texts(tokenizer, text):
    with pytest.raises(ValueError, match="sources must be a list of texts, got one"):
        read_tokens(str(text), tokenizer)


def test_read_tokens_takes_a_limit_above_zero(tokenizer, text):
    for limit in (0, -5, 1.5):
        with pytest.raises(
            ValueError, match=f"limit must be a number of tokens above 0, got {limit}"
        ):
            read_tokens([text], tokenizer, limit=limit)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (
            {"allow_negative_eigenvalue": True},
            "allow_negative_eigenvalue.* did you mean allow_negative_eigenvalues",
        ),
        ({"d_model": 64}, "d_model.* did you mean hidden_size"),
        ({"n_layer": 2}, "n_layer.* did you mean num_hidden_layers"),
        ({"zebra": 2}, "has no option zebra, which has no effect$"),
    ],
)
def test_a_config_warns_about_options_that_it_does_not_have(given, meant):
    with pytest.warns(UserWarning, match=meant):
        make_config(Case("", "hf_memory_deltanet", {}), **given)


def test_options_that_are_gone_are_refused_where_they_had_an_effect_and_else_forgotten(tmp_path):
    config = make_config(PLAIN)
    config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    saved = json.loads(file.read_text())
    file.write_text(json.dumps(saved | {"virtual_token": False}))
    assert AutoConfig.from_pretrained(tmp_path).to_diff_dict() == config.to_diff_dict()
    file.write_text(json.dumps(saved | {"virtual_token": True}))
    with pytest.raises(ValueError, match=r"virtual_token must be False .*convert again.*got True"):
        AutoConfig.from_pretrained(tmp_path)


def test_what_transformers_writes_into_a_config_is_no_unknown_option(tmp_path):
    config = make_config(
        PLAIN, num_labels=3, dtype="bfloat16", rope_theta=100.0, attn_implementation="eager"
    )
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path, output_attentions=False)
    assert loaded.to_diff_dict() == config.to_diff_dict()


ASSIGNED = [
    ("hf_memory_deltanet", {"gate": "scalar"}),
    ("hf_memory_deltanet", {"gate": "vector", "num_attention_heads": 8}),
    ("hf_memory_gated", {"gate": "mamba2"}),
    ("hf_memory_gated", {"gate": "retention", "hidden_size": 64}),
    ("hf_memory_titans", {"memory_rule": "ttt_mlp", "variant": "mag"}),
    ("hf_memory_transformer", {"position": "sinusoidal", "num_hidden_layers": 3}),
    ("hf_memory_rwkv7", {"hidden_size": 4096}),
]


@pytest.mark.parametrize(("model_type", "options"), ASSIGNED)
def test_options_that_are_assigned_give_the_same_config_as_those_that_are_passed(
    model_type, options
):
    config = make_config(Case("", model_type, {}))
    for name, value in options.items():
        setattr(config, name, value)
    assert config.to_dict() == make_config(Case("", model_type, {}), **options).to_dict()


OF_NO_FIELD = object()
WRONG = (OF_NO_FIELD, -1, 0, 2**70, -1e300, math.nan, math.inf, True, "no such word", [], {}, [[]])


def refuses(config, name, value):
    """Whether a copy of a config refuses a value of a field; no other error is raised."""
    try:
        setattr(copy.deepcopy(config), name, value)
    except ValueError:
        return True
    return False


@every_family
def test_a_value_that_is_refused_when_it_is_assigned_changes_nothing(case):
    model = make_model(case)
    config = model.config
    tokens = random_tokens(1, 9)
    expected = model(tokens).logits
    before = copy.deepcopy(config)
    own = set(config.__dataclass_fields__) - set(PreTrainedConfig.__dataclass_fields__)
    numbers = {name for name in own if type(getattr(config, name)) in (int, float)}
    numbers -= {name for name in numbers if name.endswith("_token_id")}
    refused = {i: set() for i in range(len(WRONG))}
    for name in own:
        for i, value in enumerate(WRONG):
            if refuses(config, name, value):
                refused[i].add(name)
                with pytest.raises(ValueError, match="must be"):
                    setattr(config, name, value)
    assert config == before
    assert config.to_dict() == before.to_dict()
    assert torch.equal(model(tokens).logits, expected)
    assert refused[WRONG.index(OF_NO_FIELD)] >= own
    assert refused[WRONG.index(-1)] >= numbers
    assert len(numbers) > 10


def test_heads_need_a_size_where_the_width_is_no_multiple_of_their_number():
    sizes = {"hidden_size": 32, "num_attention_heads": 3, "num_key_value_heads": 3}
    with pytest.raises(ValueError, match=r"hidden_size must be a multiple .*unless head_dim"):
        hf_memory.LinearTransformerConfig(**sizes)
    for channels in (10, 12):
        assert hf_memory.LinearTransformerConfig(**sizes, head_dim=channels).head_dim == channels


def test_what_was_given_stays_when_an_option_is_assigned():
    case = Case(
        "",
        "hf_memory_deltanet",
        {"linear_value_head_dim": 24, "layer_types": ["memory", "full_attention"]},
    )
    config = make_config(case)
    config.output_gate = "sigmoid"
    config.gate = "scalar"
    assert config.linear_value_head_dim == 24
    assert config.output_gate == "sigmoid"
    listed = make_config(PLAIN)
    listed.layer_types[1] = "full_attention"
    listed.hidden_size = 64
    assert listed.layer_types == ["memory", "full_attention"]
    assert listed.head_dim == 16


def dry(run, teacher, text, tmp_path, *flags):
    command = "convert", teacher, "--text", text, "--output", tmp_path / "student", "--dry-run"
    code, out, err = run(*command, *flags)
    return code, " ".join(out.split()), " ".join(err.split())


def test_a_plan_warns_of_a_cache_that_saves_nothing_and_of_no_attention(
    run, teacher, text, tmp_path
):
    short = "--distillation", STEP, "--transfer", STEP
    warnings = {
        ("--to", "deltaformer"): "of the teacher's, so that nothing is saved",
        ("--to", "deltanet", "--servable"): "No layer has attention",
        ("-o", "sliding_window=16"): "--transfer has no effect",
    }
    for flags, sentence in warnings.items():
        code, out, err = dry(run, teacher, text, tmp_path, *short, *flags)
        assert err == ""
        assert code == 0
        assert sentence in out
    assert "warning" not in dry(run, teacher, text, tmp_path, "-o", "sliding_window=16")[1]


def test_a_plan_that_does_not_fit_says_what_does_and_fails(
    run, teacher, text, tmp_path, monkeypatch
):
    short = (
        "--distillation",
        "steps=2,batch_size=8,length=256",
        "-o",
        "sliding_window=16",
        "--gpu",
        "h100",
    )
    monkeypatch.setattr(of_few_bits, "is_bitsandbytes_available", lambda: False)
    assert dry(run, teacher, text, tmp_path, *short, "--teacher-bits", 4)[0] == 0
    monkeypatch.setitem(costs.DEVICES, "h100", costs.Device(10, 1e12))
    code, out, err = dry(run, teacher, text, tmp_path, *short)
    assert "the plan must fit into the memory of h100" in err
    assert code == 2
    measures = (
        "activation_checkpointing=true",
        "and -t bf16=true",
        "and --teacher-bits 4",
        "and LoRA",
        "more or larger",
    )
    places = [out.index(x) for x in measures]
    assert places == sorted(places)


def test_an_option_with_a_wrong_value_is_named(run, teacher, text, tmp_path):
    code, _, err = dry(run, teacher, text, tmp_path, "--to", "deltanet", "-o", "gate=scaler")
    assert "gate must be one of" in err
    assert "keep must" not in err
    assert code == 2


def test_a_folder_in_which_nothing_can_be_written_is_refused_by_a_dry_run(run, teacher, text):
    command = "convert", teacher, "--text", text, "--dry-run", "--output", "/proc/o"
    code, _, err = run(*command)
    assert "output must be a folder that can be written to" in " ".join(err.split())
    assert code == 2


def test_windows_longer_than_the_text_are_refused_by_a_dry_run(run, teacher, text, tmp_path):
    command = (
        "fine-tune",
        teacher,
        "--text",
        text,
        "--output",
        tmp_path / "out",
        "--length",
        100_000,
        "--dry-run",
    )
    code, _, err = run(*command)
    assert "tokens must be at least one window of 100000 tokens" in " ".join(err.split())
    assert code == 2


def test_an_export_that_is_refused_says_what_to_do():
    for case in (
        Case("", "hf_memory_linear", {}),
        Case("", "hf_memory_deltanet", {"memory_rope": True}),
    ):
        with pytest.raises(NotExportable, match=r"Convert.* again with .*--servable"):
            find_target(make_config(case))


@pytest.mark.parametrize(
    ("teacher", "to", "advice"),
    [
        ("qwen3", "attention", "Give --to deltanet, or leave out --servable"),
        ("qwen2", "deltanet", "Give --to attention, or leave out --servable"),
        ("gemma3", "attention", "No engine has students of such a teacher. Leave out"),
        ("olmo2", "deltanet", "No engine has students of such a teacher. Leave out"),
    ],
)
def test_refusals_of_servable_students_do_not_point_in_a_circle(teacher, to, advice):
    """What the refusal of an export says is not refused by the conversion, and the other way round."""
    config = make_teacher(teacher).config
    config.attention_bias = False
    with pytest.raises(NotExportable, match=advice):
        check_servable(resolve(Recipe(to, servable=True), config).student, to)
    usual = resolve(Recipe("attention"), config).student
    with pytest.raises(NotExportable) as refusal:
        find_target(usual)
    again = re.search(r"again with --to (\w+) --servable", str(refusal.value))
    assert (again is None) == advice.startswith("No engine")
    if again:
        check_servable(resolve(Recipe(again[1], servable=True), config).student, again[1])


def test_a_tokenizer_with_more_words_than_the_model_is_refused(run, teacher, tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(teacher, folder)
    word_tokenizer([*WORDS, *"bcd"], eos_token="end", unk_token="end").save_pretrained(folder)
    for command in (
        ("generate", folder, "--prompt", "a snake"),
        ("evaluate", folder, "--tasks", "answers"),
    ):
        code, _, err = run(*command)
        assert "must be the model's, whose embedding has 16 tokens" in " ".join(err.split())
        assert code == 2


def test_a_goal_measures_each_student_once():
    teacher = make_teacher("llama")
    options = {"sliding_window": 4, "num_kept_tokens": 0}
    recipe = replace(STUDENT, to="attention", keep=None, options=options, goal=-1.0)
    plan = resolve(recipe, teacher.config, TEXT)
    with pytest.raises(GoalNotReached) as failed:
        smallest_student(plan, teacher, TEXT, report=(told := []).append)
    measured = [x for x in told if x.task == "measuring untrained students"]
    heads = teacher.config.num_hidden_layers * teacher.config.num_key_value_heads
    assert len(measured) == len(failed.value.tried) <= heads * 2 / 3


def test_a_run_that_goes_on_does_not_rank_heads_again(tmp_path):
    teacher = make_teacher("llama")
    recipe = replace(STUDENT, to="attention", keep="heads:1/2", options={"sliding_window": 4})
    plan = resolve(recipe, teacher.config, TEXT)
    ranked = []
    chosen = []
    for _ in range(2):
        told = []
        made = convert(teacher, TEXT, plan, Run(tmp_path / "checkpoints", report=told.append))
        ranked.append(any("ranking" in now.task for now in told))
        chosen.append(made.plan.choice.scores)
    assert ranked == [True, False]
    assert chosen[0] == chosen[1]


def test_ctrl_c_says_how_a_run_goes_on(run, teacher, text, tmp_path, monkeypatch):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_memory.conversion.convert_and_save", stop)
    command = "convert", teacher, "--text", text, "--output", tmp_path / "student", *FAST
    _, _, err = run(*command, "--checkpoints", tmp_path / "checkpoints")
    assert f"the same command resumes from {tmp_path / 'checkpoints'}" in " ".join(err.split())


def test_shares_of_needles_have_intervals_that_are_not_empty():
    for samples in ([0.0] * 4, [1.0] * 4):
        low, high = Share(samples).interval()
        assert high - low > 0.4


def test_every_model_of_a_picture_has_a_color_of_its_own():
    colors = {to_rgb(plots._color(i)) for i in range(30)}
    assert len(colors) == 30


PLACES = torch.arange(600) % 60
ONCE = Schedule(1, 1e-3, batch_size=1, length=32)
OF_MODELS = {  # functions that take a model, called with a name in its place
    "perplexity": lambda: evaluation.perplexity("student", PLACES),
    "agreement": lambda: evaluation.agreement("student", make_teacher(), PLACES),
    "copy_gain": lambda: evaluation.copy_gain("student", PLACES),
    "cost": lambda: evaluation.cost("student", 20),
    "cache_bytes_after": lambda: evaluation.cache_bytes_after("student", 20),
    "convert": lambda: conversion.convert("student", PLACES, Recipe("linear")),
    "make_student": lambda: conversion.make_student("student"),
    "distill": lambda: conversion.distill("student", make_teacher(), PLACES, ONCE),
    "distill from": lambda: conversion.distill(make_model(PLAIN), "student", PLACES, ONCE),
    "attention_transfer": lambda: conversion.attention_transfer(
        "student", make_teacher(), PLACES, ONCE
    ),
    "fine_tune": lambda: conversion.fine_tune("student", PLACES, ONCE),
    "train": lambda: conversion.train("student", PLACES, ONCE),
    "build_datastore": lambda: decoding.build_datastore("student", PLACES, "nowhere"),
    "EarlyExit": lambda: decoding.EarlyExit("student"),
    "calibrate": lambda: decoding.calibrate("student", PLACES.expand(200, -1)),
    "fit_classifier": lambda: decoding.fit_classifier("student", PLACES[None]),
    "use_memory_ops": lambda: hf_memory.use_memory_ops("student"),
    "save_memory": lambda: hf_memory.save_memory(DynamicCache(), "nowhere", "student"),
    "load_memory": lambda: hf_memory.load_memory("nowhere", "student"),
    "Conversation": lambda: hf_memory.Conversation("student", None),
}


@pytest.mark.parametrize("name", OF_MODELS)
def test_a_name_in_place_of_a_model_is_refused(name):
    expected = r"(model|teacher|student) must be a model, got str 'student': load it first, as with"
    with pytest.raises(ValueError, match=expected):
        OF_MODELS[name]()


def test_a_layer_type_of_another_library_is_named_as_it_was_given():
    """transformers renames "mamba" to "linear_attention"."""
    with pytest.raises(ValueError, match=r"layer_types must be one of .*'memory'.*, got 'mamba'"):
        make_config(PLAIN, layer_types=["mamba"] * 2)


OF_TOKENS = {  # functions that take tokens
    "perplexity": evaluation.perplexity,
    "perplexity_by_position": evaluation.perplexity_by_position,
    "copy_gain": evaluation.copy_gain,
    "recall_by_distance": lambda model, x: evaluation.recall_by_distance(model, x, [64]),
    "agreement": lambda model, x: evaluation.agreement(model, model, x),
    "agreement_by_position": lambda model, x: evaluation.agreement_by_position(model, model, x),
}


@pytest.mark.parametrize(
    ("tokens", "given"),
    [
        (PLACES.numpy(), "ndarray"),
        (PLACES.tolist(), "list"),
        (PLACES[None], rf"\(1, {len(PLACES)}\) of torch.int64"),
    ],
    ids=["array", "list", "rows"],
)
@pytest.mark.parametrize("name", OF_TOKENS)
def test_a_text_that_is_no_tensor_of_one_dimension_is_refused(name, tokens, given):
    expected = rf"tokens must be a Text or a tensor \[T\] of whole numbers, got {given}"
    with pytest.raises(ValueError, match=expected):
        OF_TOKENS[name](make_model(PLAIN), tokens)


SWAPPED = {  # calls with arguments of another kind, and what is said of them
    "save_memory": (
        lambda model: hf_memory.save_memory("nowhere", DynamicCache(), model),
        "path must be a path, got a DynamicCache",
    ),
    "export_model": (
        lambda model: hf_memory.export_model("nowhere", model),
        "folder must be a path, got a LinearTransformerForCausalLM",
    ),
    "build_datastore": (
        lambda model: decoding.build_datastore(model, PLACES, model),
        "folder must be a path, got a LinearTransformerForCausalLM",
    ),
    "Datastore": (
        lambda model: decoding.Datastore("nods"),
        "datastore must be a folder that build_datastore .*, got nods, which has no datastore.json",
    ),
    "NearestNeighbours": (
        lambda model: decoding.NearestNeighbours(model, "dsx"),
        r"datastore must be a Datastore, such as Datastore\(folder\), got 'dsx'",
    ),
    "Spalm": (
        lambda model: decoding.Spalm(model, "dsx", None),
        r"datastore must be a Datastore, such as Datastore\(folder\), got 'dsx'",
    ),
    **{
        name: (
            lambda model, name=name: getattr(evaluation, name)(model, 20),
            "config must be a config, as model.config, got a LinearTransformerForCausalLM",
        )
        for name in ("cache_bytes", "kv_cache_bytes")
    },
    "cache_share": (
        lambda model: evaluation.cache_share(model.config, model, 20),
        "teacher must be a config, as model.config, got a LinearTransformerForCausalLM",
    ),
}


@pytest.mark.parametrize("name", SWAPPED)
def test_an_argument_of_another_kind_is_named(name):
    call, expected = SWAPPED[name]
    with pytest.raises(ValueError, match=f"^{expected}"):
        call(make_model(PLAIN))


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@pytest.mark.parametrize("kind", ["ndarray", "list"])
def test_inputs_of_ops_that_are_no_tensors_are_refused(op, kind):
    given = op.example(B=1, T=4, H=1, HV=1, K=8, V=8)
    floats = [
        name for name, x in given.items() if isinstance(x, torch.Tensor) and x.is_floating_point()
    ]
    for name in floats:
        x = given[name].detach().float()
        other = given | {name: x.numpy() if kind == "ndarray" else x.tolist()}
        with pytest.raises(ValueError, match=rf"{name} must be a .*[Tt]ensor.*, got {kind}"):
            op.op(**other, backend="reference")


@pytest.mark.parametrize("bounds", [torch.tensor([0, 4]).numpy(), [0, 4]], ids=["array", "list"])
def test_boundaries_that_are_no_tensor_are_refused(bounds):
    given = OPS[0].example(B=1, T=4, H=1, HV=1, K=8, V=8)
    with pytest.raises(ValueError, match=r"cu_seqlens must be a torch.Tensor, got (ndarray|list)"):
        OPS[0].op(**given, cu_seqlens=bounds)


NO_TEACHERS = {
    "LlamaForCausalLM, which the student computes as it does, got 'LlamaModel'": lambda x: x.model,
    "one without adapters: merge them first": lambda x: get_peft_model(
        x, LoraConfig(target_modules=["q_proj"])
    ),
    "a causal language model of transformers, got 'Linear'": lambda x: torch.nn.Linear(2, 2),
}


@pytest.mark.parametrize("message", NO_TEACHERS)
def test_what_is_no_whole_teacher_is_not_converted(message):
    model = NO_TEACHERS[message](make_teacher("llama"))
    with pytest.raises(ValueError, match=f"teacher must be .*{message}"):
        conversion.convert(model, TEXT, STUDENT)


def test_folders_may_be_strings(tmp_path):
    assert Run(checkpoints="a").of("transfer").checkpoints == Path("a/transfer")
    assert conversion.Request("teacher", ["a.txt"], "b").output == Path("b")
    with pytest.raises(ValueError, match="run must be Run, got 'a'"):
        conversion.convert(make_teacher("llama"), TEXT, STUDENT, "a")


WRONG_SCHEDULES = {
    "repeats": (2.0, "from 0 to 1, got 2.0"),
    "start_length": (64, "at most its length 32, got 64"),
    "steps": (-1, "at least 0, got -1"),
    "batch_size": ("2", "int, got '2'"),
    "learning_rate": ("1e-3", "float, got '1e-3'"),
    "chunk_length": (-7, "at least 0, got -7"),
}


@pytest.mark.parametrize("learn", [conversion.distill, conversion.attention_transfer])
@pytest.mark.parametrize("name", WRONG_SCHEDULES)
def test_a_stage_checks_its_schedule(learn, name):
    value, expected = WRONG_SCHEDULES[name]
    teacher = make_teacher("llama")
    schedule = Schedule(1, 1e-3, length=32)._replace(**{name: value})
    with pytest.raises(ValueError, match=f"{name} of schedule must be {expected}"):
        learn(conversion.make_student(teacher, "linear"), teacher, TEXT, schedule)


def test_models_that_cannot_learn_from_each_other_are_refused():
    teacher = make_teacher("llama")
    student = conversion.make_student(teacher, "linear")
    other = make_teacher("llama")
    other.resize_token_embeddings(70, mean_resizing=False)
    schedule = Schedule(1, 1e-3, length=32)
    for learn in (conversion.distill, conversion.attention_transfer):
        with pytest.raises(ValueError, match="student must be one, as make_student makes, got 'Ll"):
            learn(teacher, student, TEXT, schedule)
        with pytest.raises(ValueError, match="vocabulary of 70 tokens, got 64"):
            learn(student, other, TEXT, schedule)
    with pytest.raises(ValueError, match="student must be a model of its teacher's vocabulary of "):
        agreement(student, other, TEXT)
