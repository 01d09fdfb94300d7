"""hf-memory demo."""

from pathlib import Path
from typing import Annotated

import typer

from hf_memory import conversion
from hf_memory.cli.command import WHAT, WHERE
from hf_memory.cli.options import Option, read_pairs
from hf_memory.cli.progress import signs_of_life
from hf_memory.cli.terminal import console, say_made
from hf_memory.cli.work import print_results
from hf_memory.cli.writing import write
from hf_memory.demo import PROMPTS, run_demo
from hf_memory.files.folders import RESULTS, folder_lock


def demo(
    output: Annotated[
        Path,
        typer.Option(help="Folder for the teacher and the student.", rich_help_panel=WHERE),
    ] = Path("demo_output"),
    to: Annotated[
        str,
        typer.Option(
            help=f"The student's memory, or attention for none: {', '.join(conversion.STUDENTS)}.",
            rich_help_panel=WHAT,
        ),
    ] = "attention",
    option: Option = None,
) -> None:
    """Train a small Llama on Python's documentation, convert it, and compare both; offline, in minutes.

    Example: hf-memory demo --to deltanet
    """
    how: dict = {"overwrite": True, "mark": f"student/{RESULTS}"}  # of an earlier demo
    with folder_lock(output), signs_of_life() as report:
        conversion.check_output(output, **how)
        made = run_demo(
            to=to, run=conversion.Run(report=report), say=console.print, **read_pairs(option)
        )
        with conversion.new_folder(output, **how) as folder:
            conversion.write_report(folder / "student", made.student, made.tokenizer, made.results)
            for part in (made.teacher, made.tokenizer):
                part.save_pretrained(folder / "teacher")
    print_results(made.results)
    for name, model in (("teacher", made.teacher), ("student", made.student)):
        for prompt in PROMPTS:
            console.print(f"\n{name}", style="bold")
            write(model.eval(), made.tokenizer, prompt, seed=0, max_new_tokens=60)
    student = output / "student"
    say_made(
        f"Wrote {student}: the model, and README.md with what was measured; its teacher is beside it.",
        ["generate", student, "--prompt", PROMPTS[0]],
    )
