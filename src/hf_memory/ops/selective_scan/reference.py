"""The definition of the selective scan, one token at a time. Every other backend is tested against it."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.ops.layout import repeat_heads
from hf_memory.ops.precision import in_float32
from hf_memory.ops.sample import Sample


@in_float32
def selective_scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, initial_state: Tensor, rate: Tensor
) -> tuple[Tensor, Tensor]:
    """S <- e^(rate g) S + k v^T;   o = S^T q."""
    S = initial_state  # [B, HV, K, V]
    q = repeat_heads(q, v.shape[2])
    k = repeat_heads(k, v.shape[2])
    outputs = []
    for t in range(q.shape[1]):
        S = (rate * g[:, t, :, None]).exp() * S
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    return torch.stack(outputs, dim=1), S


def example(**sizes: Any) -> dict:
    """Valid random arguments; `sizes` are arguments of `Sample`."""
    s = Sample(**sizes)
    rows = {"q": s(s.H, s.K), "k": s(s.H, s.K), "v": s(s.HV, s.V)}
    g = F.logsigmoid(s(s.HV, s.V) + 1)
    rate = s.normal(s.HV, s.K, s.V).exp()
    return s.arguments(rows, g=g, rate=rate, initial_state=s.state())
