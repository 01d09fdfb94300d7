"""One token of a short convolution in one kernel, which moves the tokens of its state."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_memory.ops.triton.launch import contiguous, launcher

BLOCK = tl.constexpr(256)  # channels of a program


class Meta(NamedTuple):
    """What is known when the kernel is compiled."""

    D: int
    W: int
    SILU: bool


@triton.jit
def _step_kernel(
    x,  # [B, D]
    state,  # [B, W - 1, D]
    weight,  # [D, W]
    bias,  # [D] or None
    y,  # [B, D]
    meta: tl.constexpr,
):
    """Channels of one row: the sum over the last W tokens, and the state without its oldest token."""
    D: tl.constexpr = meta.D
    W: tl.constexpr = meta.W
    row = tl.cast(tl.program_id(0), tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = i < D
    new = tl.load(x + row * D + i, mask=is_channel, other=0.0)
    total = tl.cast(new, tl.float32) * tl.cast(
        tl.load(weight + i * W + W - 1, mask=is_channel, other=0.0), tl.float32
    )
    if bias is not None:
        total += tl.cast(tl.load(bias + i, mask=is_channel, other=0.0), tl.float32)
    for w in tl.static_range(W - 1):
        at = state + (row * (W - 1) + w) * D + i
        old = tl.load(at, mask=is_channel, other=0.0)
        total += tl.cast(old, tl.float32) * tl.cast(
            tl.load(weight + i * W + w, mask=is_channel, other=0.0), tl.float32
        )
        if w > 0:
            tl.store(at - D, old, mask=is_channel)
    tl.store(state + (row * (W - 1) + W - 2) * D + i, new, mask=is_channel)
    if meta.SILU:
        total = total * tl.sigmoid(total)
    tl.store(y + row * D + i, tl.cast(total, y.dtype.element_ty), mask=is_channel)


@torch.library.custom_op("hf_memory::convolution_step", mutates_args=("state",))
def convolution_step(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, silu: bool
) -> Tensor:
    """y [B, 1, channels] without gradients; `state` becomes that after x, see the package."""
    y = torch.empty_like(x)
    B, _, D = x.shape
    W = weight.shape[1]
    x, weight, bias = contiguous(x, weight, bias)
    launcher(_step_kernel, (B, triton.cdiv(D, BLOCK.value)))(
        x, state, weight, bias, y, meta=Meta(D, W, silu), num_warps=4
    )
    return y


@convolution_step.register_fake
def _(x, state, weight, bias, silu):
    return torch.empty_like(x)
