"""RWKV-7's gates in one kernel, without gradients."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_memory.ops.rwkv7_gates import STRONGEST_DECAY
from hf_memory.ops.triton.arguments import Meta, Rows
from hf_memory.ops.triton.launch import contiguous, launcher
from hf_memory.ops.triton.tiles import channels

DECAY = tl.constexpr(STRONGEST_DECAY)


class Given(NamedTuple):
    """What the op is given."""

    k: Any  # [B, T, H, K]
    a: Any  # [B, T, H, K]
    w: Any  # [B, T, H, K]
    k_k: Any  # [H, K]
    k_a: Any  # [H, K]


@triton.jit
def _gates_kernel(
    given,  # Given
    rows,  # Rows, of which k, g, a and b are computed, [B, T, H, K]
    erasure,
    meta: tl.constexpr,
):
    """One head of a token."""
    i, inside, K = channels(0, meta.BK, meta.K)
    row = tl.cast(tl.program_id(0), tl.int64)
    channel = row % meta.H * K + i
    at = row * K + i
    k_t = tl.cast(tl.load(given.k + at, mask=inside, other=0.0), tl.float32)
    a_t = tl.sigmoid(tl.cast(tl.load(given.a + at, mask=inside, other=0.0), tl.float32))
    w_t = tl.sigmoid(tl.cast(tl.load(given.w + at, mask=inside, other=0.0), tl.float32))
    k_a_t = tl.cast(tl.load(given.k_a + channel, mask=inside, other=0.0), tl.float32)
    asked_t = k_t * tl.cast(tl.load(given.k_k + channel, mask=inside, other=0.0), tl.float32)
    asked_t /= tl.maximum(tl.sqrt(tl.sum(asked_t * asked_t)), 1e-12)
    tl.store(
        rows.k + at, tl.cast(k_t * (1 + (a_t - 1) * k_a_t), rows.k.dtype.element_ty), mask=inside
    )
    tl.store(rows.g + at, -w_t * DECAY, mask=inside)
    tl.store(rows.a + at, asked_t, mask=inside)
    tl.store(rows.b + at, -erasure * a_t * asked_t, mask=inside)


@torch.library.custom_op("hf_memory::rwkv7_gates", mutates_args=())
def rwkv7_gates(
    k: Tensor, a: Tensor, w: Tensor, k_k: Tensor, k_a: Tensor, erasure: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Same function as the op, for float32, bfloat16 and float16."""
    results = _results(k)
    *_, H, K = k.shape
    written, g, asked, b = results
    given = Given(*contiguous(k, a, w, k_k, k_a))
    rows = Rows(k=written, g=g, a=asked, b=b)
    meta = Meta(H, K=K, BK=triton.next_power_of_2(K))
    launcher(_gates_kernel, (k.numel() // K,))(given, rows, erasure, meta=meta, num_warps=1)
    return results


@rwkv7_gates.register_fake
def _results(k, *inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    new = [
        torch.empty(k.shape, dtype=dtype, device=k.device)
        for dtype in (k.dtype, *3 * (torch.float32,))
    ]
    return new[0], new[1], new[2], new[3]
