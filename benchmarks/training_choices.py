"""What a student should learn from and which weights should learn: one change to `make smollm2`, at equal tokens.

    python benchmarks/training_choices.py "all weights, seed 1"  # one row; goes on where it was stopped
    python benchmarks/training_choices.py                        # all that are missing: eight hours on one core

Each row is a student of recipes/smollm2.yaml with one change, made by `hf-memory convert`; the seed gives the order of
the texts. Scores are those of benchmarks/scores.py, and KL is of two windows of 8,192 held-out tokens, by position, as
in benchmarks/twins.py. Each row is a file in benchmarks/results/training_choices, and a column of all rows is made
before the next; the table in docs/results.md has means and 95 % intervals over seeds.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

import scores
import smollm2
import twins
from hf_memory.evaluation import record
from hf_memory.evaluation.scores import ALL, RATIO, SCORE, SUMMARY, WIN
from hf_memory.evaluation.tasks import Found
from hf_memory.files.folders import replaced

RESULTS = smollm2.ROOT / "benchmarks" / "results" / "training_choices"
WORK = smollm2.WORK / "training_choices"
USUAL = smollm2.ROOT / "recipes" / "smollm2.yaml"
KEPT = yaml.safe_load(USUAL.read_text(encoding="utf-8"))["option"]["num_kept_tokens"]  # of each layer
LONG = {"steps": 13, "start_length": 2048, "length": 8192, "chunk_length": 2048}  # as many tokens
CHOICES: dict[str, dict[str, Any]] = {  # what replaces entries of USUAL; of a schedule, or options, its fields
    "as it is": {},
    "all weights": {"train": "all"},
    "LoRA of rank 8": {"train": "lora:8", "distillation": {"learning_rate": 1e-3}},
    "prose alone": {"text": {"prose": 1.0}},
    "loss on all tokens of conversations": {"assistant-only-loss": False},
    "a quarter of the steps on its own text": {"on-policy": {"share": 0.25, "tokens": 128, "beta": 1.0}},
    "rows that grow to 8,192 tokens": {"distillation": LONG},
    "before training": {"distillation": {"steps": 0}},
    "before training, twice the kept tokens": {
        "distillation": {"steps": 0},
        "option": {"num_kept_tokens": [2 * n for n in KEPT]},
    },
}
ONCE = ("LoRA of rank 8", "rows that grow to 8,192 tokens", "before training")  # how choices with one seed begin
SCORES, POSITIONS = "scores", "by position to 8192"  # of a row
COLUMNS = SCORES, POSITIONS
START, END = "<!-- training choices -->", "<!-- /training choices -->"  # around the table of smollm2.PAGE


def _of_all(figure: str) -> Callable[[Found], float]:
    return lambda found: found[SUMMARY][ALL][figure]["value"]


def _lowest(found: Found) -> float:
    return min(row[WIN]["value"] for row in record.scores_of(found).values() if RATIO in row)


def _kl(end: int) -> Callable[[dict], float]:
    return lambda found: found[str(end)]["kl"]


FIGURES: dict[str, tuple[str, str, Callable]] = {  # of the table: the column of a row, the format, and the figure
    "score": (SCORES, ".2f", _of_all(SCORE)),
    "win and tie": (SCORES, ".0%", _of_all(WIN)),
    "in the lowest kind": (SCORES, ".0%", _lowest),
    "KL, tokens 1 to 32": (POSITIONS, ".4f", _kl(32)),
    "512 to 1,024": (POSITIONS, ".4f", _kl(1024)),
    "1,024 to 2,048": (POSITIONS, ".4f", _kl(2048)),
    "4,096 to 8,192": (POSITIONS, ".4f", _kl(8192)),
}


def rows() -> dict[str, tuple[str, int]]:
    """Name of a row: its choice and its seed; seed by seed, so that the first ones say most."""
    pairs = product(range(3), CHOICES)
    return {
        f"{choice}, seed {seed}": (choice, seed) for seed, choice in pairs if seed == 0 or not choice.startswith(ONCE)
    }


def run_of(choice: str, seed: int) -> dict[str, Any]:
    """The file of a run."""
    run = yaml.safe_load(USUAL.read_text(encoding="utf-8")) | {"measure-tokens": 2048, "seed": seed}
    changes = {"text": {"prose": 0.6, "practice": 0.4}} | CHOICES[choice]
    changes |= {name: run[name] | changes.get(name, {}) for name in ("distillation", "option")}
    files = {"prose": smollm2.example.fetch_text(), "practice": smollm2.example.fetch_practice()}
    changes["text"] = {str(files[name]): share for name, share in changes["text"].items()}
    return {"teacher": str(smollm2.example.fetch_teacher()), **run, **changes}


def make(name: str) -> Path:
    """The folder of a row's student, which is trained if it is not there."""
    folder = WORK / twins.file_name(name)
    output = folder / "student"
    if not output.exists():
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "run.yaml"
        file.write_text(yaml.safe_dump(run_of(*rows()[name]), sort_keys=False), encoding="utf-8")
        given = "--config", file, "--output", output, "--checkpoints", folder / "checkpoints"
        subprocess.run([sys.executable, "-m", "hf_memory", "convert", *map(str, given)], check=True)
    return output


def complete(file: Path, column: str, name: str, teacher: PreTrainedModel, tokenizer, held_out: Tensor) -> None:
    """Make a column of a row if it is missing, and the student if that is."""
    known = twins.read(file)
    if column in known:
        return
    folder = make(name)
    if column == SCORES:
        theirs = record.open_record(scores.place(scores.USUAL), scores.SETTINGS)["models"][scores.TEACHER]["found"]
        student = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        found = scores.scored(name, student, tokenizer, theirs)
    else:
        student = AutoModelForCausalLM.from_pretrained(folder).eval()
        found = twins.by_position(student, twins.Remembered(teacher, twins.WORK / "teacher"), held_out, 8192)
    with replaced(file) as partial:
        partial.write_text(json.dumps({"name": name, **known, column: found}, indent=1) + "\n", encoding="utf-8")
    print(name, column, flush=True)


def table() -> str:
    """The choices in Markdown."""
    found: dict[str, list[dict]] = {choice: [] for choice in CHOICES}
    for row in map(twins.read, sorted(RESULTS.glob("*.json"))):
        found[row["name"].rpartition(", ")[0]].append(row)
    lines = []
    for choice, of_seeds in ((choice, x) for choice, x in found.items() if x):
        cells = [
            twins.over_seeds([value(row[column]) for row in of_seeds if column in row], form)
            for column, form, value in FIGURES.values()
        ]
        lines.append([choice, str(len(of_seeds)), *cells])
    return smollm2.markdown(["learned", "seeds", *FIGURES], lines)


def main() -> None:
    """Make the rows that are asked for, or all, as far as they are missing, and the table."""
    logging.disable_progress_bar()
    RESULTS.mkdir(parents=True, exist_ok=True)
    teacher, tokenizer, _, held_out = smollm2.materials()
    for column, name in product(COLUMNS, sys.argv[1:] or rows()):
        file = RESULTS / f"{twins.file_name(name)}.json"
        complete(file, column, name, teacher, tokenizer, held_out)
        smollm2.put(smollm2.PAGE, START, table(), END)


if __name__ == "__main__":
    main()
