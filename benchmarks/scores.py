"""What SmolLM2 and its students write: scores of answers to the same questions, and how often a student wins or ties.

    python benchmarks/scores.py                # all students of benchmarks/smollm2.py that are in runs/smollm2
    python benchmarks/scores.py NAME=FOLDER    # a student in a folder, in a row of this name
    python benchmarks/scores.py --length 2048  # questions about texts of 2,048 tokens, in a table of their own

Goes on where it was stopped. Models run in bfloat16 and answer 24 questions of each kind. The teacher also answers in
float32, which shows how much rounding alone changes. Writes
benchmarks/results/scores/evaluation.json (in scores_2048 for texts of 2,048 tokens) and the table in
docs/research/answers.md.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # threads that wait sleep: before torch is imported

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from hf_memory.conversion import load_teacher, load_tokenizer
from hf_memory.evaluation import Subject, evaluate, record
from hf_memory.evaluation.scores import ALL, KINDS, RATIO, SCORE, SUMMARY, WIN
from hf_memory.evaluation.tasks import Found
from hf_memory.files.fingerprints import model_fingerprint
from hf_memory.progress import Progress
from smollm2 import NOTES, ROOT, SLOTS, example, folder_of, markdown, put, recipe_of, recipes

RESULTS = ROOT / "benchmarks" / "results"
TEACHER = "teacher"
WIDE = "teacher in float32"
USUAL = 512  # tokens of a text that questions are about
GROUPS = [group for group in KINDS if group != "reasoning"]
WITH_LENGTH = [group for group in GROUPS if any(kind.has_length for kind in KINDS[group].values())]
HOW: dict = {"items": 24, "seed": 0, "tolerance": 0.05}
SETTINGS = HOW | {"dtype": "bfloat16"}  # of the record


def students(asked: list[str]) -> dict[str, Path]:
    """Students by the name of their row: those that are asked for, or all that benchmarks/smollm2.py has made."""
    if asked:
        return {name: Path(folder) for name, _, folder in (x.rpartition("=") for x in asked)}
    made = {name: folder_of(name) / "student" for name in recipes(recipe_of(SLOTS)[0])}
    return {name: folder for name, folder in made.items() if folder.exists()}


def measure(
    name: str, model: PreTrainedModel, tokenizer, known: record.Record, length: int
) -> None:
    """Score a model, beside the teacher if it is measured, and keep what is found in the folder of this length."""
    found = record.row_of(known, name, model_fingerprint(model))
    theirs = known["models"][TEACHER]["found"] if name != TEACHER else {}
    scored(name, model, tokenizer, theirs, length, found, lambda: record.keep(place(length), known))


def scored(
    name: str,
    model: PreTrainedModel,
    tokenizer,
    theirs: Found,
    length: int = USUAL,
    found: Found | None = None,
    keep: Callable[[], object] = lambda: None,
) -> Found:
    """The scores of a model beside its teacher's; `found` has those that are there, and `keep` is called after each."""
    nothing = torch.empty(0, dtype=torch.long)
    subject = Subject(
        model, nothing, tokenizer=tokenizer, theirs=theirs, score_lengths=(length,), **HOW
    )
    groups = GROUPS if length == USUAL else WITH_LENGTH
    return evaluate(subject, groups, found, keep=keep, name=name, report=tell)


def place(length: int) -> Path:
    """The folder of the figures for texts of this length."""
    return RESULTS / ("scores" if length == USUAL else f"scores_{length}")


def tell(progress: Progress) -> None:
    """Say how far it is."""
    print(f"{progress.task}: {progress.done}/{progress.total}", flush=True)


def table(known: record.Record) -> str:
    """A row for each model: its score, how often it wins or ties, and in which kind least often."""
    header = ("student", "score", "wins or ties", "least often in")
    return markdown(header, [[name, *_cells(x["found"])] for name, x in known["models"].items()])


def _cells(found: Found) -> list[str]:
    scores = record.scores_of(found)
    of_all = found.get(SUMMARY, {}).get(ALL)
    if of_all is None:  # the teacher, whose mean is of the kinds that it can answer
        return ["", "", ""]
    rates = {kind: row[WIN]["value"] for kind, row in scores.items() if RATIO in row}
    kind = min(rates, key=rates.__getitem__)
    total = f"{of_all[SCORE]['value']:.2f}"
    return [total, f"{of_all[WIN]['value']:.0%}", f"{kind}: {rates[kind]:.0%}"]


def write(length: int, known: record.Record) -> None:
    """Put the table between its marks."""
    start = f"<!-- {place(length).name} -->"
    end = f"<!-- /{place(length).name} -->"
    put(NOTES / "answers.md", start, table(known), end)


def main() -> None:
    """Score the students, and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "students", nargs="*", metavar="NAME=FOLDER", help="default: all that are in runs/smollm2"
    )
    parser.add_argument(
        "--length", type=int, default=USUAL, help="tokens of a text that questions are about"
    )
    asked = parser.parse_args()
    logging.disable_progress_bar()
    file = example.fetch_teacher()
    tokenizer = load_tokenizer(str(file))
    known = record.open_record(place(asked.length), SETTINGS)
    teacher = load_teacher(str(file)).eval().to(torch.bfloat16)
    measure(TEACHER, teacher, tokenizer, known, asked.length)
    if asked.length == USUAL:
        measure(WIDE, load_teacher(str(file)).eval(), tokenizer, known, asked.length)
    for name, folder in students(asked.students).items():
        student = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        measure(name, student, tokenizer, known, asked.length)
        write(asked.length, known)


if __name__ == "__main__":
    main()
