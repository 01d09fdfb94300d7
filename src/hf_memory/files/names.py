"""Names and text that users, files or models gave, made safe to show."""

import os
import re
from collections.abc import Iterable
from difflib import get_close_matches

CONTROLS = {
    code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"
}

FILE_NAME = re.compile(r"\S{1,250}\.[A-Za-z]\w{0,9}")  # a word with a suffix


def visible(text: str) -> str:
    """Escape control characters, so that text from a model or user cannot control the terminal."""
    return text.translate(CONTROLS)


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of a sentence that asks whether a similar name was meant; empty if there is none."""
    found = get_close_matches(name, names, n=1)
    return f"; did you mean {found[0]}?" if found else ""


def is_file_name(text: str) -> bool:
    """Whether a text is the name of a file, or looks like one: a word with a suffix."""
    return os.path.isfile(text) or FILE_NAME.fullmatch(text) is not None
