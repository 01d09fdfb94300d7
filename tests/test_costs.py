"""What a plan costs: as many bytes and operations as running it takes."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from hf_memory.conversion import Recipe, Run, Schedule, convert, resolve
from hf_memory.conversion.costs import DEVICES, costs, read_device
from hf_memory.conversion.describe import device_rows
from hf_memory.conversion.stages.fine_tuning import trained
from hf_memory.conversion.students import build
from teachers import make_teacher, text

LENGTH = 32
ROWS = 2
SCHEDULE = Schedule(steps=3, learning_rate=1e-3, batch_size=ROWS, length=LENGTH)
NONE = SCHEDULE._replace(steps=0)
WINDOW = {"sliding_window": 8}
WINDOW_ALONE = {**WINDOW, "num_kept_tokens": 0, "cache_bits": None}


def plan_of(teacher, **recipe):
    """A plan of distillation alone, unless another stage is given."""
    return resolve(
        Recipe(**{"keep": "none", "transfer": NONE, "distillation": SCHEDULE, **recipe}),
        teacher.config,
        text(),
    )


def saved_bytes(plan, teacher):
    """Bytes that a forward pass of a student without its head saves for the backward pass, besides its weights."""
    model = build(plan.student, teacher, seed=0)
    weights = {x.untyped_storage().data_ptr() for x in model.parameters()}
    saved = {}

    def save(x):
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with trained(model, plan.recipe.train, seed=0), saved_tensors_hooks(save, lambda x: x):
        model.train().model(text(ROWS * LENGTH).view(ROWS, LENGTH), use_cache=False)
    return sum(storage.nbytes() for place, storage in saved.items() if place not in weights)


@pytest.mark.parametrize(
    "recipe",
    [
        {"to": "deltanet", "keep": "heads:1/4", "options": WINDOW},
        {"to": "attention", "keep": "heads:1/4", "options": WINDOW_ALONE},
        {"to": "attention", "keep": "heads:1/4", "options": WINDOW_ALONE, "train": "all"},
        {"to": "deltanet", "keep": "none", "train": "new"},
        {"to": "gated", "keep": "none", "options": {"gate": "mamba2", "memory_rope": False}},
    ],
    ids=lambda recipe: " ".join((recipe["to"], recipe.get("train", ""))),
)
def test_activations_are_what_a_forward_pass_saves(recipe):
    teacher = make_teacher()
    plan = plan_of(teacher, **recipe)
    (cost,) = costs(plan)
    assert cost.parts["activations"] == saved_bytes(plan, teacher)


def test_layers_that_keep_different_numbers_of_tokens_cost_as_much_as_with_their_mean():
    teacher = make_teacher()
    seen = {"sliding_window": 8, "num_kept_tokens": [4, 28], "kept_block_size": 4}
    plan = plan_of(teacher, to="attention", options=seen)
    (cost,) = costs(plan)
    assert cost.parts["activations"] == pytest.approx(saved_bytes(plan, teacher), rel=0.01)
    (least,) = costs(plan_of(teacher, to="attention", options={**seen, "num_kept_tokens": 4}))
    assert least.parts["activations"] < 0.98 * cost.parts["activations"]


def test_small_blocks_of_kept_tokens_cost_what_they_save():
    """Few large ones are counted in their place, which see as many entries."""
    teacher = make_teacher()
    seen = {"sliding_window": 8, "num_kept_tokens": 9, "kept_block_size": 2}
    plan = plan_of(teacher, to="attention", options=seen)
    (cost,) = costs(plan)
    assert cost.parts["activations"] == pytest.approx(saved_bytes(plan, teacher), rel=0.03)


def test_a_student_in_bits_reads_text_after_its_costs_were_counted():
    """Nothing is left in the student of the tensors without data on which costs are counted."""
    teacher = make_teacher()
    seen = {"sliding_window": 8, "num_kept_tokens": 4, "kept_block_size": 4, "cache_bits": 4}
    plan = plan_of(teacher, to="attention", options=seen)
    assert costs(plan) == costs(plan)
    assert saved_bytes(plan, teacher) > 0


def test_weights_cost_two_operations_forward_and_four_backward():
    teacher = make_teacher()
    (cost,) = costs(plan_of(teacher, to="attention", keep="none", options=WINDOW_ALONE))
    matrices = sum(x.numel() for x in teacher.model.layers.parameters() if x.ndim == 2)
    matrices += teacher.lm_head.weight.numel()
    least = (2 + 6) * matrices * 3 * ROWS * LENGTH
    assert least < cost.flops < 1.5 * least  # attention and the window are the rest
    assert cost.tokens == 3 * ROWS * LENGTH
    h100 = DEVICES["h100"]
    assert cost.seconds(h100, processes=2) == pytest.approx(cost.flops / (2 * 0.35 * h100.flops))


def test_only_the_experts_that_a_token_uses_cost_operations():
    teacher = make_teacher("qwen3-moe")
    (cost,) = costs(plan_of(teacher, to="attention", keep="none", options=WINDOW_ALONE))
    used = teacher.config.num_experts_per_tok / teacher.config.num_experts
    weights = {
        name: x.numel()
        for name, x in teacher.named_parameters()
        if x.ndim > 1 and "embed" not in name
    }
    used = sum(n * used if "experts" in name else n for name, n in weights.items())
    least = (2 + 6) * used * 3 * ROWS * LENGTH
    assert least < cost.flops < 1.5 * least  # attention and the window are the rest


def test_what_changes_the_memory_of_a_stage():
    teacher = make_teacher("llama-tied")
    plan = plan_of(teacher, to="attention", keep="none", train="all", options=WINDOW_ALONE)
    (whole,) = costs(plan)
    (half,), (again,), (alone,) = (
        costs(plan, {name: value})
        for name, value in {
            "bf16": True,
            "activation_checkpointing": True,
            "gradient_accumulation_steps": 2,
        }.items()
    )
    assert whole.parts["student"] == whole.parts["teacher"] == 4 * plan.student_parameters
    assert whole.parts["optimizer"] == 2 * whole.parts["gradients"] == 8 * plan.student_parameters
    assert half.parts["activations"] < whole.parts["activations"]
    assert again.parts["activations"] < whole.parts["activations"]
    assert again.flops > whole.flops
    assert alone.parts["activations"] == pytest.approx(whole.parts["activations"] / 2, rel=0.1)


def test_processes_share_models_and_rows():
    plan = plan_of(make_teacher(), to="attention", train="all", options=WINDOW_ALONE)
    (whole,) = costs(plan)
    (shared,) = costs(plan, processes=ROWS)
    (row,) = costs(plan, {"gradient_accumulation_steps": ROWS})
    for name in ("student", "teacher", "optimizer", "gradients"):
        assert shared.parts[name] == whole.parts[name] / ROWS
    for name in ("activations", "logits"):
        assert shared.parts[name] == row.parts[name] < whole.parts[name]
    assert shared.flops == pytest.approx(whole.flops)


def test_logits_are_held_with_their_gradients():
    """Both models' logits with the gradients of their difference, and in fine-tuning those of all tokens in float32."""
    stages = {"transfer": SCHEDULE, "fine_tuning": SCHEDULE}
    plan = plan_of(make_teacher(), to="deltanet", keep="none", **stages)
    matrix = 4 * plan.student.vocab_size * ROWS * LENGTH
    head = 4 * plan.student.vocab_size * plan.student.hidden_size
    for half, size in ((False, matrix), (True, matrix / 2)):
        transfer, distillation, fine_tuning = costs(plan, {"bf16": half})
        assert transfer.parts["logits"] == 0
        students = teachers = size
        gradients = 2 * size
        assert distillation.parts["logits"] == students + teachers + gradients + head
        assert fine_tuning.parts["logits"] == students + 2 * matrix


def test_a_servable_plan_has_costs():
    plan = plan_of(
        make_teacher(),
        to="attention",
        keep=(1,),
        options={"attention_sinks": True, **WINDOW_ALONE},
    )
    assert all(cost.flops > 0 for cost in costs(plan, {"activation_checkpointing": True}))


def test_a_plan_on_a_device_has_its_memory_and_its_time():
    plan = plan_of(make_teacher(), to="attention", keep="none", options=WINDOW_ALONE)
    rows = dict(device_rows(plan, {}, "8xH200"))
    assert "of 141 GB" in rows["distillation on 8xH200"]
    assert "tokens/s" in rows[""]
    assert read_device("8xh200") == (8, DEVICES["h200"])
    for wrong in ("0xh100", "b300"):
        with pytest.raises(ValueError, match="gpu must be one of a100"):
            read_device(wrong)


def test_the_teacher_is_held_if_it_runs():
    stages = {"transfer": SCHEDULE, "fine_tuning": SCHEDULE}
    plan = plan_of(make_teacher(), to="deltanet", keep="none", **stages)
    transfer, distillation, fine_tuning = costs(plan)
    teacher = 4 * plan.teacher_parameters
    held = [cost.parts["teacher"] for cost in (transfer, distillation, fine_tuning)]
    assert held == [teacher, teacher, 0]
    assert torch.tensor([cost.peak for cost in (transfer, distillation, fine_tuning)]).min() > 0


@pytest.mark.parametrize("train", ["all", "attention", "new", "lora:2"])
def test_a_run_that_does_not_fit_is_refused_before_its_first_step(train, monkeypatch):
    teacher = make_teacher()
    steps = []
    plan = plan_of(teacher, to="gated", train=train)
    (cost,) = costs(plan)
    run = Run(report=steps.append)
    monkeypatch.setattr("hf_memory.conversion.costs.memory_for", lambda device: cost.peak - 1)
    with pytest.raises(
        ValueError, match=r"memory for distillation must be 0.0 GB \(student 0.0, .*, got 0.0 GB"
    ):
        convert(teacher, text(), plan, run)
    assert not steps
    monkeypatch.setattr("hf_memory.conversion.costs.memory_for", lambda device: cost.peak)
    convert(teacher, text(), plan, run)
    assert all(step.memory > 0 for step in steps)


def test_the_work_of_later_stages_is_in_proportion():
    plan = plan_of(
        make_teacher(), to="gated", transfer=SCHEDULE, fine_tuning=SCHEDULE._replace(steps=6)
    )
    transfer, distillation, fine_tuning = plan.stages
    teacher = plan.teacher_parameters
    student = plan.student_parameters
    assert plan.later(fine_tuning) == 0
    assert plan.later(distillation) == pytest.approx(2 * 3 * student / (teacher + 3 * student))
    all_that_follows = teacher + 9 * student
    assert plan.later(transfer) == pytest.approx(
        all_that_follows / (teacher + 3 * transfer.learned)
    )
