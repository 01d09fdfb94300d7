"""A chunk of a memory that is not linear in its gradients: its weights after every token are computed.

With the coefficients of `chunk`, X and D of `dual`, the retention R (see `Learning`), and gradients
G_j = sum lr X^T D, at R(A), of the pairs that token j learns:

    W_t = beta_t W + c_t S - sum_{j <= t} P_tj G_j,   o_t = M(q_t; R(W_t))

With Muon a sum gives the momentum S_t, and the weights are a second sum, over the orthogonalised S_t. A chunk needs
memory for C times the weights.
"""

from typing import Any

from torch import Tensor

from hf_memory.ops.neural_memory.dual import learned
from hf_memory.ops.neural_memory.network import (
    RETENTIONS,
    Layers,
    Memory,
    Rows,
    network,
    orthogonal,
    pairs_of,
)


def step(rows: Rows, memory: Memory) -> tuple[Tensor, Layers, Layers]:
    """See `dual.step`."""
    W, S, A, initial, norm, rule = memory
    retained = RETENTIONS[rule.retention]
    per_token: Any = None if norm is None else tuple(x[:, None] for x in norm)
    k, v, lr = pairs_of(rows)
    threshold = None if rows.threshold is None else rows.threshold[:, :, None]
    anchor = tuple(retained(a)[:, None] for a in A)
    X, D = learned(k, v, anchor, rule, per_token, threshold)
    steps = [x.mT @ (lr[..., None] * d) for x, d in zip(X, D)]  # [N, C, d_in, d_out]
    beta = rows.beta[..., None]
    after = []
    slopes = []
    for layer, gradient in enumerate(steps):
        w = beta * W[layer][:, None]
        if rule.forget_to != "zero":
            target = A if rule.forget_to == "anchor" else initial
            w = w + (1 - beta) * target[layer][:, None]
        if rule.muon:
            slope = _minus(rows.H[..., None] * S[layer][:, None], rows.slows, gradient)
            gradient = -orthogonal(slope)
            slopes.append(slope[:, -1])
        elif S:
            w = w + rows.c[..., None] * S[layer][:, None]
            slope = _minus((rows.H * S[layer])[:, None], rows.m.mT, gradient)
            slopes.append(slope[:, 0])
        after.append(_minus(w, rows.P, gradient))
    weights = tuple(map(retained, after))
    o = network(rows.q[:, :, None], weights, rule, per_token)[:, :, 0]
    return o, tuple(w[:, -1] for w in after), tuple(slopes)


def _minus(x: Tensor, factors: Tensor, steps: Tensor) -> Tensor:
    """x [N, n, d_in, d_out] minus sums of steps [N, C, d_in, d_out] with factors [N, n, C]; may overwrite x."""
    return x.flatten(2).baddbmm_(factors, steps.flatten(2), alpha=-1).view_as(x)
