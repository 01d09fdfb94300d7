"""Attention of one token to packed rows by products of codes, so that keys and values do not become numbers.

With the scale s, the least number m and the code c of a number, and the groups g of channels:

    q k_j = sum_g (s_jg sum_d q_d c_jd + m_jg sum_d q_d),   over the channels d of a group
    o_d = sum_j p_j s_jg c_jd + sum_j p_j m_jg,   for the group g of channel d

So queries and weights are multiplied once for each group, as further rows of one product of matrices.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_memory.ops.bits import GROUP, group_matrix, rotated
from hf_memory.ops.precision import upcast
from hf_memory.ops.rows import Rows
from hf_memory.ops.soft_cap import soft_capped


def attention(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    visible: Tensor | None,
    rows: Rows,
    scale: float,
    softcap: float,
    needs_mass: bool,
) -> tuple[Tensor, Tensor | None]:
    """Outputs [B, H, G, D], and their mass [B, H, G]; D is a multiple of 32.

    Keys and values are in any number of parts [rows of the part, S, bytes], of the B H rows in turn. Codes of a part
    are read while a processor's cache still has them; what is small is computed for all parts at once.
    """
    B, H, G, D = q.shape
    S = keys[0].shape[1]
    n = D // GROUP
    dtype = torch.promote_types(q.dtype, torch.float32)
    k_scale, k_least, v_scale, v_least = _numbers_of_groups([*keys, *values], n, dtype)
    q = q.reshape(B * H, G, D)
    key_bits: Any = rows.key_bits
    value_bits: Any = rows.value_bits
    if key_bits == 4:
        q = rotated(upcast(q))
    asked = q.unsqueeze(2) * group_matrix(D, k_scale)  # [BH, G, n, D], zero in other groups
    queries = _for_codes(asked.view(len(keys), -1, G * n, D), key_bits)
    products = [
        torch.bmm(query, _codes(part, n, key_bits, dtype).mT) for query, part in zip(queries, keys)
    ]
    of_groups = _of_all(products).view(-1, G, n, S).mul_(k_scale.unsqueeze(1))
    scores = torch.baddbmm(of_groups.sum(2), asked.sum(3), k_least, beta=scale, alpha=scale)
    scores = soft_capped(scores.view(B, H, G, S), softcap)
    if visible is not None:
        hidden = ~visible[:, :, None]
        scores.masked_fill_(hidden, -torch.inf)
    weights = scores.softmax(-1)
    if visible is not None:
        weights.masked_fill_(hidden, 0)  # of a row that sees nothing
    p = weights.view(B * H, G, S)
    scaled = (p.unsqueeze(2) * v_scale.unsqueeze(1)).view(len(values), -1, G * n, S)
    products = [
        torch.bmm(row, _codes(part, n, value_bits, dtype)) for row, part in zip(scaled, values)
    ]
    # of the sums with the scales of a group, its own channels: [BH, G, n, 32]
    sums = _of_codes(_of_all(products), value_bits)
    own = sums.view(-1, G, n, n, GROUP).diagonal(0, 2, 3).mT
    o = (own + torch.bmm(p, v_least.mT).unsqueeze(3)).view(B, H, G, D)
    mass = scores.logsumexp(-1) if needs_mass else None
    return o if value_bits == 8 else rotated(o), mass


def _of_all(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _numbers_of_groups(parts: list[Tensor], n: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The scales and the least numbers [rows, n, S] of the n groups of packed keys; then those of as many values."""
    rows, S = parts[0].shape[:2]
    numbers = torch.empty(len(parts), rows, 2 * n, S, dtype=dtype, device=parts[0].device)
    for of_part, part in zip(numbers.mT, parts):
        of_part.copy_(part.view(torch.float16).narrow(2, 0, 2 * n))
    return numbers.view(2, -1, 2, n, S).transpose(1, 2).flatten(0, 1).unbind()


def _codes(packed: Tensor, n: int, bits: int, dtype: torch.dtype) -> Tensor:
    """The codes [rows, S, D] of packed rows.

    Those of 4 bits are not taken apart: the first half of D are the lower ones of each byte, the others the bytes.
    """
    stored = packed.narrow(2, 4 * n, packed.shape[2] - 4 * n)
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
