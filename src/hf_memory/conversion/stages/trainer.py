"""One stage: a run of transformers' Trainer that can be stopped and resumed."""

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback

from hf_memory.conversion.data import TokenWindows
from hf_memory.conversion.recipe import Schedule
from hf_memory.conversion.run import Run
from hf_memory.conversion.run_identity import (
    check_checkpoint,
    last_whole_checkpoint,
    reading_checkpoint,
    record_run,
)
from hf_memory.conversion.stages.sharding import processes, sharded_learner, whole
from hf_memory.convertible import Convertible
from hf_memory.files.folders import written
from hf_memory.files.ram import memory_held
from hf_memory.files.text import Text
from hf_memory.modeling.any_model import check_model
from hf_memory.progress import History, Progress

TRAINING = "training"
LOSSES = ("loss", "eval_loss")  # names in the Trainer's logs


class Reporter(TrainerCallback):
    """A callback that reports the progress of a stage."""

    def __init__(self, run: Run, schedule: Schedule):
        self.run = run
        self.schedule = schedule
        self.loss = self.eval_loss = None
        self.memory = 0

    def on_train_begin(self, args, state, control, **kwargs):
        """Report the step at which training begins or resumes."""
        self._report(args, state)

    def on_log(self, args, state, control, logs, **kwargs):
        """Remember the latest losses."""
        self.loss, self.eval_loss = (
            logs.get(name, x) for name, x in zip(LOSSES, (self.loss, self.eval_loss))
        )

    def on_step_end(self, args, state, control, **kwargs):
        """Report the step."""
        self._report(args, state)

    def _report(self, args, state) -> None:
        done = state.global_step
        self.memory = max(self.memory, memory_held())
        tokens = self.schedule.batch_size * self.schedule.length_in(max(0, done - 1))
        now = Progress(args.run_name, done, state.max_steps, tokens, self.loss, self.eval_loss)
        self.run.report(now._replace(later=self.run.later, memory=self.memory))


class StageTrainer(Trainer):
    """A Trainer that stops before the first step whose loss or gradients are not finite."""

    memory_factor = 1.0  # multiplies the learning rate of new parts
    reading: Mapping[str, int] = {}  # options of the model's forward

    def create_optimizer(self, model=None) -> Optimizer:
        """The Trainer's optimizer, with a separate learning rate for parts that the teacher does not have."""
        if self.optimizer is not None or self.memory_factor == 1:
            return super().create_optimizer(model)
        optimizer = super().create_optimizer(model)
        learner = self.model if model is None else model
        memories = new_parameters(learner)  # type: ignore[arg-type]
        for group in list(optimizer.param_groups):
            own = [x for x in group["params"] if x in memories]
            group["params"] = [x for x in group["params"] if x not in memories]
            optimizer.add_param_group(
                {**group, "params": own, "lr": self.memory_factor * group["lr"]}
            )
        return optimizer

    def compute_loss(self, model, inputs, *args, **kwargs):
        """The Trainer's loss, for a model that reads as the schedule says."""
        return super().compute_loss(model, {**inputs, **self.reading}, *args, **kwargs)

    def training_step(self, model, *args, **kwargs):
        """The loss; its gradients are in the parameters.

        Raises:
            ValueError: if the loss or a gradient is not finite.
        """
        loss = super().training_step(model, *args, **kwargs)
        norm = get_total_norm([x.grad for x in model.parameters() if x.grad is not None])
        if not (loss + whole(norm).to(loss.device)).isfinite():
            step = self.state.global_step + 1
            name = self.args.run_name
            raise ValueError(
                f"loss and gradients must be finite, got loss {loss:g} in step {step} of {name}; {not_finite(model)}"
            )
        return loss

    def _load_from_checkpoint(self, resume_from_checkpoint, *args, **kwargs):
        with reading_checkpoint(resume_from_checkpoint):
            return super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint):
        with reading_checkpoint(checkpoint):
            return super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint):
        with reading_checkpoint(checkpoint):
            return super()._load_rng_state(checkpoint)

    def _save_checkpoint(self, model, trial) -> None:
        """Write a checkpoint, or nothing if this fails."""
        folder = Path(str(self.args.output_dir), f"checkpoint-{self.state.global_step}")
        otherwise = "the checkpoint before it stays, and the same run goes on from there"
        try:
            with written(f"{folder.name} of {self.args.run_name}", folder.parent, otherwise):
                super()._save_checkpoint(model, trial)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def new_parameters(student: nn.Module) -> set[nn.Parameter]:
    """The parameters of the parts that the teacher does not have."""
    parts = [x.new_part for x in student.modules() if isinstance(x, Convertible)]
    return {x for part in parts if part is not None for x in part.parameters()}


@contextmanager
def only_these_learn(model: nn.Module, learned: Iterable[nn.Parameter]) -> Iterator[None]:
    """A context in which no other parameters of a model are trained."""
    frozen = [x for x in set(model.parameters()) - set(learned) if x.requires_grad]
    try:
        for x in frozen:
            x.requires_grad_(False)
        yield
    finally:
        for x in frozen:
            x.requires_grad_(True)


def not_finite(model: nn.Module) -> str:
    """Names the first weight that is not finite, or else the first gradient that became so in the backward pass."""
    for name, weight in model.named_parameters():
        if not whole(weight).isfinite().all():
            return f"the weight {name} is not finite"
    # in the order of the backward pass
    for name, weight in reversed(list(model.named_parameters())):
        if weight.grad is not None and not whole(weight.grad).isfinite().all():
            return f"weights are finite, the gradient of {name} is not"
    return "weights and gradients are finite"


def train(
    model: PreTrainedModel,
    tokens: Text | Tensor,
    schedule: Schedule,
    *,
    name: str = TRAINING,
    seed: int = 0,
    optimizer: Optimizer | None = None,
    run: Run = Run(),
) -> History:
    """Train a model to predict the next token of a text; arguments and returns are those of `attention_transfer`."""
    check_model("model", model)
    data = TokenWindows(tokens, schedule, seed)
    return run_trainer(StageTrainer, model, data, name, run, {"model": model}, optimizer=optimizer)


def run_trainer(
    make_trainer: Callable[..., StageTrainer],
    model: nn.Module,
    data: TokenWindows,
    name: str,
    run: Run,
    belongs_to: Mapping[str, Any],
    optimizer: Optimizer | None = None,
) -> History:
    """Run one stage, on the device of the model.

    Args:
        make_trainer: StageTrainer, or a subclass with another loss.
        model: the model, trained in place.
        data: the training data, with their schedule; a batch has all tensors of its windows.
        name: the stage's name; callbacks find it in `args.run_name`.
        run: options of the run. A stage writes ten checkpoints, and resumes from the last one.
        belongs_to: further models and numbers that checkpoints depend on.
        optimizer: the optimizer; default: AdamW.

    Returns:
        [{"step", "loss"}, ...], and {"step", "eval_loss"} of evaluations.

    Raises:
        ValueError: if a loss or a gradient is not finite, or the checkpoints are of other arguments or damaged.
        OSError: if a checkpoint cannot be written; the one before it stays.
    """
    schedule = data.schedule
    if run.checkpoints and not run.is_recorded and processes().is_main_process:
        own = {"stage": name, "tokens": data.text, "schedule": schedule, "seed": data.seed}
        record_run(run.checkpoints, {**own, **belongs_to, **run.training})
    output = nullcontext(run.checkpoints) if run.checkpoints else tempfile.TemporaryDirectory()
    with output as folder, sharded_learner(model) as learner:
        saves = run.checkpoints or run.training.get("load_best_model_at_end")
        save = "steps" if saves else "no"
        use_cpu = next(model.parameters()).device.type == "cpu"
        own = {
            "run_name": name,
            "seed": data.seed,
            "output_dir": str(folder),
            "save_strategy": save,
        }
        args = run.arguments(schedule, use_cpu=use_cpu, **own)
        trainer = make_trainer(
            model=learner,
            args=args,
            train_dataset=data,
            eval_dataset=None if run.validation is None else data.for_evaluation(run.validation),
            data_collator=lambda rows: {
                name: torch.stack([row[name] for row in rows]) for name in rows[0]
            },
            callbacks=[Reporter(run, schedule), *run.callbacks],
            optimizers=(optimizer, None),
        )
        trainer.memory_factor = schedule.memory_factor
        trainer.reading = {"chunk_length": schedule.chunk_length} if schedule.chunk_length else {}
        trainer.remove_callback(PrinterCallback)
        with args.main_process_first(local=False):
            last = last_whole_checkpoint(run.checkpoints) if run.checkpoints else None
            if last is not None:
                check_checkpoint(Path(last))
        trainer.train(resume_from_checkpoint=last)
        trainer.accelerator.unwrap_model(learner, keep_fp32_wrapper=False)
        if args.activation_checkpointing and isinstance(learner, PreTrainedModel):
            learner.activation_checkpointing_disable()
    model.eval()
    logged = [x for x in trainer.state.log_history if {*LOSSES} & {*x}]
    return [{name: x[name] for name in ("step", *LOSSES) if name in x} for x in logged]
