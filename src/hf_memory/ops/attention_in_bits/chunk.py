"""Attention of one token to packed rows by products of codes, so that keys and values do not become numbers.

With the scale s, the least number m and the code c of a number, and the groups g of channels:

    q k_j = sum_g (s_jg sum_d q_d c_jd + m_jg sum_d q_d),   over the channels d of a group
    o_d = sum_j p_j s_jg c_jd + sum_j p_j m_jg,   for the group g of channel d

So queries and weights are multiplied once for each group, as further rows of one product of matrices.
"""

import torch
from torch import Tensor

from hf_memory.ops.bits import GROUP, group_matrix, rotated
from hf_memory.ops.precision import upcast
from hf_memory.ops.soft_cap import soft_capped


def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor | None,
    bits: int,
    scale: float,
    softcap: float,
    needs_mass: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Outputs [B, H, G, D], weights [B, H, G, S] and their mass [B, H, G]; D is a multiple of 32."""
    B, H, G, D = q.shape
    S = keys.shape[2]
    n = D // GROUP
    keys = keys.reshape(B * H, S, -1)
    values = values.reshape(B * H, S, -1)
    dtype = torch.promote_types(q.dtype, torch.float32)
    k_scale, k_least, v_scale, v_least = _numbers_of_groups([keys, values], n, dtype)
    q = q.reshape(B * H, G, D)
    if bits == 4:
        q = rotated(upcast(q))
    asked = q[:, :, None] * group_matrix(D, k_scale)  # [BH, G, n, D], zero in other groups
    rows = _for_codes(asked.view(-1, G * n, D), bits)
    of_codes = torch.bmm(rows, _codes(keys, n, bits, dtype).mT)
    of_groups = of_codes.view(-1, G, n, S).mul_(k_scale[:, None])
    scores = torch.baddbmm(of_groups.sum(2), asked.sum(3), k_least, beta=scale, alpha=scale)
    scores = soft_capped(scores.view(B, H, G, S), softcap)
    if visible is not None:
        hidden = ~visible[:, :, None]
        scores = scores.masked_fill(hidden, -torch.inf)
    weights = scores.softmax(-1)
    if visible is not None:
        weights = weights.masked_fill(hidden, 0)  # of a row that sees nothing
    p = weights.view(B * H, G, S)
    rows = (p[:, :, None] * v_scale[:, None]).view(-1, G * n, S)
    sums = _of_codes(torch.bmm(rows, _codes(values, n, bits, dtype)), bits)
    # of the sums with the scales of a group, its own channels: [BH, G, n, 32]
    own = sums.view(-1, G, n, n, GROUP).diagonal(0, 2, 3).mT
    o = (own + torch.bmm(p, v_least.mT)[..., None]).view(B, H, G, D)
    mass = scores.logsumexp(-1) if needs_mass else None
    return o if bits == 8 else rotated(o), weights, mass


def _numbers_of_groups(packed: list[Tensor], n: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The scales and the least numbers [N, n, S] of the n groups of packed rows [N, S, bytes]; of each in turn."""
    pairs = torch.cat([x[..., : 4 * n].view(torch.int32) for x in packed], -1)
    numbers = pairs.view(torch.float16).to(dtype)
    return numbers.mT.contiguous().chunk(2 * len(packed), 1)


def _codes(packed: Tensor, n: int, bits: int, dtype: torch.dtype) -> Tensor:
    """The codes [N, S, D] of packed rows.

    Those of 4 bits are not taken apart: the first half of D are the lower ones of each byte, the others the bytes.
    """
    stored = packed[..., 4 * n :]
    if bits == 8:
        return stored.to(dtype)
    return torch.cat([stored & 15, stored], -1).to(dtype)


def _for_codes(q: Tensor, bits: int) -> Tensor:
    """Queries [N, rows, D] whose products with `_codes` are those of q with the codes."""
    if bits == 8:
        return q
    of_low, of_high = q.chunk(2, -1)
    of_high = of_high / 16
    return torch.cat([of_low - of_high, of_high], -1)


def _of_codes(sums: Tensor, bits: int) -> Tensor:
    """Sums [N, rows, D] of the codes, from those of `_codes`."""
    if bits == 8:
        return sums
    low, both = sums.chunk(2, -1)
    return torch.cat([low, (both - low) / 16], -1)
