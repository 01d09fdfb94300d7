"""Folders that one process at a time writes to."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from hf_memory.files.folders import check_folder


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """A context in which no other process can claim the folder; the claim ends with the process, also if it is killed.

    Args:
        folder: the folder, which need not exist; the claim is a file beside it.

    Raises:
        ValueError: if another process has claimed it, or it cannot be created or written to.
    """
    check_folder("output", folder)
    owner = folder.absolute().with_name(f".{folder.absolute().name}.lock")
    owner.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(owner)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        by = owner.read_text(encoding="utf-8") or "another process"
        raise ValueError(f"output must not be in use, got {folder}, to which {by} writes: wait for it") from None
    try:
        owner.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
        yield
    finally:
        with suppress(OSError):  # Windows keeps open files
            owner.unlink()
        lock.release()
