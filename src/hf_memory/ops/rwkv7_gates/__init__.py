"""What RWKV-7 makes of its key, its learning rate and its decay before it writes."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.ops.dispatch import Backend, choose_backend

STRONGEST_DECAY = math.exp(-0.5)  # largest decay of a token, as a negative logarithm


def rwkv7_gates(
    k: Tensor,
    a: Tensor,
    w: Tensor,
    k_k: Tensor,
    k_a: Tensor,
    *,
    erasure: float,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The arguments k, g, a and b of `delta_rule`.

        k <- (1 + (sigmoid(a) - 1) k_a) k;   g = -e^(-1/2) sigmoid(w)
        a <- k_k k / |k_k k|;   b = -erasure sigmoid(a) k_k k / |k_k k|

    Args:
        k: keys [B, T, H, K].
        a: learning rates before their sigmoid [B, T, H, K].
        w: decays before their sigmoid [B, T, H, K].
        k_k: factors of the key whose content a write erases [H, K].
        k_a: how much the learning rate changes the key [H, K].
        erasure: how much of what the memory holds for a key a write can erase at most.
        backend: "triton", "chunk", which is PyTorch, or "auto": the kernel on CUDA without gradients.

    Returns:
        Four tensors [B, T, H, K]: the first in the dtype of k, the others in float32, or float64 for float64 inputs.
    """
    refusal = "k is float64" if k.dtype == torch.float64 else None
    if torch.is_grad_enabled():
        refusal = "it has gradients"
    if choose_backend(backend, k, refusal) == "triton":
        from hf_memory.ops.rwkv7_gates.kernels import rwkv7_gates as kernel

        return kernel(k, a, w, k_k, k_a, erasure)
    dtype = torch.promote_types(k.dtype, torch.float32)
    a = a.to(dtype).sigmoid()
    g = -STRONGEST_DECAY * w.to(dtype).sigmoid()
    erased_key = F.normalize((k * k_k).to(dtype), dim=-1)
    written_key = (k * torch.addcmul(1 - k_a, k_a, a)).to(k.dtype)
    return written_key, g, erased_key, -erasure * a * erased_key
