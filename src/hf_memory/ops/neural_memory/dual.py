"""A chunk of a memory that is linear in its gradients, in the dual form: no tensor of the weights' size for each token.

With the coefficients of `chunk`, rows X_l that enter layer l at the anchor, D_l the gradient of the loss with respect
to what leaves it, and rows Y_l that enter it when the memory is read:

    Z_l = X_{l-1} A_l,   X_l = s(Z_l),   D_L = E,   D_{l-1} = D_l A_l^T .* s'(Z_{l-1})
    U_l = beta .* Y_{l-1} W_l + c .* Y_{l-1} S_l - (P .* Y_{l-1} X_{l-1}^T) D_l,   Y_l = s(U_l)
    W_l <- beta_n W_l + c_n S_l - (P_n .* X_{l-1})^T D_l,   S_l <- H S_l - (m .* X_{l-1})^T D_l

If weights decay to others I, (1 - beta) I is added where beta W occurs. For a matrix whose gradients are taken at every
token, whatever the number of tokens, the errors solve a triangular system, with P', beta', c' shifted one row down:

    (I + P' .* K K^T) D = beta' .* K W + c' .* K S - V

Source of the latter: https://arxiv.org/abs/2412.06464, with momentum added.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.ops.chunks import unit_lower_inverse
from hf_memory.ops.neural_memory.network import (
    ACTIVATIONS,
    Layers,
    Memory,
    Norm,
    Rows,
    Rule,
    error,
    lift,
    output,
)

SOLVED = 64  # tokens of a chunk of a matrix whose gradients are taken at every token


def is_solved(rule: Rule, weights: Layers, norm: Norm | None) -> bool:
    """Whether gradients at every token solve a system of linear equations."""
    is_plain = rule.is_linear and rule.loss == "squared" and rule.max_grad_norm is None
    return is_plain and rule.chunk_size == 1 and len(weights) == 1 and norm is None


def solved_tokens(T: int) -> int:
    """The tokens of a chunk where gradients solve a system: a power of two where inverses are doubled."""
    return min(SOLVED, 1 << (T - 1).bit_length() if torch.compiler.is_exporting() else T)


def step(rows: Rows, memory: Memory) -> tuple[Tensor, Layers, Layers]:
    """Outputs [N, C, V], weights and momentum after one chunk."""
    W, S, A, initial, norm, rule = memory
    L = len(W)
    targets = {"initial": initial, "anchor": A}.get(rule.forget_to, (None,) * L)
    slopes = S or (None,) * L
    if is_solved(rule, W, norm):
        X, D = _solved(rows, W[0], slopes[0], targets[0], rule)
    else:
        X, D = learned(rows.k, rows.v, A, rule, norm, rows.threshold)
    z = rows.q
    for layer, (w, slope, target, x, d) in enumerate(zip(W, slopes, targets, X, D)):
        y = lift(ACTIVATIONS[rule.activation].value(z) if layer else z, rule)
        past = _past(y, rows.beta, rows.c, w, slope, target)
        z = past.baddbmm_(rows.P * (y @ x.mT), d, alpha=-1)
    o = output(z, rows.q, rule, norm)
    written = [_written(rows, *of_layer) for of_layer in zip(W, slopes, targets, X, D)]
    W, S = zip(*written)
    return o, W, S if memory.S else ()


def _past(x: Tensor, beta: Tensor, c: Tensor | None, w: Tensor, slope, target) -> Tensor:
    """x times the weights before the chunk, decayed, and times the momentum; a new tensor."""
    past = beta * (x @ w) if target is None else torch.lerp(x @ target, x @ w, beta)
    return past if c is None else past.addcmul_(c, x @ slope)


def _written(rows: Rows, w: Tensor, slope, target, x: Tensor, d: Tensor):
    """A layer's weights and momentum after the chunk."""
    beta = rows.beta[:, -1:]
    w = beta * w if target is None else torch.lerp(target, w, beta)
    if rows.c is not None:
        w.addcmul_(rows.c[:, -1:], slope)
        slope = (rows.H * slope).baddbmm_((rows.m * x).mT, d, alpha=-1)
    last = rows.P[:, -1, :, None]
    return w.baddbmm_((last * x).mT, d, alpha=-1), slope


def learned(
    k: Tensor, v: Tensor, A: Layers, rule: Rule, norm: Norm | None, threshold: Tensor | None
) -> tuple[list[Tensor], list[Tensor]]:
    """The rows X that enter each layer at the anchor, and the gradients D of those that leave it."""
    activation = ACTIVATIONS[rule.activation]
    X = [lift(k, rule)]
    Z = [X[0] @ A[0]]
    for weights in A[1:]:
        X.append(lift(activation.value(Z[-1]), rule))
        Z.append(X[-1] @ weights)
    D = [error(Z[-1], k, v, rule, norm, threshold)]
    for weights, z in zip(A[:0:-1], Z[-2::-1]):
        D.insert(0, activation.backward((D[0] @ weights.mT)[..., : z.shape[-1]], z))
    limit = rule.max_grad_norm
    if limit is None:
        return X, D
    # a token's gradient in a layer is x d^T, of norm |x| |d|
    size = torch.stack([_squares(x) * _squares(d) for x, d in zip(X, D)]).sum(0)
    shorter = (limit**2 / size.clamp(min=limit**2)).sqrt()
    return X, [shorter * d for d in D]


def _squares(x: Tensor) -> Tensor:
    """The squared length of each row."""
    return x.square().sum(-1, keepdim=True)


def _solved(rows: Rows, w: Tensor, slope, target, rule: Rule) -> tuple[list[Tensor], list[Tensor]]:
    """The same where gradients are taken at every token."""
    k = lift(rows.k, rule)
    beta = F.pad(rows.beta[:, :-1], (0, 0, 1, 0), value=1.0)
    c = None if rows.c is None else F.pad(rows.c[:, :-1], (0, 0, 1, 0))
    past = _past(k, beta, c, w, slope, target)
    errors = past + rows.k - rows.v if rule.residual else past - rows.v
    system = (F.pad(rows.P[:, :-1], (0, 0, 1, 0)) * (k @ k.mT)).tril(-1)
    if torch.compiler.is_exporting():  # other runtimes have no substitution
        return [k], [unit_lower_inverse(system) @ errors]
    return [k], [torch.linalg.solve_triangular(system, errors, upper=False, unitriangular=True)]
