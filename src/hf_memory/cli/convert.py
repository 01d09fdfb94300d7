"""hf-memory convert."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from transformers import PreTrainedModel

from hf_memory import conversion
from hf_memory.cli.options import (
    Checkpoints,
    Config,
    DryRun,
    LoraRank,
    MaxTokens,
    MeasureTokens,
    Option,
    Overwrite,
    Seed,
    Texts,
    Training,
    read_pairs,
)
from hf_memory.cli.progress import signs_of_life
from hf_memory.cli.terminal import console
from hf_memory.cli.work import Job, claimed_output, device, prepare, print_plan, results_of, save, show
from hf_memory.conversion import Conversion, Recipe, Schedule
from hf_memory.conversion.run_file import read_schedule, recipe_flags
from hf_memory.evaluation import ModelResult, record
from hf_memory.evaluation.model_result import OF_CARD
from hf_memory.files.text import Text

TEACHER_TYPES = ", ".join(teacher.model_type for teacher in conversion.TEACHERS)
FIELDS = f"name=value,... with names from {', '.join(Schedule._fields)}; may be repeated."
OF_RECIPE = ("to", "keep", "lora_rank", "temperature", "cross_entropy", "teacher_bits", "top_k", "seed")

TeacherName = Annotated[str, typer.Argument(help=f"Folder, Hub name or GGUF file of a model of type {TEACHER_TYPES}.")]
Output = Annotated[Path, typer.Option(help="Folder for the student.")]
Family = Annotated[str, typer.Option(help=f"The student's family: {', '.join(conversion.STUDENTS)}.")]
Keep = Annotated[
    str,
    typer.Option(
        "--keep-attention", "--keep", help=f"Which layers or heads keep their attention: {conversion.KEEP_WORDS}."
    ),
]
Servable = Annotated[
    bool,
    typer.Option(
        "--servable", help="Set the options with which inference engines can run the student (see hf-memory export)."
    ),
]
Transfer = Annotated[list[str] | None, typer.Option(help=f"Schedule of attention transfer: {FIELDS}")]
Distillation = Annotated[list[str] | None, typer.Option(help=f"Schedule of logit distillation: {FIELDS}")]
FineTuning = Annotated[
    list[str] | None, typer.Option(help=f"Schedule of fine-tuning, which is off (0 steps) by default: {FIELDS}")
]
Temperature = Annotated[float, typer.Option(help="Temperature of the distillation loss.")]
CrossEntropy = Annotated[
    float | None,
    typer.Option(help="Weight of the cross-entropy with the text in the distillation loss, 0 to 1; default: 0."),
]
TeacherBits = Annotated[
    int | None, typer.Option(help="Quantise the teacher to 8 or 4 bits with bitsandbytes; default: no quantisation.")
]
TeacherLogits = Annotated[
    Path | None, typer.Option(help="Save the teacher's most likely tokens to this folder first, then distil from them.")
]
TopK = Annotated[int | None, typer.Option(help=f"Likely tokens to save at each position; default: {conversion.TOP_K}.")]


def convert(
    context: typer.Context,
    teacher: TeacherName,
    text: Texts,
    output: Output,
    to: Family = "linear",
    keep: Keep = "none",
    option: Option = None,
    servable: Servable = False,
    transfer: Transfer = None,
    distillation: Distillation = None,
    fine_tuning: FineTuning = None,
    lora_rank: LoraRank = None,
    max_tokens: MaxTokens = None,
    measure_tokens: MeasureTokens = 2**16,
    temperature: Temperature = 1.0,
    cross_entropy: CrossEntropy = None,
    teacher_bits: TeacherBits = None,
    teacher_logits: TeacherLogits = None,
    top_k: TopK = None,
    seed: Seed = 0,
    checkpoints: Checkpoints = None,
    arguments: Training = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    config: Config = None,
) -> None:
    """Convert a trained Transformer into a memory model. The last tenth of the text is held out to compare the two."""
    with claimed_output(context):
        with signs_of_life() as report:
            job = prepare(context, teacher, _recipe(context), report)
            done = None if dry_run else _convert(context, teacher, job)
        if dry_run:
            print_plan(job.plan)
        if done is None:
            return
        made, rows = done
        if made.ranking:
            _print_ranking(made)
        results = results_of(context, job, made.plan, made.losses, rows, teacher)
        conversion.add_results(output, results)
        (output / record.FILE).unlink(missing_ok=True)
        show(output, results)


def _recipe(context: typer.Context) -> Recipe:
    """The recipe that the flags describe. For schedules, the command line takes precedence over the file."""
    given, in_file = context.params, context.default_map or {}
    schedules: dict[str, Any] = {
        name: read_schedule(name, default, [*in_file.get(name, ()), *(given[name] or ())])
        for name, default in Recipe().schedules.items()
    }
    same: dict[str, Any] = {name: given[name] for name in OF_RECIPE}
    if given["teacher_logits"] and given["top_k"] is None:
        same["top_k"] = conversion.TOP_K
    options = (_servable(given["to"]) if given["servable"] else {}) | read_pairs(given["option"])
    return Recipe(options=options, **same, **schedules)


def _servable(to: str) -> dict:
    if to not in conversion.SERVABLE:
        raise ValueError(f"to must be {' or '.join(conversion.SERVABLE)} for a servable student, got {to!r}")
    return conversion.SERVABLE[to]


def _convert(context: typer.Context, teacher: str, job: Job) -> tuple[Conversion, list[ModelResult]] | None:
    """Convert, save the student, and compare it with its teacher; None in all processes except the first."""
    model = conversion.load_teacher(teacher)
    processes = conversion.processes()  # from here on, each process has its own device
    place, bits = device(), job.plan.bits
    quantized = None if bits is None else conversion.load_quantized(teacher, bits, place)
    model.to(place if quantized is None else "cpu")  # type: ignore[arg-type]
    made = conversion.convert(model, job.tokens, job.plan, job.run, quantized=quantized)
    processes.destroy_process_group()
    if not processes.is_main_process:
        return None
    save(context, job, made.student, recipe_flags(made.plan.recipe))
    keep = partial(record.keep, context.params["output"], job.known)  # so that a stopped call need not measure again
    return made, list(_rows(partial(job.measure, keep=keep), made, model, quantized, job.tokens))


def _rows(
    measure: Callable[..., ModelResult],
    made: Conversion,
    teacher: PreTrainedModel,
    quantized: PreTrainedModel | None,
    tokens: Text,
) -> Iterator[ModelResult]:
    """The measurements of the teacher, and of the student before and after its training."""
    place = made.student.device
    yield measure("teacher", teacher.to(place))  # type: ignore[arg-type]
    after = measure("student", made.student, teacher)
    if made.plan.stages:
        made.student.cpu()
        before, _ = conversion.untrained_student(teacher, tokens, made.plan, quantized=quantized)
        quality = [task for task in OF_CARD if task != "speed"]  # which does not depend on the weights
        yield replace(measure("before training", before, teacher, tasks=quality), costs=after.costs)
    yield after


def _print_ranking(made: Conversion) -> None:
    title = "with attention in one layer only, before distillation; ranked by recall minus KL"
    rows = Table(*conversion.PLACEMENT_HEADER, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title=title)
    for row in conversion.placement_table(made.ranking, made.plan.kept):
        rows.add_row(*row)
    console.print(rows)
