"""hf-memory demo."""

from pathlib import Path
from typing import Annotated

import typer

from hf_memory import conversion
from hf_memory.cli.options import Option, read_pairs
from hf_memory.cli.progress import signs_of_life
from hf_memory.cli.terminal import console
from hf_memory.cli.work import how_to_load, print_results
from hf_memory.cli.writing import load, write
from hf_memory.demo import PROMPTS, Demo, run_demo
from hf_memory.files.claims import claimed
from hf_memory.files.folders import RESULTS


def demo(
    output: Annotated[Path, typer.Option(help="Folder for the teacher and the student.")] = Path("demo_output"),
    to: Annotated[str, typer.Option(help=f"The student's family: {', '.join(conversion.STUDENTS)}.")] = "linear",
    option: Option = None,
) -> None:
    """Train a small Llama on Python's documentation, convert it, and compare both; offline, in minutes."""
    how: dict = {"overwrite": True, "mark": f"student/{RESULTS}"}  # of an earlier demo
    with claimed(output), signs_of_life() as report:
        conversion.check_output(output, **how)
        made = run_demo(to=to, run=conversion.Run(report=report), say=console.print, **read_pairs(option))
        with conversion.new_folder(output, **how) as folder:
            _write(folder, made)
    print_results(made.results)
    for name in ("teacher", "student"):
        _show_continuations(name, str(output / name))
    console.print(how_to_load(output / "student"), soft_wrap=True)


def _write(folder: Path, made: Demo) -> None:
    conversion.write_report(folder / "student", made.student, made.tokenizer, made.results)
    made.teacher.save_pretrained(folder / "teacher")
    made.tokenizer.save_pretrained(folder / "teacher")


def _show_continuations(name: str, folder: str) -> None:
    model, tokenizer = load(folder, None, "auto")
    for prompt in PROMPTS:
        console.print(f"\n{name}", style="bold")
        write(model, tokenizer, prompt, seed=0, max_new_tokens=60)
