"""Attention to segments and to slots, each of which stands for several older tokens."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from hf_memory.cache import Spec, State, States
from hf_memory.layers import upcast
from hf_memory.mixers.attention_blocks import (
    BLOCK,
    Attended,
    Columns,
    attended_rows,
    blocks_in_turn,
    joined_softmax,
    near_blocks,
)
from hf_memory.mixers.base import Context
from hf_memory.mixers.pasts.ring import last, last_tokens
from hf_memory.mixers.pasts.rows import Past, take
from hf_memory.mixers.transformer.forgetting import TOKENS_READ
from hf_memory.mixers.transformer.windows import SegmentMixer, segment_window
from hf_memory.ops.masks import Tokens, slots_before

COMPRESSIONS = ("mean", "max", "convolution", "most_used")


class NewBlocks(NamedTuple):
    """Blocks of tokens whose slots are new, U for each row."""

    # [B], the number of the first new block, counted from the beginning of the sequence
    first: Tensor
    done: Tensor  # [B], how many blocks are new
    numbers: Tensor  # [B, U], the numbers of the new blocks; -1 if there are fewer
    ends: Tensor  # [B, U], the place of a block's last token among the new tokens
    # [B, U * rate], the places of its tokens among the kept tokens, then the new ones
    places: Tensor


def new_blocks(
    complete: Callable[[Tensor], Tensor],
    tokens_read: Tensor,
    states: States,
    sizes: tuple[int, int],
    rate: int,
) -> NewBlocks:
    """The blocks that get their slots with the new tokens.

    Args:
        complete: how many blocks have slots after a number of tokens [B], from this number.
        tokens_read: [B], the number of tokens read.
        states: the states before the new tokens.
        sizes: the number of tokens that are kept, and that of the new ones.
        rate: the number of tokens of a block.
    """
    before = states["tokens_read"] if states else torch.zeros_like(tokens_read)
    first = complete(before)
    numbers = first[:, None] + torch.arange(sum(sizes) // rate, device=tokens_read.device)
    ends = (numbers + 1) * rate - 1 - before[:, None]
    places = sizes[0] + 1 - rate + ends[..., None] + torch.arange(rate, device=tokens_read.device)
    numbers = numbers.where(ends < (tokens_read - before)[:, None], -1)
    return NewBlocks(
        first,
        complete(tokens_read) - first,
        numbers,
        ends,
        places.clamp(0, sum(sizes) - 1).flatten(1),
    )


class CompressiveMixer(SegmentMixer):
    """Attention to segments and compressed tokens. https://arxiv.org/abs/1911.05507.

    A slot has the mean, the maximum or a learned linear map ("convolution") of its tokens' unrotated keys and values,
    and the position of its last token. As published, the map is trained to preserve the output of attention to the
    tokens, and not by the prediction loss.
    """

    can_have_few_bits = False

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.compress_keys, self.compress_values = (Compression(config) for _ in range(2))

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """The states of `attend`."""
        _, heads, _, D, _ = config.attention_heads
        rate = config.compression_rate
        window = segment_window(config)
        # also those whose tokens are still visible themselves
        slots = config.compressed_length + window.reach // rate
        sizes = {"compressed": slots, "block": rate - 1}
        spec = {
            f"{kind}_{x}": State((n, heads, D), None)
            for kind, n in sizes.items()
            for x in ("keys", "values")
        }
        stored = cls.stored(window, config, layer_idx)
        return stored.spec(heads, D, D) | {"tokens_read": TOKENS_READ} | spec

    def attend(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, States]:
        """The states are those of `segment_window`, `tokens_read`, those of `attend_slots`, with slots that become
        visible later; and, of tokens that do not fill a slot yet, `block_keys` and `block_values`
        [B, compression_rate - 1, H, D], not rotated."""
        q, plain, v = self.projected(hidden_states, context._replace(positions=None))
        tokens, tokens_read = context.tokens_and_count(v)
        q, k = self.rotate(q, plain, context.positions)
        past = self.read_past(segment_window(self.config), k, v, tokens, context)
        near = self.attend_segment(hidden_states, q, tokens, past, context)
        slots, blocks, states = self._slots(plain.detach(), v.detach(), tokens_read, context)
        far, compressed = attend_slots(self, q, tokens, slots, blocks, context.states)
        return joined_softmax(near, far)[0], past.states | states | compressed | {
            "tokens_read": tokens_read
        }

    def _slots(
        self, k: Tensor, v: Tensor, tokens_read: Tensor, context: Context
    ) -> tuple[list[Tensor], NewBlocks, States]:
        """Keys and values [B, U, H, D] of blocks whose last token is new, these blocks, and the states."""
        rate = self.config.compression_rate
        B, T = k.shape[:2]
        read, states = last_tokens(
            context.states, {"block_keys": k, "block_values": v}, rate - 1, context.lengths
        )
        blocks = new_blocks(
            lambda tokens_read: tokens_read // rate,
            tokens_read,
            context.states,
            (rate - 1, T),
            rate,
        )
        slots = []
        for compress, x in zip((self.compress_keys, self.compress_values), read):
            x = compress(take(x, blocks.places).unflatten(1, (-1, rate)).flatten(0, 1)).detach()
            slots.append(x.view(B, -1, *x.shape[2:]))
        if context.positions is not None and self.rotates:
            slots[0] = context.positions.gather(blocks.ends.clamp(0, T - 1)).turn(slots[0])
        return slots, blocks, states

    def own_loss(self, hidden_states: Tensor, context: Context) -> Tensor | None:
        """For a learned map, the squared difference between attention to tokens and to their slots, without positions.

        The queries are those of a segment, and the tokens those that leave its view; where none do, the loss is zero.
        Only the maps get a gradient. Segments begin with these tokens, also if a cache holds others before them.
        """
        if self.config.compression != "convolution":
            return None
        if context.cu_seqlens is not None:
            parts: Any = [
                self.own_loss(hidden_states[:, here], alone) for here, alone in context.apart()
            ]
            return torch.cat(parts, 1)
        L = self.config.segment_length
        B, T = hidden_states.shape[:2]
        back = self.config.past_window // L + 1
        n = -(-T // L)
        if n <= back:
            return torch.zeros_like(upcast(hidden_states[..., 0]))
        with torch.no_grad():
            whole = F.pad(hidden_states, (0, 0, 0, n * L - T)).unflatten(1, (n, L))
            q, k, v = self.split_heads(
                *(proj(whole) for proj in (self.q_proj, self.k_proj, self.v_proj))
            )
            q, k = self.normalize_and_rotate(q, k, None)
            q, k, v = (x.flatten(0, 1) for x in (q[:, back:], k[:, :-back], v[:, :-back]))
        attend = partial(F.scaled_dot_product_attention, scale=self.scaling, enable_gqa=True)
        q, k, v, slot_k, slot_v = (
            x.transpose(1, 2) for x in (q, k, v, self.compress_keys(k), self.compress_values(v))
        )
        with_tokens = attend(q, k, v)  # [B * segments, HQ, L, D]
        with_slots = attend(q, slot_k, slot_v)
        losses = upcast(with_tokens - with_slots).square().mean((1, 3)).view(B, -1)
        return F.pad(losses, (back * L, 0))[:, :T]


class Compression(nn.Module):
    """Compresses keys or values [B, blocks * rate, H, D] to [B, blocks, H, D]."""

    def __init__(self, config):
        super().__init__()
        self.kind = config.compression
        self.rate = config.compression_rate
        if self.kind == "convolution":
            self.weight = nn.Parameter(torch.empty(self.rate, config.head_dim, config.head_dim))

    def init_own_parameters(self) -> None:
        """A learned map starts as the mean."""
        if self.kind == "convolution":
            init.copy_(
                self.weight, torch.eye(self.weight.shape[-1]).expand_as(self.weight) / self.rate
            )

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        blocks = x.unflatten(1, (-1, self.rate))
        if self.kind == "mean":
            return blocks.mean(2)
        if self.kind == "max":
            return blocks.amax(2)
        return torch.einsum("bnrhd,rde->bnhe", blocks, self.weight.to(x.dtype))


class MostUsedMixer(SegmentMixer):
    """Attention to segments and slots, where a slot is one token of its block, chosen for each key-value head.

        u_j = sum_i softmax_j(s_ij),   over the queries i that see the token j

    The token with the largest u_j is chosen, with the key and value that it had in this head, so that its key stays
    rotated. A block gets its slot when no token sees the block any more, since its u_j are then known.
    """

    can_have_few_bits = False

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """The states of `attend`."""
        _, heads, _, D, _ = config.attention_heads
        window = segment_window(config)
        state = State((config.compressed_length, heads, D), None)
        slots = dict.fromkeys(("compressed_keys", "compressed_values"), state)
        usage = State((window.reach - 1, heads))
        stored = cls.stored(window, config, layer_idx)
        return stored.spec(heads, D, D) | slots | {"usage": usage, "tokens_read": TOKENS_READ}

    def attend(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, States]:
        """The states are those of `segment_window`, `tokens_read`, those of `attend_slots`, of blocks that no token
        sees any more, and `usage` [B, segment_length + past_window - 1, H] of the last tokens."""
        q, tokens, past = self.read(segment_window(self.config), hidden_states, context)
        near = self.attend_segment(hidden_states, q, tokens, past, context)
        slots, blocks, usage = self._slots(q, tokens, past, context.states)
        far, compressed = attend_slots(self, q, tokens, slots, blocks, context.states)
        usage = last(usage, context.lengths, segment_window(self.config).reach - 1)
        return joined_softmax(near, far)[0], past.states | {"usage": usage} | compressed

    @torch.no_grad()
    def _slots(
        self, q, tokens: Tokens, past: Past, states: States
    ) -> tuple[list[Tensor], NewBlocks, Tensor]:
        """Keys and values [B, U, H, D] of blocks that leave sight, these blocks, and how much tokens were used."""
        L = self.config.segment_length
        m = self.config.past_window
        rate = self.config.compression_rate
        T = q.shape[1]
        W = L + m - 1
        tokens_read = past.states["tokens_read"]
        usage = self._received(q, tokens, past.near)
        usage = F.pad(usage, (0, 0, W + T - usage.shape[1], 0))
        if states:
            usage = usage + F.pad(states["usage"], (0, 0, 0, T))
        blocks = new_blocks(
            lambda tokens_read: (tokens_read // L * L - m) // rate,
            tokens_read,
            states,
            (W, T),
            rate,
        )
        # [B, U, 1, H]
        best = take(usage, blocks.places).unflatten(1, (-1, rate)).argmax(2, keepdim=True)
        places = blocks.places.unflatten(1, (-1, rate))[..., None].expand(
            -1, -1, -1, best.shape[-1]
        )
        index = places.gather(2, best)[:, :, 0, :, None]
        slots = [
            x.gather(1, index.expand(-1, -1, -1, x.shape[-1])) for x in (past.keys, past.values)
        ]
        return slots, blocks, usage

    def _received(self, q: Tensor, tokens: Tokens, near: Columns) -> Tensor:
        """The attention that each of the columns [B, S, H] receives from queries [B, T, HQ, D]."""
        groups = near_blocks(q, tokens, near, None)
        i = 0
        _, S, H, _ = near.keys.shape
        C = groups[0].queries.shape[1]
        # the last block may be padded
        sums = q.new_zeros(q.shape[0], S + C, H, dtype=upcast(q).dtype)
        for blocks in groups:
            weights, _ = self.scores.weights(blocks)
            # [B, blocks, columns, H]
            received = weights.sum((2, 3)).mT.unflatten(0, (q.shape[0], -1))
            n, seen = received.shape[1:3]
            places = (
                i
                + C * torch.arange(n, device=q.device)[:, None]
                + torch.arange(seen, device=q.device)
            )
            sums.index_add_(1, places.flatten(), received.flatten(1, 2))
            i += n * C
        return sums[:, :S]


def attend_slots(
    mixer: SegmentMixer,
    q: Tensor,
    tokens: Tokens,
    slots: list[Tensor],
    blocks: NewBlocks,
    states: States,
) -> tuple[Attended, States]:
    """Attention of queries [B, T, HQ, D] to former slots and to new ones, keys and values [B, U, H, D] of these blocks.

    The states are `compressed_keys` and `compressed_values` [B, slots, H, D] of the last slots.
    """
    config = mixer.config
    L = config.segment_length
    rate = config.compression_rate
    n = mixer.plain_spec["compressed_keys"].shape[0]
    (keys, values), new = last_tokens(
        states, dict(zip(("compressed_keys", "compressed_values"), slots)), n, blocks.done
    )
    numbers = torch.cat(
        [blocks.first[:, None] + torch.arange(-n, 0, device=q.device), blocks.numbers], 1
    )
    position = torch.where(numbers < 0, -1, (numbers + 1) * rate - 1)
    sees = slots_before(L, config.past_window, config.compressed_length * rate)

    def part(here: slice) -> slice:
        first = max(0, (here.start - L + 1) // rate)
        return slice(first, max(1, (here.stop + L) // rate + 2 + config.compressed_length))

    groups = blocks_in_turn(q, tokens, BLOCK, Columns(Tokens(position), keys, values, sees), part)
    return attended_rows(map(mixer.scores.attend_with_mass, groups), q), new
