"""The picture of README: what a token and its past cost, and how near students are to teachers.

    python benchmarks/overview.py

It measures nothing. It draws what benchmarks/decode.py and benchmarks/cache_bits.py have recorded, and writes
results/overview.png.
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
MODELS = {  # of cache_bits.json: label, colour, and where it stands in points
    "teacher in 8 bits": ("teacher in 8 bits", "black", (4, 9), "right"),
    "teacher in 4 bits": ("teacher in 4 bits", "black", (0, 10), "center"),
    "default by head, 20 steps at 3e-5, seed 0": (
        "default, 8 bits",
        "tab:orange",
        (0, 10),
        "center",
    ),
    "8 full heads in 16 bits, 172 kept tokens alike, window 64, in 16": (
        "default in 16 bits,\nuntrained",
        "tab:green",
        (7, 0),
        "left",
    ),
    "near by head, 20 steps at 3e-5, seed 0": (
        "near, 8 bits",
        "tab:orange",
        (7, -2),
        "left",
    ),
    "small by head, 20 steps at 3e-5, seed 0": (
        "small, 8 bits",
        "tab:purple",
        (-7, 0),
        "right",
    ),
    "smallest by head, 20 steps at 3e-5, seed 0": (
        "smallest, 4 and 8 bits",
        "tab:cyan",
        (0, 10),
        "center",
    ),
    "constant by head, 20 steps at 3e-5, seed 0": (
        "constant, 4 and 8 bits",
        "tab:blue",
        (7, 0),
        "left",
    ),
}


def label(axes: Axes, x: float, y: float, text: str, colour: str, shift: float = 0.0) -> None:
    """Write a name beside the end of a line; the shift is in points."""
    place = {"xytext": (6, shift), "textcoords": "offset points", "va": "center", "fontsize": 9}
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


def draw_quality(axes: Axes, rows: dict) -> None:
    """How far models are from the teacher in 16 bits, by what they hold."""
    for name, (text, colour, place, side) in MODELS.items():
        at = 100 * rows[name]["part_of_cache"], rows[name]["kl_2048"]
        axes.plot(*at, color=colour, marker="o", markersize=5)
        axes.annotate(
            text,
            at,
            place,
            textcoords="offset points",
            color=colour,
            fontsize=9,
            ha=side,
            va="center",
        )
    axes.set_xscale("log")
    axes.set_ylim(0, 0.04)
    axes.set_yticks([0, 0.01, 0.02, 0.03, 0.04])
    axes.set_xlim(1.5, 100)
    axes.set_xticks([2, 5, 10, 20, 50, 100], ["2", "5", "10", "20", "50", "100"])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("cache at 8k tokens, % of the teacher's")


def main() -> None:
    """Draw the three panels."""
    decode = json.loads((RESULTS / "decode.json").read_text(encoding="utf-8"))
    quality = json.loads((RESULTS / "cache_bits.json").read_text(encoding="utf-8"))
    figure, panels = plt.subplot_mosaic(
        [["time", "cache"], ["near", "near"]], figsize=(8.5, 5.4), layout="constrained"
    )
    time, cache, near = panels["time"], panels["cache"], panels["near"]
    by_context = decode["after"]["by_context"]
    draw_costs(time, by_context, "ms", 1, {"hybrid": 5, "window, heads": -1, "Gated DeltaNet": -5})
    time.set_ylim(0, None)
    time.set_title("time of a token in 16 bits, ms", fontsize=10)
    draw_costs(cache, by_context, "cache_bytes", 1e6, {"window, heads": -6, "hybrid": 4})
    cache.set_title("size of the cache in 16 bits, MB", fontsize=10)
    cache.set_yscale("log")
    cache.set_yticks([5, 50, 500], ["5", "50", "500"])
    draw_quality(near, quality["rows"])
    near.set_title("students of SmolLM2: KL from the teacher, nats a token", fontsize=10)
    for axes in (time, cache, near):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
    figure.savefig(RESULTS / "overview.png", dpi=130)


if __name__ == "__main__":
    main()
