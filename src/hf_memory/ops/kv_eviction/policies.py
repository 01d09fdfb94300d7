"""Eviction policies: what each says how much an entry of a block is worth, of which the best stay."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

DECAY = 0.8  # of what an entry was worth, for each block
LEAST_REST = 1e-3  # the least that is left of a softmax without an entry


@dataclass
class Block:
    """A block of c tokens, and what its queries saw: n entries, of which the last c are the block.

    What a policy says of it counts when the block is complete. In a cache in few bits the channels of queries and keys,
    or of values and outputs, are rotated: a policy is to depend on their products alone, such as norms.

    Attributes:
        queries: [B, H, G, c, D], the G queries of each head of keys at each token of the block.
        keys: [B, H, n, D].
        values: [B, H, n, V].
        number: [B, H, n] int32, of the token in its sequence, from 1; 0: there is no token.
        score: [B, H, n] float32, what the entries were worth before; 0 for the tokens of the block.
        weights: [B, H, G, c, n] float32, the attention of the queries; 0 for what a query does not see.
        outputs: [B, H, G, c, V] of the queries, sums of values with these weights.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    number: Tensor
    score: Tensor
    weights: Tensor
    outputs: Tensor


EvictionPolicy = Callable[[Block], Tensor]  # of a block: what its entries are worth now, [B, H, n]


def received_attention(block: Block) -> Tensor:
    """A moving average of the attention that an entry receives: u <- 0.8 u + sum_i p_ij, over the block's queries."""
    return DECAY * block.score + block.weights.sum((2, 3))


def change_of_output(block: Block) -> Tensor:
    """How far outputs of the block's queries would move without an entry, in squares, as a moving average.

    Without entry j, o_i becomes o_i + w_ij (o_i - v_j), exactly, with w_ij = p_ij / (1 - p_ij). The squares add up to

        sum_i w_ij^2 |o_i|^2 - 2 v_j (sum_i w_ij^2 o_i) + |v_j|^2 sum_i w_ij^2

    Where p_ij is nearly one, o_i is nearly v_j: w_ij is large, and these terms cancel, so that rounding would decide.
    So the square of the difference itself is taken for the entry of which a query sees most.
    """
    p = block.weights.flatten(2, 3)
    odds = (p / (1 - p).clamp(min=LEAST_REST)).square()
    outputs = block.outputs.flatten(2, 3).to(p.dtype)
    values = block.values.to(p.dtype)
    most, nearest = odds.max(-1, keepdim=True)
    value = values.gather(2, nearest.expand(-1, -1, -1, values.shape[3]))
    of_nearest = most * (outputs - value).square().sum(-1, keepdim=True)
    odds.scatter_(-1, nearest, 0)
    of_each = odds * outputs.square().sum(-1, keepdim=True)
    of_outputs = of_each.scatter_(-1, nearest, of_nearest).sum(2)
    of_both = (values * (outputs.mT @ odds).mT).sum(-1)
    of_values = odds.sum(2) * values.square().sum(-1)
    moved = of_outputs - 2 * of_both + of_values
    return DECAY * block.score + moved.clamp_(min=0)


def random_choice(block: Block) -> Tensor:
    """Any number that an entry has for good, the same in each head: what other policies are compared with."""
    hashed = (block.number.long() * 2654435761) % 2**32
    return (hashed.to(block.score.dtype) + 1) / 2**32
