"""Questions whose answers can be checked, made by a random generator: no data is needed, and no network.

To add a kind of question, write a function of a random generator and of a number of filler sentences that returns a
`Question`, and add it to one of the groups at the end of this file. Needles and chains of variables are those of RULER
(https://arxiv.org/abs/2404.06654), in a haystack of made sentences.
"""

import json
import re
from collections.abc import Callable
from difflib import SequenceMatcher
from functools import partial
from random import Random
from typing import NamedTuple

from hf_memory.evaluation.needles import ADJECTIVES, KEYS, NOUNS, SINGLE

NAMES = (
    "Anna",
    "Peter",
    "Maria",
    "Thomas",
    "Laura",
    "Daniel",
    "Emma",
    "Martin",
    "Julia",
    "Simon",
    "Clara",
    "Victor",
)
COLORS = ("red", "blue", "green", "yellow", "purple", "orange", "black", "white", "brown", "pink")
CITIES = (
    "Paris",
    "London",
    "Rome",
    "Madrid",
    "Berlin",
    "Vienna",
    "Oslo",
    "Lisbon",
    "Athens",
    "Dublin",
)
PETS = ("dog", "cat", "horse", "rabbit", "parrot", "turtle", "hamster", "goat")
JOBS = (
    "doctor",
    "teacher",
    "farmer",
    "lawyer",
    "painter",
    "baker",
    "pilot",
    "nurse",
    "singer",
    "driver",
)
VERBS = (
    "saw",
    "found",
    "passed",
    "followed",
    "remembered",
    "carried",
    "painted",
    "crossed",
    "left",
    "admired",
)
THINGS = {
    "animals": ("dog", "cat", "horse", "cow", "lion"),
    "fruits": ("apple", "banana", "orange", "pear", "grape"),
    "colors": COLORS,
    "cities": CITIES,
    "jobs": JOBS,
    "vegetables": ("carrot", "potato", "onion", "tomato", "spinach"),
    "countries": ("France", "Spain", "Japan", "Brazil", "Canada"),
    "sports": ("football", "tennis", "swimming", "rowing", "boxing"),
    "drinks": ("water", "tea", "coffee", "milk", "juice"),
    "tools": ("hammer", "saw", "drill", "wrench", "axe"),
}
FACTS = {
    "capital of": "France Paris, Italy Rome, Spain Madrid, Germany Berlin, England London, Japan Tokyo, "
    "Russia Moscow, China Beijing, Egypt Cairo, Greece Athens, Portugal Lisbon, Austria Vienna, Norway Oslo, "
    "Sweden Stockholm, Ireland Dublin, Canada Ottawa, Cuba Havana, Poland Warsaw",
    "opposite of": "hot cold, big small, up down, left right, day night, good bad, old new, open closed, "
    "black white, rich poor, fast slow, high low, wet dry, first last, early late, happy sad, love hate, war peace",
    "day after": "Monday Tuesday, Tuesday Wednesday, Wednesday Thursday, Thursday Friday, Friday Saturday, "
    "Saturday Sunday, Sunday Monday",
    "month after": "January February, February March, March April, April May, May June, June July, "
    "July August, August September, September October, October November, November December",
    "plural of": "dog dogs, mouse mice, child children, foot feet, man men, tooth teeth, box boxes, "
    "city cities, leaf leaves, bird birds, knife knives, woman women",
    "past tense of": "go went, see saw, run ran, eat ate, give gave, take took, write wrote, come came, "
    "find found, make made, sing sang, buy bought",
}
Scorer = Callable[[str], float]  # the score of an answer, from 0 to 1


class Question(NamedTuple):
    """A question with a right answer.

    Attributes:
        asked: the question.
        answer: a right answer, which gets the score 1; examples show it.
        score: gives the score of any answer, from 0 to 1.
        before: turns of a conversation before the question: one of the user, one of the model, and so on.
        begun: the beginning of the answer, which the model is given.
    """

    asked: str
    answer: str
    score: Scorer
    before: tuple[str, ...] = ()
    begun: str = ""


class Kind(NamedTuple):
    """A kind of question.

    Attributes:
        make: makes a question, with so many filler sentences if it has any.
        shots: questions of the same kind that are shown with their answers first.
        new_tokens: largest number of tokens of an answer.
        chance: expected score of an answer that ignores what must be found.
        has_length: whether filler sentences bring the prompt to a length.
    """

    make: Callable[[Random, int], Question]
    shots: int = 3
    new_tokens: int = 32
    chance: float = 0.0
    has_length: bool = False


def says(expected: str) -> Scorer:
    """Score 1 if a word is in a first sentence of at most three words, whatever its case; else 0."""

    def score(text: str) -> float:
        words = _words(re.split(r"[.\n]", text.strip())[0])
        return float(expected.lower() in words and len(words) <= 3)

    return score


def alike(expected: list[str], split: Callable[[str], list[str]]) -> Scorer:
    """Score by the parts (words, lines) of an answer that stand in the same order in both, 2 M / T of difflib."""
    return lambda text: SequenceMatcher(None, split(text), expected, autojunk=False).ratio()


def same_set(expected: list[str], pattern: str) -> Scorer:
    """The F1 score of what matches a pattern in the answer."""

    def score(text: str) -> float:
        given = set(re.findall(pattern, text))
        return 2 * len(given & set(expected)) / (len(given) + len(expected))

    return score


def same_fields(expected: dict) -> Scorer:
    """The share of right fields of an answer in JSON; 0 for other text, and for other fields."""

    def score(text: str) -> float:
        try:
            given = json.loads(text)
        except ValueError:
            return 0.0
        if not isinstance(given, dict) or set(given) != set(expected):
            return 0.0
        return sum(given[key] == value for key, value in expected.items()) / len(expected)

    return score


def so_many(number: int) -> Scorer:
    """Score 1 for so many different things of one or two words with commas between them; else 0."""

    def score(text: str) -> float:
        things = [_words(part) for part in text.rstrip(". ").split(",")]
        return float(
            len(things) == len(set(map(tuple, things))) == number
            and all(1 <= len(x) <= 2 for x in things)
        )

    return score


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _copying(dice: Random, room: int) -> Question:
    words = dice.sample(NOUNS + COLORS + PETS, 6)
    return Question(
        f"Repeat these words: {' '.join(words)}", " ".join(words), alike(words, str.split)
    )


def _capitals(dice: Random, room: int) -> Question:
    words = dice.sample(NAMES + CITIES, 3)
    shouted = [word.upper() for word in words]
    return Question(
        f"Write in capital letters: {' '.join(words)}", " ".join(shouted), alike(shouted, str.split)
    )


def _numbering(dice: Random, room: int) -> Question:
    things = dice.sample(THINGS[dice.choice(list(THINGS))], 4)
    rows = [f"{i}. {thing}" for i, thing in enumerate(things, 1)]
    return Question(
        f"Write as a numbered list: {', '.join(things)}", "\n".join(rows), alike(rows, _lines)
    )


def _json(dice: Random, room: int) -> Question:
    fields = {"name": dice.choice(NAMES), "age": dice.randint(20, 79), "city": dice.choice(CITIES)}
    said = "{name} is {age} years old and lives in {city}.".format(**fields)
    return Question(
        f"Write as JSON with the keys name, age and city: {said}",
        json.dumps(fields),
        same_fields(fields),
    )


def _items(dice: Random, room: int) -> Question:
    kind = dice.choice(list(THINGS))
    return Question(f"Name three {kind}.", ", ".join(dice.sample(THINGS[kind], 3)), so_many(3))


def _facts(dice: Random, room: int) -> Question:
    what, pairs = dice.choice(list(FACTS.items()))
    about, answer = dice.choice(pairs.split(", ")).split()
    what = f"{what} {about}"
    return Question(f"What is the {what}?", f" {answer}.", says(answer), begun=f"The {what} is")


def filler(dice: Random) -> str:
    """A sentence that says nothing of importance."""
    adjective = dice.choice(ADJECTIVES)
    verb = dice.choice(VERBS)
    one, other = dice.sample(JOBS, 2)
    return f"The {adjective} {one} {verb} the {other} near the {dice.choice(NOUNS)}."


def _hidden(dice: Random, sentences: list[str], room: int) -> str:
    """Sentences in their order at random places of a text of filler sentences."""
    text = [filler(dice) for _ in range(room)]
    for place, sentence in zip(
        sorted(dice.choices(range(room + 1), k=len(sentences)), reverse=True), sentences[::-1]
    ):
        text.insert(place, sentence)
    return " ".join(text)


def _needle(dice: Random, room: int, keys: int = 1, values: int = 1) -> Question:
    """Numbers of keys, of which those of one key are asked for."""
    asked, *others = dice.sample(KEYS, keys)
    numbers = list(map(str, dice.sample(range(1000, 10000), keys * values)))
    pairs = [
        (key, number)
        for i, key in enumerate([asked, *others])
        for number in numbers[i * values :][:values]
    ]
    said = [
        SINGLE.needle.format(key=key, number=number)
        for key, number in dice.sample(pairs, len(pairs))
    ]
    verb, what = (
        ("is", "special magic number")
        if values == 1
        else ("are", f"{values} special magic numbers")
    )
    return Question(
        f"{_hidden(dice, said, room)}\nWhat {verb} the {what} for {asked} mentioned in the text?",
        f" {', '.join(numbers[:values])}",
        same_set(numbers[:values], r"\d+"),
        begun=f"The {what} for {asked} mentioned in the text {verb}",
    )


def _variables(dice: Random, room: int, hops: int = 1) -> Question:
    """A chain of variables, each of which gets the value of the one before it."""
    names = dice.sample(
        [f"{a}{b}" for a in "ABCDEFGHKMNPRSTUVWXYZ" for b in "ABCDEFGHKMNPRSTUVWXYZ"], hops + 1
    )
    value = str(dice.randrange(1000, 10000))
    said = [f"VAR {a} = {b}." for a, b in zip(names, [value, *(f"VAR {name}" for name in names)])]
    return Question(
        f"{_hidden(dice, said, room)}\nWhich variables have the value {value}?",
        f" {', '.join(names)}",
        same_set(names, r"\b[A-Z]{2}\b"),
        begun=f"The {len(names)} variables with the value {value} are",
    )


def _list(dice: Random, room: int, number: int = 20) -> Question:
    """A list before a long text, which is to be written down after it."""
    first, *others = dice.sample(NAMES + CITIES + COLORS + PETS, number)
    said = ", ".join([first, *others])
    return Question(
        f"The list: {said}.\n{_hidden(dice, [], room)}\nWrite down the list.",
        f", {', '.join(others)}.",
        alike([word.lower() for word in others], _words),
        begun=f"The list: {first}",
    )


def _first_turn(dice: Random, room: int) -> Question:
    """A conversation in which the last question is about the first turn."""
    about, values = dice.choice(
        [("name", NAMES), ("home town", CITIES), ("pet", [f"a {pet}" for pet in PETS])]
    )
    answer = dice.choice(values)
    before = [
        f"My {about} is {answer}. Please remember it.",
        f"I will remember that your {about} is {answer}.",
    ]
    for first in range(0, room, 8):
        text = " ".join(filler(dice) for _ in range(min(8, room - first)))
        before += [f"Tell me part {first // 8 + 1} of a story.", text]
    asked = f"What is my {about}?"
    return Question(
        asked, f" {answer}.", says(answer.split()[-1]), tuple(before), begun=f"Your {about} is"
    )


def _of_gym(dice: Random, room: int, name: str, **options) -> Question:
    """A question of a generator of reasoning-gym (Apache-2.0), which scores its answers itself."""
    try:
        from reasoning_gym import create_dataset
    except ImportError as error:
        raise ValueError("reasoning needs reasoning-gym: pip install reasoning-gym") from error
    made = create_dataset(name, size=1, seed=dice.randrange(2**31), **options)
    entry = made[0]
    return Question(
        entry["question"], entry["answer"], lambda text: made.score_answer(text.strip(), entry)
    )


LONG: dict = {"shots": 1, "has_length": True}
INSTRUCTIONS = {
    "copying": Kind(_copying),
    "capitals": Kind(_capitals),
    "numbering": Kind(_numbering, new_tokens=48),
    "json": Kind(_json, new_tokens=48),
    "items": Kind(_items),
    "facts": Kind(_facts, shots=5, new_tokens=12),
}
RETRIEVAL = {
    "needle": Kind(_needle, new_tokens=24, **LONG),
    "needle of 4 keys": Kind(partial(_needle, keys=4), new_tokens=24, chance=1 / 4, **LONG),
    "2 values": Kind(partial(_needle, values=2), new_tokens=24, **LONG),
    "variables": Kind(_variables, new_tokens=16, **LONG),
}
LONG_ANSWERS = {"list": Kind(_list, shots=0, new_tokens=80, has_length=True)}
TURNS = {"first turn": Kind(_first_turn, shots=0, new_tokens=12, chance=1 / 10, has_length=True)}
REASONING = {
    "chain_sum": Kind(
        partial(_of_gym, name="chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    ),
    "number_sorting": Kind(partial(_of_gym, name="number_sorting", min_numbers=3, max_numbers=4)),
}
