"""hf-memory convert."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer

from hf_memory import conversion
from hf_memory.cli import options
from hf_memory.cli.command import ADVANCED, LONG, WHAT, WHERE
from hf_memory.cli.run_file import Flags, read_schedule
from hf_memory.cli.work import carry_out, request_of
from hf_memory.conversion import Recipe, Schedule
from hf_memory.conversion.recipe import STAGES

TEACHER_TYPES = ", ".join(teacher.model_type for teacher in conversion.TEACHERS)
SCHEDULE = (
    f"such as steps=250,length=2048; names are {', '.join(Schedule._fields)}; may be repeated"
)

DISTILLATION = "Default: 20 steps at 3e-5 for a student that keeps tokens, else 250 at 1e-4."


def schedule_of(stage: str) -> str:
    """The help of the schedule of a stage."""
    return f"Schedule of {stage}, with the names of --distillation."


def schedule(help: str):
    """A flag for the schedule of a stage."""
    return typer.Option(callback=options.after_file, help=help, rich_help_panel=LONG)


@dataclass(frozen=True)
class StudentFlags:
    """Flags of a student and of its training. One with the name of a field of `Recipe` sets that field."""

    to: Annotated[
        str,
        typer.Option(
            help=f"The student's memory, or attention for none: {', '.join(conversion.STUDENTS)}.",
            rich_help_panel=WHAT,
        ),
    ] = "attention"
    keep: Annotated[
        str | None,
        typer.Option(
            help=f"What keeps everything: {conversion.KEEP_WORDS}; default: heads:1/11, or heads:2/3 where few layers "
            "of the teacher see everything; with --servable auto, and none where a memory has no windows.",
            rich_help_panel=WHAT,
        ),
    ] = None
    size: Annotated[
        str | None,
        typer.Option(
            help=f"How much the student holds: {', '.join(conversion.SIZES)}; default: between near and small.",
            rich_help_panel=WHAT,
        ),
    ] = None
    goal: Annotated[
        str | None,
        typer.Option(
            help="Keep the fewest heads with which the KL before training is at most this, such as kl=0.05.",
            rich_help_panel=WHAT,
        ),
    ] = None
    option: options.Option = None
    servable: Annotated[
        bool,
        typer.Option(
            "--servable",
            help="Make a student that engines can run after hf-memory export: without --to, whole layers keep "
            "everything, and the others have a window and sinks.",
            rich_help_panel=WHAT,
        ),
    ] = False
    kept_by_head: Annotated[
        bool | None,
        options.in_file(
            "Let heads keep different numbers of older tokens, as many in total, by what the teacher's predictions "
            "need; default: true unless num_kept_tokens is given.",
            "--kept-by-head",
        ),
    ] = None
    transfer: Annotated[list[str] | None, schedule(schedule_of("attention transfer"))] = None
    distillation: Annotated[
        list[str] | None,
        schedule(f"Schedule of distillation, {SCHEDULE}. {DISTILLATION}"),
    ] = None
    fine_tuning: Annotated[
        list[str] | None,
        options.in_file(
            schedule_of("fine-tuning, by default of 0 steps"), callback=options.after_file
        ),
    ] = None
    train: Annotated[
        str | None,
        typer.Option(
            help="What distillation trains: all, attention, new (what the teacher does not have), or lora:8 (new, and "
            "updates of rank 8); default: attention, or all if there is a memory.",
            rich_help_panel=ADVANCED,
        ),
    ] = None
    lora_rank: Annotated[int | None, options.in_file(options.LORA)] = None
    temperature: Annotated[float, options.in_file("Temperature of the distillation loss.")] = 1.0
    cross_entropy: Annotated[
        float | None,
        options.in_file(
            "Weight of the cross-entropy with the text in the distillation loss, 0 to 1; default: 0."
        ),
    ] = None
    teacher_bits: Annotated[
        int | None,
        typer.Option(
            help="Quantise the teacher to 8 or 4 bits with bitsandbytes; default: no quantisation.",
            rich_help_panel=ADVANCED,
        ),
    ] = None
    seed: options.Seed = 0

    def recipe(self) -> Recipe:
        """The recipe that these flags make."""
        given: dict = {
            x.name: getattr(self, x.name) for x in fields(Recipe) if hasattr(self, x.name)
        }
        given["goal"] = None if self.goal is None else options.read_goal(self.goal)
        given["options"] = options.read_pairs(self.option)
        given |= {name: read_schedule(name, given[name]) for name in STAGES}
        return Recipe(**given)


def convert(
    context: typer.Context,
    teacher: Annotated[
        str,
        typer.Argument(help=f"Folder, Hub name or GGUF file of a model of type {TEACHER_TYPES}."),
    ],
    text: options.Texts,
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the student; default: the names of teacher and memory, here.",
            rich_help_panel=WHERE,
        ),
    ] = None,
    student: StudentFlags,
    training: options.TrainingFlags,
) -> None:
    """Convert a trained Transformer into a memory model. The last tenth of the text is held out to compare the two.

    Example: hf-memory convert Qwen/Qwen3-0.6B --text my_text.txt
    """
    folder = output or options.named_after(teacher, student.to)
    flags = Flags.of(context, output=folder)
    request = request_of(
        teacher,
        text,
        folder,
        student.recipe(),
        flags,
        training,
    )
    if output is None:
        options.say_output(folder)
    carry_out(request, training)
