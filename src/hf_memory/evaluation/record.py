"""A file with the results of several models on one text, which is extended so that nothing is measured twice."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from hf_memory.evaluation.plots import plot_scores, plot_task
from hf_memory.evaluation.scores import KINDS, SCORE, SUMMARY, WIN, is_unanswered
from hf_memory.evaluation.tasks import TASKS
from hf_memory.evaluation.writing import TEXTS
from hf_memory.files.folders import replaced
from hf_memory.files.names import visible

FILE = "evaluation.json"
NUMBERS = re.compile(r"\[\n[-+.\deE,\s]+\]")  # a list of them; a line ends in no string of JSON
HEADER = ("task", "at", "figure")
Record = dict[str, Any]  # {"settings": ..., "models": {name: {"weights": ..., "found": ...}}}


def open_record(folder: Path, settings: dict[str, Any]) -> Record:
    """The record of a folder, or an empty one.

    Args:
        folder: the record's folder, which need not exist.
        settings: the settings that results depend on, as JSON types.

    Raises:
        ValueError: if there is a record with other settings.
    """
    file = folder / FILE
    if not file.exists():
        return {"settings": settings, "models": {}}
    record = _read(file)
    before = record["settings"]
    if others := sorted(
        name for name in settings | before if settings.get(name) != before.get(name)
    ):
        wanted = "output must be a new folder or one of the same settings"
        raise ValueError(f"{wanted}, got {folder} with another {' and '.join(others)}")
    return record


def _read(file: Path) -> Record:
    with suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):
        record = json.loads(file.read_text(encoding="utf-8"))
        rows = record["models"].values()
        if all(isinstance(x, dict) for x in (record["settings"], *(row["found"] for row in rows))):
            return record
    raise ValueError(f"{file} must be the record of an evaluation, got another or a damaged file")


def row_of(record: Record, name: str, weights: str) -> dict[str, Any]:
    """The results of a model so far, also under the name of another path.

    Args:
        record: the record.
        name: the model's name.
        weights: a fingerprint of all that results depend on besides the settings; there are none yet if it has changed.
    """
    for row in record["models"].values():
        if row["weights"] == weights:
            return row["found"]
    record["models"][name] = {"weights": weights, "found": {}}
    return record["models"][name]["found"]


def labels(record: Record) -> dict[str, str]:
    """{name: label}: the last part of each name, or as many parts as it takes to tell two models apart."""
    parts = {name: Path(name).parts for name in record["models"]}

    def label(name: str) -> str:
        for n in range(1, len(parts[name])):
            if [x[-n:] for x in parts.values()].count(parts[name][-n:]) == 1:
                return str(Path(*parts[name][-n:]))
        return name

    return {name: visible(label(name)) for name in parts}


def keep(folder: Path, record: Record) -> None:
    """Write the record, in which a list of numbers is one line; the file is replaced as a whole."""
    folder.mkdir(parents=True, exist_ok=True)
    text = NUMBERS.sub(lambda found: " ".join(found[0].split()), json.dumps(record, indent=1))
    with replaced(folder / FILE) as partial:
        partial.write_text(text + "\n", encoding="utf-8")


def table(record: Record) -> Iterator[tuple[str, ...]]:
    """The rows of the table as text: the columns of HEADER, and a column for each model."""
    for task, models in _by_task(record).items():
        for at in sorted(
            dict.fromkeys(at for found in models.values() for at in found), key=_order
        ):
            rows = [found.get(at, {}) for found in models.values()]
            left_out = {TEXTS} | ({WIN} if any(map(is_unanswered, rows)) else set())
            for label in dict.fromkeys(label for row in rows for label in row):
                if label in left_out:
                    continue
                yield task, at, label, *(said(row.get(label)) for row in rows)


def unanswered(record: Record) -> list[str]:
    """The kinds of questions that the teacher cannot answer well above chance, which the table does not compare."""
    scores = [scores_of(row["found"]) for row in record["models"].values()]
    return list(
        dict.fromkeys(at for rows in scores for at, row in rows.items() if is_unanswered(row))
    )


def side_by_side(record: Record) -> Iterator[tuple[str, ...]]:
    """Each prompt with the longest answers that all models have given to it."""
    answers = [row["found"].get("answers", {}) for row in record["models"].values()]
    for at in sorted(set.intersection(*map(set, answers)), key=_order)[-1:]:
        yield from zip(
            record["settings"]["prompts"], *(found[at][TEXTS]["value"] for found in answers)
        )


def draw(folder: Path, record: Record) -> None:
    """Write a picture of each task that has figures, and one of all scores."""
    shown = labels(record)
    by_task = _by_task(record)
    for task, models in by_task.items():
        if task != SUMMARY and task not in KINDS:
            plot_task(
                folder / f"{task}.png", {shown[name]: found for name, found in models.items()}
            )
    scores = {shown[name]: scores_of(row["found"]) for name, row in record["models"].items()}
    plot_scores(folder / f"{SUMMARY}.png", scores)


def scores_of(found: dict[str, Any]) -> dict[str, dict]:
    """{kind of question: figures} of all groups of questions of a model."""
    return {at: row for group in KINDS for at, row in found.get(group, {}).items() if SCORE in row}


def _by_task(record: Record) -> dict[str, dict[str, dict]]:
    """{task: {model: {at: figures}}}."""
    models = {name: row["found"] for name, row in record["models"].items()}
    known = {task for found in models.values() for task in found}
    order = (SUMMARY, *TASKS)
    tasks = [*(task for task in order if task in known), *sorted(known - set(order))]
    return {task: {name: found.get(task, {}) for name, found in models.items()} for task in tasks}


def _order(at: str) -> int:
    return int(at) if at.isdigit() else 0


def said(figure: dict[str, Any] | None) -> str:
    """A figure of a record as text, with its interval; empty without one."""
    if figure is None:
        return ""
    if isinstance(figure["value"], str):
        return figure["value"]
    numbers = [figure[name] for name in ("value", "low", "high") if figure.get(name) is not None]
    value, *ends = (f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.3g}" for x in numbers)
    return f"{value} [{', '.join(ends)}]" if ends else value
