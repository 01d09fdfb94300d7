"""The neural memory in PyTorch, parallel within chunks: rows are arranged so that their chunks are aligned.

For tokens with gradients g_j after weights W and momentum S, with L(c)_ti = c_{i+1} ... c_t:

    W_t = beta_t W + c_t S - sum_{j <= t} P_tj g_j,   S_n = H S - sum_j m_j g_j
    P = L(a) L(eta) diag(lr),   beta_t = a_1 ... a_t,   c_t = sum_i L(a)_ti eta_1 ... eta_i

These coefficients are computed for all chunks at once. `dual` does the rest for gradients taken at the anchor,
`exact` for a matrix whose gradients are taken at every token, and `each_token` for all that is not linear in gradients.
Source: https://arxiv.org/abs/2501.00663, section 3.2.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_memory.ops.layout import repeat_heads
from hf_memory.ops.neural_memory import dual, each_token, exact
from hf_memory.ops.neural_memory.layout import Layout, arrange, layout_of, real_places, restore
from hf_memory.ops.neural_memory.network import Inputs, NeuralMemoryState, Norm, Rule, enter, leave
from hf_memory.ops.neural_memory.one_chunk import Layers, Memory
from hf_memory.ops.precision import in_float32


class Coefficients(NamedTuple):
    """Coefficients of chunks of C tokens, with leading dimensions [NC, N]; c, m and H are None without momentum."""

    P: Tensor  # [..., C, C]
    beta: Tensor | None  # [..., C, 1]; None without decay
    c: Tensor | None  # [..., C, 1]
    m: Tensor | None  # [..., C, 1]
    H: Tensor | None  # [..., 1, 1]


def is_exact(rule: Rule, weights: Layers, norm: Norm | None) -> bool:
    """Whether gradients at every token have the closed form of `exact`."""
    is_linear = rule.chunk_size == 1 and rule.is_linear and rule.max_grad_norm is None
    return is_linear and len(weights) == 1 and norm is None


@in_float32
def neural_memory(
    *rows: Any,
    initial_state: NeuralMemoryState,
    weights: Layers,
    rule: Rule,
    norm: Norm | None = None,
    aligned: bool = False,
    forms=(exact.run, dual.run),
) -> tuple[Tensor, NeuralMemoryState]:
    """Same function as the reference.

    `forms` loop over chunks, for gradients at every token and at the anchor; `aligned`: see `layout_of`.
    """
    *given, mask = rows
    B, T, HV = given[2].shape[:3]
    phase = initial_state.phase
    each_error = is_exact(rule, weights, norm)
    if each_error:
        layout = Layout(exact.chunk_size(T), None, None, [], phase)
    else:
        layout = layout_of(phase, mask, T, rule.chunk_size, aligned)
    arranged: Any = (x if x is None else arrange(repeat_heads(x, HV), layout) for x in given)
    inputs = Inputs(*arranged)
    real = real_places(mask, layout, B, T, inputs.q)
    W, S, A = (tuple(x.flatten(0, 1) for x in layers) for layers in enter(initial_state, weights))
    per_row: Any = None if norm is None else tuple(x.repeat(B, 1)[:, None] for x in norm)
    initial = tuple(W.expand(B, *W.shape).flatten(0, 1) for W in weights)
    closed = [
        x if isinstance(x, bool) else x.repeat_interleave(HV)[:, None, None] for x in layout.closed
    ]
    memory = Memory(W, S, A, initial, per_row, closed, rule)
    if rule.is_linear:
        run = forms[0] if each_error else forms[1]
        o, state = run(
            inputs, _coefficients(inputs.lr, inputs.momentum, inputs.decay, real), memory
        )
    else:
        o, state = each_token.run(inputs, *_of_each_token(inputs, real), memory)
    W, S, A = (tuple(x.unflatten(0, (B, HV)) for x in layers) for layers in state)
    return restore(o.unflatten(1, (B, HV)), T, mask, layout), leave(W, S, A, layout.phase, weights)


def _coefficients(
    lr: Tensor, momentum: Tensor | None, decay: Tensor | None, real: Tensor | None
) -> Coefficients:
    """The coefficients of the module's docstring, from the arguments of the op in chunks [NC, N, C].

    `real` is 1 at tokens and 0 at padding, which changes neither weights nor momentum; None if all are tokens.
    """
    beta = None if decay is None else decay.cumsum(-1).exp()[..., None]
    ones = lr.new_ones(*lr.shape, lr.shape[-1])
    forgets = ones.tril() if decay is None else _products(decay)
    if momentum is None:
        return Coefficients(forgets * lr[..., None, :], beta, None, None, None)
    if real is not None:
        real = real.repeat_interleave(lr.shape[1] // real.shape[1], dim=1)
        forgets = forgets * real[..., None, :]
    slows = _products(momentum)
    H = momentum.cumsum(-1).exp()[..., None]
    m = slows[..., -1, :, None] * lr[..., None]
    return Coefficients(forgets @ (slows * lr[..., None, :]), beta, forgets @ H, m, H[..., -1:, :])


def _of_each_token(inputs: Inputs, real: Tensor | None) -> tuple[Coefficients, Coefficients | None]:
    """Coefficients of the weights for rates of one; with Muon, those of the momentum and then those of the weights."""
    ones = torch.ones_like(inputs.q[..., 0])
    momentum, decay, _, muon_lr = inputs[4:]
    if muon_lr is None:
        return _coefficients(ones, momentum, decay, real), None
    return _coefficients(ones, None, momentum, real), _coefficients(muon_lr, None, decay, real)


def _products(log: Tensor) -> Tensor:
    """L(c)_ti = c_{i+1} ... c_t for i <= t, else 0, of logarithms [..., C], which may be -inf."""
    C = log.shape[-1]
    later = torch.ones(C, C, dtype=torch.bool, device=log.device).tril(-1)
    sums = log[..., None].expand(*log.shape, C).masked_fill(~later, 0).cumsum(-2)
    return sums.masked_fill(later.mT, -torch.inf).exp()
