"""Checkpoints that were written whole, and that belong to the run that goes on from them."""

import hashlib
import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.trainer_utils import get_last_checkpoint

FINGERPRINT = "fingerprint.json"
STATE = "trainer_state.json"  # the last file of a checkpoint that the Trainer writes
OF_LOADING = {"_name_or_path", "dtype", "transformers_version", "use_cache"}  # of a config, not of the model
SAMPLES = 64  # numbers of each weight that tell models apart


def last_whole_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint in a folder; those that a kill left half written are removed."""
    while folder.is_dir() and (last := get_last_checkpoint(str(folder))):
        if _is_whole(Path(last)):
            return last
        shutil.rmtree(last)
    return None


def claim(folder: Path, description: dict[str, Any]) -> None:
    """Write down what the checkpoints in a folder belong to, or see that it is the same as before.

    Args:
        folder: of the checkpoints; made if there is none.
        description: of the run, by the names of its arguments. It is replaced while there are no checkpoints.

    Raises:
        ValueError: if the folder belongs to a run with other arguments.
    """
    file = folder / FINGERPRINT
    described = {name: _words(value) for name, value in description.items()}
    if file.exists() and any(folder.glob("*/checkpoint-*")):
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
    return value if isinstance(value, str) else repr(list(value) if isinstance(value, Collection) else value)


def _is_whole(checkpoint: Path) -> bool:
    try:
        json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True
