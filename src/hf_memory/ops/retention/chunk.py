"""Kept tokens in PyTorch, in the two parts that kernels have: decisions block by block, and then blocks at once."""

import torch
from torch import Tensor

SCORES = 2**18  # that are computed at once on a CPU: 1 MB of float32


def rows_at(x: Tensor, at: Tensor) -> Tensor:
    """The rows of x [B, H, n, ...] at places [B, H, ...] of each head; faster than `gather`."""
    B, H, n = x.shape[:3]
    heads = n * torch.arange(B * H, device=at.device).view(B, H, *(1 for _ in at.shape[2:]))
    return x.flatten(0, 2).index_select(0, (heads + at).flatten()).view(*at.shape, *x.shape[3:])


def places_that_stay(number: Tensor, received: Tensor, ends: Tensor, stay: int, first: int, window: int) -> Tensor:
    """Places [B, H, stay] of the entries [B, H, n] that stay.

    After a block that ends, [B or 1, 1, 1] bool, those of the first tokens, of the others that received most, and of
    the window, which are the last ones; otherwise those before the block.
    """
    places = torch.arange(number.shape[2], device=number.device)
    older, newer = places.tensor_split([number.shape[2] - window])
    number, received = number[:, :, : len(older)], received[:, :, : len(older)]
    value = received.masked_fill(number == 0, -1).masked_fill((number > 0) & (number <= first), torch.inf)
    best = value.argsort(dim=-1, descending=True, stable=True)[..., : stay - window].sort(-1).values
    return torch.where(ends, torch.cat([best, newer.expand(*best.shape[:2], -1)], 2), places[:stay])


@torch.no_grad()
def retained_places(
    q: Tensor,
    k: Tensor,
    number: Tensor,
    received: Tensor,
    asks: Tensor,
    block: int,
    first: int,
    window: int,
    decay: float,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Places [B, H, blocks + 1, stay] and received attention [B, H, stay + T], see the package; no cap is 0."""
    (B, H, entries), T = k.shape[:3], q.shape[1]
    stay = entries - T
    places = torch.arange(entries, device=q.device).expand(B, H, -1)
    (held, *new), (u, *before) = (x.split([stay, *[block] * (T // block)], 2) for x in (places, received))
    found, of_blocks = [held], []
    queries, asks = _by_block(scale * q, H, block).unbind(2), asks.split(block, 1)
    for asked, asking, at, earlier in zip(queries, asks, new, before):
        at, u = torch.cat([held, at], 2), torch.cat([u, earlier], 2)
        token = number.gather(2, at)
        p = _scores(asked, rows_at(k, at), token, block, softcap).softmax(-1)
        counts = asking.repeat(1, p.shape[2])[:, None, None]
        u = decay ** asking[:, :1, None] * u + (counts @ p.to(counts.dtype).flatten(2, 3)).squeeze(2)
        of_blocks.append(u[:, :, stay:])
        order = places_that_stay(token, u, token[:, :1, -1:] > 0, stay, first, window)
        held, u = at.gather(2, order), u.gather(2, order)
        found.append(held)
    return torch.stack(found, 2), torch.cat([u, *of_blocks], 2)


def retained_attention(
    q: Tensor, k: Tensor, v: Tensor, number: Tensor, places: Tensor, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Outputs [B, T, HQ, D], and the logarithm of the mass [B, T, HQ], in groups of blocks on a CPU."""
    (B, T, HQ, _), (H, blocks, stay) = q.shape, places[:, :, 1:].shape[1:]
    block, wide = T // blocks, [x.to(torch.promote_types(x.dtype, torch.float32)) for x in (k, v)]  # sums gradients so
    own = torch.arange(stay, stay + T, device=q.device).view(blocks, block)
    at = torch.cat([places[:, :, :-1], own.expand(B, H, -1, -1)], 3)
    size = blocks if q.is_cuda else max(1, SCORES // (B * HQ * block * (stay + block)))
    outputs, masses = [], []
    for queries, of_group in zip(_by_block(scale * q, H, block).split(size, 2), at.split(size, 2)):
        keys, values = (rows_at(x, of_group).to(q.dtype) for x in wide)
        scores = _scores(queries, keys, rows_at(number, of_group), block, softcap)
        outputs.append((scores.softmax(-1).to(v.dtype).flatten(3, 4) @ values).unflatten(3, (-1, block)))
        masses.append(scores.logsumexp(-1))
    o, mass = (torch.cat(x, 2).movedim((2, 4), (1, 2)) for x in (outputs, masses))  # [B, blocks, c, H, G, ...]
    return o.flatten(1, 2).flatten(2, 3), mass.flatten(1, 2).flatten(2, 3)


def _by_block(q: Tensor, H: int, block: int) -> Tensor:
    """[B, T, H * G, D] -> [B, H, blocks, G * c, D], since groups share keys."""
    return q.unflatten(2, (H, -1)).unflatten(1, (-1, block)).permute(0, 3, 1, 4, 2, 5).flatten(3, 4)


def _scores(q: Tensor, k: Tensor, token: Tensor, block: int, softcap: float) -> Tensor:
    """Scores [..., G, c, n] in float32 of queries [..., G * c, D], and minus infinity for what they do not see.

    The last c of the entries [..., n] are those of the block; tokens are counted from 1, and 0 is none.
    """
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    later = torch.ones(block, block, dtype=torch.bool, device=q.device).triu(1).expand(*token.shape[:-1], -1, -1)
    none = (token[..., None, :-block] == 0).expand(*token.shape[:-1], block, -1)
    bias = scores.new_zeros(()).masked_fill(torch.cat([none, later], -1), -torch.inf)  # its sum has a cheap gradient
    return scores.unflatten(-2, (-1, block)) + bias.unsqueeze(-3)
