"""The plot of a conversion."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

History = list[dict[str, float]]  # [{"step": ..., "loss": ...}, ...]


def plot_conversion(path: Path, losses: Mapping[str, History], perplexities: Mapping[str, float]) -> None:
    """Write a PNG with the loss of each stage beside the held-out perplexity of each model."""
    figure = Figure(figsize=(4 * len(losses) + 4, 3.5), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display
    *stages, last = figure.subplots(1, len(losses) + 1)
    for axes, (name, history) in zip(stages, losses.items()):
        axes.plot([x["step"] for x in history], [x["loss"] for x in history])
        axes.set(title=name, xlabel="step", ylabel="loss", yscale="log")
    bars = last.bar(list(perplexities), list(perplexities.values()))
    last.bar_label(bars, fmt="%.1f")
    last.set(title="held-out perplexity", ylim=(0, 1.15 * max(perplexities.values())))
    figure.savefig(path, dpi=120, format="png")
