"""Files and folders that one process at a time writes, completely or not at all, after a check of the free space."""

import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

RESULTS = "results.json"  # marks a folder that may be replaced
LONGEST_NAME = 230  # file systems allow 255 bytes, and a folder is first written under a longer, temporary name


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


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A context with a path beside `path` to write to; it takes the place of `path` if no exception was raised."""
    partial, old = (path.with_name(f".{path.name}.{os.getpid()}{end}") for end in ("", "-old"))
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    try:
        yield partial
        if path.is_dir():
            path.rename(old)
        partial.replace(path)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(partial) if partial.is_dir() else partial.unlink(missing_ok=True)


@contextmanager
def new_folder(path: Path, *, overwrite: bool = False, mark: str = RESULTS) -> Iterator[Path]:
    """A temporary folder beside `path`, as a context; it is renamed to `path` if no exception was raised.

    The arguments are those of `check_output`.

    Raises:
        ValueError: if `path` is in use, unless `overwrite` is set and it is the result of an earlier run.
    """
    check_output(path, overwrite=overwrite, mark=mark)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as partial:
        partial.mkdir()
        yield partial


def check_output(
    path: Path, *, overwrite: bool = False, mark: str = RESULTS, beside: Mapping[str, Path | None] | None = None
) -> None:
    """Check that a result can be written to a folder.

    Args:
        path: the folder.
        overwrite: whether the result of an earlier run in it may be replaced.
        mark: the file in it that shows that it is such a result.
        beside: other folders of the run by name; none of them may contain `path` or be inside it.

    Raises:
        ValueError: if the folder has other files, or cannot be created.
    """
    check_folder("output", path)
    for name, other in (beside or {}).items():
        places = [x.resolve() for x in (path, other)] if other else []
        if any(place in (*other.parents, other) for place, other in zip(places, reversed(places))):
            raise ValueError(f"output must not contain {name} or be inside it, got {path} and {other}")
    if not path.exists() or not any(path.iterdir()) or (overwrite and (path / mark).exists()):
        return
    if overwrite:
        raise ValueError(f"output must be a new folder or the result of an earlier run, got {path} with other files")
    raise ValueError(f"output must be a new folder, got {path}, which is not empty; --overwrite replaces it")


def check_folder(name: str, path: Path) -> None:
    """Raise ValueError if a folder does not exist and cannot be created, or cannot be written to."""
    if len(os.fsencode(path.absolute().name)) > LONGEST_NAME:
        raise ValueError(f"{name} must have a name of at most {LONGEST_NAME} bytes, got {path}")
    if path.is_symlink():
        raise ValueError(f"{name} must be a folder, not a link to one, got {path}")
    place = _place(path)
    if not place.is_dir():
        raise ValueError(f"{name} must be a folder, got {path}, where {place} is a file")
    if not os.access(place, os.W_OK):
        raise ValueError(f"{name} must be a folder that can be written to, got {path}, where {place} cannot")


def check_room(needs: Mapping[Path, int]) -> None:
    """Check that disks have enough free space for the bytes that each folder needs; folders need not exist yet.

    Raises:
        OSError: if a disk has less.
    """
    disks: dict[int, list[Path]] = {}
    for folder in needs:
        disks.setdefault(_place(folder).stat().st_dev, []).append(folder)
    for folders in disks.values():
        names = " and ".join(folder.name for folder in folders)
        size = sum(needs[folder] for folder in folders)
        free = shutil.disk_usage(_place(folders[0])).free
        if free < size:
            raise OSError(f"{_place(folders[0])} must have {_mb(size)} free for {names}, got {_mb(free)}")


@contextmanager
def written(what: str, folder: Path, otherwise: str) -> Iterator[None]:
    """A context that reports a failed write in one sentence, with the free space.

    Args:
        what: what is written.
        folder: the folder to write to.
        otherwise: what remains there after a failure.

    Raises:
        OSError: if writing fails.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:  # torch.save raises RuntimeError
        free = shutil.disk_usage(_place(folder)).free
        reason = getattr(error, "strerror", None) or str(error).split("\n")[0]
        raise OSError(
            f"{what} could not be written to {folder}, with {_mb(free)} free: {reason}; {otherwise}"
        ) from error


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder; 0 if it does not exist."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _place(folder: Path) -> Path:
    """The path itself, or its nearest parent that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
