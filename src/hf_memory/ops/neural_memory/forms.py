"""Implementations of the neural memory: reference, chunks or kernels. In graphs of variable length it is one node.

The number of chunks is not known there, so that a loop over them cannot be unrolled.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from hf_memory.ops.neural_memory import chunk, reference
from hf_memory.ops.neural_memory.network import NeuralMemoryState, Rule


def form(backend: str, *, fresh: bool) -> Callable:
    """The implementation for a chosen backend; `fresh` means that the memory has read nothing."""
    if backend == "reference":
        return reference.neural_memory
    if backend == "chunk":
        return partial(chunk.neural_memory, fresh=fresh)
    from hf_memory.ops.neural_memory.kernels import neural_memory as in_kernels

    return partial(in_kernels, fresh=fresh)


def node(backend: str, *, fresh: bool) -> Callable:
    """The same function as one node, into which torch.export does not trace; it has no gradients."""

    def neural_memory(*rows: Tensor | None, initial_state: NeuralMemoryState, weights, norm, rule: Rule):
        o, *state = _node(rows, initial_state, weights, norm or (), *rule, backend, fresh)
        return o, NeuralMemoryState(*state)

    return neural_memory


@torch.library.custom_op("hf_memory::neural_memory", mutates_args=())
def _node(
    rows: Sequence[Tensor | None],
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    norm: Sequence[Tensor],
    chunk_size: int,
    activation: str,
    residual: bool,
    bias: bool,
    forget_to: str,
    max_grad_norm: float | None,
    loss: str,
    retention: str,
    muon: bool,
    window: int,
    backend: str,
    fresh: bool,
) -> list[Tensor]:
    o, (*layers, phase) = form(backend, fresh=fresh)(
        *rows,
        initial_state=NeuralMemoryState(*state),
        weights=tuple(weights),
        norm=tuple(norm) or None,
        rule=Rule(chunk_size, activation, residual, bias, forget_to, max_grad_norm, loss, retention, muon, window),
    )
    return [o, *layers, phase.clone()]  # a node may not return its input


@_node.register_fake
def _(rows, state, *others):
    q, _, v, *_ = rows
    return [torch.empty_like(v, dtype=q.dtype), *map(torch.empty_like, state)]
