"""The definition of test-time ridge regression, one token at a time. Every other backend is tested against it."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from hf_memory.ops.contract import in_float32, normal_numbers, repeat_heads

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
    q, k = repeat_heads(q, v.shape[2]), repeat_heads(k, v.shape[2])
    outputs = []
    for t in range(q.shape[1]):
        decay, write = g[:, t].exp()[..., None, None], beta[:, t, :, None] * k[:, t]
        H = decay * H + torch.einsum("bhk,bhl->bhkl", write, k[:, t])
        S = decay * S + torch.einsum("bhk,bhv->bhkv", write, v[:, t])
        L = ridge + ratio * (H.square().sum((-2, -1)) + EPS**2).sqrt()[..., None]
        x = torch.linalg.solve(H + torch.diag_embed(L), q[:, t])
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, torch.lerp(q[:, t], x, alpha[:, t, :, None])))
    return scale * torch.stack(outputs, dim=1), RidgeState(H, S)


def example(
    *,
    B: int = 2,
    T: int = 65,
    H: int = 2,
    HV: int | None = None,
    K: int = 16,
    V: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    ratio: float = 0.0,
) -> dict:
    """Valid random arguments; with a `ratio` of more than 0 there is no other ridge, and part of q reads unsolved."""
    HV = HV or H
    wide = torch.promote_types(dtype, torch.float32)
    random = normal_numbers(seed)
    roots = random(B, HV, K, K)
    arguments: dict = {
        "q": F.normalize(random(B, T, H, K), dim=-1).to(dtype),
        "k": F.normalize(random(B, T, H, K), dim=-1).to(dtype),
        "v": random(B, T, HV, V).to(dtype),
        "beta": random(B, T, HV).sigmoid().to(wide),
        "g": F.logsigmoid(random(B, T, HV) + 2).to(wide),
        "initial_state": RidgeState((roots @ roots.mT / K).to(wide), random(B, HV, K, V).to(wide)),
    }
    if ratio:
        arguments |= {"ratio": ratio, "steps": 48, "alpha": random(B, T, HV).sigmoid().to(wide)}
    else:
        arguments["ridge"] = (0.25 + random(HV, K).exp()).to(wide)
    return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, arguments)
