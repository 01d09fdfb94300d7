"""The neural memory in PyTorch, parallel within chunks: rows are arranged so that their chunks are aligned.

For tokens with gradients g_j after weights W and momentum S, with L(c)_ti = c_{i+1} ... c_t:

    W_t = beta_t W + c_t S - sum_{j <= t} P_tj g_j,   S_n = H S - sum_j m_j g_j
    P = L(a) L(eta) diag(lr),   beta_t = a_1 ... a_t,   c_t = sum_i L(a)_ti eta_1 ... eta_i

These coefficients are computed for all chunks at once. `dual` does the rest for what is linear in gradients, and
`each_token` for all else. Autograd differentiates both: of groups of chunks only the memory before each is saved, and
the group is computed again. Source: https://arxiv.org/abs/2501.00663, section 3.2.
"""

from collections.abc import Callable
from functools import partial
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from hf_memory.ops.autograd import computed_again
from hf_memory.ops.layout import repeat_heads
from hf_memory.ops.neural_memory import dual, each_token
from hf_memory.ops.neural_memory.layout import Layout, arrange, layout_of, real_places, restore
from hf_memory.ops.neural_memory.network import (
    Inputs,
    Layers,
    Memory,
    NeuralMemoryState,
    Norm,
    Rows,
    Rule,
    enter,
    leave,
)
from hf_memory.ops.precision import in_float32


@in_float32
def neural_memory(
    *given: Any,
    initial_state: NeuralMemoryState,
    weights: Layers,
    rule: Rule,
    norm: Norm | None = None,
    aligned: bool = False,
    loop: Callable | None = None,
) -> tuple[Tensor, NeuralMemoryState]:
    """Same function as the reference; `aligned`: see `layout_of`; `loop`: another form of `over_chunks`."""
    *inputs, mask = given
    B, T, HV = given[2].shape[:3]
    phase = initial_state.phase
    if dual.is_solved(rule, weights, norm):
        layout = Layout(dual.solved_tokens(T), None, None, [True] * (T + 1), phase)
    else:
        layout = layout_of(phase, mask, T, rule.chunk_size, aligned)
    arranged: Any = (x if x is None else arrange(repeat_heads(x, HV), layout) for x in inputs)
    real = real_places(mask, layout, B, T, given[3])
    rows = _rows(Inputs(*arranged), real, rule)
    W, S, A = (tuple(x.flatten(0, 1) for x in layers) for layers in enter(initial_state, weights))
    per_row: Any = None if norm is None else tuple(x.repeat(B, 1)[:, None] for x in norm)
    initial = tuple(W.expand(B, *W.shape).flatten(0, 1) for W in weights)
    closed = [
        x if isinstance(x, bool) else x.repeat_interleave(HV)[:, None, None] for x in layout.closed
    ]
    memory = Memory(W, S, A, initial, per_row, rule)
    o, memory = (loop or over_chunks)(rows, memory, closed)
    W, S, A = (tuple(x.unflatten(0, (B, HV)) for x in layers) for layers in memory[:3])
    return restore(o.unflatten(1, (B, HV)), T, mask, layout), leave(W, S, A, layout.phase, weights)


def over_chunks(rows: Rows, memory: Memory, closed: list) -> tuple[Tensor, Memory]:
    """Read and write chunk by chunk.

    Args:
        rows: those of all chunks.
        memory: the memory before the first chunk.
        closed: for each chunk, and after the last one, whether the anchor becomes the weights: bool, or [N, 1, 1].

    Returns:
        o [NC, N, C, V], and the memory after the last chunk.
    """
    NC = len(rows.q)
    is_linear = memory.rule.is_linear
    group = partial(_group, dual.step if is_linear else each_token.step)
    size = max(1, isqrt(NC)) if is_linear else 1
    columns = (NC * [None] if x is None else x.unbind() for x in rows)
    chunks = [Rows(*chunk) for chunk in zip(*columns)]
    outputs: list[Tensor] = []
    for n in range(0, NC, size):
        part = slice(n, n + size)
        some, W, S, A = computed_again(group, chunks[part], memory, closed[part])
        memory = memory._replace(W=W, S=S, A=A)
        outputs += some
    A = pick(closed[NC], memory.W, memory.A) if memory.A else ()
    return torch.stack(outputs), memory._replace(A=A)


def _group(step: Callable, chunks: list[Rows], memory: Memory, closed: list) -> tuple:
    """Read and write some chunks, by a step each: outputs, weights, momentum, and the anchor of the last chunk."""
    W, S, A = memory[:3]
    outputs = []
    for chunk, begins in zip(chunks, closed):
        A = pick(begins, W, A) if A else ()
        o, W, S = step(chunk, memory._replace(W=W, S=S, A=A or W))
        outputs.append(o)
    return outputs, W, S, A


def pick(closed: bool | Tensor, W: Layers, A: Layers) -> Layers:
    """The anchor: the weights if a chunk of the memory begins here, else the previous anchor."""
    if isinstance(closed, bool):
        return W if closed else A
    return tuple(torch.where(closed, w, a) for w, a in zip(W, A))


def _rows(inputs: Inputs, real: Tensor | None, rule: Rule) -> Rows:
    """The rows of chunks, from arguments of the op in chunks [NC, N, C].

    `real` is 1 at tokens and 0 at padding, which changes neither weights nor momentum; None if all are tokens.
    """
    q, k, v, lr, momentum, decay, threshold, muon_lr = inputs
    # what is not linear multiplies its gradients itself
    rate = lr if rule.is_linear else torch.ones_like(decay)
    beta = decay.cumsum(-1).exp()[..., None]
    P = _products(decay)
    rows = Rows(q, k, v, lr, threshold, P, beta)
    if momentum is None:
        return rows._replace(P=P * rate[..., None, :])
    if real is not None:
        P = P * real.repeat_interleave(lr.shape[1] // real.shape[1], dim=1)[..., None, :]
    slows = _products(momentum)
    H = momentum.cumsum(-1).exp()[..., None]
    if muon_lr is not None:
        return rows._replace(P=P * muon_lr[..., None, :], H=H, slows=slows)
    return rows._replace(
        P=P @ (slows * rate[..., None, :]),
        c=P @ H,
        m=slows[..., -1, :, None] * rate[..., None],
        H=H[..., -1:, :],
    )


def _products(log: Tensor) -> Tensor:
    """L(c)_ti = c_{i+1} ... c_t for i <= t, else 0, of logarithms [..., C], which may be -inf."""
    C = log.shape[-1]
    later = torch.ones(C, C, dtype=torch.bool, device=log.device).tril(-1)
    sums = log[..., None].expand(*log.shape, C).masked_fill(~later, 0).cumsum(-2)
    return sums.masked_fill(later.mT, -torch.inf).exp()
