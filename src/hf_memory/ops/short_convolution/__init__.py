"""One token of a short convolution, for decoding."""

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.ops.dispatch import Backend, choose_backend
from hf_memory.ops.inputs import may_overwrite


def convolution_step(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    silu: bool = False,
    in_place: bool = False,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """y = bias + sum_w weight_w x_{t-w} for each channel, computed in float32, and silu of it if `silu` is true.

    Args:
        x: one token of each row [B, 1, channels].
        state: the W - 1 tokens before it [B, W - 1, channels].
        weight: [channels, W], that of the token itself last.
        bias: [channels] or None.
        silu: whether silu follows.
        in_place: allow the kernel to overwrite `state`, if there are no gradients; it is then returned.
        backend: "triton", "chunk", which is PyTorch, or "auto": the kernel on CUDA.

    Returns:
        y [B, 1, channels] and the state after x.
    """
    has_kernel = may_overwrite(in_place, state) and state.dtype == x.dtype != torch.float64
    refusal = None if has_kernel else "it has gradients, or may not overwrite its state"
    if choose_backend(backend, x, refusal) == "triton":
        from hf_memory.ops.short_convolution.kernels import convolution_step as kernel

        return kernel(x, state, weight, bias, silu), state
    context = torch.cat([state.to(x.dtype), x], dim=1)
    y = (context * weight.mT.to(torch.promote_types(x.dtype, torch.float32))).sum(1, keepdim=True)
    y = (y if bias is None else y + bias).to(x.dtype)
    return F.silu(y) if silu else y, context[:, 1:]
