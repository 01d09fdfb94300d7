"""Files and folders that one process at a time writes, completely or not at all, after a check of the free space."""

import ctypes
import errno
import os
import re
import shutil
import socket
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

RESULTS = "results.json"  # marks a folder that may be replaced
LONGEST_NAME = 230  # file systems allow 255 bytes, and a folder is first written under a longer, temporary name
AT_CWD = -100
EXCHANGE = 2  # of Linux' renameat2
CANNOT_EXCHANGE = {
    errno.ENOSYS,
    errno.EINVAL,
    errno.EOPNOTSUPP,
}  # of a kernel or a file system that lacks it


class NotPutBack(OSError):
    """A folder that is under another name, because neither the new nor the old one could be given its own."""


@contextmanager
def folder_lock(path: Path, name: str = "output") -> Iterator[None]:
    """A context in which nobody else can lock a path; the lock ends with the process, also if it is killed.

    What a killed process left beside the path is removed. If that process had moved a folder away to replace it, the
    folder is put back first, with a warning.

    Args:
        path: the folder or file, which need not exist; the lock is a file beside it.
        name: the name of the path in error messages.

    Raises:
        ValueError: if another process or thread has locked it, or it cannot be created or written to.
    """
    check_folder(name, path)
    owner = path.absolute().with_name(f".{path.absolute().name}.lock")
    owner.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock = _acquired(owner)
    except Timeout:
        raise ValueError(
            f"{name} must not be in use, got {path}, to which {_owner_in(owner)} writes: wait for it"
        ) from None
    try:
        owner.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
        _clear_up(path.absolute())
        yield
    finally:
        # while it is locked, so that the file of the next owner is not removed; see `_acquired`
        with suppress(OSError):  # Windows keeps open files
            owner.unlink()
        lock.release()


def _acquired(owner: Path) -> FileLock:
    """A lock that is held, of the file that has this name.

    The owner before may remove the file after it was opened here and before it is locked: then others lock another one.

    Raises:
        Timeout: if it is locked.
    """
    while True:
        lock = FileLock(owner)
        lock.acquire(timeout=0)
        with suppress(OSError):
            if os.path.samestat(os.fstat(lock._context.lock_file_fd), owner.stat()):  # type: ignore[arg-type]
                return lock
        lock.release()


def _owner_in(owner: Path) -> str:
    """Who has locked a file, which may be gone by now."""
    with suppress(OSError):
        return owner.read_text(encoding="utf-8") or "another process"
    return "another process"


def _clear_up(path: Path) -> None:
    """Put back and remove what killed processes left beside a locked path."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.\d+(-\d+)?(-old)?")
    left = [file for file in path.parent.iterdir() if pattern.fullmatch(file.name)]
    moved = [file for file in left if file.name.endswith("-old")]
    if moved and not os.path.lexists(path):
        newest = max(moved, key=lambda file: file.stat().st_mtime_ns)
        newest.rename(path)
        warnings.warn(
            f"a run was killed while it replaced {path}: what was there before is put back",
            stacklevel=3,
        )
    for file in left:
        _remove(file)


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A context with a path beside `path` to write to; it takes the place of `path` if no exception was raised.

    At each moment, also if the process is killed, the old or the new file or folder is under the name `path`. Where the
    system cannot exchange two folders in one step, the old one has another name for a moment; `folder_lock` undoes it.

    Raises:
        OSError: if `path` cannot be replaced; what was there is unchanged.
        NotPutBack: if a folder was moved away, and could neither be replaced nor put back.
    """
    partial = _beside(path)
    _remove(partial)  # of a process that was killed
    try:
        yield partial
        if not path.is_dir():
            partial.replace(path)
        elif not _exchange(partial, path):
            _replace_by_two_renames(partial, path)
    finally:
        _remove(partial)


def _beside(path: Path, end: str = "") -> Path:
    """A hidden name beside a path that no other process or thread uses."""
    return path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}{end}")


def _exchange(path: Path, other: Path) -> bool:
    """Exchange two paths in one step; returns False where this is not possible.

    Raises:
        OSError: if it is possible, but fails.
    """
    renameat2 = (
        getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if sys.platform == "linux"
        else None
    )
    if renameat2 is None:
        return False
    if renameat2(AT_CWD, os.fsencode(path), AT_CWD, os.fsencode(other), EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in CANNOT_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(other))


def _replace_by_two_renames(new: Path, path: Path) -> None:
    old = _beside(path, "-old")
    _remove(old)
    try:
        path.rename(old)
        new.rename(path)
    except BaseException as error:
        if old.exists() and not path.exists():
            try:
                old.rename(path)
            except OSError as other:
                raise NotPutBack(
                    f"{path} could not be replaced ({error}); what was there is now {old}"
                ) from other
        raise
    _remove(old)


def _remove(path: Path) -> None:
    """Remove a file or a folder if it exists; if this fails, the next `folder_lock` tries again."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


@contextmanager
def new_folder(path: Path, *, overwrite: bool = False, mark: str = RESULTS) -> Iterator[Path]:
    """A temporary folder beside `path`, as a context; it takes the place of `path` if no exception was raised.

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
    path: Path,
    *,
    overwrite: bool | None = False,
    mark: str = RESULTS,
    beside: Mapping[str, Path | None] | None = None,
) -> None:
    """Check that a result can be written to a folder.

    Args:
        path: the folder.
        overwrite: whether the result of an earlier run in it may be replaced; None: no option does that.
        mark: the file in it that shows that it is such a result.
        beside: other folders of the run by name; none of them may contain `path` or be inside it.

    Raises:
        ValueError: if the folder has other files, or cannot be created.
    """
    check_folder("output", path)
    for name, other in (beside or {}).items():
        places = [x.resolve() for x in (path, other)] if other else []
        if any(place in (*other.parents, other) for place, other in zip(places, reversed(places))):
            raise ValueError(
                f"output must not contain {name} or be inside it, got {path} and {other}"
            )
    if not path.exists() or not any(path.iterdir()) or (overwrite and (path / mark).exists()):
        return
    if overwrite:
        raise ValueError(
            f"output must be a new folder or the result of an earlier run, got {path} with other files"
        )
    advice = "" if overwrite is None else "; --overwrite replaces it"
    raise ValueError(f"output must be a new folder, got {path}, which is not empty{advice}")


def check_folder(name: str, path: Path) -> None:
    """Raise ValueError if a folder does not exist and cannot be created, or cannot be written to."""
    if len(os.fsencode(path.absolute().name)) > LONGEST_NAME:
        raise ValueError(f"{name} must have a name of at most {LONGEST_NAME} bytes, got {path}")
    if path.is_symlink():
        raise ValueError(f"{name} must be a folder, not a link to one, got {path}")
    place = _place(path)
    if not place.is_dir():
        raise ValueError(f"{name} must be a folder, got {path}, where {place} is a file")
    try:
        with tempfile.TemporaryFile(dir=place):  # permissions alone do not tell, as in /proc
            pass
    except OSError as error:
        wanted = f"{name} must be a folder that can be written to"
        raise ValueError(f"{wanted}, got {path}, where {place} cannot") from error


def as_path(name: str, path: Any) -> Path:
    """An argument as a path; raises ValueError if it is none."""
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"{name} must be a path, got a {type(path).__name__}")
    return Path(path)


def check_regular(name: str, path: Path) -> None:
    """Raise ValueError if a path is a pipe, a socket or a device, whose end may never be read."""
    if path.exists() and not path.is_file() and not path.is_dir():
        kind = "pipe" if path.is_fifo() else "socket" if path.is_socket() else "device"
        raise ValueError(f"{name} must be a file, not a pipe or a device, got the {kind} {path}")


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
            raise OSError(
                f"{_place(folders[0])} must have {_mb(size)} free for {names}, got {_mb(free)}"
            )


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
    except NotPutBack:
        raise
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
    return next(
        path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path)
    )


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
