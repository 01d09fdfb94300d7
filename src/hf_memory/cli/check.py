"""hf-memory check."""

import os
import platform
import time

import torch
import typer

from hf_memory import check as checking
from hf_memory.cli.terminal import console, print_table
from hf_memory.ops.dispatch import no_kernels_on, triton_is_installed

VARIABLES = (
    "TRITON_INTERPRET",
    "TRITON_CACHE_DIR",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
)
INSTEAD = {"triton": "chunk", "chunk": "reference"}  # of a form that is wrong
FORMS = {"triton": "kernel", "chunk": "PyTorch"}


def check() -> None:
    """Compare the kernels with their definitions on this machine's GPU, or the forms for its CPU where it has none.

    Outputs, states and gradients of every op in the form that backend="auto" takes here. Kernels are compiled at the
    first call. The exit code is 1 if a form is wrong.

    Example: hf-memory check
    """
    device = checking.device_here()
    say_machine(device)
    start = time.perf_counter()
    tasks = checking.tasks_of(device)
    found: dict[str, dict] = {task.call.title: {} for task in tasks}
    for row in checking.check(tasks):
        found[row["call"]].setdefault(row["dtype"], {}).update(row)
        if "failed" in row:
            console.print(f"{row['call']}, {row['dtype']}: {row['failed']}", soft_wrap=True)
    dtypes = list(dict.fromkeys(task.size.dtype for task in tasks))
    title = (
        "largest error beside the reference in float64, as a part of the largest number, "
        "or of five times that of its row"
    )
    header = ("op", "form", *dtypes, "ms", "ms of PyTorch")
    has_times = device != "cpu"
    rows = [cells(name, rows, dtypes) for name, rows in found.items()]
    print_table(
        rows if has_times else [row[:-2] for row in rows],
        header if has_times else header[:-2],
        title=title,
    )
    say_result(found, time.perf_counter() - start)


def say_machine(device: str) -> None:
    """Print the versions, the device, the variables that decide, and the form that ops take."""
    versions = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    if triton_is_installed():
        import triton

        versions.append(f"triton {triton.__version__}")
    console.print(", ".join(versions), soft_wrap=True)
    for name in VARIABLES:
        if name in os.environ:
            console.print(f"{name}={os.environ[name]}", soft_wrap=True)
    if device == "cpu":
        console.print(f"No GPU: torch {why_no_gpu()}.", soft_wrap=True)
    else:
        console.print(f"GPU: {torch.cuda.get_device_name()}", soft_wrap=True)
    refusal = no_kernels_on(device)
    console.print(
        'backend="auto" is "triton" where an op has a kernel, else "chunk".'
        if refusal is None
        else f'backend="auto" is "chunk", PyTorch, for every op: {refusal}.',
        soft_wrap=True,
    )


def why_no_gpu() -> str:
    """As a clause about torch."""
    if torch.version.cuda is None and torch.version.hip is None:
        return "is a build for CPUs"
    return f"for CUDA {torch.version.cuda} finds none (torch.cuda.is_available() is False)"


def cells(name: str, rows: dict[str, dict], dtypes: list[str]) -> tuple[str, ...]:
    """A line of the table about one call."""
    first = next(iter(rows.values()))
    forms = dict.fromkeys(FORMS[row["form"]] for row in rows.values())
    times = (f"{first[x]:.3g}" if x in first else "" for x in ("ms", "pytorch_ms"))
    return name, " and ".join(forms), *(error_of(rows.get(dtype)) for dtype in dtypes), *times


def error_of(row: dict | None) -> str:
    """A cell of the table."""
    if row is None:
        return ""
    if "error" not in row:
        return "FAILED"
    return f"{row['error']:.1e}" + ("" if row["right"] else " WRONG")


def say_result(found: dict[str, dict], seconds: float) -> None:
    """Print what is wrong and what to do about it; then the exit code is 1."""
    rows = [row for rows in found.values() for row in rows.values()]
    wrong = [row for row in rows if not row["right"] or "failed" in row]
    if not wrong:
        console.print(f"All {len(rows)} results are right ({seconds:.0f} s).", soft_wrap=True)
        return
    for row in wrong:
        fault = (
            f"failed: {row['failed']}"
            if "failed" in row
            else f"has an error of {row['error']:.1e}, at most "
            f"{checking.TOLERANCE[row['dtype']]:.0e} was expected"
        )
        console.print(
            f"WRONG: {row['call']} in {row['dtype']} {fault}. Until it is mended, "
            f'from_pretrained(model, mixer_backend="{INSTEAD[row["form"]]}") takes another form.',
            soft_wrap=True,
        )
    raise typer.Exit(1)
