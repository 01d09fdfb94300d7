"""The commands of `hf-memory`, a file each; `hf_memory_cli` names them, and imports the one that is called."""

import sys
from importlib import import_module

import typer
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers.utils import logging

from hf_memory.cli.terminal import errors, visible
from hf_memory_cli import app

__all__ = ["app", "explain", "load"]

EXPECTED = (ValueError, OSError, StrictDataclassError, SafetensorError)  # what wrong input may raise


def load(name: str):
    """The command of this name."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    function = name.replace("-", "_")
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command(name)(getattr(import_module(f"hf_memory.cli.{function}"), function))
    return typer.main.get_command(alone)


def explain(error: Exception) -> None:
    """End the process with a sentence about wrong input; what is our own mistake is raised again."""
    if not isinstance(error, EXPECTED):
        raise error
    errors.print("Error: ", style="red", end="")
    errors.out(visible(_sentence(error)))
    sys.exit(2)


def _sentence(error: Exception) -> str:
    """The first paragraph of a message, on one line, without the errors that it went through."""
    text = " ".join(str(error).split("\n\n")[0].split())
    text = text.rpartition("Error: ")[2] or type(error).__name__
    return f"a file of weights is damaged or was cut: {text}" if isinstance(error, SafetensorError) else text
