"""Names and text that users, files or models gave, made safe to show."""

from collections.abc import Iterable
from difflib import get_close_matches

CONTROLS = {
    code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"
}


def visible(text: str) -> str:
    """Escape control characters, so that text from a model or user cannot control the terminal."""
    return text.translate(CONTROLS)


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of a sentence that asks whether a similar name was meant; empty if there is none."""
    found = get_close_matches(name, names, n=1)
    return f"; did you mean {found[0]}?" if found else ""
