"""hf-memory chat."""

import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer

from hf_memory.cli.command import LONG, WHAT, WHERE
from hf_memory.cli.terminal import console
from hf_memory.cli.turns import turns
from hf_memory.cli.writing import LoadingFlags, SamplingFlags, Writer
from hf_memory.files.folders import check_regular
from hf_memory.modeling.base import MemoryForCausalLM
from hf_memory.serving import Conversation, load_memory, save_memory

HELP = """/help   show these words
/reset  empty the memory: the conversation begins anew
/exit   end the chat, as the end of the input does (Ctrl-D)
A line is sent with Enter; a paste is one message, even of many lines, and is sent with Enter, too."""
ENDS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


def chat(
    model: Annotated[str, typer.Argument(help="Folder or Hub name of a memory model.")],
    memory: Annotated[
        Path | None,
        typer.Option(
            help="File that holds the memory: loaded if it exists, and saved at the end.",
            rich_help_panel=WHERE,
        ),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(
            help="System prompt; the tokenizer must have a chat template.", rich_help_panel=WHAT
        ),
    ] = None,
    max_new_tokens: Annotated[
        int,
        typer.Option(help="Largest number of tokens of an answer.", min=1, rich_help_panel=LONG),
    ] = 200,
    *,
    sampling: SamplingFlags,
    loading: LoadingFlags,
) -> None:
    """Chat with a model; the conversation is in its memory. /exit ends it, /reset empties the memory.

    Example: hf-memory chat student --memory conversation.memory
    """
    how: dict = {
        "max_new_tokens": max_new_tokens,
        "options": sampling.options(),
        "seed": sampling.seed,
    }
    if memory is not None and (memory.is_dir() or not memory.parent.is_dir()):
        raise ValueError(f"memory must be a file in a folder that exists, got {memory}")
    if memory is not None:
        check_regular("memory", memory)
    loaded, tokenizer = loading.load(model)
    if memory is not None and not isinstance(loaded, MemoryForCausalLM):
        raise ValueError(
            f"memory must not be given for a model of another package, got a {type(loaded).__name__}"
        )
    cache = load_memory(memory, loaded) if memory and memory.exists() else None
    conversation = Conversation(loaded, tokenizer, cache=cache, system=system, **how)
    try:
        with _ended_by_signals():
            _talk(conversation)
    finally:
        if memory is not None:
            _keep(conversation, memory)


def _talk(conversation: Conversation) -> None:
    if sys.stdin.isatty():
        console.out("/help lists the words of this program; what else you write is for the model.")
    with closing(turns()) as said:
        for text in said:
            match text:
                case "/exit":
                    return
                case "/help":
                    console.out(HELP)
                case "/reset":
                    conversation.reset()
                case _:
                    _answer(conversation, text)


def _answer(conversation: Conversation, text: str) -> None:
    writer = Writer(conversation.tokenizer)
    try:
        with closing(conversation.answer(text)) as answer:
            for token in answer:
                writer.put(torch.tensor([token]))
    finally:
        writer.end()
    writer.say_speed()


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Raise SystemExit on signals that would end the process without saving the memory."""

    def end(number, frame):
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in ENDS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _keep(conversation: Conversation, memory: Path) -> None:
    if conversation.cache is None and not conversation.unread:
        console.out(f"There was no message, so nothing is saved to {memory}")
        return
    kept = conversation.memory()
    save_memory(kept, memory, conversation.model)
    console.out(f"Saved {memory}: {kept.get_seq_length()} tokens")
