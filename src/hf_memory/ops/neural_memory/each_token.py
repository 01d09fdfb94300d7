"""Memories that are not linear in their gradients: the weights after every token are computed, chunk by chunk.

With the coefficients of `chunk`, X and D of `dual`, the retention R (see `Learning`), and gradients
G_j = sum lr X^T D, at R(A), of the pairs that token j learns:

    W_t = beta_t W + c_t S - sum_{j <= t} P_tj G_j,   o_t = M(q_t; R(W_t))

With Muon the first sum gives S, and the weights are a second sum, over the orthogonalised S. A chunk needs memory for C
times the weights; only the weights between chunks are saved for the backward pass.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_memory.ops.neural_memory.dual import pick
from hf_memory.ops.neural_memory.network import (
    ACTIVATIONS,
    RETENTIONS,
    Inputs,
    Norm,
    Rule,
    error,
    lift,
    network,
    orthogonal,
)
from hf_memory.ops.neural_memory.one_chunk import Layers, Memory


def run(inputs: Inputs, coefficients, muon, memory: Memory):
    """Like `dual.run`, with coefficients for learning rates of one.

    With Muon, `muon` has the coefficients of the weights, and `coefficients` those of the momentum; else it is None.
    """
    outputs: list[Tensor] = []
    all_rows: Any = (inputs, coefficients, muon)
    form: Any = _chunk
    if torch.is_grad_enabled():
        form = partial(checkpoint, _chunk, use_reentrant=False, preserve_rng_state=False)
    for n in range(len(inputs.q)):
        memory = memory._replace(A=pick(memory.closed[n] if memory.A else True, memory.W, memory.A))
        rows = [x and type(x)(*(None if y is None else y[n] for y in x)) for x in all_rows]
        o, W, S = form(*rows, memory)
        memory = memory._replace(W=W, S=S)
        outputs.append(o)
    W, S, A = memory[:3]
    return torch.stack(outputs), (
        W,
        S,
        pick(memory.closed[-1], W, A) if memory.rule.chunk_size > 1 else (),
    )


def _chunk(inputs: Inputs, coefficients, muon, memory: Memory):
    """o [N, C, V], weights and momentum after one chunk."""
    W, S, A, initial, norm, _, rule = memory
    retained = RETENTIONS[rule.retention]
    per_token: Any = None if norm is None else tuple(x[:, None] for x in norm)
    gradients = _gradients(tuple(map(retained, A)), inputs, per_token, rule)
    returns = {"initial": initial, "anchor": A}.get(rule.forget_to)
    if muon is None:
        weights = _after_each_token(coefficients, W, S, returns, gradients)
        *_, m, H = coefficients
        S = tuple(H * s - torch.einsum("nj,njio->nio", m[..., 0], g) for s, g in zip(S, gradients))
    else:
        slopes = _after_each_token(coefficients, S, (), None, gradients)
        weights = _after_each_token(muon, W, (), returns, tuple(-orthogonal(s) for s in slopes))
        S = tuple(s[:, -1] for s in slopes)
    o = network(inputs.q[:, :, None], tuple(map(retained, weights)), rule, per_token)[:, :, 0]
    return o, tuple(w[:, -1] for w in weights), S


def _after_each_token(
    coefficients, start: Layers, S: Layers, returns: Layers | None, steps: Layers
) -> Layers:
    """Each layer's weights (or momentum) after each token of a chunk, [N, C, d_in, d_out].

    Args:
        coefficients: of the chunk.
        start: the weights (or the momentum) before it.
        S: the momentum before it, which is added to weights; empty if there is none.
        returns: the weights to which weights decay; None for zero.
        steps: the gradient of each token [N, C, d_in, d_out].
    """
    P, beta, c, *_ = coefficients
    layers = []
    for layer, step in enumerate(steps):
        w = start[layer][:, None] if beta is None else beta[..., None] * start[layer][:, None]
        if beta is not None and returns:
            w = w + (1 - beta[..., None]) * returns[layer][:, None]
        if S:
            w = w + c[..., None] * S[layer][:, None]
        layers.append(w - torch.einsum("ntj,njio->ntio", P, step))
    return tuple(layers)


def _gradients(weights: Layers, inputs: Inputs, norm: Norm | None, rule: Rule) -> Layers:
    """The gradient of each token, [N, C, d_in, d_out] for each layer."""
    k, v, lr = inputs.pairs
    threshold = None if inputs.threshold is None else inputs.threshold[:, :, None]
    weights = tuple(W[:, None] for W in weights)
    activation = ACTIVATIONS[rule.activation]
    X = [lift(k, rule)]
    Z = []
    for W in weights:
        Z.append(X[-1] @ W)
        X.append(lift(activation.value(Z[-1]), rule))
    D = lr[..., None] * error(Z[-1], k, v, rule, norm, threshold)
    gradients = [X[-2].mT @ D]
    for W, z, x in zip(weights[:0:-1], Z[-2::-1], X[-3::-1]):
        D = activation.backward((D @ W.mT)[..., : z.shape[-1]], z)
        gradients.insert(0, x.mT @ D)
    return tuple(gradients)
