"""Graphs that torch.export makes for any number of tokens.

A loop over tokens or chunks in Python would be unrolled, for the number of tokens of the example. So whatever loops
asks `varies`, and then gives what one piece of the tokens does to `in_pieces`, which makes it a loop in the graph. All
else is the same as without an export.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten


def varies(size: int) -> bool:
    """Whether a graph is exported with this size as a variable; a loop over it then cannot be unrolled."""
    return torch.compiler.is_exporting() and isinstance(size, torch.SymInt)


def first_tokens(x: Tensor, tokens: int) -> Tensor:
    """The first tokens of x [B, T, ...]."""
    if not varies(tokens):
        return x[:, :tokens]
    # a slice would add a check of x's length
    return x.index_select(1, torch.arange(tokens, device=x.device))


def pieces(tokens: int, length: int) -> int:
    """The number of pieces of some tokens; two in place of one if it varies, since one would need another graph."""
    number = (tokens + length - 1) // length
    return torch.sym_max(2, number) if varies(tokens) else number


def in_blocks(x: Tensor, size: int, value: float = 0.0, more: int = 0) -> Tensor:
    """x [B, T, ...] as [B, blocks, size, ...] with room for so many `more` tokens; the rest is filled with `value`."""
    T = x.shape[1]
    number = pieces(T + more, size)
    # a variable number of tokens would add a check that it is the number of blocks times their size
    room = 2 * size + more if varies(T) else number * size - T
    filled = F.pad(x, (0, 0) * (x.ndim - 2) + (0, room), value=value)
    return first_tokens(filled, number * size).unflatten(1, (number, size))


def sums_of_rows(rows: Tensor, table: Tensor, weights: Tensor, *, sparse: bool = False) -> Tensor:
    """Sums [n, V] of rows [n, k] of a table [m, V] with weights [n, k]; see `F.embedding_bag` for `sparse`."""
    if torch.compiler.is_exporting():  # other runtimes have a loop over the sums
        return (weights[:, None] @ table[rows]).squeeze(1)
    return F.embedding_bag(rows, table, per_sample_weights=weights, mode="sum", sparse=sparse)


def in_pieces(piece: Callable, length: int, states: Any, rows: Any) -> tuple[list[Tensor], Any]:
    """Run `piece(states, rows)` on one piece of the tokens after the other, in a loop of the graph.

    Args:
        piece: returns a list of outputs [B, length, ...], and the states after a piece.
        length: number of tokens of a piece.
        states: those before the first token, a tree of tensors.
        rows: what is read, a tree of tensors [1 or B, T, ...]; None stays None. The last piece is filled with zeros.

    Returns:
        The outputs [B, T, ...] and the states after the last piece.

    Raises:
        ValueError: if gradients are enabled, which such a loop does not support.
    """
    if torch.is_grad_enabled():
        raise ValueError(
            "torch.export with a variable number of tokens must run under torch.no_grad(), got gradients, which a loop "
            "over tokens does not support"
        )
    row_leaves, row_tree = tree_flatten(rows)
    state_leaves, state_tree = tree_flatten(states)
    given = [x for x in row_leaves if x is not None]
    T = given[0].shape[1]
    number = pieces(T, length)

    def split(x: Tensor) -> Tensor:
        """[1 or B, T, ...] -> [number, 1 or B, length, ...]"""
        filled = F.pad(x, (0, 0) * (x.ndim - 2) + (0, 2 * length))
        return first_tokens(filled, number * length).unflatten(1, (number, length)).transpose(0, 1)

    def step(states: list[Tensor], parts: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        of_piece = iter(parts)
        leaves = [x if x is None else next(of_piece) for x in row_leaves]
        outputs, after = piece(tree_unflatten(states, state_tree), tree_unflatten(leaves, row_tree))
        return _copied(tree_leaves(after)), _copied(outputs)

    after, outputs = scan(step, _copied(state_leaves), _copied([split(x) for x in given]))
    joined = [first_tokens(x.transpose(0, 1).flatten(1, 2), T) for x in outputs]
    return joined, tree_unflatten(after, state_tree)


def _copied(tensors: list[Tensor]) -> list[Tensor]:
    """Copies as a loop in a graph needs them: no views of each other, and the same strides in each step."""
    return [x.detach().clone(memory_format=torch.contiguous_format) for x in tensors]
