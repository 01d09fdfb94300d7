"""Folders of checkpoints, with a file that says to which run they belong."""

import json
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.trainer_utils import get_last_checkpoint

from hf_memory.files.fingerprints import model_fingerprint, tokens_fingerprint
from hf_memory.files.folders import replaced
from hf_memory.files.text import Text

FINGERPRINT = "fingerprint.json"
STATE = "trainer_state.json"  # the last file of a checkpoint that the Trainer writes
WORK = ("checkpoint-*", "*/checkpoint-*")  # files and folders of a run


def last_whole_checkpoint(folder: Path) -> str | None:
    """The newest complete checkpoint in a folder; incomplete ones of a killed run are removed."""
    while folder.is_dir() and (last := get_last_checkpoint(str(folder))):
        with suppress(OSError, ValueError):
            json.loads(Path(last, STATE).read_text(encoding="utf-8"))
            return last
        shutil.rmtree(last)
    return None


@contextmanager
def reading_checkpoint(checkpoint: str) -> Iterator[None]:
    """A context that reports errors of loading a checkpoint in one sentence.

    Raises:
        ValueError: if loading fails, which means that a file is damaged.
    """
    try:
        yield
    except Exception as error:  # whatever torch raises for a damaged file
        raise _damaged(
            Path(checkpoint), str(error).split("\n")[0] or type(error).__name__
        ) from error


def check_checkpoint(folder: Path) -> None:
    """Raise ValueError if a file of a checkpoint is damaged: its syntax, or a checksum that torch writes into it."""
    for file in sorted(folder.iterdir()):
        with reading_checkpoint(str(file)):
            match file.suffix:
                case ".json":
                    json.loads(file.read_text(encoding="utf-8"))
                case ".safetensors":
                    with safe_open(file, "pt"):
                        pass
                case ".pt" | ".pth":
                    with ZipFile(file) as parts:
                        if (part := parts.testzip()) is not None:
                            raise ValueError(f"{part} was changed after it was written")
    state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    step = state.get("global_step") if isinstance(state, dict) else None
    if type(step) is not int or folder.name != f"checkpoint-{step}":
        raise _damaged(
            folder / STATE, f"global_step must be that of the folder's name, got {step!r}"
        )


def _damaged(path: Path, reason: str) -> ValueError:
    folder = path if path.is_dir() else path.parent
    goes_on = "the same run then goes on from the checkpoint before it, or begins again"
    return ValueError(
        f"{path} is damaged ({reason}): delete the folder {folder.name}, and {goes_on}"
    )


def record_run(folder: Path, description: dict[str, Any]) -> None:
    """Record to which run a folder belongs, or check that it belongs to the same run as before.

    Args:
        folder: folder for checkpoints; created if it does not exist.
        description: the arguments of the run by name, including models and tokens. An earlier record is replaced if the
            folder has no checkpoints yet.

    Raises:
        ValueError: if the folder has checkpoints of a run with other arguments, or of an unknown run.
    """
    check_run_folder(folder)
    file = folder / FINGERPRINT
    described = describe(description)
    if _work(folder):
        before = _record(file)
        if others := sorted(
            name for name in described | before if described.get(name) != before.get(name)
        ):
            raise ValueError(
                f"checkpoints must be of the same run, got {folder} of one with another {' and '.join(others)}"
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    with replaced(file) as partial:
        partial.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def _record(file: Path) -> dict[str, str]:
    """What an earlier run has recorded in a file."""
    record = None
    with suppress(ValueError, RecursionError):
        record = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(record, dict):
        raise ValueError(
            f"{file} is damaged: delete the folder {file.parent}, and the run begins again"
        )
    return record


def check_run_folder(folder: Path) -> None:
    """Raise ValueError if a folder has checkpoints of an unknown run, or links that lead out of it.

    This run might delete the former, and would write where the latter point to.
    """
    if links := [found for found in folder.rglob("*") if found.is_symlink()]:
        raise ValueError(
            f"checkpoints must be in a folder without symbolic links, got {folder} with {links[0].name}"
        )
    if (found := _work(folder)) and not (folder / FINGERPRINT).exists():
        raise ValueError(
            f"checkpoints must be in a folder of their own, got {folder}, which has a {found[0].name}"
        )


def describe(description: dict[str, Any]) -> dict[str, str]:
    """A description as strings that differ if the values do; models and tokens are replaced by fingerprints."""
    return {name: _words(value) for name, value in description.items()}


def _work(folder: Path) -> list[Path]:
    return [found for pattern in WORK for found in folder.glob(pattern)]


def _words(value: Any) -> str:
    if isinstance(value, Text | Tensor):
        return tokens_fingerprint(value)
    if isinstance(value, PreTrainedModel):
        return model_fingerprint(value)
    return (
        value
        if isinstance(value, str)
        else repr(list(value) if isinstance(value, Collection) else value)
    )
