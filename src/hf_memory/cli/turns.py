"""What a user says in a chat: each line is a turn, and a text that is pasted is one turn, whatever lines it has."""

import os
import sys
from collections.abc import Generator
from io import TextIOWrapper

MARK_PASTES = "\x1b[?2004h"
LEAVE_PASTES = "\x1b[?2004l"  # a terminal begins and ceases to mark what is pasted
BEGIN = "\x1b[200~"
END = "\x1b[201~"  # these marks
PROMPT = "> "


def turns() -> Generator[str, None, None]:
    """The turns of the user until the input ends; empty lines are left out."""
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a byte that is not UTF-8 must not end the chat
    is_terminal = os.name == "posix" and sys.stdin.isatty() and sys.stdout.isatty()
    line = _plain_line if is_terminal and not _has_readline() else input
    try:
        while True:
            text = line(PROMPT)
            while text.count(BEGIN) > text.count(END):
                text += "\n" + line("")
            text = text.replace(BEGIN, "").replace(END, "").strip()
            if is_terminal:
                # during the answer, too: readline has taken it back
                print(MARK_PASTES, end="", flush=True)
            if text:
                yield text
    except EOFError:
        print()  # end the line of the prompt
    finally:
        if is_terminal:
            print(LEAVE_PASTES, end="", flush=True)


def _has_readline() -> bool:
    """Whether `input` is GNU readline from now on, which returns a paste as one line; libedit does not."""
    try:
        import readline
    except ImportError:
        return False
    if "libedit" in (readline.__doc__ or ""):
        return False
    readline.parse_and_bind("set enable-bracketed-paste on")
    return True


def _plain_line(prompt: str) -> str:
    """A line as the terminal gives it, with marks around what was pasted."""
    print(MARK_PASTES + prompt, end="", flush=True)
    if line := sys.stdin.readline():
        return line.rstrip("\n")
    raise EOFError
