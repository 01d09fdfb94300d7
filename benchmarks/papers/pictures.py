"""How the claims' pictures look: means with ranges over seeds, plain figures at the axes, colours for all eyes."""

from collections.abc import Collection, Sequence
from statistics import mean

from cycler import cycler

COLORS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
)  # Okabe and Ito
MOST = 6  # lines of a picture
LOOK = {
    "font.size": 10,
    "axes.prop_cycle": cycler(marker=["o", "s", "^"]) * cycler(color=COLORS),
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#e5e5e5",
    "legend.fontsize": 9,
    "legend.framealpha": 0.9,
    "lines.markersize": 5,
}


def curve(axes, places: Sequence[float], runs: Sequence[Sequence[float]], **style) -> None:
    """The mean over runs at each place, and a bar from the lowest to the highest."""
    at_places = [(mean(values), min(values), max(values)) for values in zip(*runs)]
    sides = [[x - low for x, low, _ in at_places], [high - x for x, _, high in at_places]]
    axes.errorbar(places, [x for x, _, _ in at_places], sides, capsize=2, elinewidth=1, **style)


def curves(
    figure,
    places: Sequence[float],
    found: dict[str, list],
    dotted: float,
    dashed: Collection[str] = (),
    **labels,
) -> None:
    """A curve for each name over powers of two, with a dotted line at one place."""
    figure.set_size_inches(9, 4)
    axes = figure.subplots()
    for name, runs in found.items():
        curve(axes, places, runs, label=name, linestyle="--" if name in dashed else "-")
    axes.axvline(dotted, color="gray", linestyle=":")
    plain_ticks(axes, places)
    axes.set(**labels)
    label_ends(axes)


def label_ends(axes) -> None:
    """Write the name of each line beside the axes, at the height where it ends; at most MOST lines, limits are set."""
    handles, names = axes.get_legend_handles_labels()
    if len(names) > MOST:
        raise ValueError(f"a picture must have at most {MOST} lines, got {', '.join(names)}")
    lines = [getattr(handle, "lines", [handle])[0] for handle in handles]
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = [to_axes.transform(line.get_xydata()[-1])[1] for line in lines]
    lowest = -1.0
    for height, line, name in sorted(zip(ends, lines, names), key=lambda end: end[0]):
        lowest = max(height, lowest + 0.06)
        axes.annotate(
            name,
            (1.02, lowest),
            xycoords="axes fraction",
            va="center",
            color=line.get_color(),
            fontsize=9,
        )


def dots(axes, found: dict[str, Sequence[float]], color=lambda name: COLORS[0]) -> None:
    """A row for each name: a dot for each seed, and a line between the lowest and the highest."""
    for place, (name, values) in enumerate(found.items()):
        axes.plot(
            [min(values), max(values)],
            [place, place],
            color=color(name),
            marker="",
            linewidth=2,
            alpha=0.4,
        )
        axes.plot(values, [place] * len(values), "o", color=color(name))
    axes.set_yticks(range(len(found)), found)
    axes.invert_yaxis()


def plain_ticks(axes, ticks: Sequence[float], labels: Sequence[str] | None = None) -> None:
    """An axis of powers of two that is read without logarithms."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, labels or [f"{x:,g}" for x in ticks])
    axes.tick_params(axis="x", which="minor", length=0)
