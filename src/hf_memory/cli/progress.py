"""Progress reports: bars on a terminal; elsewhere a line every minute or every tenth of a task."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from rich import progress as rich

from hf_memory.cli.terminal import console
from hf_memory.files.names import visible
from hf_memory.progress import Progress

MINUTE = 60.0  # seconds
WHY = {  # by how the name of a task begins: what it does, and what takes the time
    "reading the text": "it is made into tokens once; --checkpoints keeps them",
    "the teacher writes": "the teacher generates the text of the training, token by token",
    "ranking heads": "the teacher reads passages forward and backward, to find the heads that its predictions need",
    "measuring untrained students": "each reads the same text, from the smallest cache on, until one is near enough",
    "weighing what heads keep": "the teacher reads windows forward and backward, as if each head kept fewer tokens",
    "attention transfer": "each new layer learns what attention in its place gave",
    "distillation": "teacher and student read each window, and the student learns from the difference",
    "fine-tuning": "the model learns from each window of text",
    "reading into the datastore": "the model reads the whole text and keeps a key for each token",
    "measuring": "the model reads held-out texts; long ones, and answers to questions, take most of the time",
}
TRAINING = ("attention transfer", "distillation", "fine-tuning")


@contextmanager
def signs_of_life() -> Iterator[Callable[[Progress], None]]:
    """A context that shows the progress of each task, after a line that says what it is."""
    if not console.is_terminal:
        yield explained(Lines())
        return
    columns = (
        rich.TextColumn("{task.description}", markup=False),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
    )
    times = (
        rich.TimeElapsedColumn(),
        rich.TimeRemainingColumn(),
        rich.TextColumn("{task.fields[loss]}"),
    )
    with rich.Progress(*columns, *times, console=console) as bars:
        yield explained(Bars(bars))


def explained(report: Callable[[Progress], None]) -> Callable[[Progress], None]:
    """A report before which each new kind of task is explained in a line."""
    known = set[str]()

    def tell(now: Progress) -> None:
        name = next((x for x in WHY if now.task.startswith(x)), None)
        if name and name not in known:
            compiles = name in TRAINING and torch.cuda.is_available()
            first = "; the GPU compiles kernels first" if compiles else ""
            console.print(f"{now.task}: {WHY[name]}{first}", soft_wrap=True)
            known.add(name)
        report(now)

    return tell


class Bars:
    """A bar for each task."""

    def __init__(self, bars: rich.Progress):
        self.bars = bars
        self.of_task: dict[str, tuple] = {}

    def __call__(self, now: Progress) -> None:
        """Advance the bar of a task, or add one."""
        bar, done = self.of_task.get(now.task, (None, 0))
        if bar is None or now.done < done:
            bar = self.bars.add_task(visible(now.task), loss="")
        self.of_task[now.task] = bar, now.done
        self.bars.update(bar, completed=now.done, total=now.total or None)
        rate = self.bars.tasks[self.bars.task_ids.index(bar)].speed
        self.bars.update(bar, loss=", ".join([*_losses(now), *_run(now, rate or 0)]))


class Lines:
    """Prints a line from time to time, and none twice."""

    def __init__(self) -> None:
        self.first = Progress("", 0, 0)
        self.last = Progress("", 0, 0)
        self.began = self.last_line = 0.0
        self.printed = ""

    def __call__(self, now: Progress) -> None:
        """Print a line if the last one was long ago."""
        moment = time.monotonic()
        if now.task != self.last.task or now.done < self.last.done:
            self.first = self.last = now
            self.began = self.last_line = moment
        elif (
            moment - self.last_line >= MINUTE
            or self.last.done < now.done == now.total
            or 10 * (now.done - self.last.done) >= now.total > 0
        ):
            line = self._line(now, moment - self.began)
            if line != self.printed:
                console.print(line, soft_wrap=True)
            self.printed = line
            self.last = now
            self.last_line = moment

    def _line(self, now: Progress, seconds: float) -> str:
        rate = (now.done - self.first.done) / max(seconds, 1e-9)
        words = [
            f"{now.task}: {now.done:,}" + (f"/{now.total:,}" if now.total else ""),
            *_losses(now),
        ]
        if now.tokens:
            words.append(f"{rate * now.tokens:,.0f} tokens/s")
        if now.total and rate:
            words.append(f"{timedelta(seconds=round((now.total - now.done) / rate))} left")
        return ", ".join(words + _run(now, rate))


def _losses(now: Progress) -> list[str]:
    losses = {"loss": now.loss, "validation": now.eval_loss}
    return [f"{name} {loss:.3f}" for name, loss in losses.items() if loss is not None]


def _run(now: Progress, rate: float) -> list[str]:
    """The time until the end of all tasks, and the memory."""
    left = (now.total - now.done + now.later * now.total) / rate if rate else 0
    later = [f"{timedelta(seconds=round(left))} left of the run"] if now.later and left else []
    return later + ([f"{now.memory / 1e9:.1f} GB"] if now.memory else [])
