"""How well a model predicts text, recalls it, and agrees with another model.

All measures read at most `max_tokens` tokens, of windows evenly spread over a text that has more (None: all of it), and
tell `progress` after each batch how many it had.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_memory.evaluation.estimates import Estimate, exp_of_mean

BUDGET = 2**16  # tokens that a measure reads unless it is asked for more
SLICE = 2**24  # logits that are in float32 at a time, beside those that the model returns
Tell = Callable[[int], object]


class Agreement(NamedTuple):
    """How close a student's predictions are to its teacher's, averaged over tokens."""

    kl: Estimate  # KL(teacher || student) in nats
    top1: Estimate  # how often both find the same token most likely
    ratio: Estimate  # the student's perplexity over the teacher's


def say_nothing(tokens: int) -> None:
    """The progress of who does not want to know it."""


def perplexity(
    model: PreTrainedModel,
    tokens: Tensor,
    *,
    length: int = 256,
    batch_size: int = 8,
    max_tokens: int | None = BUDGET,
    progress: Tell = say_nothing,
) -> Estimate:
    """exp of the mean loss over tokens, each predicted from at least half a window of context, except the first ones.

    Args:
        model: a causal language model.
        tokens: [T] of one text, T >= length. Up to half a window at the end may go unread.
        length: tokens of a window; windows overlap by half.
        batch_size: windows read at once.
        max_tokens: read at most.
        progress: is told of tokens read.

    Raises:
        ValueError: if there are fewer tokens than a window has.
    """
    stride = length // 2
    losses = _losses(model, _windows(tokens, length, stride, max_tokens), batch_size, progress)
    scored = [losses[0], *losses[1:, -stride:]]
    weights = torch.tensor([len(x) for x in scored])
    return Estimate(torch.stack([x.mean() for x in scored]), weights, of=exp_of_mean)


@torch.no_grad()
def agreement(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    tokens: Tensor,
    *,
    length: int = 256,
    batch_size: int = 8,
    max_tokens: int | None = BUDGET,
    progress: Tell = say_nothing,
) -> Agreement:
    """Compare two models over the windows of one text [T]; see `perplexity` for the arguments."""
    batches = _batches(_windows(tokens, length, length, max_tokens), batch_size, progress)
    kl, same, more = torch.cat([_compared(student, teacher, batch) for batch in batches]).T
    return Agreement(Estimate(kl), Estimate(same), Estimate(more, of=exp_of_mean))


def _compared(student: PreTrainedModel, teacher: PreTrainedModel, batch: Tensor) -> Tensor:
    """[B, 3], means over each window: KL, how often both choose alike, the student's loss less the teacher's."""
    models = [_slices(_logits(model, batch)) for model in (student, teacher)]
    labels = F.pad(batch[:, 1:], (0, 1), value=-100).split([x.shape[1] for x in models[0]], dim=1)
    kl, same, more = [], [], []
    for *logits, following in zip(*models, labels):
        p_student, p_teacher = (x.float().log_softmax(-1) for x in logits)
        same.append(p_student.argmax(-1) == p_teacher.argmax(-1))
        kl.append(F.kl_div(p_student, p_teacher, log_target=True, reduction="none").sum(-1))
        following = following.to(p_student.device)
        losses = [F.nll_loss(x.mT, following, reduction="none") for x in (p_student, p_teacher)]
        more.append(losses[0] - losses[1])
    found = [torch.cat(x, dim=1).double() for x in (kl, same, more)]
    found[2] = found[2][:, :-1]  # nothing follows the last token
    return torch.stack([x.mean(1) for x in found], dim=1).cpu()


def perplexity_by_position(
    model: PreTrainedModel,
    tokens: Tensor,
    *,
    length: int = 1024,
    windows: int = 16,
    batch_size: int = 4,
    max_tokens: int | None = BUDGET,
    progress: Tell = say_nothing,
) -> dict[int, Estimate]:
    """Perplexity of the tokens that stand where in a window: what more context is worth, and where a model gives up.

    Args:
        model: a causal language model.
        tokens: [T] of one text, T >= length.
        length: tokens of a window, a power of two.
        windows: read at most, evenly spread over the text.
        batch_size: windows read at once.
        max_tokens: read at most.
        progress: is told of tokens read.

    Returns:
        {32: of the tokens before the 32nd, 64: of those from there to the 64th, ..., length: of the last half}
    """
    if max_tokens is not None:
        windows = max(1, min(windows, max_tokens // length))
    rows = _windows(tokens, length, max(1, (len(tokens) - length) // max(1, windows - 1)), None)[:windows]
    losses = _losses(model, rows, batch_size, progress)
    ends = [2**i for i in range(min(5, length.bit_length() - 1), length.bit_length())]
    parts = losses[:, : ends[-1]].tensor_split([end - 1 for end in ends[:-1]], dim=1)  # the first token has no loss
    return {end: Estimate(part.mean(1), of=exp_of_mean) for end, part in zip(ends, parts)}


def recall_by_distance(
    model: PreTrainedModel,
    tokens: Tensor,
    distances: Iterable[int],
    *,
    passage: int = 32,
    trials: int = 32,
    max_tokens: int | None = BUDGET,
    progress: Tell = say_nothing,
) -> dict[int, Estimate]:
    """`copy_gain` where the second reading of a passage begins so many tokens after the first."""
    gaps = {d: d - passage for d in distances}
    trials = trials_within(max_tokens, gaps.values(), passage=passage, trials=trials)
    settings: dict = {"passage": passage, "trials": trials, "batch_size": 4, "max_tokens": None, "progress": progress}
    return {d: copy_gain(model, tokens, gap=gap, **settings) for d, gap in gaps.items()}


def copy_gain(
    model: PreTrainedModel,
    tokens: Tensor,
    *,
    passage: int = 64,
    gap: int = 96,
    trials: int = 32,
    batch_size: int = 8,
    max_tokens: int | None = BUDGET,
    progress: Tell = say_nothing,
) -> Estimate:
    """What it helps, in nats a token, to have read a passage before: what the model still recalls.

    A row is: some text, the passage, `gap` tokens of other text, the passage again. The loss on the passage at the end
    is compared with that in a row where other text stands in place of its first reading, so that a model that recalls
    nothing gains nothing, however well it knows the text, and however badly it reads so far into one.

    Args:
        model: a causal language model.
        tokens: [T] of a text that the model was not trained on.
        passage: tokens of a passage.
        gap: tokens between its two readings.
        trials: passages tried, evenly spread over the text.
        batch_size: rows read at once.
        max_tokens: read at most, by trying fewer passages.
        progress: is told of tokens read.
    """
    before, trials = passage // 2, trials_within(max_tokens, [gap], passage=passage, trials=trials)
    starts = torch.linspace(0, len(tokens) - passage, trials).long()
    fillers = torch.linspace(len(tokens) // 2, len(tokens) // 2 + len(tokens) - 1, trials).long()
    texts = tokens[starts[:, None] + torch.arange(passage)]
    others = tokens[(fillers[:, None] + torch.arange(before + passage + gap)) % len(tokens)]
    unread = torch.cat([others, texts], dim=1)
    read = unread.clone()
    read[:, before : before + passage] = texts
    losses = [
        _losses(model, rows, batch_size, progress)[:, 1 - passage :] for rows in (unread, read)
    ]  # without the first token, which nothing announces
    return Estimate((losses[0] - losses[1]).mean(1))


def trials_within(max_tokens: int | None, gaps: Iterable[int], *, passage: int, trials: int) -> int:
    """How many passages `copy_gain` can try at each gap if all together read no more than so many tokens."""
    if max_tokens is None:
        return trials
    rows = [passage // 2 + passage + gap + passage for gap in gaps]
    return max(1, min(trials, max_tokens // (2 * sum(rows))))


@torch.no_grad()
def token_losses(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """The negative log-likelihood [B, T - 1] of each token of [B, T] but the first, in float32."""
    logits = _slices(_logits(model, input_ids)[:, :-1])
    labels = input_ids[:, 1:].to(logits[0].device).split([x.shape[1] for x in logits], dim=1)
    losses = [F.cross_entropy(x.float().mT, y, reduction="none") for x, y in zip(logits, labels)]
    return torch.cat(losses, dim=1).cpu()


def _losses(model: PreTrainedModel, rows: Tensor, batch_size: int, progress: Tell) -> Tensor:
    """In float64, so that means of them are those of the numbers."""
    return torch.cat([token_losses(model, batch) for batch in _batches(rows, batch_size, progress)]).double()


def _batches(rows: Tensor, batch_size: int, progress: Tell) -> Iterator[Tensor]:
    for batch in rows.split(batch_size):
        yield batch
        progress(batch.numel())


def _slices(logits: Tensor) -> tuple[Tensor, ...]:
    """Views of [B, T, V] along T, of no more than SLICE numbers unless one place has more."""
    B, _, V = logits.shape
    return logits.split(max(1, SLICE // (B * V)), dim=1)


def _logits(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    was_training = model.training
    model.eval()
    try:
        return model(input_ids.to(model.device), use_cache=False).logits
    finally:
        model.train(was_training)


def _windows(tokens: Tensor, length: int, stride: int, max_tokens: int | None) -> Tensor:
    """[N, length]: the windows of a text, or as many of them as may be read."""
    if len(tokens) < length:
        raise ValueError(f"tokens must be at least one window of {length} tokens, got {len(tokens)}")
    windows = tokens.unfold(0, length, stride)
    most = len(windows) if max_tokens is None else max(1, max_tokens // length)
    return windows if len(windows) <= most else windows[torch.linspace(0, len(windows) - 1, most).long()]
