"""What all commands write to."""

import os

from rich.console import Console

IS_FIRST = os.environ.get("RANK", "0") == "0"  # of the processes that a launcher started; the others say nothing
PLAIN: dict = {"markup": False, "emoji": False, "highlight": False}  # nobody's text is markup
console, errors = (Console(stderr=stderr, quiet=not IS_FIRST, **PLAIN) for stderr in (False, True))
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}


def visible(text: str) -> str:
    """A text whose control characters are spelled out, so that nobody's text commands a terminal."""
    return text.translate(CONTROLS)
