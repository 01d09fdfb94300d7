"""Figures with confidence intervals."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

RESAMPLES = 1000
TAILS = (0.025, 0.975)  # quantiles of the 95 % interval


def mean(samples: Tensor, weights: Tensor) -> Tensor:
    """The weighted mean of samples: [..., N] -> [...]."""
    return (samples * weights).sum(-1) / weights.sum(-1)


def exp_of_mean(samples: Tensor, weights: Tensor) -> Tensor:
    """A perplexity from mean losses."""
    return mean(samples, weights).exp()


def best(samples: Tensor, weights: Tensor) -> Tensor:
    """The largest sample, for speeds: disturbances only make a run slower."""
    return samples.amax(-1)


class Estimate(float):
    """A number that was estimated from samples, with a confidence interval.

    Args:
        samples: [N], a value for each window, passage or run.
        weights: [N], the weights of the samples; default: equal weights.
        of: the function of samples and weights that gives the number; default: the mean.
    """

    samples: Tensor
    weights: Tensor
    of: Callable[[Tensor, Tensor], Tensor]

    def __new__(cls, samples: Tensor | Sequence[float], weights: Tensor | None = None, of=mean):
        samples = torch.as_tensor(samples, dtype=torch.float64, device="cpu")
        weights = torch.ones_like(samples) if weights is None else weights.to(samples)
        made = super().__new__(cls, of(samples, weights).item())
        made.samples, made.weights, made.of = samples, weights, of
        return made

    def __getnewargs__(self):
        return self.samples, self.weights, self.of  # arguments for copies and pickles

    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval by bootstrap; None for a single sample."""
        N = len(self.samples)
        if N < 2:
            return None
        drawn = torch.randint(N, (RESAMPLES, N), generator=torch.Generator().manual_seed(0))
        figures = self.of(self.samples[drawn], self.weights[drawn])
        low, high = figures.quantile(figures.new_tensor(TAILS)).tolist()
        return low, high


def described(figure: Any) -> dict[str, Any]:
    """A figure for JSON: an estimate with its interval and samples, or an exact value."""
    if not isinstance(figure, Estimate):
        return {"value": figure}
    low, high = figure.interval() or (None, None)
    return {"value": float(figure), "low": low, "high": high, "samples": figure.samples.tolist()}
