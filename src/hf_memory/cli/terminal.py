"""The consoles that all commands write to."""

import os

from rich.console import Console

IS_FIRST = os.environ.get("RANK", "0") == "0"  # only the first process of a launch prints
PLAIN: dict = {"markup": False, "emoji": False, "highlight": False}  # text of users and models is not markup
console, errors = (Console(stderr=stderr, quiet=not IS_FIRST, **PLAIN) for stderr in (False, True))
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}


def visible(text: str) -> str:
    """Escape control characters, so that text from a model or user cannot control the terminal."""
    return text.translate(CONTROLS)
