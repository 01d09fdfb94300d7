"""Progress reports of long work."""

from typing import NamedTuple


class Progress(NamedTuple):
    """A progress report."""

    task: str
    done: int
    total: int
    tokens: int = 0  # read in each of these
    loss: float | None = None


def silent(progress: Progress) -> None:
    """Ignore progress reports."""
