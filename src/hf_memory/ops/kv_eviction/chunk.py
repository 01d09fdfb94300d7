"""Kept tokens in PyTorch: block by block, and for gradients then blocks at once, as in kernels."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.ops.gate_channels import GateChannels
from hf_memory.ops.precision import upcast
from hf_memory.ops.soft_cap import soft_capped

SCORES = 2**18  # that are computed at once on a CPU: 1 MB of float32


class Rule(NamedTuple):
    """How scores are computed; see the package."""

    scale: float
    softcap: float
    gates: GateChannels | None


def rows_at(x: Tensor, at: Tensor) -> Tensor:
    """The rows of x [B, H, n, ...] at places [B, H, ...] of each head; faster than `gather`."""
    B, H, n = x.shape[:3]
    heads = n * torch.arange(B * H, device=at.device).view(B, H, *(1 for _ in at.shape[2:]))
    return x.flatten(0, 2).index_select(0, (heads + at).flatten()).view(*at.shape, *x.shape[3:])


def places_that_stay(
    number: Tensor, received: Tensor, ends: Tensor, stay: int, first: int, window: int
) -> Tensor:
    """Places [B, H, stay] of the entries [B, H, n] that stay.

    After a block that ends, [B or 1, 1, 1] bool, those of the first tokens, of the others that received most, and of
    the window, which are the last ones; otherwise those before the block.
    """
    places = torch.arange(number.shape[2], device=number.device)
    older, newer = places.tensor_split([number.shape[2] - window])
    number = number[:, :, : len(older)]
    received = received[:, :, : len(older)]
    value = received.masked_fill(number == 0, -1).masked_fill(
        (number > 0) & (number <= first), torch.inf
    )
    best = value.argsort(dim=-1, descending=True, stable=True)[..., : stay - window].sort(-1).values
    return torch.where(ends, torch.cat([best, newer.expand(*best.shape[:2], -1)], 2), places[:stay])


def retained_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    number: Tensor,
    received: Tensor,
    query_mask: Tensor,
    block: int,
    first: int,
    window: int,
    decay: float,
    scale: float,
    softcap: float,
    gates: GateChannels | None,
    needs_mass: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """See the package; no cap is 0. With gradients what the decisions have read is read again, many blocks at once."""
    (B, H, entries), T = k.shape[:3], q.shape[1]
    stay = entries - T
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    places = torch.arange(entries, device=q.device).expand(B, H, -1)
    (held, *new), (u, *before) = (
        x.split([stay, *[block] * (T // block)], 2) for x in (places, received)
    )
    later = F.pad(upcast(q[:0]).new_full((block, block), -torch.inf).triu(1), (stay, 0))
    rule = Rule(scale, softcap, gates)
    queries = _by_block(q, H, block)
    found = []
    of_blocks = []
    read = []
    with torch.no_grad():
        for asked, asking, at, earlier in zip(
            queries.unbind(2), query_mask.split(block, 1), new, before
        ):
            at = torch.cat([held, at], 2)
            u = torch.cat([u, earlier], 2)
            token = number.gather(2, at)
            scores = _scores(asked, rows_at(k, at), token, later, rule)
            p = scores.softmax(-1)
            counts = asking.repeat(1, p.shape[2])[:, None, None]
            u = decay ** asking[:, :1, None] * u + (
                counts @ p.to(counts.dtype).flatten(2, 3)
            ).squeeze(2)
            found.append(at)
            of_blocks.append(u[:, :, stay:])
            if not learns:
                read.append(
                    [x.unsqueeze(2) for x in _outputs(p, scores, rows_at(v, at), needs_mass)]
                )
            order = places_that_stay(token, u, token[:, :1, -1:] > 0, stay, first, window)
            held = at.gather(2, order)
            u = u.gather(2, order)
    if learns:
        read = _read_again(queries, k, v, number, torch.stack(found, 2), later, rule, needs_mass)
    o, *mass = (
        torch.cat(x, 2).movedim((2, 4), (1, 2)).flatten(1, 2).flatten(2, 3) for x in zip(*read)
    )
    return o, mass[0] if needs_mass else None, held, torch.cat([u, *of_blocks], 2)


def _read_again(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    number: Tensor,
    at: Tensor,
    later: Tensor,
    rule: Rule,
    needs_mass: bool,
) -> list[list[Tensor]]:
    """Outputs of queries [B, H, blocks, G * c, D] from entries at places [B, H, blocks, n], in groups of blocks."""
    of_block = q[:, :, 0, :, 0].numel() * at.shape[3]
    size = at.shape[2] if q.is_cuda else max(1, SCORES // of_block)
    summed = (upcast(k), upcast(v))
    read = []  # gradients are sums over blocks
    for asked, of_group in zip(q.split(size, 2), at.split(size, 2)):
        keys, values = (rows_at(x, of_group).to(q.dtype) for x in summed)
        scores = _scores(asked, keys, rows_at(number, of_group), later, rule)
        read.append(_outputs(scores.softmax(-1), scores, values, needs_mass))
    return read


def _outputs(p: Tensor, scores: Tensor, v: Tensor, needs_mass: bool) -> list[Tensor]:
    """Outputs [..., G, c, D] of weights and scores [..., G, c, n], and the logarithms of their mass [..., G, c]."""
    o = (p.to(v.dtype).flatten(-3, -2) @ v).unflatten(-2, p.shape[-3:-1])
    return [o, scores.logsumexp(-1)] if needs_mass else [o]


def _by_block(q: Tensor, H: int, block: int) -> Tensor:
    """[B, T, H * G, D] -> [B, H, blocks, G * c, D], since groups share keys."""
    return q.unflatten(2, (H, -1)).unflatten(1, (-1, block)).permute(0, 3, 1, 4, 2, 5).flatten(3, 4)


def _scores(q: Tensor, k: Tensor, token: Tensor, later: Tensor, rule: Rule) -> Tensor:
    """Scores [..., G, c, n] in float32 of queries [..., G * c, D], and minus infinity for what they do not see.

    The last c of the entries [..., n] are those of the block, of which `later` [c, n] hides what comes after a query.
    """
    block = len(later)
    plain = q.shape[-1] if rule.gates is None else rule.gates.plain
    products = (rule.scale * q[..., :plain]) @ k[..., :plain].mT
    scores = soft_capped(upcast(products), rule.softcap).unflatten(-2, (-1, block))
    if rule.gates is not None:
        scores = scores + rule.gates.decay(q.unflatten(-2, (-1, block)), k)
    none = token == 0
    none[..., -block:] = False  # padding sees itself, and counts nowhere
    hidden = later.masked_fill(none.unsqueeze(-2), -torch.inf).unsqueeze(-3)
    return scores + hidden  # a sum has a cheaper gradient than what is filled in place
