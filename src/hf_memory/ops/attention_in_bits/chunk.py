"""Attention of one token to packed rows by products of codes, so that keys and values do not become numbers.

In 8 bits, with the scale s of a row and the codes c of its numbers:

    q k_j = s_j sum_d q_d c_jd,   o_d = sum_j p_j s_j c_jd

In 4 bits, with the scale s, the least number m and the codes c of each group g of channels:

    q k_j = sum_g (s_jg sum_d q_d c_jd + m_jg sum_d q_d),   over the channels d of a group
    o_d = sum_j p_j s_jg c_jd + sum_j p_j m_jg,   for the group g of channel d

So there queries and weights are multiplied once for each group, as further rows of one product of matrices. Rows are
rotated: queries are rotated for the scores, and outputs are turned back.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hf_memory.ops.bits import GROUP, codes, group_matrix, rotated, scales
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
    """Outputs [B, H, G, D], and their mass [B, H, G]; in 4 bits D is a multiple of 32.

    Keys and values are in any number of parts [rows of the part, S, bytes], of the B H rows in turn. Codes of a part
    are read while a processor's cache still has them; what is small is computed for all parts at once.
    """
    B, H, G, D = q.shape
    S = keys[0].shape[1]
    q = rotated(upcast(q).mul(scale)).view(B * H, G, D)
    scores = PRODUCTS[rows.key_bits](q, keys)
    scores = soft_capped(scores.view(B, H, G, S), softcap)
    if visible is not None:
        hidden = ~visible[:, :, None]
        scores.masked_fill_(hidden, -torch.inf)
    weights = scores.softmax(-1)
    if visible is not None:
        weights.masked_fill_(hidden, 0)  # of a row that sees nothing
    p = weights.view(B * H, G, S)
    o = SUMS[rows.value_bits](p, values, D)
    mass = scores.logsumexp(-1) if needs_mass else None
    return rotated(o).view(B, H, G, D), mass


def _products(q: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Products [rows, G, S] of queries [rows, G, D] with keys in 8 bits."""
    D = q.shape[-1]
    each = q.view(len(parts), -1, *q.shape[1:])
    products = [
        torch.bmm(query, codes(part, D, 8).to(q.dtype).mT) for query, part in zip(each, parts)
    ]
    return _of_all(products).mul_(_scales_of(parts, q.dtype))


def _sums(p: Tensor, parts: Sequence[Tensor], D: int) -> Tensor:
    """Sums [rows, G, D] of values in 8 bits with weights p [rows, G, S]."""
    scaled = (p * _scales_of(parts, p.dtype)).view(len(parts), -1, *p.shape[1:])
    products = [
        torch.bmm(weights, codes(part, D, 8).to(p.dtype)) for weights, part in zip(scaled, parts)
    ]
    return _of_all(products)


def _scales_of(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The scales [rows, 1, S] of rows in 8 bits."""
    return _of_all([scales(part, 8).to(dtype) for part in parts]).mT


def _products_of_groups(q: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Products [rows, G, S] of queries [rows, G, D] with keys in 4 bits."""
    _, G, D = q.shape
    n = D // GROUP
    scale, least = _numbers_of_groups(parts, n, q.dtype)
    asked = q.unsqueeze(2) * group_matrix(D, q)  # [rows, G, n, D], zero in other groups
    queries = _for_codes(asked.view(len(parts), -1, G * n, D))
    products = [
        torch.bmm(query, _codes(part, n, q.dtype).mT) for query, part in zip(queries, parts)
    ]
    of_groups = _of_all(products).view(len(q), G, n, -1).mul_(scale.unsqueeze(1))
    return torch.baddbmm(of_groups.sum(2), asked.sum(3), least)


def _sums_of_groups(p: Tensor, parts: Sequence[Tensor], D: int) -> Tensor:
    """Sums [rows, G, D] of values in 4 bits with weights p [rows, G, S]."""
    rows, G, S = p.shape
    n = D // GROUP
    scale, least = _numbers_of_groups(parts, n, p.dtype)
    scaled = (p.unsqueeze(2) * scale.unsqueeze(1)).view(len(parts), -1, G * n, S)
    products = [
        torch.bmm(weights, _codes(part, n, p.dtype)) for weights, part in zip(scaled, parts)
    ]
    # of the sums with the scales of a group, its own channels: [rows, G, n, 32]
    sums = _of_codes(_of_all(products))
    own = sums.view(rows, G, n, n, GROUP).diagonal(0, 2, 3).mT
    return (own + torch.bmm(p, least.mT).unsqueeze(3)).view(rows, G, D)


# with keys, and of values, by the bits of their numbers
PRODUCTS: dict[int | None, Callable] = {8: _products, 4: _products_of_groups}
SUMS: dict[int | None, Callable] = {8: _sums, 4: _sums_of_groups}


def _of_all(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _numbers_of_groups(
    parts: Sequence[Tensor], n: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The scales and the least numbers [rows, n, S] of the n groups of rows in 4 bits."""
    numbers = _of_all([scales(part, 4).to(dtype) for part in parts]).mT
    scale, least = numbers.contiguous().split(n, 1)
    return scale, least


def _codes(packed: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """The codes [rows, S, D] of rows in 4 bits, which are not taken apart.

    The first half of D are the lower ones of each byte, the others the bytes.
    """
    stored = packed.narrow(2, 4 * n, packed.shape[2] - 4 * n)
    return torch.cat([stored & 15, stored], -1).to(dtype)


def _for_codes(q: Tensor) -> Tensor:
    """Queries [N, rows, D] whose products with `_codes` are those of q with the codes."""
    of_low, of_high = q.chunk(2, -1)
    of_high = of_high / 16
    return torch.cat([of_low - of_high, of_high], -1)


def _of_codes(sums: Tensor) -> Tensor:
    """Sums [N, rows, D] of the codes, from those of `_codes`."""
    low, both = sums.chunk(2, -1)
    return torch.cat([low, (both - low) / 16], -1)
