"""Which key-value heads of a teacher keep everything: those that its predictions need, or that retrieve.

Heads are ranked by their part in the teacher's divergence if all of them have windows, and by their attention to what
they have read before. Layers can be ranked by their heads.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from hf_memory.conversion.stages.divergence import divergence
from hf_memory.conversion.stages.trainer import only_these_learn
from hf_memory.files.text import Text
from hf_memory.progress import Progress, silent

HEAD_SCORES = {  # what heads are ranked by, for each word
    "heads": "part in what the teacher predicts of a passage that it reads again",
    "retrieval": "attention to what followed when the passage was read before",
}
PASSAGE = 256  # tokens of a passage
BETWEEN = 512  # tokens between its two readings
PASSAGES = 3  # number of passages
GATE_VALUES = (1 / 6, 3 / 6, 5 / 6)  # of a head's gate, at which gradients are averaged
OBSERVED = "hf_memory_observed"  # name of an attention function that is ours for a while


class HeadScore(NamedTuple):
    """What a ranking found for a key-value head."""

    layer: int
    head: int  # number of the key-value head
    score: float


@torch.no_grad()
def rank_heads_by_retrieval(teacher: PreTrainedModel, tokens: Text | Tensor) -> list[HeadScore]:
    """Rank all key-value heads of a teacher; the head that retrieves most comes first.

    The teacher reads a passage, other text, and the same passage a second time. A head's score is the average attention
    of a token of the second reading to the token that followed it in the first reading, taken from the query head with
    the largest score. This finds induction heads (https://arxiv.org/abs/2209.11895), which DuoAttention
    (https://arxiv.org/abs/2410.10819) calls retrieval heads.

    Args:
        teacher: the teacher; it is not changed.
        tokens: [T], a text; if it is short, passages are shorter.
    """
    text = Text.of(tokens)
    passage = _passage(tokens)
    # what followed the tokens of the first reading
    first = slice(len(text.start) + 1, len(text.start) + passage + 1)
    scores: list[Tensor] = []  # [HQ] of each layer, passage after passage

    def observed(module, query, key, value, attention_mask, **kwargs):
        output, weights = eager_attention_forward(
            module, query, key, value, attention_mask, **kwargs
        )
        followed = weights[0, :, -passage:, first].diagonal(dim1=-2, dim2=-1)  # [HQ, passage]
        scores.append(followed.float().mean(-1).cpu())
        return output, None

    with attention_by(teacher, observed):
        for row in passages(text):
            teacher(row.to(teacher.device), use_cache=False, logits_to_keep=1)
    of_layers = torch.stack(scores).unflatten(0, (PASSAGES, -1)).mean(0)  # [layers, HQ]
    return ranked(of_layers.unflatten(1, (teacher.config.num_key_value_heads, -1)).amax(-1))


def rank_heads_by_predictions(
    teacher: PreTrainedModel,
    tokens: Text | Tensor,
    *,
    window: int,
    first: int = 0,
    report: Callable[[Progress], None] = silent,
) -> list[HeadScore]:
    """Rank all key-value heads of a teacher by how much its predictions depend on what they see outside a window.

    The teacher reads a passage, other text that is at least as long as the window, and the same passage a second time.
    A head's score is its part of the KL divergence of all predictions (`window_divergences`): of heads that retrieve
    and of those that help others to, which `rank_heads_by_retrieval` does not find. That ranks heads if the text is so
    short that a window has all that passages depend on.

    Args:
        teacher: the teacher; it is not changed.
        tokens: [T], a text; if it is short, passages are shorter.
        window: number of tokens that a head with a window sees.
        first: number of first tokens that it sees as well.
        report: is called with the progress.
    """
    rows = [(row, torch.arange(row.shape[1])) for row in passages(Text.of(tokens), window)]
    scores = window_divergences(teacher, rows, window=window, first=first, report=report)
    return ranked(scores) if scores.any() else rank_heads_by_retrieval(teacher, tokens)


def window_divergences(
    teacher: PreTrainedModel,
    rows: Sequence[tuple[Tensor, Tensor]],
    *,
    window: int,
    first: int,
    report: Callable[[Progress], None] = silent,
) -> Tensor:
    """The part of each head [layers, H] in KL(teacher || teacher with windows in all heads), in nats per prediction.

    A gate g of each head mixes what it sees in a window with what it sees at all: o = near + g (full - near). At g = 1
    the teacher predicts what it predicts, and at g = 0 all its heads have windows. The part of a head is minus the
    gradient of the divergence by its gate, averaged over gates from 0 to 1 (integrated gradients,
    https://arxiv.org/abs/1703.01365).

    Args:
        teacher: the teacher; it is not changed.
        rows: texts [1, T], and the places [n] whose predictions are compared.
        window: number of tokens that a head with a window sees.
        first: number of first tokens that it sees as well.
        report: is called with the progress.
    """
    gates = torch.zeros(teacher.config.num_hidden_layers, teacher.config.num_key_value_heads)
    is_fused = teacher.config._attn_implementation == "sdpa"
    attend = sdpa_attention_forward if is_fused else eager_attention_forward

    def mixed(module, query, key, value, attention_mask, **kwargs):
        full, _ = attend(module, query, key, value, attention_mask, **kwargs)
        place = torch.arange(query.shape[2], device=query.device)
        is_far = (place[:, None] - place >= window) & (place >= first)
        mask = attention_mask.masked_fill(is_far, torch.finfo(query.dtype).min)
        near, _ = attend(module, query, key, value, mask, **kwargs)  # [B, T, HQ, D]
        gate = (
            gates[module.layer_idx]
            .to(full)
            .repeat_interleave(full.shape[2] // gates.shape[1])[:, None]
        )
        return near + gate * (full - near), None

    def once(*args, **kwargs):
        return checkpoint(mixed, *args, use_reentrant=False, **kwargs)

    total = torch.zeros_like(gates)
    passes = len(rows) * len(GATE_VALUES)
    for number, (row, places) in enumerate(rows):
        row = row.to(teacher.device)
        with torch.no_grad():
            target = teacher(row, use_cache=False).logits[0, places]
        for done, point in enumerate(GATE_VALUES, number * len(GATE_VALUES)):
            report(Progress("ranking heads", done, passes))
            gates = torch.full_like(gates, point).requires_grad_()
            with attention_by(teacher, once), only_these_learn(teacher, ()), torch.enable_grad():
                logits = teacher(row, use_cache=False).logits[0, places]
                total -= torch.autograd.grad(
                    divergence(logits, target) / len(GATE_VALUES) / len(places), gates
                )[0]
    report(Progress("ranking heads", passes, passes))
    return total / len(rows)


@contextmanager
def attention_by(teacher: PreTrainedModel, attend: Callable) -> Iterator[None]:
    """A context in which a function computes the attention of a model, with a mask."""
    before = teacher.config._attn_implementation
    AttentionInterface.register(OBSERVED, attend)
    AttentionMaskInterface.register(OBSERVED, eager_mask)
    try:
        teacher.set_attn_implementation(OBSERVED)
        yield
    finally:
        teacher.set_attn_implementation(before)


def ranked(scores: Tensor) -> list[HeadScore]:
    """The heads with these scores [layers, H], the highest first."""
    found = [
        HeadScore(i, h, x) for i, layer in enumerate(scores.tolist()) for h, x in enumerate(layer)
    ]
    return sorted(found, key=lambda head: -head.score)


def _passage(tokens: Text | Tensor) -> int:
    return min(PASSAGE, len(tokens) // 8)


def passages(text: Text, window: int = 0) -> Iterator[Tensor]:
    """A passage, other text from elsewhere, and the passage a second time; [1, T] at several places of a text.

    The other text has as many tokens as a window, at least, if the text is long enough.
    """
    passage = _passage(text)
    between = max(min(BETWEEN, 2 * passage), min(window, len(text) // 2 - passage))
    for start in torch.linspace(0, len(text) - 2 * (passage + between), PASSAGES).long().tolist():
        read = text.tokens[start : start + passage]
        other = text.tokens[start + passage + between : start + passage + 2 * between]
        yield text.begun(torch.cat([read, other, read])[None])


def layers_by_heads(heads: Iterable[HeadScore]) -> list[int]:
    """The layers of ranked heads; the one whose heads have the largest scores together comes first."""
    sums: Counter[int] = Counter()
    for head in heads:
        sums[head.layer] += head.score  # type: ignore[assignment]
    return [layer for layer, _ in sums.most_common()]


def by_layer(heads: Iterable[tuple[int, int]], num_layers: int) -> list[list[int]]:
    """Pairs of a layer and a head as `full_attention_heads` of a config."""
    pairs = sorted(heads)
    return [[head for layer, head in pairs if layer == i] for i in range(num_layers)]
