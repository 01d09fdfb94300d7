"""One chunk of the dual form: reads and writes, with explicit gradients.

The names of rows are those of `dual`. Products with stacked matrices, each with its own scale, are computed as one:
[r_1 x, r_2 x] [M_1; M_2] = r_1 x M_1 + r_2 x M_2. This is a `Term`.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_memory.ops.neural_memory.network import (
    ACTIVATIONS,
    Norm,
    Rule,
    error,
    lift,
    output,
    standardized,
    standardized_backward,
)

Layers = tuple[Tensor, ...]  # [N, d_in, d_out] of each layer
# [N, R d_in, d_out] of each layer: weights, and with momentum (R = 2) the momentum below them
Stacks = tuple[Tensor, ...]


class Memory(NamedTuple):
    """A memory before the tokens of a call, for N sequences and heads."""

    W: Layers
    S: Layers  # momentum; empty without
    A: Layers  # anchor; empty if it is always the weights
    initial: Layers  # weights to which the memory decays
    norm: Norm | None  # [N, 1, V] each
    closed: list  # for each chunk, and after the last one, whether the anchor becomes the weights: bool, or [N, 1, 1]
    rule: Rule


class Rows(NamedTuple):
    """The inputs of a chunk [N, C, ...], or of all chunks [NC, N, C, ...]."""

    q: Tensor
    k: Tensor
    v: Tensor
    P: Tensor
    enters: Any  # [..., C, R]: beta and c; None if both are constant
    rest: Tensor | None  # [..., C, 1]: 1 - beta, if weights decay to initial weights
    leaves: Tensor  # [..., C, R]: last row of P, and m
    H: Any  # [..., 1, 1], or None

    def of(self, n: int) -> "Rows":
        """The rows of one chunk."""
        rows: Any = (None if x is None else x[n] for x in self)
        return Rows(*rows)


def add(x: Any, y: Any) -> Any:
    """x + y, where None is zero."""
    if x is None:
        return y
    return x if y is None else x + y


def total(summands: Iterable) -> Any:
    """The sum of at least one summand."""
    first, *others = summands
    return sum(others, first)


def inner(x: Tensor, y: Tensor) -> Tensor:
    """The sum of x y over all but the first dimension: [N, 1, 1]."""
    return (x * y).sum((1, 2), keepdim=True)


def squares(x: Tensor) -> Tensor:
    """The squared length of each row: [N, C, 1]."""
    return x.square().sum(-1, keepdim=True)


def spread(x: Tensor, scale: Tensor | None) -> Tensor:
    """x [N, C, d] times each column of scale [N, C, R], concatenated [N, C, R d]; None means one column of ones."""
    if scale is None or scale.shape[-1] == 1:
        return x if scale is None else scale * x
    return (scale[..., None] * x[:, :, None]).flatten(-2)


def spread_backward(x: Tensor, scale: Tensor | None, g: Tensor) -> tuple[Tensor, Any]:
    """Gradients of x and of scale, None if scale is None, from the gradient g of spread(x, scale)."""
    if scale is None:
        return g, None
    if scale.shape[-1] == 1:
        return scale * g, (x * g).sum(-1, keepdim=True)
    g = g.unflatten(-1, (scale.shape[-1], -1))
    return (scale[..., None] * g).sum(-2), (x[:, :, None] * g).sum(-1)


class Term:
    """The product of rows, each multiplied by its scales, and stacked matrices, with an explicit backward.

    `d_matrices` and `d_scale` are the gradients, which each call of a backward method adds to.
    """

    def __init__(self, matrices: Layers, scale: Tensor | None):
        """Args: matrices [N, R d_in, d_out] of each layer; scale [N, C, R] or None."""
        self.matrices = matrices
        self.scale: Any = scale
        self.d_matrices: list = [None] * len(matrices)
        self.d_scale: Any = None

    def apply(self, x: Tensor, layer: int) -> Tensor:
        """[r_1 x, ..., r_R x] M for rows x [N, C, d_in], their scales r and the matrix M of a layer: [N, C, d_out]."""
        return torch.bmm(spread(x, self.scale), self.matrices[layer])

    def apply_transposed(self, x: Tensor, layer: int) -> Tensor:
        """r (x M^T) for rows x [N, C, d_out], one scale r and the matrix M of a layer: [N, C, d_in]."""
        return spread(torch.bmm(x, self.matrices[layer].mT), self.scale)

    def backward(self, x: Tensor, g: Tensor, layer: int) -> Tensor:
        """Gradient of x from g, the gradient of apply(x)."""
        self._add_product(layer, spread(x, self.scale), g)
        return self._through_spread(x, g @ self.matrices[layer].mT)

    def backward_transposed(self, x: Tensor, g: Tensor, layer: int) -> Tensor:
        """Gradient of x from g, the gradient of apply_transposed(x)."""
        self._add_product(layer, spread(g, self.scale), x)
        return self._through_spread(x, g @ self.matrices[layer])

    def _through_spread(self, x: Tensor, g: Tensor) -> Tensor:
        dx, d_scale = spread_backward(x, self.scale, g)
        self.d_scale = add(self.d_scale, d_scale)
        return dx

    def _add_product(self, layer: int, rows: Tensor, g: Tensor) -> None:
        if self.d_matrices[layer] is None:
            self.d_matrices[layer] = rows.mT @ g
        else:
            self.d_matrices[layer].baddbmm_(rows.mT, g)


class Chunk:
    """The computations of a chunk, given stacks M, the anchor A and initial weights I."""

    def __init__(self, rule: Rule, rows: Rows, norm: Norm | None, M: Stacks, A: Layers, I: Layers):
        """Compute the inner gradients: X, Z, F and D, and with max_grad_norm also `whole`, D before clipping."""
        self.rule = rule
        self.rows = rows
        self.norm = norm
        self.L = len(M)
        self.R = rows.leaves.shape[-1]
        self.act = ACTIVATIONS[rule.activation]
        self.stack = Term(M, rows.enters)
        self.anchor = Term(A, None)
        returns = (
            [] if rows.rest is None else [Term(A if rule.forget_to == "anchor" else I, rows.rest)]
        )
        self.reads = [self.stack, *returns]
        # beta and c after the chunk, and 1 - beta
        self._last = () if rows.enters is None else rows.enters[:, -1:].split(1, dim=-1)
        self._last_rest: Any = None if rows.rest is None else rows.rest[:, -1:]
        self._learn()

    def _learn(self) -> None:
        self.X = [lift(self.rows.k, self.rule)]
        self.Z = []
        for layer in range(self.L):
            self.Z.append(self.anchor.apply(self.X[layer], layer))
            if layer < self.L - 1:
                self.X.append(lift(self.act.value(self.Z[layer]), self.rule))
        self.F: dict = {}
        self.D = {self.L - 1: error(self.Z[-1], self.rows.k, self.rows.v, self.rule, self.norm)}
        for layer in reversed(range(1, self.L)):
            self.F[layer] = self._without_constant(
                self.anchor.apply_transposed(self.D[layer], layer)
            )
            self.D[layer - 1] = self.act.backward(self.F[layer], self.Z[layer - 1])
        self.whole = self.D
        limit = self.rule.max_grad_norm
        if limit is not None:  # a token's gradient in a layer is x d^T, of norm |x| |d|
            size = total(squares(x) * squares(self.D[layer]) for layer, x in enumerate(self.X))
            self.shorter = (limit**2 / size.clamp(min=limit**2)).sqrt()
            self.D = {layer: self.shorter * d for layer, d in self.whole.items()}

    def read(self) -> Tensor:
        """Compute O [N, C, V]; Y, U and the scores Y X^T are kept for the backward pass."""
        self.Y = [lift(self.rows.q, self.rule)]
        self.U = []
        self.scores = []
        for layer in range(self.L):
            self.scores.append(torch.bmm(self.Y[layer], self.X[layer].mT))
            past = total(term.apply(self.Y[layer], layer) for term in self.reads)
            self.U.append(past.baddbmm_(self.rows.P * self.scores[layer], self.D[layer], alpha=-1))
            if layer < self.L - 1:
                self.Y.append(lift(self.act.value(self.U[layer]), self.rule))
        return output(self.U[-1], self.rows.q, self.rule, self.norm)

    def write(self, M: Stacks) -> None:
        """Update M, the stacks before the chunk, to those after it, in place."""
        for layer, m in enumerate(M):
            W, *S = m.chunk(self.R, dim=1)
            self._forget(W, layer)
            for slope, c in zip(S, self._last[1:]):
                W.addcmul_(c, slope)
                slope.mul_(self.rows.H)
            m.baddbmm_(spread(self.X[layer], self.rows.leaves).mT, self.D[layer], alpha=-1)

    def anchor_after(self) -> Layers:
        """The anchor after the chunk; a copy if it is the weights, which are updated in place."""
        return tuple(x.clone() for x in self.anchor.matrices)

    def _forget(self, W: Tensor, layer: int) -> None:
        """Decay weights over the chunk, in place."""
        if self._last_rest is not None:
            W.lerp_(self.reads[1].matrices[layer], self._last_rest)
        elif self._last:
            W.mul_(self._last[0])

    def backward(self, do: Tensor, dM: list, dA: list, dI: list, d_norm: list):
        """Gradients of rows, M and A before the chunk from those after it; dI and d_norm are accumulated in place."""
        self.dX: dict = {}
        self.dD: dict = {}
        self.dP = torch.zeros_like(self.rows.P)
        self.d_norm = d_norm
        for term in self.reads[1:]:
            term.d_matrices = self.anchor.d_matrices if self.rule.forget_to == "anchor" else dI
        dq = self._backward_read(do)
        d_leaves, dH = self._backward_write(dM)
        if self.rule.max_grad_norm is not None:
            self._backward_shorter(self.rule.max_grad_norm)
        dk, dv = self._backward_learn()
        for layer, g in enumerate(dA):
            self.anchor.d_matrices[layer] = add(self.anchor.d_matrices[layer], g)
        d_enters = self.stack.d_scale
        d_rest = self.reads[1].d_scale if self.reads[1:] else None
        rows = Rows(dq, dk, dv, self.dP, d_enters, d_rest, d_leaves, dH)
        return rows, self.stack.d_matrices, self.anchor.d_matrices

    def _backward_read(self, do: Tensor) -> Tensor:
        """The gradient of q."""
        dU = do
        direct = do if self.rule.residual else None
        if self.norm is not None:
            z_hat, rstd = standardized(self.U[-1])
            self._add_to_norm((do * z_hat).sum(1, keepdim=True), do.sum(1, keepdim=True))
            dU = standardized_backward(do * self.norm[0], z_hat, rstd)
        for layer in reversed(range(self.L)):
            X = self.X[layer]
            Y = self.Y[layer]
            P = self.rows.P
            scores = self.scores[layer]
            G = dU @ self.D[layer].mT
            past = total(term.backward(Y, dU, layer) for term in self.reads)
            dY = self._without_constant(past.baddbmm(P * G, X, alpha=-1))
            self.dX[layer] = -(P * G).mT @ Y
            self.dD[layer] = -(P * scores).mT @ dU
            self.dP -= scores * G
            dU = self.act.backward(dY, self.U[layer - 1]) if layer else dY
        return add(dU, direct)

    def _backward_write(self, dM: list) -> tuple[Tensor, Any]:
        """The backward of `write`: gradients of `leaves` and H."""
        d_leaves = torch.zeros_like(self.rows.leaves)
        dH = None
        for layer, d in enumerate(dM):
            X = self.X[layer]
            D = self.D[layer]
            leaves = self.rows.leaves
            self.dD[layer] -= spread(X, leaves) @ d
            dX, d_scale = spread_backward(X, leaves, D @ d.mT)
            self.dX[layer] -= dX
            d_leaves -= d_scale
            (dW, *dS), (W, *S) = (x.chunk(self.R, dim=1) for x in (d, self.stack.matrices[layer]))
            before, *slopes = self.stack.d_matrices[layer].chunk(self.R, dim=1)
            before += dW if not self._last else self._last[0] * dW
            if self._last:
                self.stack.d_scale[:, -1:, :1] += inner(dW, W)
                for back in self.reads[1:]:
                    back.d_matrices[layer] = add(back.d_matrices[layer], self._last_rest * dW)
                    back.d_scale[:, -1:] += inner(dW, back.matrices[layer])
            for slope, x, dx, c in zip(slopes, S, dS, self._last[1:]):
                slope.addcmul_(c, dW).addcmul_(self.rows.H, dx)
                self.stack.d_scale[:, -1:, 1:] += inner(dW, x)
                dH = add(dH, inner(dx, x))
        return d_leaves, dH

    def _backward_shorter(self, limit: float) -> None:
        """The backward of clipping: from gradients of the clipped D to those of the unclipped one, and of X."""
        s = self.shorter
        both = total((self.dD[layer] * d).sum(-1, keepdim=True) for layer, d in self.whole.items())
        slope = torch.where(s < 1, -both * s**3 / limit**2, 0.0)
        for layer, d in self.whole.items():
            self.dX[layer] += slope * squares(d) * self.X[layer]
            self.dD[layer] = s * self.dD[layer] + slope * squares(self.X[layer]) * d

    def _backward_learn(self) -> tuple[Tensor, Tensor]:
        """The gradients of k and v, first through D and then through Z."""
        dZ: dict = {}
        for layer in range(1, self.L):
            Z = self.Z[layer - 1]
            dF = lift(self.act.backward(self.dD[layer - 1], Z), self.rule, 0.0)
            dZ[layer - 1] = self.dD[layer - 1] * self.F[layer] * self.act.second(Z)
            self.dD[layer] += self.anchor.backward_transposed(self.whole[layer], dF, layer)
        dZ[self.L - 1], direct, dv = self._through_error(self.dD[self.L - 1])
        for layer in reversed(range(self.L)):
            self.dX[layer] += self.anchor.backward(self.X[layer], dZ[layer], layer)
            if layer:
                dZ[layer - 1] += self.act.backward(
                    self._without_constant(self.dX[layer]), self.Z[layer - 1]
                )
        return add(self._without_constant(self.dX[0]), direct), dv

    def _without_constant(self, x: Tensor) -> Tensor:
        """The inverse of `lift`: the rows without the constant that biases multiply."""
        return x[..., :-1] if self.rule.bias else x

    def _through_error(self, dE: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Gradients of the last layer's rows, of k, None for zero, and of v, from that of `error`."""
        if self.norm is None:  # then it is a sum
            return dE, dE if self.rule.residual else None, -dE
        inputs = self.Z[-1], self.rows.k, self.rows.v
        pull: Any = torch.func.vjp(
            lambda z, k, v, *norm: error(z, k, v, self.rule, norm), *inputs, *self.norm
        )[1]
        *grads, d_weight, d_bias = pull(dE)
        self._add_to_norm(d_weight, d_bias)
        return tuple(grads)

    def _add_to_norm(self, *grads: Tensor) -> None:
        self.d_norm[:] = map(add, self.d_norm, grads)
