"""The definition of linear attention, one token at a time. Every other backend is tested against it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_memory.ops.layout import repeat_heads
from hf_memory.ops.precision import in_float32
from hf_memory.ops.sample import Sample

EPS = 1e-6  # keeps the normaliser from zero


class LinearState(NamedTuple):
    """The state of normalised linear attention."""

    memory: Tensor  # [N, HV, K, V]
    normalizer: Tensor  # [N, HV, K]


@in_float32
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    *,
    initial_state: Tensor | LinearState,
    scale: float,
) -> tuple[Tensor, Tensor | LinearState]:
    """S <- e^g S + k v^T;   o = scale S^T q,   or with z <- e^g z + k:   o = S^T q / (z^T q + eps)."""
    normalize = isinstance(initial_state, LinearState)
    S: Any
    z: Any
    S, z = initial_state if normalize else (initial_state, None)  # [B, HV, K, V], [B, HV, K]
    q = repeat_heads(q, v.shape[2])
    k = repeat_heads(k, v.shape[2])
    outputs = []
    for t in range(q.shape[1]):
        if g is not None:
            decay = g[:, t].exp() if g.ndim == 4 else g[:, t, :, None].exp()  # [B, HV, K or 1]
            S = decay[..., None] * S
            z = decay * z if normalize else None
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        o = torch.einsum("bhkv,bhk->bhv", S, q[:, t])
        if normalize:
            z = z + k[:, t]
            o = o / (torch.einsum("bhk,bhk->bh", z, q[:, t])[..., None] + EPS)
        outputs.append(o)
    o = torch.stack(outputs, dim=1)
    return (o, LinearState(S, z)) if normalize else (scale * o, S)


def example(*, decay: str = "none", normalize: bool = False, **sizes: Any) -> dict:
    """Valid random arguments; `decay` is "none", "scalar" or "vector", `sizes` are arguments of `Sample`."""
    s = Sample(**sizes)
    feature = torch.nn.functional.softplus if normalize else (lambda x: x)
    rows = {"q": feature(s(s.H, s.K)), "k": feature(s(s.H, s.K)), "v": s(s.HV, s.V)}
    g = s.decay(decay)
    S = s.state()
    state = LinearState(S, 1 + s.normal(s.B, s.HV, s.K).abs()) if normalize else S
    return s.arguments(rows, g=g, initial_state=state, normalize=normalize)
