"""The command line: `hf-memory COMMAND`. A command is a file of this folder and an entry of COMMANDS."""

import sys
from importlib import import_module

import typer
from huggingface_hub.errors import StrictDataclassError
from typer.core import TyperCommand, TyperGroup

from hf_memory.cli.terminal import errors

COMMANDS = {
    "demo": "Train a small Llama on Python's documentation, convert it, compare the two; offline, in minutes.",
    "convert": "Turn a trained Transformer into a memory model.",
    "fine-tune": "Teach a student the text itself, at a longer context.",
    "generate": "Continue a prompt.",
    "chat": "Talk line by line on one memory.",
    "export": "Write a model as an architecture that vLLM, SGLang, llama.cpp and MLX have.",
    "info": "Show parameters, layers, and the memory that a sequence needs.",
}


class Commands(TyperGroup):
    """Commands that are imported when they are called, so that help is there at once."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.commands |= {name: TyperCommand(name, help=line) for name, line in COMMANDS.items()}

    def resolve_command(self, ctx, args):
        """The command that is called, as its file defines it."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, _load(name), rest


commands = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@commands.callback()
def _main() -> None:
    """Memory language models: convert a Transformer into one, train it on, and use it."""


def app() -> None:
    """Run the command line; an error is one sentence on stderr and exit code 2."""
    try:
        commands()
    except (ValueError, OSError, StrictDataclassError) as error:
        errors.print(f"[red]Error:[/red] {_sentence(error)}", highlight=False, soft_wrap=True)
        sys.exit(2)


def _load(name: str):
    from transformers.utils import logging  # with torch, takes longer than all else here

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    function = name.replace("-", "_")
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command(name)(getattr(import_module(f"hf_memory.cli.{function}"), function))
    return typer.main.get_command(alone)


def _sentence(error: Exception) -> str:
    """The first paragraph of a message, on one line, without the errors that it went through."""
    text = " ".join(str(error).split("\n\n")[0].split())
    return text.rpartition("Error: ")[2] or type(error).__name__
