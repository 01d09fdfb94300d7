"""Attention to a window and kept tokens: first which entries are held before each block, then all blocks.

Each decision depends on the one before it, but takes little of the work; once all are known, blocks are read in
parallel. `mixers.kv_eviction` has the definition.
"""

import torch
from torch import Tensor

from hf_memory.ops.dispatch import Backend, choose_backend
from hf_memory.ops.gate_channels import GateChannels
from hf_memory.ops.kv_eviction import chunk

LARGEST = {2: 1 << 15, 4: 1 << 12}  # by bytes of a number: how many of the keys a program can hold


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
    """Read new tokens in blocks of c; after each it is decided which entries stay.

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
        decay: of the received attention, for each block.
        scale: of the products of queries and keys.
        softcap: c of c tanh(s / c), which replaces scores s; None: no cap.
        gates: which channels of queries and keys hold forget gates; None: none do. Not with a mass.
        needs_mass: whether the mass of the softmax is asked for.
        backend: "triton", "chunk", which is PyTorch, or "auto": kernels on CUDA where they support the keys.

    Returns:
        The outputs [B, T, HQ, D]; the logarithms of their mass in the softmax [B, T, HQ], in float32, or perhaps
        None if it is not asked for; the places [B, H, stay] among the entries of those that are held in the end,
        in their order; and the received attention [B, H, stay + T], of these, and of new tokens when their block has
        been read.
    """
    how = block, first, window, decay, scale, softcap or 0.0
    if choose_backend(backend, q, kernel_refuses(k, k.shape[2] - q.shape[1] + block)) != "triton":
        return chunk.retained_attention(
            q, k, v, number, received, query_mask, *how, gates, needs_mass
        )
    from hf_memory.ops.kv_eviction import kernels

    if gates is not None:
        q = gates.of_one_product(q, q.shape[2] // k.shape[1])

    places, received = kernels.retained_places(
        *(x.detach() for x in (q, k, number, received, query_mask)), *how
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
