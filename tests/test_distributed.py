"""Two processes on the CPU: plans for tensor, data and pipeline parallelism, conversion with FSDP2; and its options."""

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from cases import CASES, FIRST_OF_FAMILY, SIZES, make_model, passes_gradients, random_tokens
from context_parallel_check import SPLIT
from distributed_conversion import STAGES, convert_and_save
from hf_memory import DeltaNetConfig, DeltaNetForSequenceClassification, context_parallel
from hf_memory.conversion import Run
from hf_memory.conversion.students import STUDENTS
from teachers import RUN, SCHEDULE, convert, make_teacher, text
from test_own_losses import DIVISIBLE

SCRIPT = Path(__file__).with_name("distributed_check.py")
CONVERSION = SCRIPT.with_name("distributed_conversion.py")
CONTEXT = SCRIPT.with_name("context_parallel_check.py")
EXPERTS = "deltanet-as-in-gemma"
SHARDED = (
    "linear-hedgehog-rope",
    "linear-full",
    "gla",
    "gated-deltanet-sliding",
    "kda",
    "rwkv7",
    "transformer-xl",
)
SHARDED += ("attention-sinks", "attention-kept", EXPERTS)


def run(command):
    """What a program prints, unless it fails."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_model_in_two_processes_equals_one(tmp_path):
    for case in CASES:
        if case.name in (*SHARDED, "transformer-reversible"):
            options = {"full_attention_heads": None} if case.name == "attention-kept" else {}
            make_model(case, **options).save_pretrained(tmp_path / case.name)
    spread = [f"logits/tp_size/{name}" for name in SHARDED]
    spread += [f"logits/fsdp_size/{SHARDED[0]}", f"logits/pp_size/{SHARDED[1]}"]
    spread += [f"logits/ep_size/{EXPERTS}", f"gradients/ep_size/{EXPERTS}"]
    spread += [
        "gradients/fsdp_size/transformer-reversible"
    ]  # in one process its inputs are recomputed, and rounded
    printed = run([sys.executable, SCRIPT, tmp_path, *spread])
    differences = dict(
        line.split() for line in printed.splitlines() if line.startswith(tuple(spread))
    )
    assert set(differences) == set(spread)
    assert all(
        float(x) < (1e-4 if "gradients" in which else 1e-5) for which, x in differences.items()
    )


def test_rows_that_are_split_over_processes_equal_whole_ones():
    printed = run([sys.executable, CONTEXT]).splitlines()
    differences = dict(
        line.split()
        for line in printed
        if line.startswith(("rows/", "prefill/", "sharded/", "loss/", "trainer/"))
    )
    expected = {f"rows/4/{case.name}" for case in filter(passes_gradients, SPLIT)}
    expected |= {
        f"{which}/{case.name}" for case in FIRST_OF_FAMILY for which in ("rows/2", "prefill/4")
    }
    expected |= {f"loss/4/{name.replace(' ', '-')}" for name in DIVISIBLE} | {
        "sharded/2x2/gated-deltanet-sliding",
        "trainer/4/gated-deltanet-sliding",
    }
    assert set(differences) == expected
    with_losses = ("sharded", "loss", "trainer")  # of predictions in float32
    assert all(
        float(x) < (1e-6 if which.startswith(with_losses) else 1e-10)
        for which, x in differences.items()
    )
    (refusal,) = [line for line in printed if line.startswith("refused")]
    assert "rows must be the same in all processes" in refusal


@contextmanager
def process_group(folder):
    """A process group of this process alone."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=0, world_size=1
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture
def group_of_one(tmp_path):
    with process_group(tmp_path):
        yield


def by_keyword(model, batch):
    return model(**batch)


def by_position(model, batch):
    return model(batch["input_ids"], batch["attention_mask"], labels=batch["labels"])


def of_a_trainer(model, batch):
    count = (batch["labels"][:, 1:] != -100).sum()
    return model(**batch, num_items_in_batch=2 * count, use_cache=False)  # as of two micro-batches


def of_embeddings(model, batch):
    embeds = model.get_input_embeddings()(batch["input_ids"])
    return model(
        inputs_embeds=embeds, **{name: batch[name] for name in ("attention_mask", "labels")}
    )


@pytest.mark.parametrize("call", [by_keyword, by_position, of_a_trainer, of_embeddings])
@pytest.mark.parametrize("around", [None, "lora"])
def test_a_model_whose_rows_are_split_is_called_as_any_model(call, around, group_of_one):
    model = make_model(CASES[0])
    if around == "lora":
        model = get_peft_model(model, LoraConfig(r=2, task_type="CAUSAL_LM"))
    tokens = random_tokens(2, 9)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    batch = {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": tokens.masked_fill(mask == 0, -100),
    }
    expected = call(model, batch)
    with context_parallel(model):
        found = call(model, batch)
    assert torch.equal(found.logits, expected.logits)
    assert float(found.loss) == pytest.approx(float(expected.loss), rel=1e-6)
    assert torch.equal(call(model, batch).logits, expected.logits)


def test_different_rows_in_processes_that_share_them_are_refused(group_of_one, monkeypatch):
    def gather(found, own, group):
        found[:] = [own, ((2, 9), b"of other tokens")]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    model = make_model(CASES[0])
    expected = r"rows must be the same in all processes .*, got different ones of shapes \[\(2, 9\), \(2, 9\)\]"
    with context_parallel(model), pytest.raises(ValueError, match=expected):
        model(input_ids=random_tokens(2, 9))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: torch.nn.Linear(2, 2), "Linear"),
        (make_teacher, "LlamaForCausalLM"),
        (
            lambda: DeltaNetForSequenceClassification(DeltaNetConfig(**SIZES)),
            "DeltaNetForSequenceClassification",
        ),
    ],
)
def test_rows_of_other_models_are_not_split(make, name, group_of_one):
    model = make()
    expected = f"context_parallel must be given a causal language model of this package, got {name}"
    with pytest.raises(ValueError, match=expected), context_parallel(model):
        pass


@pytest.mark.slow
def test_a_conversion_in_two_processes_equals_one(tmp_path):
    convert_and_save("one", tmp_path)
    run([sys.executable, CONVERSION, tmp_path])
    students = {
        name: load_file(tmp_path / name / "model.safetensors")
        for name in ("one", "copied", "sharded", "resumed")
    }
    for name, x in students["one"].items():
        for way in ("copied", "sharded"):  # Adam makes much of the rounding of small gradients
            assert (students[way][name] - x).abs().max() < 1e-3 * x.abs().max(), (way, name)
        assert students["resumed"][name].equal(students["sharded"][name]), name


def same(a, b, tolerance=0.0):
    pairs = zip(a.student.parameters(), b.student.parameters(), strict=True)
    return all((x - y).abs().max() <= tolerance * x.abs().max() for x, y in pairs)


def test_checkpointing_and_accumulation_change_no_student():
    only_distillation = {**RUN, **STAGES, "transfer": SCHEDULE._replace(steps=0)}
    checkpointed = convert(
        make_teacher(), text(), **RUN | STAGES, run=Run(training={"activation_checkpointing": True})
    )
    assert same(convert(make_teacher(), text(), **RUN | STAGES), checkpointed)
    assert not checkpointed.student.is_activation_checkpointing
    in_two = Run(training={"gradient_accumulation_steps": 2})
    accumulated = convert(make_teacher(), text(), **only_distillation, run=in_two)
    assert same(convert(make_teacher(), text(), **only_distillation), accumulated, tolerance=1e-3)


@pytest.mark.parametrize("to", STUDENTS)
def test_every_student_learns_in_bfloat16(to):
    torch.manual_seed(0)
    teacher = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)).eval()
    once = SCHEDULE._replace(steps=1, learning_rate=1e-4)
    exact, rounded = (
        convert(
            teacher,
            text(),
            to=to,
            transfer=once,
            distillation=once,
            run=Run(training={"bf16": bf16}),
        )
        for bf16 in (False, True)
    )
    for stage, losses in exact.losses.items():
        assert rounded.losses[stage][0]["loss"] == pytest.approx(
            losses[0]["loss"], rel=0.05, abs=1e-3
        )
    assert {x.dtype for x in rounded.student.parameters()} == {
        rounded.student(text()[None]).logits.dtype
    }
