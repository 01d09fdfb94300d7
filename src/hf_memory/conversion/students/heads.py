"""Which key-value heads of a teacher retrieve what it has read before, and so should keep all keys and values."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from hf_memory.files.text import Text

PASSAGE, BETWEEN, PASSAGES = 256, 512, 3  # tokens of a passage, tokens between its readings, number of passages
OBSERVED = "hf_memory_observed"  # name of an attention function that is ours for a while


class HeadScore(NamedTuple):
    """How much a key-value head retrieves what followed a token when the token was read before."""

    layer: int
    head: int  # number of the key-value head
    score: float  # part of the attention, 0 to 1


@torch.no_grad()
def rank_heads(teacher: PreTrainedModel, tokens: Text | Tensor) -> list[HeadScore]:
    """Rank all key-value heads of a teacher; the head that retrieves most comes first.

    The teacher reads a passage, other text, and the same passage a second time. A head's score is the average attention
    of a token of the second reading to the token that followed it in the first reading, taken from the query head with
    the largest score. This finds induction heads (https://arxiv.org/abs/2209.11895), which DuoAttention
    (https://arxiv.org/abs/2410.10819) calls retrieval heads.

    Args:
        teacher: the teacher; it is not changed.
        tokens: [T], a text; if it is short, passages are shorter.
    """
    text, passage = Text.of(tokens), _passage(tokens)
    first = slice(len(text.start) + 1, len(text.start) + passage + 1)  # what followed the tokens of the first reading
    scores: list[Tensor] = []  # [HQ] of each layer, passage after passage

    def observed(module, query, key, value, attention_mask, **kwargs):
        output, weights = eager_attention_forward(module, query, key, value, attention_mask, **kwargs)
        followed = weights[0, :, -passage:, first].diagonal(dim1=-2, dim2=-1)  # [HQ, passage]
        scores.append(followed.float().mean(-1).cpu())
        return output, None

    with attention_by(teacher, observed):
        for row in passages(text):
            teacher(row.to(teacher.device), use_cache=False, logits_to_keep=1)
    of_layers = torch.stack(scores).unflatten(0, (PASSAGES, -1)).mean(0)  # [layers, HQ]
    return ranked(of_layers.unflatten(1, (teacher.config.num_key_value_heads, -1)).amax(-1))


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
    found = [HeadScore(i, h, x) for i, layer in enumerate(scores.tolist()) for h, x in enumerate(layer)]
    return sorted(found, key=lambda head: -head.score)


def _passage(tokens: Text | Tensor) -> int:
    return min(PASSAGE, len(tokens) // 8)


def passages(text: Text) -> Iterator[Tensor]:
    """A passage, other text from elsewhere, and the passage a second time; [1, T] at several places of a text."""
    passage = _passage(text)
    between = min(BETWEEN, 2 * passage)
    for start in torch.linspace(0, len(text) - 2 * (passage + between), PASSAGES).long().tolist():
        read = text.tokens[start : start + passage]
        other = text.tokens[start + passage + between : start + passage + 2 * between]
        yield text.begun(torch.cat([read, other, read])[None])


def rank_by_retrieval(heads: Iterable[HeadScore]) -> list[int]:
    """The layers of ranked heads; the one whose heads retrieve most together comes first."""
    sums: Counter[int] = Counter()
    for head in heads:
        sums[head.layer] += head.score  # type: ignore[assignment]
    return [layer for layer, _ in sums.most_common()]


def by_layer(heads: Iterable[tuple[int, int]], num_layers: int) -> list[list[int]]:
    """Pairs of a layer and a head as `full_attention_heads` of a config."""
    pairs = sorted(heads)
    return [[head for layer, head in pairs if layer == i] for i in range(num_layers)]
