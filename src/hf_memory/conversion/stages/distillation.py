"""Distillation: the whole student is trained to predict what its teacher predicts."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_memory.conversion.data import TokenWindows
from hf_memory.conversion.recipe import Schedule, check_loss
from hf_memory.conversion.run import Run
from hf_memory.conversion.stages.divergence import (
    LossOfTokens,
    cross_entropy,
    divergence,
    last_hidden_states,
    sliced_loss,
)
from hf_memory.conversion.stages.fine_tuning import trained
from hf_memory.conversion.stages.sharding import sharded_teacher
from hf_memory.conversion.stages.trainer import TRAINING, StageTrainer, run_trainer
from hf_memory.conversion.students.weights import check_student, shares_weights
from hf_memory.files.text import Text
from hf_memory.modeling.any_model import head
from hf_memory.modeling.base import MemoryForCausalLM
from hf_memory.modeling.checks import check
from hf_memory.progress import History

DISTILLATION = "distillation"


class DistillationTrainer(StageTrainer):
    """L = (1 - c) temperature^2 KL(teacher || student) + c CE(text), c = cross_entropy, averaged over targets.

    Targets are tokens whose label is not -100, and each part is of the predictions of these.
    """

    def __init__(
        self,
        *args,
        teacher: PreTrainedModel | None,
        temperature: float,
        cross_entropy: float,
        **kwargs,
    ):
        check_loss(temperature, cross_entropy)
        super().__init__(*args, **kwargs)
        self.teacher: Any = teacher
        self.temperature = temperature
        self.cross_entropy = cross_entropy
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = False  # the Trainer counts targets

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The loss; with `return_outputs` also the student's outputs, without logits."""
        # what each token must predict
        targets = F.pad(inputs["labels"][:, 1:], (0, 1), value=-100).flatten()
        kept = (targets != -100).nonzero().squeeze(1)
        parts = self.accelerator.num_processes * (
            self.current_gradient_accumulation_steps if model.training else 1
        )
        count = len(kept) if num_items_in_batch is None else num_items_in_batch / parts
        loss_of = self.loss_of(inputs, targets[kept], kept)
        loss_from = lambda head, x: sliced_loss(head, x, loss_of, kept) / count  # noqa: E731
        read = {name: inputs.get(name) for name in ("input_ids", "position_ids")}
        outputs = model(**read, use_cache=False, loss_from=loss_from, **self.reading)
        return (outputs.loss, outputs) if return_outputs else outputs.loss

    def loss_of(self, inputs: dict[str, Tensor], targets: Tensor, kept: Tensor) -> LossOfTokens:
        """The parts of the loss of a batch, summed over `targets` [n], which the tokens at places `kept` predict."""
        part = self.cross_entropy
        parts = []
        if part < 1:
            parts.append((1 - part, self.divergence(inputs, kept)))
        if part > 0:
            text: LossOfTokens = lambda logits, where: cross_entropy(logits, targets[where])  # noqa: E731
            parts.append((part, text))
        return lambda logits, where: torch.stack(
            [weight * loss(logits, where) for weight, loss in parts]
        ).sum()

    def divergence(self, inputs: dict[str, Tensor], kept: Tensor) -> LossOfTokens:
        """The divergence from the teacher's predictions, for which the teacher runs here."""
        with torch.no_grad(), self.accelerator.autocast():
            read = last_hidden_states(self.teacher, inputs["input_ids"], inputs.get("position_ids"))
            hidden_states = read.flatten(0, 1)[kept]

        def loss(logits: Tensor, where: slice) -> Tensor:
            with torch.no_grad():
                target = head(self.teacher, hidden_states[where])
            return divergence(logits, target, self.temperature)

        return loss


def distill(
    student: MemoryForCausalLM,
    teacher: PreTrainedModel,
    tokens: Text | Tensor,
    schedule: Schedule,
    *,
    temperature: float = 1.0,
    cross_entropy: float = 0.0,
    train: str = "all",
    seed: int = 0,
    run: Run = Run(),
) -> History:
    """Train a student to predict what its teacher predicts, by KL(teacher || student).

    Returns and raises what `attention_transfer` does.

    Args:
        student: the student, trained in place; it must not share the teacher's weights, as that of `shrink_cache` does.
        teacher: the teacher; it is not changed.
        tokens: the training text.
        schedule: the training schedule.
        temperature: divides the logits of both models; above 1, unlikely tokens count more.
        cross_entropy: weight of the cross-entropy with the text in the loss, from 0 to 1.
        train: what learns: `"all"` weights, `"attention"`, all but embeddings and feed-forward layers, the parts that
            are `"new"`, or with `"lora:8"` these and LoRA of rank 8.
        seed: seed for the order of the windows, and for LoRA.
        run: checkpoints, progress reports and options of the Trainer.
    """
    check_student(student, teacher)
    is_apart = not shares_weights(student, teacher)
    wanted = "one with weights of its own, as copy.deepcopy(student) has: training would change its teacher"
    check(is_apart, "student", wanted, "one that shares the teacher's")
    data = TokenWindows(tokens, schedule, seed)
    how: dict = {"temperature": temperature, "cross_entropy": cross_entropy}
    belongs_to = {"student": student, "teacher": teacher, "train": train, **how}
    with sharded_teacher(teacher.eval()) as teacher, trained(student, train, seed):
        trainer = partial(DistillationTrainer, teacher=teacher, **how)
        return run_trainer(trainer, student, data, loss_name(cross_entropy), run, belongs_to)


def loss_name(cross_entropy: float) -> str:
    """The name of a stage with this loss: it is training, not distillation, if the loss is only cross-entropy."""
    return TRAINING if cross_entropy == 1 else DISTILLATION
