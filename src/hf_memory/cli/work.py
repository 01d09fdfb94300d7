"""Functions that convert, fine-tune and demo share: check arguments, read text, compare and write models."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from transformers import PreTrainedModel

from hf_memory import conversion
from hf_memory.cli.options import found, read_pairs
from hf_memory.cli.terminal import IS_FIRST, console
from hf_memory.conversion import Plan, Recipe, Run
from hf_memory.conversion.claims import model_fingerprint, tokens_fingerprint
from hf_memory.conversion.report import HEADER, table
from hf_memory.conversion.run_file import RUN, is_unfinished, recipe_flags, write_flags
from hf_memory.conversion.teacher_text import parse_source, write_text
from hf_memory.evaluation import ModelResult, Subject, lengths_beyond, measure
from hf_memory.evaluation.record import Record, open_record, row_of
from hf_memory.export import find_target
from hf_memory.files.claims import claimed
from hf_memory.files.folders import check_folder, written
from hf_memory.files.text import Text
from hf_memory.progress import Progress

MINIMUM = 2560  # tokens of a text, so that the last tenth has a window to compare models on
MAXIMUM = 2**18  # largest number of held-out tokens


class Job(NamedTuple):
    """A checked plan with all that it needs, except the model."""

    plan: Plan
    run: Run
    tokenizer: Any
    tokens: Text  # the training text
    held_out: Text
    measure_tokens: int  # number of held-out tokens to compare models on
    known: Record  # what a stopped call has measured

    def measure(self, name: str, model: PreTrainedModel, teacher: PreTrainedModel | None = None, **how) -> ModelResult:
        """Measure a model, and compare it with a teacher if there is one; further arguments are those of `measure`."""
        lengths = lengths_beyond(self.plan.student)
        subject = Subject(model, self.held_out, teacher, lengths, self.measure_tokens)
        found = row_of(self.known, name, f"{model_fingerprint(model)} {tokens_fingerprint(self.held_out)}")
        return measure(name, subject, found=found, report=self.run.report, **how)


def claimed_output(context: typer.Context) -> AbstractContextManager[None]:
    """A context in which no other process can write to the output, unless this one does not write there."""
    if context.params["dry_run"] or not IS_FIRST:
        return nullcontext()
    check_folder("output", context.params["output"])
    return claimed(context.params["output"])


def prepare(context: typer.Context, model: str, recipe: Recipe, report: Callable[[Progress], None]) -> Job:
    """Check the flags of a command, and read its text."""
    given = context.params
    training = read_pairs(given["arguments"])
    run = Run(given["checkpoints"], given.get("teacher_logits"), report=report, training=training)
    if conversion.find_gguf(model) is None:
        found(model)
    elif recipe.teacher_bits:
        raise ValueError(f"teacher_bits must not be given for a GGUF file, got {recipe.teacher_bits}")
    resumed = is_unfinished(given["output"], context.command.params, given | recipe_flags(recipe))
    given["overwrite"] |= resumed  # the result of this very command
    config, output = conversion.load_config(model), {x: given[x] for x in ("output", "overwrite")}
    longest = max(schedule.length for schedule in recipe.schedules.values())
    plan = conversion.resolve(recipe, config, torch.zeros(longest, dtype=torch.long))
    conversion.check_run(plan, run, **output)
    if given.get("servable"):
        find_target(plan.student)  # type: ignore[arg-type]
    tokenizer = conversion.load_tokenizer(model)  # after the checks, since reading a text may take long
    text = [_written(source, context, model, tokenizer, report) for source in given["text"]]
    tokens = conversion.read_tokens(text, tokenizer, limit=given["max_tokens"], report=report)
    tokens, held_out = split(tokens)
    plan = conversion.resolve(recipe, config, tokens)
    if not given["dry_run"]:  # a dry run may be on another machine
        conversion.check_space(plan, run, output=given["output"])
    known = open_record(given["output"], {}) if resumed else {"settings": {}, "models": {}}
    return Job(plan, run, tokenizer, tokens, held_out, given["measure_tokens"], known)


def _written(source: str, context: typer.Context, model: str, tokenizer, report: Callable[[Progress], None]) -> str:
    """A source of text; for teacher:... the file of generated text beside the output."""
    asked = parse_source(source)
    if asked is None:
        return source
    if context.params["dry_run"]:
        raise ValueError(f"text must exist for a dry run, got {source}, which the teacher would have to generate")
    output, (num_tokens, prompts) = context.params["output"], asked
    folder, seed, teacher = (
        output.with_name(f"{output.name}-text"),
        context.params["seed"],
        conversion.load_teacher(model),
    )
    teacher.to(device())  # type: ignore[arg-type]
    with conversion.processes().main_process_first():
        return str(write_text(folder, teacher, tokenizer, num_tokens, prompts=prompts, seed=seed, report=report))


def save(context: typer.Context, job: Job, model: PreTrainedModel, flags: Mapping[str, Any]) -> None:
    """Write a new model and its run file before it is measured, which may take long; see `finish`."""
    with _result(context.params["output"], context.params["overwrite"], job.run.checkpoints) as folder:
        conversion.write_model(folder, model, job.tokenizer)
        write_flags(folder / RUN, context.command.params, context.params | dict(flags))


def show(output: Path, results: conversion.Results) -> None:
    """Print the results, and how to use the model."""
    print_results(results)
    console.print(how_to_load(output), soft_wrap=True)


def finish(
    context: typer.Context,
    job: Job,
    model: PreTrainedModel,
    results: conversion.Results,
    *,
    adapter: Path | None = None,
) -> None:
    """Write a model with its results and its run file, and print the results.

    Args:
        context: the command's context.
        job: the job of the command.
        model: the new model.
        results: its results.
        adapter: folder of LoRA weights, to be copied.
    """
    output = context.params["output"]
    with _result(output, context.params["overwrite"], job.run.checkpoints) as folder:
        conversion.write_report(folder, model, job.tokenizer, results)
        if adapter is not None:
            shutil.copytree(adapter, folder / "adapter")
        write_flags(folder / RUN, context.command.params, context.params)
    show(output, results)


@contextmanager
def _result(output: Path, overwrite: bool, checkpoints: Path | None) -> Iterator[Path]:
    """A context with a folder to write a result to; the result exists completely or not at all."""
    goes_on = f"the same command resumes from {checkpoints}" if checkpoints else "--checkpoints makes a run resumable"
    with (
        written("result", output, f"what was there is unchanged, and {goes_on}"),
        conversion.new_folder(output, overwrite=overwrite) as folder,
    ):
        yield folder


def results_of(context: typer.Context, job: Job, plan: Plan, losses: dict, rows: list, model: str):
    """The results of a command that has made a model from another one."""
    text = ", ".join(Path(x).name if Path(x).exists() else x for x in context.params["text"])
    file, training = conversion.find_gguf(model), job.run.training
    name = model if file is None else file.name
    results = conversion.results_of(plan, losses, rows, teacher=name, text=text, training=training)
    if file:
        results.recipe["teacher_weights"] = conversion.describe_weights(
            file, plan.teacher_parameters or plan.student_parameters
        )
    return results


def device() -> str:
    """The device on which models run."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def split(tokens: Text) -> tuple[Text, Text]:
    """The training text, and the held-out text: the last tenth, or less if that is enough."""
    if len(tokens) < MINIMUM:
        raise ValueError(f"text must have at least {MINIMUM} tokens, of which a tenth is held out, got {len(tokens)}")
    held_out = min(len(tokens) // 10, MAXIMUM)
    return tokens[:-held_out], tokens[-held_out:]


def print_plan(plan: Plan) -> None:
    """Print the plan."""
    rows = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, show_header=False, title="plan")
    for row in conversion.plan_rows(plan):
        rows.add_row(*row)
    console.print(rows)


def print_results(results: conversion.Results) -> None:
    """Print the results of all models in one table."""
    rows = Table(*HEADER, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title="on held-out text, by length")
    for i, row in enumerate(table(results), 1):
        rows.add_row(*row, end_section=i % len(results.rows) == 0)
    console.print(rows)


def how_to_load(folder: Path) -> str:
    """A text that says how to load and use the model."""
    return f"""
Wrote {folder}. To use it:

    import hf_memory
    from transformers import pipeline
    pipeline("text-generation", model="{folder}")("The with statement", max_new_tokens=40)

or: hf-memory generate {folder} --prompt "The with statement"; hf-memory info {folder}"""
