"""Checkpoints that were written whole, and that belong to the run that goes on from them."""

import hashlib
import json
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel
from transformers.trainer_utils import get_last_checkpoint

FINGERPRINT = "fingerprint.json"
STATE = "trainer_state.json"  # the last file of a checkpoint that the Trainer writes
OF_LOADING = {"_name_or_path", "dtype", "transformers_version", "use_cache"}  # of a config, not of the model
WORK = ("checkpoint-*", "logits-*")  # what a claimed folder may have in it, at any depth
SAMPLES = 64  # numbers of each weight that tell models apart


def last_whole_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint in a folder; those that a kill left half written are removed."""
    while folder.is_dir() and (last := get_last_checkpoint(str(folder))):
        if _is_whole(Path(last)):
            return last
        shutil.rmtree(last)
    return None


def claim(folder: Path, description: dict[str, Any]) -> None:
    """Write down what the work in a folder belongs to, or see that it is the same as before.

    Args:
        folder: of checkpoints or saved logits; made if there is none.
        description: of the run, by the names of its arguments, models and tokens among them. It is replaced while
            there is no work.

    Raises:
        ValueError: if the folder belongs to a run with other arguments.
    """
    file, described = folder / FINGERPRINT, describe(description)
    if file.exists() and any(found for pattern in WORK for found in folder.rglob(pattern)):
        before = json.loads(file.read_text(encoding="utf-8"))
        if others := sorted(name for name in described | before if described.get(name) != before.get(name)):
            raise ValueError(
                f"checkpoints must be of the same run, got {folder} of one with another {' and '.join(others)}"
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    partial.replace(file)


def is_claimed(folder: Path) -> bool:
    """Whether a folder belongs to a run."""
    return (folder / FINGERPRINT).exists()


def describe(description: dict[str, Any]) -> dict[str, str]:
    """The same in words that differ where the values do, also models and tokens."""
    return {name: _words(value) for name, value in description.items()}


def check_room(folder: Path, model: PreTrainedModel) -> None:
    """Raise OSError unless a folder, which need not be there yet, can hold a model of this size."""
    place = _place(folder)
    size, free = sum(x.numel() * x.element_size() for x in model.parameters()), shutil.disk_usage(place).free
    if free < size:
        raise OSError(f"{place} must have {size / 1e6:,.1f} MB free for {folder.name}, got {free / 1e6:,.1f} MB")


def _place(folder: Path) -> Path:
    """The nearest folder that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


@contextmanager
def written(what: str, folder: Path, otherwise: str) -> Iterator[None]:
    """Say in one sentence that something could not be written, such as for want of space.

    Args:
        what: is written.
        folder: where to.
        otherwise: what is there then.

    Raises:
        OSError: if writing fails.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:  # RuntimeError is how torch.save says it
        free = shutil.disk_usage(_place(folder)).free / 1e6
        reason = getattr(error, "strerror", None) or str(error).split("\n")[0]
        raise OSError(
            f"{what} could not be written to {folder}, with {free:,.1f} MB free: {reason}; {otherwise}"
        ) from error


def tokens_fingerprint(tokens: Tensor) -> str:
    """Differs where texts differ."""
    return hashlib.sha256(tokens.cpu().contiguous().numpy().tobytes()).hexdigest()


def model_fingerprint(model: PreTrainedModel) -> str:
    """Differs where configs differ, or some of the numbers of each weight; the same on every device."""
    config = {name: value for name, value in model.config.to_dict().items() if name not in OF_LOADING}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in model.state_dict().items():
        numbers = weight.detach().flatten()
        sample = numbers[:: max(1, len(numbers) // SAMPLES)].float().cpu()
        digest.update(f"{name} {tuple(weight.shape)}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()


def _words(value: Any) -> str:
    if isinstance(value, Tensor):
        return tokens_fingerprint(value)
    if isinstance(value, PreTrainedModel):
        return model_fingerprint(value)
    return value if isinstance(value, str) else repr(list(value) if isinstance(value, Collection) else value)


def _is_whole(checkpoint: Path) -> bool:
    try:
        json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True
