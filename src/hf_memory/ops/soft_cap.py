"""The soft cap of attention scores."""

import torch
from torch import Tensor


def soft_capped(scores: Tensor, cap: float | None) -> Tensor:
    """cap tanh(scores / cap), as in Gemma 2; the scores themselves if there is no cap, None or 0."""
    return cap * torch.tanh(scores / cap) if cap else scores
