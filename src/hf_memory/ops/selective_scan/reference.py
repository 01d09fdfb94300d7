"""The definition of the selective scan, one token at a time. Every other backend is tested against it."""

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.ops.contract import in_float32, normal_numbers, repeat_heads


@in_float32
def selective_scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, initial_state: Tensor, rate: Tensor
) -> tuple[Tensor, Tensor]:
    """S <- e^(rate g) S + k v^T;   o = S^T q."""
    S = initial_state  # [B, HV, K, V]
    q, k = repeat_heads(q, v.shape[2]), repeat_heads(k, v.shape[2])
    outputs = []
    for t in range(q.shape[1]):
        S = (rate * g[:, t, :, None]).exp() * S
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    return torch.stack(outputs, dim=1), S


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
) -> dict:
    """Valid random arguments of the op."""
    HV = HV or H
    wide = torch.promote_types(dtype, torch.float32)
    random = normal_numbers(seed)
    arguments = {
        "q": random(B, T, H, K).to(dtype),
        "k": random(B, T, H, K).to(dtype),
        "v": random(B, T, HV, V).to(dtype),
        "g": F.logsigmoid(random(B, T, HV, V) + 1).to(wide),
        "rate": random(HV, K, V).exp().to(wide),
        "initial_state": random(B, HV, K, V).to(wide),
    }
    return {name: x.to(device) for name, x in arguments.items()}
