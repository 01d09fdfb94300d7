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
    """Softmax attention to earlier tokens with the same last bucket, of which no earlier bucket is the same.

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
    (N, T, _), C = q.shape, min(q.shape[1], SORTED_BLOCK)
    order, asking, starts, ends = _sorted_by(buckets[..., -1], T)
    q, starts, ends = (_in_blocks(x, asking, C) for x in (q, starts, ends))
    k, v = (_in_blocks(x, order, C) for x in (k, v))
    first = starts[:, 0] // C
    number = ((ends.amax(1) + C - 1) // C - first).clamp(min=0)
    asks = torch.arange(len(q), device=q.device).repeat_interleave(
        number
    )  # block of queries of each pair
    nth = first[asks] + torch.arange(len(asks), device=q.device) - (number.cumsum(0) - number)[asks]
    asked = asks // (len(q) // N) * (len(k) // N) + nth
    places = (C * nth[:, None] + torch.arange(C, device=q.device)).int()[:, None]
    visible = (places >= starts[asks, :, None]) & (places < ends[asks, :, None])
    for others in buckets[..., :-1].unbind(-1):
        mine = _in_blocks(others[:, -T:], asking, C)
        theirs = _in_blocks(others, order, C)
        visible &= mine[asks, :, None] != theirs[asked, None]
    k = k.mT.contiguous()  # so that sums of its gradient are of contiguous blocks
    scores = upcast(_Selected.apply(q, asks) @ _Selected.apply(k, asked)).masked_fill_(
        ~visible, -torch.inf
    )
    both = _softmax_of_parts(scores, _Selected.apply(v, asked), asks, len(q))
    o, mass = (
        _Permuted.apply(x.unflatten(0, (N, -1)).flatten(1, 2)[:, :T], asking.after, asking.before)
        for x in both
    )
    return o, mass


class Order(NamedTuple):
    """The place of each token before it was moved, and after, both [N, T]."""

    before: Tensor
    after: Tensor


def _sorted_by(bucket: Tensor, T: int) -> tuple[Order, Order, Tensor, Tensor]:
    """The order of all tokens [N, S] and of the last T, and the range of places that each of these sees."""
    order = bucket.argsort(dim=1, stable=True)
    place = order.argsort(1)
    mine = bucket[:, -T:].contiguous()
    asking = place[:, -T:].argsort(1)
    starts = torch.searchsorted(bucket.gather(1, order), mine)
    ends = place[:, -T:].where(mine >= 0, 0)
    return Order(order, place), Order(asking, asking.argsort(1)), starts.int(), ends.int()


def _in_blocks(x: Tensor, order: Order, C: int) -> Tensor:
    """x [N, T, ...] in this order, cut into blocks [N * blocks, C, ...] and padded with zeros."""
    x, pad = _Permuted.apply(x, *order), -x.shape[1] % C
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
