"""Needles in a haystack: whether a model finds a number that occurs once in a long text, by depth and length.

The first tasks of RULER (https://arxiv.org/abs/2404.06654), with their words and a haystack of the user's text, and the
passkey of landmark attention (https://arxiv.org/abs/2305.16300). They are read as plain text, without a chat template.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_memory.evaluation.estimates import Estimate, Share
from hf_memory.evaluation.writing import greedy
from hf_memory.files.text import Text, start_of
from hf_memory.modeling.any_model import in_eval_mode

ADJECTIVES = (
    "quiet",
    "golden",
    "broken",
    "ancient",
    "hollow",
    "gentle",
    "distant",
    "frozen",
    "crooked",
    "humble",
)
NOUNS = (
    "river",
    "lantern",
    "orchard",
    "falcon",
    "harbor",
    "violin",
    "meadow",
    "compass",
    "anchor",
    "garden",
)
KEYS = [" ".join(pair) for pair in product(ADJECTIVES, NOUNS)]
ROOM = 16  # tokens that an answer may have in addition to the number
RIGHT = "digits right"


class Hunt(NamedTuple):
    """A kind of needle.

    Args:
        opening: the beginning of the prompt.
        needle: template of the hidden sentence, with a key and its number.
        question: template of the question about one key, up to where the number follows.
        digits: number of digits of a number.
        keys: number of needles, one of which is asked for.
        hay: filler sentence that is repeated around the needles; None: the user's text.
    """

    opening: str
    needle: str
    question: str
    digits: int = 7
    keys: int = 1
    hay: str | None = None


SINGLE = Hunt(
    "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "number afterwards.\n",
    "One of the special magic numbers for {key} is: {number}.",
    "What is the special magic number for {key} mentioned in the provided text? The special magic number for {key} "
    "mentioned in the provided text is",
)
MULTIKEY = SINGLE._replace(opening=SINGLE.opening.replace("A special", "Some special", 1), keys=4)
PASSKEY = Hunt(
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. I will quiz you about "
    "the important information there.\n",
    "The pass key is {number}. Remember it. {number} is the pass key.",
    "What is the pass key? The pass key is",
    digits=5,
    hay="The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. ",
)


class Words(NamedTuple):
    """The parts of a prompt except the filler text, in tokens."""

    opening: list[int]
    needles: list[list[int]]  # first the one that is asked for
    question: list[int]
    answer: list[int]  # the expected answer
    number: str

    @property
    def length(self) -> int:
        """Number of tokens of all parts."""
        return sum(map(len, (self.opening, *self.needles, self.question, self.answer)))


Sample = tuple[list[int], Words]  # a prompt with hidden needles, and its parts


def samples_of(
    tokenizer, tokens: Text | Tensor, kind: Hunt, length: int, *, count: int, seed: int = 0
) -> Iterator[Sample]:
    """Needles hidden in parts of a text, at depths that are evenly spread from the beginning of a part to its end.

    Args:
        tokenizer: a model's tokenizer.
        tokens: a text to hide them in.
        kind: the kind of needle.
        length: tokens of a prompt and of its answer together.
        count: number of samples.
        seed: seed for keys, numbers, and the parts of the text.
    """
    hay = Text.of(tokens).tokens
    for i, depth in enumerate(torch.linspace(0, 1, count).tolist()):
        yield hide(tokenizer, hay, kind, length, depth, random.Random(f"{seed} {length} {i}"))


@in_eval_mode
@torch.no_grad()
def hunt(
    model: PreTrainedModel,
    tokenizer,
    samples: Iterable[Sample],
    progress: Callable[[int], object] = lambda tokens: None,
) -> dict[str, Estimate]:
    """Ask for hidden needles.

    Args:
        model: a causal language model.
        tokenizer: the model's tokenizer.
        samples: prompts with needles.
        progress: is called with the number of tokens of each prompt.

    Returns:
        found: how often the number is in the generated text; digits right: the fraction of the number's tokens that are
        the most likely ones after the tokens before them; log-probability: of these tokens, in nats per token. A small
        model may know the number, but generate something else first.
    """
    found = []
    for prompt, words in samples:
        answer = words.answer
        read = torch.tensor([prompt + answer], device=model.device)
        logits = (
            model(read, use_cache=False, logits_to_keep=len(answer) + 1)
            .logits[0, -len(answer) - 1 : -1]
            .float()
        )
        expected = read[0, -len(answer) :]
        losses = F.cross_entropy(logits, expected, reduction="none")
        right = logits.argmax(-1) == expected
        digits = [any(x.isdigit() for x in tokenizer.decode([token])) for token in answer]
        written = bool(right.all())  # then greedy decoding gives it
        if not written:
            (after,) = greedy(model, tokenizer, [prompt], len(answer) + ROOM)
            written = words.number in after
        found.append(
            (float(written), right[digits].double().mean().item(), -losses[digits].mean().item())
        )
        progress(len(prompt))
    whole, shares, likely = zip(*found)
    return {"found": Share(whole), RIGHT: Share(shares), "log-probability": Estimate(likely)}


def shortest(tokenizer, kind: Hunt) -> int:
    """Number of tokens of a prompt of which half is filler text."""
    return 2 * _words(tokenizer, kind, random.Random(0)).length


def hide(
    tokenizer, tokens: Tensor, kind: Hunt, length: int, depth: float, dice: random.Random
) -> Sample:
    """Make a sample with the needle at a depth; other needles are at random places.

    Raises:
        ValueError: if needles and question do not fit.
    """
    words = _words(tokenizer, kind, dice)
    room = length - words.length - ROOM
    if room < 0:
        raise ValueError(
            f"length must be at least {length - room} tokens for these needles, got {length}"
        )
    if kind.hay:
        hay = _ids(tokenizer, kind.hay * room)[:room]
    else:  # a part of the text, which is continued at its beginning
        hay = tokens[(dice.randrange(len(tokens)) + torch.arange(room)) % len(tokens)].tolist()
    places = [round(depth * room), *(dice.randint(0, room) for _ in words.needles[1:])]
    for place, needle in sorted(zip(places, words.needles), reverse=True):
        hay[place:place] = needle
    return [*words.opening, *hay, *words.question], words


def _words(tokenizer, kind: Hunt, dice: random.Random) -> Words:
    keys = dice.sample(KEYS, kind.keys)
    first = 10 ** (kind.digits - 1)
    numbers = list(map(str, dice.sample(range(first, 10 * first), kind.keys)))
    needles = [
        f"\n{kind.needle.format(key=key, number=number)}\n" for key, number in zip(keys, numbers)
    ]
    asked = "\n" + kind.question.format(key=keys[0])
    question = _ids(tokenizer, asked)
    answer = _ids(tokenizer, f"{asked} {numbers[0]}")[len(question) :]
    opening = [*start_of(tokenizer), *_ids(tokenizer, kind.opening)]
    return Words(
        opening, [_ids(tokenizer, needle) for needle in needles], question, answer, numbers[0]
    )


def _ids(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]
