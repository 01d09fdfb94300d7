"""Conversations in which an answer stands far back in the text: practice for students, beside prose.

    python examples/practice.py prose.txt practice.jsonl            # 800 conversations
    hf-memory convert TEACHER --text prose.txt=0.6 --text practice.jsonl=0.4 --output student

Prose is short of what a student with windows loses first: looking up a number, following a chain of names, repeating a
list, remembering what was said at the beginning. Here facts of made words are spread over paragraphs of a text, and the
last turns ask for them. No model writes the answers, and distillation needs none that are right: it learns what the
teacher expects where the past matters. Words and sentences are other ones than those of `hf-memory evaluate`.
"""

import json
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from random import Random

CONVERSATIONS = 800
LONGEST = 12  # number of paragraphs in a conversation
SYLLABLES = (
    "ba",
    "den",
    "fi",
    "gor",
    "ka",
    "lem",
    "mi",
    "nor",
    "pa",
    "ril",
    "sa",
    "tun",
    "ve",
    "zo",
)
Turns = list[tuple[str, str]]  # of the user and of the model


def words(dice: Random, number: int) -> list[str]:
    """Different made words."""
    found: dict[str, None] = {}
    while len(found) < number:
        found["".join(dice.choices(SYLLABLES, k=dice.randint(2, 3)))] = None
    return list(found)


def spread(dice: Random, sentences: list[str], paragraphs: list[str]) -> str:
    """A text of paragraphs with sentences between them, in their order."""
    places = sorted(dice.choices(range(len(paragraphs) + 1), k=len(sentences)))
    parts = [
        [sentence for at, sentence in zip(places, sentences) if at == i]
        for i in range(len(paragraphs) + 1)
    ]
    return "\n".join(chain(*(chain(said, paragraphs[i : i + 1]) for i, said in enumerate(parts))))


def lookups(dice: Random, paragraphs: list[str]) -> Turns:
    """Prices in a text, and questions about them."""
    prices = [
        f"The price of one {word} is {dice.randint(100, 99999)} crowns." for word in words(dice, 6)
    ]
    first, *others = [
        (f"How much is one {price.split()[4]}?", price) for price in dice.sample(prices, 4)
    ]
    return [(f"{spread(dice, prices, paragraphs)}\n\n{first[0]}", first[1]), *others]


def values(dice: Random, paragraphs: list[str]) -> Turns:
    """Names of which a text has two numbers each, in different places."""
    numbers = {
        f"The {word.capitalize()}": dice.sample(range(100, 99999), 2) for word in words(dice, 4)
    }
    said = [(name, number) for name, both in numbers.items() for number in both]
    dice.shuffle(said)
    sentences = [f"{name} carried {number} barrels." for name, number in said]
    asked = [
        (
            f"How many barrels did {name} carry each time?",
            " and ".join(str(n) for who, n in said if who == name) + ".",
        )
        for name in dice.sample(list(numbers), 3)
    ]
    (first, answer), *others = asked
    return [(f"{spread(dice, sentences, paragraphs)}\n\n{first}", answer), *others]


def chains(dice: Random, paragraphs: list[str]) -> Turns:
    """Numbers that have names, and names that have names; first a short example."""
    names = words(dice, 9)
    said = []
    asked = []
    for group in (names[:3], names[3:6], names[6:]):
        number = dice.randint(100, 99999)
        said.append([f"Let {name} be {of}." for name, of in zip(group, [str(number), *group])])
        asked.append(
            (f"What stands for {number}?", f"{number} is {', '.join(group[:-1])} and {group[-1]}.")
        )
    (question, shown), *others = asked
    order = dice.sample([1, 1, 1, 2, 2, 2], 6)
    example = " ".join(said[0])
    text = spread(dice, [said[i].pop(0) for i in order], paragraphs)
    (first, answer), *others = dice.sample(others, 2)
    return [(f"{example}\n\n{question}", shown), (f"{text}\n\n{first}", answer), *others]


def lists(dice: Random, paragraphs: list[str]) -> Turns:
    """A list before a text."""
    listed = ", ".join(words(dice, dice.randint(8, 20)))
    text = "\n".join(paragraphs)
    return [
        (
            f"I need to buy: {listed}.\n{text}\n\nWhat do I need to buy?",
            f"You need to buy: {listed}.",
        )
    ]


def told(dice: Random, paragraphs: list[str]) -> Turns:
    """Something that was said first, and is asked for after other turns."""
    place, animal = (word.capitalize() for word in words(dice, 2))
    facts = [
        ("Where was I born?", f"in {place}", "was born"),
        ("Who is my friend?", animal, "have a friend called"),
    ]
    question, answer, verb = dice.choice(facts)
    read = [(f"Read paragraph {i}.", paragraph) for i, paragraph in enumerate(paragraphs, 1)]
    full = f"{verb} {answer}"
    you = full.replace("was", "were", 1) if verb.startswith("was") else full
    return [(f"I {full}.", f"Good to know that you {you}."), *read, (question, f"You {you}.")]


KINDS: tuple[Callable[[Random, list[str]], Turns], ...] = (
    lookups,
    values,
    chains,
    chains,
    lists,
    told,
)


def conversation(dice: Random, prose: list[str]) -> list[dict[str, str]]:
    """Messages of a conversation over 3 to LONGEST paragraphs."""
    number = dice.randint(3, LONGEST)
    start = dice.randrange(len(prose) - number)
    turns = dice.choice(KINDS)(dice, prose[start : start + number])
    return [
        {"role": role, "content": said}
        for turn in turns
        for role, said in zip(("user", "assistant"), turn)
    ]


def main(text: str, output: str) -> None:
    """Write the conversations."""
    dice = Random(0)
    paragraphs = [x for x in Path(text).read_text(encoding="utf-8").split("\n\n") if len(x) < 800]
    if len(paragraphs) <= LONGEST:
        sys.exit(
            f"{text} must have more than {LONGEST} paragraphs of less than 800 characters, got {len(paragraphs)}"
        )
    rows = [json.dumps({"messages": conversation(dice, paragraphs)}) for _ in range(CONVERSATIONS)]
    Path(output).write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
