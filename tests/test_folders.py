"""Files and folders are replaced completely or not at all, whatever fails, and whenever a process is killed."""

import errno
import os
import shutil
import signal
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from hf_memory.conversion import new_folder
from hf_memory.files import folders
from hf_memory.files.folders import RESULTS, check_output, folder_lock, replaced, written

STEPS = ("rename", "replace", "mkdir", "unlink", "rmdir")  # functions of os that change names


def old_folder(folder):
    (folder / "student" / "part").mkdir(parents=True)
    (folder / "student" / RESULTS).write_text("old")
    (folder / "student" / "part" / "more").write_text("old")
    return folder / "student"


def replace(path):
    with (
        folder_lock(path),
        written("result", path, "what was there is unchanged"),
        new_folder(path, overwrite=True) as new,
    ):
        (new / RESULTS).write_text("new")


def content(path):
    return (path / RESULTS).read_text() if path.exists() else None


def failed(act):
    """The message with which something fails, or None."""
    try:
        act()
    except OSError as error:
        return str(error)
    return None


@contextmanager
def steps(monkeypatch, act):
    """A context in which `act` is called before each step with its number."""
    number = 0

    def counted(function):
        def run(*args, **kwargs):
            nonlocal number
            number += 1
            act(number)
            return function(*args, **kwargs)

        return run

    with monkeypatch.context() as patch:
        for name in STEPS:
            patch.setattr(os, name, counted(getattr(os, name)))
        patch.setattr(folders, "_exchange", counted(folders._exchange))
        yield


@pytest.fixture(params=["one step", "two renames"])
def way(request, monkeypatch):
    """Whether the system can exchange two folders."""
    if request.param == "two renames":
        monkeypatch.setattr(folders, "_exchange", lambda path, other: False)
    return request.param


def test_a_step_that_fails_leaves_the_old_or_the_new_folder(way, tmp_path, monkeypatch):
    ended = []
    number = 0
    while len(ended) == number:  # until no step fails any more
        number += 1
        path = old_folder(tmp_path / str(number))

        def fail(step, number=number):
            if step == number:
                ended.append(number)
                raise OSError(errno.EIO, "broken")

        with steps(monkeypatch, fail):
            message = failed(lambda path=path: replace(path))
        assert message is None or message.endswith("broken; what was there is unchanged"), number
        assert content(path) == ("new" if message is None else "old"), number
        if content(path) == "old":
            assert (path / "part" / "more").read_text() == "old"
        replace(path)
        assert [x.name for x in path.parent.iterdir()] == ["student"], number
    assert number > 3


@pytest.mark.filterwarnings("ignore:a run was killed")
def test_a_kill_leaves_the_old_or_the_new_folder_or_the_next_run_puts_it_back(
    way, tmp_path, monkeypatch
):
    killed = True
    number = 0
    lost = 0
    while killed:
        number += 1
        path = old_folder(tmp_path / str(number))
        child = os.fork()
        if not child:
            with steps(
                monkeypatch,
                lambda step, last=number: step == last and os.kill(os.getpid(), signal.SIGKILL),
            ):
                replace(path)
            os._exit(0)
        killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        is_lost = not path.exists()
        lost += is_lost
        with folder_lock(path):
            assert content(path) in (
                ("old",) if is_lost else ("old", "new") if killed else ("new",)
            ), number
        assert [x.name for x in path.parent.iterdir()] == ["student"], number
    assert number > 3
    assert lost == (way == "two renames")


def test_what_is_put_back_is_said(tmp_path):
    for name in (
        ".student.77-old",
        ".student.77-78-old",
    ):  # as an earlier version named it, and as this one does
        shutil.move(old_folder(tmp_path), tmp_path / name)
        (tmp_path / ".student.77").mkdir()
        sentence = "killed while it replaced .*/student: what was there before is put back"
        with pytest.warns(UserWarning, match=sentence), folder_lock(tmp_path / "student"):
            assert content(tmp_path / "student") == "old"
        shutil.rmtree(tmp_path / "student")
        assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_put_back_is_named(tmp_path, monkeypatch):
    path = old_folder(tmp_path)
    rename = Path.rename
    monkeypatch.setattr(folders, "_exchange", lambda path, other: False)

    def once(self, target):
        if self != path:
            raise OSError(errno.EIO, "broken")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", once)
    with pytest.raises(
        OSError,
        match=r"student could not be replaced .*; what was there is now .*student\.\d+-\d+-old$",
    ):
        replace(path)
    monkeypatch.undo()
    with pytest.warns(UserWarning, match="is put back"), folder_lock(path):
        assert content(path) == "old"


def test_a_file_system_that_cannot_exchange_is_one_with_two_renames(tmp_path, monkeypatch):
    for code in (errno.ENOSYS, errno.EINVAL):
        path = old_folder(tmp_path / str(code))
        with monkeypatch.context() as patch:
            patch.setattr(
                folders.ctypes,
                "CDLL",
                lambda *args, **how: type("", (), {"renameat2": lambda *args: -1}),
            )
            patch.setattr(folders.ctypes, "get_errno", lambda code=code: code)
            replace(path)
        assert content(path) == "new"
        assert [x.name for x in path.parent.iterdir()] == ["student"]


def test_threads_that_replace_one_file_do_not_disturb_each_other(tmp_path):
    file = tmp_path / "memory"
    errors = []
    barrier = threading.Barrier(4)

    def save(letter):
        try:
            barrier.wait()
            for _ in range(30):
                with replaced(file) as partial:
                    partial.write_text(letter * 10_000)
                    assert set(partial.read_text()) == {letter}
                assert len(set(file.read_text())) == 1
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(letter,)) for letter in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(file.read_text()) == 10_000
    assert [x.name for x in tmp_path.iterdir()] == ["memory"]


def test_threads_with_one_temporary_name_are_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(
        folders, "_beside", lambda path, end="": path.with_name(f".{path.name}.{os.getpid()}{end}")
    )
    with pytest.raises((AssertionError, FileNotFoundError)):
        test_threads_that_replace_one_file_do_not_disturb_each_other(tmp_path)


def test_one_thread_at_a_time_claims_a_path(tmp_path):
    refused = []

    def claim():
        try:
            with folder_lock(tmp_path / "x", "gguf"):
                pass
        except ValueError as error:
            refused.append(str(error))

    with folder_lock(tmp_path / "x"):
        thread = threading.Thread(target=claim)
        thread.start()
        thread.join()
    claim()
    assert len(refused) == 1
    assert refused[0].startswith(
        f"gguf must not be in use, got {tmp_path / 'x'}, to which process {os.getpid()} on "
    )


def test_a_file_that_its_owner_removes_before_it_is_locked_is_no_lock(tmp_path, monkeypatch):
    acquire = folders.FileLock.acquire
    seen = []

    def late(lock, **how):
        held = acquire(lock, **how)
        if not seen:  # as if the owner before had removed its file since it was opened here
            seen.append(lock)
            os.unlink(lock.lock_file)
        return held

    monkeypatch.setattr(folders.FileLock, "acquire", late)
    path = tmp_path / "x"
    with (
        folder_lock(path),
        pytest.raises(ValueError, match="must not be in use"),
        folder_lock(path),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_a_lock_whose_owner_ends_while_it_is_named_is_refused(tmp_path, monkeypatch):
    acquire = folders.FileLock.acquire

    def gone(lock, **how):
        try:
            return acquire(lock, **how)
        except folders.Timeout:
            os.unlink(lock.lock_file)
            raise

    monkeypatch.setattr(folders.FileLock, "acquire", gone)
    path = tmp_path / "x"
    expected = "to which another process writes"
    with folder_lock(path), pytest.raises(ValueError, match=expected), folder_lock(path):
        pass


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path):
    output = tmp_path / "student"
    with new_folder(output) as folder:
        (folder / "results.json").write_text("first")
    with pytest.raises(FileNotFoundError), new_folder(output, overwrite=True) as folder:
        (folder / "no folder" / "results.json").write_text("second")
    assert (output / "results.json").read_text() == "first"
    with new_folder(output, overwrite=True) as folder:
        (folder / "results.json").write_text("third")
    assert (output / "results.json").read_text() == "third"
    assert list(tmp_path.iterdir()) == [output]


def test_a_folder_of_someone_else_is_never_replaced(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match="which is not empty; --overwrite replaces it"):
        check_output(tmp_path)
    with pytest.raises(ValueError, match="with other files"):
        check_output(tmp_path, overwrite=True)
