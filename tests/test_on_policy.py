"""Distillation from what the student writes itself."""

from random import Random

import pytest
import torch
from transformers import TrainerCallback

from hf_memory import conversion
from hf_memory.conversion import OnPolicy, Run, Schedule, TokenWindows, distill, make_student
from hf_memory.conversion.stages.distillation import continuation
from hf_memory.conversion.stages.divergence import divergence
from teachers import RUN, SCHEDULE, convert, make_teacher, same, text

OWN = OnPolicy(share=0.5, tokens=5)


class Stop(TrainerCallback):
    """Interrupts distillation after five steps."""

    def on_step_end(self, args, state, control, **kwargs):
        """After a checkpoint."""
        if args.run_name == "distillation" and state.global_step == 5:
            raise KeyboardInterrupt


def test_steps_are_as_many_as_the_share_and_rise_to_it():
    steps = [i for i in range(100) if OnPolicy(share=0.5, warmup=0.4).is_at(i, 100)]
    assert len(steps) == 40  # half as many in the rise
    assert [sum(a <= i < a + 20 for i in steps) for a in range(0, 100, 20)] == [2, 8, 10, 10, 10]
    assert [OnPolicy(share=1.0).is_at(i, 3) for i in range(3)] == [True] * 3
    assert not any(OnPolicy().is_at(i, 9) for i in range(9))


@torch.no_grad()
def test_a_row_is_sampled_as_its_model_predicts_and_from_its_own_dice():
    model = make_student(make_teacher(), "linear").double().eval()
    prompts = text(24).view(2, 12)
    written = continuation(model, prompts, 6, [Random(str(i)) for i in range(2)])
    assert torch.equal(written[1:], continuation(model, prompts[1:], 6, [Random("1")]))
    for row, whole in enumerate(torch.cat([prompts, written], dim=1)):
        die = Random(str(row))
        for place in range(12, 18):
            below = model(whole[None, :place]).logits[0, -1].softmax(-1).cumsum(-1)
            assert whole[place] == (below <= die.random() * below[-1]).sum()


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_loss_is_of_the_continuation_alone(beta):
    teacher, schedule, own = make_teacher(), SCHEDULE._replace(steps=1), OnPolicy(1.0, tokens=5, beta=beta)
    student = make_student(teacher, "linear")
    student.generation_config.eos_token_id = None
    data = TokenWindows(text(), schedule, 3, own)
    rows = [data[i] for i in range(2)]
    prompts = torch.stack([row["input_ids"][:-5] for row in rows])
    assert all((row["labels"][:-5] == -100).all() and (row["labels"][-5:] != -100).all() for row in rows)
    with torch.no_grad():
        written = continuation(student.eval(), prompts, 5, [Random(f"3, {i}") for i in range(2)])
        whole = torch.cat([prompts, written], dim=1)
        logits = [model(whole).logits[:, -6:-1].flatten(0, 1) for model in (student, teacher)]
        expected = divergence(*logits, 2.0, beta).item() / 10
    ends = student.generation_config.eos_token_id = [written[0, 1].item(), 63]
    losses = distill(student, teacher, text(), schedule, temperature=2.0, on_policy=own, cross_entropy=0.9, seed=3)
    kept = torch.tensor([not set(row[:i]) & set(ends) for row in written.tolist() for i in range(5)])
    assert not kept.all()
    part = divergence(*(x[kept] for x in logits), 2.0, beta).item() / 10
    assert losses[0]["loss"] == pytest.approx(part, rel=1e-4)
    assert part < expected


def test_a_stopped_run_writes_the_same_continuations(tmp_path):
    whole = convert(make_teacher(), text(), on_policy=OWN, **RUN)
    with pytest.raises(KeyboardInterrupt):
        convert(make_teacher(), text(), on_policy=OWN, run=Run(tmp_path, callbacks=(Stop(),)), **RUN)
    resumed = convert(make_teacher(), text(), on_policy=OWN, run=Run(tmp_path), **RUN)
    assert same(resumed.student, whole.student)
    assert resumed.losses == whole.losses
    assert not same(convert(make_teacher(), text(), **RUN).student, whole.student)


def test_gradient_accumulation_changes_nothing():
    recipe = RUN | {"transfer": SCHEDULE._replace(steps=0), "on_policy": OWN}
    runs = Run(), Run(training={"gradient_accumulation_steps": 2})
    losses = [convert(make_teacher(), text(), run=run, **recipe).losses["distillation"] for run in runs]
    for x, y in zip(*losses, strict=True):
        assert x["loss"] == pytest.approx(y["loss"], rel=1e-3)


def test_the_first_token_of_a_continuation_replaces_a_target():
    tokens, targets = torch.arange(60), torch.zeros(60, dtype=torch.bool)
    targets[20:26] = targets[40:46] = True
    schedule = Schedule(steps=40, learning_rate=0.0, batch_size=1, length=12)
    for start in ([], [63]):
        chosen = conversion.Text(tokens, torch.tensor(start, dtype=torch.long), targets)
        firsts = [row["input_ids"][-5] for row in TokenWindows(chosen, schedule, 0, OnPolicy(1.0, tokens=5))]
        assert targets[torch.stack(firsts)].all()


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"on_policy": OWN._replace(share=1.5)}, "share of on_policy must be from 0 to 1, got 1.5"),
        ({"on_policy": OWN._replace(beta=-1)}, "beta of on_policy must be from 0 to 1, got -1"),
        ({"on_policy": OWN._replace(tokens=0)}, "tokens of on_policy must be at least 1, got 0"),
        ({"on_policy": OWN._replace(tokens=16)}, "tokens of on_policy must be fewer than the 16 of a window, got 16"),
        ({"on_policy": OWN, "cross_entropy": 1.0}, "cross_entropy must be below 1 with on_policy or a scorer"),
    ],
)
def test_what_cannot_be_is_refused(recipe, message):
    with pytest.raises(ValueError, match=message):
        convert(make_teacher(), text(), **RUN, **recipe)
