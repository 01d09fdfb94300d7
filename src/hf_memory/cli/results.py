"""What convert, fine-tune and demo have in common: they read a text, show how it goes, compare and write models."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor
from transformers import AutoTokenizer, TrainerCallback

from hf_memory import conversion
from hf_memory.cli.options import found
from hf_memory.cli.terminal import console
from hf_memory.conversion.checkpoints import written
from hf_memory.conversion.report import HEADER, table

MINIMUM = 2560  # tokens of a text, so that there is a window to compare two models on in the last tenth
MAXIMUM = 2**18  # tokens to compare models on, however long a text is


class StageProgress(TrainerCallback):
    """Shows each stage of training as a bar with its loss."""

    def __init__(self, progress: Progress):
        self.progress = progress

    def on_train_begin(self, args, state, control, **kwargs):
        """A new bar."""
        self.task = self.progress.add_task(args.run_name, total=state.max_steps, loss="")

    def on_step_end(self, args, state, control, **kwargs):
        """One step further."""
        self.progress.update(self.task, completed=state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        """The loss, when the Trainer reports it."""
        if logs and "loss" in logs:
            self.progress.update(self.task, loss=f"loss {float(logs['loss']):.3f}")


@contextmanager
def bars() -> Iterator[tuple[Progress, tuple[TrainerCallback, ...]]]:
    """Bars on the terminal, and the callbacks that move them."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    loss = TextColumn("{task.fields[loss]}")
    with Progress(*columns, TimeRemainingColumn(), loss, console=console) as progress:
        yield progress, (StageProgress(progress),)


@contextmanager
def result(output: Path, overwrite: bool, checkpoints: Path | None) -> Iterator[Path]:
    """A folder to write a result to, which is there whole or not at all."""
    goes_on = f"the same command goes on from {checkpoints}" if checkpoints else "with --checkpoints it would go on"
    with (
        written("result", output, f"what was there is unchanged, and {goes_on}"),
        conversion.new_folder(output, overwrite=overwrite) as folder,
    ):
        yield folder


def names_of(text: list[str]) -> str:
    """Of the sources of a text, without the folders that they are in."""
    return ", ".join(Path(source).name if Path(source).exists() else source for source in text)


def device() -> str:
    """Where models run."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def read(model: str, text: list[str], limit: int | None) -> tuple:
    """The tokenizer of a model, text to learn on, and text that is held out."""
    tokenizer = AutoTokenizer.from_pretrained(found(model))
    return tokenizer, *_split(conversion.read_tokens(text, tokenizer, limit=limit))


def _split(tokens: Tensor) -> list[Tensor]:
    """Text to learn on, and the last tenth or what is enough, to compare models on."""
    if len(tokens) < MINIMUM:
        raise ValueError(f"text must have at least {MINIMUM} tokens, of which a tenth is held out, got {len(tokens)}")
    held_out = min(len(tokens) // 10, MAXIMUM)
    return list(tokens.split([len(tokens) - held_out, held_out]))


def print_plan(plan: list[tuple[str, str]]) -> None:
    """What would be done."""
    rows = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, show_header=False, title="plan")
    for row in plan:
        rows.add_row(*row)
    console.print(rows)


def print_results(results: conversion.Results) -> None:
    """The models in one table."""
    title = f"on held-out text; cache after {results.rows[0].costs[-1].context} tokens"
    rows = Table(*HEADER, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title=title)
    for row in table(results):
        rows.add_row(*row)
    console.print(rows)


def how_to_load(folder: Path) -> str:
    """What to type next."""
    return f"""
Wrote {folder}. To use it:

    import hf_memory
    from transformers import pipeline
    pipeline("text-generation", model="{folder}")("The with statement", max_new_tokens=40)

or: hf-memory generate {folder} --prompt "The with statement"; hf-memory info {folder}"""
