"""What convert and fine-tune share: check a request, read the text, write the new model, and measure it."""

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_memory import conversion
from hf_memory.cli.options import TrainingFlags, found, read_weights
from hf_memory.cli.progress import signs_of_life
from hf_memory.cli.run_file import RUN, Flags
from hf_memory.cli.terminal import IS_FIRST, console, errors, print_table, say_made
from hf_memory.conversion import Plan, Recipe, Run
from hf_memory.conversion.costs import read_device
from hf_memory.conversion.describe import advice_rows, device_rows, fits
from hf_memory.conversion.goal import CONTEXT
from hf_memory.conversion.report import HEADER, RATIO_BELOW, SCORE_HEADER, score_table, table
from hf_memory.conversion.run_identity import model_fingerprint, tokens_fingerprint
from hf_memory.conversion.teacher_text import parse_source, write_text
from hf_memory.conversion.teachers.loading import check_bitsandbytes
from hf_memory.evaluation import OF_CARD, Subject, evaluate, lengths_beyond, record
from hf_memory.evaluation.tasks import Found
from hf_memory.export import find_target
from hf_memory.files.folders import folder_lock, written
from hf_memory.files.text import Text

MINIMUM = 2560  # tokens of a text, so that the last tenth has a window to compare models on
MAXIMUM = 2**18  # largest number of held-out tokens
TOKENS = "tokens"  # folder beside checkpoints


class Request(NamedTuple):
    """What convert or fine-tune is asked for."""

    model: str  # folder, Hub name or GGUF file of the model to start from
    recipe: Recipe
    run: Run
    text: list[str]  # its sources
    output: Path
    flags: Flags  # of the command, for the run file
    training: TrainingFlags
    servable: bool = False  # by inference engines
    scored_by: str | None = None  # the model that scores in distillation, if it is not the first
    goal: float | None = None  # largest KL of a student before training, which decides what is kept


class Prepared(NamedTuple):
    """A request that was checked, with all that it needs except the model."""

    request: Request
    plan: Plan
    tokenizer: Any
    tokens: Text  # the training text
    held_out: Text
    known: record.Record  # what a stopped call has measured

    def measure(
        self, name: str, model: PreTrainedModel, teacher: PreTrainedModel | None = None, **how
    ) -> Found:
        """Measure a model, and compare it with a teacher if there is one; further arguments are those of `evaluate`."""
        found = record.row_of(
            self.known, name, f"{model_fingerprint(model)} {tokens_fingerprint(self.held_out)}"
        )
        first = next(iter(self.known["models"].values()))["found"]
        flags = self.request.training
        subject = Subject(
            model,
            self.held_out,
            teacher,
            lengths_beyond(self.plan.student, len(self.held_out)),
            flags.measure_tokens,
            self.tokenizer,
            items=flags.items,
            theirs={} if found is first else first,
        )
        given: dict = {
            "tasks": OF_CARD,
            "found": found,
            "name": name,
            "report": self.request.run.report,
        }
        return evaluate(subject, **given | how)

    def save_record(self) -> None:
        """Keep what was measured in the output, so that a stopped call need not measure it again."""
        record.keep(self.request.output, self.known)


class Trained(NamedTuple):
    """A new model, and how it is measured once it is saved."""

    model: PreTrainedModel
    plan: Plan
    losses: dict[str, list]
    measure: Callable[[], Iterable[tuple[str, Found]]]  # of each model, by name
    adapter: Path | None = None  # folder of LoRA weights


def carry_out(request: Request, make: Callable[[Prepared], Trained | None]) -> None:
    """Make, write and measure a model, and print the results; or print the plan of a dry run.

    Args:
        request: what is asked for.
        make: makes the model; returns None in all processes except the first.
    """
    with (
        nullcontext() if request.training.dry_run or not IS_FIRST else folder_lock(request.output),
        _resumable(request),
    ):
        with signs_of_life() as report:
            prepared = _prepare(request._replace(run=replace(request.run, report=report)))
            trained = None if request.training.dry_run else make(prepared)
            results = None if trained is None else _saved_and_measured(prepared, trained)
        if request.training.dry_run:
            _show_plan(prepared)
        if results is None:
            return
        conversion.add_results(request.output, results)
        (request.output / record.FILE).unlink(missing_ok=True)
        print_results(results)
        say_what_was_made(request.output)


def _show_plan(prepared: Prepared) -> None:
    """Print the plan; the process ends with an error if it does not fit on the device that is asked about."""
    rows = conversion.plan_rows(prepared.plan)
    training = prepared.request.run.training
    on = prepared.request.training.gpu
    print_table(rows + (device_rows(prepared.plan, training, on) if on else []), title="plan")
    if on and not fits(prepared.plan, training, on):
        print_table(
            advice_rows(prepared.plan, training, on), title=f"what fits on {on}, in this order"
        )
        raise ValueError(
            f"the plan must fit into the memory of {on}, got one that does not: see the table above"
        )


@contextmanager
def _resumable(request: Request) -> Iterator[None]:
    """A context that says how to go on after Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        if not request.training.dry_run:
            errors.print(f"Stopped: {how_to_resume(request.run.checkpoints)}.", soft_wrap=True)
        raise


def how_to_resume(checkpoints: Path | None) -> str:
    """A clause that says how a run goes on that was stopped."""
    if checkpoints is None:
        return "--checkpoints FOLDER makes a run resumable"
    return f"the same command resumes from {checkpoints}"


def _prepare(request: Request) -> Prepared:
    """Check a request, and read the text."""
    recipe = request.recipe
    run = request.run
    output = request.output
    if (on := request.training.gpu) and not (read_device(on) and request.training.dry_run):
        raise ValueError(f"gpu must be given with dry_run only, got {on}")
    if recipe.teacher_bits and conversion.find_gguf(found(request.scored_by or request.model)):
        raise ValueError(
            f"teacher_bits must not be given for a GGUF file, got {recipe.teacher_bits}"
        )
    config = conversion.load_config(found(request.model))
    longest = max(x.length for x in recipe.schedules.values())
    empty = torch.zeros(longest, dtype=torch.long)  # instead of the text
    scorer = (
        None if request.scored_by is None else _scorer(request.scored_by, request.model, config)
    )
    validates = "eval_steps" in run.training
    plan = conversion.resolve(recipe, config, empty, scorer)
    if resumed := request.flags.are_unfinished(output, plan):
        request = request._replace(
            training=replace(request.training, overwrite=True)
        )  # the result of this very command
    if not request.training.dry_run:  # which may be on another machine
        check_bitsandbytes(recipe.teacher_bits)
    checked = replace(run, validation=empty if validates else None)
    conversion.check_run(plan, checked, output=output, overwrite=request.training.overwrite)
    if request.servable:
        find_target(plan.student)  # type: ignore[arg-type]
    tokenizer = conversion.load_tokenizer(
        request.model
    )  # after the checks, since reading a text may take long
    tokens, held_out = split(_read(request, tokenizer))
    if validates:
        tokens, validation = split(tokens)
        run = replace(run, validation=validation)
        request = request._replace(run=run)
    if request.goal is not None:
        recipe = _smallest(request, request.goal, tokens)
        request = request._replace(recipe=recipe)
    plan = conversion.resolve(recipe, config, tokens, scorer)
    if not request.training.dry_run:  # which may be on another machine
        conversion.check_space(plan, run, output=output)
    known = record.open_record(output, {}) if resumed else {"settings": {}, "models": {}}
    return Prepared(request, plan, tokenizer, tokens, held_out, known)


def _read(request: Request, tokenizer) -> Text:
    """The text, whose tokens are kept beside the checkpoints if there are any."""
    (texts, weights), checkpoints = read_weights(request.text), request.run.checkpoints
    sources = [_written(source, request, tokenizer) for source in texts]
    how: dict = {
        "limit": request.training.max_tokens,
        "assistant_only": request.training.assistant_only_loss,
    }
    how |= {"weights": weights, "report": request.run.report}
    if checkpoints is None or request.training.dry_run:
        return conversion.read_tokens(sources, tokenizer, **how)
    with conversion.processes().main_process_first():
        return conversion.read_tokens(sources, tokenizer, cache=checkpoints / TOKENS, **how)


def _smallest(request: Request, kl: float, tokens: Text) -> Recipe:
    """The recipe of the smallest student that reaches the goal, after a table of those that were measured."""
    conversion.processes()
    teacher = conversion.load_teacher(request.model).to(device())  # type: ignore[arg-type]
    tried = conversion.smallest_student(
        request.recipe, kl, teacher, tokens, report=request.run.report
    )
    rows = [
        (
            str(recipe.keep).partition(":")[2],
            *(str(recipe.options.get(name, 0)) for name in ("sliding_window", "num_kept_tokens")),
            *(f"{cache:.1%}", f"{found:.3f}"),
        )
        for recipe, cache, found in tried
    ]
    header = (
        "heads",
        "window",
        "tokens kept",
        f"cache at {CONTEXT:,} / teacher's",
        "KL before training",
    )
    print_table(rows, header, title=f"the smallest student with kl={kl:g}")
    return tried[-1].recipe


def _scorer(name: str, teacher_name: str, teacher: PreTrainedConfig) -> PreTrainedConfig:
    """The config of a model that scores, without what pads its vocabulary."""
    scorer = conversion.load_config(found(name))
    ours, theirs = (conversion.load_tokenizer(x).get_vocab() for x in (teacher_name, name))
    if ours != theirs or scorer.vocab_size < teacher.vocab_size:
        raise ValueError(
            f"scored_by must be a model with the teacher's vocabulary, got {name} with another"
        )
    scorer.vocab_size = teacher.vocab_size
    return scorer


def _written(source: str, request: Request, tokenizer) -> str:
    """A source of text; for teacher:... the file of generated text beside the output."""
    wanted = parse_source(source)
    if wanted is None:
        return source
    if request.training.dry_run:
        raise ValueError(
            f"text must exist for a dry run, got {source}, which the teacher would have to generate"
        )
    folder, (num_tokens, prompts) = request.output.with_name(f"{request.output.name}-text"), wanted
    teacher = conversion.load_teacher(request.model).to(device())  # type: ignore[arg-type]
    how: dict = {"prompts": prompts, "seed": request.recipe.seed, "report": request.run.report}
    with conversion.processes().main_process_first():
        return str(write_text(folder, teacher, tokenizer, num_tokens, **how))


def _saved_and_measured(prepared: Prepared, trained: Trained) -> conversion.Results:
    """Write a model with its run file, then measure it, which may take long."""
    request = prepared.request
    checkpoints = request.run.checkpoints
    goes_on = how_to_resume(checkpoints)
    with (
        written("result", request.output, f"what was there is unchanged, and {goes_on}"),
        conversion.new_folder(request.output, overwrite=request.training.overwrite) as folder,
    ):
        conversion.write_model(folder, trained.model, prepared.tokenizer)
        if trained.adapter is not None:
            shutil.copytree(trained.adapter, folder / "adapter")
        request.flags.write(folder, trained.plan)
    rows = dict(trained.measure())
    file = conversion.find_gguf(request.model)
    names = {
        "teacher": request.model if file is None else file.name,
        "text": ", ".join(
            Path(x).name if Path(x).exists() else x for x in read_weights(request.text)[0]
        ),
    }
    results = conversion.results_of(
        trained.plan, trained.losses, rows, **names, training=request.run.training
    )
    if file:
        weights = trained.plan.teacher_parameters or trained.plan.student_parameters
        results.recipe["teacher_weights"] = conversion.describe_weights(file, weights)
    return results


def device() -> str:
    """The device on which models run."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def split(tokens: Text) -> tuple[Text, Text]:
    """The training text, and the held-out text: the last tenth of each part, or less if that is enough."""
    if len(tokens) < MINIMUM:
        raise ValueError(
            f"text must have at least {MINIMUM} tokens, of which a tenth is held out, got {len(tokens)}"
        )
    parts = [
        (x, len(x) - max(1, min(len(x) // 10, MAXIMUM // len(tokens.parts)))) for x in tokens.parts
    ]
    sides = [x[:end] for x, end in parts], [x[end:] for x, end in parts]
    train, held_out = (
        Text.mixed(texts, tokens.weights) if tokens.mixture else texts[0] for texts in sides
    )
    return train, held_out


def print_results(results: conversion.Results) -> None:
    """Print the results of all models, first the scores of their answers."""
    if scores := score_table(results):
        print_table(scores, SCORE_HEADER, title="scores of answers")
    rows = table(results)
    models = len(results.rows)
    sections = ((None, *rows[i : i + models]) for i in range(0, len(rows), models))
    print_table(chain.from_iterable(sections), HEADER, title="on held-out text, by length")
    console.print(RATIO_BELOW)


def say_what_was_made(folder: Path) -> None:
    """Print that a model is written, and how to try it."""
    say_made(
        f"Wrote {folder}: the model, README.md with what was measured, and {RUN}, which repeats this run.",
        ["chat", folder],
    )
