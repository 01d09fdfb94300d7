"""How well a model predicts text, recalls it, and agrees with another model.

All measures read at most `max_tokens` tokens, in windows that are evenly spread over a longer text (None: all of it).
They call `progress` after each batch with the number of its tokens.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_memory.evaluation.counts import check_counts
from hf_memory.evaluation.estimates import Estimate, exp_of_mean
from hf_memory.files.text import Text, check_length
from hf_memory.modeling.any_model import check_model, check_pair, in_eval_mode
from hf_memory.modeling.checks import check

BUDGET = 2**16  # number of tokens that a measure reads by default
BATCH = 2**12  # number of tokens of a batch, unless a window has more
SLICE = 2**24  # number of logits that are converted to float32 at once
# number of logits that a model returns at once; for more, it reads the text several times
WHOLE = 2**29
Tell = Callable[[int], object]


class Agreement(NamedTuple):
    """How close a student's predictions are to its teacher's, averaged over tokens.

    Attributes:
        kl: KL(teacher || student) in nats per token.
        top1: fraction of the tokens for which both have the same most likely prediction.
        ratio: the student's perplexity divided by the teacher's.
    """

    kl: Estimate
    top1: Estimate
    ratio: Estimate


def say_nothing(tokens: int) -> None:
    """Ignore the progress."""


def perplexity(
    model: PreTrainedModel,
    tokens: Text | Tensor,
    *,
    length: int = 256,
    max_tokens: int | None = BUDGET,
    progress: Tell = say_nothing,
) -> Estimate:
    """The perplexity of a text: exp of the mean loss over tokens.

    Each token is predicted from at least half a window of context, except those in the first half of the first window.

    Args:
        model: a causal language model.
        tokens: a text of at least one window. Up to half a window at its end may be left out.
        length: tokens of a window; windows overlap by half.
        max_tokens: largest number of tokens to read.
        progress: is called with the number of tokens of each batch.

    Raises:
        ValueError: if there are fewer tokens than a window has.
    """
    check_counts(length=length)
    stride = length // 2
    losses = _losses(model, _windows(tokens, length, stride, max_tokens), progress)
    scored = [losses[0], *losses[1:, -stride:]]
    weights = torch.tensor([len(x) for x in scored])
    return Estimate(torch.stack([x.mean() for x in scored]), weights, of=exp_of_mean)


def agreement(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    tokens: Text | Tensor,
    *,
    length: int = 256,
    max_tokens: int | None = BUDGET,
    progress: Tell = say_nothing,
) -> Agreement:
    """Compare the predictions of two models on the windows of a text; see `perplexity` for the arguments."""
    rows = _windows(tokens, length, length, max_tokens)
    return _agreement(_compared(student, teacher, rows, progress))


def agreement_by_position(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    tokens: Text | Tensor,
    *,
    length: int = 1024,
    windows: int = 16,
    max_tokens: int | None = BUDGET,
    progress: Tell = say_nothing,
) -> dict[int, Agreement]:
    """`agreement` by the position of a token in its window; arguments and windows of `perplexity_by_position`."""
    rows = _spread(tokens, length, windows, max_tokens)
    parts = _by_position(_compared(student, teacher, rows, progress))
    return {end: _agreement(part) for end, part in parts}


def _agreement(compared: Tensor) -> Agreement:
    """The means over tokens of [N, 3, T], the results of `_compared`."""
    kl, same, more = compared.mean(-1).T
    return Agreement(Estimate(kl), Estimate(same), Estimate(more, of=exp_of_mean))


@torch.no_grad()
def _compared(
    student: PreTrainedModel, teacher: PreTrainedModel, rows: Tensor, tell: Tell
) -> Tensor:
    """[N, 3, T - 1] for rows [N, T]: KL, top-1 agreement, and the student's loss minus the teacher's."""
    check_pair(student, teacher)
    found = []
    for batch in _batches(rows, tell):
        parts = []
        for (logits, following), (teachers, _) in zip(
            _logits(student, batch), _logits(teacher, batch), strict=True
        ):
            p_student, p_teacher = (x.float().log_softmax(-1) for x in (logits, teachers))
            kl = F.kl_div(p_student, p_teacher, log_target=True, reduction="none").sum(-1)
            losses = [
                F.nll_loss(x.mT, following.to(x.device), reduction="none")
                for x in (p_student, p_teacher)
            ]
            same = p_student.argmax(-1) == p_teacher.argmax(-1)
            parts.append(torch.stack([kl, same.to(kl), losses[0] - losses[1]], dim=1))
        found.append(torch.cat(parts, dim=-1).double().cpu())
    return torch.cat(found)


def perplexity_by_position(
    model: PreTrainedModel,
    tokens: Text | Tensor,
    *,
    length: int = 1024,
    windows: int = 16,
    max_tokens: int | None = BUDGET,
    progress: Tell = say_nothing,
) -> dict[int, Estimate]:
    """Perplexity by the position of a token in its window, which shows how much more context helps.

    Args:
        model: a causal language model.
        tokens: a text of at least one window.
        length: tokens of a window, a power of two.
        windows: largest number of windows, evenly spread over the text.
        max_tokens: largest number of tokens to read.
        progress: is called with the number of tokens of each batch.

    Returns:
        {32: perplexity of tokens 0 to 31, 64: of tokens 32 to 63, 128: ..., length: of the last half}
    """
    losses = _losses(model, _spread(tokens, length, windows, max_tokens), progress)
    return {end: Estimate(part.mean(1), of=exp_of_mean) for end, part in _by_position(losses)}


def _spread(tokens: Text | Tensor, length: int, windows: int, max_tokens: int | None) -> Tensor:
    """[N, length]: at most so many windows, evenly spread over a text."""
    check_counts(length=length, windows=windows, max_tokens=max_tokens)
    if max_tokens is not None:
        windows = max(1, min(windows, max_tokens // length))
    return _windows(tokens, length, max(1, (len(tokens) - length) // max(1, windows - 1)), None)[
        :windows
    ]


def _by_position(found: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Parts of [..., T - 1], of all tokens except the first: to 32, from there to 64, to 128, ..., to T."""
    length = found.shape[-1] + 1
    ends = [2**i for i in range(min(5, length.bit_length() - 1), length.bit_length())]
    return zip(
        ends, found[..., : ends[-1] - 1].tensor_split([end - 1 for end in ends[:-1]], dim=-1)
    )


def recall_by_distance(
    model: PreTrainedModel,
    tokens: Text | Tensor,
    distances: Iterable[int],
    *,
    passage: int = 32,
    trials: int = 32,
    max_tokens: int | None = BUDGET,
    progress: Tell = say_nothing,
) -> dict[int, Estimate]:
    """Recall by distance: `copy_gain` for passages whose second reading begins some distance after the first."""
    distances = list(distances)
    check_counts(distances=distances, passage=passage, trials=trials, max_tokens=max_tokens)
    gaps = {d: d - passage for d in distances}
    check(
        min(gaps.values(), default=-1) >= 0,
        "distances",
        f"at least the {passage} tokens of a passage",
        distances,
    )
    trials = trials_within(max_tokens, gaps.values(), passage=passage, trials=trials)
    settings: dict = {
        "passage": passage,
        "trials": trials,
        "max_tokens": None,
        "progress": progress,
    }
    return {d: copy_gain(model, tokens, gap=gap, **settings) for d, gap in gaps.items()}


def copy_gain(
    model: PreTrainedModel,
    tokens: Text | Tensor,
    *,
    passage: int = 64,
    gap: int = 96,
    trials: int = 32,
    max_tokens: int | None = BUDGET,
    progress: Tell = say_nothing,
) -> Estimate:
    """Recall: by how many nats per token the loss on a passage falls because the model has read the passage before.

    A row consists of some text, the passage, `gap` tokens of other text, and the passage a second time. The loss on the
    second reading is subtracted from the loss in a row with other text in place of the first reading. A model that
    recalls nothing thus gains nothing, however well it knows the text, and however bad it is at long contexts.

    Args:
        model: a causal language model.
        tokens: a text that the model was not trained on.
        passage: tokens of a passage.
        gap: tokens between the two readings.
        trials: number of passages, evenly spread over the text.
        max_tokens: largest number of tokens to read; fewer passages are tried if they have more.
        progress: is called with the number of tokens of each batch.
    """
    check_counts(passage=passage, gap=gap, trials=trials, max_tokens=max_tokens)
    check_length(tokens, passage)
    text = Text.of(tokens)
    before = passage // 2
    trials = trials_within(max_tokens, [gap], passage=passage, trials=trials)
    starts = torch.linspace(0, len(text) - passage, trials).long()
    # far from the passage, cyclically
    fillers = starts + passage + max(0, len(text) - 2 * passage - before - gap) // 2
    texts = text.tokens[starts[:, None] + torch.arange(passage)]
    others = text.tokens[(fillers[:, None] + torch.arange(before + passage + gap)) % len(text)]
    unread = torch.cat([others, texts], dim=1)
    read = unread.clone()
    read[:, before : before + passage] = texts
    # without the first token, which cannot be predicted
    losses = [_losses(model, text.begun(rows), progress, passage - 1) for rows in (unread, read)]
    return Estimate((losses[0] - losses[1]).mean(1))


def trials_within(max_tokens: int | None, gaps: Iterable[int], *, passage: int, trials: int) -> int:
    """The number of passages that `copy_gain` can try at each gap without reading more than `max_tokens` in total."""
    if max_tokens is None:
        return trials
    rows = [passage // 2 + passage + gap + passage for gap in gaps]
    return max(1, min(trials, max_tokens // (2 * sum(rows))))


@torch.no_grad()
def token_losses(model: PreTrainedModel, input_ids: Tensor, last: int | None = None) -> Tensor:
    """The negative log-likelihood [B, n] of the last n tokens of [B, T], else of all but the first, in float32."""
    compared = _logits(model, input_ids, last)
    return torch.cat(
        [F.cross_entropy(x.float().mT, y.to(x.device), reduction="none") for x, y in compared], 1
    ).cpu()


def _losses(
    model: PreTrainedModel, rows: Tensor, progress: Tell, last: int | None = None
) -> Tensor:
    """Losses in float64, so that means are exact."""
    return torch.cat(
        [token_losses(model, batch, last) for batch in _batches(rows, progress)]
    ).double()


def _batches(rows: Tensor, progress: Tell) -> Iterator[Tensor]:
    for batch in rows.split(max(1, BATCH // rows.shape[1])):
        yield batch
        progress(batch.numel())


def _logits(
    model: PreTrainedModel, input_ids: Tensor, last: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Slices of the logits [B, n, V] of tokens [B, T], and the tokens [B, n] that follow: all of them, or the last.

    They have no more than SLICE logits, unless one place has more, and are views of no more than WHOLE.
    """
    check_model("model", model)
    B, T = input_ids.shape
    V = model.config.get_text_config().vocab_size
    size = max(1, SLICE // (B * V))
    first = 0 if last is None else T - 1 - last
    for places in torch.arange(first, T - 1).split(max(1, WHOLE // (B * V))):
        kept = {} if len(places) == T - 1 else {"logits_to_keep": places.to(model.device)}
        logits = _read(model, input_ids, **kept)[:, : len(places)]
        yield from zip(logits.split(size, dim=1), input_ids[:, places + 1].split(size, dim=1))
        del logits  # before the next ones are made


@in_eval_mode
def _read(model: PreTrainedModel, input_ids: Tensor, **kwargs) -> Tensor:
    return model(input_ids.to(model.device), use_cache=False, **kwargs).logits


def _windows(tokens: Text | Tensor, length: int, stride: int, max_tokens: int | None) -> Tensor:
    """[N, length]: the windows of a text, or as many of them as may be read."""
    check_counts(length=length, max_tokens=max_tokens)
    check_length(tokens, length)
    text = Text.of(tokens)
    places = torch.arange(0, len(text) + len(text.start) - length + 1, stride)
    most = len(places) if max_tokens is None else max(1, max_tokens // length)
    if most < len(places):
        places = places[torch.linspace(0, len(places) - 1, most).long()]
    return text.windows(places, length)
