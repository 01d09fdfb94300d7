"""Distillation: the whole student learns its teacher's predictions."""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_memory.conversion.data import TokenWindows
from hf_memory.conversion.recipe import Schedule, check_loss
from hf_memory.conversion.run import Run
from hf_memory.conversion.stages.sharding import sharded_teacher
from hf_memory.conversion.stages.trainer import TRAINING, StageTrainer, run_trainer
from hf_memory.evaluation.plots import History
from hf_memory.modeling.base import MemoryForCausalLM

DISTILLATION = "distillation"


class DistillationTrainer(StageTrainer):
    """L = (1 - c) temperature^2 KL(teacher || student) + c CE(text), c = cross_entropy, averaged over tokens."""

    def __init__(self, *args, teacher: PreTrainedModel | None, temperature: float, cross_entropy: float, **kwargs):
        check_loss(temperature, cross_entropy)
        super().__init__(*args, **kwargs)
        self.teacher = teacher
        self.temperature = temperature
        self.cross_entropy = cross_entropy
        self.model_accepts_loss_kwargs = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The divergence, and with `return_outputs` the student's outputs too."""
        labels = inputs["labels"] if self.cross_entropy > 0 else None  # the text's own loss costs as much as the logits
        outputs = model(input_ids=inputs["input_ids"], labels=labels, use_cache=False)
        loss = 0.0 if labels is None else self.cross_entropy * outputs.loss
        if self.cross_entropy < 1:
            loss = loss + (1 - self.cross_entropy) * self.divergence(inputs, outputs.logits)
        return (loss, outputs) if return_outputs else loss

    def divergence(self, inputs: dict[str, Tensor], logits: Tensor) -> Tensor:
        """From what the teacher predicts now."""
        with torch.no_grad(), self.accelerator.autocast():
            target = self.teacher(  # type: ignore[misc]
                input_ids=inputs["input_ids"], use_cache=False
            ).logits
        return divergence(logits, target, self.temperature)


def divergence(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """temperature^2 KL(teacher || student) of logits [B, T, V], averaged over tokens."""
    p_student, p_teacher = ((x.float() / temperature).log_softmax(-1).flatten(0, -2) for x in (student, teacher))
    return temperature**2 * F.kl_div(p_student, p_teacher, log_target=True, reduction="batchmean")


def distill(
    student: MemoryForCausalLM,
    teacher: PreTrainedModel,
    tokens: Tensor,
    schedule: Schedule,
    *,
    temperature: float = 1.0,
    cross_entropy: float = 0.0,
    seed: int = 0,
    run: Run = Run(),
) -> History:
    """Teach the whole student its teacher's predictions: KL(teacher || student); see `attention_transfer`.

    Args:
        student: learns, in place.
        teacher: stays as it is.
        tokens: [T] of the text to learn on.
        schedule: how long and how fast.
        temperature: divides the logits of both; above 1, unlikely tokens count more.
        cross_entropy: part of the loss that is the text's own, from 0 to 1.
        seed: of the order of the windows.
        run: where checkpoints are, and who hears of it.
    """
    data, how = TokenWindows.of(tokens, schedule, seed), {"temperature": temperature, "cross_entropy": cross_entropy}
    belongs_to = {"student": student, "teacher": teacher, **how}
    with sharded_teacher(teacher.eval()) as teacher:
        trainer = partial(DistillationTrainer, teacher=teacher, **how)
        return run_trainer(trainer, student, data, schedule, loss_name(cross_entropy), run, belongs_to)


def loss_name(cross_entropy: float) -> str:
    """What a stage with this loss is called: where the text is all that is learned, nothing is distilled."""
    return TRAINING if cross_entropy == 1 else DISTILLATION
