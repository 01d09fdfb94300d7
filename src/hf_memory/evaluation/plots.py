"""The plots of a conversion."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Curve = Mapping[int, float]  # by position, distance or context, in tokens
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
        path: of the picture.
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
    """A figure that is drawn without a display, and its axes side by side."""
    figure = Figure(figsize=(4 * count, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, count, squeeze=False)[0]
