"""docs/research/claims.md and a page for each topic, from the claims' texts and results."""

import re
from collections.abc import Iterable
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

from claim import RESULTS, Claim, Rows

NOTES = Path(__file__).parents[2] / "docs" / "research"
WIDEST = 6  # columns of a table that a screen has room for
LONGEST = 8  # rows
SETTINGS = {"seeds", "learning rate", "best inner learning rates", "best choices", "thresholds"}
HEAD = """# Claims: does each memory do what its paper says?

Small models on one CPU core, mostly with three seeds (November 2026). "Partly reproduced" means that some of the
expected results were found and others were not. `make claims` runs all and continues where it was stopped; it also
writes these pages.
"""
HEAD_OF_TOPIC = """\
Figures are means over seeds, mostly three, with their range in brackets. The setting of a claim, what was expected, and
what differs from the paper stand at the head of its file. [All verdicts](claims.md).
"""


class Topic(NamedTuple):
    """A page of claims: its file without its ending, its title, and the names of its claims in order."""

    file: str
    title: str
    claims: tuple[str, ...]


TOPICS = (
    Topic(
        "claims_recall",
        "What a memory recalls",
        ("interference", "forgetting", "recall", "copying", "mosaics", "levels", "facts"),
    ),
    Topic("claims_tracking", "Counting and following swaps", ("parity", "groups", "swaps")),
    Topic(
        "claims_length",
        "Long texts: reach, time and positions",
        ("reach", "cost", "length", "positions", "pasts"),
    ),
    Topic(
        "claims_learning",
        "Learning while reading, and early exit",
        ("context", "regression", "ablation", "early_exit"),
    ),
)


def texts(claims: Iterable[Claim]) -> dict[Path, str]:
    """All pages, from what is finished: the verdicts, and the figures of each topic."""
    found = {claim.name: (claim, claim.rows()) for claim in claims}
    placed = [name for topic in TOPICS for name in topic.claims]
    if sorted(placed) != sorted(found):
        raise ValueError(f"TOPICS must have each claim once, {sorted(found)}, got {sorted(placed)}")
    verdicts = []
    pages = {}
    for topic in TOPICS:
        chosen = [found[name] for name in topic.claims]
        verdicts += [summary_row(topic, claim, rows) for claim, rows in chosen]
        parts = [f"# {topic.title}\n", HEAD_OF_TOPIC, *(section(*each) for each in chosen)]
        pages[NOTES / f"{topic.file}.md"] = "\n".join(parts)
    return {NOTES / "claims.md": f"{HEAD}\n{markdown(verdicts)}\n", **pages}


def judged(claim: Claim, rows: Rows) -> tuple[str, str]:
    """The verdict and why; while a run is missing, how many are there."""
    if not rows:
        return "not run yet", f"about {claim.minutes:g} minutes of one core"
    pending = claim.pending(rows)
    if pending and (
        not claim.decisive or any(what.get("model") in claim.decisive for what in pending)
    ):
        return "in progress", f"{len(rows)} runs are finished, at least {len(pending)} are left"
    if pending:
        verdict, why = claim.verdict(rows)
        return f"{verdict} so far", f"{why}; at least {len(pending)} runs of other models are left"
    return claim.verdict(rows)


def summary_row(topic: Topic, claim: Claim, rows: Rows) -> dict:
    """A claim in one line."""
    link = f"[{claim.title}]({topic.file}.md#{anchor(claim.title)})"
    return {"claim": link, "verdict": judged(claim, rows)[0]}


def anchor(title: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")


def section(claim: Claim, rows: Rows) -> str:
    """All of one claim: its verdict, the second paragraph of its text, a table, a picture and the command."""
    verdict, why = judged(claim, rows)
    short = claim.text.split("\n\n")[1]
    finding = " ".join(f"**{verdict.capitalize()}.** {short}".split())
    parts = [
        f"## {claim.title}",
        fill(finding, 120, break_long_words=False, break_on_hyphens=False),
    ]
    if claim.pending(rows):
        parts.append(f"{why[:1].upper()}{why[1:]}.")
    if rows:
        parts.append(markdown(shown(claim, rows)))
    results = "../../benchmarks/results/claims"
    if (RESULTS / f"{claim.name}.png").exists():
        parts.append(f"![{claim.title}]({results}/{claim.name}.png)")
    parts.append(
        f"`python benchmarks/papers {claim.name}`: {claim.minutes:g} min of one core "
        f"([setting](../../benchmarks/papers/{claim.name}.py), [all runs]({results}/{claim.name}.jsonl))"
    )
    return "\n\n".join(parts) + "\n"


def shown(claim: Claim, rows: Rows) -> Rows:
    """The table without settings, and of many models only those that decide."""
    table = claim.table(rows)
    columns = [column for column in table[0] if column not in SETTINGS]
    if len(columns) > WIDEST:
        raise ValueError(
            f"the table of {claim.name} must have at most {WIDEST} columns, got {columns}"
        )
    if len(table) > LONGEST and claim.decisive:
        table = [row for row in table if row[columns[0]] in claim.decisive]
    return [{column: row.get(column, "") for column in columns} for row in table]


def markdown(rows: Rows) -> str:
    """A table whose columns are those of the first row."""
    columns = list(rows[0])
    lines = [
        columns,
        ["---"] * len(columns),
        *([row.get(name, "") for name in columns] for row in rows),
    ]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
