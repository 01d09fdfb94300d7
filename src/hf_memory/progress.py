"""Progress reports of long tasks."""

from typing import NamedTuple


class Progress(NamedTuple):
    """A progress report."""

    task: str
    done: int
    total: int
    tokens: int = 0  # tokens read in each step
    loss: float | None = None


def silent(progress: Progress) -> None:
    """Ignore progress reports."""
