"""What of a teacher keeps its attention: layers, given or ranked by how much each helps recall, or key-value heads.

Heads are ranked by how much the teacher's predictions depend on what they see outside a window, and by how much they
retrieve what it has read before; these should keep all keys and values.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from hf_memory.conversion.recipe import Keep
from hf_memory.conversion.stages.divergence import divergence
from hf_memory.conversion.stages.trainer import only_these_learn
from hf_memory.evaluation import agreement, layer_types, recall_by_distance
from hf_memory.files.text import Text
from hf_memory.modeling.base import MemoryForCausalLM
from hf_memory.modeling.checks import check
from hf_memory.progress import Progress, silent

KEEP_WORDS = (
    "none, every-other, a fraction of the layers such as 1/4, layers such as 0,3, auto or auto:1/8, heads:1/10, "
    "answers:1/10, or retrieval:1/10"
)
HEAD_SCORES = {  # what heads are ranked by, for each word
    "heads": "part in the divergence of the teacher's predictions of repeated passages if all heads have windows",
    "answers": "part in the divergence of the teacher's answers if all heads have windows, and in retrieval",
    "retrieval": "attention to what followed a passage when it was read before",
}
SHARE = Fraction(1, 4)  # share of the layers that "auto" keeps
CALIBRATION = 32  # windows of text that layers are ranked on
PLACEMENT_HEADER = ("attention restored in", "recall", "KL", "kept")
PASSAGE, BETWEEN, PASSAGES = 256, 512, 3  # tokens of a passage, tokens between its readings, number of passages
CONVERSATIONS, LONGEST = 12, 1280  # that heads are ranked on, and the tokens of the longest
GATES = (1 / 6, 3 / 6, 5 / 6)  # at which gradients are averaged
OBSERVED = "hf_memory_observed"  # name of an attention function that is ours for a while


class LayerScore(NamedTuple):
    """How good a student without attention becomes if one layer gets the teacher's attention back.

    Attributes:
        layer: the layer.
        recall: recall with it (`copy_gain`), averaged, in nats per token.
        kl: KL divergence from the teacher with it, in nats per token.
    """

    layer: int
    recall: float
    kl: float


def kept_layers(keep: Keep, num_layers: int) -> tuple[int, ...]:
    """The numbers of the layers that keep their attention, in order.

    A fraction a/b keeps a of every b layers, evenly spread and as late as possible: `"1/4"` of 8 layers keeps 3 and 7.

    Args:
        keep: layer numbers, counted from 0; or a word: a fraction, `"every-other"`, `"none"`, or numbers with commas
            between them.
        num_layers: number of layers of the model.

    Raises:
        ValueError: if the word is not one of these, a layer does not exist, or a fraction keeps no layer.
    """
    if isinstance(keep, str):
        keep = _spread(keep, num_layers) if "/" in keep or keep == "every-other" else _listed(keep)
    if not set(keep) <= set(range(num_layers)):
        raise ValueError(f"keep must name layers from 0 to {num_layers - 1}, got {sorted(keep)}")
    return tuple(sorted(set(keep)))


def share_count(word: str, keep: Keep, count: int) -> int:
    """How many of `count` layers or heads a word such as `"auto:1/8"` keeps, at least one; 0 for other words.

    Args:
        word: `"auto"`, which without a fraction is a quarter, or a name in HEAD_SCORES.
        keep: what the user wants to keep.
        count: number of layers or heads.

    Raises:
        ValueError: if what follows the word is not a fraction.
    """
    if not isinstance(keep, str) or keep.partition(":")[0] != word:
        return 0
    share = SHARE if keep == "auto" else _fraction(keep.partition(":")[2])
    return max(1, int(share * count))


def rank_layers(
    student: MemoryForCausalLM,
    teacher: PreTrainedModel,
    tokens: Text | Tensor,
    *,
    length: int = 256,
    report: Callable[[Progress], None] = silent,
) -> list[LayerScore]:
    """Rank layers by restoring the teacher's attention in one of them at a time; the best layer to keep comes first.

    The score is recall minus KL, rounded to 0.01 nats. Recall is averaged over distances of a quarter and of half of a
    window. KL alone prefers the first layers, whose hybrids recall least. Recall alone prefers students that predict
    badly, since they gain most from reading a passage twice.

    Args:
        student: a student of memory layers only, after attention transfer; it is not changed.
        teacher: the teacher; it is not changed.
        tokens: [T], a text; its last 32 windows are read.
        length: tokens of a window; not longer than in the teacher's training.
        report: is called with the progress.
    """
    tokens = tokens[-CALIBRATION * length :]
    distances = length // 4, length // 2  # both readings must fit into one window
    scores = []
    num_layers = student.config.num_hidden_layers
    for layer in range(num_layers):
        report(Progress("ranking layers", layer, num_layers))
        with restored(student, teacher, layer):
            kl = agreement(student, teacher, tokens, length=length).kl
            recall = recall_by_distance(student, tokens, distances, passage=length // 8, trials=64)
            scores.append(LayerScore(layer, sum(recall.values()) / len(recall), kl))
    report(Progress("ranking layers", num_layers, num_layers))
    return sorted(scores, key=lambda score: (-round(score.recall - score.kl, 2), -score.recall))


@contextmanager
def restored(student: MemoryForCausalLM, teacher: PreTrainedModel, layer: int) -> Iterator[None]:
    """Replace one memory layer of a student by the teacher's attention layer, as a context."""
    block, config = student.model.layers[layer], student.config
    before = block.mixer, config.layer_types, config._attn_implementation
    kinds = list(config.layer_types or ())
    kinds[layer] = layer_types(teacher.config)[layer]
    try:
        block.mixer, config.layer_types = teacher.model.layers[layer].self_attn, kinds
        config._attn_implementation = teacher.config._attn_implementation  # masks are made for it
        yield
    finally:
        block.mixer, config.layer_types, config._attn_implementation = before


def placement_table(scores: Iterable[LayerScore], kept: Collection[int]) -> list[tuple[str, ...]]:
    """The rows of a ranking as text, with the columns of PLACEMENT_HEADER."""
    return [(f"layer {x.layer}", f"{x.recall:.2f}", f"{x.kl:.3f}", "yes" * (x.layer in kept)) for x in scores]


def _spread(words: str, num_layers: int) -> list[int]:
    share = Fraction(1, 2) if words == "every-other" else _fraction(words)
    kept = [i for i in range(num_layers) if int((i + 1) * share) > int(i * share)]
    check(len(kept) > 0, "keep", f"a fraction that keeps at least one of {num_layers} layers", words)
    return kept


def _fraction(words: str) -> Fraction:
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", words)
    if match is None or int(match[1]) > int(match[2]):
        raise ValueError(f"keep must have a fraction from 0 to 1 such as 1/4, got {words!r}")
    return Fraction(int(match[1]), int(match[2]))


def _listed(words: str) -> list[int]:
    if words == "none":
        return []
    is_ranked = share_count("auto", words, 1) > 0
    check(not is_ranked, "keep", "layers or a fraction here: only convert can rank layers", words)
    check(re.fullmatch(r"\d+(,\d+)*", words) is not None, "keep", KEEP_WORDS, words)
    return [int(word) for word in words.split(",")]


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
    and of those that help others to, which `rank_heads` does not find. If the text is so short that a window has all
    that passages depend on, heads are ranked by `rank_heads`.

    Args:
        teacher: the teacher; it is not changed.
        tokens: [T], a text; if it is short, passages are shorter.
        window: number of tokens that a head with a window sees.
        first: number of first tokens that it sees as well.
        report: is called with the progress.
    """
    rows = [(row, torch.arange(row.shape[1])) for row in passages(Text.of(tokens), window)]
    scores = window_divergences(teacher, rows, window=window, first=first, report=report)
    return ranked(scores) if scores.any() else rank_heads(teacher, tokens)


def rank_heads_by_answers(
    teacher: PreTrainedModel,
    tokens: Text | Tensor,
    *,
    window: int,
    first: int = 0,
    report: Callable[[Progress], None] = silent,
) -> list[HeadScore]:
    """Rank all key-value heads of a teacher by what its answers in conversations depend on, and by what they retrieve.

    A head's score is its part of the KL divergence (`window_divergences`) relative to the largest, plus its score of
    `rank_heads` relative to the largest. Chains of names and similar questions need heads that retrieve little.

    Args:
        teacher: the teacher; it is not changed.
        tokens: a text with documents whose targets are the answers, as `read_tokens(assistant_only=True)` reads it.
        window: number of tokens that a head with a window sees.
        first: number of first tokens that it sees as well.
        report: is called with the progress.

    Raises:
        ValueError: if no conversation has targets outside the window.
    """
    text = Text.of(tokens)
    rows = list(_conversations(text, window + first))
    if not rows:
        raise ValueError(
            f"tokens must have conversations of up to {LONGEST} tokens, read with assistant_only, with answers after "
            f"{window + first} tokens to keep the heads that answers need, got none"
        )
    chosen = torch.linspace(0, len(rows) - 1, min(CONVERSATIONS, len(rows))).long().tolist()
    retrieval = {(x.layer, x.head): x.score for x in rank_heads(teacher, text.parts[0])}
    read = [rows[place] for place in chosen]
    answers = ranked(window_divergences(teacher, read, window=window, first=first, report=report))
    most = answers[0].score, max(retrieval.values())
    summed = [x._replace(score=x.score / most[0] + retrieval[x.layer, x.head] / most[1]) for x in answers]
    return sorted(summed, key=lambda head: -head.score)


def _conversations(text: Text, shortest: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Documents [1, T] with targets after so many tokens, and the places before these."""
    begins = [] if text.documents is None or text.targets is None else text.documents.tolist()
    for begin, end in pairwise([*begins, len(text)]):
        row = text.row(begin, end - begin + len(text.start), whole=True)
        places = shortest + (row["labels"][shortest + 1 :] >= 0).nonzero()[:, 0]
        if len(row["labels"]) <= LONGEST and len(places):
            yield row["input_ids"][None], places


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

    def mixed(module, query, key, value, attention_mask, **kwargs):
        full, _ = eager_attention_forward(module, query, key, value, attention_mask, **kwargs)
        place = torch.arange(query.shape[2], device=query.device)
        is_far = (place[:, None] - place >= window) & (place >= first)
        mask = attention_mask.masked_fill(is_far, torch.finfo(query.dtype).min)
        near, _ = eager_attention_forward(module, query, key, value, mask, **kwargs)  # [B, T, HQ, D]
        gate = gates[module.layer_idx].to(full).repeat_interleave(full.shape[2] // gates.shape[1])[:, None]
        return near + gate * (full - near), None

    def once(*args, **kwargs):
        return checkpoint(mixed, *args, use_reentrant=False, **kwargs)

    total = torch.zeros_like(gates)
    for done, (row, places) in enumerate(rows):
        report(Progress("ranking heads", done, len(rows)))
        row = row.to(teacher.device)
        with torch.no_grad():
            target = teacher(row, use_cache=False).logits[0, places]
        for point in GATES:
            gates = torch.full_like(gates, point).requires_grad_()
            with attention_by(teacher, once), only_these_learn(teacher, ()), torch.enable_grad():
                logits = teacher(row, use_cache=False).logits[0, places]
                total -= torch.autograd.grad(divergence(logits, target) / len(GATES) / len(places), gates)[0]
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
    found = [HeadScore(i, h, x) for i, layer in enumerate(scores.tolist()) for h, x in enumerate(layer)]
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


def rank_by_heads(heads: Iterable[HeadScore]) -> list[int]:
    """The layers of ranked heads; the one whose heads have the largest scores together comes first."""
    sums: Counter[int] = Counter()
    for head in heads:
        sums[head.layer] += head.score  # type: ignore[assignment]
    return [layer for layer, _ in sums.most_common()]


def by_layer(heads: Iterable[tuple[int, int]], num_layers: int) -> list[list[int]]:
    """Pairs of a layer and a head as `full_attention_heads` of a config."""
    pairs = sorted(heads)
    return [[head for layer, head in pairs if layer == i] for i in range(num_layers)]
