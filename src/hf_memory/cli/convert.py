"""hf-memory convert."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from transformers import PreTrainedModel

from hf_memory import conversion
from hf_memory.cli import options
from hf_memory.cli.run_file import Flags, read_schedule
from hf_memory.cli.terminal import print_table
from hf_memory.cli.work import Asked, Job, Made, carry_out, device
from hf_memory.conversion import Conversion, Recipe, Run, Schedule
from hf_memory.evaluation import ModelResult
from hf_memory.evaluation.model_result import OF_CARD

TEACHER_TYPES = ", ".join(teacher.model_type for teacher in conversion.TEACHERS)
FIELDS = f"name=value,... with names from {', '.join(Schedule._fields)}; may be repeated."
DEFAULT = Recipe()
RANKING = "with attention in one layer only, before distillation; ranked by recall minus KL"

Words = list[str] | None
TeacherName = Annotated[str, typer.Argument(help=f"Folder, Hub name or GGUF file of a model of type {TEACHER_TYPES}.")]
Output = Annotated[Path, typer.Option(help="Folder for the student.")]
Memory = Annotated[
    str, typer.Option(help=f"The student's memory, or attention for none: {', '.join(conversion.STUDENTS)}.")
]
Keep = Annotated[
    str | None,
    typer.Option(
        "--keep-attention",
        "--keep",
        help=f"Which layers or heads keep their attention: {conversion.KEEP_WORDS}; default: none, or auto for a "
        "servable student without a memory.",
    ),
]
Servable = Annotated[
    bool,
    typer.Option(
        "--servable",
        help="Set the options with which inference engines can run the student (see hf-memory export). Without --to, "
        "it keeps whole layers, and the others have a window and sinks.",
    ),
]
Transfer = Annotated[Words, typer.Option(callback=options.after_file, help=f"Schedule of attention transfer: {FIELDS}")]
Distillation = Annotated[Words, typer.Option(callback=options.after_file, help=f"Schedule of distillation: {FIELDS}")]
FineTuning = Annotated[
    Words, typer.Option(callback=options.after_file, help=f"Schedule of fine-tuning, by default of 0 steps: {FIELDS}")
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
    text: options.Texts,
    output: Output,
    to: Memory = "attention",
    keep: Keep = None,
    option: options.Option = None,
    servable: Servable = False,
    transfer: Transfer = None,
    distillation: Distillation = None,
    fine_tuning: FineTuning = None,
    lora_rank: options.LoraRank = None,
    max_tokens: options.MaxTokens = None,
    measure_tokens: options.MeasureTokens = 2**16,
    temperature: Temperature = 1.0,
    cross_entropy: CrossEntropy = None,
    teacher_bits: TeacherBits = None,
    teacher_logits: TeacherLogits = None,
    top_k: TopK = None,
    seed: options.Seed = 0,
    checkpoints: options.Checkpoints = None,
    arguments: options.Training = None,
    overwrite: options.Overwrite = False,
    dry_run: options.DryRun = False,
    config: options.Config = None,
) -> None:
    """Convert a trained Transformer into a memory model. The last tenth of the text is held out to compare the two."""
    recipe = Recipe(
        to=to,
        keep=keep or ("auto" if servable and to == DEFAULT.to else "none"),
        options=(_servable(to) if servable else {}) | options.read_pairs(option),
        transfer=read_schedule("transfer", DEFAULT.transfer, transfer),
        distillation=read_schedule("distillation", DEFAULT.distillation, distillation),
        fine_tuning=read_schedule("fine_tuning", DEFAULT.fine_tuning, fine_tuning),
        lora_rank=lora_rank,
        temperature=temperature,
        cross_entropy=cross_entropy,
        top_k=conversion.TOP_K if teacher_logits and top_k is None else top_k,
        teacher_bits=teacher_bits,
        seed=seed,
    )
    run, flags = Run(checkpoints, teacher_logits, training=options.read_pairs(arguments)), Flags.of(context)
    asked = Asked(teacher, recipe, run, text, output, flags, overwrite, dry_run, max_tokens, measure_tokens, servable)
    carry_out(asked, _convert)


def _servable(to: str) -> dict:
    if to not in conversion.SERVABLE:
        raise ValueError(f"to must be {' or '.join(conversion.SERVABLE)} for a servable student, got {to!r}")
    return conversion.SERVABLE[to]


def _convert(job: Job) -> Made | None:
    """The student and its measurements; None in all processes except the first."""
    model = conversion.load_teacher(job.asked.model)
    processes = conversion.processes()  # from here on, each process has its own device
    place, bits = device(), job.plan.bits
    quantized = None if bits is None else conversion.load_quantized(job.asked.model, bits, place)
    model.to(place if quantized is None else "cpu")  # type: ignore[arg-type]
    made = conversion.convert(model, job.tokens, job.plan, job.asked.run, quantized=quantized)
    processes.destroy_process_group()
    if not processes.is_main_process:
        return None
    if made.ranking:
        rows = conversion.placement_table(made.ranking, made.plan.kept)
        print_table(rows, conversion.PLACEMENT_HEADER, title=RANKING)
    return Made(made.student, made.plan, made.losses, partial(_rows, job, made, model, quantized))


def _rows(
    job: Job, made: Conversion, teacher: PreTrainedModel, quantized: PreTrainedModel | None
) -> Iterator[ModelResult]:
    """The measurements of the teacher, and of the student before and after its training."""
    measure = partial(job.measure, keep=job.keep)
    yield measure("teacher", teacher.to(made.student.device))  # type: ignore[arg-type]
    after = measure("student", made.student, teacher)
    if made.plan.stages:
        made.student.cpu()
        before, _ = conversion.untrained_student(teacher, job.tokens, made.plan, quantized=quantized)
        quality = [task for task in OF_CARD if task != "speed"]  # which does not depend on the weights
        yield replace(measure("before training", before, teacher, tasks=quality), costs=after.costs)
    yield after
