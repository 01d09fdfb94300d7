"""hf-memory fine-tune."""

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from hf_memory import conversion
from hf_memory.cli import options
from hf_memory.cli.command import LONG, WHAT, WHERE
from hf_memory.cli.run_file import Flags
from hf_memory.cli.work import Prepared, Request, Trained, carry_out, device
from hf_memory.conversion import FINE_TUNING, Recipe, Run, Schedule
from hf_memory.evaluation import ITEMS
from hf_memory.evaluation.tasks import Found

DEFAULT = Recipe().fine_tuning._replace(steps=100)
NONE = DEFAULT._replace(steps=0)


@dataclass(frozen=True)
class LearningFlags:
    """Flags of the schedule, and of what learns."""

    steps: Annotated[int, typer.Option(help="Training steps.", min=1, rich_help_panel=LONG)] = (
        DEFAULT.steps
    )
    learning_rate: Annotated[
        float,
        typer.Option(help="Peak learning rate, after the warmup.", rich_help_panel=LONG),
    ] = DEFAULT.learning_rate
    batch_size: Annotated[
        int, typer.Option(help="Windows of text in each step.", rich_help_panel=LONG)
    ] = DEFAULT.batch_size
    length: Annotated[int, typer.Option(help="Tokens in each window.", rich_help_panel=LONG)] = (
        DEFAULT.length
    )
    lora_rank: Annotated[int | None, typer.Option(help=options.LORA, rich_help_panel=WHAT)] = None
    seed: Annotated[int, options.in_file(options.SEED)] = 0


@dataclass(frozen=True)
class TrainingFlags(options.TrainingFlags):
    """Flags of training, of which convert has more."""

    max_tokens: Annotated[int | None, options.in_file(options.TOKENS_READ, min=1)] = None
    items: Annotated[int, options.in_file(options.QUESTIONS, min=0)] = ITEMS


def fine_tune(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Folder, Hub name or GGUF file of a model.")],
    text: options.Texts,
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the trained model; default: the model's name with -fine-tuned, here.",
            rich_help_panel=WHERE,
        ),
    ] = None,
    learning: LearningFlags,
    training: TrainingFlags,
) -> None:
    """Train a model on text. With LoRA, the updates are merged into the output, and also written to its adapter/.

    Example: hf-memory fine-tune Qwen3-0.6B-attention --text my_text.txt --length 4096
    """
    trained = output or options.named_after(model, "fine-tuned")
    rank = learning.lora_rank
    seed = learning.seed
    schedule = Schedule(
        learning.steps, learning.learning_rate, learning.batch_size, learning.length
    )
    recipe = Recipe(
        None, transfer=NONE, distillation=NONE, fine_tuning=schedule, lora_rank=rank, seed=seed
    )
    run = Run(training.checkpoints, training=options.read_pairs(training.training))
    request = Request(
        model, recipe, run, text, trained, Flags.of(context, output=trained), training
    )
    if output is None:
        options.say_output(trained)
    with tempfile.TemporaryDirectory() as folder:
        carry_out(request, partial(_fine_tune, adapter=Path(folder) if rank else None))


def _fine_tune(prepared: Prepared, adapter: Path | None) -> Trained | None:
    """The trained model, and measurements before and after; None in all processes except the first."""
    student = conversion.load_teacher(prepared.request.model)
    processes = conversion.processes()
    student.to(device())  # type: ignore[arg-type]
    before = {"before": prepared.measure("before", student)} if processes.is_main_process else {}
    (stage,) = prepared.plan.stages
    how: dict = {
        "lora_rank": stage.lora_rank,
        "adapter": adapter,
        "seed": stage.seed,
        "run": prepared.request.run,
    }
    losses = conversion.fine_tune(student, prepared.tokens, stage.schedule, **how)
    processes.destroy_process_group()
    if not processes.is_main_process:
        return None

    def measure() -> Iterable[tuple[str, Found]]:
        return (
            before | {"after": prepared.measure("after", student, keep=prepared.save_record)}
        ).items()

    return Trained(student, prepared.plan, {FINE_TUNING: losses}, measure, adapter)
