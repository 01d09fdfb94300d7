"""Implementations of the large-chunk memory. In graphs of variable length it is one node instead of a loop."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from hf_memory.ops.large_chunk_memory import chunk, reference
from hf_memory.ops.large_chunk_memory.network import LargeChunkState, Layers


def form(backend: str, *, fresh: bool) -> Callable:
    """The implementation for a chosen backend; `fresh` means that the memory has read nothing."""
    if backend == "reference":
        return reference.large_chunk_memory
    return partial(chunk.large_chunk_memory, fresh=fresh)


def node(backend: str, *, fresh: bool) -> Callable:
    """The same function as one node, into which torch.export does not trace; it has no gradients."""

    def large_chunk_memory(*rows: Tensor | None, initial_state: LargeChunkState, weights: Layers, **sizes):
        o, *state = _node(*rows, list(initial_state), list(weights), **sizes, backend=backend, fresh=fresh)
        return o, LargeChunkState(*state)

    return large_chunk_memory


@torch.library.custom_op("hf_memory::large_chunk_memory", mutates_args=())
def _node(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lr: Tensor,
    momentum: Tensor,
    mask: Tensor | None,
    state: list[Tensor],
    weights: list[Tensor],
    chunk_size: int,
    step_size: float,
    backend: str,
    fresh: bool,
) -> list[Tensor]:
    o, (*layers, phase) = form(backend, fresh=fresh)(
        *(q, k, v, lr, momentum, mask),
        initial_state=LargeChunkState(*state),
        weights=tuple(weights),
        chunk_size=chunk_size,
        step_size=step_size,
    )
    return [o, *layers, phase.clone()]  # a node may not return its input


@_node.register_fake
def _(q, k, v, *others):
    return [torch.empty_like(v, dtype=q.dtype), *map(torch.empty_like, others[3])]
