"""The consoles that all commands write to."""

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hf_memory.files.names import visible
from hf_memory.progress import IS_FIRST

# text of users and models is not markup
PLAIN: dict = {
    "markup": False,
    "emoji": False,
    "highlight": False,
}


class SafeConsole(Console):
    """Escapes control characters, so that text from a model or user cannot control the terminal."""

    def render_str(self, text: str, **options) -> Text:
        """Text as it is printed, also in the cells of a table."""
        return super().render_str(visible(text), **options)


console, errors = (
    SafeConsole(stderr=stderr, quiet=not IS_FIRST, **PLAIN) for stderr in (False, True)
)


def say_made(made: str, command: Sequence[str | Path]) -> None:
    """Print what a command has made, and the words of a command to try next."""
    words = shlex.join(map(str, command))
    console.print(f"\n{made}\nNext: hf-memory {words}", soft_wrap=True)


def print_table(
    rows: Iterable[Sequence[str] | None], header: Sequence[str] = (), *, title: str
) -> None:
    """Print rows of cells; None begins a new section."""
    look: dict = {
        "box": SIMPLE_HEAD,
        "pad_edge": False,
        "collapse_padding": True,
        "show_header": bool(header),
    }
    console.print(f"\n{title}", style="italic", soft_wrap=True)
    table = Table(*header, **look)
    for row in rows:
        table.add_section() if row is None else table.add_row(*row)
    console.print(table)
