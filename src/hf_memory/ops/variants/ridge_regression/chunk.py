"""Ridge regression in PyTorch: the systems of all tokens of a segment are solved at once, by conjugate gradients.

With b the sum of g from the start of the chunk to each token, and H and S the state before the chunk, products with the
matrices of all tokens of a chunk are

    A(X) = (X e^b) H + ((X K^T) * W) K + L X,   W_ij = beta_j e^(b_i - b_j) for i >= j
    A(X) = Q;   O = (X e^b) S + ((X K^T) * W) V

The gradient of a solution is the solution of another system with the same matrix.
"""

from functools import partial

import torch
from torch import Tensor

from hf_memory.ops.autograd import first_derivatives_only
from hf_memory.ops.chunks import (
    add_product,
    chunk_size,
    in_segments,
    joined_chunks,
    scalar_decays,
    split_chunks,
)
from hf_memory.ops.layout import repeat_heads
from hf_memory.ops.precision import in_float32
from hf_memory.ops.variants.ridge_regression.reference import EPS, RidgeState

CHUNK = 64
TINY = 1e-30


@in_float32
def ridge_regression(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    alpha: Tensor,
    *,
    ridge: Tensor,
    ratio: float,
    steps: int,
    initial_state: RidgeState,
    scale: float,
) -> tuple[Tensor, RidgeState]:
    """Same function as the reference, as far as the systems are solved."""
    HV = v.shape[2]
    q = repeat_heads(q, HV)
    k = repeat_heads(k, HV)
    segment = partial(_segment, ridge=ridge, ratio=ratio, steps=steps)
    M = torch.cat(initial_state, -1)  # [N, HV, K, K + V]
    o, M = in_segments(
        segment, chunk_size(v.shape[1], CHUNK), M, q, k, v, beta, g, alpha, scale=scale
    )
    return o, RidgeState(*(x.contiguous() for x in M.split([k.shape[-1], v.shape[-1]], -1)))


def _segment(
    C: int, M: Tensor, rows: tuple, scale: float, *, ridge: Tensor, ratio: float, steps: int
) -> tuple[Tensor, Tensor]:
    B, _, H, V = rows[2].shape
    q, k, v, beta, g, alpha = (split_chunks(x, C) for x in rows)  # [NC, B * H, C, ...]
    decays, enter, leave = scalar_decays(g)
    W = decays * beta[..., None, :]
    writes = (leave * beta[..., None] * k).mT
    values = torch.cat([k, v], -1)
    before = []
    after = M.flatten(0, 1)
    for decay, write, value in zip(enter[..., -1:, :], writes, values):
        before.append(after)
        after = add_product(after, write, value, decay)
    keys, S = torch.stack(before).split([k.shape[-1], V], -1)
    L = ridge.repeat(B, 1)[:, None] + ratio * (_squares(keys, k, W, enter) + EPS**2).sqrt()
    x = _solution(steps, q, keys, k, W, enter, L.expand_as(q))
    x = torch.lerp(q, x, alpha[..., None])
    o = scale * ((enter * x) @ S + ((x @ k.mT) * W) @ v)
    return joined_chunks(o, B, C), after.unflatten(0, (B, H))


def _squares(H: Tensor, k: Tensor, W: Tensor, enter: Tensor) -> Tensor:
    """The squared Frobenius norm of the keys' matrix of each token, [NC, B * H, C, 1]."""
    old = enter.square() * H.square().sum((-2, -1))[..., None, None]
    both = 2 * enter * (W @ ((k @ H) * k).sum(-1, keepdim=True))
    return old + both + ((W @ (k @ k.mT).square()) * W).sum(-1, keepdim=True)


def _product(x: Tensor, H: Tensor, k: Tensor, W: Tensor, enter: Tensor, L: Tensor) -> Tensor:
    """A(x) of the module's docstring."""
    return (enter * x) @ H.mT + ((x @ k.mT) * W) @ k + L * x


def _solution(steps: int, q: Tensor, *system: Tensor) -> Tensor:
    """x with A(x) = q. What is differentiated is the residual at x, which is zero but for rounding."""
    with torch.no_grad():
        x = _conjugate_gradients(steps, q, *system)
    return _Inverse.apply(q - _product(x, *system), x, steps, *(y.detach() for y in system))


def _conjugate_gradients(steps: int, q: Tensor, *system: Tensor) -> Tensor:
    x = torch.zeros_like(q)
    r = q
    p = q
    squares = r.square().sum(-1, keepdim=True)
    for _ in range(steps):
        Ap = _product(p, *system)
        step = squares / (p * Ap).sum(-1, keepdim=True).clamp(min=TINY)
        x = x + step * p
        r = r - step * Ap
        before = squares
        squares = r.square().sum(-1, keepdim=True)
        p = r + squares / before.clamp(min=TINY) * p
    return x


class _Inverse(torch.autograd.Function):
    """x, with the gradient of x + A^-1(residual); A is symmetric."""

    @staticmethod
    def forward(ctx, residual, x, steps, *system):
        ctx.steps = steps
        ctx.save_for_backward(*system)
        return x.clone()

    @staticmethod
    @first_derivatives_only
    def backward(ctx, dx):
        system = ctx.saved_tensors
        return _conjugate_gradients(ctx.steps, dx, *system), None, None, *(None for _ in system)
