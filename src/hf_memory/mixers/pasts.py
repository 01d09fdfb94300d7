"""Attention to the first and the last tokens, or to a segment and the tokens before it."""

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.cache import Spec, State, States
from hf_memory.layers import wide
from hf_memory.mixers.attention_blocks import Blocks, Columns, joined_softmax, near_blocks, rows_of, softmax_attention
from hf_memory.mixers.base import Context
from hf_memory.mixers.positions import Positions
from hf_memory.mixers.transformer import Attended, TransformerMixer
from hf_memory.mixers.window_attention import after, columns, count_on, first_tokens, last, present, take
from hf_memory.ops.masks import Tokens, causal, older, own_block, segments, sinks, window


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
