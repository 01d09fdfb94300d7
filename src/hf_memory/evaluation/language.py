"""How well a model predicts text, recalls it, and agrees with another model."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel


class Agreement(NamedTuple):
    """How close a student's predictions are to its teacher's, averaged over tokens."""

    kl: float  # KL(teacher || student) in nats
    top1: float  # how often both find the same token most likely


def perplexity(model: PreTrainedModel, tokens: Tensor, *, length: int = 256, batch_size: int = 8) -> float:
    """exp of the mean loss over tokens, each predicted from at least half a window of context, except the first ones.

    Args:
        model: a causal language model.
        tokens: [T] of one text, T >= length. Up to half a window at the end may go unread.
        length: tokens of a window; windows overlap by half.
        batch_size: windows read at once.

    Raises:
        ValueError: if there are fewer tokens than a window has.
    """
    stride = length // 2
    losses = torch.cat([token_losses(model, x) for x in _windows(tokens, length, stride).split(batch_size)])
    scored = torch.cat([losses[:1, :-stride].flatten(), losses[:, -stride:].flatten()])
    return scored.double().mean().exp().item()


@torch.no_grad()
def agreement(
    student: PreTrainedModel, teacher: PreTrainedModel, tokens: Tensor, *, length: int = 256, batch_size: int = 8
) -> Agreement:
    """Compare two models over the windows of one text [T]; see `perplexity` for the arguments."""
    kl, same = [], []
    for batch in _windows(tokens, length, length).split(batch_size):
        logits = _logits(student, batch), _logits(teacher, batch)
        p_student, p_teacher = (x.float().log_softmax(-1) for x in logits)
        kl.append(F.kl_div(p_student, p_teacher, log_target=True, reduction="none").sum(-1).flatten())
        same.append((p_student.argmax(-1) == p_teacher.argmax(-1)).float().flatten())
    return Agreement(torch.cat(kl).mean().item(), torch.cat(same).mean().item())


def perplexity_by_position(
    model: PreTrainedModel, tokens: Tensor, *, length: int = 1024, windows: int = 16, batch_size: int = 4
) -> dict[int, float]:
    """Perplexity of the tokens that stand where in a window: what more context is worth, and where a model gives up.

    Args:
        model: a causal language model.
        tokens: [T] of one text, T >= length.
        length: tokens of a window, a power of two.
        windows: read at most, evenly spread over the text.
        batch_size: windows read at once.

    Returns:
        {32: of the tokens before the 32nd, 64: of those from there to the 64th, ..., length: of the last half}
    """
    rows = _windows(tokens, length, max(1, (len(tokens) - length) // max(1, windows - 1)))[:windows]
    losses = torch.cat([token_losses(model, x) for x in rows.split(batch_size)]).double().mean(0)
    ends = [2**i for i in range(min(5, length.bit_length() - 1), length.bit_length())]
    parts = losses[: ends[-1]].tensor_split([end - 1 for end in ends[:-1]])  # the first token has no loss
    return {end: part.mean().exp().item() for end, part in zip(ends, parts)}


def recall_by_distance(
    model: PreTrainedModel, tokens: Tensor, distances: Iterable[int], *, passage: int = 32, trials: int = 32
) -> dict[int, float]:
    """`copy_gain` where the second reading of a passage begins so many tokens after the first."""
    settings = {"passage": passage, "trials": trials, "batch_size": 4}
    return {d: copy_gain(model, tokens, gap=d - passage, **settings) for d in distances}


def copy_gain(
    model: PreTrainedModel, tokens: Tensor, *, passage: int = 64, gap: int = 96, trials: int = 32, batch_size: int = 8
) -> float:
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
    """
    before = passage // 2
    starts = torch.linspace(0, len(tokens) - passage, trials).long()
    fillers = torch.linspace(len(tokens) // 2, len(tokens) // 2 + len(tokens) - 1, trials).long()
    texts = tokens[starts[:, None] + torch.arange(passage)]
    others = tokens[(fillers[:, None] + torch.arange(before + passage + gap)) % len(tokens)]
    unread = torch.cat([others, texts], dim=1)
    read = unread.clone()
    read[:, before : before + passage] = texts
    losses = [
        torch.cat([token_losses(model, x)[:, 1 - passage :] for x in rows.split(batch_size)]) for rows in (unread, read)
    ]  # without the first token, which nothing announces
    return (losses[0] - losses[1]).double().mean().item()


@torch.no_grad()
def token_losses(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """The negative log-likelihood [B, T - 1] of each token of [B, T] but the first, in float32."""
    logits = _logits(model, input_ids)
    labels = input_ids[:, 1:].to(logits.device)
    return F.cross_entropy(logits[:, :-1].float().mT, labels, reduction="none").cpu()


def _logits(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    was_training = model.training
    model.eval()
    try:
        return model(input_ids.to(model.device), use_cache=False).logits
    finally:
        model.train(was_training)


def _windows(tokens: Tensor, length: int, stride: int) -> Tensor:
    if len(tokens) < length:
        raise ValueError(f"tokens must be at least one window of {length} tokens, got {len(tokens)}")
    return tokens.unfold(0, length, stride)
