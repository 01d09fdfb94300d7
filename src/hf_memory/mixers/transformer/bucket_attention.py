"""Softmax attention to earlier tokens of the same bucket, in blocks of tokens that are sorted by bucket."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.layers import upcast
from hf_memory.mixers.attention_blocks import Attended
from hf_memory.ops.autograd import first_derivatives_only

SORTED_BLOCK = 32  # sorted queries of a block: in longer blocks there are more buckets, and more pairs are masked


def attention_in_buckets(q: Tensor, k: Tensor, v: Tensor, buckets: Tensor) -> Attended:
    """Softmax attention to the earlier tokens that share a query's last bucket, and none of its buckets before that.

    Tokens are sorted by bucket. Each block of queries is compared only with the blocks of keys that it sees something
    of, so that the cost follows the actual sizes of the buckets.

    Args:
        q: queries [N, T, D] of the last tokens, scaled.
        k: keys [N, S, D] of all tokens.
        v: values [N, S, V].
        buckets: [N, S, rounds], -1 at padding.

    Returns:
        Outputs [N, T, V], and the logarithms of their masses [N, T].
    """
    N, T, _ = q.shape
    C = min(q.shape[1], SORTED_BLOCK)
    k_order, q_order, starts, ends = _sorted_by(buckets[..., -1], T)
    q, starts, ends = (_in_blocks(x, q_order, C) for x in (q, starts, ends))
    k, v = (_in_blocks(x, k_order, C) for x in (k, v))
    # all pairs of a block of queries and one of the blocks of keys that it sees, which follow each other in a row
    first = starts[:, 0] // C
    number = ((ends.amax(1) + C - 1) // C - first).clamp(min=0)
    q_block = torch.arange(len(q), device=q.device).repeat_interleave(number)
    nth_pair = torch.arange(len(q_block), device=q.device) - (number.cumsum(0) - number)[q_block]
    block_in_row = first[q_block] + nth_pair
    k_block = q_block // (len(q) // N) * (len(k) // N) + block_in_row
    places = (C * block_in_row[:, None] + torch.arange(C, device=q.device)).int()[:, None]
    visible = (places >= starts[q_block, :, None]) & (places < ends[q_block, :, None])
    for earlier_bucket in buckets[..., :-1].unbind(-1):
        q_bucket = _in_blocks(earlier_bucket[:, -T:], q_order, C)
        k_bucket = _in_blocks(earlier_bucket, k_order, C)
        visible &= q_bucket[q_block, :, None] != k_bucket[k_block, None]
    k = k.mT.contiguous()  # so that sums of its gradient are of contiguous blocks
    scores = upcast(_Selected.apply(q, q_block) @ _Selected.apply(k, k_block))
    scores = scores.masked_fill_(~visible, -torch.inf)
    sorted_results = _softmax_of_parts(scores, _Selected.apply(v, k_block), q_block, len(q))
    rows = (x.unflatten(0, (N, -1)).flatten(1, 2)[:, :T] for x in sorted_results)
    o, mass = (_Permuted.apply(x, q_order.after, q_order.before) for x in rows)
    return o, mass


class Order(NamedTuple):
    """An order of the tokens of each row."""

    before: Tensor  # [N, T], the place that the token at each place of the order had before
    after: Tensor  # [N, T], the place in the order of the token at each place before


def _sorted_by(bucket: Tensor, T: int) -> tuple[Order, Order, Tensor, Tensor]:
    """Sort the keys by bucket, and the queries, which are the last T tokens.

    Args:
        bucket: [N, S], the bucket of each token.
        T: number of queries.

    Returns:
        The order of the keys and that of the queries; and the range of places in the order of the keys that each query
        sees, [N, T] twice: from the first key of its bucket to the last one before itself.
    """
    k_order = bucket.argsort(dim=1, stable=True)
    k_place = k_order.argsort(1)
    q_bucket = bucket[:, -T:].contiguous()
    q_order = k_place[:, -T:].argsort(1)
    starts = torch.searchsorted(bucket.gather(1, k_order), q_bucket)
    ends = k_place[:, -T:].where(q_bucket >= 0, 0)
    return Order(k_order, k_place), Order(q_order, q_order.argsort(1)), starts.int(), ends.int()


def _in_blocks(x: Tensor, order: Order, C: int) -> Tensor:
    """x [N, T, ...] in this order, cut into blocks [N * blocks, C, ...] and padded with zeros."""
    pad = -x.shape[1] % C
    x = _Permuted.apply(x, *order)
    x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, pad)) if pad else x
    return x.unflatten(1, (-1, C)).flatten(0, 1)


class _Permuted(torch.autograd.Function):
    """x [N, T, ...] with the tokens at `before` [N, T], whose backward needs no sums."""

    @staticmethod
    def forward(ctx, x, before, after):
        ctx.save_for_backward(after)
        return _moved(x, before)

    @staticmethod
    @first_derivatives_only
    def backward(ctx, dx):
        return _moved(dx, *ctx.saved_tensors), None, None


def _moved(x: Tensor, places: Tensor) -> Tensor:
    rows = places + places.shape[1] * torch.arange(len(x), device=x.device)[:, None]
    return x.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, places.shape)


class _Selected(torch.autograd.Function):
    """Some of the blocks x [blocks, C, D], with repetitions; sums of whole blocks are cheaper than of elements."""

    @staticmethod
    def forward(ctx, x, index):
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return x.index_select(0, index)

    @staticmethod
    @first_derivatives_only
    def backward(ctx, dx):
        return dx.new_zeros(ctx.shape).index_add_(0, *ctx.saved_tensors, dx), None


def _softmax_of_parts(scores: Tensor, v: Tensor, part_of: Tensor, number: int) -> Attended:
    """Softmax over scores [P, C, S] of values [P, S, V], where parts of the same of `number` blocks share a softmax."""
    each = scores.detach().amax(-1)
    most = each.new_full((number, each.shape[1]), torch.finfo(each.dtype).min)
    most = most.scatter_reduce(0, part_of[:, None].expand_as(each), each, "amax")
    weights = scores.sub_(most[part_of, :, None]).exp_()
    mass = weights.new_zeros(most.shape).index_add(0, part_of, weights.sum(-1))
    read = upcast(weights.to(v.dtype) @ v)
    o = read.new_zeros(number, *read.shape[1:]).index_add(0, part_of, read)
    is_any = mass > 0
    mass = mass.where(is_any, 1)
    return (o / mass[..., None]).to(v.dtype), (most + mass.log()).where(is_any, -torch.inf)
