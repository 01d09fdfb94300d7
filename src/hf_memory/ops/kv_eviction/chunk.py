"""Kept tokens in PyTorch: block by block, and for gradients then blocks at once, as in kernels."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.ops.exported import in_pieces, varies
from hf_memory.ops.gate_channels import GateChannels
from hf_memory.ops.precision import upcast
from hf_memory.ops.soft_cap import soft_capped

SCORES = 2**18  # scores that are computed at once on a CPU: 1 MB of float32


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
    """Places [B, H, stay] of the entries that stay after a block.

    If the block is complete, these are the first tokens, of the others those that received most attention, and the
    window, which is the last entries. Otherwise they are the entries that were held before the block.

    Args:
        number: [B, H, n], numbers of the tokens of the entries, from 1; 0: no token.
        received: [B, H, n], the attention that they have received.
        ends: [B or 1, 1, 1] bool, whether the block is complete.
        stay: how many entries stay.
        first: how many first tokens always stay.
        window: how many last tokens always stay.
    """
    places = torch.arange(number.shape[2], device=number.device)
    older, newer = places.tensor_split([number.shape[2] - window])
    number = number[:, :, : len(older)]
    received = received[:, :, : len(older)]
    is_first = (number > 0) & (number <= first)
    rank = received.masked_fill(number == 0, -1).masked_fill(is_first, torch.inf)
    best = rank.argsort(dim=-1, descending=True, stable=True)[..., : stay - window].sort(-1).values
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
    """See the package; a softcap of 0 is none.

    With gradients, all blocks are read a second time, many at once, when it is known which entries each of them sees.
    """
    if varies(q.shape[1]):
        options = block, first, window, decay, scale, softcap, gates, needs_mass
        return _in_pieces(q, k, v, number, received, query_mask, *options)
    B, H, entries = k.shape[:3]
    T = q.shape[1]
    stay = entries - T
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    places = torch.arange(entries, device=q.device).expand(B, H, -1)
    sizes = [stay, *[block] * (T // block)]
    held, *new_places = places.split(sizes, 2)
    u, *new_received = received.split(sizes, 2)
    later = F.pad(upcast(q[:0]).new_full((block, block), -torch.inf).triu(1), (stay, 0))
    rule = Rule(scale, softcap, gates)
    queries = _by_block(q, H, block)
    places_of_blocks = []  # of the entries that each block sees
    received_by_blocks = []  # the attention that the tokens of each block have received in it
    outputs = []
    with torch.no_grad():
        blocks = zip(queries.unbind(2), query_mask.split(block, 1), new_places, new_received)
        for q_n, q_mask, places_n, received_n in blocks:
            at = torch.cat([held, places_n], 2)
            u = torch.cat([u, received_n], 2)
            token = number.gather(2, at)
            scores = _scores(q_n, rows_at(k, at), token, later, rule)
            p = scores.softmax(-1)
            counts = q_mask.repeat(1, p.shape[2])[:, None, None]
            given = (counts @ p.to(counts.dtype).flatten(2, 3)).squeeze(2)
            u = decay ** q_mask[:, :1, None] * u + given
            places_of_blocks.append(at)
            received_by_blocks.append(u[:, :, stay:])
            if not learns:
                outputs_n = _outputs(p, scores, rows_at(v, at), needs_mass)
                outputs.append([x.unsqueeze(2) for x in outputs_n])
            order = places_that_stay(token, u, token[:, :1, -1:] > 0, stay, first, window)
            held = at.gather(2, order)
            u = u.gather(2, order)
    if learns:
        at = torch.stack(places_of_blocks, 2)
        outputs = _read_again(queries, k, v, number, at, later, rule, needs_mass)
    o, *mass = (
        torch.cat(x, 2).movedim((2, 4), (1, 2)).flatten(1, 2).flatten(2, 3) for x in zip(*outputs)
    )
    return o, mass[0] if needs_mass else None, held, torch.cat([u, *received_by_blocks], 2)


def _in_pieces(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    number: Tensor,
    received: Tensor,
    query_mask: Tensor,
    block: int,
    *options: Any,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """The same in a graph for any number of tokens: a loop over blocks, each after the entries that are held then."""
    stay = int(k.shape[2] - q.shape[1])
    place = torch.arange(k.shape[2], device=k.device).expand_as(number)
    entries = k, v, number, received, place

    def piece(held: tuple, rows: tuple) -> tuple[list[Tensor], tuple]:
        q, query_mask, *new = rows
        joined = [torch.cat([x, y.transpose(1, 2)], 2) for x, y in zip(held, new)]
        k, v, number, received, place = joined
        o, mass, order, received = retained_attention(
            q, k, v, number, received, query_mask, block, *options
        )
        of_tokens = [received[:, :, stay:].transpose(1, 2)]
        k, v, number = (rows_at(x, order) for x in joined[:3])
        after = k, v, number, received[:, :, :stay], place.gather(2, order)
        return [o, *of_tokens] if mass is None else [o, *of_tokens, mass], after

    new = [x[:, :, stay:].transpose(1, 2) for x in entries]
    (o, of_tokens, *mass), held = in_pieces(
        piece, block, tuple(x[:, :, :stay] for x in entries), (q, query_mask, *new)
    )
    received = torch.cat([held[3], of_tokens.transpose(1, 2)], 2)
    return o, mass[0] if mass else None, held[4], received


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
    k = upcast(k)  # as gradients are sums over blocks
    v = upcast(v)
    outputs = []
    for q_group, at_group in zip(q.split(size, 2), at.split(size, 2)):
        keys, values = (rows_at(x, at_group).to(q.dtype) for x in (k, v))
        scores = _scores(q_group, keys, rows_at(number, at_group), later, rule)
        outputs.append(_outputs(scores.softmax(-1), scores, values, needs_mass))
    return outputs


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
