"""Files and folders that exist completely or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A context with a path beside `path` to write to; it takes the place of `path` if no exception was raised."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield partial
        partial.replace(path)
    finally:
        shutil.rmtree(partial) if partial.is_dir() else partial.unlink(missing_ok=True)
