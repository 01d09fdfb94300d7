"""What to spend the bytes of a cache on: full heads, kept tokens or bits; untrained students of SmolLM2-135M.

    python benchmarks/cache_bits.py                # half an hour of one core; goes on where it was stopped
    python benchmarks/cache_bits.py NAME=FOLDER    # a trained student in a folder, in a row of this name
    python benchmarks/cache_bits.py --kept         # which tokens stay: policies, and numbers by head
    python benchmarks/cache_bits.py --teacher gemma3 NAME=FOLDER  # a student of Gemma 3 270M

Students are that of recipes/smollm2.yaml before training, with other numbers of full heads and kept tokens, and other
bits. Two rows of held-out text are read, in which passages come twice (`row_of`). KL is from the teacher in 16 bits,
recall is the part of the teacher's gain on the second reading, and bytes of the cache are relative to the teacher's in
16 bits. Downloads what `make smollm2` does. Writes benchmarks/results/cache_bits.json.

`--kept` compares which tokens stay in students of recipes/smollm2-small.yaml, before training, all with as many bytes:
KL on two other rows of held-out text, and on the tokens of right answers to questions about texts of 2,048 tokens. The
text that chooses numbers by head is another one, and has no questions. Writes benchmarks/results/kept_tokens.json.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported

import torch
import yaml
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_memory.conversion import carry_over, load_teacher, load_tokenizer, make_student
from hf_memory.conversion.students.kept_tokens import kept_by_head
from hf_memory.evaluation import cache_share
from hf_memory.evaluation.scores import KINDS, Place, ask
from hf_memory.mixers.pasts.policy import POLICIES, register_eviction
from hf_memory.ops.kv_eviction.policies import DECAY, Block, EvictionPolicy

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
RESULT = RESULTS / "cache_bits.json"
ROWS = 2
HELD_OUT = 900_000  # characters at the end of the text, which no recipe learns
CACHE_AT = 8192
PASSAGE = 256  # tokens that are read twice
AGAIN = {512: (256, 768), 2048: (512, 2560)}  # tokens between two readings, and where both begin
LENGTH = 2816  # tokens of a row
KEPT = (  # older tokens of each layer that a search by layer found with 174 for each head and 16 bits
    *(174, 174, 174, 174, 44, 174, 174, 435, 174, 174, 44, 44, 44, 44, 174),
    *(435, 44, 175, 44, 342, 435, 435, 174, 435, 435, 44, 174, 44, 44, 44),
)
PLAIN = {"kl_1024": slice(0, 768), "kl_2048": slice(1024, 2048)}  # tokens that are read once
KEPT_RESULT = RESULTS / "kept_tokens.json"
KEPT_LENGTH = 2048  # tokens of a row of prose, and of the text of a question
PROSE = {"kl_1024": slice(256, 1024), "kl_2048": slice(1024, 2048)}
QUESTIONS = 3  # of each kind
ASKED = {"2 values": "retrieval", "list": "long_answers", "needle of 4 keys": "retrieval"}
LEARNT_OF = 1_500_000  # characters at the beginning of the text, which choose numbers by head
CHOSEN_AT = (
    360  # tokens in the mean at which they are chosen; with another mean they are in proportion
)


class Student(NamedTuple):
    """A student: how many heads are full, what times KEPT tokens the others keep, and bits of both."""

    heads: int = 8
    times: float = 1
    full_bits: int | None = 4
    bits: int | None = 8
    reach: int | None = None  # tokens that full heads see; None: all
    window: int = 64  # tokens that the others see besides
    alike: int | None = None  # tokens that all layers keep in place of KEPT

    @property
    def name(self) -> str:
        """Of its row."""
        see = f"{self.heads} full heads" + (f" of {self.reach} tokens" if self.reach else "")
        kept = f"{self.alike} kept tokens alike" if self.alike else f"{self.times} x kept tokens"
        others = f"{kept}, window {self.window}, in {self.bits or 16}"
        return f"{see} in {self.full_bits or 16} bits, {others}"


STUDENTS = (
    Student(8, 0.9),  # 4.5 %
    Student(8, 4.8),  # 9 %
    Student(12, 3.9),
    Student(16, 2.8),
    Student(8, 2.9, 8),
    Student(4, 2),  # 4.5 %
    Student(6, 1.45),
    Student(8, 0.75, reach=2560, window=32),  # 2 %
    Student(4, 1, reach=2560, window=32),
    Student(8, 2.2),  # 6 %
    Student(12, 1),
    Student(6, 3.8, 8),  # 9 %
    Student(8, 5.5, 8),  # 12 %
    Student(16, 5.8),
    Student(8, 1, None, None),
    Student(full_bits=8, alike=371),  # the default
    Student(full_bits=None, bits=None, alike=172),  # the same bytes in 16 bits
    Student(8, 0.65, reach=2560, window=32),
)
TEACHERS = (8, 4)
CHOSEN = (Student(8, 2.9, 8), Student(8, 0.9), Student(8, 0.65, reach=2560, window=32))
LONG = 8192
ENDS = (1024, 2048, 4096, 8192)  # places at which means over a long text end
SLICE = 512  # tokens whose predictions are in memory at once


def row_of(text: Tensor) -> Tensor:
    """A row [1, LENGTH] of a text [1, T] in which two passages are read again, after 512 and after 2,048 tokens."""
    row = text[:, :LENGTH].clone()
    for first, second in AGAIN.values():
        row[:, second : second + PASSAGE] = row[:, first : first + PASSAGE]
    return row


def predictions(model: PreTrainedModel, row: Tensor) -> Tensor:
    """Logarithms of the probabilities of the next token [T, V] after each token of a row [1, T]."""
    return model(row).logits[0].float().log_softmax(-1)


def gains(p: Tensor, row: Tensor) -> dict[int, float]:
    """By the tokens between: how many nats a token a passage gains on its second reading."""
    losses = -p[:-1].gather(-1, row[0, 1:, None])[:, 0]
    read = lambda start: losses[start : start + PASSAGE - 1].mean()  # noqa: E731
    return {gap: (read(first) - read(second)).item() for gap, (first, second) in AGAIN.items()}


def measured(
    expected: list[Tensor], model: PreTrainedModel, rows: list[Tensor]
) -> dict[str, float]:
    """KL from what a teacher predicts, in nats a token, and recall as a part of the teacher's; means over rows."""
    found: dict[str, list[float]] = {}
    for p, row in zip(expected, rows, strict=True):
        given = predictions(model, row)
        kl = (p.exp() * (p - given)).sum(-1)
        for name, part in PLAIN.items():
            found.setdefault(name, []).append(kl[part].mean().item())
        theirs = gains(p, row)
        for gap, gain in gains(given, row).items():
            found.setdefault(f"recall_{gap}", []).append(gain / theirs[gap])
    return {name: sum(x) / len(x) for name, x in found.items()}


def by_position(teacher: PreTrainedModel, model: PreTrainedModel, row: Tensor) -> dict[int, float]:
    """KL of the tokens of a row [1, LONG] up to each place of ENDS, from the place before it."""
    read = [x.model(row).last_hidden_state[0].split(SLICE) for x in (teacher, model)]
    parts = []
    for hidden in zip(*read, strict=True):
        p, given = (x.lm_head(y).log_softmax(-1) for x, y in zip((teacher, model), hidden))
        parts.append((p.exp() * (p - given)).sum(-1))
    kl = torch.cat(parts)
    return {end: kl[start:end].mean().item() for start, end in pairwise((0, *ENDS))}


class Keeping(NamedTuple):
    """How a student chooses the tokens that stay."""

    eviction: str
    mean: int  # tokens of each head
    by_head: bool = False
    decay: float = DECAY  # of what a token was worth, for each block of 16 tokens
    oldest: float | None = None  # tokens up to which it fades by age instead; see `Forgetting`

    @property
    def name(self) -> str:
        """Of its row."""
        how = "by head" if self.by_head else "of each head"
        return f"{self.eviction}, {self.mean} {how}{self.forgetting}"

    @property
    def forgetting(self) -> str:
        """How tokens are forgotten, if not as the package has it."""
        if self.oldest is not None:
            return f", by age up to {self.oldest}"
        return "" if self.decay == DECAY else f", decay {self.decay}"

    @property
    def policy(self) -> str:
        """The name of the policy, which is registered if it is not one of the package."""
        name = f"{self.eviction}{self.forgetting}"
        if self.forgetting:
            register_eviction(name, Forgetting(POLICIES[self.eviction], self.decay, self.oldest))
        return name


class Forgetting(NamedTuple):
    """An eviction policy of the package by which tokens are forgotten in another way.

    After a block of c tokens a part of what a token was worth is left: `decay`; or, up to an age of `oldest` tokens,
    (a / (a + c))^4 for a token that is a tokens old, so that old tokens are forgotten more slowly.
    """

    policy: EvictionPolicy
    decay: float
    oldest: float | None

    def __call__(self, block: Block) -> Tensor:
        """What its entries are worth."""
        left: float | Tensor = self.decay
        if self.oldest is not None:
            age = (block.number.amax(-1, keepdim=True) - block.number).clamp(max=self.oldest)
            left = (age / (age + block.queries.shape[3])) ** 4
        return self.policy(block) + (left - DECAY) * block.score


KEEPINGS = (
    Keeping("received_attention", 360),
    Keeping("change_of_output", 360),
    Keeping("random", 360),
    Keeping("change_of_output", 360, True),
    Keeping("change_of_output", 505),
    Keeping("change_of_output", 505, True),
    Keeping("change_of_output", 360, True, decay=0.95),
    Keeping("change_of_output", 360, True, decay=0.6),
    Keeping("change_of_output", 360, True, decay=0.4),
    Keeping("change_of_output", 360, True, decay=0.2),
    Keeping("change_of_output", 505, True, decay=0.4),
    Keeping("change_of_output", 360, True, oldest=600),
    Keeping("change_of_output", 360, True, oldest=math.inf),
)


class Asked(NamedTuple):
    """A text [1, T], and by the name of a figure the tokens whose predictions are compared."""

    tokens: Tensor
    places: dict[str, slice]


def options_of(student: Student) -> dict[str, Any]:
    """Its options: those of the recipe, whose heads are full first, and then those that predictions need."""
    options = yaml.safe_load((ROOT / "recipes" / "smollm2.yaml").read_text())["option"]
    chosen = {(i, h) for i, heads in enumerate(options["full_attention_heads"]) for h in heads}
    ranking = json.loads((RESULTS / "head_choice.json").read_text())["rankings"]["loss"]
    ranked = sorted(((i, h) for i, h, _ in ranking), key=lambda head: head not in chosen)
    full = sorted(ranked[: student.heads])
    layers = range(len(options["full_attention_heads"]))
    options["full_attention_heads"] = [[h for layer, h in full if layer == i] for i in layers]
    options["eviction"] = "received_attention"
    options["full_attention_window"] = student.reach
    options["sliding_window"] = student.window
    options["num_kept_tokens"] = [student.alike or round(student.times * x) for x in KEPT]
    bits = {"full_attention_heads": student.full_bits, "window": student.bits}
    options["cache_bits"] = {kind: x for kind, x in bits.items() if x} or None
    return options


def untrained(teacher: PreTrainedModel, student: Student) -> PreTrainedModel:
    """A student with the teacher's weights."""
    model = make_student(teacher, to="attention", keep="none", **options_of(student))
    carry_over(model, teacher)
    return model.eval()


def kept_options(keeping: Keeping) -> dict[str, Any]:
    """The options of a student with the same number in each head."""
    options = yaml.safe_load((ROOT / "recipes" / "smollm2-small.yaml").read_text())["option"]
    return options | {"num_kept_tokens": keeping.mean, "eviction": keeping.policy}


def numbers_by_head(
    teacher: PreTrainedModel, tokens: Tensor, keeping: Keeping, known: dict[str, Any]
) -> list[list[int]]:
    """How many tokens each head keeps, by a text [T], or in proportion to a row that is known."""
    first = keeping._replace(mean=CHOSEN_AT, decay=DECAY, oldest=None)
    if first.name in known:
        chosen = known[first.name]["num_kept_tokens"]
    else:
        options = kept_options(first)
        student = make_student(teacher, to="attention", keep="none", **options).config
        how: dict = {"length": KEPT_LENGTH, "report": lambda x: print(x, flush=True)}
        chosen = kept_by_head(teacher, tokens, student, **how)
    return [[round(keeping.mean / CHOSEN_AT * x) for x in heads] for heads in chosen]


def asked_of(tokenizer, text: Tensor) -> Iterator[Asked]:
    """Rows of a text [T], and questions with their right answers."""
    rows = text[-ROWS * KEPT_LENGTH :].split(KEPT_LENGTH)
    for row in rows:
        yield Asked(row[None], PROSE)
    for kind, group in ASKED.items():
        place = Place(kind, KEPT_LENGTH)
        for i in range(QUESTIONS):
            prompt, question = ask(tokenizer, KINDS[group][kind], place, f"0 {i}")
            answer = tokenizer(question.answer, add_special_tokens=False)["input_ids"]
            places = slice(len(prompt) - 1, len(prompt) + len(answer) - 1)
            yield Asked(torch.tensor([prompt + answer]), {kind: places})


def asked_predictions(model: PreTrainedModel, asked: Asked) -> dict[str, Tensor]:
    """Logarithms of the probabilities [n, V] that are compared, by figure."""
    hidden_states = model.model(asked.tokens).last_hidden_state[0]
    parts = {name: hidden_states[places] for name, places in asked.places.items()}
    return {name: model.lm_head(x).float().log_softmax(-1) for name, x in parts.items()}


def measured_kept(
    expected: list[dict[str, Tensor]], model: PreTrainedModel, asked: list[Asked]
) -> dict[str, list[float]]:
    """By figure: the KL from what a teacher predicts of each text, in nats a token."""
    found: dict[str, list[float]] = {}
    for theirs, text in zip(expected, asked, strict=True):
        for name, given in asked_predictions(model, text).items():
            p = theirs[name]
            kl = (p.exp() * (p - given)).sum(-1)
            found.setdefault(name, []).append(kl.mean().item())
    return found


def teacher_in_bits(teacher: PreTrainedModel, bits: int) -> PreTrainedModel:
    """The teacher as a model of ours whose layers all keep their attention."""
    layers = tuple(range(teacher.config.num_hidden_layers))
    same = make_student(teacher, to="attention", keep=layers)
    carry_over(same, teacher)
    same.config.cache_bits = bits
    return same.eval()


def models(teacher: PreTrainedModel) -> Iterator[tuple[str, Callable[[], PreTrainedModel]]]:
    """The name of each row, and what makes its model."""
    for bits in TEACHERS:
        yield f"teacher in {bits} bits", lambda bits=bits: teacher_in_bits(teacher, bits)
    for student in STUDENTS:
        yield student.name, lambda student=student: untrained(teacher, student)


def trained(asked: list[str]) -> Iterator[tuple[str, Callable[[], PreTrainedModel]]]:
    """The same for students in folders that are asked for."""
    load = AutoModelForCausalLM.from_pretrained
    for name, _, folder in (x.rpartition("=") for x in asked):
        yield name, lambda folder=folder: load(folder, dtype=torch.float32).eval()


@torch.no_grad()
def compare_kept(teacher: PreTrainedModel, tokenizer, text: str) -> None:
    """Measure which tokens stay, and write the table after each row."""
    read = lambda x: tokenizer(x, return_tensors="pt").input_ids[0]  # noqa: E731
    learnt = read(text[:LEARNT_OF])
    asked = [*asked_of(tokenizer, read(text[-HELD_OUT:]))]
    expected = [asked_predictions(teacher, x) for x in asked]
    known = json.loads(KEPT_RESULT.read_text())["rows"] if KEPT_RESULT.exists() else {}
    for keeping in KEEPINGS:
        if keeping.name in known:
            continue
        options = kept_options(keeping)
        if keeping.by_head:
            options["num_kept_tokens"] = numbers_by_head(teacher, learnt, keeping, known)
        model = make_student(teacher, to="attention", keep="none", **options)
        carry_over(model, teacher)
        found = measured_kept(expected, model.eval(), asked)
        known[keeping.name] = {
            "part_of_cache": cache_share(model.config, teacher.config, CACHE_AT),
            "num_kept_tokens": options["num_kept_tokens"],
            **{name: sum(x) / len(x) for name, x in found.items()},
            "of each text": found,
        }
        print(json.dumps({keeping.name: known[keeping.name]}), flush=True)
        about = {"rows of text": ROWS, "questions of a kind": QUESTIONS, "rows": known}
        KEPT_RESULT.write_text(json.dumps(about, indent=1) + "\n")


@torch.no_grad()
def main() -> None:
    """Measure each, and write the table after each row."""
    sys.path.insert(0, str(ROOT / "examples"))
    import real_teacher

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("students", nargs="*", help="NAME=FOLDER of trained students")
    parser.add_argument("--kept", action="store_true")
    parser.add_argument("--teacher", choices=real_teacher.WHEELS, default="smollm2")
    arguments = parser.parse_args()
    if arguments.teacher != "smollm2" and not arguments.students:
        parser.error("students must be given for another teacher than smollm2: NAME=FOLDER")
    file = str(real_teacher.fetch_teacher(arguments.teacher))
    teacher = load_teacher(file).float().eval()
    tokenizer = load_tokenizer(file)
    text = real_teacher.fetch_text().read_text(encoding="utf-8")
    if arguments.kept:
        compare_kept(teacher, tokenizer, text)
        return
    read = tokenizer(text[-HELD_OUT:], return_tensors="pt").input_ids
    tokens = read[:, : ROWS * LENGTH]
    long = read[:, -LONG:]
    # Gemma 3 predicts 262,144 tokens: the predictions of a row take 3 GB
    some = ROWS if arguments.teacher == "smollm2" else 1
    rows = [row_of(x) for x in tokens.split(LENGTH, 1)][:some]
    asked = [*trained(arguments.students)]
    long_too = [student.name for student in CHOSEN] + [name for name, _ in asked]
    expected = [predictions(teacher, row) for row in rows]
    known = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else {}
    for name, make in asked or models(teacher):
        if name in known:
            continue
        model = make()
        part = cache_share(model.config, teacher.config, CACHE_AT)
        known[name] = {"part_of_cache": part, **measured(expected, model, rows)}
        if name in long_too:
            known[name]["kl_by_position"] = by_position(teacher, model, long)
        print(json.dumps({name: known[name]}), flush=True)
        about = {"rows of text": ROWS, "tokens of a row": LENGTH, "rows": known}
        RESULT.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
