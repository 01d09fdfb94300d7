"""The commands of `hf-memory`, one in each file; `hf_memory_cli` lists them, and imports the one that is called."""

import sys
from importlib import import_module

import typer
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers.utils import logging

from hf_memory.cli.terminal import errors

EXPECTED = (ValueError, OSError, StrictDataclassError, SafetensorError)  # errors that wrong input can cause


def load(name: str):
    """The command with a given name."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    function = name.replace("-", "_")
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command(name)(getattr(import_module(f"hf_memory.cli.{function}"), function))
    return typer.main.get_command(alone)


def explain(error: Exception) -> None:
    """End the process with one sentence about wrong input; other errors are raised again, with a traceback."""
    if not isinstance(error, EXPECTED):
        raise error
    text = " ".join(str(error).split("\n\n")[0].split())  # the first paragraph, without names of exceptions
    text = text.rpartition("Error: ")[2] or type(error).__name__
    errors.print("Error: ", style="red", end="")
    errors.out(f"a file of weights is damaged or incomplete: {text}" if isinstance(error, SafetensorError) else text)
    sys.exit(2)
