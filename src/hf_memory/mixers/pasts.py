"""Mixers for long pasts: previous segments, compressed tokens, first tokens, or a store that is searched."""

from abc import abstractmethod
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from hf_memory.cache import Spec, State, States
from hf_memory.layers import unit_length, wide
from hf_memory.mixers.attention_blocks import (
    BLOCK,
    Blocks,
    Columns,
    attention_scores,
    joined_softmax,
    near_blocks,
    rows_of,
    softmax_attention,
    softmax_of,
)
from hf_memory.mixers.base import Context
from hf_memory.mixers.positions import Positions
from hf_memory.mixers.transformer import Attended, TransformerMixer
from hf_memory.mixers.window_attention import (
    after,
    columns,
    count_on,
    first_tokens,
    last,
    present,
    take,
)
from hf_memory.ops.masks import Tokens, causal, older, own_block, segments, sinks, slots_before, window


class RowsMixer(TransformerMixer):
    """Base class: calls `mix_rows` with one sequence in each row and padding at the end."""

    padding_last = True

    def mix(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, States]:
        """The states are `seen` [B], the number of tokens read, and those of the subclass."""
        if context.cu_seqlens is not None:
            return self.apart(hidden_states, context, context.cu_seqlens)
        (B, T), lengths = hidden_states.shape[:2], context.lengths
        seen = context.states.get("seen", hidden_states.new_zeros(B, dtype=torch.long))
        tokens = present(seen, lengths, None, T).map(lambda x: x.expand(B, -1))
        o, states = self.mix_rows(hidden_states, tokens, lengths, context)
        return self.o_proj(o.flatten(2)), states | {"seen": count_on(seen, lengths, T)}

    def mix_rows(self, hidden_states, tokens: Tokens, lengths, context: Context) -> tuple[Tensor, States]:
        """Heads and states for hidden states [B, T, hidden_size], of which `lengths` [B] tokens are real, or all."""
        raise NotImplementedError


class InfiniteMixer(RowsMixer):
    """Attention to the last tokens and the first ones (StreamingLLM). https://arxiv.org/abs/2309.17453.

    Positions are counted within the cache: with S first tokens and a window of W, that of a query is at most S + W - 1.
    So texts can have any length without distances larger than those of training.
    """

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """See `mix_rows`."""
        _, heads, _, D, _ = config.attention_heads
        sizes = {"": config.past_window - 1, "sink_": config.num_global_tokens}
        spec = {f"{kind}{x}": State((n, heads, D), None) for kind, n in sizes.items() for x in ("keys", "values")}
        if channels := config.rotating_channels(layer_idx):
            spec["last_angles"] = State((1, channels), None)
        return spec | {"seen": State((), torch.long)}

    def mix_rows(self, hidden_states, tokens: Tokens, lengths, context: Context) -> tuple[Tensor, States]:
        """The states are `keys` and `values` [B, W - 1, H, D] of the last tokens, `sink_keys` and `sink_values`
        [B, S, H, D] of the first ones, and `last_angles` [B, 1, channels], the rotation of the largest position."""
        W, S, states = self.config.past_window, self.config.num_global_tokens, context.states
        q, k, v = self.projected(hidden_states, context._replace(positions=None))
        asking, k = self.rotate(q, k, context.positions)
        first = first_tokens(k, v, S, states.get("seen"), states, lengths, None)
        new = {"sink_keys": first.keys, "sink_values": first.values}
        k, v = after(states.get("keys"), k, W - 1), after(states.get("values"), v, W - 1)
        new |= {"keys": last(k, lengths, W - 1), "values": last(v, lengths, W - 1)}
        near = columns(tokens, states.get("seen"), k, v, causal & window(W))
        far = asking
        if context.positions is not None:
            turned, new["last_angles"] = _last_turn(q, context.positions, tokens, S + W - 1, states.get("last_angles"))
            far = torch.where((tokens.position <= S + W - 1)[..., None, None], asking, turned)
        first = first._replace(sees=sinks(S) & older(W))
        if self.relation is None and self.config.attn_logit_softcapping is None:
            return self._in_one_call(asking, far, tokens, near, first), new
        places = tokens.map(lambda x: x.clamp(max=S + W - 1))
        last_ones, first_ones = self.softmax_near(asking, tokens, near), self.softmax(Blocks.of(far, places, first))
        return joined_softmax(last_ones, first_ones)[0], new

    def _in_one_call(self, q: Tensor, far: Tensor, tokens: Tokens, near: Columns, first: Columns) -> Tensor:
        """Softmax attention whose queries are q for the tokens that are near, and `far` for the first ones.

        The products with these are more channels of the queries, which the first tokens have as unit vectors: twice,
        since a product in float32 is the sum of two numbers of a shorter type.
        """
        (_, S, H, _), D = first.keys.shape, q.shape[-1]
        products = torch.einsum("bthgd,bshd->bthgs", *(wide(x) for x in (far.unflatten(2, (H, -1)), first.keys)))
        products = products.flatten(2, 3)
        more = products.to(q.dtype)
        q = torch.cat([q, more, (products - more).to(q.dtype)], -1)
        unit = F.pad(torch.eye(S, dtype=q.dtype, device=q.device).repeat(1, 2), (D, 0))[None, :, None]
        near, first = (x._replace(keys=_widened(x.keys, S), values=_widened(x.values, S)) for x in (near, first))
        first = first._replace(keys=unit.expand_as(first.keys))
        groups = near_blocks(q, tokens, near, first)
        return rows_of((softmax_attention(blocks, self.scaling, None) for blocks in groups), q)[..., :D]


def _widened(x: Tensor, S: int) -> Tensor:
    return F.pad(x, (0, 2 * S))


def _last_turn(
    q: Tensor, angles: Positions, tokens: Tokens, place: int, before: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Queries [B, T, H, D] rotated like one at `place`, and this rotation (or the last token's) [B, 1, channels]."""
    halves, position = angles.halves().expand(len(q), -1, -1), tokens.position
    newest = position.amax(1, keepdim=True)
    here = take(halves, (newest.clamp(max=place) - position[:, :1]).clamp(min=0))
    if before is not None:
        here = torch.where(((newest < 0) | (position[:, :1] > place))[..., None], before.to(here.dtype), here)
    return Positions.of_halves(here).turn(q), here


class SegmentMixer(RowsMixer):
    """Attention to a token's segment and the `past_window` tokens before it. https://arxiv.org/abs/1901.02860.

    Hidden states before the segment get no gradient, as if the text were read segment by segment.
    """

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """See `mix_rows`."""
        _, heads, _, D, _ = config.attention_heads
        kept = State((config.segment_length + config.past_window - 1, heads, D), None)
        return {"keys": kept, "values": kept, "seen": State((), torch.long)}

    def mix_rows(self, hidden_states, tokens: Tokens, lengths, context: Context) -> tuple[Tensor, States]:
        """The states are `keys` and `values` [B, segment_length + past_window - 1, H, D] of the last tokens."""
        projected = self.projected(hidden_states, context)
        attended, states = self.segment(hidden_states, projected, tokens, lengths, context)
        return attended[0], states

    def segment(
        self, hidden_states, projected: tuple[Tensor, Tensor, Tensor], tokens: Tokens, lengths, context: Context
    ) -> tuple[Attended, States]:
        """The result of `softmax_and_mass` over the segment and the window before it, and the states.

        `projected` are q, k and v of the hidden states, rotated.
        """
        L, states = self.config.segment_length, context.states
        W, seen = L + self.config.past_window - 1, states.get("seen")
        q, k, v = projected
        kept = [after(states.get(name), x, W) for name, x in (("keys", k), ("values", v))]
        new = {"keys": last(kept[0], lengths, W), "values": last(kept[1], lengths, W)}
        sees = causal & segments(L, self.config.past_window)
        if not torch.is_grad_enabled():
            return self.softmax_near(q, tokens, columns(tokens, seen, kept[0], kept[1], sees)), new
        near = [x[:, W - L + 1 :] for x in kept]
        own = self.softmax_near(q, tokens, columns(tokens, seen, near[0], near[1], causal & own_block(L)))
        _, k, v = self.projected(hidden_states.detach(), context)
        past = [after(states[name].detach() if states else None, x, W) for name, x in (("keys", k), ("values", v))]
        before = self.softmax_near(q, tokens, columns(tokens, seen, past[0], past[1], sees & ~own_block(L)))
        return joined_softmax(own, before), new


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
        return [self.config.compression_loss_weight * (kept - compressed).square().mean()]

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


JOINS = ("gate", "softmax", "attention")


class TopTokensMixer(RowsMixer):
    """Attention to the last tokens, and to those of a store of older ones that have the highest scores.

    One softmax has the scores of the window and the memory_top_k highest ones of the store, which drops the oldest
    tokens first. So it is attention to everything while a text has at most past_window + memory_top_k tokens. It has
    no parameters of its own. The store is searched exactly, and gets no gradient.
    """

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """See `mix_rows`."""
        _, heads, _, D, _ = config.attention_heads
        store = State((config.past_window + config.memory_size - 1, heads, D), None)
        return {"keys": store, "values": store, "seen": State((), torch.long)}

    @property
    def kept(self) -> int:
        """Number of tokens of the window and the store before the present one."""
        return self.config.past_window + self.config.memory_size - 1

    def mix_rows(self, hidden_states, tokens: Tokens, lengths, context: Context) -> tuple[Tensor, States]:
        """The states are `keys` and `values` [B, past_window + memory_size - 1, H, D] of the window and the store."""
        q, k, v = self.projected(hidden_states, context)
        states, N = context.states, self.kept
        k, v = after(states.get("keys"), k, N), after(states.get("values"), v, N)
        new = {"keys": last(k, lengths, N), "values": last(v, lengths, N)}
        remembered = self.remembered(q, tokens, states.get("seen"), k.detach(), v.detach())
        k, v = (x[:, self.config.memory_size :] for x in (k, v))
        near = columns(tokens, states.get("seen"), k, v, causal & window(self.config.past_window))
        return joined_softmax(self.softmax_near(q, tokens, near), remembered)[0], new

    def remembered(self, q: Tensor, tokens: Tokens, count: Tensor | None, keys: Tensor, values: Tensor) -> Attended:
        """The result of `softmax_and_mass` over the best tokens of the store, [B, T, HQ, ...].

        Keys and values are [B, kept + T, H, D], and `count` [B] tokens were read before (see `columns`).
        """
        W, T, parts = self.config.past_window, q.shape[1], []
        seen = columns(tokens, count, keys, values, older(W) & window(self.kept + 1))
        before = seen.keys.shape[1] - T
        for i in range(0, T, BLOCK):
            here = slice(i, i + BLOCK)
            first, end = max(0, before + i - self.kept), max(1, before + min(i + BLOCK, T) - W)
            parts.append(self._best(Blocks.of(q[:, here], tokens.of(here), seen.of(slice(first, end)))))
        o, mass = (torch.cat(x, 1) for x in zip(*parts))
        return o, mass

    def _best(self, blocks: Blocks) -> Attended:
        unseen = torch.where(blocks.visible[:, :, None], 0.0, -torch.inf)  # adding it is much faster than masked_fill_
        scores = self.scores(blocks).add_(unseen)  # [B, H, G, C, S]
        best, places = scores.topk(min(self.config.memory_top_k, scores.shape[-1]))
        weights, mass = softmax_of(best, best.isfinite())
        o = sums_at(places, weights, blocks.values)
        if self.relation is not None:
            all_weights = torch.zeros_like(scores).scatter(-1, places, weights).flatten(1, 2)
            beside = self.relation.read(all_weights, blocks)
            o = o if beside is None else o + beside.to(o.dtype)
        return o, mass[..., 0].permute(0, 3, 1, 2).flatten(2)

    def scores(self, blocks: Blocks) -> Tensor:
        """Scores of the tokens of the store, [B, H, G, C, S]."""
        return attention_scores(blocks, self.scaling, self.config.attn_logit_softcapping, self.relation)


def sums_at(places: Tensor, weights: Tensor, values: Tensor) -> Tensor:
    """Sums [B, C, H * G, V] of values [B, S, H, V], which get no gradient, with weights and at places [B, H, G, C, k].

    The values of the places, which are k times as large as the sums, are not stored.
    """
    B, S, H, V = values.shape
    rows = torch.arange(B, device=values.device)[:, None] * S * H + torch.arange(H, device=values.device)
    rows = places * H + rows[..., None, None, None]
    o = F.embedding_bag(
        rows.flatten(0, -2),
        values.reshape(-1, V),
        per_sample_weights=weights.to(values.dtype).flatten(0, -2),
        mode="sum",
    )
    return o.view(*places.shape[:-1], V).permute(0, 3, 1, 2, 4).flatten(2, 3)


class MemorizingMixer(TopTokensMixer):
    """Attention to the last tokens, and to the nearest in a store of older ones. https://arxiv.org/abs/2203.08913.

        o = local + gate (remembered - local)
        remembered = sum over the memory_top_k best of softmax(scale cos(q, k)) v

    or both in one softmax, over the scores of the window and those of the best.
    The store has unrotated keys. The gate is a learned number for each head; at 0 the mixer is attention over a
    window, and the gate has a gradient.
    """

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.has_gate = config.memory_join == "gate"
        if self.has_gate:
            self.memory_gate = nn.Parameter(torch.empty(config.num_attention_heads))
        self.memory_scale = nn.Parameter(torch.empty(config.num_attention_heads))

    @property
    def new_part(self) -> nn.Module | None:
        """The part that reads the store; the whole mixer if its positions are not rotary as in a teacher."""
        own = [self.memory_gate, self.memory_scale] if self.has_gate else [self.memory_scale]
        return nn.ParameterList(own) if super().new_part is None else self

    def init_own_parameters(self) -> None:
        """The gate starts at one half, and the scale so large that one key can dominate many others."""
        if self.has_gate:
            init.constant_(self.memory_gate, 0.5)
        init.constant_(self.memory_scale, 20.0)

    def start_open(self, half_life: int) -> None:
        """Close the gate, so that the mixer equals attention over its window."""
        if self.has_gate:
            self.memory_gate.zero_()

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """See `mix_rows`."""
        spec = super().state_spec(config, layer_idx)
        _, heads, _, D, _ = config.attention_heads
        near = State((config.past_window - 1, heads, D), None)
        return {"memory_keys": spec["keys"], "memory_values": spec["values"]} | spec | {"keys": near, "values": near}

    def mix_rows(self, hidden_states, tokens: Tokens, lengths, context: Context) -> tuple[Tensor, States]:
        """The states are `keys` and `values` [B, past_window - 1, H, D] of the last tokens, and `memory_keys` and
        `memory_values` [B, past_window + memory_size - 1, H, D] of the window and the store."""
        W, N, states = self.config.past_window, self.kept, context.states
        q, k, v = self.projected(hidden_states, context._replace(positions=None))
        asking, keys = self.rotate(q, k, context.positions)
        near = [after(states.get(name), x, W - 1) for name, x in (("keys", keys), ("values", v))]
        new = {name: last(x, lengths, W - 1) for name, x in zip(("keys", "values"), near)}
        seen = columns(tokens, states.get("seen"), near[0], near[1], causal & window(W))
        local = self.softmax_near(asking, tokens, seen)
        stored = {"memory_keys": unit_length(k).detach(), "memory_values": v.detach()}
        stored = {name: after(states.get(name), x, N) for name, x in stored.items()}
        new |= {name: last(x, lengths, N) for name, x in stored.items()}
        scaled = unit_length(q) * self.memory_scale.to(q.dtype)[:, None]
        remembered = self.remembered(scaled, tokens, states.get("seen"), stored["memory_keys"], stored["memory_values"])
        if not self.has_gate:
            return joined_softmax(local, remembered)[0], new
        gate = self.memory_gate.to(v.dtype) * remembered[1].isfinite()
        return torch.lerp(local[0], remembered[0], gate[..., None]), new

    def scores(self, blocks: Blocks) -> Tensor:
        """The products of queries and keys, without positions."""
        return attention_scores(blocks, 1.0, None, None)
