"""Rotary positions: the angles by which queries and keys are rotated."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.ops import cpu


class Positions(NamedTuple):
    """Cosines and sines of T tokens, which transformers passes as `position_embeddings`."""

    cos: Tensor  # [1 or B, T, channels that rotate]
    sin: Tensor

    def of(self, tokens: slice) -> "Positions":
        """The positions of some of the tokens."""
        return Positions(self.cos[:, tokens], self.sin[:, tokens])

    def gather(self, order: Tensor) -> "Positions":
        """The positions of the tokens at these places, [1 or B, T]."""
        B = max(order.shape[0], self.cos.shape[0])
        index = order[..., None].expand(B, -1, self.cos.shape[-1])
        return Positions(*(x.expand(B, -1, -1).gather(1, index) for x in self))

    def pad(self, tokens: int) -> "Positions":
        """The positions with `tokens` more tokens at the end, which are not rotated."""
        cos, sin = (F.pad(x, (0, 0, 0, tokens), value=none) for x, none in zip(self, (1.0, 0.0)))
        return Positions(cos, sin)

    def inverse(self) -> "Positions":
        """The inverse rotations, also if rotations scale their input as in YaRN."""
        size = self.cos.square() + self.sin.square()
        return Positions(self.cos / size, -self.sin / size)

    def halves(self) -> Tensor:
        """Cosines and sines without redundancy, [1 or B, T, channels]: both consist of two equal halves."""
        return torch.cat([x.chunk(2, -1)[0] for x in self], -1)

    @classmethod
    def of_halves(cls, halves: Tensor) -> "Positions":
        """The inverse of `halves`."""
        return cls(*(torch.cat([x, x], -1) for x in halves.chunk(2, -1)))

    def rotate(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate q and k [B, T, H, D]. If there are fewer angles than channels, only the first channels are rotated."""
        if q.shape[1] > 1:
            return self.turn(q), self.turn(k)
        if self.cos.dtype == q.dtype and cpu.runs(q):
            return cpu.turn(q, *self), cpu.turn(k, *self)
        both = self.turn(torch.cat([q, k], 2))  # calls cost more than the copy
        q, k = both.split_with_sizes((q.shape[2], k.shape[2]), 2)
        return q, k

    def turn(self, x: Tensor) -> Tensor:
        """Rotate one tensor [B, T, H, D]."""
        channels = self.cos.shape[-1]
        if channels < x.shape[-1]:
            return torch.cat([self.turn(x[..., :channels]), x[..., channels:]], -1)
        early, late = x.chunk(2, -1)
        turned = (x * self.cos.unsqueeze(2)).addcmul_(
            torch.cat([-late, early], -1), self.sin.unsqueeze(2)
        )
        return turned.to(x.dtype)  # cos and sin are float32 under autocast
