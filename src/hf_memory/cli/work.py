"""What convert and fine-tune share: check what was asked for, read the text, write the new model, and measure it."""

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
from hf_memory.cli.run_file import Flags
from hf_memory.cli.terminal import IS_FIRST, console, errors, print_table
from hf_memory.conversion import Plan, Recipe, Run
from hf_memory.conversion.claims import model_fingerprint, tokens_fingerprint
from hf_memory.conversion.costs import read_device
from hf_memory.conversion.describe import advice_rows, device_rows, fits
from hf_memory.conversion.goal import CONTEXT
from hf_memory.conversion.report import HEADER, RATIO_BELOW, SCORE_HEADER, score_table, table
from hf_memory.conversion.teacher_text import parse_source, write_text
from hf_memory.conversion.teachers.loading import check_bitsandbytes
from hf_memory.evaluation import OF_CARD, Subject, evaluate, lengths_beyond, record
from hf_memory.evaluation.tasks import Found
from hf_memory.export import find_target
from hf_memory.files.folders import claimed, written
from hf_memory.files.text import Text

MINIMUM = 2560  # tokens of a text, so that the last tenth has a window to compare models on
MAXIMUM = 2**18  # largest number of held-out tokens
TOKENS = "tokens"  # folder beside checkpoints


class Asked(NamedTuple):
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


class Job(NamedTuple):
    """What was asked for after it was checked, with all that it needs except the model."""

    asked: Asked
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
        flags = self.asked.training
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
            "report": self.asked.run.report,
        }
        return evaluate(subject, **given | how)

    def keep(self) -> None:
        """Keep what was measured in the output, so that a stopped call need not measure it again."""
        record.keep(self.asked.output, self.known)


class Made(NamedTuple):
    """A new model, and how it is measured once it is saved."""

    model: PreTrainedModel
    plan: Plan
    losses: dict[str, list]
    measure: Callable[[], Iterable[tuple[str, Found]]]  # of each model, by name
    adapter: Path | None = None  # folder of LoRA weights


def carry_out(asked: Asked, make: Callable[[Job], Made | None]) -> None:
    """Make, write and measure a model, and print the results; or print the plan of a dry run.

    Args:
        asked: what is asked for.
        make: makes the model; returns None in all processes except the first.
    """
    with (
        nullcontext() if asked.training.dry_run or not IS_FIRST else claimed(asked.output),
        _resumable(asked),
    ):
        with signs_of_life() as report:
            job = _prepare(asked._replace(run=replace(asked.run, report=report)))
            made = None if asked.training.dry_run else make(job)
            results = None if made is None else _saved_and_measured(job, made)
        if asked.training.dry_run:
            _show_plan(job)
        if results is None:
            return
        conversion.add_results(asked.output, results)
        (asked.output / record.FILE).unlink(missing_ok=True)
        print_results(results)
        console.print(how_to_load(asked.output), soft_wrap=True)


def _show_plan(job: Job) -> None:
    """Print the plan; the process ends with an error if it does not fit on the device that is asked about."""
    rows = conversion.plan_rows(job.plan)
    training = job.asked.run.training
    on = job.asked.training.gpu
    print_table(rows + (device_rows(job.plan, training, on) if on else []), title="plan")
    if on and not fits(job.plan, training, on):
        print_table(advice_rows(job.plan, training, on), title=f"what fits on {on}, in this order")
        raise ValueError(
            f"the plan must fit into the memory of {on}, got one that does not: see the table above"
        )


@contextmanager
def _resumable(asked: Asked) -> Iterator[None]:
    """A context that says how to go on after Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        if not asked.training.dry_run:
            errors.print(f"Stopped: {how_to_resume(asked.run.checkpoints)}.", soft_wrap=True)
        raise


def how_to_resume(checkpoints: Path | None) -> str:
    """A clause that says how a run goes on that was stopped."""
    if checkpoints is None:
        return "--checkpoints FOLDER makes a run resumable"
    return f"the same command resumes from {checkpoints}"


def _prepare(asked: Asked) -> Job:
    """Check what is asked for, and read the text."""
    recipe = asked.recipe
    run = asked.run
    output = asked.output
    if (on := asked.training.gpu) and not (read_device(on) and asked.training.dry_run):
        raise ValueError(f"gpu must be given with dry_run only, got {on}")
    if recipe.teacher_bits and conversion.find_gguf(found(asked.scored_by or asked.model)):
        raise ValueError(
            f"teacher_bits must not be given for a GGUF file, got {recipe.teacher_bits}"
        )
    config = conversion.load_config(found(asked.model))
    longest = max(x.length for x in recipe.schedules.values())
    empty = torch.zeros(longest, dtype=torch.long)  # instead of the text
    scorer = None if asked.scored_by is None else _scorer(asked.scored_by, asked.model, config)
    validates = "eval_steps" in run.training
    plan = conversion.resolve(recipe, config, empty, scorer)
    if resumed := asked.flags.are_unfinished(output, plan):
        asked = asked._replace(
            training=replace(asked.training, overwrite=True)
        )  # the result of this very command
    if not asked.training.dry_run:  # which may be on another machine
        check_bitsandbytes(recipe.teacher_bits)
    checked = replace(run, validation=empty if validates else None)
    conversion.check_run(plan, checked, output=output, overwrite=asked.training.overwrite)
    if asked.servable:
        find_target(plan.student)  # type: ignore[arg-type]
    tokenizer = conversion.load_tokenizer(
        asked.model
    )  # after the checks, since reading a text may take long
    tokens, held_out = split(_read(asked, tokenizer))
    if validates:
        tokens, validation = split(tokens)
        run = replace(run, validation=validation)
        asked = asked._replace(run=run)
    if asked.goal is not None:
        recipe = _smallest(asked, asked.goal, tokens)
        asked = asked._replace(recipe=recipe)
    plan = conversion.resolve(recipe, config, tokens, scorer)
    if not asked.training.dry_run:  # which may be on another machine
        conversion.check_space(plan, run, output=output)
    known = record.open_record(output, {}) if resumed else {"settings": {}, "models": {}}
    return Job(asked, plan, tokenizer, tokens, held_out, known)


def _read(asked: Asked, tokenizer) -> Text:
    """The text, whose tokens are kept beside the checkpoints if there are any."""
    (texts, weights), checkpoints = read_weights(asked.text), asked.run.checkpoints
    sources = [_written(source, asked, tokenizer) for source in texts]
    how: dict = {
        "limit": asked.training.max_tokens,
        "assistant_only": asked.training.assistant_only_loss,
    }
    how |= {"weights": weights, "report": asked.run.report}
    if checkpoints is None or asked.training.dry_run:
        return conversion.read_tokens(sources, tokenizer, **how)
    with conversion.processes().main_process_first():
        return conversion.read_tokens(sources, tokenizer, cache=checkpoints / TOKENS, **how)


def _smallest(asked: Asked, kl: float, tokens: Text) -> Recipe:
    """The recipe of the smallest student that reaches the goal, after a table of those that were measured."""
    conversion.processes()
    teacher = conversion.load_teacher(asked.model).to(device())  # type: ignore[arg-type]
    tried = conversion.smallest_student(asked.recipe, kl, teacher, tokens, report=asked.run.report)
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


def _written(source: str, asked: Asked, tokenizer) -> str:
    """A source of text; for teacher:... the file of generated text beside the output."""
    wanted = parse_source(source)
    if wanted is None:
        return source
    if asked.training.dry_run:
        raise ValueError(
            f"text must exist for a dry run, got {source}, which the teacher would have to generate"
        )
    folder, (num_tokens, prompts) = asked.output.with_name(f"{asked.output.name}-text"), wanted
    teacher = conversion.load_teacher(asked.model).to(device())  # type: ignore[arg-type]
    how: dict = {"prompts": prompts, "seed": asked.recipe.seed, "report": asked.run.report}
    with conversion.processes().main_process_first():
        return str(write_text(folder, teacher, tokenizer, num_tokens, **how))


def _saved_and_measured(job: Job, made: Made) -> conversion.Results:
    """Write a model with its run file, then measure it, which may take long."""
    asked = job.asked
    checkpoints = job.asked.run.checkpoints
    goes_on = how_to_resume(checkpoints)
    with (
        written("result", asked.output, f"what was there is unchanged, and {goes_on}"),
        conversion.new_folder(asked.output, overwrite=asked.training.overwrite) as folder,
    ):
        conversion.write_model(folder, made.model, job.tokenizer)
        if made.adapter is not None:
            shutil.copytree(made.adapter, folder / "adapter")
        asked.flags.write(folder, made.plan)
    rows = dict(made.measure())
    file = conversion.find_gguf(asked.model)
    names = {
        "teacher": asked.model if file is None else file.name,
        "text": ", ".join(
            Path(x).name if Path(x).exists() else x for x in read_weights(asked.text)[0]
        ),
    }
    results = conversion.results_of(
        made.plan, made.losses, rows, **names, training=asked.run.training
    )
    if file:
        weights = made.plan.teacher_parameters or made.plan.student_parameters
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


def how_to_load(folder: Path) -> str:
    """A text that says how to load and use the model."""
    return f"""
Wrote {folder}. To use it:

    import hf_memory
    from transformers import pipeline
    pipeline("text-generation", model="{folder}")("The with statement", max_new_tokens=40)

or: hf-memory generate {folder} --prompt "The with statement"; hf-memory info {folder}"""
