"""The plots of a conversion."""

import math
from collections.abc import Iterable, Mapping
from colorsys import hsv_to_rgb
from pathlib import Path
from textwrap import fill
from typing import Any

from hf_memory.evaluation.needles import RIGHT
from hf_memory.evaluation.scores import SCORE
from hf_memory.evaluation.writing import TEXTS
from hf_memory.files.names import visible
from hf_memory.progress import History

WIDTH = 40  # characters of a title in one line
APART = 0.05  # distance of the marks of two models, where 1 is twice as many tokens
GOLDEN = 0.618  # turns of the color circle by which colors are far apart, however many there are
SMALLEST = 1e-12  # an axis that spans less shows rounding only


def plot_conversion(
    path: Path, losses: Mapping[str, History], perplexities: Mapping[str, float]
) -> None:
    """Write a PNG with the loss of each stage beside the held-out perplexity of each model."""
    figure, (*stages, last) = _panels(len(losses) + 1)
    for axes, (stage, history) in zip(stages, losses.items()):
        for label, name in {"training": "loss", "validation": "eval_loss"}.items():
            if points := [(x["step"], x[name]) for x in history if name in x]:
                axes.plot(*zip(*points), label=label)
        # a student that equals its teacher has no loss
        is_above_zero = any(x.get("loss", 0) > 0 for x in history)
        axes.set(
            title=stage, xlabel="step", ylabel="loss", yscale="log" if is_above_zero else "linear"
        )
        if any("eval_loss" in x for x in history):
            axes.legend()
    bars = last.bar(list(perplexities), list(perplexities.values()))
    last.bar_label(bars, fmt="%.1f")
    last.set(title="held-out perplexity", ylim=(0, 1.15 * max(perplexities.values())))
    figure.savefig(path, dpi=120, format="png", bbox_inches="tight")  # a legend may be wider


def plot_heads(
    path: Path, scores: Iterable[tuple[int, int, float]], chosen: Iterable[tuple[int, int, float]]
) -> None:
    """Write a PNG with the score of each head, and a cross on those that were chosen.

    Args:
        path: where the picture is written.
        scores: a layer, a head and its score, of all heads that were ranked.
        chosen: the same of those that were chosen.
    """
    layers, heads, values = zip(*scores)
    figure, (panel,) = _panels(1)
    points = panel.scatter(layers, heads, c=values, marker="s", s=60, cmap="viridis")
    panel.plot(*list(zip(*chosen))[:2], "x", color="red", label="keep everything")
    panel.set(
        title="scores of key-value heads", xlabel="layer", ylabel="head", yticks=sorted({*heads})
    )
    figure.colorbar(points)
    _finish(figure, path)


def plot_task(path: Path, models: Mapping[str, Mapping[str, Mapping[str, dict]]]) -> None:
    """Write a PNG with a panel for each figure, with intervals; for needles, there is one more for each model.

    Args:
        path: the file to write; there is none without figures.
        models: {model: {tokens or the name of a task: {figure: as in a record}}}.
    """
    rows = [figures for found in models.values() for figures in found.values()]
    labels = list(dict.fromkeys(label for row in rows for label in row if label != TEXTS))
    maps = {model: found for model, found in models.items() if found} if RIGHT in labels else {}
    if not labels:
        return
    figure, axes = _panels(len(labels) + len(maps))
    for panel, label in zip(axes, labels):
        curves = {
            name: {at: row[label] for at, row in found.items() if label in row}
            for name, found in models.items()
        }
        _plot_models(panel, curves)
        if "bytes" in label:
            panel.yaxis.set_major_formatter(lambda size, _: f"{size / 1e6:g}")
        panel.set(title=fill(label.replace("bytes", "MB"), WIDTH))
    for panel, (model, found) in zip(axes[len(labels) :], maps.items()):
        panel.imshow(
            list(zip(*(row[RIGHT]["samples"] for row in found.values()))),
            vmin=0,
            vmax=1,
            aspect="auto",
        )
        panel.set_xticks(range(len(found)), found)
        title = fill(f"{RIGHT}, {_shown(model)}", WIDTH)
        panel.set(
            title=title, xlabel="tokens", ylabel="needle at the end ... the beginning", yticks=[]
        )
    _finish(figure, path)


def plot_scores(path: Path, models: Mapping[str, Mapping[str, dict]]) -> None:
    """Write a PNG with a bar for each kind of question and each model, with intervals; none without scores.

    Args:
        path: the file to write.
        models: {model: {kind of question: figures, among them the score}}.
    """
    names = list(dict.fromkeys(name for found in models.values() for name in found))
    if not names:
        return
    # inches, of legend and bars
    height = 0.6 + 0.2 * len(models) + max(0.4, 0.07 * len(models)) * len(names)
    figure, (panel,) = _panels(1, height=height)
    thick = 0.8 / len(models)
    for i, (model, found) in enumerate(models.items()):
        scores = [row[SCORE] for row in found.values()]
        places = [names.index(name) + (i - (len(models) - 1) / 2) * thick for name in found]
        sides = list(zip(*map(_sides, scores))) or None
        values = [x["value"] for x in scores]
        panel.barh(
            places, values, thick, xerr=sides, capsize=2, color=_color(i), label=_shown(model)
        )
    panel.set_yticks(range(len(names)), names)
    panel.invert_yaxis()
    panel.margins(y=0.02)
    panel.set(xlabel=f"{SCORE}, with 95 % intervals", xlim=(0, 1))
    _finish(figure, path)


def _plot_models(panel, models: Mapping[str, Mapping[str, dict]]) -> None:
    """Values with their intervals, over numbers of tokens or names of tasks; the models stand beside each other."""
    all_names = {at for curve in models.values() for at in curve}
    names = sorted(all_names, key=lambda at: (int(at) if at.isdigit() else 0, at))
    places = {at: math.log2(int(at)) if at.isdigit() else i for i, at in enumerate(names)}
    for i, (model, curve) in enumerate(models.items()):
        if not curve:
            continue
        x = [places[at] + APART * (i - (len(models) - 1) / 2) for at in curve]
        sides = list(zip(*map(_sides, curve.values())))
        values = [figure["value"] for figure in curve.values()]
        panel.errorbar(
            x, values, sides, marker="o", capsize=3, color=_color(i), label=_shown(model)
        )
    panel.set_xticks(list(places.values()), list(places))
    panel.set_xlabel("tokens" if all(at.isdigit() for at in places) else "")
    panel.set_xlim(min(places.values(), default=0) - 0.5, max(places.values(), default=0) + 0.5)
    low, high = panel.get_ylim()
    if high - low < SMALLEST:
        panel.set_ylim(low - 1, high + 1)


def _color(number: int) -> Any:
    """A color for each of many models; matplotlib's ten begin again with the eleventh."""
    return f"C{number}" if number < 10 else hsv_to_rgb(number * GOLDEN % 1, 0.9, 0.5)


def _sides(figure: dict) -> tuple[float, float]:
    """The distances of a figure to both ends of its interval, at least 0 in spite of rounding."""
    if figure.get("low") is None:
        return 0.0, 0.0
    return max(0.0, figure["value"] - figure["low"]), max(0.0, figure["high"] - figure["value"])


def _panels(count: int, height: float = 4):
    """A figure with axes, at most two side by side, which needs no display."""
    from matplotlib.backends.backend_agg import (
        FigureCanvasAgg,  # takes half a second, which most calls do not need
    )
    from matplotlib.figure import Figure

    rows = (count + 1) // 2
    width = 6 if count == 1 else 9
    figure = Figure(figsize=(width, height if rows == 1 else 3.2 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, [figure.add_subplot(rows, min(count, 2), i + 1) for i in range(count)]


def _finish(figure, path: Path) -> None:
    """Add a legend of all models below the panels, and write the picture."""
    shown: dict[str, Any] = {}
    for panel in figure.axes:
        handles, labels = panel.get_legend_handles_labels()
        shown |= dict(zip(labels, handles))
    figure.legend(
        list(shown.values()), list(shown), loc="outside lower center", ncols=len(figure.axes)
    )
    figure.savefig(path, dpi=120, format="png", bbox_inches="tight")  # a legend may be wider


def _shown(name: str) -> str:
    """The name of a model as matplotlib shows it: $ begins a formula there, and names with a leading _ are hidden."""
    name = visible(name).replace("$", r"\$")
    return f"\u200b{name}" if name.startswith("_") else name
