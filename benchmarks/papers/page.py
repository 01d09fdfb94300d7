"""docs/research/claims.md, and the table of verdicts in docs/research/index.md, from the claims' texts and results."""

import re
from collections.abc import Iterable
from pathlib import Path
from textwrap import fill

from claim import RESULTS, Claim, Rows

NOTES = Path(__file__).parents[2] / "docs" / "research"
WIDEST = 6  # columns of a table that a screen has room for
LONGEST = 12  # rows
SETTINGS = {"seeds", "learning rate", "best inner learning rates", "best choices", "thresholds"}
HEAD = """# Claims: does each memory do what its paper says?

Small models on one CPU core, mostly with three seeds, as means with the range over seeds in brackets (November 2026).
"Partly reproduced" means that some of the expected results were found and others were not. `make claims` runs all and
continues where it was stopped; it also writes this page. The setting of a claim, what was expected, and what differs
stand at the head of its file.
"""


def texts(claims: Iterable[Claim]) -> dict[Path, str]:
    """Both files, from what is finished; the index has a line for each verdict, and the page the figures."""
    found = {claim.name: (claim, claim.rows()) for claim in claims}.values()
    summary = [summary_row(claim, rows) for claim, rows in found]
    page = "\n".join([HEAD, *(section(claim, rows) for claim, rows in found)])
    summary_page = NOTES / "index.md"
    between = re.compile(r"(<!-- claims -->\n).*?(<!-- /claims -->)", re.DOTALL)
    verdicts = markdown(by_verdict(summary))
    written = summary_page.read_text(encoding="utf-8")
    table = between.sub(lambda found: f"{found[1]}\n{verdicts}\n\n{found[2]}", written)
    return {NOTES / "claims.md": page, summary_page: table}


def by_verdict(summary: Rows) -> Rows:
    """The claims of each verdict that there is."""
    verdicts = {verdict: [] for verdict in ("reproduced", "partly reproduced", "not reproduced")}
    for row in summary:
        verdict, so_far, _ = row["verdict"].partition(" so far")
        if verdict in verdicts:
            verdicts[verdict].append(row["claim"] + so_far)
    return [
        {"verdict": f"**{verdict}**", "claims": ", ".join(found)}
        for verdict, found in verdicts.items()
        if found
    ]


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


def summary_row(claim: Claim, rows: Rows) -> dict:
    """A claim in one line."""
    link = f"[{claim.title}](claims.md#{anchor(claim.title)})"
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
    first = columns[0]
    if len(table) > LONGEST and claim.decisive:
        table = [row for row in table if row[first] in claim.decisive]
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
