"""The picture of README: what a token and its past cost, and how near students are to teachers.

    python benchmarks/overview.py

It measures nothing. It draws what benchmarks/decode.py has recorded, and
results/quality_by_cache.json, and writes results/overview.png.
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

RESULTS = Path(__file__).parent / "results"
COSTS = {  # of benchmarks/decode.py: label, colour
    "Llama": ("Transformer", "black"),
    "hybrid": ("attention in every\nfourth layer", "tab:purple"),
    "window, heads": ("a tenth of heads\nkeep everything", "tab:orange"),
    "Gated DeltaNet": ("DeltaNet", "tab:blue"),
}
STUDENTS = {  # of quality_by_cache.json: what heads have that do not keep everything
    "kept": ("the others keep the\nmost used tokens", "tab:orange", 0),
    "windows": ("... the last tokens", "tab:green", 5),
    "slots": ("... a DeltaNet", "tab:blue", -7),
}
HEADS = ("8 of 90 heads\nkeep everything", "4 heads", "none")  # of students, largest cache first


def label(axes: Axes, x: float, y: float, text: str, colour: str, shift: float = 0.0) -> None:
    """Write a name beside the end of a line; the shift is in points."""
    place = {"xytext": (6, shift), "textcoords": "offset points", "va": "center", "fontsize": 8}
    axes.annotate(text, (x, y), color=colour, annotation_clip=False, **place)


def draw_costs(axes: Axes, figures: dict, quantity: str, unit: float, shifts: dict) -> None:
    """A quantity of each model by the tokens that it has read."""
    contexts = [int(context) for context in figures]
    for name, (text, colour) in COSTS.items():
        values = [row[name][quantity] / unit for row in figures.values()]
        style = "--" if name == "Llama" else "-"
        axes.plot(contexts, values, style, color=colour, marker="o", markersize=4)
        label(axes, contexts[-1], values[-1], text, colour, shifts.get(name, 0))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(contexts))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([f"{context // 1024}k" for context in contexts])
    axes.set_xlabel("tokens read before")


def draw_quality(axes: Axes, students: dict) -> None:
    """How often a student and its teacher choose the same next token, by what the student holds."""
    for kind, (text, colour, shift) in STUDENTS.items():
        rows = [row for name, row in students.items() if name.startswith(f"{kind},")]
        caches = [100 * row["cache at 8k / teacher"] for row in rows]
        agreements = [100 * row["agreement"] for row in rows]
        axes.plot(caches, agreements, color=colour, marker="o", markersize=4)
        label(axes, caches[0], agreements[0], text, colour, shift)
    for heads, cache in zip(HEADS, caches):
        axes.annotate(heads, (cache, 87), ha="center", va="bottom", fontsize=8, color="dimgray")
    axes.set_xlim(0, 14)
    axes.set_ylim(86.8, 93)
    axes.set_xlabel("cache at 8k tokens, % of the teacher's")


def main() -> None:
    """Draw the three panels."""
    decode = json.loads((RESULTS / "decode.json").read_text(encoding="utf-8"))
    quality = json.loads((RESULTS / "quality_by_cache.json").read_text(encoding="utf-8"))
    figure, (time, cache, near) = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    by_context = decode["after"]["by_context"]
    draw_costs(time, by_context, "ms", 1, {"Gated DeltaNet": -2})
    time.set_ylim(0, None)
    time.set_title("time of a token, ms", fontsize=10)
    draw_costs(cache, by_context, "cache_bytes", 1e6, {"window, heads": -6, "hybrid": 4})
    cache.set_title("size of the cache, MB", fontsize=10)
    cache.set_yscale("log")
    cache.set_yticks([5, 50, 500], ["5", "50", "500"])
    draw_quality(near, quality["students"])
    near.set_title("same next token as the teacher, %", fontsize=10)
    for axes in (time, cache, near):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
    figure.savefig(RESULTS / "overview.png", dpi=130)


if __name__ == "__main__":
    main()
