"""Gradients at the anchor of a chunk, in the dual form, which needs no tensor of the weights' size for each token.

With the coefficients of `chunk`, rows X_l that enter layer l at the anchor, D_l the gradient of the loss with respect
to what leaves it, and rows Y_l that enter it when the memory is read:

    Z_l = X_{l-1} A_l,   X_l = s(Z_l),   D_L = E,   D_{l-1} = F_l .* s'(Z_{l-1}),   F_l = D_l A_l^T
    U_l = beta .* Y_{l-1} W_l + c .* Y_{l-1} S_l - (P .* Y_{l-1} X_{l-1}^T) D_l,   Y_l = s(U_l)
    W_l <- beta_n W_l + c_n S_l - (P_n .* X_{l-1})^T D_l,   S_l <- H S_l - (m .* X_{l-1})^T D_l

If weights decay to initial weights I, (1 - beta) I is added where beta W occurs. A layer's weights and momentum are
stacked as M, so that one product reads or writes both. The backward pass is explicit. It saves the state before each
group of chunks, and recomputes the group from it.
"""

from math import isqrt

import torch
from torch import Tensor

from hf_memory.ops.autograd import first_derivatives_only
from hf_memory.ops.neural_memory.network import Inputs, Rule
from hf_memory.ops.neural_memory.one_chunk import Chunk, Layers, Memory, Rows, Stacks


def run(inputs: Inputs, coefficients, memory: Memory):
    """Read and write chunk by chunk.

    Args:
        inputs: [NC, N, C, ...].
        coefficients: `chunk.Coefficients`.
        memory: the memory before the first chunk.

    Returns:
        o [NC, N, C, V], and weights, momentum and anchor after the last chunk.
    """
    W, S, A, initial, norm, closed, rule = memory
    L = len(W)
    none = [None] * L
    M = [torch.cat(layers, dim=1) for layers in zip(W, S)] if S else W
    tensors = (
        *_rows(inputs, coefficients, rule),
        *(norm or (None, None)),
        *M,
        *(A or none),
        *initial,
    )
    o, *layers = _Pass.apply(rule, closed if A else [True, *closed[1:]], L, *tensors)
    stacks = [m.chunk(2 if S else 1, dim=1) for m in layers[:L]]
    return o, (
        *(tuple(x) for x in zip(*stacks)),
        *(() if S else ((),)),
        tuple(layers[L:]) if A else (),
    )


def _rows(inputs: Inputs, coefficients, rule: Rule) -> Rows:
    """The rows of all chunks, with the coefficients of weights and momentum concatenated."""
    P, beta, c, m, H = coefficients
    rest = None if beta is None or rule.forget_to == "zero" else 1 - beta
    if c is None:
        return Rows(*inputs[:3], P, beta, rest, P[..., -1, :, None], None)
    enters = torch.cat([torch.ones_like(c) if beta is None else beta, c], dim=-1)
    return Rows(*inputs[:3], P, enters, rest, torch.cat([P[..., -1, :, None], m], dim=-1), H)


class _Pass(torch.autograd.Function):
    """The loop over chunks, with an explicit backward."""

    @staticmethod
    def forward(ctx, rule, closed, L, *tensors):
        rows, norm, (M, A, I) = _group(tensors, L)
        M = tuple(m.clone() for m in M)
        has_anchor = len(A) > 0
        outputs = []
        states_of_groups: list = []
        ctx.rule = rule
        ctx.closed = closed
        ctx.L = L
        ctx.size = max(1, isqrt(len(rows.q)))
        for n in range(len(rows.q)):
            A = pick(closed[n], _weights(M, I), A)
            if n % ctx.size == 0:
                anchor = [None] * L if closed[n] is True else A
                states_of_groups += [*(m.clone() for m in M), *anchor]
            chunk = Chunk(rule, rows.of(n), norm, M, A, I)
            outputs.append(chunk.read())
            A = () if closed[n + 1] is True else chunk.anchor_after()
            chunk.write(M)
        A = pick(closed[-1], _weights(M, I), A)
        ctx.save_for_backward(*tensors, *states_of_groups)
        return torch.stack(outputs), *M, *(tuple(x.clone() for x in A) if has_anchor else ())

    @staticmethod
    @first_derivatives_only
    def backward(ctx, do, *d_layers):
        L = ctx.L
        closed = ctx.closed
        count = len(Rows._fields) + 2 + 3 * ctx.L
        saved = ctx.saved_tensors  # read once: with checkpointing they can be unpacked only once
        tensors = saved[:count]
        states_of_groups = saved[count:]
        rows, norm, (*_, I) = _group(tensors, L)
        dM = [d.clone() for d in d_layers[:L]]
        dA = list(d_layers[L:]) or [None] * L
        dI = [None] * L
        d_norm = [None, None]
        d_rows = [None if x is None else torch.empty_like(x) for x in rows]
        dA = _unpick(closed[-1], dM, dA)
        for start in reversed(range(0, len(rows.q), ctx.size)):
            first = start // ctx.size * 2 * L
            M = states_of_groups[first : first + L]
            A = _some(states_of_groups[first + L : first + 2 * L])
            chunks = _computed_again(ctx, rows, norm, M, A, I, start)
            for n in reversed(range(start, start + len(chunks))):
                d_rows_n, dM, dA = chunks.pop().backward(do[n], dM, dA, dI, d_norm)
                for whole, part in zip(d_rows, d_rows_n):
                    if whole is not None:
                        whole[n] = part
                dA = _unpick(closed[n], dM, dA)
        return None, None, None, *d_rows, *d_norm, *dM, *dA, *dI


def _computed_again(ctx, rows: Rows, norm, M: Stacks, A: Layers, I: Layers, start: int) -> list:
    """Compute the chunks of a group again, from the stacks and the anchor before it; no anchor means the weights."""
    chunks: list[Chunk] = []
    for n in range(start, min(start + ctx.size, len(rows.q))):
        if chunks:
            A = () if ctx.closed[n] is True else chunks[-1].anchor_after()
            M = tuple(m.clone() for m in M)
            chunks[-1].write(M)
            A = pick(ctx.closed[n], _weights(M, I), A)
        chunks.append(Chunk(ctx.rule, rows.of(n), norm, M, A or _weights(M, I), I))
        chunks[-1].read()
    return chunks


def _group(tensors, L: int):
    """Flat arguments -> rows, norm, and the layers of M, A and I, which are empty if absent."""
    n = len(Rows._fields)
    norm = tensors[n : n + 2]
    layers = tensors[n + 2 :]
    parts = [_some(layers[i : i + L]) for i in range(0, 3 * L, L)]
    return Rows(*tensors[:n]), None if norm[0] is None else norm, parts


def _some(layers) -> Layers:
    return () if layers[0] is None else tuple(layers)


def _weights(M: Stacks, I: Layers) -> Layers:
    """Views of the weights in each stack of weights and momentum."""
    return tuple(m[:, : initial.shape[1]] for m, initial in zip(M, I))


def pick(closed: bool | Tensor, W: Layers, A: Layers) -> Layers:
    """The anchor: the weights if a chunk of the memory begins here, else the previous anchor."""
    if isinstance(closed, bool):
        return W if closed else A
    return tuple(torch.where(closed, w, a) for w, a in zip(W, A))


def _unpick(closed: bool | Tensor, dM: list, dA: list) -> list:
    """The backward of `pick`: the gradient of the previous anchor, None for zero; that of W is added to dM."""
    if closed is False:
        return dA
    for m, a in zip(dM, dA):
        if a is not None:
            m[:, : a.shape[1]] += a if closed is True else torch.where(closed, a, 0.0)
    return [None if a is None or closed is True else torch.where(closed, 0.0, a) for a in dA]
