"""Run a notebook from its beginning and write the outputs into it: what is on the page is what the code gives.

    pip install '.[notebook]'
    python examples/execute_notebook.py                       # with SmolLM2 of the Hub
    TEACHER=folder STEPS=1 python examples/execute_notebook.py

What the environment names is in the notebook's first cell of code.
"""

import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).with_name("convert_smollm2.ipynb")


def main() -> None:
    """Execute, and write a whole file or none."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=None, record_timing=False).execute()
    for cell in notebook.cells:
        cell.get("outputs", [])[:] = [x for x in cell.get("outputs", []) if x.get("name") != "stderr"]
    partial = NOTEBOOK.with_suffix(f".{os.getpid()}")
    nbformat.write(notebook, partial)
    partial.replace(NOTEBOOK)


if __name__ == "__main__":
    main()
