"""The definition of test-time ridge regression, one token at a time. Every other backend is tested against it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.ops.layout import repeat_heads
from hf_memory.ops.precision import in_float32
from hf_memory.ops.sample import Sample

EPS = 1e-6  # ridge of an empty memory


class RidgeState(NamedTuple):
    """The state of ridge regression: decayed sums of k k^T and of k v^T."""

    key_products: Tensor  # [N, HV, K, K]
    memory: Tensor  # [N, HV, K, V]


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
    """H <- e^g H + beta k k^T;   S <- e^g S + beta k v^T;   x = (H + L)^-1 q;   o = scale S^T (q + alpha (x - q)).

    L is diagonal: L = ridge + ratio |H|, with the Frobenius norm. The number of steps is that of the chunk form.
    """
    H, S = initial_state
    q = repeat_heads(q, v.shape[2])
    k = repeat_heads(k, v.shape[2])
    outputs = []
    for t in range(q.shape[1]):
        decay = g[:, t].exp()[..., None, None]
        write = beta[:, t, :, None] * k[:, t]
        H = decay * H + torch.einsum("bhk,bhl->bhkl", write, k[:, t])
        S = decay * S + torch.einsum("bhk,bhv->bhkv", write, v[:, t])
        L = ridge + ratio * (H.square().sum((-2, -1)) + EPS**2).sqrt()[..., None]
        x = torch.linalg.solve(H + torch.diag_embed(L), q[:, t])
        outputs.append(
            torch.einsum("bhkv,bhk->bhv", S, torch.lerp(q[:, t], x, alpha[:, t, :, None]))
        )
    return scale * torch.stack(outputs, dim=1), RidgeState(H, S)


def example(*, ratio: float = 0.0, **sizes: Any) -> dict:
    """Valid random arguments; with a `ratio` of more than 0 there is no other ridge, and part of q reads unsolved.

    `sizes` are arguments of `Sample`.
    """
    s = Sample(**sizes)
    roots = s.normal(s.B, s.HV, s.K, s.K)
    rows = {"q": s.unit(s.H, s.K), "k": s.unit(s.H, s.K), "v": s(s.HV, s.V)}
    beta = s(s.HV).sigmoid()
    g = F.logsigmoid(s(s.HV) + 2)
    given: dict = {
        "beta": beta,
        "g": g,
        "initial_state": RidgeState(roots @ roots.mT / s.K, s.state()),
    }
    if ratio:
        return s.arguments(rows, **given, ratio=ratio, steps=48, alpha=s(s.HV).sigmoid())
    return s.arguments(rows, **given, ridge=0.25 + s.normal(s.HV, s.K).exp())
