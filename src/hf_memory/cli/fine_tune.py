"""hf-memory fine-tune."""

import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoConfig, AutoModelForCausalLM

from hf_memory import conversion
from hf_memory.cli.options import (
    Checkpoints,
    Config,
    DryRun,
    LoraRank,
    MaxTokens,
    Overwrite,
    Seed,
    Texts,
    Training,
    read_pairs,
)
from hf_memory.cli.results import bars, device, how_to_load, names_of, print_plan, print_results, read, result
from hf_memory.cli.terminal import console
from hf_memory.conversion.checkpoints import check_room
from hf_memory.conversion.report import check_free
from hf_memory.conversion.run_file import RUN, write_flags

FINE_TUNING = conversion.FINE_TUNING_SCHEDULE


def fine_tune(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Folder or Hub name of a student.")],
    text: Texts,
    output: Annotated[Path, typer.Option(help="Folder for the model that it becomes.")],
    steps: Annotated[int, typer.Option(help="Of learning.")] = FINE_TUNING.steps,
    learning_rate: Annotated[float, typer.Option(help="Highest, after a warmup.")] = FINE_TUNING.learning_rate,
    batch_size: Annotated[int, typer.Option(help="Windows a step.")] = FINE_TUNING.batch_size,
    length: Annotated[int, typer.Option(help="Tokens of a window.")] = FINE_TUNING.length,
    lora_rank: LoraRank = None,
    max_tokens: MaxTokens = None,
    seed: Seed = 0,
    checkpoints: Checkpoints = None,
    arguments: Training = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    config: Config = None,
) -> None:
    """Teach a student the text itself, at a longer context; with LoRA the output has it merged, and in adapter/."""
    check_free(output, overwrite=overwrite)
    shared = read_pairs(arguments)
    conversion.check_training(shared)
    tokenizer, training, held_out = read(model, text, max_tokens)
    schedule = conversion.Schedule(steps, learning_rate, batch_size, length)
    plan = conversion.plan_fine_tuning(AutoConfig.from_pretrained(model), training, schedule, lora_rank=lora_rank)
    if dry_run:
        print_plan(plan)
        return
    student = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    check_room(output, student)
    processes = conversion.processes()
    student.to(device())  # type: ignore[arg-type]
    before = conversion.measure("before", student, held_out, None) if processes.is_main_process else None
    with bars() as (_, callbacks), tempfile.TemporaryDirectory() as adapter:
        losses = conversion.fine_tune(
            student,
            training,
            schedule,
            lora_rank=lora_rank,
            adapter=Path(adapter) if lora_rank else None,
            seed=seed,
            checkpoints=checkpoints,
            callbacks=callbacks,
            training=shared,
        )
        processes.destroy_process_group()
        if before is None:
            return
        recipe = {conversion.FINE_TUNING: str(schedule), "lora_rank": lora_rank, "seed": seed, **shared}
        results = conversion.Results(
            teacher=model,
            model_type=student.config.model_type,
            text=names_of(text),
            recipe={name: x for name, x in recipe.items() if x is not None},
            losses={conversion.FINE_TUNING: losses},
            rows=[before, conversion.measure("after", student, held_out, None)],
        )
        with result(output, overwrite, checkpoints) as folder:
            conversion.write_report(folder, student, tokenizer, results)
            if lora_rank:
                shutil.copytree(adapter, folder / "adapter")
            write_flags(folder / RUN, context.command.params, context.params)
    print_results(results)
    console.print(how_to_load(output), markup=False, soft_wrap=True)
