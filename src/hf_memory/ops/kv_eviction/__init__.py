"""Attention to a window and kept tokens, in two steps: which entries each block sees, and then what it reads of them.

Which entries stay after a block depends on those that it saw, so the first step goes from block to block; it is the
smaller part of the work. Then all blocks are read in parallel. `mixers.kv_eviction` has the definition.
"""

import torch
from torch import Tensor

from hf_memory.ops.dispatch import Backend, choose_backend
from hf_memory.ops.gate_channels import GateChannels
from hf_memory.ops.kv_eviction import chunk
from hf_memory.ops.kv_eviction.chunk import places_that_stay, rows_at

__all__ = ["places_that_stay", "retained_attention", "rows_at"]

LARGEST = {
    2: 1 << 15,
    4: 1 << 12,
}  # largest tile of keys that a program can hold, by bytes of a number


def retained_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    number: Tensor,
    received: Tensor,
    query_mask: Tensor,
    *,
    block: int,
    first: int,
    window: int,
    decay: float,
    scale: float,
    softcap: float | None = None,
    gates: GateChannels | None = None,
    needs_mass: bool = True,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Attention of new tokens in blocks of c: after each block it is decided which entries the next one sees.

    A query sees the entries that are held before its block, and the tokens of its block up to itself.

    Args:
        q: queries [B, T, HQ, D], rotated; T is a multiple of c.
        k: keys [B, H, stay + T, D] of the entries that are held at first, and of the new tokens.
        v: values [B, H, stay + T, D].
        number: [B, H, stay + T] int32, of the tokens in their sequences, from 1; 0: no token.
        received: [B, H, stay + T] float32, the attention that they have received.
        query_mask: [B, T] float32, 1 for queries that count and 0 for others.
        block: c.
        first: number of first tokens, which stay.
        window: number of last tokens, which stay.
        decay: factor of the received attention after each block.
        scale: factor of the products of queries and keys.
        softcap: c of c tanh(s / c), which replaces scores s; None: no cap.
        gates: which channels of queries and keys hold forget gates; None: none do. Not with a mass.
        needs_mass: whether the mass of the softmax is asked for.
        backend: "triton", "chunk", which is PyTorch, or "auto": kernels on CUDA where they support the keys.

    Returns:
        The outputs [B, T, HQ, D]; the logarithms of their mass in the softmax [B, T, HQ] in float32, which may be
        None without `needs_mass`; the places [B, H, stay] of the entries that are held in the end, in the order of the
        text; and the received attention [B, H, stay + T]: first of these entries, and then of each new token when its
        own block has been read.
    """
    eviction = block, first, window, decay, scale, softcap or 0.0
    if choose_backend(backend, q, kernel_refuses(k, k.shape[2] - q.shape[1] + block)) != "triton":
        return chunk.retained_attention(
            q, k, v, number, received, query_mask, *eviction, gates, needs_mass
        )
    from hf_memory.ops.kv_eviction import kernels

    if gates is not None:
        q = gates.of_one_product(q, q.shape[2] // k.shape[1])

    places, received = kernels.retained_places(
        *(x.detach() for x in (q, k, number, received, query_mask)), *eviction
    )
    o, mass = kernels.retained_attention(q, k, v, number, places, scale, softcap or 0.0)
    return o, mass, places[:, :, -1], received


def kernel_refuses(k: Tensor, entries: int) -> str | None:
    """Why kernels do not support keys [B, T, H, D] if a query sees so many entries, as a clause."""
    if k.dtype == torch.float64:
        return "keys are float64"
    size = _width(entries) * _width(k.shape[-1])
    largest = LARGEST[k.element_size()]
    return None if size <= largest else f"a tile of keys has {size} numbers, more than {largest}"


def _width(n: int) -> int:
    """The width of a tile with n numbers a row; without loops, which torch.compile does not trace."""
    return 1 << max(4, (n - 1).bit_length())
