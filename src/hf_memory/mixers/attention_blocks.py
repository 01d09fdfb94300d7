"""Softmax attention in blocks of queries, each with the keys that it may see, so that there is no T x T matrix."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.ops.autograd import first_derivatives_only
from hf_memory.ops.exported import varies
from hf_memory.ops.gate_channels import GateChannels
from hf_memory.ops.masks import Mask, Tokens, seen
from hf_memory.ops.soft_cap import soft_capped

BLOCK = 64  # queries of a block, twice as many if they see more than `LONG_BLOCK` tokens before the block
SCORES = 2**22  # scores of a group of blocks on a CPU
LONG_BLOCK = 256  # queries of a block if each has its own slice of the keys, whose gradient is as long as all keys

# Outputs [B, T, HQ, V] of attention, and the logarithms of their mass in the softmax [B, T, HQ].
Attended = tuple[Tensor, Tensor]


class Columns(NamedTuple):
    """Keys and values, with a mask that says which queries see them."""

    tokens: Tokens  # [1 or B, S]
    keys: Tensor  # [1 or B, S, H, D]
    values: Tensor  # [1 or B, S, H, V]
    sees: Mask

    def map(self, change: Callable[[Tensor], Tensor]) -> "Columns":
        """The same function applied to positions, keys and values [1 or B, S, ...]."""
        return Columns(self.tokens.map(change), change(self.keys), change(self.values), self.sees)

    def of(self, columns: slice) -> "Columns":
        """The columns in this part of S."""
        return self.map(lambda x: x[:, columns])

    def by_block(self, B: int) -> list["Columns"]:
        """The columns of each block, from [B * blocks, ...]. The backward of unbind is cheaper than slices."""
        position, sequence = self.tokens
        each = [x.unflatten(0, (B, -1)).unbind(1) for x in (position, self.keys, self.values)]
        sequences = [None] * len(each[0])
        if sequence is not None:
            sequences = sequence.unflatten(0, (B, -1)).unbind(1)
        return [
            Columns(Tokens(x, number), k, v, self.sees) for x, k, v, number in zip(*each, sequences)
        ]


class Blocks(NamedTuple):
    """Blocks of queries, with the keys and values that they may see. HQ is a multiple of H."""

    queries: Tensor  # [B * blocks, C, HQ, D]
    keys: Tensor  # [B * blocks, S, H, D]
    values: Tensor  # [B * blocks, S, H, V]
    visible: Any  # [B * blocks, 1 or HQ, C, S] bool, or None: everything
    q_pos: Tensor  # [1 or B * blocks, C], positions of the queries, with any offset
    k_pos: Tensor  # [1 or B * blocks, S], positions of the keys, with the same offset

    @classmethod
    def of(cls, queries: Tensor, tokens: Tokens, *columns: Columns) -> "Blocks":
        """Each block of queries [B * blocks, C, HQ, D], at these tokens, with all of several sets of columns."""
        keys = _joined([x.keys for x in columns], 1)
        values = _joined([x.values for x in columns], 1)
        masks = [seen(x.sees, tokens, x.tokens) for x in columns]
        heads = queries.shape[2]
        kinds = max(mask.shape[1] for mask in masks)
        visible = _joined([mask.expand(-1, kinds, -1, -1) for mask in masks], -1)
        if kinds not in (1, heads):  # masks by head
            visible = visible.repeat(1, -(-heads // kinds), 1, 1)[:, :heads]
        rows = next((n for n in map(_rows, columns) if n != 1), 1)
        k_pos = _joined([x.tokens.position.expand(rows, -1) for x in columns], 1)
        return cls(queries, keys, values, visible, tokens.position, k_pos)

    @property
    def distance(self) -> Tensor:
        """[1 or B * blocks, C, S], distances back from queries to keys; 0 if the key is later or does not exist."""
        return (self.q_pos[:, :, None] - self.k_pos[:, None, :]).clamp(min=0)


class Relation(Protocol):
    """A relative position: how attention depends on the distance of two tokens."""

    def __call__(self, scores: Tensor, blocks: Blocks, scaling: float) -> Tensor:
        """Change scores [B * blocks, HQ, C, S], which are in float32."""

    def read(self, weights: Tensor, blocks: Blocks) -> Tensor | None:
        """What weights [B * blocks, HQ, C, S] add to the sum of values, [B * blocks, C, HQ, V], or None."""


class Scores(NamedTuple):
    """How scores are computed: s = scaling q k, with a soft cap c then c tanh(s / c), then changed by a relation or by
    forget gates."""

    scaling: float
    softcap: float | None = None
    relation: Relation | None = None
    gates: GateChannels | None = None

    @property
    def is_plain(self) -> bool:
        """Whether scores are products alone, as those of fused attention."""
        return self.softcap is None and self.is_product

    @property
    def is_product(self) -> bool:
        """Whether scores are products, perhaps capped."""
        return self.relation is None and self.gates is None

    def of(self, blocks: Blocks) -> Tensor:
        """Scores [B * blocks, H, G, C, S] of all keys, in float32, of a tensor that nothing else uses."""
        q, k = blocks[:2]
        H = k.shape[2]
        scores = self.of_heads(q.unflatten(2, (H, -1)).permute(0, 2, 3, 1, 4), k.transpose(1, 2))
        if self.relation is not None:
            scores = self.relation(scores.flatten(1, 2), blocks, self.scaling).unflatten(1, (H, -1))
        return scores

    def of_heads(self, q: Tensor, k: Tensor) -> Tensor:
        """Scores without a relation, of queries [B, H, G, C, D] and the keys [B, H, S, D] that a group shares."""
        plain = [q, k] if self.gates is None else [x[..., : self.gates.plain] for x in (q, k)]
        group_rows = (self.scaling * plain[0]).flatten(2, 3)
        scores = (group_rows @ plain[1].mT).unflatten(2, q.shape[2:4])
        scores = scores.to(torch.promote_types(q.dtype, torch.float32))
        scores = soft_capped(scores, self.softcap)
        return scores if self.gates is None else scores + self.gates.decay(q, k)

    def weights(self, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """Weights [B * blocks, H, G, C, S] for the G queries of a group, and the logarithms of the denominators."""
        visible = blocks.visible
        if visible is None:
            scores = self.of(blocks)
            return scores.softmax(-1), scores.logsumexp(-1, keepdim=True)
        kinds = (1, 1) if visible.shape[1] == 1 else (blocks.keys.shape[2], -1)
        return softmax_of(self.of(blocks), visible.unflatten(1, kinds))

    def attend(self, blocks: Blocks) -> Tensor:
        """Softmax attention: outputs [B * blocks, C, HQ, V], undefined at padding."""
        if not self.is_plain:
            return self.attend_with_mass(blocks)[0]
        q, k, v = (x.transpose(1, 2) for x in blocks[:3])
        visible = blocks.visible | ~blocks.visible.any(-1, keepdim=True)  # a row must see something
        o = F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, scale=self.scaling, enable_gqa=True
        )
        return o.transpose(1, 2)

    def attend_one(self, q: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None) -> Tensor:
        """Plain attention of one query of each row, which sees something.

        Args:
            q: queries by key-value head [B, 1, H, groups, D].
            keys: [B, H, S, D].
            values: [B, H, S, V].
            visible: [B or 1, H or 1, groups or 1, S] bool; None: all are visible.

        Returns:
            Outputs [B, 1, H, groups, V].
        """
        # the queries of a group are like several tokens, for kernels without groups
        o = F.scaled_dot_product_attention(
            q[:, 0], keys, values, attn_mask=visible, scale=self.scaling
        )
        return o[:, None]

    def attend_with_mass(self, blocks: Blocks) -> Attended:
        """Softmax attention: outputs [B * blocks, C, HQ, V], zero at padding, and the logarithms of their mass.

        The mass [B * blocks, C, HQ], in float32, is the denominator of the softmax.
        """
        v = blocks.values
        C = blocks.queries.shape[1]
        weights, logsumexp = self.weights(blocks)
        o = (weights.to(v.dtype).flatten(2, 3) @ v.transpose(1, 2)).unflatten(2, (-1, C))
        o = o.permute(0, 3, 1, 2, 4).flatten(2, 3)
        mass = logsumexp[..., 0].permute(0, 3, 1, 2).flatten(2)
        if self.relation is None:
            return o, mass
        of_distances = self.relation.read(weights.flatten(1, 2), blocks)
        return o if of_distances is None else o + of_distances.to(o.dtype), mass


def _rows(columns: Columns) -> int:
    return columns.tokens.position.shape[0]


def near_blocks(q: Tensor, queries: Tokens, near: Columns, first: Columns | None) -> list[Blocks]:
    """Blocks of queries with the tokens near them, and optionally the first tokens of their row, in groups.

    On a CPU a group has about `SCORES` scores, which stay in its cache; otherwise there is one group.

    Args:
        q: queries [B, T, HQ, D].
        queries: positions of the queries.
        near: columns of the tokens before the queries, as many as a query can see (some may be empty, or all left out
            if there are few queries), and of the queries' own tokens.
        first: columns of other tokens, such as the first ones of the sequence, or None.
    """
    B, T, HQ, _ = q.shape
    past = near.keys.shape[1] - T
    C = min(T, BLOCK if past <= LONG_BLOCK else 2 * BLOCK) if past and not varies(T) else T
    is_one = C == T or q.device.type != "cpu" or torch.compiler.is_compiling()
    if is_one or (size := max(1, SCORES // (B * HQ * C * (past + C))) * C) >= T:
        return [_group(q, queries, near, first, C)]
    tokens_of_groups = (queries.of(slice(i, i + size)) for i in range(0, T, size))
    near_of_groups = _near_columns(near, B, past, size).by_block(B)
    return [
        _group(q_group, tokens, columns.of(slice(past + q_group.shape[1])), first, C)
        for q_group, tokens, columns in zip(q.split(size, 1), tokens_of_groups, near_of_groups)
    ]


def _group(q: Tensor, queries: Tokens, near: Columns, first: Columns | None, C: int) -> Blocks:
    """One group of `near_blocks`: blocks of C queries."""
    B = q.shape[0]
    past = near.keys.shape[1] - q.shape[1]
    tokens = queries.map(lambda x: _blocks_of(x.expand(B, -1), 0, C, -1))
    q_blocks = _blocks_of(q, 0, C)
    near = _near_columns(near, B, past, C)
    if first is not None:
        n = q_blocks.shape[0] // B
        first = first.map(lambda x: x.expand(B, *x.shape[1:]))
        if n > 1:
            first = first.map(lambda x: x.repeat_interleave(n, 0))
        return Blocks.of(q_blocks, tokens, first, near)
    place = torch.arange(past + C, device=q.device)[None]  # distances are the same in all blocks
    return Blocks.of(q_blocks, tokens, near)._replace(q_pos=place[:, past:], k_pos=place)


def _near_columns(near: Columns, B: int, past: int, C: int) -> Columns:
    """The columns that each block of C queries may see, [B * blocks, ...]; B rows with `past` columns before them."""
    tokens = near.tokens.map(lambda x: _blocks_of(x.expand(B, -1), past, C, -1))
    return Columns(
        tokens, _blocks_of(near.keys, past, C), _blocks_of(near.values, past, C), near.sees
    )


def blocks_in_turn(
    q: Tensor,
    queries: Tokens,
    C: int,
    columns: Columns,
    part: Callable[[slice], slice],
    *others: Columns,
) -> Iterator[Blocks]:
    """One block of queries after the other, with the columns that it may see; one block of all if T varies.

    Args:
        q: queries [B, T, HQ, D].
        queries: positions of the queries.
        C: number of queries of a block.
        columns: columns of which a block sees a part.
        part: the part of these columns [S] for a block that is given as a part of the queries [T].
        *others: columns that all blocks see.
    """
    if varies(q.shape[1]):
        yield Blocks.of(q, queries, *others, columns)
        return
    for n, q_block in enumerate(q.split(C, 1)):  # whose backward is cheaper than those of slices
        here = slice(n * C, n * C + C)
        yield Blocks.of(q_block, queries.of(here), *others, columns.of(part(here)))


def rows_of(groups: Iterable[Tensor], like: Tensor) -> Tensor:
    """Rows [B, T, ...], like `like`, from groups of blocks [B * blocks, C, ...]."""
    B, T = like.shape[:2]
    parts = list(groups)
    if len(parts) == 1 and parts[0].shape[:2] == (B, T):
        return parts[0]
    return _joined([blocks.reshape(B, -1, *blocks.shape[2:]) for blocks in parts], 1)[:, :T]


def attended_rows(groups: Iterable[Attended], like: Tensor) -> Attended:
    """`rows_of` for pairs of outputs and masses: outputs [B, T, HQ, V] and masses [B, T, HQ]."""
    o, mass = zip(*groups)
    return rows_of(o, like), rows_of(mass, like)


def full_attention(
    q: Tensor,
    queries: Tokens,
    past: Columns,
    scores: Scores,
    *,
    first: Columns | None = None,
    window: int | None = None,
    is_whole: bool = False,
) -> Tensor:
    """Attention over long windows or all tokens, one long block of queries at a time.

    Args:
        q: queries [B, T, HQ, D].
        queries: positions of the queries.
        past: columns of all tokens; with a window those of as many tokens before the queries, or none, and of the
            queries' own tokens.
        scores: how scores are computed.
        first: columns of other tokens, such as the first ones of the sequence, or None.
        window: number of tokens that a query sees; None: all.
        is_whole: whether each row is one sequence from its beginning, without padding.

    Returns:
        Outputs [B, T, HQ, V], undefined at padding.
    """
    if is_whole and window is None and scores._replace(gates=None).is_plain:
        k = past.keys
        v = past.values
        n = 0 if first is None else first.keys.shape[1]
        if scores.gates is not None:
            q = scores.gates.of_one_product(q, q.shape[2] // k.shape[2])
        if first is not None:  # as many queries, whose output is dropped, make the mask causal
            q = F.pad(q, (0, 0, 0, 0, n, 0))
            k, v = (torch.cat(x, 1) for x in ((first.keys, k), (first.values, v)))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        o = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scores.scaling, enable_gqa=True
        )
        return o.transpose(1, 2)[:, n:]
    T = q.shape[1]
    before = past.keys.shape[1] - q.shape[1]

    def near(here: slice) -> slice:
        # torch.compile would treat a growing bound as a constant
        end = None if here.stop >= T else before + here.stop
        return slice(0 if window is None else max(0, before + here.start - window + 1), end)

    others = [] if first is None else [first]
    groups = blocks_in_turn(q, queries, LONG_BLOCK, past, near, *others)
    return rows_of(map(scores.attend, groups), q)


def softmax_of(scores: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of the visible scores [..., S], and the logarithm of their denominator [..., 1]; see `_Softmax`."""
    return _Softmax.apply(scores, visible)


def joined_softmax(one: Attended, other: Attended) -> Attended:
    """Attention to the union of two sets of keys, from the results for each set."""
    # the mass of an empty set is -inf, and -inf - (-inf) is NaN
    least = torch.finfo(one[1].dtype).min
    masses = [mass.clamp(min=least) for _, mass in (one, other)]
    share = torch.sigmoid(masses[1] - masses[0])[..., None].to(one[0].dtype)
    return torch.lerp(one[0], other[0], share), torch.logaddexp(*masses)


class _Softmax(torch.autograd.Function):
    """Softmax weights exp(s - l) over visible scores s, and l = log sum exp(s) [..., 1], with one backward for both.

    A row that sees nothing has weights of zero and l = -inf.
    """

    @staticmethod
    def forward(ctx, scores, visible):
        scores = scores.masked_fill_(~visible, -torch.inf)  # of no other use
        most = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)
        weights = scores.sub_(most).exp_()
        total = weights.sum(-1, keepdim=True)
        weights.div_(total.clamp(min=1))  # the largest is 1, if anything is visible
        ctx.save_for_backward(weights)
        return weights, most + total.log()

    @staticmethod
    @first_derivatives_only
    def backward(ctx, dweights, dlogsumexp):
        (weights,) = ctx.saved_tensors
        dscores = weights * dweights
        shared = dlogsumexp - dscores.sum(-1, keepdim=True)
        return dscores.addcmul_(weights, shared), None


def _blocks_of(x: Tensor, past: int, C: int, value: float = 0.0) -> Tensor:
    """[B, past + T, ...] -> [B * n, past + C, ...]: blocks of C tokens, each after the `past` ones before it."""
    T = x.shape[1] - past
    if C == T:
        return x
    n = -(-T // C)
    x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, past + n * C - x.shape[1]), value=value)
    if not past:
        return x.unflatten(1, (n, C)).flatten(0, 1)
    return x.unfold(1, past + C, C).flatten(0, 1) if x.ndim == 2 else _Windows.apply(x, past, C)


class _Windows(torch.autograd.Function):
    """Blocks [B * n, past + C, H, D] of x [B, past + n C, H, D]; faster than `unfold`, above all in its backward."""

    @staticmethod
    def forward(ctx, x, past, C):
        ctx.past = past
        ctx.C = C
        ctx.B = len(x)
        return x.unfold(1, past + C, C).transpose(-1, -2).flatten(0, 1).transpose(1, 2)

    @staticmethod
    def backward(ctx, dblocks):
        parts = dblocks.unflatten(0, (ctx.B, -1)).split(ctx.C, 2)  # [B, n, C, H, D] each
        n = parts[0].shape[1]
        H, D = dblocks.shape[2:]
        sizes = ctx.B, n + len(parts) - 1, H
        if dblocks.stride(1) == 1:  # sums are faster in the order of the summands
            dx = dblocks.new_zeros(*sizes, D, ctx.C).movedim(-1, 2)
        else:
            dx = dblocks.new_zeros(*sizes, ctx.C, D).transpose(2, 3)
        for i, part in enumerate(parts):
            dx[:, i : i + n, : part.shape[2]] += part
        return dx.flatten(1, 2)[:, : ctx.past + n * ctx.C], None, None


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
