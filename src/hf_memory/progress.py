"""Progress reports of long tasks, and losses of trainings."""

from typing import NamedTuple

History = list[dict[str, float]]  # losses of a training, [{"step": ..., "loss": ...}, ...]


class Progress(NamedTuple):
    """A progress report."""

    task: str
    done: int
    total: int
    tokens: int = 0  # tokens read in each step
    loss: float | None = None


def silent(progress: Progress) -> None:
    """Ignore progress reports."""
