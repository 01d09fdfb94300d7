"""Distillation from what the student writes itself, by TRL's trainer for it."""

import copy
import runpy
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import DistillationConfig, DistillationTrainer

from cases import random_tokens
from teachers import SCHEDULE, convert, make_teacher, make_tokenizer, text

EXAMPLE = Path(__file__).parents[1] / "examples" / "on_policy.py"
NONE = SCHEDULE._replace(steps=0)
STUDENTS = {
    "attention": {"keep": "heads:1/4", "sliding_window": 6},
    "gated": {"keep": (1,)},
    "deltanet": {"sliding_window": 6},
    "deltaformer": {},
    "titans": {"sliding_window": 4},
}


class Remembering(DistillationTrainer):
    """Keeps what the student wrote in its last step, and the loss."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        """The loss."""
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        self.last = inputs, loss.item()
        return loss


def student_of(teacher, to):
    return convert(
        teacher, text(400), to=to, transfer=NONE, distillation=NONE, **STUDENTS[to]
    ).student


def trained(student, teacher, folder, **options):
    """The trainer of a student after its steps; prompts have 4 to 11 words."""
    words = [[f"w{token}" for token in row] for row in random_tokens(32, 11).tolist()]
    prompts = [" ".join(row[: 4 + i % 8]) for i, row in enumerate(words)]
    usual = {
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "max_completion_length": 8,
        "logging_steps": 1,
    }
    quiet = {
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
    }
    config = DistillationConfig(str(folder), **usual | quiet | options)
    data = Dataset.from_dict({"prompt": prompts})
    trainer = Remembering(
        student, teacher, config, train_dataset=data, processing_class=make_tokenizer()
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("to", STUDENTS)
def test_the_loss_of_padded_rows_is_the_divergence_of_each_row_alone(to, tmp_path):
    teacher = make_teacher().double()
    student = student_of(make_teacher(), to).double()
    start = copy.deepcopy(student).eval()
    rows, loss = trained(student, teacher, tmp_path, gradient_checkpointing=False).last
    divergences = []
    for row in range(4):
        prompt, written = (
            rows[f"{name}_ids"][row][rows[f"{name}_mask"][row] == 1]
            for name in ("prompt", "completion")
        )
        whole = torch.cat([prompt, written])[None]
        with torch.no_grad():
            ours, theirs = (
                model(whole).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
                for model in (start, teacher)
            )
        divergences.append((ours.exp() * (ours - theirs)).sum(-1))
    assert not rows["prompt_mask"].all()
    assert loss == pytest.approx(
        torch.cat(divergences).mean().item(), rel=1e-4, abs=1e-6
    )  # TRL computes in float32


def test_a_student_comes_nearer_to_its_teacher_where_it_writes(tmp_path):
    teacher = make_teacher()
    student = student_of(teacher, "gated")
    steps = {"max_steps": 12, "learning_rate": 1e-2, "per_device_train_batch_size": 16}
    trainer = trained(student, teacher, tmp_path, **steps)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])


def test_the_example_trains_all_but_embeddings_and_feed_forward_layers(tmp_path):
    teacher = make_teacher()
    student = student_of(teacher, "deltanet")
    for name, model in (("teacher", teacher), ("student", student)):
        model.save_pretrained(tmp_path / name)
        make_tokenizer().save_pretrained(tmp_path / name)
    words = " ".join(f"w{token}" for token in text(60).tolist())
    (tmp_path / "text.txt").write_text(words, encoding="utf-8")
    example = runpy.run_path(str(EXAMPLE))
    main = example["main"]
    main.__globals__.update(STEPS=2, PROMPT=10, COMPLETION=4)
    main(tmp_path / "teacher", tmp_path / "student", tmp_path / "text.txt", tmp_path / "better")
    better = AutoModelForCausalLM.from_pretrained(tmp_path / "better").state_dict()
    stayed = {name for name, x in student.state_dict().items() if torch.equal(x, better[name])}
    fixed = {name for name in better if ".mlp." in name or "embed" in name or "lm_head" in name}
    assert fixed <= stayed
    assert any(".mixer." in name for name in better.keys() - stayed)
