"""Attention to segments and to slots, each of which stands for several older tokens."""

from abc import abstractmethod
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from hf_memory.cache import Spec, State, States
from hf_memory.layers import wide
from hf_memory.mixers.attention_blocks import BLOCK, Blocks, Columns, attention_weights, joined_softmax, near_blocks
from hf_memory.mixers.base import Context
from hf_memory.mixers.pasts import SegmentMixer
from hf_memory.mixers.window_attention import after, columns, count_on, last, take
from hf_memory.ops.masks import Tokens, causal, segments, slots_before


class SlotsMixer(SegmentMixer):
    """Base class: attention to a segment and the window before it, and to slots of older tokens.

    Every `compression_rate` tokens become one slot; the last `compressed_length` slots are seen.
    """

    def mix_rows(self, hidden_states, tokens: Tokens, lengths, context: Context) -> tuple[Tensor, States]:
        """The states are those of a `SegmentMixer` and of `slots`."""
        q, plain, v = self.projected(hidden_states, context._replace(positions=None))
        q, k = self.rotate(q, plain, context.positions)
        seen, new_slots = self.slots(plain, (q, k, v), tokens, lengths, context)
        attended, new = self.segment(hidden_states, (q, k, v), tokens, lengths, context)
        parts, L, rate = [], self.config.segment_length, self.config.compression_rate
        for i in range(0, q.shape[1], BLOCK):
            first = max(0, (i - L + 1) // rate)
            end = max(1, (i + BLOCK + L) // rate + 2 + self.config.compressed_length)
            here = slice(i, i + BLOCK)
            parts.append(self.softmax(Blocks.of(q[:, here], tokens.of(here), seen.of(slice(first, end)))))
        far = torch.cat([o for o, _ in parts], 1), torch.cat([mass for _, mass in parts], 1)
        return joined_softmax(attended, far)[0], new | new_slots

    @abstractmethod
    def slots(
        self, plain: Tensor, projected: tuple[Tensor, Tensor, Tensor], tokens: Tokens, lengths, context: Context
    ) -> tuple[Columns, States]:
        """All slots, and their states, from keys that are not rotated, and from q, k and v, which are."""

    def with_former(
        self, slots: dict[str, Tensor], numbers: Tensor, first: Tensor, done: Tensor, states: States
    ) -> tuple[Columns, States]:
        """Append new slots to those of the states, and return all slots and the states with `done` [B] of the new ones.

        Args:
            slots: `keys` and `values` [B, U, H, D] of the new slots.
            numbers: the numbers of their blocks [B, U], -1 if there is none.
            first: the number of the first new block [B].
            done: how many of the new slots are final [B].
            states: the states before.
        """
        rate, n = self.config.compression_rate, slots_of(self.config)
        slots = {name: after(states.get(f"compressed_{name}"), x, n) for name, x in slots.items()}
        new = {f"compressed_{name}": last(x, done, n) for name, x in slots.items()}
        numbers = torch.cat([first[:, None] + torch.arange(-n, 0, device=done.device), numbers], 1)
        position = torch.where(numbers < 0, -1, (numbers + 1) * rate - 1)
        sees = slots_before(self.config.segment_length, self.config.past_window, self.config.compressed_length * rate)
        return Columns(Tokens(position), slots["keys"], slots["values"], sees), new


class CompressiveMixer(SlotsMixer):
    """Attention to segments and compressed tokens. https://arxiv.org/abs/1911.05507.

    A slot has the mean, the maximum or a learned linear map ("convolution") of its tokens' unrotated keys and values,
    and the position of its last token. As published, the map is trained to preserve the output of attention to the
    tokens, and not by the prediction loss.
    """

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.compress_keys, self.compress_values = (Compression(config) for _ in range(2))

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """The states of a `SegmentMixer` and of `slots`."""
        _, heads, _, D, _ = config.attention_heads
        sizes = {"compressed": slots_of(config), "block": config.compression_rate - 1}
        more = {f"{kind}_{x}": State((n, heads, D), None) for kind, n in sizes.items() for x in ("keys", "values")}
        return super().state_spec(config, layer_idx) | more

    def forward(self, hidden_states: Tensor, *args, own_losses: list[Tensor] | None = None, **kwargs):
        """See `MemoryMixer.forward`; in training, the loss of a learned compression is added to the losses."""
        if own_losses is not None and self.training and self.config.compression == "convolution":
            own_losses += self._lost(hidden_states)
        return super().forward(hidden_states, *args, **kwargs)

    def _lost(self, hidden_states: Tensor) -> list[Tensor]:
        """The squared difference between attention to tokens and attention to their slots, without positions.

        The queries are those of a segment, and the tokens those that leave its view. Only the maps get a gradient.
        """
        L, T = self.config.segment_length, hidden_states.shape[1]
        back, n = self.config.past_window // L + 1, -(-T // L)
        if n <= back:
            return []
        with torch.no_grad():
            whole = F.pad(hidden_states, (0, 0, 0, n * L - T)).unflatten(1, (n, L))
            q, k, v = self.split_heads(*(proj(whole) for proj in (self.q_proj, self.k_proj, self.v_proj)))
            q, k = self.normalize_and_rotate(q, k, None)
            q, k, v = (x.flatten(0, 1) for x in (q[:, back:], k[:, :-back], v[:, :-back]))
        attend = partial(F.scaled_dot_product_attention, scale=self.scaling, enable_gqa=True)
        q, k, v, slot_k, slot_v = (x.transpose(1, 2) for x in (q, k, v, self.compress_keys(k), self.compress_values(v)))
        kept, compressed = attend(q, k, v), attend(q, slot_k, slot_v)
        return [(kept - compressed).square().mean()]

    def slots(self, plain, projected, tokens: Tokens, lengths, context: Context) -> tuple[Columns, States]:
        """The states are `compressed_keys` and `compressed_values` [B, slots, H, D], with slots that become visible
        later; and, of tokens that do not fill a slot yet, `block_keys` and `block_values` [B, compression_rate - 1, H,
        D], not rotated. There are new slots for blocks whose last token is new."""
        rate, (B, T) = self.config.compression_rate, plain.shape[:2]
        states, new, slots, read = context.states, {}, {}, {"keys": plain, "values": projected[2]}
        count = states.get("seen", torch.zeros(B, dtype=torch.long, device=read["keys"].device))
        numbers = count[:, None] // rate + torch.arange(-(-(T + rate - 1) // rate), device=count.device)  # [B, U]
        ends = (numbers + 1) * rate - 1 - count[:, None]  # places among the new tokens
        done = count_on(count, lengths, T) // rate - count // rate
        places = (ends[..., None] + torch.arange(rate, device=count.device)).clamp(0, T + rate - 2)
        for name, compress in (("keys", self.compress_keys), ("values", self.compress_values)):
            x = after(states.get(f"block_{name}"), read[name].detach(), rate - 1)
            new[f"block_{name}"] = last(x, lengths, rate - 1)
            slots[name] = compress(take(x, places.flatten(1)).unflatten(1, (-1, rate)).flatten(0, 1))
            slots[name] = slots[name].detach().view(B, -1, *x.shape[2:])
        if context.positions is not None and self.rotates:
            slots["keys"] = context.positions.gather(ends.clamp(0, T - 1)).turn(slots["keys"])
        numbers = numbers.where(ends < (T if lengths is None else lengths[:, None]), -1)
        seen, kept = self.with_former(slots, numbers, count // rate, done, states)
        return seen, new | kept


class Compression(nn.Module):
    """Compresses keys or values [B, blocks * rate, H, D] to [B, blocks, H, D]."""

    def __init__(self, config):
        super().__init__()
        self.kind, self.rate = config.compression, config.compression_rate
        if self.kind == "convolution":
            self.weight = nn.Parameter(torch.empty(self.rate, config.head_dim, config.head_dim))

    def init_own_parameters(self) -> None:
        """A learned map starts as the mean."""
        if self.kind == "convolution":
            init.copy_(self.weight, torch.eye(self.weight.shape[-1]).expand_as(self.weight) / self.rate)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        blocks = x.unflatten(1, (-1, self.rate))
        if self.kind == "mean":
            return blocks.mean(2)
        if self.kind == "max":
            return blocks.amax(2)
        return torch.einsum("bnrhd,rde->bnhe", blocks, self.weight.to(x.dtype))


COMPRESSIONS = ("mean", "max", "convolution", "most_used")


def slots_of(config) -> int:
    """Number of slots in a cache: visible ones, and those whose tokens are still visible themselves."""
    if config.compression == "most_used":  # known only when no token sees the block any more
        return config.compressed_length
    return config.compressed_length + (config.past_window + config.segment_length) // config.compression_rate


class MostUsedMixer(SlotsMixer):
    """Attention to segments and slots, where a slot is one token of its block, chosen for each key-value head.

        u_j = sum_i softmax_j(s_ij),   over the queries i that see the token j

    The token with the largest u_j is chosen, with the key and value that it had in this head, so that its key stays
    rotated. A block gets its slot when no token sees the block any more, since its u_j are then known.
    """

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """The states of a `SegmentMixer` and of `slots`."""
        spec = super().state_spec(config, layer_idx)
        W, heads, D = spec["keys"].shape
        slots = State((slots_of(config), heads, D), None)
        return spec | {"usage": State((W, heads)), "compressed_keys": slots, "compressed_values": slots}

    @torch.no_grad()
    def slots(self, plain, projected, tokens: Tokens, lengths, context: Context) -> tuple[Columns, States]:
        """The states are `compressed_keys` and `compressed_values` [B, compressed_length, H, D] of the last blocks that
        no token sees any more, and `usage` [B, segment_length + past_window - 1, H] of the last tokens."""
        (q, k, v), L, m = projected, self.config.segment_length, self.config.past_window
        rate, W, (B, T), states = self.config.compression_rate, L + m - 1, k.shape[:2], context.states
        read = {name: after(states.get(name), x, W) for name, x in (("keys", k), ("values", v))}
        near = columns(tokens, states.get("seen"), read["keys"], read["values"], causal & segments(L, m))
        usage = self._received(q, tokens, near)
        usage = F.pad(usage, (0, 0, W + T - usage.shape[1], 0))
        if states:
            usage = usage + F.pad(states["usage"], (0, 0, 0, T))
        count = states.get("seen", torch.zeros(B, dtype=torch.long, device=k.device))
        first = (count // L * L - m) // rate
        numbers = first[:, None] + torch.arange((W + T) // rate, device=k.device)
        ends = (numbers + 1) * rate - 1 - count[:, None]  # places among the new tokens
        places = (W + 1 - rate + ends[..., None] + torch.arange(rate, device=k.device)).clamp(0, W + T - 1)
        best = take(usage, places.flatten(1)).unflatten(1, (-1, rate)).argmax(2, keepdim=True)  # [B, U, 1, H]
        index = places[..., None].expand(-1, -1, -1, best.shape[-1]).gather(2, best)[:, :, 0, :, None]
        slots = {name: x.gather(1, index.expand(-1, -1, -1, x.shape[-1])) for name, x in read.items()}
        done = (count_on(count, lengths, T) // L * L - m) // rate - first
        numbers = numbers.where(ends < (T if lengths is None else lengths[:, None]), -1)
        seen, new = self.with_former(slots, numbers, first, done, states)
        return seen, new | {"usage": last(usage, lengths, W)}

    def _received(self, q: Tensor, tokens: Tokens, near: Columns) -> Tensor:
        """The attention that each of the columns [B, S, H] receives from queries [B, T, HQ, D]."""
        groups, i = near_blocks(q, tokens, near, None), 0
        (_, S, H, _), C = near.keys.shape, groups[0].queries.shape[1]
        sums = q.new_zeros(len(q), S + C, H, dtype=wide(q).dtype)  # the last block may be padded
        for blocks in groups:
            weights, _ = attention_weights(blocks, self.scaling, self.config.attn_logit_softcapping, self.relation)
            received = weights.sum((2, 3)).mT.unflatten(0, (len(q), -1))  # [B, blocks, columns, H]
            n, seen = received.shape[1:3]
            places = i + C * torch.arange(n, device=q.device)[:, None] + torch.arange(seen, device=q.device)
            sums.index_add_(1, places.flatten(), received.flatten(1, 2))
            i += n * C
        return sums[:, :S]
