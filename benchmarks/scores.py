"""What SmolLM2 and its students write: scores of answers to the same questions, and how often a student wins or ties.

    python benchmarks/scores.py                # all students of benchmarks/smollm2.py that are in runs/smollm2
    python benchmarks/scores.py NAME=FOLDER    # a student in a folder, in a row of this name

Goes on where it was stopped. Models run in bfloat16 and answer 24 questions of each kind. Writes
benchmarks/results/scores/{evaluation.json,scores.png} and the table in docs/results.md.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from hf_memory.conversion import load_teacher, load_tokenizer
from hf_memory.evaluation import Subject, evaluate, record
from hf_memory.evaluation.scores import ALL, KINDS, RATIO, SCORE, SUMMARY, WIN
from hf_memory.files.fingerprints import model_fingerprint
from hf_memory.progress import Progress
from smollm2 import PAGE, ROOT, SLOTS, example, folder_of, recipe_of, recipes

RESULTS = ROOT / "benchmarks" / "results" / "scores"
START, END = "<!-- scores -->", "<!-- /scores -->"  # around the table of PAGE
TEACHER = "teacher"
GROUPS = [group for group in KINDS if group != "reasoning"]
LENGTHS = (512,)
HOW: dict = {"items": 24, "seed": 0, "tolerance": 0.05}


def students() -> dict[str, Path]:
    """Students by the name of their row: those that are asked for, or all that benchmarks/smollm2.py has made."""
    if asked := sys.argv[1:]:
        return {name: Path(folder) for name, _, folder in (x.rpartition("=") for x in asked)}
    made = {name: folder_of(name) / "student" for name in recipes(recipe_of(SLOTS)[0])}
    return {name: folder for name, folder in made.items() if folder.exists()}


def measure(name: str, model: PreTrainedModel, tokenizer, known: record.Record) -> None:
    """Score a model, beside the teacher if it is measured."""
    found = record.row_of(known, name, model_fingerprint(model))
    theirs = known["models"][TEACHER]["found"] if name != TEACHER else {}
    nothing = torch.empty(0, dtype=torch.long)
    subject = Subject(model, nothing, tokenizer=tokenizer, theirs=theirs, score_lengths=LENGTHS, **HOW)
    evaluate(subject, GROUPS, found, keep=lambda: record.keep(RESULTS, known), name=name, report=tell)


def tell(progress: Progress) -> None:
    """Say how far it is."""
    print(f"{progress.task}: {progress.done}/{progress.total}", flush=True)


def table(known: record.Record) -> str:
    """A row for the teacher's scores, and one for each student's with their win-and-tie rates."""
    found = {name: row["found"] for name, row in known["models"].items()}
    scores = {name: record.scores_of(x) for name, x in found.items()}
    columns = [["student", *found]]
    columns += [[kind, *(_cell(x.get(kind)) for x in scores.values())] for kind in scores[TEACHER]]
    totals = [x.get(SUMMARY, {}).get(ALL) for x in found.values()]
    columns.append(["all that the teacher can answer", *(_cell(total) for total in totals)])
    header, *rows = zip(*columns)
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(columns), *rows))


def _cell(row: dict | None) -> str:
    if row is None:
        return ""
    return f"{row[SCORE]['value']:.2f}" + (f", {row[WIN]['value']:.0%}" if RATIO in row else "")


def main() -> None:
    """Score the students, and write the table."""
    logging.disable_progress_bar()
    file = example.fetch_teacher()
    tokenizer = load_tokenizer(str(file))
    known = record.open_record(RESULTS, HOW | {"dtype": "bfloat16"})
    measure(TEACHER, load_teacher(str(file)).eval().to(torch.bfloat16), tokenizer, known)
    for name, folder in students().items():
        measure(name, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval(), tokenizer, known)
        record.draw(RESULTS, known)
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
        PAGE.write_text(f"{before}{START}\n\n{table(known)}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
