"""The definition of the delta rule, one token at a time. Every other backend is tested against it."""

from typing import Any

import torch
from torch import Tensor

from hf_memory.ops.layout import repeat_heads
from hf_memory.ops.precision import in_float32
from hf_memory.ops.sample import Sample


@in_float32
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    a: Tensor | None = None,
    b: Tensor | None = None,
    *,
    initial_state: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """S <- e^g S;   S <- S + beta k (v - S^T k)^T;   o = scale S^T q.

    With a and b:   S <- (diag(e^g) + b a^T) S + beta k v^T.
    """
    S = initial_state  # [B, HV, K, V]
    q = repeat_heads(q, v.shape[2])
    k = repeat_heads(k, v.shape[2])
    outputs = []
    for t in range(q.shape[1]):
        read_by_a = None if a is None else torch.einsum("bhkv,bhk->bhv", S, a[:, t])
        if g is not None:
            decay = g[:, t].exp() if g.ndim == 4 else g[:, t, :, None].exp()  # [B, HV, K or 1]
            S = decay[..., None] * S
        new_value = v[:, t]
        if b is None:
            new_value = new_value - torch.einsum("bhkv,bhk->bhv", S, k[:, t])
        else:
            S = S + torch.einsum("bhk,bhv->bhkv", b[:, t], read_by_a)
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * new_value)
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    return scale * torch.stack(outputs, dim=1), S


def example(*, decay: str = "none", beta: str = "random", erase: str = "k", **sizes: Any) -> dict:
    """Valid random arguments; `sizes` are arguments of `Sample`.

    `decay` is "none", "scalar" or "vector", `beta` "random" or "extreme" (0, 1 or 2), `erase` "k" or "own".
    """
    s = Sample(**sizes)
    strength = s(s.HV)
    strength = (
        2 * strength.sigmoid() if beta == "random" else strength.mul(1.5).round().abs().clamp(max=2)
    )
    rows = {"q": s(s.H, s.K), "k": s.unit(s.H, s.K), "v": s(s.HV, s.V)}
    g = s.decay(decay)
    if erase == "own":
        a = s.unit(s.HV, s.K)
        rows |= {"a": a, "b": -a * s(s.HV, s.K).sigmoid()}
    return s.arguments(rows, beta=strength, g=g, initial_state=s.state())
