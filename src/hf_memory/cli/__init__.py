"""The commands of `hf-memory`, one in each file; `hf_memory_cli` lists them, and imports the one that is called."""

import sys
import warnings
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from importlib import import_module
from inspect import Parameter, Signature, signature
from typing import Any

import typer
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers.utils import logging

from hf_memory.cli.command import Command
from hf_memory.cli.terminal import errors
from hf_memory.files.names import visible

# errors that wrong input can cause
EXPECTED = (
    ValueError,
    OSError,
    StrictDataclassError,
    SafetensorError,
)
FOR_DEVELOPERS = DeprecationWarning, PendingDeprecationWarning, FutureWarning  # of libraries


def load(name: str):
    """The command with a given name."""
    warnings.formatwarning = lambda message, *where, **how: f"Warning: {visible(str(message))}\n"
    for kind in FOR_DEVELOPERS:
        warnings.simplefilter("ignore", kind)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    function = name.replace("-", "_")
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    command = with_flags(getattr(import_module(f"hf_memory.cli.{function}"), function))
    alone.command(name, cls=Command)(command)
    return typer.main.get_command(alone)


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """A command as typer needs it: with a parameter for each field of the dataclasses that the command takes."""
    parameters = list[Parameter]()
    groups = dict[str, Any]()
    for parameter in signature(command).parameters.values():
        if is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            parameters += signature(groups[parameter.name]).parameters.values()
        else:
            parameters.append(parameter)

    def run(**given) -> None:
        made = {
            name: group(**{x.name: given.pop(x.name) for x in fields(group)})
            for name, group in groups.items()
        }
        command(**given, **made)

    run.__doc__ = command.__doc__
    run.__annotations__ = {x.name: x.annotation for x in parameters}
    run.__signature__ = Signature([x.replace(kind=Parameter.KEYWORD_ONLY) for x in parameters])  # type: ignore
    return run


def explain(error: Exception) -> None:
    """End the process with one sentence about wrong input; other errors are raised again, with a traceback."""
    if not isinstance(error, EXPECTED):
        raise error
    # the first paragraph, without names of exceptions
    text = " ".join(str(error).split("\n\n")[0].split())
    text = text.rpartition("Error: ")[2] or type(error).__name__
    errors.print("Error: ", style="red", end="")
    errors.out(
        f"a file of weights is damaged or incomplete: {text}"
        if isinstance(error, SafetensorError)
        else text
    )
    for note in getattr(error, "__notes__", ()):
        errors.print(note, soft_wrap=True)
    sys.exit(2)
