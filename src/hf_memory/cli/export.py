"""hf-memory export."""

from pathlib import Path
from typing import Annotated

import typer

from hf_memory.cli.command import WHAT, WHERE
from hf_memory.cli.options import found
from hf_memory.cli.terminal import console, say_made
from hf_memory.export import TARGETS, export_model
from hf_memory.modeling.checks import check, check_word

NAMES = [target.name for target in TARGETS]


def export(
    student: Annotated[str, typer.Argument(help="Folder or Hub name of a memory model.")],
    output: Annotated[Path, typer.Option(help="Folder to write to.", rich_help_panel=WHERE)],
    to: Annotated[
        str,
        typer.Option(
            help=f"Target architecture: {', '.join(NAMES)}, or auto: the first that represents the student exactly.",
            rich_help_panel=WHAT,
        ),
    ] = "auto",
    gguf: Annotated[
        Path | None,
        typer.Option(help="Also write this GGUF file, for llama.cpp.", rich_help_panel=WHERE),
    ] = None,
) -> None:
    """Write a model as an architecture that vLLM, SGLang, llama.cpp and MLX have, and check that logits are equal.

    Example: hf-memory export student --output exported
    """
    check_word("to", to, ("auto", *NAMES))
    check(not output.exists(), "output", "a folder that does not exist yet", str(output))
    export = export_model(found(student), output, to, gguf=gguf)
    same = f"whose logits differ from the student's by {export.error:.0e} of the largest"
    console.out(f"{output}: {export.target.model_type}, {same}")
    for engine, fault in export.engines.items():
        console.print(f"  {engine}: {f'not supported: {fault}' if fault else 'supported'}")
    say_made(f"Wrote {output}" + (f" and {gguf}" if gguf else ""), ["chat", output])
