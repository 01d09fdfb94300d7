"""Attention to the last tokens with a local pattern, to the first and the last ones, or to a segment and a window."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.cache import Spec, State, States
from hf_memory.layers import upcast
from hf_memory.mixers.attention_blocks import (
    BLOCK,
    Attended,
    Blocks,
    Scores,
    joined_softmax,
    near_blocks,
    rows_of,
)
from hf_memory.mixers.base import Context
from hf_memory.mixers.pasts.ring import Window, columns, window_attention
from hf_memory.mixers.pasts.rows import New, Past, take
from hf_memory.mixers.positions import Positions
from hf_memory.mixers.transformer.base import TransformerMixer
from hf_memory.mixers.transformer.forgetting import counts, kept_heads
from hf_memory.mixers.transformer.patterns import exact_with_pattern, pattern_of
from hf_memory.mixers.transformer.relations import AdaptiveSpan
from hf_memory.ops.masks import Tokens, causal, own_block, segments


class LocalMixer(TransformerMixer):
    """Attention to some of the last tokens, and possibly the first ones; the cache holds only these."""

    padding_last = True

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.learns_spans = config.patterns[layer_idx] == "adaptive_span"
        if self.learns_spans:
            self.relation = AdaptiveSpan(config)

    @classmethod
    def exact_up_to(cls, config, layer_idx: int, length: int) -> int | None:
        """See `Convertible.exact_up_to`; a student starts with the longest spans, before their ramps."""
        if config.patterns[layer_idx] == "adaptive_span":
            return length if length <= config.max_span + 1 else None
        return exact_with_pattern(config, layer_idx, length)

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """The states of `attend`."""
        window = cls.stored(pattern_of(config, layer_idx), config, layer_idx)
        heads, D = kept_heads(config)
        return window.spec(heads, D, D) | counts(config)

    def attend(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, States]:
        """The states are those of `window_attention`."""
        q, k, v = self.projected(hidden_states, context)
        pattern = pattern_of(self.config, self.layer_idx)
        pattern = self.stored(pattern, self.config, self.layer_idx)
        reach = None
        # reading spans would break a graph, and costs more than it saves for a few tokens
        reads_spans = self.learns_spans and not torch.compiler.is_compiling()
        if reads_spans and hidden_states.shape[1] > BLOCK:
            reach = math.ceil(self.relation.ramp + float(self.relation.spans.detach().max()))
        new = New.of(k, v, pattern.kind, context)
        return window_attention(q, new, context, pattern, self.scores, reach=reach)

    def own_loss(self, hidden_states: Tensor, context: Context) -> Tensor | None:
        """The mean of learned spans, the same for each token."""
        if not self.learns_spans:
            return None
        return (self.config.span_loss_weight * self.relation.spans.mean()).expand(
            hidden_states.shape[:2]
        )


class InfiniteMixer(TransformerMixer):
    """Attention to the last tokens and the first ones (StreamingLLM). https://arxiv.org/abs/2309.17453.

    Positions are counted within the cache: with S first tokens and a window of W, that of a query is at most S + W - 1.
    So texts can have any length without distances larger than those of training.
    """

    padding_last = True
    takes_packed = False

    @classmethod
    def exact_up_to(cls, config, layer_idx: int, length: int) -> int | None:
        """See `Convertible.exact_up_to`: all tokens, as long as the first and the last ones are all of them."""
        return length if length <= config.num_sink_tokens + config.sliding_window else None

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """See `attend`."""
        window = cls.stored(_first_and_last(config), config, layer_idx)
        heads, D = kept_heads(config)
        spec = window.spec(heads, D, D)
        channels = config.rotating_channels(layer_idx)
        return (
            spec
            | counts(config)
            | ({"last_angles": State((1, channels), None)} if channels else {})
        )

    def attend(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, States]:
        """The states are those of a `Window`, `tokens_read`, and `last_angles` [B, 1, channels], the rotation of the
        largest position."""
        most = self.config.num_sink_tokens + self.config.sliding_window - 1
        q, k, v = self.projected(hidden_states, context._replace(positions=None))
        tokens, tokens_read = context.tokens_and_count(k)
        near_q, k = self.rotate(q, k, context.positions)
        past = self.read_past(_first_and_last(self.config), k, v, tokens, context)
        first_q = near_q  # which see the first tokens
        new = past.states | {"tokens_read": tokens_read}
        if context.positions is not None:
            before = context.states.get("last_angles")
            turned, new["last_angles"] = _last_turn(q, context.positions, tokens, most, before)
            first_q = torch.where((tokens.position <= most)[..., None, None], near_q, turned)
        if past.first is None:
            return self.attend_near(near_q, tokens, past.near)[0], new
        if self.scores.is_plain:
            return self._in_one_call(near_q, first_q, tokens, past), new
        places = tokens.map(lambda x: x.clamp(max=most))
        first = self.scores.attend_with_mass(Blocks.of(first_q, places, past.first))
        return joined_softmax(self.attend_near(near_q, tokens, past.near), first)[0], new

    def _in_one_call(self, q: Tensor, first_q: Tensor, tokens: Tokens, past: Past) -> Tensor:
        """Softmax attention whose queries are q for the tokens that are near, and `first_q` for the first ones.

        One call of fused attention has one set of queries. So their products with the first tokens are computed before,
        and are given to it as further channels of the queries, of which the first tokens have unit vectors. There are
        twice as many, since a product in float32 is the sum of two numbers of a shorter type.
        """
        _, S, H, _ = past.first.keys.shape
        D = q.shape[-1]
        products = torch.einsum(
            "bthgd,bshd->bthgs",
            *(upcast(x) for x in (first_q.unflatten(2, (H, -1)), past.first.keys)),
        )
        products = products.flatten(2, 3)
        more = products.to(q.dtype)
        q = torch.cat([q, more, (products - more).to(q.dtype)], -1)
        unit = F.pad(torch.eye(S, dtype=q.dtype, device=q.device).repeat(1, 2), (D, 0))[
            None, :, None
        ]
        near, first = (
            x._replace(keys=F.pad(x.keys, (0, 2 * S)), values=F.pad(x.values, (0, 2 * S)))
            for x in (past.near, past.first)
        )
        first = first._replace(keys=unit.expand_as(first.keys))
        return rows_of(map(Scores(self.scaling).attend, near_blocks(q, tokens, near, first)), q)[
            ..., :D
        ]


def _first_and_last(config) -> Window:
    return Window.of_last(config.sliding_window, config.num_sink_tokens)


def _last_turn(
    q: Tensor, angles: Positions, tokens: Tokens, most: int, before: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Queries [B, T, H, D] rotated like one at position `most`, and this rotation (or the last token's) as a state."""
    halves = angles.halves().expand(q.shape[0], -1, -1)
    position = tokens.position
    newest = position.amax(1, keepdim=True)
    here = take(halves, (newest.clamp(max=most) - position[:, :1]).clamp(min=0))
    if before is not None:
        here = torch.where(
            ((newest < 0) | (position[:, :1] > most))[..., None], before.to(here.dtype), here
        )
    return Positions.of_halves(here).turn(q), here


class SegmentMixer(TransformerMixer):
    """Attention to a token's segment and the `past_window` tokens before it. https://arxiv.org/abs/1901.02860.

    Hidden states before the segment get no gradient, as if the text were read segment by segment.
    """

    padding_last = True
    takes_packed = False
    passes_gradients = False

    @classmethod
    def exact_up_to(cls, config, layer_idx: int, length: int) -> int | None:
        """See `Convertible.exact_up_to`: all tokens, if the first segment is not longer than what is seen before it."""
        return length if length <= config.past_window else None

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """See `attend`."""
        window = cls.stored(segment_window(config), config, layer_idx)
        heads, D = kept_heads(config)
        return window.spec(heads, D, D) | counts(config)

    def attend(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, States]:
        """The states are those of `segment_window`, and `tokens_read`."""
        q, tokens, past = self.read(segment_window(self.config), hidden_states, context)
        return self.attend_segment(hidden_states, q, tokens, past, context)[0], past.states

    def attend_segment(
        self, hidden_states, q: Tensor, tokens: Tokens, past: Past, context: Context
    ) -> Attended:
        """Attention to the segment and the window before it, of which only the segment gets a gradient."""
        if not torch.is_grad_enabled():
            return self.attend_near(q, tokens, past.near)
        in_segment = causal & own_block(self.config.segment_length)
        m = self.config.past_window
        segment = columns(
            tokens,
            context.states.get("tokens_read"),
            past.keys[:, m:],
            past.values[:, m:],
            in_segment,
        )
        _, k, v = self.projected(hidden_states.detach(), context)
        detached = context._replace(states={name: x.detach() for name, x in context.states.items()})
        window = segment_window(self.config)
        others = window._replace(sees=window.sees & ~in_segment)
        before = self.read_past(others, k, v, tokens, detached).near
        return joined_softmax(
            self.attend_near(q, tokens, segment), self.attend_near(q, tokens, before)
        )


def segment_window(config) -> Window:
    """The segment of a token, and the `past_window` tokens before it."""
    L = config.segment_length
    m = config.past_window
    return Window(causal & segments(L, m), L + m)
