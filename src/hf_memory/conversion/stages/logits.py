"""A teacher's most likely tokens saved ahead of distillation, which then needs no teacher."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from hf_memory.conversion.claims import FINGERPRINT, claim, describe
from hf_memory.conversion.data import TokenWindows
from hf_memory.conversion.recipe import TOP_K, Schedule, check_saved_lengths
from hf_memory.conversion.run import Run
from hf_memory.conversion.stages.distillation import DISTILLATION, DistillationTrainer
from hf_memory.conversion.stages.divergence import LossOfTokens, last_hidden_states, slices, tempered
from hf_memory.conversion.stages.fine_tuning import trained
from hf_memory.conversion.stages.sharding import processes
from hf_memory.conversion.stages.trainer import run_trainer
from hf_memory.decoding.parts import head
from hf_memory.files.folders import replaced, written
from hf_memory.files.text import Text
from hf_memory.modeling.base import MemoryForCausalLM
from hf_memory.progress import History, Progress, silent

SHARD = 64  # windows in a file
SAVED = ("top_ids", "top_log_probs", "rest_log_prob")


def bytes_of_logits(schedule: Schedule, k: int = TOP_K) -> int:
    """The number of bytes that `save_logits` writes."""
    return schedule.steps * schedule.batch_size * schedule.length * (8 * k + 4)


@torch.no_grad()
def save_logits(
    folder: Path,
    teacher: PreTrainedModel,
    tokens: Text | Tensor,
    schedule: Schedule,
    *,
    k: int = TOP_K,
    temperature: float = 1.0,
    seed: int = 0,
    report: Callable[[Progress], None] = silent,
) -> None:
    """Save a teacher's predictions in the windows that a distillation will read, as shards of safetensors.

    A call that was stopped can be repeated, and goes on after the last shard. The shards hold, in the order of the
    windows, `top_ids` [N, T, k], their `top_log_probs` [N, T, k], and `rest_log_prob` [N, T], the logarithm of the
    probability of all other tokens together.

    Args:
        folder: the folder to write to.
        teacher: the teacher; it is not changed.
        tokens: [T], the text of the distillation.
        schedule: the schedule of the distillation.
        k: number of most likely tokens to save at each position.
        temperature: the temperature of the distillation.
        seed: the seed of the distillation.
        report: is called with the progress.

    Raises:
        ValueError: if k is not from 1 to the size of the vocabulary, windows have several lengths, or the folder
            belongs to other arguments.
        OSError: if a shard cannot be written; earlier shards stay.
    """
    if not 1 <= k <= teacher.config.vocab_size:
        raise ValueError(f"k must be from 1 to the teacher's {teacher.config.vocab_size} tokens, got {k}")
    check_saved_lengths(schedule)
    windows = TokenWindows(tokens, schedule, seed)
    state = processes()
    if state.is_main_process:
        claim(folder, {**_of_windows(windows, temperature), "k": k, "teacher": teacher})
    teacher.eval()
    shards = _shards(folder, windows)
    for number, file in enumerate(shards):
        report(Progress("saving logits", number, len(shards), SHARD * schedule.length))
        if number % state.num_processes == state.process_index and not file.exists():
            rows = range(number * SHARD, min((number + 1) * SHARD, len(windows)))
            read = [windows[i] for i in rows]
            batches = [read[i : i + schedule.batch_size] for i in range(0, len(read), schedule.batch_size)]
            found = [_predict(teacher, batch, k, temperature) for batch in batches]
            tensors = {name: torch.cat(x).cpu().contiguous() for name, x in zip(SAVED, zip(*found))}
            otherwise = "those before it stay, and the same call goes on"
            with written(file.name, folder, otherwise), replaced(file) as unfinished:
                save_file(tensors, unfinished)
    report(Progress("saving logits", len(shards), len(shards)))
    state.wait_for_everyone()


def distill_from_logits(
    student: MemoryForCausalLM,
    folder: Path,
    tokens: Text | Tensor,
    schedule: Schedule,
    *,
    temperature: float = 1.0,
    cross_entropy: float = 0.0,
    train: str = "all",
    seed: int = 0,
    run: Run = Run(),
) -> History:
    """Like `distill`, but from predictions that `save_logits` has saved; the divergence is `top_divergence`.

    The folder is one that `save_logits` filled with the same tokens, schedule, temperature and seed; all other
    arguments are those of `distill`.

    Raises:
        ValueError: if the folder belongs to other arguments, or a shard is missing.
    """
    how: dict = {"temperature": temperature, "cross_entropy": cross_entropy}
    data = WindowsWithLogits(folder, tokens, schedule, seed)
    check_saved(folder, data, temperature)
    trainer = partial(SavedDistillationTrainer, teacher=None, **how)
    with trained(student, train, seed):
        return run_trainer(trainer, student, data, DISTILLATION, run, {"student": student, "train": train, **how})


def top_divergence(
    student: Tensor, top_ids: Tensor, top_log_probs: Tensor, rest_log_prob: Tensor, temperature: float = 1.0
) -> Tensor:
    """temperature^2 KL(teacher || student), where all tokens except the teacher's k most likely count as one.

    KL = sum over i in top of p_i log(p_i / q_i) + p_rest log(p_rest / q_rest), p_rest = 1 - sum of p_i, q_rest alike.
    It is at most the KL of all tokens, equal to it at k = V, and zero only if the student has the teacher's
    probabilities of the k tokens and of the rest. Renormalising the top k instead would leave the rest undetermined.

    Args:
        student: [n, V] logits.
        top_ids: [n, k] of the teacher.
        top_log_probs: [n, k] of the teacher at this temperature.
        rest_log_prob: [n] of the teacher, of all other tokens together.
        temperature: divides the logits.

    Returns:
        The sum over tokens.
    """
    log_q, ids = tempered(student, temperature).log_softmax(-1), top_ids.long()
    kl = (top_log_probs.exp() * (top_log_probs - log_q.gather(-1, ids))).sum(-1)
    if ids.shape[-1] < log_q.shape[-1]:
        kl = kl + rest_log_prob.exp() * (rest_log_prob - _rest(log_q, ids))
    return temperature**2 * kl.sum()


class SavedDistillationTrainer(DistillationTrainer):
    """Distillation from saved predictions of the teacher."""

    def divergence(self, inputs: dict[str, Tensor], kept: Tensor) -> LossOfTokens:
        """The divergence from the saved predictions."""
        ids, top, rest = (inputs[name].flatten(0, 1)[kept] for name in SAVED)
        return lambda logits, where: top_divergence(logits, ids[where], top[where], rest[where], self.temperature)


class WindowsWithLogits(TokenWindows):
    """Windows of a text with the predictions that `save_logits` saved for them."""

    def __init__(self, folder: Path, tokens: Text | Tensor, schedule: Schedule, seed: int):
        super().__init__(tokens, schedule, seed)
        self.folder = folder

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        number, row = divmod(index, SHARD)
        with safe_open(_shard(self.folder, number), "pt") as shard:
            return super().__getitem__(index) | {name: shard.get_slice(name)[row] for name in SAVED}


def check_saved(folder: Path, windows: TokenWindows, temperature: float) -> None:
    """Raise ValueError unless a folder has the predictions for all of these windows."""
    file = folder / FINGERPRINT
    if not file.exists():
        raise ValueError(f"folder must be one that save_logits filled, got {folder}")
    saved, expected = json.loads(file.read_text(encoding="utf-8")), describe(_of_windows(windows, temperature))
    if others := sorted(name for name in expected if expected[name] != saved.get(name)):
        raise ValueError(f"folder must be of this distillation, got {folder} with another {' and '.join(others)}")
    if missing := [shard.name for shard in _shards(folder, windows) if not shard.exists()]:
        raise ValueError(f"folder must have all logits, got {folder} without {missing[0]}; save_logits writes the rest")


def _of_windows(windows: TokenWindows, temperature: float) -> dict:
    size = {"windows": len(windows), "length": windows.schedule.length, "repeats": windows.schedule.repeats}
    return {"tokens": windows.text, **size, "temperature": temperature, "seed": windows.seed}


def _shards(folder: Path, windows: TokenWindows) -> list[Path]:
    return [_shard(folder, number) for number in range(-(-len(windows) // SHARD))]


def _shard(folder: Path, number: int) -> Path:
    return folder / f"logits-{number:05}.safetensors"


def _predict(teacher: PreTrainedModel, batch: list[dict[str, Tensor]], k: int, temperature: float) -> list[Tensor]:
    """The tensors that are saved for a batch of windows."""
    names = ("input_ids", "position_ids")
    read = [torch.stack([row[name] for row in batch]).to(teacher.device) for name in names if name in batch[0]]
    hidden_states = last_hidden_states(teacher, *read).flatten(0, 1)
    places = slices(len(hidden_states), teacher.config.vocab_size)
    found = [_top(head(teacher, hidden_states[where]), k, temperature) for where in places]
    return [torch.cat(x).unflatten(0, read[0].shape) for x in zip(*found)]


def _top(logits: Tensor, k: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    log_p = tempered(logits, temperature).log_softmax(-1)
    top, ids = log_p.topk(k)
    return ids.int(), top, _rest(log_p, ids)


def _rest(log_p: Tensor, ids: Tensor) -> Tensor:
    """The logarithm of the probability of all tokens except `ids` [.., k] together, from log-probabilities [.., V]."""
    return log_p.scatter(-1, ids, -torch.inf).logsumexp(-1)
