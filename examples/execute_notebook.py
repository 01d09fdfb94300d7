"""Execute examples/convert_smollm2.ipynb and keep the outputs in it, so that they are what its code gives.

pip install '.[notebook]'
python examples/execute_notebook.py                           # with SmolLM2 from the Hub
TEACHER=folder STEPS=1 python examples/execute_notebook.py    # variables that the notebook's first cell of code reads
"""

import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).with_name("convert_smollm2.ipynb")


def main() -> None:
    """Execute all cells; the file changes only if none has failed."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=None, record_timing=False).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [
                output for output in cell.outputs if output.get("name") != "stderr"
            ]  # warnings, bars
    partial = NOTEBOOK.with_suffix(f".{os.getpid()}")
    nbformat.write(notebook, partial)
    partial.replace(NOTEBOOK)


if __name__ == "__main__":
    main()
