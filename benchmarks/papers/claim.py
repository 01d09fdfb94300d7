"""What every claim has: runs that are kept one by one, a table, a picture and a verdict."""

import io
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pictures import LOOK

RESULTS = Path(__file__).parents[1] / "results" / "claims"
Row = dict  # what was run, and what was measured
Rows = list[Row]


@dataclass(frozen=True)
class Claim:
    """A claim and what checks it.

    Attributes:
        name: of its files.
        title: of its section.
        text: who claims what, the setting and what is expected; the docstring of its file.
        minutes: CPU time of all runs, on one core.
        plan: what to run, in order, as far as the finished rows tell.
        measure: runs one of these and returns what it found.
        table: rows for the page.
        draw: the picture.
        verdict: "reproduced", "not reproduced" or "partly reproduced", and why, from the rows.
        decisive: models without which there is no verdict; by default all.
    """

    name: str
    title: str
    text: str
    minutes: float
    plan: Callable[[Rows], Iterable[dict]]
    measure: Callable[..., dict]
    table: Callable[[Rows], Rows]
    draw: Callable[[Rows, Figure], None]
    verdict: Callable[[Rows], tuple[str, str]]
    decisive: tuple[str, ...] = ()

    def rows(self, folder: Path = RESULTS) -> Rows:
        """What is finished, in the order of the file: a line a run."""
        file = folder / f"{self.name}.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def pending(self, rows: Rows) -> list[dict]:
        """What is planned and not finished."""
        return [
            what for what in self.plan(rows) if not any(what.items() <= row.items() for row in rows)
        ]

    def minutes_left(self, rows: Rows) -> float:
        """An estimate: the share of what is known to be left."""
        return self.minutes * len(self.pending(rows)) / len(list(self.plan(rows)))

    def go_on(self, folder: Path = RESULTS) -> Rows:
        """Run what is not finished, keep each run as it ends, and draw."""
        rows = self.rows(folder)
        while todo := self.pending(rows):
            rows.append({**todo[0], **self.measure(**todo[0])})
            write(
                folder / f"{self.name}.jsonl",
                "".join(json.dumps(rounded(row)) + "\n" for row in rows),
            )
            print(
                f"{self.name}: {rounded({k: v for k, v in rows[-1].items() if not isinstance(v, list)})}",
                flush=True,
            )
        self.picture(rows, folder)
        return rows

    def picture(self, rows: Rows, folder: Path = RESULTS) -> None:
        """Draw what is finished."""
        figure = Figure(layout="constrained")
        drawn = io.BytesIO()
        FigureCanvasAgg(figure)
        with rc_context(LOOK):
            self.draw(rows, figure)
        figure.savefig(drawn, dpi=120, format="png")
        write(folder / f"{self.name}.png", drawn.getvalue())


def write(file: Path, content: str | bytes) -> None:
    """A whole file or none."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    partial.replace(file)


def rounded(x):
    """Figures of five digits, which is more than seeds agree on."""
    if isinstance(x, dict):
        return {key: rounded(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [rounded(value) for value in x]
    return float(f"{x:.5g}") if isinstance(x, float) else x


def sweep(
    models: Iterable[str], rates: Iterable[float], seeds: int, rows: Rows, **setting
) -> Iterator[dict]:
    """Every rate with the first seed; then, where these are finished, the other seeds with the best rate."""
    for model in models:
        yield from ({"model": model, "lr": lr, "seed": 0, **setting} for lr in rates)
        done = [
            row for row in rows if {"model": model, "seed": 0, **setting}.items() <= row.items()
        ]
        if {row["lr"] for row in done} >= set(rates):
            best = max(done, key=lambda row: row["accuracy"])
            yield from (
                {"model": model, "lr": best["lr"], "seed": seed, **setting}
                for seed in range(1, seeds)
            )


def best_runs(rows: Rows, **setting) -> dict[str, Rows]:
    """By model, the runs with the rate whose first seed is most accurate."""
    rows = [row for row in rows if setting.items() <= row.items()]
    found = {}
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        lr = max((row for row in mine if row["seed"] == 0), key=lambda row: row["accuracy"])["lr"]
        found[model] = [row for row in mine if row["lr"] == lr]
    return found


def runs_by(rows: Rows, key: str, values: Iterable) -> dict[str, Rows]:
    """All seeds for each of these values of a setting, where there are any."""
    found = {value: [row for row in rows if row[key] == value] for value in values}
    return {value: runs for value, runs in found.items() if runs}


def spread(rows: Rows, key: str) -> str:
    """Mean over seeds, and the range where there are several: '0.98 (0.97 to 1.00)'."""
    values = [row[key] for row in rows]
    low = min(values)
    high = max(values)
    return f"{mean(values):.3f}" + (
        f" ({low:.3f} to {high:.3f})" if f"{low:.3f}" != f"{high:.3f}" else ""
    )
