"""Entry point of the command line, `hf-memory COMMAND`. A command is a file of hf_memory/cli and an entry of COMMANDS.

This package is outside hf_memory, which --help does not import: that takes seconds, since it imports torch.
"""

import os
from importlib import metadata

import typer
from typer.core import TyperCommand, TyperGroup

COMMANDS = {
    "demo": "Train a small Llama on Python's documentation, convert it, and compare both; offline, in minutes.",
    "convert": "Convert a trained Transformer into a memory model.",
    "fine-tune": "Train a model on text, for example with longer contexts than before.",
    "evaluate": "Measure a model, and compare it with its teacher.",
    "generate": "Continue a prompt.",
    "datastore": "Build a datastore of a text, with which generate looks up similar contexts (kNN-LM).",
    "chat": "Chat with a model; the conversation is in its memory, which can be saved.",
    "export": "Write a model as an architecture that vLLM, SGLang, llama.cpp and MLX have.",
    "check": "Compare the kernels with their definitions on this machine's GPU, or the forms for its CPU.",
    "info": "Show parameters, layers and the size of the cache.",
}
HELP = {"help_option_names": ["-h", "--help"]}


class Commands(TyperGroup):
    """Commands that are imported when they are called."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.commands |= {name: TyperCommand(name, help=line) for name, line in COMMANDS.items()}

    def resolve_command(self, ctx, args):
        """The command that is called, as its file defines it."""
        from hf_memory.cli import load

        name, _, rest = super().resolve_command(ctx, args)
        return name, load(name), rest


commands = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings=HELP,
)


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(metadata.version("hf-memory"))
        raise typer.Exit


@commands.callback()
def _main(
    version: bool = typer.Option(
        False, "--version", is_eager=True, callback=_say_version, help="Show the version and exit."
    ),
) -> None:
    """Memory language models: convert a Transformer into one, train it further, and use it."""


def app() -> None:
    """Run the command line; an error is one sentence on stderr and exit code 2."""
    # torch reads it when it is imported, which is later
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TQDM_DISABLE", "1")  # bars of libraries; a command shows its own
    try:
        commands(prog_name="hf-memory")
    except Exception as error:
        from hf_memory.cli import explain

        explain(error)
