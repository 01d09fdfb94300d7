"""Memories that are not linear in their gradients: the weights after every token are formed, a chunk at a time.

With the coefficients of `chunk`, X and D of `dual` and R what makes weights of what the memory keeps:

    X, D at R(A),   W_t = beta_t W + c_t S - sum_{j <= t} P_tj X_j^T D_j,   o_t = M(q_t; R(W_t))

A chunk takes memory for C times the weights; only the weights between chunks are kept for the backward.
"""

from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_memory.ops.neural_memory.dual import pick
from hf_memory.ops.neural_memory.network import ACTIVATIONS, Norm, Rule, error, lift, network, retained
from hf_memory.ops.neural_memory.one_chunk import Layers


def run(threshold, q, k, v, coefficients, closed: list, state, initial: Layers, norm: Norm | None, rule: Rule):
    """As `dual.run`, with thresholds [NC, N, C] of the loss, or None."""
    W, S, A = state
    outputs, rows, again = [], (q, k, v, threshold, *coefficients), torch.is_grad_enabled()
    form = partial(checkpoint, _chunk, use_reentrant=False, preserve_rng_state=False) if again else _chunk
    for n in range(len(q)):
        A = pick(closed[n] if A else True, W, A)
        o, W, S = form([x if x is None else x[n] for x in rows], W, S, A, initial, norm, rule)
        outputs.append(o)
    return torch.stack(outputs), (W, S, pick(closed[-1], W, A) if rule.chunk_size > 1 else ())


def _chunk(rows: list, W: Layers, S: Layers, A: Layers, initial: Layers, norm: Norm | None, rule: Rule):
    """o [N, C, V], weights and momentum after one chunk."""
    q, k, v, threshold, P, beta, c, m, H = rows
    gradients = _gradients(tuple(retained(a, rule) for a in A), k, v, threshold, norm, rule)
    layers, returns = [], {"initial": initial, "anchor": A}.get(rule.forget_to)
    for layer, (w, g) in enumerate(zip(W, gradients)):
        w = w[:, None] if beta is None else beta[..., None] * w[:, None]  # [N, C, d_in, d_out]
        if beta is not None and returns:
            w = w + (1 - beta[..., None]) * returns[layer][:, None]
        if S:
            w = w + c[..., None] * S[layer][:, None]
        layers.append(w - torch.einsum("ntj,njio->ntio", P, g))
    per_token = None if norm is None else (norm[0][:, None], norm[1][:, None])
    o = network(q[:, :, None], tuple(retained(w, rule) for w in layers), rule, per_token)[:, :, 0]
    S = tuple(H * s - torch.einsum("nj,njio->nio", m[..., 0], g) for s, g in zip(S, gradients))
    return o, tuple(w[:, -1] for w in layers), S


def _gradients(weights: Layers, k: Tensor, v: Tensor, threshold, norm: Norm | None, rule: Rule) -> Layers:
    """Of the loss of each token [N, C, d_in, d_out], for each layer."""
    activation, X, Z = ACTIVATIONS[rule.activation], [lift(k, rule)], []
    for W in weights:
        Z.append(X[-1] @ W)
        X.append(lift(activation.value(Z[-1]), rule))
    D = error(Z[-1], k, v, rule, norm, threshold)
    gradients = [X[-2][..., :, None] * D[..., None, :]]
    for W, z, x in zip(weights[:0:-1], Z[-2::-1], X[-3::-1]):
        D = activation.backward((D @ W.mT)[..., : z.shape[-1]], z)
        gradients.insert(0, x[..., :, None] * D[..., None, :])
    return tuple(gradients)
