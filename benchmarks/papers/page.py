"""docs/research/claims.md, and the table of verdicts in docs/research/index.md, from the claims' texts and results."""

import re
from collections.abc import Iterable
from pathlib import Path

from claim import RESULTS, Claim, Rows

NOTES = Path(__file__).parents[2] / "docs" / "research"
WIDEST = 6  # columns of a table that a screen has room for
HEAD = """# Claims: does each memory do what its paper says?

Small models on one CPU core, with several seeds for most figures. `make claims` runs all claims and continues where it
was stopped; `python benchmarks/papers NAME` runs one. This page is written by the program from its results
(`benchmarks/results/claims/`) and not edited by hand. "Partly reproduced" means that some of the expected results were
found and others were not; the section of the claim says which.
"""


def texts(claims: Iterable[Claim]) -> dict[Path, str]:
    """Both files, from what is finished; the summary has a line for each verdict, and the page the figures."""
    found = {claim.name: (claim, claim.rows()) for claim in claims}.values()
    summary = [summary_row(claim, rows) for claim, rows in found]
    here = [{**row, "claim": row["claim"].replace("claims.md", "")} for row in summary]
    page = "\n".join([HEAD, markdown(here), "", *(section(claim, rows) for claim, rows in found)])
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
        verdict, so_far, _ = row["verdict"].strip("*").partition(" so far")
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
    verdict, why = judged(claim, rows)
    return {
        "claim": f"[{claim.title}](claims.md#{anchor(claim.title)})",
        "verdict": f"**{verdict}**",
        "figures": why,
    }


def anchor(title: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")


def section(claim: Claim, rows: Rows) -> str:
    """All of one claim."""
    verdict, why = judged(claim, rows)
    title, text = claim.text.split("\n", 1)
    parts = [
        f"## {claim.title}",
        title,
        text.strip(),
        f"**Verdict: {verdict}.** {why[:1].upper()}{why[1:]}.",
    ]
    if rows:
        parts += narrow(claim.table(rows))
    if (RESULTS / f"{claim.name}.png").exists():
        parts.append(f"![{claim.title}](../../benchmarks/results/claims/{claim.name}.png)")
    parts.append(f"`python benchmarks/papers {claim.name}`: {claim.minutes:g} minutes of one core.")
    return "\n\n".join(parts) + "\n"


def narrow(rows: Rows) -> list[str]:
    """A table in parts of at most WIDEST columns, each with the first one; lines without figures are left out."""
    first, *others = rows[0]
    parts = []
    for start in range(0, len(others), WIDEST - 1):
        columns = others[start : start + WIDEST - 1]
        lines = [{name: row.get(name, "") for name in (first, *columns)} for row in rows]
        parts.append(
            markdown([line for line in lines if any(line[name] != "" for name in columns)])
        )
    return parts


def markdown(rows: Rows) -> str:
    """A table whose columns are those of the first row."""
    columns = list(rows[0])
    lines = [
        columns,
        ["---"] * len(columns),
        *([row.get(name, "") for name in columns] for row in rows),
    ]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
