"""The neural memory in PyTorch, parallel inside chunks: rows are laid out so that their chunks begin together.

Over a run of tokens from weights W and momentum S, whatever their gradients g_j are, with L(c)_ti = c_{i+1} ... c_t:

    W_t = beta_t W + c_t S - sum_{j <= t} P_tj g_j,   S_n = H S - sum_j m_j g_j
    P = L(a) L(eta) diag(lr),   beta_t = a_1 ... a_t,   c_t = sum_i L(a)_ti eta_1 ... eta_i

These coefficients are small, and made for all chunks at once. `dual` does the rest for gradients taken at the anchor,
`exact` for a matrix whose gradients are taken at every token, and `each_token` for all that is not linear in gradients.
Source: https://arxiv.org/abs/2501.00663, section 3.2.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.ops.contract import in_float32, repeat_heads
from hf_memory.ops.neural_memory import dual, each_token, exact
from hf_memory.ops.neural_memory.network import NeuralMemoryState, enter, leave

EXACT_CHUNK = 64


class Coefficients(NamedTuple):
    """Of runs of C tokens, with leading dimensions [NC, N]; those of momentum are None without it."""

    P: Tensor  # [..., C, C]
    beta: Tensor | None  # [..., C, 1]; None without decay
    c: Tensor | None  # [..., C, 1]
    m: Tensor | None  # [..., C, 1]
    H: Tensor | None  # [..., 1, 1]


class Layout(NamedTuple):
    """Where the tokens of each row go, so that chunks of all rows begin at multiples of C."""

    C: int
    source: (
        Tensor | None
    )  # [B, NC * C]: which token is at a place, T for none; None: tokens stay, and the end is filled
    place: Tensor | None  # [B, T]: the inverse
    closed: list  # NC + 1 times: whether a chunk of the memory begins at chunk n: a bool, or one for each row [B]
    phase: Tensor  # [B], after the last token


@in_float32
def neural_memory(
    q,
    k,
    v,
    lr,
    momentum,
    decay,
    threshold,
    muon_lr,
    earlier_k,
    earlier_v,
    earlier_lr,
    mask,
    *,
    initial_state: NeuralMemoryState,
    weights,
    norm,
    rule,
    fresh: bool = False,
    forms=(exact.run, dual.run),
) -> tuple[Tensor, NeuralMemoryState]:
    """Same function as the reference; `forms` walk the chunks: of gradients at every token, and at the anchor."""
    B, T, HV = v.shape[:3]
    is_exact = len(weights) == 1 and rule.chunk_size == 1 and norm is None and rule.is_linear
    layout = _layout(initial_state.phase, mask, T, rule.chunk_size, fresh, is_exact)
    q, k, earlier_k = (x if x is None else repeat_heads(x, HV) for x in (q, k, earlier_k))
    q, k, v, lr, momentum, decay = (_arrange(x, layout) for x in (q, k, v, lr, momentum, decay))
    real = _real(mask, layout, B, T, q)
    state: Any = [tuple(W.flatten(0, 1) for W in layers) for layers in enter(initial_state, weights)]
    initial = tuple(W.expand(B, *W.shape).flatten(0, 1) for W in weights)
    if is_exact:
        o, state = forms[0](q, k, v, _coefficients(lr, momentum, decay, real), state, initial, rule)
    else:
        per_row = None if norm is None else tuple(x.repeat(B, 1)[:, None] for x in norm)
        closed = [x if isinstance(x, bool) else x.repeat_interleave(HV)[:, None, None] for x in layout.closed]
        walk, coefficients = forms[1], _coefficients(lr, momentum, decay, real) if rule.is_linear else None
        if coefficients is None:
            others = [_arrange(x, layout) for x in (threshold, earlier_k, earlier_v, earlier_lr)]
            coefficients, muon = _of_each_token(torch.ones_like(lr), momentum, decay, _arrange(muon_lr, layout), real)
            walk = partial(each_token.run, [lr, *others], muon)
        o, state = walk(q, k, v, coefficients, closed, state, initial, per_row, rule)
    W, S, A = (tuple(x.unflatten(0, (B, HV)) for x in layers) for layers in state)
    return _restore(o.unflatten(1, (B, HV)), T, mask, layout), leave(W, S, A, layout.phase, weights)


def _layout(phase: Tensor, mask: Tensor | None, T: int, b: int, fresh: bool, is_exact: bool) -> Layout:
    """Tokens stay where they are if no chunk of the memory ends before the last of them, or all end together."""
    if is_exact:
        return Layout(min(EXACT_CHUNK, T), None, None, [], phase)
    after = phase + (T if mask is None else mask.sum(1))
    if fresh and mask is None:
        return Layout(min(b, T), None, None, [True] * -(-T // b) + [bool(T % b == 0)], after % b)
    many = T + b - 1 if torch.compiler.is_compiling() else 0  # a graph cannot ask how many places the fullest row has
    places = 1 if T == 1 else many or int(after.max())
    if places <= b:
        return Layout(T, None, None, [phase == 0, after == b], after % b)
    NC, tokens = -(-places // b), torch.arange(T, device=phase.device).expand(phase.shape[0], T)
    place = phase[:, None] + (tokens if mask is None else mask.cumsum(1) - 1)
    source = torch.full((phase.shape[0], NC * b + 1), T, device=phase.device)
    source = source.scatter(1, place if mask is None else place.where(mask, NC * b), tokens)[:, :-1]
    return Layout(b, source, place.clamp(min=0), [phase == 0, *(after >= n * b for n in range(1, NC + 1))], after % b)


def _real(mask: Tensor | None, layout: Layout, B: int, T: int, like: Tensor) -> Tensor | None:
    """1 at places with a token and 0 at others [NC, B, C]; None if there are no others."""
    if mask is None and layout.source is None and T % layout.C == 0:
        return None
    ones = like.new_ones(B, T) if mask is None else mask.to(like)
    return _arrange(ones[:, :, None], layout)


def _arrange(x: Tensor | None, layout: Layout) -> Tensor | None:
    """[B, T, H, ...] -> [NC, B * H, C, ...] in the layout's order, zeros where there is no token."""
    if x is None:
        return None
    if layout.source is not None:
        x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, 1))
        index = layout.source.view(*layout.source.shape, *(1 for _ in x.shape[2:]))
        x = x.gather(1, index.expand(-1, -1, *x.shape[2:]))
    x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, -x.shape[1] % layout.C)).transpose(1, 2)  # [B, H, NC * C, ...]
    return x.unflatten(2, (-1, layout.C)).flatten(0, 1).transpose(0, 1).contiguous()


def _restore(o: Tensor, T: int, mask: Tensor | None, layout: Layout) -> Tensor:
    """[NC, B, H, C, V] -> [B, T, H, V] in the order of the tokens, zeros where the mask is False."""
    o = o.permute(1, 0, 3, 2, 4).flatten(1, 2)
    if layout.place is not None:
        o = o.gather(1, layout.place[:, :, None, None].expand(-1, -1, *o.shape[2:]))
    o = o[:, :T]
    return o if mask is None else o * mask[:, :, None, None]


def _coefficients(lr: Tensor, momentum: Tensor | None, decay: Tensor | None, real: Tensor | None) -> Coefficients:
    """Args: all [NC, N, C]; real is 1 at tokens and 0 at places without one, which keep weights and momentum."""
    beta = None if decay is None else decay.cumsum(-1).exp()[..., None]
    forgets = torch.ones_like(lr[..., None] * lr[..., None, :]).tril() if decay is None else _products(decay)
    if momentum is None:
        return Coefficients(forgets * lr[..., None, :], beta, None, None, None)
    if real is not None:
        real = real.repeat_interleave(lr.shape[1] // real.shape[1], dim=1)
        forgets = forgets * real[..., None, :]
    slows = _products(momentum)
    H = momentum.cumsum(-1).exp()[..., None]
    m = slows[..., -1, :, None] * lr[..., None]
    return Coefficients(forgets @ (slows * lr[..., None, :]), beta, forgets @ H, m, H[..., -1:, :])


def _of_each_token(ones: Tensor, momentum, decay, muon_lr, real) -> tuple[Coefficients, Coefficients | None]:
    """Of weights; or with Muon of momentum, and then of weights."""
    if muon_lr is None:
        return _coefficients(ones, momentum, decay, real), None
    return _coefficients(ones, None, momentum, real), _coefficients(muon_lr, None, decay, real)


def _products(log: Tensor) -> Tensor:
    """L(c)_ti = c_{i+1} ... c_t for i <= t, else 0, of logarithms [..., C], which may be -inf."""
    C = log.shape[-1]
    later = torch.ones(C, C, dtype=torch.bool, device=log.device).tril(-1)
    sums = log[..., None].expand(*log.shape, C).masked_fill(~later, 0).cumsum(-2)
    return sums.masked_fill(later.mT, -torch.inf).exp()
