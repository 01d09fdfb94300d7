"""Draws the pictures of the research notes from their tables: python docs/draw_notes.py

A picture follows the table that it shows. Each row is a line, labelled where it ends; each column is a place on the
axis, the number in its header, or side by side if not all headers have one. The alternative text of the picture says
what the axes are: "UP, by ACROSS".
"""

import re
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

NOTES = Path(__file__).parent / "research"
PICTURE = re.compile(r"^!\[(?P<up>.*?), by (?P<across>.*?)\]\((?P<file>\.\./pictures/notes/.*?)\)$")
NUMBER = re.compile(r"-?[\d,]*\.?\d+")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#000000")  # Okabe and Ito
MOST = len(COLOURS)  # lines of a picture
LOOK = {
    "font.size": 10,
    "svg.hashsalt": "notes",
    "axes.spines.top": False,
    "axes.spines.right": False,
}


class Picture(NamedTuple):
    """A picture of a page: what its axes are, its file, and its lines by name, with a value for each place."""

    up: str
    across: str
    file: Path
    places: dict[str, float]
    rows: dict[str, list[float | None]]


def number(cell: str) -> float | None:
    """The first number of a cell, if it has one."""
    found = NUMBER.search(cell)
    return float(found[0].replace(",", "")) if found else None


def cells(line: str) -> list[str]:
    """The cells of a line of a table."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def pictures(page: Path) -> list[Picture]:
    """The pictures of a page, each with the table before it."""
    found = []
    table: list[str] = []
    before = ""
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("|"):
            table = [*table, line] if before.startswith("|") else [line]
        elif seen := PICTURE.match(line):
            head, _, *rows = map(cells, table)
            lines = {row[0].replace("`", ""): [number(x) for x in row[1:]] for row in rows}
            if len(lines) > MOST:
                raise ValueError(f"{seen['file']} must have at most {MOST} lines, got {len(lines)}")
            places = places_of(head[1:])
            found.append(
                Picture(seen["up"], seen["across"], page.parent / seen["file"], places, lines)
            )
        before = line
    return found


def places_of(heads: list[str]) -> dict[str, float]:
    """Where columns are on the axis, by what is written there: their numbers, or side by side."""
    numbers = [number(head) for head in heads]
    if None in numbers:
        return {head: float(i) for i, head in enumerate(heads)}
    return {f"{x:,g}": x for x in numbers}


def draw(picture: Picture) -> None:
    """Lines over places, on a logarithmic axis if they are numbers, with their names at their ends."""
    figure, axes = plt.subplots(figsize=(7.5, 3.8), layout="constrained")
    ends = []
    for (name, values), colour in zip(picture.rows.items(), COLOURS):
        known = [(x, y) for x, y in zip(picture.places.values(), values) if y is not None]
        axes.plot(*zip(*known), "o-", color=colour, markersize=4)
        ends.append((known[-1][1], name, colour))
    scale = "linear" if 0.0 in picture.places.values() else "log"
    axes.set(xlabel=picture.across, ylabel=picture.up, xscale=scale, ylim=(0, None))
    axes.set_xticks(list(picture.places.values()), list(picture.places))
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    label(axes, ends)
    picture.file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture.file, metadata={"Date": None})
    plt.close(figure)


def label(axes: Axes, ends: list[tuple[float, str, str]]) -> None:
    """Write the name of each line right of its last value, moved up where it would cover another."""
    top = axes.get_ylim()[1]
    lowest = -top
    for value, name, colour in sorted(ends):
        lowest = max(value, lowest + 0.07 * top)
        axes.annotate(
            name,
            (1.01, lowest / top),
            xycoords="axes fraction",
            va="center",
            color=colour,
            fontsize=9,
        )


if __name__ == "__main__":
    plt.rcParams.update(LOOK)
    for page in sorted(NOTES.glob("*.md")):
        for picture in pictures(page):
            draw(picture)
