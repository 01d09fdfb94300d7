"""Softmax attention in blocks of queries, each with the keys that it may see, so that there is no T x T matrix."""

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.ops.contract import first_derivatives_only, varies
from hf_memory.ops.masks import Mask, Tokens, causal, seen

BLOCK = 64  # queries of a block, twice as many if they see more than `LONG_BLOCK` tokens before the block
SCORES = 2**22  # of a group of blocks on a CPU
LONG_BLOCK = 256  # queries of a block if each has its own slice of the keys, whose gradient is as long as all keys


class Columns(NamedTuple):
    """Keys and values, with a mask that says which queries see them."""

    tokens: Tokens  # [1 or B, S]
    keys: Tensor  # [1 or B, S, H, D]
    values: Tensor  # [1 or B, S, H, V]
    sees: Mask = causal

    def map(self, change: Callable[[Tensor], Tensor]) -> "Columns":
        """Apply a function to all tensors."""
        return Columns(self.tokens.map(change), change(self.keys), change(self.values), self.sees)

    def of(self, columns: slice) -> "Columns":
        """Some of the columns."""
        return self.map(lambda x: x[:, columns])

    def by_block(self, B: int) -> list["Columns"]:
        """The columns of each block, from [B * blocks, ...]. The backward of unbind is cheaper than slices."""
        position, sequence = self.tokens
        each = [x.unflatten(0, (B, -1)).unbind(1) for x in (position, self.keys, self.values)]
        sequences = [None] * len(each[0]) if sequence is None else sequence.unflatten(0, (B, -1)).unbind(1)
        return [Columns(Tokens(x, number), k, v, self.sees) for x, k, v, number in zip(*each, sequences)]


class Blocks(NamedTuple):
    """Blocks of queries, with the keys and values that they may see. HQ is a multiple of H."""

    queries: Tensor  # [B * blocks, C, HQ, D]
    keys: Tensor  # [B * blocks, S, H, D]
    values: Tensor  # [B * blocks, S, H, V]
    visible: Tensor  # [B * blocks, 1 or HQ, C, S] bool
    asking: Tensor  # [1 or B * blocks, C], positions of the queries, with any offset
    asked: Tensor  # [1 or B * blocks, S], positions of the keys, with the same offset

    @classmethod
    def of(cls, queries: Tensor, tokens: Tokens, *columns: Columns) -> "Blocks":
        """Queries at these tokens with several sets of columns."""
        keys, values = _joined([x.keys for x in columns], 1), _joined([x.values for x in columns], 1)
        visible = _joined([seen(x.sees, tokens, x.tokens) for x in columns], -1)
        heads, kinds = queries.shape[2], visible.shape[1]
        if kinds not in (1, heads):  # masks by head
            visible = visible.repeat(1, -(-heads // kinds), 1, 1)[:, :heads]
        rows = max(len(x.tokens.position) for x in columns)
        asked = _joined([x.tokens.position.expand(rows, -1) for x in columns], 1)
        return cls(queries, keys, values, visible, tokens.position, asked)

    @property
    def distance(self) -> Tensor:
        """[1 or B * blocks, C, S], distances back from queries to keys; 0 if the key is later or does not exist."""
        return (self.asking[:, :, None] - self.asked[:, None, :]).clamp(min=0)


class Relation(Protocol):
    """A relative position: how attention depends on the distance of two tokens."""

    def __call__(self, scores: Tensor, blocks: Blocks, scaling: float) -> Tensor:
        """Change scores [B * blocks, HQ, C, S], which are in float32."""

    def read(self, weights: Tensor, blocks: Blocks) -> Tensor | None:
        """What weights [B * blocks, HQ, C, S] add to the sum of values, [B * blocks, C, HQ, V], or None."""


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
    if C == T or q.device.type != "cpu" or torch.compiler.is_compiling():
        return [_group(q, queries, near, first, C)]
    size = max(1, SCORES // (B * HQ * C * (past + C))) * C
    if size >= T:
        return [_group(q, queries, near, first, C)]
    asking = (queries.of(slice(i, i + size)) for i in range(0, T, size))
    nears = near_columns(near, B, past, size).by_block(B)
    return [
        _group(mine, tokens, own.of(slice(past + mine.shape[1])), first, C)
        for mine, tokens, own in zip(q.split(size, 1), asking, nears)
    ]


def _group(q: Tensor, queries: Tokens, near: Columns, first: Columns | None, C: int) -> Blocks:
    B, past = len(q), near.keys.shape[1] - q.shape[1]
    asking = queries.map(lambda x: _blocks_of(x.expand(B, -1), 0, C, -1))
    mine, columns = _blocks_of(q, 0, C), [near_columns(near, B, past, C)]
    if first is not None:
        columns = [first.map(lambda x: _repeated(x.expand(B, *x.shape[1:]), len(mine) // B)), *columns]
        return Blocks.of(mine, asking, *columns)
    place = torch.arange(past + C, device=q.device)[None]  # distances are the same in all blocks
    return Blocks.of(mine, asking, *columns)._replace(asking=place[:, past:], asked=place)


def near_columns(near: Columns, B: int, past: int, C: int) -> Columns:
    """The columns that each block of C queries may see, [B * blocks, ...]; B rows with `past` columns before them."""
    tokens = near.tokens.map(lambda x: _blocks_of(x.expand(B, -1), past, C, -1))
    return Columns(tokens, _blocks_of(near.keys, past, C), _blocks_of(near.values, past, C), near.sees)


def rows_of(groups: Iterable[Tensor], like: Tensor) -> Tensor:
    """Rows [B, T, ...], like `like`, from groups of blocks [B * blocks, C, ...]."""
    B, T = like.shape[:2]
    return _joined([blocks.reshape(B, -1, *blocks.shape[2:]) for blocks in groups], 1)[:, :T]


def softmax_attention(
    blocks: Blocks, scaling: float, softcap: float | None, relation: Relation | None = None
) -> Tensor:
    """Outputs [B * blocks, C, HQ, V], undefined at padding; with a soft cap c, scores s become c tanh(s / c)."""
    if softcap is not None or relation is not None:
        return softmax_and_mass(blocks, scaling, softcap, relation)[0]
    q, k, v = (x.transpose(1, 2) for x in blocks[:3])
    visible = blocks.visible | ~blocks.visible.any(-1, keepdim=True)  # a row must see something
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scaling, enable_gqa=True).transpose(1, 2)


def softmax_and_mass(
    blocks: Blocks, scaling: float, softcap: float | None, relation: Relation | None = None
) -> tuple[Tensor, Tensor]:
    """The same with zeros at padding, and the logarithm of the softmax's denominator [B * blocks, C, HQ] in float32."""
    v, C = blocks.values, blocks.queries.shape[1]
    weights, logsumexp = attention_weights(blocks, scaling, softcap, relation)
    o = (weights.to(v.dtype).flatten(2, 3) @ v.transpose(1, 2)).unflatten(2, (-1, C))
    o = o.permute(0, 3, 1, 2, 4).flatten(2, 3)
    beside = None if relation is None else relation.read(weights.flatten(1, 2), blocks)
    return o if beside is None else o + beside.to(o.dtype), logsumexp[..., 0].permute(0, 3, 1, 2).flatten(2)


def attention_weights(
    blocks: Blocks, scaling: float, softcap: float | None, relation: Relation | None
) -> tuple[Tensor, Tensor]:
    """Weights [B * blocks, H, G, C, S] for the G queries of a group, and the logarithms of the denominators."""
    visible = blocks.visible
    visible = visible[:, :, None] if visible.shape[1] == 1 else visible.unflatten(1, (blocks.keys.shape[2], -1))
    return softmax_of(attention_scores(blocks, scaling, softcap, relation), visible)


def attention_scores(blocks: Blocks, scaling: float, softcap: float | None, relation: Relation | None) -> Tensor:
    """Scores [B * blocks, H, G, C, S] of all keys, in float32, of a tensor that nothing else uses."""
    q, k = blocks[:2]
    B, C, HQ, D = q.shape
    H = k.shape[2]
    q = (scaling * q).reshape(B, C, H, HQ // H, D).permute(0, 2, 3, 1, 4).reshape(B, H, -1, D)  # groups share keys
    scores = (q @ k.permute(0, 2, 3, 1)).unflatten(2, (-1, C)).to(torch.promote_types(q.dtype, torch.float32))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if relation is not None:
        scores = relation(scores.flatten(1, 2), blocks, scaling).unflatten(1, (H, -1))
    return scores


def softmax_of(scores: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of the visible scores [..., S], and the logarithm of their denominator [..., 1]; see `_Softmax`."""
    return _Softmax.apply(scores, visible)


def joined_softmax(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The result of `softmax_and_mass` over the union of two sets of keys, from the results for each set."""
    least = torch.finfo(one[1].dtype).min  # the mass of an empty set is -inf, and -inf - (-inf) is NaN
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


def full_attention(
    q: Tensor,
    queries: Tokens,
    past: Columns,
    first: Columns | None = None,
    *,
    scaling: float,
    softcap: float | None,
    window: int | None = None,
    relation: Relation | None = None,
    is_whole: bool = False,
) -> Tensor:
    """Attention over long windows or all tokens, one long block of queries at a time.

    Args:
        q: queries [B, T, HQ, D].
        queries: positions of the queries.
        past: columns of all tokens; with a window those of as many tokens before the queries, or none, and of the
            queries' own tokens.
        first: columns of other tokens, such as the first ones of the sequence, or None.
        scaling: factor of the products of queries and keys.
        softcap: soft cap c of the scores s, which become c tanh(s / c), or None.
        window: number of tokens that a query sees; None: all.
        relation: relative positions, which change the scores, or None.
        is_whole: whether each row is one sequence from its beginning, without padding.

    Returns:
        Outputs [B, T, HQ, V], undefined at padding.
    """
    if is_whole and window is None and softcap is None and relation is None:
        q, k, v = (x.transpose(1, 2) for x in (q, past.keys, past.values))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True).transpose(1, 2)
    parts, others = [], [] if first is None else [first]
    before = past.keys.shape[1] - q.shape[1]
    for i in range(0, q.shape[1], LONG_BLOCK):
        block = slice(i, i + LONG_BLOCK)
        is_last = i + LONG_BLOCK >= q.shape[1]
        end = None if is_last else before + i + LONG_BLOCK  # torch.compile would treat a growing bound as a constant
        near = slice(0 if window is None else max(0, i + before - window + 1), end)
        blocks = Blocks.of(q[:, block], queries.of(block), *others, past.of(near))
        parts.append(softmax_attention(blocks, scaling, softcap, relation))
    return _joined(parts, 1)


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
        ctx.past, ctx.C, ctx.B = past, C, len(x)
        return x.unfold(1, past + C, C).transpose(-1, -2).flatten(0, 1).transpose(1, 2)

    @staticmethod
    def backward(ctx, dblocks):
        parts = dblocks.unflatten(0, (ctx.B, -1)).split(ctx.C, 2)  # [B, n, C, H, D] each
        n, (H, D) = parts[0].shape[1], dblocks.shape[2:]
        sizes = ctx.B, n + len(parts) - 1, H
        if dblocks.stride(1) == 1:  # sums are faster in the order of the summands
            dx = dblocks.new_zeros(*sizes, D, ctx.C).movedim(-1, 2)
        else:
            dx = dblocks.new_zeros(*sizes, ctx.C, D).transpose(2, 3)
        for i, part in enumerate(parts):
            dx[:, i : i + n, : part.shape[2]] += part
        return dx.flatten(1, 2)[:, : ctx.past + n * ctx.C], None, None


def _repeated(x: Tensor, n: int) -> Tensor:
    return x if n == 1 else x.repeat_interleave(n, 0)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
