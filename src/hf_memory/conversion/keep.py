"""What of a teacher keeps its attention: the words for it are read here, and nowhere else."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, Self

from hf_memory.modeling.checks import check

KEEP_WORDS = (
    "none, a fraction of the layers such as 1/4, layers such as 0,3, auto or auto:1/8, "
    "heads:1/10, or retrieval:1/10"
)
USUAL_SHARE = Fraction(1, 4)  # of the layers, kept by "auto"


@dataclass(frozen=True)
class Keep:
    """What of a teacher keeps its attention, see `Keep.parse`.

    Attributes:
        kind: `"layers"` with these numbers; a `"share"` of the layers, evenly spread; `"auto"` for a share of the
            layers, those that a ranking puts first; `"heads"` and `"retrieval"` for a share of the key-value heads,
            those that a ranking by this name in HEAD_SCORES puts first. Ranked are layers that the student replaces,
            and their heads: layers that have the teacher's short window anyway are not among them.
        layers: numbers of layers, counted from 0, in order; of the first kind only.
        share: part of the layers or heads, above 0 and at most 1; 0 for the first kind.
    """

    kind: Literal["layers", "share", "auto", "heads", "retrieval"]
    layers: tuple[int, ...] = ()
    share: Fraction = Fraction(0)

    @classmethod
    def parse(cls, words: "Keep | str | Collection[int]") -> Self:
        """Read what a user wants to keep.

        Args:
            words: numbers of layers, counted from 0; or one of these words: `"none"`; numbers of layers such as
                `"0,3"`; a fraction such as `"1/4"`, which keeps a of every b layers, evenly spread and as late as
                possible, so that of 8 layers it keeps 3 and 7; `"auto"`, a quarter of the layers, or `"auto:1/8"`;
                `"heads:1/10"` or `"retrieval:1/10"`, a share of the key-value heads in layers that are replaced.

        Raises:
            ValueError: if it is none of these.
        """
        if isinstance(words, cls):
            return words
        if not isinstance(words, str):
            are_numbers = isinstance(words, Collection) and all(type(x) is int for x in words)
            check(are_numbers, "keep", "words or numbers of layers", words)
            return cls("layers", tuple(sorted(set(words))))  # type: ignore[arg-type]
        if words == "none":
            return cls("layers")
        if re.fullmatch(r"\d+(,\d+)*", words):
            return cls.parse([int(number) for number in words.split(",")])
        if words == "auto":
            return cls("auto", share=USUAL_SHARE)
        kind, colon, fraction = words.rpartition(":")
        kind = kind if colon else "share"
        is_known = kind in ("auto", "heads", "retrieval") or (not colon and "/" in words)
        check(is_known, "keep", KEEP_WORDS, words)
        return cls(kind, share=_fraction(fraction))  # type: ignore[arg-type]

    def __str__(self) -> str:
        if self.kind == "layers":
            return ",".join(map(str, self.layers)) or "none"
        fraction = f"{self.share.numerator}/{self.share.denominator}"
        if self.kind == "share":
            return fraction
        is_usual = self.kind == "auto" and self.share == USUAL_SHARE
        return self.kind if is_usual else f"{self.kind}:{fraction}"

    @property
    def is_heads(self) -> bool:
        """Whether heads are kept, instead of whole layers."""
        return self.kind in ("heads", "retrieval")

    @property
    def has_layers(self) -> bool:
        """Whether whole layers are kept."""
        return not self.is_heads and (self.kind != "layers" or bool(self.layers))

    @property
    def is_ranked(self) -> bool:
        """Whether a ranking has to choose the layers or heads, which needs the teacher's weights."""
        return self.kind == "auto" or self.is_heads

    @property
    def ranking(self) -> str:
        """By what heads, and layers with them, are ranked, a name in HEAD_SCORES."""
        return "retrieval" if self.kind == "retrieval" else "heads"

    def count(self, number: int) -> int:
        """How many of so many layers or heads a ranking chooses, at least one; 0 if there is no ranking."""
        return max(1, int(self.share * number)) if self.is_ranked else 0

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """The numbers of the layers that are kept in a model with so many, in order.

        Raises:
            ValueError: if a layer does not exist, a share keeps no layer, or a ranking has to choose.
        """
        wanted = "layers or a fraction here: only convert can rank layers"
        check(not self.is_ranked, "keep", wanted, str(self))
        if self.kind == "layers":
            if not set(self.layers) <= set(range(num_layers)):
                given = list(self.layers)
                raise ValueError(f"keep must name layers from 0 to {num_layers - 1}, got {given}")
            return self.layers
        share = self.share
        layers = [i for i in range(num_layers) if int((i + 1) * share) > int(i * share)]
        wanted = f"a fraction that keeps at least one of {num_layers} layers"
        check(len(layers) > 0, "keep", wanted, str(self))
        return tuple(layers)


def _fraction(words: str) -> Fraction:
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", words)
    if match is None or int(match[1]) > int(match[2]):
        raise ValueError(f"keep must have a fraction from 0 to 1 such as 1/4, got {words!r}")
    return Fraction(int(match[1]), int(match[2]))
