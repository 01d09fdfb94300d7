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

    Keys and values are in any number of parts [rows of the part, S, bytes], of the B H rows in turn. What a part's
    codes become is multiplied while a processor's cache still has it.
    """
    B, H, G, D = q.shape
    asked = rotated(upcast(q) * scale).view(B * H, G, D)
    products = _of_parts(PRODUCTS[rows.key_bits], asked, keys, D)
    scores = soft_capped(products.view(B, H, G, -1), softcap)
    if visible is not None:
        hidden = ~visible
        scores.masked_fill_(hidden, -torch.inf)
    weights = scores.softmax(-1)
    if visible is not None:
        weights.masked_fill_(hidden, 0)  # of a row that sees nothing
    mass = scores.logsumexp(-1) if needs_mass else None
    o = _of_parts(SUMS[rows.value_bits], weights.flatten(0, 1), values, D)
    return rotated(o).view(B, H, G, D), mass


def _of_parts(function: Callable, x: Tensor, parts: Sequence[Tensor], D: int) -> Tensor:
    """A function of x [rows, G, n] and of rows of D channels, for each part with those of x that it has."""
    if len(parts) == 1:
        return function(x, parts[0], D)
    pieces = zip(x.chunk(len(parts)), parts)
    return torch.cat([function(piece, part, D) for piece, part in pieces])


def _products(q: Tensor, packed: Tensor, D: int) -> Tensor:
    """Products [rows, G, S] of queries [rows, G, D] with keys in 8 bits."""
    products = torch.bmm(q, codes(packed, D, 8).to(q.dtype).mT)
    return products.mul_(scales(packed, 8).to(q.dtype).mT)


def _sums(p: Tensor, packed: Tensor, D: int) -> Tensor:
    """Sums [rows, G, D] of values in 8 bits with weights p [rows, G, S], which are overwritten."""
    p.mul_(scales(packed, 8).to(p.dtype).mT)
    return torch.bmm(p, codes(packed, D, 8).to(p.dtype))


def _products_of_groups(q: Tensor, packed: Tensor, D: int) -> Tensor:
    """Products [rows, G, S] of queries [rows, G, D] with keys in 4 bits."""
    rows, G, _ = q.shape
    n = D // GROUP
    scale, least = _numbers_of_groups(packed, n, q.dtype)
    asked = q.unsqueeze(2) * group_matrix(D, q)  # [rows, G, n, D], zero in other groups
    queries = _for_codes(asked.view(rows, G * n, D))
    products = torch.bmm(queries, _codes(packed, n, q.dtype).mT)
    of_groups = products.view(rows, G, n, -1).mul_(scale.unsqueeze(1))
    return torch.baddbmm(of_groups.sum(2), asked.sum(3), least)


def _sums_of_groups(p: Tensor, packed: Tensor, D: int) -> Tensor:
    """Sums [rows, G, D] of values in 4 bits with weights p [rows, G, S]."""
    rows, G, S = p.shape
    n = D // GROUP
    scale, least = _numbers_of_groups(packed, n, p.dtype)
    scaled = (p.unsqueeze(2) * scale.unsqueeze(1)).view(rows, G * n, S)
    # of the sums with the scales of a group, its own channels: [rows, G, n, 32]
    sums = _of_codes(torch.bmm(scaled, _codes(packed, n, p.dtype)))
    own = sums.view(rows, G, n, n, GROUP).diagonal(0, 2, 3).mT
    return (own + torch.bmm(p, least.mT).unsqueeze(3)).flatten(2)


# with keys, and of values, by the bits of their numbers
PRODUCTS: dict[int | None, Callable] = {8: _products, 4: _products_of_groups}
SUMS: dict[int | None, Callable] = {8: _sums, 4: _sums_of_groups}


def _numbers_of_groups(packed: Tensor, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The scales and the least numbers [rows, n, S] of the n groups of rows in 4 bits."""
    numbers = scales(packed, 4).to(dtype).mT.contiguous()
    scale, least = numbers.split(n, 1)
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
