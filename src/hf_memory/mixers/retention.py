"""A memory of the exact keys and values of tokens that received attention, beside a window and the first tokens.

Tokens are read in blocks, counted from the beginning of the sequence. All queries of a block see the same entries of
the memory, and of their own block the tokens up to themselves:

    p_ij = softmax_j(s_ij),   o_i = sum_j p_ij v_j,   over the entries j that exist at token i
    u_j <- decay u_j + sum_i p_ij,   over the queries i of a block, and of a group of heads

After a block the first tokens, those of the window, and the tokens with the largest u among the others stay, and the
rest is dropped for good. That received attention tells which tokens will be needed is the observation of H2O
(https://arxiv.org/abs/2306.14048); a moving average takes the place of its sum, and has no parameters either.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.utils.import_utils import is_tracing

from hf_memory.cache import Spec, State, States
from hf_memory.layers import wide
from hf_memory.mixers.attention_blocks import Attended, Blocks, Scores
from hf_memory.mixers.base import Context
from hf_memory.mixers.pasts import take
from hf_memory.ops.contract import beside
from hf_memory.ops.masks import Tokens

DECAY = 0.8  # of the received attention, for each block


class Entries(NamedTuple):
    """What a memory holds: `stay` entries in the order of their positions, and then those of a block."""

    keys: Tensor  # [B, H, stay + block, D], rotated
    values: Tensor  # [B, H, stay + block, V]
    number: Tensor  # [B, H, stay + block] int32, of the token in the sequence, from 1; 0: no token
    received: Tensor  # [B, H, stay + block] float32, the attention that an entry has received


class Retention(NamedTuple):
    """The tokens that stay for each head: the first ones, those of the window, and `kept` others."""

    size: int  # of the window, at the beginning of a block
    first: int
    kept: int
    block: int  # number of tokens after which it is decided which ones stay

    @property
    def stay(self) -> int:
        """Number of tokens that stay after a block."""
        return self.first + self.kept + self.size

    def spec(self, heads: int, D: int) -> Spec:
        """The states, those of `Entries`."""
        shape = heads, self.stay + self.block
        numbers = {"number": State(shape, torch.int32), "received": State(shape)}
        return {"keys": State((*shape, D), None), "values": State((*shape, D), None), **numbers}

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, scores: Scores, context: Context
    ) -> tuple[Attended, States]:
        """Read new tokens.

        Args:
            q: queries [B, T, HQ, D], rotated.
            k: keys [B, T, H, D], rotated.
            v: values [B, T, H, D].
            tokens: their positions; padding is at the end of rows.
            scores: how scores are computed.
            context: the padding, the packing and the states.

        Returns:
            The outputs [B, T, HQ, D] with their mass in the softmax [B, T, HQ], and the states; none if packed.
        """
        T = q.shape[1]
        if context.cu_seqlens is not None:
            bounds = [slice(*ends) for ends in pairwise(context.cu_seqlens.unique().tolist())]
            alone = context._replace(cu_seqlens=None)
            apart = [self.attend(q[:, i], k[:, i], v[:, i], tokens.of(i), scores, alone)[0] for i in bounds]
            o, mass = (torch.cat(x, 1) for x in zip(*apart))
            return (o, mass), {}
        entries = self._entries(k, context)
        before, after = context.counts(q)
        offset = before % self.block
        if context.is_step(q) and context.known is not None and not torch.is_grad_enabled():
            o, mass, entries = self._step(entries, q, k, v, scores, context.known)
            return (o, mass), entries._asdict()
        if T == 1:
            o, mass, entries = self._read(entries, (q, k, v), tokens.position, offset, scores)
            return (o, mass), entries._asdict()
        width = T + (self.block - 1 if context.states else 0)  # a piece may begin anywhere in a block
        place = torch.arange(-(-width // self.block) * self.block, device=q.device) - offset
        position = torch.where((place >= 0) & (place < after - before), before + place, -1)
        blocks = [take(x, place.clamp(0, T - 1)).split(self.block, 1) for x in (q, k, v)]
        here = torch.arange(self.block, device=q.device).expand(len(q), -1)
        read: list[list[Tensor]] = []
        for block in zip(*blocks):
            at = position[:, len(read) * self.block :][:, : self.block]
            *attended, entries = self._read(entries, block, at, here, scores)
            read.append(attended)
        back = offset + torch.arange(T, device=q.device)
        o, mass = (take(torch.cat(x, 1), back) for x in zip(*read))
        return (o, mass), entries._asdict()

    def _entries(self, k: Tensor, context: Context) -> Entries:
        if context.states:
            keys, values, *numbers = (context.states[name] for name in Entries._fields)
            return Entries(keys.to(k.dtype), values.to(k.dtype), *numbers)
        B, _, H, D = k.shape
        keys, values = (k.new_zeros(B, H, self.stay + self.block, D) for _ in range(2))
        position, received = (
            k.new_zeros(B, H, self.stay + self.block, dtype=x) for x in (torch.int32, wide(k[:0]).dtype)
        )
        return Entries(keys, values, position, received)

    def _read(self, entries: Entries, block: tuple[Tensor, ...], position: Tensor, place: Tensor, scores: Scores):
        """Read q, k and v [B, c, heads, D] of one block, at positions [B, c], -1 at padding, and places [B, c] of the
        block. Returns outputs, masses and entries."""
        q, k, v = block
        is_token, at = position >= 0, (self.stay + place)[:, None]
        new = (k.transpose(1, 2), v.transpose(1, 2), position[:, None].int() + 1)
        keys, values, number = (_written(x, at, y, is_token[:, None]) for x, y in zip(entries, new))
        visible = (number[:, :, None] > 0) & (number[:, :, None] <= new[2][..., None])
        o, mass, weights = _attended(q, keys, values, visible, scores)
        begins, ends = ((is_token & (place == edge)).any(1)[:, None, None] for edge in (0, self.block - 1))
        received = torch.where(begins, DECAY * entries.received, entries.received)
        received = received + (weights.detach() * is_token[:, None, None, :, None]).sum((2, 3))
        entries = self._after(Entries(keys, values, number, received.to(entries.received.dtype)), ends)
        return o, mass, entries

    def _step(self, entries: Entries, q: Tensor, k: Tensor, v: Tensor, scores: Scores, position: int):
        """The same as `_read` for one token of each row at a position that all have, in place."""
        place = position % self.block
        here, end = self.stay + place, self.stay + place + 1
        entries.keys[:, :, here], entries.values[:, :, here] = k[:, 0], v[:, 0]
        entries.number[:, :, here] = position + 1
        if place == 0:
            entries.received.mul_(DECAY)
        keys, values, number, received = (x[:, :, :end] for x in entries)
        visible = None if position - place >= self.stay else (number > 0)[:, :, None]
        o, mass, weights = _attended(q, keys, values, visible, scores)
        received += weights.sum((2, 3))
        if place == self.block - 1:
            entries = self._after(entries, torch.ones(len(q), 1, 1, dtype=torch.bool, device=q.device))
        return o, mass, entries

    def _after(self, entries: Entries, ends: Tensor) -> Entries:
        """Drop entries of rows whose block ends, [B, 1, 1] bool."""
        if ends.device.type == "cpu" and not is_tracing(ends) and not ends.any():
            return entries
        number, n = entries.number, self.stay
        always = (number > 0) & ((number <= self.first) | (number > number.amax(-1, keepdim=True) - self.size))
        rank = entries.received.masked_fill(number == 0, -1).masked_fill(always, torch.inf)
        best = rank.argsort(dim=-1, descending=True, stable=True)[..., :n].sort(-1).values
        tail = torch.arange(n, number.shape[2], device=best.device).expand(*best.shape[:2], -1)
        order = torch.cat([torch.where(ends, best, torch.arange(n, device=best.device)), tail], 2)
        first = number.shape[2] * torch.arange(order[..., 0].numel(), device=best.device).view(*order.shape[:2], 1)
        keys, values, number, received = (
            x.flatten(0, 2).index_select(0, (first + order).flatten()).view_as(x) for x in entries
        )  # faster than gather
        is_left = ends & (torch.arange(number.shape[2], device=best.device) >= n)
        return Entries(keys, values, number.masked_fill(is_left, 0), received.masked_fill(is_left, 0))


def _attended(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, scores: Scores):
    """Attention of queries [B, c, HQ, D] to entries [B, H, n, D], of which [B, H, c, n] are visible, or all.

    Returns outputs, masses, and weights [B, H, G, c, n].
    """
    nowhere = q.new_zeros(1, 1)  # relations do not apply
    weights, mass = scores.weights(Blocks(q, keys.transpose(1, 2), values.transpose(1, 2), visible, nowhere, nowhere))
    o = (weights.to(values.dtype).flatten(2, 3) @ values).unflatten(2, (-1, q.shape[1]))
    return o.permute(0, 3, 1, 2, 4).flatten(2, 3), mass[..., 0].permute(0, 3, 1, 2).flatten(2), weights


def _written(x: Tensor, at: Tensor, new: Tensor, is_token: Tensor) -> Tensor:
    """Entries x [B, H, n, ...] with new ones [B, 1 or H, c, ...] at places [B, 1, c] that have a token."""
    new = new.to(x.dtype).expand(-1, x.shape[1], *new.shape[2:])
    at, is_token = (beside(y, x).expand_as(new) for y in (at, is_token))
    write = torch.scatter if torch.is_grad_enabled() else Tensor.scatter_
    return write(x, 2, at, torch.where(is_token, new, x.gather(2, at)))
