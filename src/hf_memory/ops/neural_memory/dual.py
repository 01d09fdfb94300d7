"""Gradients of a chunk taken at its anchor: the dual form, which forms no tensor of the weights' size for a token.

With the coefficients of `chunk`, rows X_l that enter layer l at the anchor, D_l the gradient of the loss with respect
to what leaves it, and rows Y_l that enter it when the memory is read:

    Z_l = X_{l-1} A_l,   X_l = s(Z_l),   D_L = E,   D_{l-1} = F_l .* s'(Z_{l-1}),   F_l = D_l A_l^T
    U_l = beta .* Y_{l-1} W_l + c .* Y_{l-1} S_l - (P .* Y_{l-1} X_{l-1}^T) D_l,   Y_l = s(U_l)
    W_l <- beta_n W_l + c_n S_l - (P_n .* X_{l-1})^T D_l,   S_l <- H S_l - (m .* X_{l-1})^T D_l

The backward is written out. It keeps the state before every group of chunks, and goes through a group again.
"""

from math import isqrt
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_memory.ops.neural_memory.network import Norm, Rule
from hf_memory.ops.neural_memory.one_chunk import Chunk, Layers, Rows, add


def run(q, k, v, coefficients, closed: list, state, initial: Layers, norm: Norm | None, rule: Rule):
    """Read and write chunk by chunk.

    Args:
        q: [NC, N, C, K], as k and v.
        k: keys.
        v: values.
        coefficients: `chunk.Coefficients`.
        closed: for each chunk, and after the last, whether the anchor becomes the weights there: bool, or [N, 1, 1].
        state: weights, momentum and anchor, each a tuple of layers or empty.
        initial: weights that forgetting leads to.
        norm: [N, 1, V] each, or None.
        rule: the kind of memory.

    Returns:
        o [NC, N, C, V] and the state.
    """
    W, S, A = state
    none = [None] * len(W)
    tensors = (q, k, v, *coefficients, *(norm or (None, None)), *W, *(S or none), *(A or none), *initial)
    o, *layers = _Pass.apply(rule, closed if A else [True, *closed[1:]], len(W), *tensors)
    after = [tuple(layers[i : i + len(W)]) for i in range(0, 3 * len(W), len(W))]
    return o, (after[0], after[1] if S else (), after[2] if A else ())


class _Pass(torch.autograd.Function):
    """The pass over the chunks."""

    @staticmethod
    def forward(ctx, rule, closed, L, *tensors):
        rows, norm, (W, S, A, I) = _group(tensors, L)
        has_anchor, NC, kept = bool(A), rows.q.shape[0], []
        ctx.rule, ctx.closed, ctx.L, ctx.size = rule, closed, L, max(1, isqrt(NC))
        o = torch.empty_like(rows.v)
        for n in range(NC):
            A = _pick(closed[n], W, A)
            if n % ctx.size == 0:
                kept += _layers(W, S, A, L)
            chunk = Chunk(rule, _rows_of(rows, n), norm, W, S, A, I)
            o[n] = chunk.read()
            W, S, A = chunk.after(closed[n + 1] is not True)
        A = _pick(closed[NC], W, A)
        ctx.save_for_backward(*tensors, *kept)
        return o, *_layers(W, S, tuple(x.clone() for x in A) if has_anchor else (), L)

    @staticmethod
    @once_differentiable
    def backward(ctx, do, *d_layers):
        L, closed, count = ctx.L, ctx.closed, len(Rows._fields) + 2 + 4 * ctx.L
        saved = ctx.saved_tensors  # once: checkpointing gives each tensor a single time
        tensors, kept = saved[:count], saved[count:]
        rows, norm, (*_, I) = _group(tensors, L)
        dW, dS, dA = (list(d_layers[i : i + L]) for i in range(0, 3 * L, L))
        dI, d_norm, d_rows = [None] * L, [None, None], [None if x is None else torch.empty_like(x) for x in rows]
        dW, dA = _unpick(closed[-1], dW, dA)
        for start in reversed(range(0, rows.q.shape[0], ctx.size)):
            first = start // ctx.size * 3 * L
            chunks = _again(ctx, rows, norm, [_some(kept[first + i : first + i + L]) for i in (0, L, 2 * L)], I, start)
            for n in reversed(range(start, start + len(chunks))):
                chunk = chunks.pop()
                given, dW, dS, dA = chunk.backward(do[n], dW, dS, dA, dI, d_norm)
                for whole, part in zip(d_rows, given):
                    if whole is not None:
                        whole[n] = part
                dW, dA = _unpick(closed[n], dW, dA)
        return None, None, None, *d_rows, *d_norm, *dW, *dS, *dA, *dI


def _again(ctx, rows: Rows, norm, state, I: Layers, start: int) -> list:
    """The chunks of a group, from the state before its first one."""
    W, S, A = state
    chunks = []
    for n in range(start, min(start + ctx.size, rows.q.shape[0])):
        A = A if n == start else _pick(ctx.closed[n], W, A)
        chunks.append(Chunk(ctx.rule, _rows_of(rows, n), norm, W, S, A, I))
        chunks[-1].read()
        if n + 1 < min(start + ctx.size, rows.q.shape[0]):
            W, S, A = chunks[-1].after(ctx.closed[n + 1] is not True)
    return chunks


def _group(tensors, L: int):
    """Flat arguments -> rows, norm, and the layers of W, S, A and I, empty where there are none."""
    n = len(Rows._fields)
    norm, layers = tensors[n : n + 2], tensors[n + 2 :]
    parts = [_some(layers[i : i + L]) for i in range(0, 4 * L, L)]
    return Rows(*tensors[:n]), None if norm[0] is None else norm, parts


def _some(layers) -> Layers:
    return () if layers[0] is None else tuple(layers)


def _layers(W: Layers, S: Layers, A: Layers, L: int) -> list:
    return [x for layers in (W, S, A) for x in (layers or [None] * L)]


def _rows_of(rows: Rows, n: int) -> Rows:
    parts: Any = (None if x is None else x[n] for x in rows)
    return Rows(*parts)


def _pick(closed: bool | Tensor, W: Layers, A: Layers) -> Layers:
    """The anchor: the weights where a chunk of the memory begins, else as it was."""
    if isinstance(closed, bool):
        return W if closed else A
    return tuple(torch.where(closed, w, a) for w, a in zip(W, A))


def _unpick(closed: bool | Tensor, dW: list, dA: list) -> tuple[list, list]:
    """Gradients of W and A before `_pick` from those of W and of what was picked; None is zero."""
    if closed is False:
        return dW, dA
    if closed is True:
        return [add(w, a) for w, a in zip(dW, dA)], [None] * len(dA)
    picked = [None if a is None else torch.where(closed, a, 0.0) for a in dA]
    kept = [None if a is None else torch.where(closed, 0.0, a) for a in dA]
    return [add(w, a) for w, a in zip(dW, picked)], kept
