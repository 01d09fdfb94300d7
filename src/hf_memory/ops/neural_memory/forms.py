"""Implementations of a memory that learns: reference, chunks or kernels. In graphs of variable length it is one node.

The number of chunks is not known there, so that a loop over them cannot be unrolled.
"""

from ast import literal_eval
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from hf_memory.ops.exported import varies
from hf_memory.ops.neural_memory import chunk, reference
from hf_memory.ops.neural_memory.network import NeuralMemoryState, Rule


def in_graphs(name: str, form: Callable, State: type, Rule: type) -> Callable:
    """The form that runs a call of T tokens: form(backend, fresh), or one node into which torch.export does not trace.

    The node has no gradients. `fresh` means that the memory has read nothing. Forms take rows, then the initial state,
    weights and a rule by name, and optionally a norm.
    """

    @torch.library.custom_op(f"hf_memory::{name}", mutates_args=())
    def node(
        rows: Sequence[Tensor | None],
        state: Sequence[Tensor],
        weights: Sequence[Tensor],
        norm: Sequence[Tensor],
        rule: str,
        backend: str,
        fresh: bool,
    ) -> list[Tensor]:
        memory = {
            "initial_state": State(*state),
            "weights": tuple(weights),
            "rule": Rule(*literal_eval(rule)),
        }
        memory |= {"norm": tuple(norm)} if norm else {}
        o, (*layers, phase) = form(backend, fresh)(*rows, **memory)
        return [o, *layers, phase.clone()]  # a node may not return its input

    @node.register_fake
    def _(rows, state, *others):
        q, _, v, *_ = rows
        o = v if v.ndim == q.ndim else v[:, :, :, 0]  # without the dimension of pairs
        return [torch.empty_like(o, dtype=q.dtype), *map(torch.empty_like, state)]

    def choose(backend: str, T: int, fresh: bool) -> Callable:
        if not varies(T) and (fresh or T == 1 or not torch.compiler.is_exporting()):
            return form(backend, fresh)

        def run(*rows: Tensor | None, initial_state, weights, rule, norm=None):
            o, *state = node(
                rows, initial_state, weights, norm or (), str(tuple(rule)), backend, fresh
            )
            return o, State(*state)

        return run

    return choose


def _form(backend: str, fresh: bool) -> Callable:
    if backend == "reference":
        return reference.neural_memory
    if backend == "chunk":
        return partial(chunk.neural_memory, fresh=fresh)
    from hf_memory.ops.neural_memory.kernels import neural_memory as in_kernels

    return partial(in_kernels, fresh=fresh)


form = in_graphs("neural_memory", _form, NeuralMemoryState, Rule)
