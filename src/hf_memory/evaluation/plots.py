"""The plots of a conversion."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hf_memory.evaluation.needles import RIGHT
from hf_memory.evaluation.writing import TEXTS

Curve = Mapping[int, float]  # values by position, distance or context length, in tokens
History = list[dict[str, float]]  # [{"step": ..., "loss": ...}, ...]


def plot_conversion(path: Path, losses: Mapping[str, History], perplexities: Mapping[str, float]) -> None:
    """Write a PNG with the loss of each stage beside the held-out perplexity of each model."""
    figure, (*stages, last) = _panels(len(losses) + 1)
    for axes, (name, history) in zip(stages, losses.items()):
        axes.plot([x["step"] for x in history], [x["loss"] for x in history])
        axes.set(title=name, xlabel="step", ylabel="loss", yscale="log")
    bars = last.bar(list(perplexities), list(perplexities.values()))
    last.bar_label(bars, fmt="%.1f")
    last.set(title="held-out perplexity", ylim=(0, 1.15 * max(perplexities.values())))
    figure.savefig(path, dpi=120, format="png")


def plot_contexts(path: Path, panels: Mapping[str, Mapping[str, Curve]], xlabels: Mapping[str, str]) -> None:
    """Write a PNG with a panel for each measure, in which each model is a curve over tokens.

    Args:
        path: where the picture is written.
        panels: {measure: {model: {tokens: value}}}.
        xlabels: {measure: what its tokens are}.
    """
    figure, axes = _panels(len(panels))
    for panel, (measure, curves) in zip(axes, panels.items()):
        for model, curve in curves.items():
            panel.plot(list(curve), list(curve.values()), marker="o", label=model)
        panel.set_xscale("log", base=2)
        panel.set(title=measure, xlabel=xlabels[measure])
    axes[0].legend()
    figure.savefig(path, dpi=120, format="png")


def _panels(count: int):
    """A figure with axes side by side, which needs no display."""
    figure = Figure(figsize=(4 * count, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, count, squeeze=False)[0]


def plot_task(path: Path, models: Mapping[str, Mapping[str, Mapping[str, dict]]]) -> None:
    """Write a PNG of a task's results: a panel for each figure, with intervals; for needles, one for each model.

    Args:
        path: the file to write; there is none for a task without figures.
        models: {model: {tokens: {figure: described}}}.
    """
    rows = [figures for found in models.values() for figures in found.values()]
    labels = list(dict.fromkeys(label for row in rows for label in row if label != TEXTS))
    maps = models if RIGHT in labels else {}
    if not labels:
        return
    figure, axes = _panels(len(labels) + len(maps))
    for panel, label in zip(axes, labels):
        for model, found in models.items():
            _plot_figure(panel, model, {at: row[label] for at, row in found.items() if label in row})
        panel.set(title=label)
    axes[0].legend()
    for panel, (model, found) in zip(axes[len(labels) :], maps.items()):
        panel.imshow(list(zip(*(row[RIGHT]["samples"] for row in found.values()))), vmin=0, vmax=1, aspect="auto")
        panel.set_xticks(range(len(found)), found)
        panel.set(title=f"{RIGHT}, {model}", xlabel="tokens", ylabel="needle at the end ... the beginning", yticks=[])
    figure.savefig(path, dpi=120, format="png")


def _plot_figure(panel, model: str, curve: Mapping[str, dict]) -> None:
    """Values with their intervals, over numbers of tokens, or over the names of tasks."""
    are_tokens = all(at.isdigit() for at in curve)
    places = [int(at) for at in curve] if are_tokens else list(curve)
    values = [x["value"] for x in curve.values()]
    sides = list(zip(*map(_sides, curve.values())))
    panel.errorbar(places, values, sides, marker="o", capsize=3, label=model)
    if are_tokens and curve:
        panel.set_xscale("log", base=2)


def _sides(figure: dict) -> tuple[float, float]:
    """The distances of a figure to both ends of its interval, at least 0 in spite of rounding."""
    if figure.get("low") is None:
        return 0.0, 0.0
    return max(0.0, figure["value"] - figure["low"]), max(0.0, figure["high"] - figure["value"])
