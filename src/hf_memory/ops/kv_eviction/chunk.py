"""Kept tokens in PyTorch: block by block, since the entries that a block sees depend on what the blocks before it read.

The backward pass is written out. It knows which entries each block has seen, so it reads many blocks at once.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.ops import cpu
from hf_memory.ops.autograd import first_derivatives_only
from hf_memory.ops.exported import in_pieces, varies
from hf_memory.ops.gate_channels import GateChannels
from hf_memory.ops.inputs import shape_or_type
from hf_memory.ops.kv_eviction.policies import (
    Block,
    EvictionPolicy,
    change_of_output,
    received_attention,
)
from hf_memory.ops.precision import upcast, with_bfloat16_products
from hf_memory.ops.soft_cap import soft_capped
from hf_memory.ops.threads import one_thread

COMPILED: dict[EvictionPolicy, str] = {
    received_attention: "received_attention",
    change_of_output: "change_of_output",
}
SCORES = 2**18  # scores whose gradients are computed at once on a CPU: 1 MB of float32


class Rule(NamedTuple):
    """How blocks are read; see the package."""

    block: int
    first: int
    window: int
    policy: EvictionPolicy
    scale: float
    softcap: float
    gates: GateChannels | None
    needs_mass: bool

    def plain(self, x: Tensor) -> Tensor:
        """The channels of queries or keys [..., D] without those of forget gates."""
        return x if self.gates is None else x[..., : self.gates.plain]

    def worth(self, block: Block) -> Tensor:
        """What the entries of a block are worth, [B, H, n], in the dtype of what they were worth before."""
        worth = self.policy(block)
        shape = block.score.shape
        if not isinstance(worth, Tensor) or worth.shape != shape:
            name = getattr(self.policy, "__qualname__", self.policy)
            raise ValueError(
                f"eviction policy {name} must return a tensor [B, H, n], {tuple(shape)} for this block, got "
                f"{shape_or_type(worth)}"
            )
        return worth.to(block.score.dtype)

    def products(self, q: Tensor, k: Tensor) -> Tensor:
        """Scores [..., G * c, n] before the soft cap, in float32."""
        return upcast(self.plain(q) @ self.plain(k).mT).mul_(self.scale)

    def gradients(self, q: Tensor, k: Tensor, ds: Tensor) -> tuple[Tensor, ...]:
        """Those of queries [..., G * c, D] and keys [..., n, D], from those of scores ds [..., G * c, n]."""
        of_products = ds
        if self.softcap:
            of_products = ds * (1 - torch.tanh(self.products(q, k) / self.softcap).square())
        of_products = (self.scale * of_products).to(q.dtype)
        dq = of_products @ self.plain(k)
        dk = of_products.mT @ self.plain(q)
        if self.gates is None:
            return dq, dk
        of_gates = self.gates.gradients(ds.unflatten(-2, (-1, self.block)), q.shape[-1])
        return tuple(torch.cat([x, y.to(x.dtype)], -1) for x, y in zip((dq, dk), of_gates))


class Read(NamedTuple):
    """What the queries of all blocks have read."""

    o: Tensor  # [blocks, B, H, G * c, D]
    mass: Tensor | None  # [blocks, B, H, G * c], the logarithm
    held: Tensor  # [blocks + 1, B, H, stay] int32, places of the entries before each block, and in the end
    score: Tensor  # [B, H, stay], what these are worth


def rows_at(x: Tensor, at: Tensor) -> Tensor:
    """The rows of x [B, H, n, ...] at places [..., B, H, m] of each head; faster than `gather`."""
    return _select(x, at + _first_rows(x))


def _first_rows(x: Tensor) -> Tensor:
    """Where each head of x [B, H, n, ...] begins in x as rows [B * H * n, ...], [B, H, 1]."""
    B, H, n = x.shape[:3]
    return n * torch.arange(B * H, device=x.device).view(B, H, 1)


def _select(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of x [B, H, n, ...], as numbers among all B * H * n."""
    return x.flatten(0, 2).index_select(0, rows.flatten()).view(*rows.shape, *x.shape[3:])


def places_that_stay(
    number: Tensor, score: Tensor, ends: Tensor, stay: int, first: int, window: int
) -> Tensor:
    """Places [B, H, stay] of the entries that stay after a block.

    If the block is complete, these are the first tokens, of the others those that are worth most, and the window, which
    is the last entries. Otherwise they are the entries that were held before the block.

    Args:
        number: [B, H, n], numbers of the tokens of the entries, from 1; 0: no token.
        score: [B, H, n], what they are worth.
        ends: [B or 1, 1, 1] bool, whether the block is complete.
        stay: how many entries stay.
        first: how many first tokens always stay.
        window: how many last tokens always stay.
    """
    places = torch.arange(number.shape[2], device=number.device)
    older, newer = places.tensor_split([number.shape[2] - window])
    number = number[:, :, : len(older)]
    score = score[:, :, : len(older)]
    is_first = (number > 0) & (number <= first)
    rank = score.masked_fill(number == 0, -1).masked_fill(is_first, torch.inf)
    ranked = rank.sort(dim=-1, descending=True, stable=True).indices
    best = ranked[..., : stay - window].sort(-1).values
    return torch.where(ends, torch.cat([best, newer.expand(*best.shape[:2], -1)], 2), places[:stay])


def retained_attention(
    q: Tensor, k: Tensor, v: Tensor, number: Tensor, score: Tensor, rule: Rule
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """See the package; a softcap of 0 is none."""
    if varies(q.shape[1]):
        return _in_pieces(q, k, v, number, score, rule)
    keys, values = (x.to(q.dtype) for x in (k, v))
    given = _by_block(q, k.shape[1], rule.block), keys, values, number, score
    o, (mass, held, score) = _read(*given, rule)
    mass = None if mass is None else _by_token(mass, rule.block)
    return _by_token(o, rule.block), mass, held, score


def _in_pieces(
    q: Tensor, k: Tensor, v: Tensor, number: Tensor, score: Tensor, rule: Rule
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """The same in a graph for any number of tokens: a loop over blocks, each after the entries that are held then."""
    stay = int(k.shape[2] - q.shape[1])
    place = torch.arange(k.shape[2], device=k.device).expand_as(number)
    entries = k, v, number, place

    def piece(before: tuple, rows: tuple) -> tuple[list[Tensor], tuple]:
        q, *new = rows
        *held, score = before
        joined = [torch.cat([x, y.transpose(1, 2)], 2) for x, y in zip(held, new)]
        *of_block, place = joined
        k, v, number = of_block
        o, mass, order, score = retained_attention(q, k, v, number, score, rule)
        after = *(rows_at(x, order) for x in of_block), place.gather(2, order), score
        return [o] if mass is None else [o, mass], after

    new = [x[:, :, stay:].transpose(1, 2) for x in entries]
    held = *(x[:, :, :stay] for x in entries), score
    (o, *mass), (*_, place, score) = in_pieces(piece, rule.block, held, (q, *new))
    return o, mass[0] if mass else None, place, score


def retained_places(
    q: Tensor, k: Tensor, v: Tensor, number: Tensor, score: Tensor, rule: Rule
) -> tuple[Tensor, Tensor]:
    """Places [B, H, blocks + 1, stay] of the entries before each block, and what those in the end are worth."""
    q = _by_block(q, k.shape[1], rule.block)
    read = _read_blocks(q, k.to(q.dtype), v.to(q.dtype), number, score, rule)
    return read.held.movedim(0, 2), read.score


def score_after(
    q: Tensor, k: Tensor, v: Tensor, number: Tensor, score: Tensor, rule: Rule
) -> Tensor:
    """What entries are worth after a block, which is complete, [B, H, n].

    Args:
        q: queries [B, H, G * c, D] of the block, those of a query head in turn.
        k: keys [B, H, n, D] of the entries, the last c of which are the block.
        v: their values [B, H, n, V].
        number: [B, H, n], see `retained_attention`.
        score: [B, H, n], what they were worth before; 0 for the block.
        rule: how blocks are read.
    """
    c = rule.block
    later = F.pad(score.new_full((c, c), -torch.inf).triu(1), (k.shape[2] - c, 0))
    p = _scores(q, k, number, later, rule).softmax(-1)
    return rule.worth(_block(q, k, v, number, score, p, p.to(v.dtype) @ v, c))


def _block(
    q: Tensor, k: Tensor, v: Tensor, number: Tensor, score: Tensor, p: Tensor, o: Tensor, c: int
) -> Block:
    of_queries = (x.unflatten(2, (-1, c)) for x in (p, o))
    return Block(q.unflatten(2, (-1, c)), k, v, number, score, *of_queries)


@with_bfloat16_products
def _read(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, tuple]:
    """Outputs of queries [blocks, B, H, G * c, D]; their mass, the places held in the end, and what these are worth."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        o, *more = _WithGradients.apply(q, k, v, *others)
        return o, tuple(more)
    read = _read_blocks(q, k, v, *others)
    return read.o, (read.mass, read.held[-1].long(), read.score)


class _WithGradients(torch.autograd.Function):
    """`_read_blocks` with gradients. Of o_i = sum_j p_ij v_j, p_ij = softmax_j(s_ij) and s_ij = scale q_i k_j they are

    dv_j = sum_i p_ij do_i,   ds_ij = p_ij (do_i v_j - do_i o_i + dmass_i),
    dq_i = scale sum_j ds_ij k_j,   dk_j = scale sum_i ds_ij q_i.
    """

    @staticmethod
    def forward(ctx, q, k, v, number, score, rule):
        read = _read_by_compiled_code(q, k, v, number, score, rule)
        if read is None:
            with _threads(q, k, rule):
                read = _read_blocks(q, k, v, number, score, rule)
        ctx.save_for_backward(q, k, v, number, read.o, read.held)
        ctx.rule = rule
        held = read.held[-1].long()
        ctx.mark_non_differentiable(held, read.score)
        return read.o, read.mass, held, read.score

    @staticmethod
    @first_derivatives_only
    def backward(ctx, do, dmass, *_):
        q, k, *others = ctx.saved_tensors
        with _threads(q, k, ctx.rule):
            gradients = _gradients(q, k, *others, do, dmass, ctx.rule)
        return *gradients, None, None, None


def _threads(q: Tensor, k: Tensor, rule: Rule) -> AbstractContextManager[None]:
    """A context with one thread on a CPU, if operations on a block of queries and the entries that it sees are small.

    Of queries [blocks, B, H, G * c, D] and keys [B, H, stay + T, D].
    """
    entries = k.shape[2] - (len(q) - 1) * rule.block  # that a block sees
    is_small = q.device.type == "cpu" and q[0, ..., 0].numel() * entries <= SCORES
    return one_thread() if is_small else nullcontext()


def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    number: Tensor,
    o: Tensor,
    held: Tensor,
    do: Tensor,
    dmass: Tensor | None,
    rule: Rule,
) -> tuple[Tensor, Tensor, Tensor]:
    """Those of q, k and v, some blocks at a time, whose weights are computed again."""
    subtracted = (upcast(do) * upcast(o)).sum(-1, keepdim=True)
    if dmass is not None:
        subtracted = subtracted - dmass.unsqueeze(-1)
    dq = []
    dk, dv = (upcast(x).new_zeros(x.shape) for x in (k, v))  # contiguous, as `flatten` needs
    first_rows = _first_rows(k)
    stay = held.shape[3]
    new_places = _new_places(q, stay, rule).expand(-1, *held.shape[1:3], -1)
    later = _later(upcast(q), stay, rule)
    size = len(q) if q.is_cuda else max(1, SCORES // (q[0, ..., 0].numel() * (stay + rule.block)))
    groups = (x.split(size) for x in (q, do, subtracted, held[:-1], new_places))
    for q_n, do_n, subtracted_n, held_n, new_n in zip(*groups):
        rows = torch.cat([held_n, new_n], -1) + first_rows
        keys = _select(k, rows)
        p = _scores(q_n, keys, _select(number, rows), later, rule).softmax(-1)
        ds = upcast(do_n @ _select(v, rows).mT).sub_(subtracted_n).mul_(p)
        dq_n, dkeys = rule.gradients(q_n, keys, ds)
        dvalues = p.to(v.dtype).mT @ do_n
        for sums, x in ((dk, dkeys), (dv, dvalues)):
            sums.flatten(0, 2).index_add_(0, rows.flatten(), x.flatten(0, 3).to(sums.dtype))
        dq.append(dq_n)
    return torch.cat(dq), dk.to(k.dtype), dv.to(v.dtype)


def _new_places(q: Tensor, stay: int, rule: Rule) -> Tensor:
    """Places [blocks, 1, 1, c] of the tokens of each block of queries [blocks, ...], after those that are held."""
    c = rule.block
    return torch.arange(stay, stay + len(q) * c, device=q.device).view(-1, 1, 1, c)


def _later(x: Tensor, stay: int, rule: Rule) -> Tensor:
    """What hides tokens of a block from queries before them: [c, stay + c], 0 or minus infinity, in the dtype of x."""
    c = rule.block
    return F.pad(x.new_full((c, c), -torch.inf).triu(1), (stay, 0))


def _read_by_compiled_code(
    q: Tensor, k: Tensor, v: Tensor, number: Tensor, score: Tensor, rule: Rule
) -> Read | None:
    """`_read_blocks` from the beginning of sequences; None if compiled code does not read these tokens."""
    c = rule.block
    B, H, entries, D = k.shape
    stay = entries - len(q) * c
    is_product = rule.gates is None and not rule.needs_mass and v.shape[3] == D
    policy = COMPILED.get(rule.policy)
    if not is_product or policy is None or not cpu.takes_rows(q, None, None):
        return None
    if number[:, :, :stay].any():  # tokens were read before
        return None
    size = stay + c
    keys, values = (x.new_zeros(B, H * size, D) for x in (k, v))
    numbers = number.new_zeros(B, H, size)
    scores = score.new_zeros(B, H, stay)
    queries = q.new_zeros(B, q.shape[2] * q.shape[3] // c, c, D)
    state = keys, values, numbers.view(B, -1), scores.view(B, -1), queries
    if not cpu.reads_tokens(state, q, (None, None), policy):
        return None
    reader = cpu.TokenReader(
        state,
        (size,) * H,
        bits=(None, None),
        first=rule.first,
        window=rule.window,
        policy=policy,
        scale=rule.scale,
        softcap=rule.softcap,
        among=slice(0, H, 1),
    )
    new_keys, new_values = (x[:, :, stay:].transpose(1, 2).split(c, 1) for x in (k, v))
    by_token = q.unflatten(3, (-1, c)).permute(0, 1, 4, 2, 3, 5).contiguous()
    o = torch.zeros_like(by_token)
    held = numbers.new_empty(len(q) + 1, B, H, stay)
    read = (number[:, 0, stay:] > 0).sum(1).tolist()
    for n in range(len(q)):
        held[n] = numbers[:, :, :stay]
        before = tuple(min(n * c, count) for count in read)
        counts = tuple(min(c, count - x) for count, x in zip(read, before))
        reader(by_token[n], new_keys[n], new_values[n], before, o[n], counts)
    held[-1] = numbers[:, :, :stay]
    held = torch.where(held > 0, held + (stay - 1), 0)
    o = o.permute(0, 1, 3, 4, 2, 5).flatten(3, 4)
    return Read(o, None, held, scores)


def _read_blocks(
    q: Tensor, k: Tensor, v: Tensor, number: Tensor, score: Tensor, rule: Rule
) -> Read:
    """Read one block after the other."""
    B, H, entries = k.shape[:3]
    blocks = len(q)
    stay = entries - blocks * rule.block
    held = [torch.arange(stay, device=q.device).expand(B, H, -1)]
    new_places = _new_places(q, stay, rule)
    of_new = score.new_zeros(B, H, rule.block)
    later = _later(score, stay, rule)
    first_rows = _first_rows(k)
    outputs = []
    for n in range(blocks):
        at = torch.cat([held[-1], new_places[n].expand(B, H, -1)], 2)
        rows = at + first_rows
        token = number.gather(2, at)
        keys = _select(k, rows)
        values = _select(v, rows)
        scores = _scores(q[n], keys, token, later, rule)
        p = scores.softmax(-1)
        o = p.to(v.dtype) @ values
        outputs.append([o, scores.logsumexp(-1)] if rule.needs_mass else [o])
        before = torch.cat([score, of_new], 2)
        now = rule.worth(_block(q[n], keys, values, token, before, p, o, rule.block))
        ends = token[:, :1, -1:] > 0
        worth = torch.where(ends, now, before)
        order = places_that_stay(token, worth, ends, stay, rule.first, rule.window)
        held.append(at.gather(2, order))
        score = worth.gather(2, order)
    o, *mass = (torch.stack(x) for x in zip(*outputs))
    return Read(o, mass[0] if mass else None, torch.stack(held).int(), score)


def _by_block(q: Tensor, H: int, block: int) -> Tensor:
    """[B, T, H * G, D] -> [blocks, B, H, G * c, D], since groups share keys."""
    return q.unflatten(2, (H, -1)).unflatten(1, (-1, block)).permute(1, 0, 3, 4, 2, 5).flatten(3, 4)


def _by_token(x: Tensor, block: int) -> Tensor:
    """[blocks, B, H, G * c, ...] -> [B, T, H * G, ...]"""
    return x.unflatten(3, (-1, block)).movedim((1, 0, 4), (0, 1, 2)).flatten(1, 2).flatten(2, 3)


def _scores(q: Tensor, k: Tensor, token: Tensor, later: Tensor, rule: Rule) -> Tensor:
    """Scores [B, H, G * c, n] in float32 of queries [B, H, G * c, D], minus infinity for what they do not see.

    The last c of the entries [B, H, n] are those of the block, of which `later` [c, n] hides what comes after a query.
    """
    c = rule.block
    scores = soft_capped(rule.products(q, k), rule.softcap).unflatten(-2, (-1, c))
    if rule.gates is not None:
        scores = scores + rule.gates.decay(q.unflatten(-2, (-1, c)), k)
    none = token == 0
    none[..., -c:].fill_(False)  # padding sees itself, and counts nowhere
    hidden = later.masked_fill(none.unsqueeze(-2), -torch.inf).unsqueeze(-3)
    return scores.add_(hidden).flatten(-3, -2)
