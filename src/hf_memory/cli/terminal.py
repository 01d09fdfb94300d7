"""The consoles that all commands write to."""

import os

from rich.console import Console
from rich.text import Text

from hf_memory.files.names import visible

IS_FIRST = os.environ.get("RANK", "0") == "0"  # only the first process of a launch prints
PLAIN: dict = {"markup": False, "emoji": False, "highlight": False}  # text of users and models is not markup


class SafeConsole(Console):
    """Escapes control characters, so that text from a model or user cannot control the terminal."""

    def render_str(self, text: str, **options) -> Text:
        """Text as it is printed, also in the cells of a table."""
        return super().render_str(visible(text), **options)


console, errors = (SafeConsole(stderr=stderr, quiet=not IS_FIRST, **PLAIN) for stderr in (False, True))
