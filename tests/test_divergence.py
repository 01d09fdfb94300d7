"""The loss of a distillation in slices is the plain formula on all logits, which are never there at once."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from cases import CASES, SIZES, make_model, random_tokens
from comparing import assert_close
from hf_memory.conversion.stages import divergence
from hf_memory.conversion.stages.distillation import DistillationTrainer

V = 97
C = SIZES["hidden_size"]
B = 2
T = 11  # a vocabulary that no other size is
STUDENTS = {
    "capped": ("deltanet-as-in-gemma", None),
    "tied": ("linear-sliding", None),
    "adapted": ("deltanet-as-in-gemma", "lm_head"),
}
PARTS = [
    (0.0, 1.0, 0.0),
    (0.25, 2.0, 0.5),
    (1.0, 1.0, 0.8),
]  # of the text, temperature, share that is no target


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Slices of three tokens, compared two at a time."""
    monkeypatch.setattr(divergence, "SLICE", 3 * V)
    monkeypatch.setattr(divergence, "BLOCK", 2 * V)


def student_and_teacher(name):
    case, adapted = STUDENTS[name]
    student, teacher = (
        make_model(next(c for c in CASES if c.name == x), vocab_size=V)
        for x in (case, "deltanet-as-in-gemma")
    )
    if adapted:
        student = get_peft_model(
            student, LoraConfig(r=2, target_modules=[adapted], init_lora_weights=False)
        )
    return student.double(), teacher.double()


def trainer_of(teacher, part, temperature):
    """What a trainer knows when it makes a loss."""
    loss = {"cross_entropy": part, "temperature": temperature}
    accelerator = SimpleNamespace(autocast=torch.no_grad, num_processes=1)
    trainer = SimpleNamespace(**loss, teacher=teacher, accelerator=accelerator, reading={})
    trainer.loss_of = lambda *batch: DistillationTrainer.loss_of(trainer, *batch)
    trainer.divergence = lambda *batch: DistillationTrainer.divergence(trainer, *batch)
    return trainer


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_divergence_and_its_gradient_are_those_of_the_definition(temperature):
    student, teacher = torch.randn(2, 7, V, dtype=torch.float64)
    student.requires_grad_()
    q, p = (torch.softmax(x / temperature, -1) for x in (student, teacher))
    expected = temperature**2 * (p * (p / q).log()).sum()
    found = divergence.divergence(student, teacher, temperature)
    assert_close(found, expected)
    assert_close(*(torch.autograd.grad(3 * x, student)[0] for x in (found, expected)))


class Largest(TorchDispatchMode):
    """The most logits that one tensor has."""

    found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if (
            isinstance(result, torch.Tensor)
            and result.shape[-1:] == (V,)
            and result.shape != (C, V)
        ):  # a weight
            self.found = max(self.found, result.numel())
        return result


@pytest.mark.parametrize(("part", "temperature", "masked"), PARTS)
@pytest.mark.parametrize("name", STUDENTS)
@pytest.mark.parametrize("is_sharded", [False, True])
def test_slices_give_the_loss_and_the_gradients_of_the_plain_formula(
    is_sharded, name, part, temperature, masked, monkeypatch
):
    monkeypatch.setattr(divergence, "is_sharded", lambda: is_sharded)
    student, teacher = student_and_teacher(name)
    tokens = random_tokens(B, T)
    logits = student(tokens).logits
    log_p, log_q = (
        (x / temperature).log_softmax(-1) for x in (teacher(tokens).logits.detach(), logits)
    )
    labels = tokens.masked_fill(torch.rand(B, T) < masked, -100)
    chosen = labels[:, 1:] != -100
    kl = temperature**2 * (log_p.exp() * (log_p - log_q)).sum(-1)[:, :-1][chosen].mean()
    text = F.cross_entropy(logits[:, :-1][chosen], tokens[:, 1:][chosen])
    plain = (1 - part) * kl + part * text
    learned = [x for x in student.parameters() if x.requires_grad]
    expected = torch.autograd.grad(3 * plain, learned, allow_unused=True)

    inputs = {"input_ids": tokens, "labels": labels}
    trainer = trainer_of(teacher, part, temperature)
    with Largest() as largest:
        loss = DistillationTrainer.compute_loss(trainer, student.eval(), inputs)
        found = torch.autograd.grad(3 * loss, learned, allow_unused=True)
    assert largest.found <= 3 * V
    assert_close(loss, plain)
    for x, y in zip(found, expected, strict=True):
        if y is not None:
            assert_close(x, y)
    with torch.no_grad():
        again = DistillationTrainer.compute_loss(trainer, student, inputs)
    assert torch.equal(again, loss)
