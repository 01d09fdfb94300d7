"""Chat templates: programs of a model's author, which may fail, take forever, or write too much.

They run in a process of their own, which is ended if they do, and else renders the next conversation.
"""

import atexit
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_memory.files import template_process

SECONDS = 5.0  # that a template may take; usual ones take milliseconds
STARTING = 120.0  # seconds that the process may take to import what it needs
# before what the model writes, in templates that say it
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
ADDED = 10**6  # characters that a template may add to a conversation


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    # where the text begins and ends that the template marks as the assistant's
    places: list[tuple[int, int]]


def tokens_and_targets(tokenizer, messages: list[dict]) -> tuple[list[int], Tensor]:
    """The tokens of a conversation, and which of them the assistant writes, with the end of each of its turns.

    Args:
        tokenizer: a fast tokenizer with a chat template, which marks the assistant's turns with {% generation %}, or
            renders the beginning of a conversation as it renders the whole.
        messages: the messages, with roles and contents.

    Returns:
        The tokens, and [T] of bool.

    Raises:
        ValueError: if tokenizer or template is of another kind, or the template fails.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"tokenizer must be a fast one to find the assistant's turns, got {type(tokenizer).__name__}"
        )
    text, places = _rendered(tokenizer, messages)
    if not MARKS.search(tokenizer.get_chat_template()):
        places = _turns(tokenizer, messages, text)
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts, ends = torch.tensor(found["offset_mapping"]).view(-1, 2).unbind(1)
    targets = torch.zeros(len(starts), dtype=torch.bool)
    for begin, end in places:
        targets |= (starts < end) & (ends > begin)
    return found["input_ids"], targets


def _turns(tokenizer, messages: list[dict], text: str) -> list[tuple[int, int]]:
    """Where the assistant's turns begin and end in a conversation's text."""
    places = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            before = (
                apply_template(tokenizer, messages[:i], add_generation_prompt=True) if i else ""
            )
            until = apply_template(tokenizer, messages[: i + 1]).rstrip()
            if not (text.startswith(until) and until.startswith(before)):
                raise ValueError(
                    "chat template must mark the assistant's turns with {% generation %}, or render the beginning of a "
                    "conversation as it renders the whole, got one that does not"
                )
            places.append((len(before), len(until)))
    return places


def apply_template(tokenizer, messages: list[dict], *, add_generation_prompt: bool = False) -> str:
    """The text that a tokenizer's chat template makes of messages.

    Args:
        tokenizer: a tokenizer with a chat template; of several, the one with the name `default` is applied.
        messages: the messages, with roles and contents.
        add_generation_prompt: whether the text ends with what precedes an answer.

    Raises:
        ValueError: if the template raises an error, does not end in time, takes too much memory, or writes far more
            than the messages.
    """
    return _rendered(tokenizer, messages, add_generation_prompt).text


def _rendered(tokenizer, messages: list[dict], add_generation_prompt: bool = False) -> Rendered:
    request = {
        **tokenizer.special_tokens_map,
        "chat_template": tokenizer.get_chat_template(),
        "conversations": [
            [{name: x for name, x in message.items() if x is not None} for message in messages]
        ],
        "add_generation_prompt": add_generation_prompt,
        "most": ADDED + 10 * len(str(messages)),
    }
    answer = _process.ask(json.dumps(request, default=lambda x: f"<{type(x).__name__}>"))
    if "error" in answer:
        raise ValueError(
            f"the model's chat template raised an error for this conversation: {answer['error']}"
        )
    return Rendered(answer["text"], answer["places"])


class _Process:
    """The process that renders templates. It is started when it is needed; one thread at a time asks it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.running: Any = None

    def ask(self, request: str) -> dict[str, Any]:
        """Answer a request; the process is ended if it does not answer, or the caller is interrupted."""
        with self.lock:
            try:
                if self.running is None and not self._start():
                    return {"error": f"its process did not start within {STARTING:g} seconds"}
                return self._exchange(f"{SECONDS}\n{request}\n".encode())
            except BaseException:
                self._end()
                raise

    def _exchange(self, lines: bytes) -> dict[str, Any]:
        begin = time.monotonic()
        try:
            self.running.stdin.write(lines)
            self.running.stdin.flush()
            line = self._line(2 * SECONDS)  # by then it has ended itself
        except BrokenPipeError:
            line = b""
        if line.endswith(b"\n"):
            return json.loads(line)
        self._end()
        is_late = time.monotonic() - begin >= SECONDS
        return {
            "error": f"it took more than {SECONDS:g} seconds" if is_late else "its process ended"
        }

    def _start(self) -> bool:
        """Start the process, which imports what this one would. Returns whether it is ready."""
        pipes: dict = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.DEVNULL,
        }
        folders = [x or os.getcwd() for x in sys.path]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(folders)
        command = [sys.executable, "-P", str(Path(template_process.__file__))]
        # Ctrl-C is not for it
        self.running = subprocess.Popen(command, **pipes, env=environment, start_new_session=True)
        is_ready = self._line(STARTING) == template_process.READY
        if not is_ready:
            self._end()
        return is_ready

    def _line(self, seconds: float) -> bytes:
        """The next line of the process, which is ended if it takes longer than this."""
        timer = threading.Timer(seconds, self.running.kill)
        timer.daemon = True
        timer.start()
        try:
            return self.running.stdout.readline()
        finally:
            timer.cancel()

    def _end(self) -> None:
        if self.running is not None:
            self.running.kill()
            self.running.communicate()
            self.running = None

    def leave_to_parent(self) -> None:
        """Begin anew in a forked process, without a hold on the pipes of its parent."""
        if self.running is not None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            for pipe in (self.running.stdin, self.running.stdout):
                os.dup2(nowhere, pipe.fileno())
            os.close(nowhere)
            self.running.returncode = 0  # it is no child of this process
        self.running = None
        self.lock = threading.Lock()


_process = _Process()
atexit.register(_process._end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_process.leave_to_parent)
