"""How far long work is: what it tells whoever wants to know."""

from typing import NamedTuple


class Progress(NamedTuple):
    """A sign of life."""

    task: str
    done: int
    total: int
    tokens: int = 0  # read in each of these
    loss: float | None = None


def silent(progress: Progress) -> None:
    """Report to nobody."""
