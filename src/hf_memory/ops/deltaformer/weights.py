"""Parts that DeltaFormer's writes and reads share: weight kernels, the past, and masks."""

from typing import NamedTuple

import torch
from torch import Tensor

from hf_memory.ops.masks import Mask, Tokens, all_tokens, causal, count, earlier, window

KERNELS = ("softmax", "linear", "relu", "round")


class DeltaFormerState(NamedTuple):
    """Keys and corrected values of the past; it grows with the past, as a KV cache does."""

    k: Tensor  # [B, S, H, K]
    u: Tensor  # [B, S, HV, V]


class Rule(NamedTuple):
    """How weights are computed: kernel, scale, mask and columns."""

    kernel: str
    scale: float
    mask: Mask
    columns: Tokens  # the past, then the present


def rule(
    kernel: str,
    scale: float | None,
    k: Tensor,
    S: int,
    mask: Tensor | None,
    tokens: int | None,
    *,
    strict: bool,
):
    """The rule for keys k [B, T, H, K] after a past of S columns; the arguments are those of `deltaformer`."""
    T = S + k.shape[1]
    columns = all_tokens(T, k) if mask is None else Tokens(count(mask))
    sees = earlier if strict else causal
    default = k.shape[-1] ** -0.5 if kernel == "softmax" else 1.0
    return Rule(
        kernel,
        default if scale is None else scale,
        sees if tokens is None else sees & window(tokens),
        columns,
    )


class _Round(torch.autograd.Function):
    """Rounds to the nearest integer, with the gradient of the identity."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def weights(scores: Tensor, seen: Tensor, kernel: str) -> Tensor:
    """Weights for scaled scores [..., T, S]; zero where a token is not seen, also in rows that see nothing."""
    if kernel == "softmax":
        return scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0) * seen
    scores = torch.where(seen, scores, 0.0)
    if kernel == "round":
        return _Round.apply(scores)
    return scores.relu() if kernel == "relu" else scores
