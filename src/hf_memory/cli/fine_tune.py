"""hf-memory fine-tune."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from hf_memory.cli import options
from hf_memory.cli.command import LONG, WHAT, WHERE
from hf_memory.cli.run_file import Flags
from hf_memory.cli.work import carry_out, request_of
from hf_memory.conversion import Recipe, Schedule
from hf_memory.conversion.defaults import FINE_TUNING_SCHEDULE
from hf_memory.evaluation import ITEMS

DEFAULT = FINE_TUNING_SCHEDULE._replace(steps=100)


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
    recipe = Recipe(None, fine_tuning=schedule, lora_rank=rank, seed=seed)
    flags = Flags.of(context, output=trained)
    request = request_of(model, text, trained, recipe, flags, training)
    if output is None:
        options.say_output(trained)
    carry_out(request, training)
