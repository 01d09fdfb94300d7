"""RWKV-7's gates in one kernel, without gradients."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_memory.ops.rwkv7_gates import STRONGEST_DECAY
from hf_memory.ops.triton.launch import contiguous, launcher


@triton.jit
def _gates_kernel(
    k,  # [B, T, H, K] as all but k_k and k_a
    a,
    w,
    k_k,  # [H, K]
    k_a,  # [H, K]
    written,
    g,
    asked,
    b,
    largest_decay,
    erasure,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One head of a token."""
    row, i = tl.cast(tl.program_id(0), tl.int64), tl.arange(0, BLOCK)
    channel, at, inside = row % H * K + i, row * K + i, i < K
    k_t = tl.cast(tl.load(k + at, mask=inside, other=0.0), tl.float32)
    a_t = tl.sigmoid(tl.cast(tl.load(a + at, mask=inside, other=0.0), tl.float32))
    w_t = tl.sigmoid(tl.cast(tl.load(w + at, mask=inside, other=0.0), tl.float32))
    k_a_t = tl.cast(tl.load(k_a + channel, mask=inside, other=0.0), tl.float32)
    asked_t = k_t * tl.cast(tl.load(k_k + channel, mask=inside, other=0.0), tl.float32)
    asked_t /= tl.maximum(tl.sqrt(tl.sum(asked_t * asked_t)), 1e-12)
    tl.store(written + at, tl.cast(k_t * (1 + (a_t - 1) * k_a_t), written.dtype.element_ty), mask=inside)
    tl.store(g + at, -largest_decay * w_t, mask=inside)
    tl.store(asked + at, asked_t, mask=inside)
    tl.store(b + at, -erasure * a_t * asked_t, mask=inside)


@torch.library.custom_op("hf_memory::rwkv7_gates", mutates_args=())
def rwkv7_gates(
    k: Tensor, a: Tensor, w: Tensor, k_k: Tensor, k_a: Tensor, erasure: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Same function as the op, for float32, bfloat16 and float16."""
    results, (*_, H, K) = _results(k), k.shape
    options = {"H": H, "K": K, "BLOCK": triton.next_power_of_2(K), "num_warps": 1}
    launch = launcher(_gates_kernel, (k.numel() // K,))
    launch(*contiguous(k, a, w, k_k, k_a), *results, STRONGEST_DECAY, erasure, **options)
    return results


@rwkv7_gates.register_fake
def _results(k, *inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    new = [torch.empty(k.shape, dtype=dtype, device=k.device) for dtype in (k.dtype, *3 * (torch.float32,))]
    return new[0], new[1], new[2], new[3]
