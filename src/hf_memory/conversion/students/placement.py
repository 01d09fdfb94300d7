"""The words for what keeps its attention, and the ranking of layers by how much each helps recall."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from hf_memory.conversion.recipe import Keep
from hf_memory.evaluation import agreement, layer_types, recall_by_distance
from hf_memory.files.text import Text
from hf_memory.modeling.base import MemoryForCausalLM
from hf_memory.modeling.checks import check
from hf_memory.progress import Progress, silent

KEEP_WORDS = (
    "none, every-other, a fraction of the layers such as 1/4, layers such as 0,3, auto or auto:1/8, heads:1/10, "
    "answers:1/10, or retrieval:1/10"
)
SHARE = Fraction(1, 4)  # share of the layers that "auto" keeps
CALIBRATION = 32  # windows of text that layers are ranked on
PLACEMENT_HEADER = ("attention restored in", "recall", "KL", "kept")


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
