"""One chunk of the dual form: what is read and written, and the gradients of that, written out.

Names of rows as in `dual`. Each summand of Z, F, U and the new weights is rows times scale times matrix: a Term.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.ops.neural_memory.network import ACTIVATIONS, Norm, Rule, error, lift, output

Layers = tuple[Tensor, ...]  # [N, d_in, d_out] of each layer


class Rows(NamedTuple):
    """What a chunk is given [N, C, ...], or all chunks [NC, N, C, ...]; the fields after v as `chunk.Coefficients`."""

    q: Tensor
    k: Tensor
    v: Tensor
    P: Tensor
    beta: Tensor | None
    c: Tensor | None
    m: Any
    H: Any


def add(x: Any, y: Any) -> Any:
    """x + y, where None is zero."""
    return y if x is None else x if y is None else x + y


def total(summands: Iterable) -> Any:
    """The sum of at least one summand."""
    first, *others = summands
    return sum(others, first)


def inner(x: Tensor, y: Tensor) -> Tensor:
    """The sum of x y over all but the first dimension: [N, 1, 1]."""
    return x.flatten(1)[:, None] @ y.flatten(1)[:, :, None]


class Term:
    """Rows times scale * matrix, and the gradients of both, gathered from every use."""

    def __init__(self, matrices: Layers, scale: Tensor | None, *, remainder: bool = False):
        """Args: matrices [N, d_in, d_out] of each layer; scale [N, C, 1], None for 1; remainder: use 1 - scale."""
        self.matrices, self.remainder = matrices, remainder
        self.scale: Any = 1 - scale if remainder and scale is not None else scale
        self.d_matrices: list = [None] * len(matrices)
        self.d_scale: Any = 0.0

    def apply(self, x: Tensor, layer: int) -> Tensor:
        """Rows through a layer's matrix."""
        return self._scaled(x @ self.matrices[layer])

    def apply_transposed(self, x: Tensor, layer: int) -> Tensor:
        """Rows back through a layer's matrix."""
        return self._scaled(x @ self.matrices[layer].mT)

    def add_last(self, M: Tensor | None, layer: int) -> Tensor:
        """The matrix times the last row's scale, added to M."""
        if self.scale is None:
            return add(M, self.matrices[layer])
        last = self.scale[:, -1:]
        return last * self.matrices[layer] if M is None else torch.addcmul(M, last, self.matrices[layer])

    def backward(self, x: Tensor, g: Tensor, layer: int) -> Tensor:
        """Gradient of x from g, the gradient of apply(x)."""
        dx = g @ self.matrices[layer].mT
        self._gather(layer, x, self._scaled(g), (x, dx))
        return self._scaled(dx)

    def backward_transposed(self, x: Tensor, g: Tensor, layer: int) -> Tensor:
        """Gradient of x from g, the gradient of apply_transposed(x)."""
        dx = g @ self.matrices[layer]
        self._gather(layer, g, self._scaled(x), (x, dx))
        return self._scaled(dx)

    def backward_last(self, g: Tensor, layer: int) -> None:
        """Takes g, the gradient of add_last(); after another use of the layer."""
        if self.scale is None:
            self.d_matrices[layer] += g
        else:
            self.d_matrices[layer].addcmul_(self.scale[:, -1:], g)
            d_last = inner(g, self.matrices[layer])
            self.d_scale = self.d_scale + F.pad(d_last, (0, 0, self.scale.shape[1] - 1, 0))

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.scale is None else self.scale * x

    def _gather(self, layer: int, rows: Tensor, g: Tensor, of_scale: tuple[Tensor, Tensor]) -> None:
        if self.d_matrices[layer] is None:
            self.d_matrices[layer] = rows.mT @ g
        else:
            self.d_matrices[layer].baddbmm_(rows.mT, g)
        if self.scale is not None:
            self.d_scale = self.d_scale + (of_scale[0] * of_scale[1]).sum(-1, keepdim=True)


class Chunk:
    """One chunk from weights W, momentum S, anchor A and initial weights I; S is empty without momentum."""

    def __init__(self, rule: Rule, rows: Rows, norm: Norm | None, W: Layers, S: Layers, A: Layers, I: Layers):
        """Learns: X, Z, F and D are known then."""
        self.rule, self.rows, self.norm, self.S = rule, rows, norm, S
        self.L, self.act = len(W), ACTIVATIONS[rule.activation]
        targets = {"initial": [I], "anchor": [A], "zero": []}[rule.forget_to]
        returns = targets if rows.beta is not None else []
        self.kept = [Term(W, rows.beta), *(Term(I, rows.beta, remainder=True) for I in returns)]
        self.slope = [Term(S, rows.c)] if S else []
        self.reads = self.kept + self.slope
        self.anchor = [Term(A, rows.beta if rule.decayed else None)]
        self.anchor += [Term(I, rows.beta, remainder=True) for I in returns if rule.decayed]
        self._learn()

    def _learn(self) -> None:
        self.X, self.Z = [lift(self.rows.k, self.rule)], []
        for layer in range(self.L):
            self.Z.append(total(term.apply(self.X[layer], layer) for term in self.anchor))
            if layer < self.L - 1:
                self.X.append(lift(self.act(self.Z[layer])[0], self.rule))
        self.F: dict = {}
        self.D = {self.L - 1: error(self.Z[-1], self.rows.k, self.rows.v, self.rule, self.norm)}
        for layer in reversed(range(1, self.L)):
            self.F[layer] = self._drop(total(term.apply_transposed(self.D[layer], layer) for term in self.anchor))
            self.D[layer - 1] = self.F[layer] * self.act(self.Z[layer - 1])[1]

    def read(self) -> Tensor:
        """O [N, C, V]; keeps Y, U and the scores Y X^T."""
        self.Y, self.U, self.scores = [lift(self.rows.q, self.rule)], [], []
        for layer in range(self.L):
            self.scores.append(self.Y[layer] @ self.X[layer].mT)
            past = total(term.apply(self.Y[layer], layer) for term in self.reads)
            self.U.append(torch.baddbmm(past, self.rows.P * self.scores[layer], self.D[layer], alpha=-1))
            if layer < self.L - 1:
                self.Y.append(lift(self.act(self.U[layer])[0], self.rule))
        return output(self.U[-1], self.rows.q, self.rule, self.norm)

    def after(self, anchor: bool) -> tuple[Layers, Layers, Layers]:
        """Weights and momentum after the chunk, and with `anchor` the anchor, if it goes on."""
        W, S, w, m, H = [], [], self.rows.P[:, -1, :, None], self.rows.m, self.rows.H
        for layer, X in enumerate(self.X):
            past = _last(self.reads, layer)
            W.append(torch.baddbmm(past, (w * X).mT, self.D[layer], alpha=-1))
            if self.S:
                S.append(torch.baddbmm(H * self.S[layer], (m * X).mT, self.D[layer], alpha=-1))
        A = (_last(self.anchor, layer) for layer in range(self.L))
        return tuple(W), tuple(S), tuple(A) if anchor else ()

    def backward(self, do: Tensor, dW: list, dS: list, dA: list, dI: list, d_norm: list):
        """Gradients of rows, W, S and A before the chunk from those after it; dI and d_norm are added to in place."""
        self.dX: dict = {}
        self.dD: dict = {}
        self.dP, self.d_norm = torch.zeros_like(self.rows.P), d_norm
        terms, dA_before = self.kept + self.anchor, self.anchor[0].d_matrices
        for term in (term for term in terms if term.remainder):  # these gather in one place
            term.d_matrices = dA_before if self.rule.forget_to == "anchor" else dI
        dq = self._backward_read(do)
        self._backward_weights(dW)
        dS, dc, dm, dH = self._backward_momentum(dS) if self.S else (dS, None, None, None)
        dk, dv = self._backward_learn()
        self._backward_anchor(dA)
        dbeta = total(-term.d_scale if term.remainder else term.d_scale for term in terms)
        return (dq, dk, dv, self.dP, dbeta, dc, dm, dH), self.kept[0].d_matrices, dS, dA_before

    def _backward_read(self, do: Tensor) -> Tensor:
        """The gradient of q."""
        dU, direct = self._through_norm(output, do, self.U[-1], self.rows.q)
        for layer in reversed(range(self.L)):
            X, Y, P, scores = self.X[layer], self.Y[layer], self.rows.P, self.scores[layer]
            G = dU @ self.D[layer].mT
            past = total(term.backward(Y, dU, layer) for term in self.reads)
            dY = self._drop(torch.baddbmm(past, P * G, X, alpha=-1))
            self.dX[layer] = -(P * G).mT @ Y
            self.dD[layer] = -(P * scores).mT @ dU
            self.dP -= scores * G
            dU = dY * self.act(self.U[layer - 1])[1] if layer else dY
        return add(dU, direct)

    def _backward_weights(self, dW: list) -> None:
        """Through the weights after the chunk."""
        w = self.rows.P[:, -1, :, None]
        for layer, d in enumerate(dW):
            for term in self.reads:
                term.backward_last(d, layer)
            self.dP[:, -1] += self._backward_write(w, d, layer)[..., 0]

    def _backward_momentum(self, dS: list) -> tuple[list, Tensor, Tensor, Tensor]:
        """Through the momentum after the chunk: the gradients of the one before it, and of c, m and H."""
        (slope,) = self.slope
        dm = total(self._backward_write(self.rows.m, d, layer) for layer, d in enumerate(dS))
        dH = total(inner(d, S) for d, S in zip(dS, self.S))
        before = [torch.addcmul(x, self.rows.H, d) for x, d in zip(slope.d_matrices, dS)]
        return before, slope.d_scale, dm, dH

    def _backward_anchor(self, dA: list) -> None:
        """Through the anchor after the chunk, None if it did not go on."""
        for layer, d in enumerate(dA):
            for term in self.anchor if d is not None else ():
                term.backward_last(d, layer)

    def _backward_write(self, scale: Any, d: Tensor, layer: int) -> Tensor:
        """Through -(scale .* X)^T D, whose gradient is d; returns the gradient of the scale."""
        D, into = self.D[layer], self.X[layer] @ d
        self.dD[layer] -= scale * into
        self.dX[layer] -= scale * (D @ d.mT)
        return -(into * D).sum(-1, keepdim=True)

    def _backward_learn(self) -> tuple[Tensor, Tensor]:
        """The gradients of k and v: up through D, then down through Z."""
        dZ: dict = {}
        for layer in range(1, self.L):
            _, first, second = self.act(self.Z[layer - 1])
            dF = lift(self.dD[layer - 1] * first, self.rule, 0.0)
            dZ[layer - 1] = self.dD[layer - 1] * self.F[layer] * second
            self.dD[layer] += total(term.backward_transposed(self.D[layer], dF, layer) for term in self.anchor)
        dE, k, v = self.dD[self.L - 1], self.rows.k, self.rows.v
        dZ[self.L - 1], direct, dv = self._through_norm(error, dE, self.Z[-1], k, v)
        for layer in reversed(range(self.L)):
            self.dX[layer] += total(term.backward(self.X[layer], dZ[layer], layer) for term in self.anchor)
            if layer:
                dZ[layer - 1] += self._drop(self.dX[layer]) * self.act(self.Z[layer - 1])[1]
        return add(self._drop(self.dX[0]), direct), dv

    def _drop(self, x: Tensor) -> Tensor:
        """The inverse of lift."""
        return x[..., :-1] if self.rule.bias else x

    def _through_norm(self, function, g: Tensor, *inputs: Tensor) -> tuple:
        """Gradients of the inputs of `output` or `error`, None for zero; by autograd, as they act on rows alone."""
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (*inputs, *(self.norm or ()))]
            norm = None if self.norm is None else tuple(leaves[-2:])
            y = function(*leaves[: len(inputs)], self.rule, norm)
        grads = torch.autograd.grad(y, leaves, g, allow_unused=True)
        if norm is not None:
            self.d_norm[:] = map(add, self.d_norm, grads[-2:])
        return grads[: len(inputs)]


def _last(terms: list[Term], layer: int) -> Any:
    M = None
    for term in terms:
        M = term.add_last(M, layer)
    return M
