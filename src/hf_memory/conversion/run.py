"""How a recipe is run."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks

from hf_memory.conversion.recipe import Schedule
from hf_memory.conversion.stages.sharding import processes
from hf_memory.files.names import nearest
from hf_memory.files.text import Text, check_length
from hf_memory.modeling.checks import check, check_type
from hf_memory.progress import Progress, silent

DEFAULTS = {  # our defaults for transformers' TrainingArguments
    "adam_beta2": 0.95,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "train_sampling_strategy": "sequential",
    "logging_nan_inf_filter": False,
    "prediction_loss_only": True,
    "save_total_limit": 1,
    "remove_unused_columns": False,
    "dataloader_pin_memory": False,
    "disable_tqdm": True,
    "report_to": "none",
}
LOGS = "TENSORBOARD_LOGGING_DIR"  # an environment variable that transformers reads
LEAST = {  # smallest values of training arguments
    "adam_beta1": 0,
    "adam_beta2": 0,
    "adam_epsilon": 0,
    "dataloader_num_workers": 0,
    "dataloader_prefetch_factor": 1,
    "ddp_bucket_cap_mb": 1,
    "ddp_timeout": 1,
    "eval_steps": 1,
    "gradient_accumulation_steps": 1,
    "max_grad_norm": 0,
    "save_total_limit": 1,
    "torch_empty_cache_steps": 1,
    "weight_decay": 0,
}
OTHERS = """activation_checkpointing activation_checkpointing_kwargs bf16 dataloader_multiprocessing_context
dataloader_persistent_workers dataloader_pin_memory ddp_backend ddp_broadcast_buffers ddp_find_unused_parameters
disable_tqdm fp16 full_determinism gradient_checkpointing gradient_checkpointing_kwargs load_best_model_at_end
lr_scheduler_kwargs optim optim_args optim_target_modules project report_to tf32 torch_compile torch_compile_backend
torch_compile_mode"""
# training arguments that a user may set; stages set others, or lack them
USABLE = sorted([*LEAST, *OTHERS.split()])


def ignore(plan: Any) -> None:
    """Do nothing about a plan."""


@dataclass(frozen=True)
class Run:
    """How a conversion is run: its checkpoints, progress reports and options of the Trainer.

    Args:
        checkpoints: folder for checkpoints, a path or a string. A conversion that was stopped or killed resumes from
            them if it is called with the same arguments.
        callbacks: callbacks of the Trainer in all stages.
        report: is called with the progress of each task.
        chosen: is called with the final plan, before anything is trained.
        training: further TrainingArguments of transformers for all stages, such as `bf16` and
            `activation_checkpointing`. `gradient_accumulation_steps` does not change the schedules. With `eval_steps`
            the loss of each stage on `validation` is found every so many steps, and with `load_best_model_at_end` a
            stage ends with the weights whose loss was least.
        validation: text that nothing is trained on, for `eval_steps`.
        later: work of the stages that follow, in multiples of a stage, for its progress reports.
        is_recorded: whether `checkpoints` is already known to belong to this run.
    """

    checkpoints: Path | None = None
    callbacks: tuple[TrainerCallback, ...] = ()
    report: Callable[[Progress], None] = silent
    chosen: Callable[[Any], None] = ignore
    training: Mapping[str, Any] = field(default_factory=dict)
    validation: Text | Tensor | None = None
    later: float = 0.0
    is_recorded: bool = False

    def __post_init__(self) -> None:
        if self.checkpoints is not None:
            object.__setattr__(self, "checkpoints", Path(self.checkpoints))

    def of(self, stage: str, later: float = 0.0) -> "Run":
        """The options for one stage, with a subfolder for its checkpoints."""
        return replace(
            self,
            checkpoints=self.checkpoints and self.checkpoints / stage,
            later=later,
            is_recorded=True,
        )

    def arguments(self, schedule: Schedule, **others) -> TrainingArguments:
        """TrainingArguments for a schedule, whose batch size is that of all processes; `others` are passed on."""
        ways = processes().num_processes * self.training.get("gradient_accumulation_steps", 1)
        expected = f"a multiple of {ways}, processes times gradient_accumulation_steps"
        check(schedule.batch_size % ways == 0, "batch_size", expected, schedule.batch_size)
        every = int(self.training.get("eval_steps", 1))
        return TrainingArguments(
            **others,
            eval_strategy="steps" if "eval_steps" in self.training else "no",
            max_steps=schedule.steps,
            learning_rate=schedule.learning_rate,
            per_device_train_batch_size=schedule.batch_size // ways,
            lr_scheduler_type="cosine",
            warmup_steps=schedule.warmup,
            **{**DEFAULTS, **self.training},
            logging_steps=max(1, schedule.steps // 50),
            save_steps=every
            * max(1, schedule.steps // (10 * every)),  # some of the steps with an evaluation
        )

    def check(self, *schedules: Schedule) -> None:
        """Raise ValueError if stages with these schedules cannot be run with these training arguments."""
        if unknown := sorted(set(self.training) - set(USABLE)):
            meant = nearest(unknown[0], USABLE) or f"; possible are {', '.join(USABLE)}"
            raise ValueError(
                f"training must be arguments of transformers that no stage sets itself, got {', '.join(unknown)}{meant}"
            )
        for name in ("activation_checkpointing", "gradient_checkpointing"):
            if self.training.get(name) and any(schedule.chunk_length for schedule in schedules):
                raise ValueError(
                    f"{name} of training must be false with chunk_length, which recomputes whole chunks"
                )
        hints = get_type_hints(TrainingArguments)
        for name, value in self.training.items():
            _check_value(name, value, hints[name])
        self._check_outcome(schedules)
        for schedule in schedules:
            _check_installed(
                self.arguments(schedule, output_dir=".", use_cpu=not torch.cuda.is_available())
            )

    def _check_outcome(self, schedules: Sequence[Schedule]) -> None:
        if ("eval_steps" in self.training) != (self.validation is not None):
            given = "none" if self.validation is None else f"{len(self.validation)} tokens"
            raise ValueError(
                f"validation must be given together with eval_steps of training, got {given}"
            )
        if "tensorboard" in str(self.training.get("report_to")) and not (
            self.checkpoints or os.getenv(LOGS)
        ):
            raise ValueError(
                f"report_to=tensorboard needs checkpoints, beside which it writes, or {LOGS}, got neither"
            )
        if self.training.get("load_best_model_at_end") and self.validation is None:
            raise ValueError("load_best_model_at_end of training needs eval_steps, got none")
        if self.validation is not None:
            check_length(
                self.validation, max((schedule.length for schedule in schedules), default=0)
            )


def _check_value(name: str, value: Any, expected: Any) -> None:
    check_type(f"{name} of training", value, expected)
    least = LEAST.get(name)
    if least is not None and value is not None and not least <= value < math.inf:
        raise ValueError(f"{name} of training must be at least {least}, got {value!r}")
    check(
        not name.startswith("adam_beta") or value < 1, f"{name} of training", "less than 1", value
    )
    if name == "fp16" and value and not torch.cuda.is_available():
        raise ValueError("fp16 of training needs a GPU: on a CPU, bf16 is possible, got true")


def _check_installed(arguments: TrainingArguments) -> None:
    if arguments.torch_compile:
        try:  # which compiles nothing yet
            backend = arguments.torch_compile_backend or "inductor"
            mode = arguments.torch_compile_mode
            torch.compile(nn.Identity(), backend=backend, mode=mode)
        except RuntimeError as error:
            raise ValueError(
                f"torch_compile must be possible with this backend and mode, got {error}"
            ) from error
    try:
        Trainer.get_optimizer_cls_and_kwargs(arguments)
    except ImportError as error:
        raise ValueError(
            f"optim must be an optimizer that is installed, got {arguments.optim}: {error}"
        ) from error
    try:
        for logger in get_reporting_integration_callbacks(arguments.report_to):
            logger()
    except (RuntimeError, ImportError, AssertionError) as error:
        wanted = "report_to must be a logger that is installed, such as tensorboard"
        raise ValueError(f"{wanted}, got {error}") from error
