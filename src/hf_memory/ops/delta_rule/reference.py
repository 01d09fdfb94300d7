"""The definition of the delta rule, one token at a time. Every other backend is tested against it."""

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.ops.contract import in_float32, normal_numbers, repeat_heads


@in_float32
def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, *, initial_state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """S <- e^g S;   S <- S + beta k (v - S^T k)^T;   o = scale S^T q."""
    S = initial_state  # [B, HV, K, V]
    q, k = repeat_heads(q, v.shape[2]), repeat_heads(k, v.shape[2])
    outputs = []
    for t in range(q.shape[1]):
        if g is not None:
            decay = g[:, t].exp() if g.ndim == 4 else g[:, t, :, None].exp()  # [B, HV, K or 1]
            S = decay[..., None] * S
        recalled = torch.einsum("bhkv,bhk->bhv", S, k[:, t])
        error = v[:, t] - recalled
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * error)
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    return scale * torch.stack(outputs, dim=1), S


@in_float32
def diagonal_plus_rank_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    initial_state: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """S <- (diag(e^g) + b a^T) S + beta k v^T;   o = scale S^T q, with g [B, T, HV, K]."""
    S = initial_state  # [B, HV, K, V]
    q, k = repeat_heads(q, v.shape[2]), repeat_heads(k, v.shape[2])
    outputs = []
    for t in range(q.shape[1]):
        along_a = torch.einsum("bhkv,bhk->bhv", S, a[:, t])
        S = g[:, t, ..., None].exp() * S + torch.einsum("bhk,bhv->bhkv", b[:, t], along_a)
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * v[:, t])
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    return scale * torch.stack(outputs, dim=1), S


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
    decay: str = "none",
    beta: str = "random",
    erase: str = "k",
) -> dict:
    """Valid random arguments.

    `decay` is "none", "scalar" or "vector", `beta` "random" or "extreme" (0, 1 or 2), `erase` "k" or "own".
    """
    HV = HV or H
    wide = torch.promote_types(dtype, torch.float32)
    random = normal_numbers(seed)
    strength = (
        2 * random(B, T, HV).sigmoid() if beta == "random" else random(B, T, HV).mul(1.5).round().abs().clamp(max=2)
    )
    arguments = {
        "q": random(B, T, H, K).to(dtype),
        "k": F.normalize(random(B, T, H, K), dim=-1).to(dtype),
        "v": random(B, T, HV, V).to(dtype),
        "beta": strength.to(wide),
    }
    if decay != "none":
        shape = (B, T, HV) if decay == "scalar" else (B, T, HV, K)
        arguments["g"] = F.logsigmoid(random(*shape) + 1).to(wide)
    if erase == "own":
        a = F.normalize(random(B, T, HV, K), dim=-1)
        arguments |= {"a": a.to(dtype), "b": (-a * random(B, T, HV, K).sigmoid()).to(dtype)}
    arguments["initial_state"] = random(B, HV, K, V).to(wide)
    return {name: x.to(device) for name, x in arguments.items()}
