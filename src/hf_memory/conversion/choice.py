"""Which layers or heads keep their attention, and how many older tokens, by words or by a ranking; and the config.

`choosing` makes rankings, which need the teacher's weights; nothing here does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

from transformers import PreTrainedConfig

from hf_memory.conversion.keep import Keep
from hf_memory.conversion.recipe import Recipe
from hf_memory.conversion.students import changed_layers, student_config
from hf_memory.conversion.students.heads import HeadScore, by_layer, layers_by_heads
from hf_memory.modeling.configuration import MemoryConfig

CONTEXT = 8192  # tokens after which caches of students are compared for a goal
Head = tuple[int, int]  # a layer, and the number of a key-value head in it


@dataclass(frozen=True)
class Choice:
    """What of a teacher keeps its attention, once it is decided.

    Attributes:
        layers: numbers of the layers that keep it, in order.
        heads: the layers and numbers of the key-value heads that keep it in other layers.
        scores: scores of all heads that could keep it, the best first; empty if none were ranked.
        keep: the share of the heads that a goal has decided; None without a goal.
        options: options of the student that a goal has decided, in place of the recipe's.
        kept_tokens: the number of older tokens that each key-value head keeps, by layer; empty if weights did not
            decide it.
        tried: the students that were measured for a goal, the chosen one last.
    """

    layers: tuple[int, ...] = ()
    heads: tuple[Head, ...] = ()
    scores: tuple[HeadScore, ...] = ()
    keep: Keep | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    kept_tokens: tuple[tuple[int, ...], ...] = ()
    tried: "tuple[Tried, ...]" = ()

    def applied_to(self, recipe: Recipe) -> Recipe:
        """The recipe with what weights have decided in place of a goal."""
        options = {**recipe.options, **self.options}
        decided: dict[str, Any] = {} if self.keep is None else {"keep": self.keep, "goal": None}
        return replace(recipe, options=options, **decided)

    def to_json(self) -> dict[str, Any]:
        """The choice as JSON types."""
        return {
            "layers": self.layers,
            "heads": self.heads,
            "scores": self.scores,
            "keep": None if self.keep is None else str(self.keep),
            "options": dict(self.options),
            "kept_tokens": self.kept_tokens,
            "tried": [x._asdict() for x in self.tried],
        }

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Self:
        """The choice whose `to_json` has these values."""
        keep = values["keep"]
        return cls(
            layers=tuple(values["layers"]),
            heads=tuple((layer, head) for layer, head in values["heads"]),
            scores=tuple(HeadScore(*row) for row in values["scores"]),
            keep=None if keep is None else Keep.parse(keep),
            options=values["options"],
            kept_tokens=tuple(map(tuple, values["kept_tokens"])),
            tried=tuple(Tried(**row) for row in values["tried"]),
        )


class Tried(NamedTuple):
    """An untrained student that was measured for a goal.

    Attributes:
        keep: what keeps everything, in words.
        window: tokens of the other heads' window.
        kept_tokens: older tokens that they keep.
        cache: bytes of its cache relative to its teacher's in 16 bits, from 0 to 1.
        kl: KL divergence from its teacher, in nats per token.
    """

    keep: str
    window: int
    kept_tokens: int
    cache: float
    kl: float


def likely_choice(recipe: Recipe, teacher: PreTrainedConfig) -> Choice:
    """The choice of a recipe if no ranking is needed; else a choice of as many layers or heads, the first ones.

    Sizes do not depend on which layers or heads they are.
    """
    keep = keep_of(recipe)
    if not keep.is_ranked:
        return Choice(keep.layers_of(teacher.num_hidden_layers))
    layers = replaced_layers(recipe, teacher)
    if not keep.is_heads:
        return Choice(tuple(layers[: keep.count(len(layers))]))
    heads = [(layer, head) for layer in layers for head in range(teacher.num_key_value_heads)]
    return Choice(heads=tuple(heads[: keep.count(len(heads))]))


def choice_by_ranking(
    recipe: Recipe, teacher: PreTrainedConfig, ranking: Sequence[HeadScore]
) -> Choice:
    """The layers or heads that come first in a ranking of all heads of a teacher."""
    keep = keep_of(recipe)
    layers = replaced_layers(recipe, teacher)
    scores = [score for score in ranking if score.layer in layers]
    if not keep.is_heads:
        return Choice(tuple(sorted(layers_by_heads(scores)[: keep.count(len(layers))])))
    best = scores[: keep.count(len(layers) * teacher.num_key_value_heads)]
    return Choice(heads=tuple((x.layer, x.head) for x in best), scores=tuple(scores))


def keep_of(recipe: Recipe) -> Keep:
    """What a resolved recipe keeps."""
    assert isinstance(recipe.keep, Keep)
    return recipe.keep


def replaced_layers(recipe: Recipe, teacher: PreTrainedConfig) -> list[int]:
    """The layers that are not as in the teacher if nothing is kept."""
    return changed_layers(chosen_student(recipe, Choice(), teacher), teacher)


def chosen_student(recipe: Recipe, choice: Choice, teacher: PreTrainedConfig) -> MemoryConfig:
    """The config of the student that a resolved recipe and a choice describe.

    Raises:
        ValueError: if an option is not supported, or the student's layers cannot keep heads.
    """
    to = str(recipe.to)
    options = {**recipe.options}
    if choice.kept_tokens:
        options["num_kept_tokens"] = [list(numbers) for numbers in choice.kept_tokens]
    if not keep_of(recipe).is_heads:
        return student_config(teacher, to, choice.layers, options)
    heads = by_layer(choice.heads, teacher.num_hidden_layers)
    try:
        return student_config(teacher, to, (), {**options, "full_attention_heads": heads})
    except ValueError as error:
        # a fault of the options is reported as such
        student_config(teacher, to, (), options)
        given = str(recipe.keep)
        raise ValueError(
            f"keep must be layers for a student of this kind, got {given!r}: {error}"
        ) from error
