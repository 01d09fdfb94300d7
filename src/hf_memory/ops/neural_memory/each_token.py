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
from hf_memory.ops.neural_memory.network import ACTIVATIONS, Norm, Rule, error, lift, network, orthogonal, retained
from hf_memory.ops.neural_memory.one_chunk import Layers


def run(learned, muon, q, k, v, coefficients, closed: list, state, initial: Layers, norm: Norm | None, rule: Rule):
    """Like `dual.run`, with coefficients for learning rates of one.

    `learned` has the learning rates [NC, N, C], thresholds of the loss, and keys, values and rates of earlier tokens
    [NC, N, C, c, ...]; the last four may be None. With Muon, `muon` has the coefficients of the weights, and
    `coefficients` those of the momentum.
    """
    W, S, A = state
    outputs, rows, needs_gradients = [], ((q, k, v), learned, coefficients, muon), torch.is_grad_enabled()
    form: Any = (
        partial(checkpoint, _chunk, use_reentrant=False, preserve_rng_state=False) if needs_gradients else _chunk
    )
    for n in range(len(q)):
        A = pick(closed[n] if A else True, W, A)
        row = [x and [y if y is None else y[n] for y in x] for x in rows]
        o, W, S = form(*row, W, S, A, initial, norm, rule)
        outputs.append(o)
    return torch.stack(outputs), (W, S, pick(closed[-1], W, A) if rule.chunk_size > 1 else ())


def _chunk(inputs, learned, coefficients, muon, W: Layers, S: Layers, A: Layers, initial: Layers, norm, rule: Rule):
    """o [N, C, V], weights and momentum after one chunk."""
    q, k, v = inputs
    per_token: Any = None if norm is None else tuple(x[:, None] for x in norm)
    gradients = _gradients(tuple(retained(a, rule) for a in A), k, v, learned, per_token, rule)
    returns = {"initial": initial, "anchor": A}.get(rule.forget_to)
    if muon is None:
        weights = _sums(coefficients, W, S, returns, gradients)
        *_, m, H = coefficients
        S = tuple(H * s - torch.einsum("nj,njio->nio", m[..., 0], g) for s, g in zip(S, gradients))
    else:
        slopes = _sums(coefficients, S, (), None, gradients)
        weights = _sums(muon, W, (), returns, tuple(-orthogonal(s) for s in slopes))
        S = tuple(s[:, -1] for s in slopes)
    o = network(q[:, :, None], tuple(retained(w, rule) for w in weights), rule, per_token)[:, :, 0]
    return o, tuple(w[:, -1] for w in weights), S


def _sums(coefficients, start: Layers, S: Layers, returns: Layers | None, steps: Layers) -> Layers:
    """Each layer's weights (or momentum) after each token, [N, C, d_in, d_out]."""
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


def _gradients(weights: Layers, k: Tensor, v: Tensor, learned, norm: Norm | None, rule: Rule) -> Layers:
    """The gradient of each token, [N, C, d_in, d_out] for each layer."""
    lr, threshold, *earlier = learned
    pairs = [x[:, :, None] for x in (k, v, lr)]  # [N, C, pairs, ...]
    if earlier[0] is not None:
        pairs = [torch.cat(both, 2) for both in zip(pairs, earlier)]
    k, v, lr = pairs
    threshold = None if threshold is None else threshold[:, :, None]
    weights = tuple(W[:, None] for W in weights)
    activation, X, Z = ACTIVATIONS[rule.activation], [lift(k, rule)], []
    for W in weights:
        Z.append(X[-1] @ W)
        X.append(lift(activation.value(Z[-1]), rule))
    D = lr[..., None] * error(Z[-1], k, v, rule, norm, threshold)
    gradients = [X[-2].mT @ D]
    for W, z, x in zip(weights[:0:-1], Z[-2::-1], X[-3::-1]):
        D = activation.backward((D @ W.mT)[..., : z.shape[-1]], z)
        gradients.insert(0, x.mT @ D)
    return tuple(gradients)
