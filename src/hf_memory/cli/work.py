"""What convert and fine-tune share: a request is carried out or planned by the library, and its result is shown."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path

from hf_memory import conversion
from hf_memory.cli.options import TrainingFlags, found, read_pairs, read_weights
from hf_memory.cli.progress import signs_of_life
from hf_memory.cli.run_file import RUN, Flags
from hf_memory.cli.terminal import console, errors, print_table, say_made
from hf_memory.conversion import Plan, Recipe, Request, Results, Run, Saved
from hf_memory.conversion.choice import CONTEXT, Tried
from hf_memory.conversion.costs import read_device
from hf_memory.conversion.describe import advice_rows, device_rows, fits, goal_sentence
from hf_memory.conversion.report import (
    HEADER,
    RATIO_BELOW,
    forgets,
    score_header,
    score_table,
    table,
    unanswered,
)
from hf_memory.evaluation.scores import UNANSWERED

HEAD_COLUMNS = ("layer/head", "score")
TRIED = (
    "keep",
    "window",
    "tokens kept",
    f"cache at {CONTEXT:,} / teacher's",
    "KL before training",
)


def request_of(
    model: str,
    text: list[str],
    output: Path,
    recipe: Recipe,
    flags: Flags,
    training: TrainingFlags,
) -> Request:
    """The request that the flags of a command make."""
    sources, weights = read_weights(text)
    return Request(
        found(model),
        sources,
        output,
        recipe,
        Run(training.checkpoints, training=read_pairs(training.training, "training")),
        weights=weights,
        max_tokens=training.max_tokens,
        assistant_only=training.assistant_only_loss,
        measure_tokens=training.measure_tokens,
        items=training.items,
        overwrite=training.overwrite,
        extra_files=flags.files,
        goes_on=say_going_on,
    )


def say_going_on(folder: Path) -> None:
    """Print that a model is measured that a stopped call has saved."""
    console.print(
        f"{folder} has the model of the same run, which was stopped: it is measured, and nothing is trained. Delete "
        "the folder to begin again.",
        soft_wrap=True,
    )


def carry_out(request: Request, training: TrainingFlags) -> None:
    """Make, write and measure a model, and show the results; or show the plan of a dry run."""
    gpu = training.gpu
    if gpu and not (read_device(gpu) and training.dry_run):
        raise ValueError(f"gpu must be given with dry_run only, got {gpu}")
    if training.dry_run:
        with signs_of_life() as report:
            reporting = replace(request, run=replace(request.run, report=report))
            with _shown():
                # memory and time do not depend on what the weights decide
                plan = conversion.dry_run(reporting, uses_weights=gpu is None)
        show_plan(plan, request.run, gpu)
        return
    with _resumable(request.run), signs_of_life() as report, _shown():
        run = replace(request.run, report=report, chosen=show_choice)
        reporting = replace(request, run=run)
        saved = conversion.convert_and_save(reporting)
    if saved is not None:
        show_saved(saved, request.output)


@contextmanager
def _resumable(run: Run) -> Iterator[None]:
    """A context that says how to go on after Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt as error:
        goes_on = "--checkpoints FOLDER makes a run resumable."
        if run.checkpoints is not None:
            goes_on = f"the same command resumes from {run.checkpoints}."
        said = getattr(error, "__notes__", None) or [goes_on]
        errors.print(f"Stopped: {' '.join(said)}", soft_wrap=True)
        raise


@contextmanager
def _shown() -> Iterator[None]:
    """A context that prints what was measured for a goal that no student reaches."""
    try:
        yield
    except conversion.GoalNotReached as error:
        show_tried(error.tried)
        raise


def show_plan(plan: Plan, run: Run, gpu: str | None) -> None:
    """Print a plan; the process ends with an error if it does not fit on the device that is asked about."""
    show_choice(plan)
    rows = conversion.plan_rows(plan)
    if gpu:
        rows += device_rows(plan, run.training, gpu)
    print_table(rows, title="plan")
    if gpu and not fits(plan, run.training, gpu):
        advice = advice_rows(plan, run.training, gpu)
        print_table(advice, title=f"what fits on {gpu}, in this order")
        raise ValueError(
            f"the plan must fit into the memory of {gpu}, got one that does not: see the table above"
        )


def show_choice(plan: Plan) -> None:
    """Print what was tried for a goal, and which heads keep everything."""
    if tried := plan.choice.tried:
        show_tried(tried)
        console.print(goal_sentence(plan.given.goal, tried), soft_wrap=True)
    if heads := plan.chosen_heads:
        rows = [(f"{x.layer}/{x.head}", f"{x.score:.3f}") for x in heads]
        by = conversion.HEAD_SCORES[plan.keep.ranking]
        print_table(
            rows, HEAD_COLUMNS, title=f"key-value heads that keep everything, by their {by}"
        )


def show_tried(tried: Sequence[Tried]) -> None:
    """Print what was measured for a goal."""
    rows = [
        (x.keep, str(x.window), str(x.kept_tokens), f"{x.cache:.1%}", f"{x.kl:.3f}") for x in tried
    ]
    print_table(rows, TRIED, title="students that were measured for the goal")


def show_saved(saved: Saved, folder: Path) -> None:
    """Print the results, and how to try the model."""
    print_results(saved.results)
    say_made(
        f"Wrote {folder}: the model, README.md with what was measured, and {RUN}, which repeats this run.",
        ["chat", folder],
    )


def print_results(results: Results) -> None:
    """Print the results of all models, first the scores of their answers."""
    if scores := score_table(results):
        print_table(scores, score_header(results), title="scores of answers")
    if kinds := unanswered(results):
        console.print(f"{UNANSWERED}{', '.join(kinds)}.", soft_wrap=True)
    rows = table(results)
    models = len(results.rows)
    sections = ((None, *rows[i : i + models]) for i in range(0, len(rows), models))
    print_table(chain.from_iterable(sections), HEADER, title="on held-out text, by length")
    if at := forgets(results):
        console.print(f"From {at:,} tokens on, the last model recalls nothing.", soft_wrap=True)
    if results.is_conversion:
        console.print(RATIO_BELOW)
