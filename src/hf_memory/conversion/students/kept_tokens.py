"""How many older tokens each head of a student keeps: more where its teacher's predictions change most without them.

A head that keeps n tokens has other outputs than its teacher's, by d_t at token t, with the teacher's own queries, keys
and values. If g_t is the gradient by that output of the log-likelihood of labels, which are drawn from what the teacher
predicts, then the sum of (g_t d_t)^2 over a text estimates what the head's error does to the predictions: it is the
part of single heads and tokens in the Fisher form of the KL divergence.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from hf_memory.conversion.stages.divergence import cross_entropy, last_hidden_states, sliced_loss
from hf_memory.conversion.stages.trainer import only_these_learn
from hf_memory.conversion.students import is_mixed, own_window
from hf_memory.conversion.students.heads import attention_by
from hf_memory.files.text import Text
from hf_memory.layers import upcast
from hf_memory.mixers.attention_blocks import Scores
from hf_memory.mixers.base import Context
from hf_memory.mixers.pasts.kept import Kept
from hf_memory.mixers.pasts.rows import New
from hf_memory.mixers.windowed import WindowedMixer
from hf_memory.progress import Progress, silent

LEVELS = (16 / 45, 32 / 45, 64 / 45, 128 / 45)  # 128, 256, 512 and 1,024 tokens of 360
PROSE = 2  # rows of the text as it is; as many have passages that come again
PIECE = 32  # tokens of each of the pieces that come again
AGAIN = 1 / 4  # of a row is what comes again


class Seen(NamedTuple):
    """What a layer of a teacher saw of a text, [B, T, heads, D] each, and how."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    outputs: Tensor
    probe: Tensor  # a zero that was added to the outputs, for their gradient
    scale: float
    softcap: float


class Step(NamedTuple):
    """That a head keeps more tokens than before."""

    fall: float  # of its error, for each of these tokens
    head: int
    tokens: int  # how many more


def kept_by_head(
    teacher: PreTrainedModel,
    tokens: Text | Tensor,
    student: Any,
    *,
    length: int,
    seed: int = 0,
    report: Callable[[Progress], None] = silent,
) -> list[list[int]]:
    """The `num_kept_tokens` of each head of a student, at four levels, as many in total as with equal numbers.

    One head may be between two levels, by what is left of the total. Rows of the text as it is and rows in which
    passages come again count alike. If they are so short that no head drops a token, the list is empty.

    Args:
        teacher: the teacher, or its quantised form; it is not changed.
        tokens: [T], the training text.
        student: the student's config, with one number of kept tokens.
        length: tokens of a row, or fewer for a short text.
        seed: for the labels that are drawn.
        report: is called with the progress.
    """
    mean = student.num_kept_tokens
    text = Text.of(tokens)
    length = min(length, len(text))
    levels = levels_of(mean, student, teacher.config)
    if length <= past_of(student, mean).stay or levels[-1] <= mean:
        return []
    heads = near_heads(student)
    rows = rows_of(text, length)
    errors = dict.fromkeys(levels, torch.zeros(len(heads), dtype=torch.float64))
    total = len(rows) * len({layer for layer, _ in heads})
    layers_done = count()
    tell = lambda: report(Progress("weighing what heads keep", next(layers_done), total))  # noqa: E731
    tell()
    for i, row in enumerate(rows):
        of_row = errors_of(teacher, row, student, (*levels, mean), seed + i, tell)
        whole = of_row[mean].sum()
        errors = {number: x + of_row[number] / whole for number, x in errors.items()}
    kept = student.kept_tokens
    for (layer, head), number in zip(heads, numbers_of(errors, mean * len(heads))):
        kept[layer][head] = number
    return kept


def near_heads(student: Any) -> list[tuple[int, int]]:
    """The layers and numbers of the key-value heads that have a window."""
    full = student.full_attention_heads or [[]] * student.num_hidden_layers
    return [
        (layer, head)
        for layer, kind in enumerate(student.layer_types)
        for head in range(student.num_key_value_heads)
        if kind == "sliding_heads" and head not in full[layer]
    ]


def levels_of(mean: int, student: Any, teacher: Any) -> list[int]:
    """The numbers of tokens that heads can keep; no head sees more than the longest window of its teacher."""
    levels = [round(mean * x) for x in LEVELS]
    own = own_window(teacher)
    if own is None or is_mixed(teacher):
        return levels
    past = past_of(student, mean)
    beside = past.stay - mean + past.block
    most = max(mean, own - beside)
    return sorted({min(x, most) for x in levels})


def past_of(student: Any, kept: int) -> Kept:
    """What a head sees that keeps so many tokens."""
    past = WindowedMixer.kept_past(student, [kept])
    assert isinstance(past, Kept)
    return past


def rows_of(text: Text, length: int) -> list[Tensor]:
    """Rows [1, length] of a text: as it is, with a passage that comes again, and with pieces that come again."""
    starts = torch.linspace(0, len(text) - length, PROSE + 2).long()
    *prose, passage, pieces = text.windows(starts, length).split(1)
    again = round(length * AGAIN)
    first = len(text.start)
    passage[:, -again:] = passage[:, first : first + again]
    number = max(1, again // PIECE)
    size = min(PIECE, again)
    places = torch.linspace(first, length - again - size, number).long()
    order = torch.randperm(number, generator=torch.Generator().manual_seed(0))
    found = [pieces[:, place : place + size] for place in places[order].tolist()]
    pieces[:, -number * size :] = torch.cat(found, 1)
    return [*prose, passage, pieces]


def errors_of(
    teacher: PreTrainedModel,
    row: Tensor,
    student: Any,
    numbers: Sequence[int],
    seed: int,
    tell: Callable[[], None] = lambda: None,
) -> dict[int, Tensor]:
    """By how many tokens heads keep: the error [heads] of each head with a window on a row [1, T].

    `tell` is called after each layer.
    """
    heads = near_heads(student)
    layers = sorted({layer for layer, _ in heads})
    seen = seen_by_layers(teacher, row.to(teacher.device), layers, seed)
    errors: dict[int, list[Tensor]] = {number: [] for number in numbers}
    for layer, (of_layer, gradient) in zip(layers, seen):
        here = [head for at, head in heads if at == layer]
        for number, of_number in errors.items():
            error = _errors(of_layer, gradient, past_of(student, number), here)
            of_number.append(error.cpu())
        tell()
    return {number: torch.cat(x).double() for number, x in errors.items()}


def seen_by_layers(
    teacher: PreTrainedModel, row: Tensor, layers: Sequence[int], seed: int
) -> Iterator[tuple[Seen, Tensor]]:
    """What layers of a teacher see of a row [1, T], and gradients of a log-likelihood by their heads' outputs.

    The likelihood is that of labels which are drawn at each token from what the teacher predicts.
    """
    is_fused = teacher.config._attn_implementation == "sdpa"
    attend = sdpa_attention_forward if is_fused else eager_attention_forward
    seen: dict[int, Seen] = {}

    def observed(module, query, key, value, attention_mask, **kwargs):
        given = module, query, key, value, attention_mask
        output, _ = checkpoint(attend, *given, use_reentrant=False, **kwargs)
        if module.layer_idx in layers:
            rows = (x.detach().transpose(1, 2) for x in (query, key, value))
            probe = torch.zeros_like(output, requires_grad=True)
            how = kwargs["scaling"], kwargs.get("softcap") or 0.0
            seen[module.layer_idx] = Seen(*rows, output.detach(), probe, *how)
            output = output + probe
        return output, None

    dice = torch.Generator(row.device).manual_seed(seed)

    def of_drawn_labels(logits: Tensor, _: slice) -> Tensor:
        p = upcast(logits.detach()).softmax(-1)
        return -cross_entropy(logits, torch.multinomial(p, 1, generator=dice)[:, 0])

    with attention_by(teacher, observed), only_these_learn(teacher, ()), torch.enable_grad():
        hidden_states = last_hidden_states(teacher, row)
        likelihood = sliced_loss(teacher, hidden_states, of_drawn_labels)
        of_layers = [seen[layer] for layer in layers]
        gradients = torch.autograd.grad(likelihood, [x.probe for x in of_layers])
    return zip(of_layers, gradients)


@torch.no_grad()
def _errors(seen: Seen, gradient: Tensor, past: Kept, heads: list[int]) -> Tensor:
    """The error of each of these key-value heads of a layer."""
    H = seen.keys.shape[2]
    of_heads = lambda x: x.unflatten(2, (H, -1))[:, :, heads].flatten(2, 3)  # noqa: E731
    q, k, v = (of_heads(x) for x in (seen.queries, seen.keys, seen.values))
    change = with_kept_tokens(q, k, v, past, seen.scale, seen.softcap) - of_heads(seen.outputs)
    products = upcast(change) * upcast(of_heads(gradient))
    return products.unflatten(2, (len(heads), -1)).sum((3, 4)).square().sum((0, 1))


def with_kept_tokens(
    q: Tensor, k: Tensor, v: Tensor, past: Kept, scale: float, softcap: float
) -> Tensor:
    """The outputs [B, T, HQ, V] of heads that keep some tokens, of queries [B, T, HQ, D], keys and values."""
    context = Context(None, None, None, {})
    tokens, _ = context.tokens_and_count(q)
    new = New.of(k, v, past.kind, context)
    o, _ = past.attend(q, new, tokens, context, Scores(scale, softcap or None))
    return o


def numbers_of(errors: Mapping[int, Tensor], total: int) -> list[int]:
    """How many tokens each head keeps, by the errors of all heads with each number, and how many there are for all.

    Each has the least number, and then tokens go where they remove most error.
    """
    levels = sorted(errors)
    rows = torch.stack([errors[level] for level in levels], 1).cummin(1).values.tolist()
    numbers = [levels[0]] * len(rows)
    rest = total - levels[0] * len(rows)
    steps = [step for head, row in enumerate(rows) for step in _steps(head, levels, row)]
    for step in sorted(steps, key=lambda step: -step.fall):
        added = min(step.tokens, rest)
        numbers[step.head] += added
        rest -= added
    return numbers


def _steps(head: int, levels: Sequence[int], errors: Sequence[float]) -> list[Step]:
    """The steps between numbers of tokens on the convex hull of a head's errors, each with a smaller fall."""
    points = list(zip(levels, errors))
    hull = [points[0]]
    while hull[-1] != points[-1]:
        n, error = hull[-1]
        later = [point for point in points if point[0] > n]
        hull.append(max(later, key=lambda point: ((error - point[1]) / (point[0] - n), -point[0])))
    return [Step((x - y) / (m - n), head, m - n) for (n, x), (m, y) in pairwise(hull)]
