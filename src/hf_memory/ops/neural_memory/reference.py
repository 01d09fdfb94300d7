"""The definition of the neural memory, one token at a time, with gradients of the inner loss by autograd.

Every other backend is tested against it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.func import grad
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from hf_memory.ops.contract import in_float32, normal_numbers, repeat_heads
from hf_memory.ops.neural_memory.network import (
    LOSSES,
    RETENTIONS,
    Inputs,
    NeuralMemoryState,
    Norm,
    Rule,
    enter,
    keep,
    leave,
    network,
    orthogonal,
)

Layers = tuple[Tensor, ...]  # one tensor [B, H, d_in, d_out] for each layer


@in_float32
def neural_memory(
    *rows: Any, initial_state: NeuralMemoryState, weights: Layers, rule: Rule, norm: Norm | None = None
) -> tuple[Tensor, NeuralMemoryState]:
    """The recurrence in the op's docstring; `rows` are `Inputs` and a mask."""
    *given, mask = rows
    inputs, HV = Inputs(*given), given[2].shape[2]
    momentum, decay, threshold, muon_lr = inputs[4:]
    q, k, v, lr = (repeat_heads(x, HV) for x in (inputs.q[:, :, :, None], *inputs.pairs))  # [B, T, H, n, D]
    norm = None if norm is None else (norm[0][:, None], norm[1][:, None])
    W, S, A = enter(initial_state, weights)
    phase, outputs = initial_state.phase, []
    for t in range(q.shape[1]):
        a, eta = (None if x is None else x[:, t, :, None, None].exp() for x in (decay, momentum))
        real = None if mask is None else mask[:, t, None, None, None]
        A = keep(phase.bool(), A, W) if A else W
        limit = None if threshold is None else threshold[:, t, :, None]
        step = tuple(-g for g in _gradient(_retained(A, rule), k[:, t], v[:, t], lr[:, t], limit, rule, norm))
        if eta is not None:
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


def _gradient(weights: Layers, k: Tensor, v: Tensor, lr: Tensor, threshold, rule: Rule, norm: Norm | None) -> Layers:
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


def _forget(weights: Layers, initial: Layers, anchor: Layers, a: Tensor | None, rule: Rule) -> Layers:
    if a is None:
        return weights
    targets = {"initial": initial, "anchor": anchor, "zero": tuple(map(torch.zeros_like, weights))}[rule.forget_to]
    return tuple(a * w + (1 - a) * target for w, target in zip(weights, targets))


def _where(real: Tensor | None, new: Layers, old: Layers) -> Layers:
    return new if real is None else keep(real, new, old)


def example(
    *,
    B: int = 2,
    T: int = 65,
    H: int = 2,
    HV: int | None = None,
    K: int = 8,
    V: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    depth: int = 1,
    chunk_size: int = 1,
    expansion: int = 2,
    momentum: bool = True,
    decay: bool = True,
    bias: bool = False,
    norm: bool = False,
    muon: bool = False,
    earlier: int = 0,
    **options,
) -> dict:
    """Valid random arguments of the op; `options` are passed on to it."""
    HV, V, wide = HV or H, V or K, torch.promote_types(dtype, torch.float32)
    random = normal_numbers(seed)
    sizes = [K, *[expansion * K] * (depth - 1), V]
    shapes = [(d_in + bias, d_out) for d_in, d_out in zip(sizes, sizes[1:])]
    P = sum(d_in * d_out for d_in, d_out in shapes)
    rate = (0.1 if depth > 1 else 0.5) / (10 if options.get("loss") == "cubed" else 1)  # since its gradients are larger
    arguments: dict = {
        "q": random(B, T, H, K).to(dtype),
        "k": F.normalize(random(B, T, H, K), dim=-1).to(dtype),
        "v": random(B, T, HV, V).to(dtype),
        "lr": (random(B, T, HV).sigmoid() * rate / chunk_size).to(wide),
        "momentum": F.logsigmoid(random(B, T, HV)).to(wide) if momentum else None,
        "decay": F.logsigmoid(random(B, T, HV) + 3).to(wide) if decay else None,
        "weights": tuple((random(HV, *shape) * shape[0] ** -0.5).to(wide) for shape in shapes),
        "threshold": random(B, T, HV).exp().to(wide) if options.get("loss") == "huber" else None,
        "muon_lr": (random(B, T, HV).sigmoid() / chunk_size).to(wide) if muon else None,
        "mask": torch.ones(B, T, dtype=torch.bool),
    }
    if earlier:
        keys, values = F.normalize(random(B, T, H, earlier, K), dim=-1), random(B, T, HV, earlier, V)
        rates = (random(B, T, HV, earlier).sigmoid() * rate / chunk_size).to(wide)
        arguments["earlier"] = (keys.to(dtype), values.to(dtype), rates)
    if norm:
        arguments["norm"] = tuple((random(HV, V) * 0.1 + one).to(wide) for one in (1, 0))
    phase = torch.arange(1, B + 1) % chunk_size
    start, slope, anchor = (0.1 * random(B, HV, width) for width in (P, P * momentum, P))
    anchor = torch.where(phase.bool()[:, None, None], anchor, start)[..., : P * (chunk_size > 1)]
    arguments["initial_state"] = NeuralMemoryState(start.to(wide), slope.to(wide), anchor.to(wide), phase)
    return {**tree_map_only(Tensor, lambda x: x.to(device), arguments), "chunk_size": chunk_size, **options}
