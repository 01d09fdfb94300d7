"""Sums c of logarithms of forget gates, which queries and keys carry in channels after their own.

    s_ij = scaling q_i k_j + c_i - c_j,   c_i = log f_1 + ... + log f_i

So a cache that keeps keys keeps c with them. A sum is stored as several numbers of few bits each, of which keys in 16
bits lose nothing. Differences c_i - c_j are computed part by part in float32: a product in 16 bits would round c, and
lose gates that are small beside it.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.ops.precision import upcast

PARTS = 3  # numbers that add up to c: two of 8 bits, and the rest
UNIT = 64.0  # channels hold c / UNIT, a power of two, so that float16 can represent large c, too
FARTHEST = 128.0  # units by which an old c may exceed the newest one: a weight of e^-8192 is zero


class GateChannels(NamedTuple):
    """Which channels hold the sums: a query has its own c, and a key the c of all G query heads of its group."""

    plain: int  # number of channels of a head without the sums, which come after these
    scaling: float  # factor of the products of queries and keys

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, c: Tensor, channels: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Append the sums, and then zeros up to a number of channels.

        Args:
            q: queries [B, T, HQ, D].
            k: keys [B, T, H, D].
            v: values [B, T, H, D], which have no sums and get zeros.
            c: the sums [B, T, HQ] up to each token.
            channels: number of channels of the results.

        Returns:
            q [B, T, HQ, channels], k and v [B, T, H, channels].
        """
        parts = []
        rest = c / UNIT
        for _ in range(PARTS - 1):
            parts.append(rest.bfloat16().to(c.dtype))
            rest = rest - parts[-1]
        sums = torch.stack([*parts, rest], -1)
        of_groups = sums.unflatten(2, (k.shape[2], -1)).flatten(-2)
        q, k = (torch.cat([x, y.to(x.dtype)], -1) for x, y in ((q, sums), (k, of_groups)))
        q, k, v = (F.pad(x, (0, channels - x.shape[-1])) for x in (q, k, v))
        return q, k, v

    def decay(self, q: Tensor, k: Tensor) -> Tensor:
        """c_i - c_j [..., G, C, S] in float32, of queries [..., G, C, channels] and keys [..., S, channels]."""
        G = q.shape[-3]
        D = self.plain
        of_queries = upcast(q[..., D : D + PARTS])
        of_keys = upcast(k[..., D : D + G * PARTS]).unflatten(-1, (G, PARTS)).transpose(-3, -2)
        first = of_queries[..., :1] - of_keys[..., :1].mT
        others = (x[..., 1:].sum(-1, keepdim=True) for x in (of_queries, of_keys))
        of_queries, of_keys = others
        return UNIT * (first + (of_queries - of_keys.mT))

    def gradients(self, ds: Tensor, channels: int) -> tuple[Tensor, Tensor]:
        """Those of the channels that `extend` appends, from those of scores ds [..., G, C, S].

        Returns:
            Of queries [..., G * C, channels - plain] and of keys [..., S, channels - plain].
        """
        of_queries = UNIT * ds.sum(-1).flatten(-2).unsqueeze(-1).expand(*ds.shape[:-3], -1, PARTS)
        of_keys = -UNIT * ds.sum(-2).mT.repeat_interleave(PARTS, -1)
        appended = channels - self.plain
        return F.pad(of_queries, (0, appended - PARTS)), F.pad(
            of_keys, (0, appended - of_keys.shape[-1])
        )

    def of_one_product(self, q: Tensor, groups: int) -> Tensor:
        """Queries [B, T, HQ, channels] whose product with keys is scores minus c_j, for fused attention in float32.

        Without c_i all scores of a query are too small by the same number, which its softmax does not depend on.
        """
        D = self.plain
        HQ = q.shape[2]
        reads = (
            torch.eye(groups, dtype=q.dtype, device=q.device)
            .repeat_interleave(PARTS, 1)
            .repeat(HQ // groups, 1)
        )
        reads = F.pad(reads * (-UNIT / self.scaling), (0, q.shape[-1] - D - reads.shape[1]))
        return torch.cat([q[..., :D], reads.expand(*q.shape[:2], -1, -1)], -1)

    def moved_queries(self, q: Tensor, units: Tensor) -> Tensor:
        """Queries [B, HQ, n, channels] with a whole number of `UNIT` [B, HQ, 1] added to the c of each."""
        D = self.plain
        moved = q.clone()
        moved[..., D] += units.to(q.dtype)
        return moved

    def moved(self, k: Tensor, units: Tensor) -> Tensor:
        """Keys [B, n, H, channels] with a whole number of `UNIT` added to each c, which changes its first part only.

        Args:
            k: the keys, or [B, H, n, channels].
            units: the whole numbers [B, 1, H, G], or [B, H, 1, G].
        """
        D = self.plain
        change = F.pad(units[..., None], (0, PARTS - 1)).flatten(-2)
        change = F.pad(change, (0, k.shape[-1] - D - change.shape[-1]))
        return torch.cat([k[..., :D], (k[..., D:] + change.to(k.dtype)).clamp(max=FARTHEST)], -1)
