"""The definition of the neural memory, one token at a time, with gradients of the inner loss by autograd.

Every other backend is tested against it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.func import grad
from torch.nn import functional as F

from hf_memory.ops.layout import repeat_heads
from hf_memory.ops.neural_memory.network import (
    LOSSES,
    RETENTIONS,
    Inputs,
    Layers,
    NeuralMemoryState,
    Norm,
    Rule,
    enter,
    keep,
    leave,
    network,
    orthogonal,
    pairs_of,
)
from hf_memory.ops.precision import in_float32
from hf_memory.ops.sample import Sample


@in_float32
def neural_memory(
    *rows: Any,
    initial_state: NeuralMemoryState,
    weights: Layers,
    rule: Rule,
    norm: Norm | None = None,
) -> tuple[Tensor, NeuralMemoryState]:
    """The recurrence in the op's docstring; `rows` are `Inputs` and a mask."""
    *given, mask = rows
    inputs = Inputs(*given)
    HV = given[2].shape[2]
    momentum, decay, threshold, muon_lr = inputs[4:]
    # [B, T, H, n, D]
    q, k, v, lr = (repeat_heads(x, HV) for x in (inputs.q[:, :, :, None], *pairs_of(inputs)))
    norm = None if norm is None else (norm[0][:, None], norm[1][:, None])
    W, S, A = enter(initial_state, weights)
    phase = initial_state.phase
    outputs = []
    for t in range(q.shape[1]):
        a = decay[:, t, :, None, None].exp()
        real = None if mask is None else mask[:, t, None, None, None]
        A = keep(phase.bool(), A, W) if A else W
        limit = None if threshold is None else threshold[:, t, :, None]
        step = tuple(
            -g for g in _gradient(_retained(A, rule), k[:, t], v[:, t], lr[:, t], limit, rule, norm)
        )
        if momentum is not None:
            eta = momentum[:, t, :, None, None].exp()
            step = tuple(eta * s + g for s, g in zip(S, step))
            S = _where(real, step, S)
        if muon_lr is not None:
            step = tuple(muon_lr[:, t, :, None, None] * orthogonal(s) for s in step)
        W = _where(real, tuple(w + s for w, s in zip(_forget(W, weights, A, a, rule), step)), W)
        o = network(q[:, t], _retained(W, rule), rule, norm)
        outputs.append((o if real is None else o * real)[:, :, 0])
        phase = (phase + (1 if mask is None else mask[:, t])) % rule.chunk_size
    A = () if rule.chunk_size == 1 else keep(phase.bool(), A, W)
    return torch.stack(outputs, dim=1), leave(W, S, A, phase, weights)


def _gradient(
    weights: Layers, k: Tensor, v: Tensor, lr: Tensor, threshold, rule: Rule, norm: Norm | None
) -> Layers:
    """The gradient of the losses of n pairs, k [B, H, n, K], v [B, H, n, V], summed with learning rates lr [B, H, n].

    With `max_grad_norm`, which requires n = 1, the gradient is clipped before it is multiplied by the rate.
    """
    error = network(k, weights, rule, norm) - v
    by_answer = LOSSES[rule.loss](error, threshold)  # not always the gradient of a function

    def linear_loss(weights: Layers, rates: Tensor) -> Tensor:
        return (rates[..., None] * by_answer * network(k, weights, rule, norm)).sum()

    if rule.max_grad_norm is not None:
        gradient = grad(linear_loss)(weights, torch.ones_like(lr))
        size = sum(x.square().sum((-2, -1)) for x in gradient)[..., None]
        lr = lr * (rule.max_grad_norm**2 / size.clamp(min=rule.max_grad_norm**2)).sqrt()
    return grad(linear_loss)(weights, lr)


def _retained(layers: Layers, rule: Rule) -> Layers:
    return tuple(RETENTIONS[rule.retention](x) for x in layers)


def _forget(weights: Layers, initial: Layers, anchor: Layers, a: Tensor, rule: Rule) -> Layers:
    targets = {"initial": initial, "anchor": anchor, "zero": tuple(map(torch.zeros_like, weights))}[
        rule.forget_to
    ]
    return tuple(a * w + (1 - a) * target for w, target in zip(weights, targets))


def _where(real: Tensor | None, new: Layers, old: Layers) -> Layers:
    return new if real is None else keep(real, new, old)


def example(
    *,
    depth: int = 1,
    chunk_size: int = 1,
    expansion: int = 2,
    momentum: bool = True,
    decay: bool = True,
    bias: bool = False,
    norm: bool = False,
    muon: bool = False,
    earlier: int = 0,
    **sizes: Any,
) -> dict:
    """Valid random arguments; `sizes` are arguments of `Sample`, and options of the rule, which are passed on."""
    options = {name: sizes.pop(name) for name in Rule._fields if name in sizes}
    s = Sample(**{"K": 8, **sizes})
    loss = options.get("loss")
    widths = [s.K, *[expansion * s.K] * (depth - 1), s.V]
    shapes = [(d_in + bias, d_out) for d_in, d_out in zip(widths, widths[1:])]
    P = sum(d_in * d_out for d_in, d_out in shapes)
    phase = torch.arange(1, s.B + 1) % chunk_size
    # its gradients are larger
    rate = (0.1 if depth > 1 else 0.5) / (10 if loss == "cubed" else 1) / chunk_size
    rows = {"q": s(s.H, s.K), "k": s.unit(s.H, s.K), "v": s(s.HV, s.V)}
    given: dict[str, Any] = {
        "lr": rate * s(s.HV).sigmoid(),
        "mask": torch.ones(s.B, s.T, dtype=torch.bool),
    }
    given["momentum"] = F.logsigmoid(s(s.HV)) if momentum else None
    given["decay"] = F.logsigmoid(s(s.HV) + 3) if decay else None
    given["weights"] = tuple(s.normal(s.HV, *shape) * shape[0] ** -0.5 for shape in shapes)
    given["threshold"] = s(s.HV).exp() if loss == "huber" else None
    given["muon_lr"] = s(s.HV).sigmoid() / chunk_size if muon else None
    if earlier:
        keys = s.unit(s.H, earlier, s.K)
        values = s(s.HV, earlier, s.V)
        given["earlier"] = (keys.to(s.dtype), values.to(s.dtype), rate * s(s.HV, earlier).sigmoid())
    if norm:
        given["norm"] = tuple(0.1 * s.normal(s.HV, s.V) + one for one in (1, 0))
    start, slope, anchor = (0.1 * s.normal(s.B, s.HV, width) for width in (P, P * momentum, P))
    anchor = torch.where(phase.bool()[:, None, None], anchor, start)[..., : P * (chunk_size > 1)]
    given["initial_state"] = NeuralMemoryState(start, slope, anchor, phase)
    gates = {"momentum": None, "decay": None}
    return gates | s.arguments(rows, **given, chunk_size=chunk_size, **options)
