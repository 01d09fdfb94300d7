"""What DeltaFormer's writes and reads share: the kernels, who sees whom, and the past."""

from typing import NamedTuple

import torch
from torch import Tensor

KERNELS = ("softmax", "linear", "relu", "round")


class Past(NamedTuple):
    """Tokens before the present ones, from a state or a cache."""

    k: Tensor  # [B, S, H, K]
    u: Tensor  # [B, S, HV, V]
    age: Tensor  # [S]: tokens before the first present one, 1 for its predecessor; 0 or less where there is no token


class _Round(torch.autograd.Function):
    """To the nearest integer; gradients pass as if it were the identity."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def weights(scores: Tensor, seen: Tensor, kernel: str) -> Tensor:
    """Kernel values of scaled scores [..., T, S], zero where a token is not seen; a row that sees nothing is zero."""
    if kernel == "softmax":
        return scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0) * seen
    scores = torch.where(seen, scores, 0.0)
    if kernel == "round":
        return _Round.apply(scores)
    return scores.relu() if kernel == "relu" else scores


def visible(mask: Tensor, age: Tensor, T: int, window: int | None, *, strict: bool, start: int = 0) -> Tensor:
    """Which of S past and T_all present tokens each of `T` present ones from `start` on sees: [B, T, S + T_all].

    Args:
        mask: [B, S + T_all], false at padding.
        age: [S], see `Past`.
        T: present tokens that look.
        window: how many tokens, itself among them, a token sees at most; None means all.
        strict: whether a token does not see itself.
        start: the first that looks.
    """
    rows = torch.arange(start, start + T, device=mask.device)[:, None]
    present = torch.arange(mask.shape[1] - age.shape[0], device=mask.device)
    distance = torch.cat([rows + age, rows - present], dim=1)  # [T, S + T_all]
    exists = torch.cat([age > 0, torch.ones_like(present, dtype=torch.bool)])
    seen = exists & (distance > 0 if strict else distance >= 0)
    if window is not None:
        seen = seen & (distance < window)
    return seen & mask[:, None].bool()
