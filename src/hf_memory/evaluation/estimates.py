"""Figures with confidence intervals."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

RESAMPLES = 1000
TAILS = (0.025, 0.975)  # quantiles of the 95 % interval
WIDTH = 1.96  # half-width of a 95 % interval in standard errors
TINY = 1e-12


def mean(samples: Tensor, weights: Tensor) -> Tensor:
    """The weighted mean of samples: [..., N] -> [...]."""
    return (samples * weights).sum(-1) / weights.sum(-1)


def exp_of_mean(samples: Tensor, weights: Tensor) -> Tensor:
    """A perplexity from mean losses."""
    return mean(samples, weights).exp()


def ratio_of_sums(samples: Tensor, weights: Tensor) -> Tensor:
    """A ratio of two means, with the numbers above as samples and those below as weights."""
    return samples.sum(-1) / weights.sum(-1).clamp_min(TINY)


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
        made.samples = samples
        made.weights = weights
        made.of = of
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


class Share(Estimate):
    """The mean of numbers from 0 to 1, with Wilson's interval, which is not empty if all of them are the same.

    It is that of zeros and ones, and wider than needed for numbers between them, which vary less.
    """

    def interval(self) -> tuple[float, float]:
        """The 95 % interval."""
        N = len(self.samples)
        p = float(self)
        spread = WIDTH * math.sqrt(p * (1 - p) / N + WIDTH**2 / (4 * N**2))
        middle = p + WIDTH**2 / (2 * N)
        scale = 1 + WIDTH**2 / N
        high = min(1.0, (middle + spread) / scale)
        low = p**2 / (scale * high)  # the other root, exactly zero where p is
        return low, high


def described(figure: Any) -> dict[str, Any]:
    """A figure for JSON: an estimate with its interval and samples, or an exact value."""
    if not isinstance(figure, Estimate):
        return {"value": figure}
    low, high = figure.interval() or (None, None)
    return {"value": float(figure), "low": low, "high": high, "samples": figure.samples.tolist()}
