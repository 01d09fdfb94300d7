"""The stages of a conversion, each a run of transformers' Trainer that can be stopped and resumed."""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import reduce
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from hf_memory.conversion.checkpoints import claim, is_claimed, last_whole_checkpoint, written
from hf_memory.conversion.data import TokenWindows
from hf_memory.conversion.sharding import processes, sharded_learner, sharded_teacher, whole
from hf_memory.evaluation.plots import History
from hf_memory.modeling.base import MemoryForCausalLM

TRANSFER, DISTILLATION, TRAINING = "attention transfer", "distillation", "training"
DEFAULTS = {  # of transformers' TrainingArguments
    "adam_beta2": 0.95,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "train_sampling_strategy": "sequential",
    "logging_nan_inf_filter": False,
    "save_total_limit": 1,
    "remove_unused_columns": False,
    "dataloader_pin_memory": False,
    "disable_tqdm": True,
    "report_to": "none",
}
OURS = (  # what a stage says itself
    "run_name",
    "seed",
    "output_dir",
    "use_cpu",
    "max_steps",
    "learning_rate",
    "per_device_train_batch_size",
    "lr_scheduler_type",
    "warmup_steps",
    "train_sampling_strategy",
    "remove_unused_columns",
    "save_strategy",
    "save_steps",
    "logging_steps",
)


class Schedule(NamedTuple):
    """How long and how fast a stage learns."""

    steps: int
    learning_rate: float
    batch_size: int = 8
    length: int = 256  # tokens of a window
    warmup: float = 0.05  # part of the steps

    def __str__(self) -> str:
        return (
            f"{self.steps} steps of {self.batch_size} windows of {self.length} tokens, "
            f"learning rate {self.learning_rate:g} falling as a cosine"
        )

    def check(self, stage: str) -> None:
        """Raise ValueError if a stage cannot be like this."""
        least = {"steps": 0, "batch_size": 1, "length": 2, "learning_rate": 0, "warmup": 0}
        for name, smallest in least.items():
            if not getattr(self, name) >= smallest:
                raise ValueError(f"{name} of {stage} must be at least {smallest}, got {getattr(self, name)}")


class AttentionTransfer(nn.Module):
    """The mixers of a student, and the loss that compares each with the attention that it replaces.

    L = sum over layers of |mixer(x) - attention(x)|^2 / |attention(x)|^2, x the input of the teacher's attention.
    One run of the teacher serves all layers, and a layer never sees what another layer of the student made.
    """

    def __init__(self, student: MemoryForCausalLM, teacher: PreTrainedModel):
        super().__init__()
        layers = enumerate(zip(student.config.mixer_types, student.model.layers))
        self.mixers = nn.ModuleDict({str(i): layer.mixer for i, (kind, layer) in layers if "memory" in kind})
        self._no_split_modules = sorted({type(mixer).__name__ for mixer in self.mixers.values()})
        self._seen = lambda input_ids: attention_seen(teacher, input_ids)  # no submodule: neither trained nor saved
        self.checkpointing = False

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        """[B, T] without padding -> the loss."""
        losses = [
            F.mse_loss(output.float(), target.float()) / reduce(target.float().square().mean(), "mean")
            for _, output, target in self.outputs(input_ids)
        ]
        return {"loss": torch.stack(losses).sum()}

    def activation_checkpointing_enable(self, **kwargs) -> None:
        """Let mixers keep their inputs alone for the way back; the Trainer calls it."""
        self.checkpointing = True

    def outputs(self, input_ids: Tensor) -> Iterator[tuple[nn.Module, Tensor, Tensor]]:
        """Each mixer, what it gives, and what the attention that it replaces gives [B, T, hidden_size]."""
        seen = self._seen(input_ids)
        for i, mixer in self.mixers.items():
            inputs, target = seen[int(i)]
            run = partial(checkpoint, mixer, use_reentrant=False) if self.checkpointing else mixer
            output, _ = run(inputs["hidden_states"], position_embeddings=inputs["position_embeddings"])
            yield mixer, output, target


@torch.no_grad()
def attention_seen(teacher: PreTrainedModel, input_ids: Tensor) -> list[tuple[dict, Tensor]]:
    """What went into and what came out of each attention layer of a teacher that reads [B, T]."""
    seen: list[tuple[dict, Tensor]] = []
    hooks = [
        layer.self_attn.register_forward_hook(
            lambda module, args, kwargs, output: seen.append((kwargs, output[0])), with_kwargs=True
        )
        for layer in teacher.model.layers
    ]
    try:
        teacher(input_ids, use_cache=False, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


class StageTrainer(Trainer):
    """A Trainer that stops at the first step whose loss or gradients are not finite, before it changes a weight."""

    def training_step(self, model, *args, **kwargs):
        """The loss; its gradients are in the parameters.

        Raises:
            ValueError: if one of them is not finite.
        """
        loss = super().training_step(model, *args, **kwargs)
        norm = get_total_norm([x.grad for x in model.parameters() if x.grad is not None])
        if not (loss + whole(norm).to(loss.device)).isfinite():
            step, name = self.state.global_step + 1, self.args.run_name
            raise ValueError(
                f"loss and gradients must be finite, got loss {loss:g} in step {step} of {name}; {not_finite(model)}"
            )
        return loss

    def _save_checkpoint(self, model, trial) -> None:
        """A checkpoint, whole or not at all."""
        folder = Path(str(self.args.output_dir), f"checkpoint-{self.state.global_step}")
        otherwise = "the checkpoint before it stays, and the same run goes on from there"
        try:
            with written(f"{folder.name} of {self.args.run_name}", folder.parent, otherwise):
                super()._save_checkpoint(model, trial)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def not_finite(model: nn.Module) -> str:
    """Where numbers of a model stopped being finite: the first such weight, or else the gradient that was so first."""
    for name, weight in model.named_parameters():
        if not whole(weight).isfinite().all():
            return f"the weight {name} is not finite"
    for name, weight in reversed(list(model.named_parameters())):  # as gradients come
        if weight.grad is not None and not whole(weight.grad).isfinite().all():
            return f"weights are finite, the gradient of {name} is not"
    return "weights and gradients are finite"


class DistillationTrainer(StageTrainer):
    """L = (1 - c) temperature^2 KL(teacher || student) + c CE(text), c = cross_entropy, averaged over tokens."""

    def __init__(self, *args, teacher: PreTrainedModel, temperature: float, cross_entropy: float, **kwargs):
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
            target = self.teacher(input_ids=inputs["input_ids"], use_cache=False).logits
        return divergence(logits, target, self.temperature)


def divergence(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """temperature^2 KL(teacher || student) of logits [B, T, V], averaged over tokens."""
    p_student, p_teacher = ((x.float() / temperature).log_softmax(-1).flatten(0, -2) for x in (student, teacher))
    return temperature**2 * F.kl_div(p_student, p_teacher, log_target=True, reduction="batchmean")


def attention_transfer(
    student: MemoryForCausalLM, teacher: PreTrainedModel, tokens: Tensor, schedule: Schedule, **run
) -> History:
    """Teach each memory layer to give what the teacher's attention gives on the teacher's own hidden states.

    Args:
        student: its memory layers learn, in place; nothing else does.
        teacher: stays as it is.
        tokens: [T] of the text to learn on.
        schedule: how long and how fast.
        **run: of `run_trainer`: seed, checkpoints, callbacks.

    Returns:
        The loss over the steps.
    """
    run["description"] = {"student": student, "teacher": teacher}
    with sharded_teacher(teacher.eval()) as teacher:
        transfer = AttentionTransfer(student, teacher)
        if not transfer.mixers:
            return []
        return run_trainer(StageTrainer, transfer, tokens, schedule, name=TRANSFER, inputs=("input_ids",), **run)


def distill(
    student: MemoryForCausalLM,
    teacher: PreTrainedModel,
    tokens: Tensor,
    schedule: Schedule,
    *,
    temperature: float = 1.0,
    cross_entropy: float = 0.0,
    **run,
) -> History:
    """Teach the whole student its teacher's predictions: KL(teacher || student); see `attention_transfer`.

    Args:
        student: learns, in place.
        teacher: stays as it is.
        tokens: [T] of the text to learn on.
        schedule: how long and how fast.
        temperature: divides the logits of both; above 1, unlikely tokens count more.
        cross_entropy: part of the loss that is the text's own, from 0 to 1.
        **run: of `run_trainer`.
    """
    check_cross_entropy(cross_entropy)
    how = {"temperature": temperature, "cross_entropy": cross_entropy}
    run["description"] = {"student": student, "teacher": teacher, **how}
    with sharded_teacher(teacher.eval()) as teacher:
        run["trainer_options"] = {"teacher": teacher, **how}
        return run_trainer(DistillationTrainer, student, tokens, schedule, name=DISTILLATION, **run)


def check_cross_entropy(cross_entropy: float) -> None:
    """Raise ValueError unless it is a part of the loss."""
    if not 0 <= cross_entropy <= 1:
        raise ValueError(f"cross_entropy must be from 0 to 1, got {cross_entropy}")


def train(model: PreTrainedModel, tokens: Tensor, schedule: Schedule, *, name: str = TRAINING, **run) -> History:
    """Teach a model the text itself: the mean negative log-likelihood; see `attention_transfer`."""
    return run_trainer(StageTrainer, model, tokens, schedule, name=name, description={"model": model}, **run)


def run_trainer(
    trainer_class: type[StageTrainer],
    model: nn.Module,
    tokens: Tensor,
    schedule: Schedule,
    *,
    name: str,
    seed: int = 0,
    checkpoints: Path | None = None,
    callbacks: tuple[TrainerCallback, ...] = (),
    optimizer: Optimizer | None = None,
    inputs: tuple[str, ...] = ("input_ids", "labels"),
    trainer_options: dict | None = None,
    training: Mapping[str, Any] | None = None,
    windows: Callable[..., TokenWindows] = TokenWindows,
    description: Mapping[str, Any] | None = None,
) -> History:
    """Run one stage, on the device of the model.

    Args:
        trainer_class: computes the loss.
        model: learns, in place.
        tokens: [T].
        schedule: how long and how fast.
        name: of the stage; callbacks find it in `args.run_name`.
        seed: of the order of the windows.
        checkpoints: folder to write ten checkpoints to, and to resume from the last one that is there.
        callbacks: of the Trainer.
        optimizer: default: AdamW.
        inputs: what the model is given of a window.
        trainer_options: more arguments of `trainer_class`.
        training: more arguments of transformers' TrainingArguments, such as `bf16`; see `check_training`.
        windows: makes the data of tokens, length, number of windows and seed.
        description: what else checkpoints belong to, the models of the stage among it.

    Returns:
        [{"step", "loss"}, ...]

    Raises:
        ValueError: if a loss or a gradient is not finite, or the checkpoints are of other arguments.
        OSError: if a checkpoint cannot be written; the one before it stays.
    """
    data = windows(tokens, schedule.length, schedule.steps * schedule.batch_size, seed)
    if checkpoints and not is_claimed(checkpoints.parent) and processes().is_main_process:
        run = {"stage": name, "tokens": tokens, "schedule": schedule, "seed": seed}
        claim(checkpoints, {**run, **(description or {}), **(training or {})})
    use_cpu = next(model.parameters()).device.type == "cpu"
    with (
        nullcontext(checkpoints) if checkpoints else tempfile.TemporaryDirectory() as folder,
        sharded_learner(model) as learner,
    ):
        args = training_arguments(
            schedule,
            training or {},
            run_name=name,
            seed=seed,
            output_dir=str(folder),
            save_strategy="steps" if checkpoints else "no",
            use_cpu=use_cpu,
        )
        trainer = trainer_class(
            model=learner,
            args=args,
            train_dataset=data,
            data_collator=lambda rows: {name: torch.stack([row[name] for row in rows]) for name in inputs},
            callbacks=list(callbacks),
            optimizers=(optimizer, None),
            **(trainer_options or {}),
        )
        trainer.remove_callback(PrinterCallback)
        with args.main_process_first(local=False):
            last = last_whole_checkpoint(checkpoints) if checkpoints else None
        trainer.train(resume_from_checkpoint=last)
        trainer.accelerator.unwrap_model(learner, keep_fp32_wrapper=False)
        if args.activation_checkpointing and isinstance(learner, PreTrainedModel):
            learner.activation_checkpointing_disable()
    model.eval()
    return [{"step": x["step"], "loss": x["loss"]} for x in trainer.state.log_history if "loss" in x]


def training_arguments(schedule: Schedule, training: Mapping[str, Any], **run) -> TrainingArguments:
    """A schedule in the Trainer's own words, for all processes together; `run` is passed on."""
    ways = processes().num_processes * training.get("gradient_accumulation_steps", 1)
    if schedule.batch_size % ways:
        raise ValueError(
            f"batch_size must be a multiple of {ways}, processes times gradient_accumulation_steps, "
            f"got {schedule.batch_size}"
        )
    return TrainingArguments(
        **run,
        max_steps=schedule.steps,
        learning_rate=schedule.learning_rate,
        per_device_train_batch_size=schedule.batch_size // ways,
        lr_scheduler_type="cosine",
        warmup_steps=schedule.warmup,
        **{**DEFAULTS, **training},
        logging_steps=max(1, schedule.steps // 50),
        save_steps=max(1, schedule.steps // 10),
    )


def check_training(training: Mapping[str, Any]) -> None:
    """Raise ValueError unless `training` has names of TrainingArguments alone that a stage leaves open."""
    if taken := sorted(name for name in training if name not in TrainingArguments.__dataclass_fields__ or name in OURS):
        raise ValueError(
            f"training must be arguments of transformers' TrainingArguments but {', '.join(OURS)}, "
            f"got {', '.join(taken)}"
        )
