"""A matrix whose gradients are taken at every token: the errors of a chunk solve a triangular system.

With the coefficients of `chunk`, errors u_t = v_t - W_{t-1}^T k_t, and P', beta', c' shifted one row down:

    (I + P' .* K K^T) U = V - beta' .* K W - c' .* K S
    O = beta .* Q W + c .* Q S + (P .* Q K^T) U
    W <- beta_n W + c_n S + (P_n .* K)^T U,   S <- H S + (m .* K)^T U

Weights and momentum are stacked as M, so that each line is one product per chunk. If weights decay to initial weights,
these are added in the same proportion.
Source: https://arxiv.org/abs/2412.06464, with momentum added.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.ops.chunks import unit_lower_inverse
from hf_memory.ops.neural_memory.network import Inputs, lift
from hf_memory.ops.neural_memory.one_chunk import Memory

CHUNK = 64


class Products(NamedTuple):
    """What is computed for all chunks at once, without a state. M has PARTS, weights and perhaps momentum.

    Chunk by chunk, U = values - keys M, O = reads U + asks M, and M <- through M + leaves^T U + back.
    """

    reads: Any  # [NC, N, C, C], P .* Q K^T
    asks: Any  # [NC, N, C, PARTS * K], queries multiplied by beta and c
    values: Any  # [NC, N, C, V], errors of a memory of zeros
    keys: Any  # [NC, N, C, PARTS * K], what a part of M changes in the errors
    leaves: Any  # [NC, N, C, PARTS * K], keys multiplied by the last row of P and by m
    through: Any  # [NC, N, PARTS, PARTS], beta_n, c_n and H, which multiply the parts of M; None: all ones
    back: Any  # [NC, N, K, V], what decayed weights get of the initial weights; None: nothing


def chunk_size(T: int) -> int:
    """The number of tokens of a chunk, for T tokens: a power of two where inverses are doubled."""
    return min(CHUNK, 1 << (T - 1).bit_length() if torch.compiler.is_exporting() else T)


def run(inputs: Inputs, coefficients, memory: Memory, walk=None):
    """The arguments and results of `dual.run`; `walk` is another form of `_pass`."""
    q, k, v = inputs[:3]
    rule = memory.rule
    initial = memory.initial
    x = q
    q = lift(q, rule)
    v = v - k if rule.residual else v
    k = lift(k, rule)
    P = coefficients.P
    enters, leaves, through = _stacked(coefficients, k)
    before_P = F.pad(P, (0, 0, 1, -1))
    first = torch.ones_like(enters[..., :1, :1])  # a token's error is before it
    before = torch.cat([F.pad(first, (0, enters.shape[-1] - 1)), enters[..., :-1, :]], dim=-2)
    M = torch.cat([*memory.W, *memory.S], dim=-2)  # [N, d_in or 2 d_in, V]
    returns = coefficients.beta is not None and rule.forget_to == "initial"
    if returns:
        v = v - (1 - before[..., :1]) * (k @ initial[0])
    rows = torch.cat([v, _outer(before, k)], dim=-1)
    system = (before_P * (k @ k.mT)).tril(-1)
    if torch.compiler.is_exporting():  # other runtimes have no substitution
        rows = unit_lower_inverse(system) @ rows
    else:
        rows = torch.linalg.solve_triangular(system, rows, upper=False, unitriangular=True)
    values, keys = rows.tensor_split([v.shape[-1]], dim=-1)
    reads = P * (q @ k.mT)
    asks = _outer(enters, q)
    back = (1 - coefficients.beta[..., -1:, :]) * initial[0] if returns else None
    o, M = (walk or _pass)(Products(reads, asks, values, keys, leaves, through, back), M)
    if returns:
        o = o + (1 - coefficients.beta) * (q @ initial[0])
    layers = M.split(k.shape[-1], dim=-2)
    return (o + x if rule.residual else o), (layers[:1], layers[1:], ())


def _pass(products: Products, M: Tensor) -> tuple[Tensor, Tensor]:
    """O and the last M, chunk by chunk."""
    outputs = []
    none = [None] * len(products.reads)
    chunks = (none if x is None else x.unbind() for x in products)
    for read, ask, value, key, leave, change, initial in zip(*chunks):
        U = torch.baddbmm(value, key, M, alpha=-1)
        outputs.append(torch.baddbmm(read @ U, ask, M))
        if change is not None:
            M = (change @ M.unflatten(1, (change.shape[-1], -1)).flatten(2)).view_as(M)
        M = torch.baddbmm(M, leave.mT, U)
        if initial is not None:
            M = M + F.pad(initial, (0, 0, 0, M.shape[1] - initial.shape[1]))
    return torch.stack(outputs), M


def _stacked(coefficients, k: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """The coefficients beta and c of M's parts [..., C, 1 or 2], and `leaves` and `through` of `Products`."""
    P, beta, c, m, H = coefficients
    w = P[..., -1, :, None]
    one = torch.ones_like(w) if beta is None else beta
    if c is None:
        return one, w * k, None if beta is None else beta[..., -1:, :]
    enters = torch.cat([one, c], dim=-1)
    through = torch.cat([enters[..., -1:, :], F.pad(H, (1, 0))], dim=-2)
    return enters, torch.cat([w * k, m * k], dim=-1), through


def _outer(scales: Tensor, x: Tensor) -> Tensor:
    """x [..., C, D] times each of the scales [..., C, n], concatenated: [..., C, n * D]."""
    return (scales[..., None] * x[..., None, :]).flatten(-2)
