"""Progress reports of long tasks, and losses of trainings."""

import os
from typing import NamedTuple

# only the first process of a launch writes and prints
IS_FIRST = os.environ.get("RANK", "0") == "0"
# losses of a training, [{"step": ..., "loss": ...}, {"step": ..., "eval_loss": ...}]
History = list[dict[str, float]]


class Progress(NamedTuple):
    """A progress report."""

    task: str
    done: int
    total: int
    tokens: int = 0  # tokens read in each step
    loss: float | None = None
    eval_loss: float | None = None  # on text that nothing is trained on
    later: float = 0.0  # work of the tasks that follow, in multiples of this one
    memory: int = 0  # most bytes that were held so far


def silent(progress: Progress) -> None:
    """Ignore progress reports."""
