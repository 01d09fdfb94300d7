"""Which layers or heads keep their attention, and how many older tokens, by words or by a ranking; and the config.

`choosing` makes rankings, which need the teacher's weights; nothing here does.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

from transformers import PreTrainedConfig

from hf_memory.conversion.keep import Keep
from hf_memory.conversion.recipe import Recipe
from hf_memory.conversion.students import changed_layers, student_config, usual_window
from hf_memory.conversion.students.heads import HeadScore, by_layer, layers_by_heads
from hf_memory.modeling.configuration import MemoryConfig

Head = tuple[int, int]  # a layer, and the number of a key-value head in it


@dataclass(frozen=True)
class Choice:
    """What of a teacher keeps its attention, once it is decided.

    Attributes:
        layers: numbers of the layers that keep it, in order.
        heads: the layers and numbers of the key-value heads that keep it in other layers.
        scores: scores of all heads that could keep it, the best first; empty if none were ranked.
        kept_tokens: older tokens that each layer keeps; None if that is one number for all layers.
        keep: the share of the heads that a goal has decided; None without a goal.
        options: the student's options that a goal has decided, in place of the recipe's; None without a goal.
        tried: the students that were measured for a goal, the chosen one last; none in a run that is resumed.
    """

    layers: tuple[int, ...] = ()
    heads: tuple[Head, ...] = ()
    scores: tuple[HeadScore, ...] = ()
    kept_tokens: tuple[int, ...] | None = None
    keep: Keep | None = None
    options: Mapping[str, Any] | None = None
    tried: "tuple[Tried, ...]" = field(default=(), compare=False)

    def applied_to(self, recipe: Recipe) -> Recipe:
        """The recipe with what a goal has decided in place of the goal; the same recipe if there was no goal.

        Raises:
            ValueError: if the recipe has a goal that this choice does not meet.
        """
        if self.keep is None or self.options is None:
            if recipe.goal is not None:
                wanted = f"choice must be one for the goal {recipe.goal:g}"
                raise ValueError(f"{wanted}, got one without a goal")
            return recipe
        return replace(recipe, keep=self.keep, options=self.options, goal=None)

    def to_json(self) -> dict[str, Any]:
        """The choice without the students that were tried, as JSON types."""
        return {
            "layers": self.layers,
            "heads": self.heads,
            "scores": self.scores,
            "kept_tokens": self.kept_tokens,
            "keep": None if self.keep is None else str(self.keep),
            "options": None if self.options is None else dict(self.options),
        }

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Self:
        """The choice whose `to_json` has these values."""
        kept_tokens = values["kept_tokens"]
        keep = values["keep"]
        return cls(
            layers=tuple(values["layers"]),
            heads=tuple((layer, head) for layer, head in values["heads"]),
            scores=tuple(HeadScore(*row) for row in values["scores"]),
            kept_tokens=None if kept_tokens is None else tuple(kept_tokens),
            keep=None if keep is None else Keep.parse(keep),
            options=values["options"],
        )


class Tried(NamedTuple):
    """An untrained student that was measured for a goal.

    Attributes:
        recipe: its recipe.
        cache: bytes of its cache relative to its teacher's in 16 bits, from 0 to 1.
        kl: KL divergence from its teacher, in nats per token.
        choice: its heads.
    """

    recipe: Recipe
    cache: float
    kl: float
    choice: Choice


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
    """What a recipe keeps, which `Recipe.fitting` has decided."""
    assert isinstance(recipe.keep, Keep)
    return recipe.keep


def replaced_layers(recipe: Recipe, teacher: PreTrainedConfig) -> list[int]:
    """The layers that are not as in the teacher if nothing is kept."""
    return changed_layers(chosen_student(recipe, Choice(), teacher), teacher)


def chosen_student(recipe: Recipe, choice: Choice, teacher: PreTrainedConfig) -> MemoryConfig:
    """The config of the student that a recipe and a choice describe.

    Raises:
        ValueError: if an option is not supported, or the student's layers cannot keep heads.
    """
    to = str(recipe.to)
    if keep_of(recipe).is_heads:
        student = _with_heads(recipe, teacher, choice.heads)
    else:
        student = student_config(teacher, to, choice.layers, recipe.options)
    if choice.kept_tokens is not None:
        student.num_kept_tokens = list(choice.kept_tokens)  # type: ignore[attr-defined]
    return student


def _with_heads(recipe: Recipe, teacher: PreTrainedConfig, heads: Iterable[Head]) -> MemoryConfig:
    """A student's config whose layers keep these heads, and a window in the others."""
    to = str(recipe.to)
    options = {**usual_window(teacher, to, recipe.options), **recipe.options}
    options["full_attention_heads"] = by_layer(heads, teacher.num_hidden_layers)
    try:
        return student_config(teacher, to, (), options)
    except ValueError as error:
        student_config(
            teacher, to, (), recipe.options
        )  # a fault of the options is reported as such
        given = str(recipe.keep)
        raise ValueError(
            f"keep must be layers for a student of this kind, got {given!r}: {error}"
        ) from error
