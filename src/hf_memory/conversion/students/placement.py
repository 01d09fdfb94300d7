"""The words for what keeps its attention."""

import re
from fractions import Fraction

from hf_memory.conversion.recipe import Keep
from hf_memory.modeling.checks import check

KEEP_WORDS = (
    "none, a fraction of the layers such as 1/4, layers such as 0,3, auto or auto:1/8, "
    "heads:1/10, or retrieval:1/10"
)
SHARE = Fraction(1, 4)  # share of the layers that "auto" keeps


def kept_layers(keep: Keep, num_layers: int) -> tuple[int, ...]:
    """The numbers of the layers that keep their attention, in order.

    A fraction a/b keeps a of every b layers, evenly spread and as late as possible: `"1/4"` of 8 layers keeps 3 and 7.

    Args:
        keep: layer numbers, counted from 0; or a word: a fraction, `"none"`, or numbers with commas between them.
        num_layers: number of layers of the model.

    Raises:
        ValueError: if the word is not one of these, a layer does not exist, or a fraction keeps no layer.
    """
    if isinstance(keep, str):
        keep = _spread(keep, num_layers) if "/" in keep else _listed(keep)
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


def _spread(words: str, num_layers: int) -> list[int]:
    share = _fraction(words)
    kept = [i for i in range(num_layers) if int((i + 1) * share) > int(i * share)]
    check(
        len(kept) > 0, "keep", f"a fraction that keeps at least one of {num_layers} layers", words
    )
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
