"""hf-memory fine-tune."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from transformers import PreTrainedModel

from hf_memory import conversion
from hf_memory.cli.options import (
    Checkpoints,
    Config,
    DryRun,
    LoraRank,
    MaxTokens,
    MeasureTokens,
    Overwrite,
    Seed,
    Texts,
    Training,
)
from hf_memory.cli.progress import signs_of_life
from hf_memory.cli.work import Job, claimed_output, device, finish, prepare, print_plan, results_of
from hf_memory.conversion import FINE_TUNING, Recipe, Schedule

DEFAULT = Recipe().fine_tuning._replace(steps=100)
NONE = DEFAULT._replace(steps=0)


def fine_tune(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Folder, Hub name or GGUF file of a model.")],
    text: Texts,
    output: Annotated[Path, typer.Option(help="Folder for the trained model.")],
    steps: Annotated[int, typer.Option(help="Training steps.", min=1)] = DEFAULT.steps,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate, after the warmup.")] = DEFAULT.learning_rate,
    batch_size: Annotated[int, typer.Option(help="Windows of text in each step.")] = DEFAULT.batch_size,
    length: Annotated[int, typer.Option(help="Tokens in each window.")] = DEFAULT.length,
    lora_rank: LoraRank = None,
    max_tokens: MaxTokens = None,
    measure_tokens: MeasureTokens = 2**16,
    seed: Seed = 0,
    checkpoints: Checkpoints = None,
    arguments: Training = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    config: Config = None,
) -> None:
    """Train a model on text. With LoRA, the updates are merged into the output, and also written to its adapter/."""
    schedule = Schedule(steps, learning_rate, batch_size, length)
    recipe = Recipe(None, transfer=NONE, distillation=NONE, fine_tuning=schedule, lora_rank=lora_rank, seed=seed)
    with claimed_output(context), signs_of_life() as report, tempfile.TemporaryDirectory() as folder:
        job, adapter = prepare(context, model, recipe, report), Path(folder) if lora_rank else None
        done = None if dry_run else _fine_tune(model, job, adapter)
        if dry_run:
            print_plan(job.plan)
        elif done is not None:
            student, losses, rows = done
            results = results_of(context, job, job.plan, {FINE_TUNING: losses}, rows, model)
            finish(context, job, student, results, adapter=adapter)


def _fine_tune(model: str, job: Job, adapter: Path | None) -> tuple[PreTrainedModel, list, list] | None:
    """The trained model, its losses, and measurements before and after; None in all processes except the first."""
    student = conversion.load_teacher(model)
    processes = conversion.processes()
    student.to(device())  # type: ignore[arg-type]
    rows = []
    if processes.is_main_process:
        rows = [job.measure("before", student)]
    (stage,) = job.plan.stages
    rank, seed = stage.lora_rank, stage.seed
    losses = conversion.fine_tune(
        student, job.tokens, stage.schedule, lora_rank=rank, adapter=adapter, seed=seed, run=job.run
    )
    processes.destroy_process_group()
    if not processes.is_main_process:
        return None
    return student, losses, [*rows, job.measure("after", student)]
