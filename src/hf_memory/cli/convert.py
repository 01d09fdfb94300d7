"""hf-memory convert."""

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from hf_memory import conversion
from hf_memory.cli.options import (
    Checkpoints,
    Config,
    DryRun,
    LoraRank,
    MaxTokens,
    Option,
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
from hf_memory.conversion.run_file import RUN, read_schedule, write_flags

TEACHER_TYPES = ", ".join(teacher.model_type for teacher in conversion.TEACHERS)

Keep = Annotated[
    str,
    typer.Option("--keep-attention", "--keep", help=f"Layers that keep their attention: {conversion.KEEP_WORDS}."),
]


def _stage(name: str) -> typer.models.OptionInfo:
    fields = ", ".join(conversion.Schedule._fields)
    return typer.Option(help=f"name=value,... of {name}, with names from {fields}; may be repeated.")


def convert(
    context: typer.Context,
    teacher: Annotated[str, typer.Argument(help=f"Folder or Hub name of a model of type {TEACHER_TYPES}.")],
    text: Texts,
    output: Annotated[Path, typer.Option(help="Folder for the student.")],
    to: Annotated[str, typer.Option(help="The student's family.")] = "linear",
    keep: Keep = "none",
    option: Option = None,
    transfer: Annotated[list[str] | None, _stage("attention transfer")] = None,
    distillation: Annotated[list[str] | None, _stage("logit distillation")] = None,
    fine_tuning: Annotated[list[str] | None, _stage("fine-tuning, of no steps by default")] = None,
    lora_rank: LoraRank = None,
    max_tokens: MaxTokens = None,
    temperature: Annotated[float, typer.Option(help="Of the distillation.")] = 1.0,
    cross_entropy: Annotated[
        float | None, typer.Option(help="Part of the distillation's loss that is the text's own, 0 to 1; default: 0.")
    ] = None,
    teacher_bits: Annotated[
        int | None, typer.Option(help="8 or 4: learn from a teacher in so many bits, with bitsandbytes.")
    ] = None,
    teacher_logits: Annotated[
        Path | None, typer.Option(help="Folder to save the teacher's likely tokens to, before distillation from them.")
    ] = None,
    top_k: Annotated[int, typer.Option(help="How many of them at each place.")] = conversion.TOP_K,
    seed: Seed = 0,
    checkpoints: Checkpoints = None,
    arguments: Training = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    config: Config = None,
) -> None:
    """Turn a trained Transformer into a memory model; the last tenth of the text is held out to compare the two."""
    check_free(output, overwrite=overwrite)
    options, shared = read_pairs(option), read_pairs(arguments)
    conversion.check_training(shared)
    conversion.check_cross_entropy(cross_entropy or 0)
    tokenizer, training, held_out = read(teacher, text, max_tokens)
    stages = _schedules(context)
    how = {"to": to, "keep": keep, "lora_rank": lora_rank, **stages, **options}
    saved = top_k if teacher_logits else None
    if teacher_bits is not None:
        conversion.check_bits(teacher_bits)
    plan = conversion.plan(AutoConfig.from_pretrained(teacher), training, teacher_bits=teacher_bits, top_k=saved, **how)
    if dry_run:
        print_plan(plan)
        return
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    check_room(output, model)
    processes = conversion.processes()  # each has its own device from here on
    place = device()
    quantized = None if teacher_bits is None else conversion.load_quantized(teacher, teacher_bits, place)
    model.to(place if quantized is None else "cpu")  # type: ignore[arg-type]
    with bars() as (_, callbacks):
        made = conversion.convert(
            model,
            training,
            temperature=temperature,
            cross_entropy=cross_entropy,
            quantized=quantized,
            teacher_logits=teacher_logits,
            top_k=top_k,
            seed=seed,
            checkpoints=checkpoints,
            callbacks=callbacks,
            training=shared,
            **how,
        )
    processes.destroy_process_group()
    if not processes.is_main_process:
        return
    del quantized
    model.to(place)  # type: ignore[arg-type]
    recipe: dict = {
        "to": to,
        "transfer": stages["transfer"],
        "distillation": stages["distillation"],
        conversion.FINE_TUNING: str(stages["fine_tuning"]) if stages["fine_tuning"].steps else None,
        "cross_entropy": cross_entropy,
        "lora_rank": lora_rank,
        "teacher_bits": teacher_bits,
        "top_k": saved,
        "kept_layers": _kept(made, keep),
        "seed": seed,
    }
    results = conversion.Results(
        teacher=teacher,
        model_type=made.student.config.model_type,
        text=names_of(text),
        recipe=conversion.recipe(**{name: x for name, x in recipe.items() if x is not None}, **options, **shared),
        losses=made.losses,
        rows=[
            conversion.measure("teacher", model, held_out, None),
            conversion.measure("student", made.student, held_out, model),
        ],
    )
    with result(output, overwrite, checkpoints) as folder:
        conversion.write_report(folder, made.student, tokenizer, results)
        blocks = {name: schedule._asdict() for name, schedule in stages.items()}
        write_flags(folder / RUN, context.command.params, context.params | blocks)
    if made.ranking:
        _print_ranking(made)
    print_results(results)
    console.print(how_to_load(output), markup=False, soft_wrap=True)


def _schedules(context: typer.Context) -> dict[str, conversion.Schedule]:
    """Of the stages of a conversion, the command line over the file."""
    defaults = {
        "transfer": conversion.TRANSFER_SCHEDULE,
        "distillation": conversion.DISTILLATION_SCHEDULE,
        "fine_tuning": conversion.NO_FINE_TUNING,
    }
    in_file = context.default_map or {}
    return {
        name: read_schedule(name, schedule, [*in_file.get(name, ()), *(context.params[name] or ())])
        for name, schedule in defaults.items()
    }


def _print_ranking(made: conversion.Conversion) -> None:
    title = "attention in one layer only, before distillation; recall less KL decides"
    rows = Table(*conversion.PLACEMENT_HEADER, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title=title)
    for row in conversion.placement_table(made.ranking, made.kept):
        rows.add_row(*row)
    console.print(rows)


def _kept(made: conversion.Conversion, words: str) -> str:
    layers = ", ".join(map(str, made.kept))
    return layers if words in ("none", layers.replace(" ", "")) else f"{layers} ({words})"
