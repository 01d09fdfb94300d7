"""The network of a memory: activations with derivatives, norm, error and state.

A memory of depth L maps a row x to x_L, plus x itself with `residual`, where x_0 = x, x_l = s(x_{l-1} W_l) and the last
layer has no s but an optional layer norm. With `bias` every matrix has one more row, for a constant input of 1.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import pi, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

NORM_EPS = 1e-6
STEEPNESS = 10.0  # factor in the tanh that approximates the sign
Norm = tuple[Tensor, Tensor]  # weight and bias of the layer norm
Layers = tuple[Tensor, ...]  # a matrix [..., d_in, d_out] for each layer


class Inputs(NamedTuple):
    """What a memory reads: arguments of `neural_memory` for each token, or None. With earlier pairs, these stand after
    the token's own: k [B, T, H, pairs, K], v [B, T, HV, pairs, V] and lr [B, T, HV, pairs]."""

    q: Tensor
    k: Tensor
    v: Tensor
    lr: Tensor
    momentum: Tensor | None
    decay: Tensor
    threshold: Tensor | None
    muon_lr: Tensor | None


class Rows(NamedTuple):
    """What a memory reads in chunks [NC, N, C, ...], with the coefficients of `chunk`, or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    lr: Tensor
    threshold: Tensor | None
    P: Tensor  # [NC, N, C, C]
    beta: Tensor  # [NC, N, C, 1]
    c: Any = None  # [NC, N, C, 1]; this and the next two with momentum
    m: Any = None  # [NC, N, C, 1]
    H: Any = None  # [NC, N, 1, 1], or with Muon for each token
    slows: Any = None  # [NC, N, C, C], L(eta), only with Muon


def pairs_of(given: Inputs | Rows) -> tuple[Tensor, Tensor, Tensor]:
    """k, v and lr with a dimension of pairs, the last one of lr and the last but one of k and v."""
    if given.k.ndim > given.q.ndim:
        return given.k, given.v, given.lr
    return given.k.unsqueeze(-2), given.v.unsqueeze(-2), given.lr.unsqueeze(-1)


class Rule(NamedTuple):
    """The options of a memory that are constant over a call."""

    chunk_size: int = 1
    activation: str = "silu"
    residual: bool = False
    bias: bool = False
    forget_to: str = "initial"  # what weights decay to: "initial", "anchor" or "zero"
    max_grad_norm: float | None = None  # largest norm of a token's gradient
    loss: str = "squared"  # "squared", "cubed" or "huber"
    retention: str = "all"  # function R of the stored weights: "all", "norm" or "softmax"

    muon: bool = False  # whether steps are orthogonalised
    window: int = 1  # number of pairs that each token learns

    @property
    def is_linear(self) -> bool:
        """Whether weights are linear in the gradients, with one pair for each token."""
        return (self.retention, self.muon, self.window) == ("all", False, 1)


class Memory(NamedTuple):
    """A memory before some of the tokens of a call, for N sequences and heads; layers are [N, d_in, d_out]."""

    W: Layers
    S: Layers  # momentum; empty without
    A: Layers  # anchor; empty if it is always the weights
    initial: Layers
    norm: Norm | None  # [N, 1, V] each
    rule: Rule


class NeuralMemoryState(NamedTuple):
    """The state of a memory; all zeros if it has read nothing. P is the number of weights of a head."""

    weights: Tensor  # [N, H, P]: weights minus initial weights
    momentum: Tensor  # [N, H, P], or [N, H, 0] without momentum
    anchor: Tensor  # [N, H, P]: weights at which gradients are taken, in the same form; [N, H, 0] if chunk_size is 1
    phase: Tensor  # [N] int64: number of tokens read of the incomplete chunk


def lift(x: Tensor, rule: Rule) -> Tensor:
    """Rows x [..., d] with a further channel for biases, if the memory has any: the constant that they multiply."""
    return F.pad(x, (0, 1), value=1.0) if rule.bias else x


def standardized(z: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of mean 0 and variance 1, and their factors. The third derivative of PyTorch's layer_norm is wrong."""
    centered = z - z.mean(-1, keepdim=True)
    rstd = (centered.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt()
    return centered * rstd, rstd


def standardized_backward(g: Tensor, z_hat: Tensor, rstd: Tensor) -> Tensor:
    """The gradient of z from g, that of `standardized(z)`."""
    return rstd * (g - g.mean(-1, keepdim=True) - z_hat * (g * z_hat).mean(-1, keepdim=True))


def orthogonal(x: Tensor) -> Tensor:
    """Five Newton-Schulz steps of Muon [..., m, n]: singular values become about 1. https://kellerjordan.github.io/posts/muon"""
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / ((x * x).sum((-2, -1), keepdim=True) + NORM_EPS**2).sqrt()
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if is_tall else x


def output(z: Tensor, x: Tensor, rule: Rule, norm: Norm | None) -> Tensor:
    """The output of the memory, from the last layer's rows z and the network's input x."""
    z = z if norm is None else standardized(z)[0] * norm[0] + norm[1]
    return z + x if rule.residual else z


def network(x: Tensor, weights: tuple[Tensor, ...], rule: Rule, norm: Norm | None) -> Tensor:
    """The output of the memory for rows x [..., n, K], with weights [..., d_in, d_out]."""
    z = lift(x, rule) @ weights[0]
    for W in weights[1:]:
        z = lift(ACTIVATIONS[rule.activation].value(z), rule) @ W
    return output(z, x, rule, norm)


# the weights R(W) [..., d_in, d_out] of a layer for the stored W
RETENTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda stored: stored,
    "norm": lambda stored: stored / ((stored**4).sum((-2, -1), keepdim=True) + NORM_EPS**2).sqrt(),
    "softmax": lambda stored: stored.softmax(-2),
}


def _huber(e: Tensor, threshold: Tensor) -> Tensor:
    size = (e.square().sum(-1, keepdim=True) + NORM_EPS).sqrt()
    threshold = threshold[..., None]
    return torch.where(size <= threshold, e, threshold * torch.tanh(STEEPNESS * e))


# gradients for errors e [..., V] and thresholds [...]
LOSSES: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "squared": lambda e, threshold: e,
    "cubed": lambda e, threshold: 3 * torch.tanh(STEEPNESS * e) * (e.square() + NORM_EPS),
    "huber": _huber,
}


def error(
    z: Tensor, k: Tensor, v: Tensor, rule: Rule, norm: Norm | None, threshold: Tensor | None = None
) -> Tensor:
    """The gradient of the inner loss with respect to the last layer's rows z [..., V], for keys k and values v."""
    if norm is None:
        return LOSSES[rule.loss](output(z, k, rule, None) - v, threshold)
    z_hat, rstd = standardized(z)
    e = LOSSES[rule.loss](output(z_hat * norm[0] + norm[1], k, rule, None) - v, threshold)
    return standardized_backward(e * norm[0], z_hat, rstd)


class Activation(NamedTuple):
    """An activation s and its derivative."""

    value: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]  # g, x -> g s'(x)


def _silu_slope(x: Tensor) -> Tensor:
    """Derivative of x sigmoid(x)."""
    s = x.sigmoid()
    return s * (1 + x * (1 - s))


def _gelu_slope(x: Tensor) -> Tensor:
    """Derivative of gelu."""
    return 0.5 * (1 + torch.erf(x / sqrt(2))) + x * (-0.5 * x.square()).exp() / sqrt(2 * pi)


def _gelu_tanh_slope(x: Tensor) -> Tensor:
    """Derivative of the tanh approximation of gelu."""
    c = sqrt(2 / pi)
    t = torch.tanh(c * (x + 0.044715 * x**3))
    slope = c * (1 + 3 * 0.044715 * x.square())
    return 0.5 * (1 + t) + 0.5 * x * (1 - t.square()) * slope


aten = torch.ops.aten


def _silu_backward(g: Tensor, x: Tensor) -> Tensor:
    """The backward of silu; PyTorch's own cannot be differentiated."""
    return g * _silu_slope(x) if torch.is_grad_enabled() else aten.silu_backward(g, x)


def _backward(fused: Callable, slope: Callable) -> Callable:
    """g s'(x), by a function of PyTorch's, or in exported graphs, whose runtimes do not have it, by the slope s'."""

    def backward(g: Tensor, x: Tensor) -> Tensor:
        return g * slope(x) if torch.compiler.is_exporting() else fused(g, x)

    return backward


ACTIVATIONS = {
    "silu": Activation(F.silu, _backward(_silu_backward, _silu_slope)),
    "gelu": Activation(F.gelu, _backward(aten.gelu_backward, _gelu_slope)),
    "gelu_tanh": Activation(
        partial(F.gelu, approximate="tanh"),
        _backward(partial(aten.gelu_backward, approximate="tanh"), _gelu_tanh_slope),
    ),
}


def unpack(packed: Tensor, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """[..., P] -> [..., d_in, d_out] for each layer of `like`; an empty tuple for [..., 0]."""
    if packed.shape[-1] == 0:
        return ()
    parts = packed.split([W.shape[-2] * W.shape[-1] for W in like], dim=-1)
    return tuple(part.unflatten(-1, W.shape[-2:]) for part, W in zip(parts, like))


def pack(layers: Sequence[Tensor]) -> Tensor:
    """[..., d_in, d_out] of each layer -> [..., P]."""
    return torch.cat([x.flatten(-2) for x in layers], dim=-1)


def keep(
    condition: Tensor, layers: tuple[Tensor, ...], others: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Layers [N, H, d_in, d_out] of sequences for which the condition [N, ...] holds, else the others."""
    condition = condition.view(-1, 1, 1, 1)
    return tuple(torch.where(condition, x, y) for x, y in zip(layers, others))


def enter(state: NeuralMemoryState, initial: tuple[Tensor, ...]):
    """(weights, momentum, anchor) of a state, each a tuple of [N, H, d_in, d_out]; `initial` is [H, d_in, d_out]."""
    weights = tuple(I + x for I, x in zip(initial, unpack(state.weights, initial)))
    anchor = tuple(I + x for I, x in zip(initial, unpack(state.anchor, initial)))
    return weights, unpack(state.momentum, initial), anchor


def leave(
    weights, momentum, anchor, phase: Tensor, initial: tuple[Tensor, ...]
) -> NeuralMemoryState:
    """The inverse of `enter`."""
    empty = weights[0].new_empty(*weights[0].shape[:2], 0)
    moved = (tuple(x - I for I, x in zip(initial, layers)) for layers in (weights, anchor))
    weights, anchor, momentum = (pack(x) if x else empty for x in (*moved, momentum))
    return NeuralMemoryState(weights, momentum, anchor, phase)
