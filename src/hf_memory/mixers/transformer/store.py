"""Attention to the last tokens, and to the best of a store of older ones, which is searched."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from hf_memory.cache import Spec, States
from hf_memory.layers import unit_length
from hf_memory.mixers.attention_blocks import (
    BLOCK,
    Attended,
    Blocks,
    Scores,
    attended_rows,
    blocks_in_turn,
    joined_softmax,
    softmax_of,
)
from hf_memory.mixers.base import Context
from hf_memory.mixers.pasts.ring import Window, columns
from hf_memory.mixers.pasts.rows import Past
from hf_memory.mixers.transformer.base import TransformerMixer
from hf_memory.mixers.transformer.forgetting import TOKENS_READ
from hf_memory.ops.exported import first_tokens, sums_of_rows, varies
from hf_memory.ops.masks import Tokens, older, window

JOINS = ("gate", "softmax", "attention")
LEAST = torch.finfo(torch.float32).tiny  # changes no score but zero


class TopTokensMixer(TransformerMixer):
    """Attention to the last tokens, and to those of a store of older ones that have the highest scores.

    One softmax has the scores of the window and the memory_top_k highest ones of the store, which drops the oldest
    tokens first. So it is attention to everything while a text has at most sliding_window + memory_top_k tokens. It has
    no parameters of its own. The store is searched exactly, and gets no gradient.
    """

    padding_last = True
    takes_packed = False

    @classmethod
    def exact_up_to(cls, config, layer_idx: int, length: int) -> int | None:
        """See `Convertible.exact_up_to`: all tokens, as long as those outside the window are few enough to be found."""
        most_found = min(config.memory_top_k, config.memory_size)
        return length if length <= config.sliding_window + most_found else None

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """See `attend`."""
        _, heads, _, D, _ = config.attention_heads
        store = cls.stored(_store(config), config, layer_idx)
        return store.spec(heads, D, D) | {"tokens_read": TOKENS_READ}

    def attend(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, States]:
        """The states are those of a `Window` with the tokens of the store before it, and `tokens_read`."""
        q, tokens, past = self.read(_store(self.config), hidden_states, context)
        remembered = self.best_of_store(self.scores, q, tokens, past, context)
        return joined_softmax(self.attend_near(q, tokens, past.near), remembered)[0], past.states

    def best_of_store(
        self, scores: Scores, q: Tensor, tokens: Tokens, past: Past, context: Context
    ) -> Attended:
        """Attention of queries [B, T, HQ, D] to the memory_top_k tokens of the store that have the highest scores."""
        W = self.config.sliding_window
        k = self.config.memory_top_k
        T = q.shape[1]
        num_stored = past.keys.shape[1] - T
        sees = older(W) & window(num_stored + 1)
        tokens_read = context.states.get("tokens_read")
        stored = columns(tokens, tokens_read, past.keys.detach(), past.values.detach(), sees)
        before = stored.keys.shape[1] - T

        def part(here: slice) -> slice:
            start = max(0, before + here.start - num_stored)
            return slice(start, max(1, before + min(here.stop, T) - W))

        return attended_rows(
            (_best(x, scores, k) for x in blocks_in_turn(q, tokens, BLOCK, stored, part)), q
        )


def _store(config, prefix: str = "") -> Window:
    return Window.of_last(config.sliding_window, prefix=prefix, spare=config.memory_size)


def _near_and_all(config) -> list[Window]:
    """What holds the last tokens, and what holds the older ones too."""
    return [_store(config)._replace(spare=0), _store(config, "memory_")]


def _best(blocks: Blocks, rule: Scores, k: int) -> Attended:
    """Attention to the k keys with the highest scores; among scores that are exactly zero, to the latest keys."""
    tie_breaks = LEAST * blocks.k_pos[:, None, None]
    # adding what hides keys is much faster than masked_fill_
    added = torch.where(blocks.visible, tie_breaks, -torch.inf)
    scores = rule.of(blocks).add_(added[:, :, None])  # [B, H, G, C, S]
    stored = scores.shape[-1]
    if varies(stored):  # a graph with fewer than k scores would be another one
        scores = F.pad(scores, (0, k), value=-torch.inf)
        best, places = scores.topk(k)
    else:
        best, places = scores.topk(min(k, stored))
    weights, mass = softmax_of(best, best.isfinite())
    o = sums_at(places.clamp(max=stored - 1), weights, blocks.values)
    if rule.relation is not None:
        all_weights = torch.zeros_like(scores).scatter(-1, places, weights).flatten(1, 2)
        of_stored = first_tokens(all_weights.movedim(-1, 1), stored).movedim(1, -1)
        of_distances = rule.relation.read(of_stored, blocks)
        o = o if of_distances is None else o + of_distances.to(o.dtype)
    return o, mass[..., 0].permute(0, 3, 1, 2).flatten(2)


def sums_at(places: Tensor, weights: Tensor, values: Tensor) -> Tensor:
    """Sums [B, C, H * G, V] of values [B, S, H, V], which get no gradient, with weights and at places [B, H, G, C, k].

    The values of the places, which are k times as large as the sums, are not stored.
    """
    B, S, H, V = values.shape
    rows = torch.arange(B, device=values.device)[:, None] * S * H + torch.arange(
        H, device=values.device
    )
    rows = places * H + rows[..., None, None, None]
    of_rows = weights.to(values.dtype).flatten(0, -2)
    o = sums_of_rows(rows.flatten(0, -2), values.reshape(-1, V), of_rows)
    return o.view(*places.shape[:-1], V).permute(0, 3, 1, 2, 4).flatten(2, 3)


class MemorizingMixer(TopTokensMixer):
    """Attention to the last tokens, and to the nearest in a store of older ones. https://arxiv.org/abs/2203.08913.

        o = local + gate (remembered - local)
        remembered = sum over the memory_top_k best of softmax(scale cos(q, k)) v

    With `memory_join="softmax"` there is no gate, but one softmax over the scores of the window and those of the best.
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
        if super().new_part is not None:
            return self
        gates = [self.memory_gate] if self.has_gate else []
        return nn.ParameterList([*gates, self.memory_scale])

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
    def exact_up_to(cls, config, layer_idx: int, length: int) -> int | None:
        """See `Convertible.exact_up_to`: attention over the window, as long as there is a gate, which starts closed."""
        if config.memory_join == "gate":
            return min(length, config.sliding_window)
        return length if length <= config.sliding_window else None

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """See `attend`."""
        _, heads, _, D, _ = config.attention_heads
        near, store = (cls.stored(window, config, layer_idx) for window in _near_and_all(config))
        return near.spec(heads, D, D) | store.spec(heads, D, D) | {"tokens_read": TOKENS_READ}

    def attend(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, States]:
        """The states are those of a `Window`, `tokens_read`, and of the window and the store, without rotation and with
        keys of unit length, `memory_keys` and `memory_values` [B, sliding_window + memory_size - 1, H, D]."""
        q, k, v = self.projected(hidden_states, context._replace(positions=None))
        tokens, tokens_read = context.tokens_and_count(k)
        rotated_q, rotated_k = self.rotate(q, k, context.positions)
        near, everything = _near_and_all(self.config)
        past = self.read_past(near, rotated_k, v, tokens, context)
        store = self.read_past(everything, unit_length(k).detach(), v.detach(), tokens, context)
        states = past.states | store.states | {"tokens_read": tokens_read}
        local = self.attend_near(rotated_q, tokens, past.near)
        scaled = unit_length(q) * self.memory_scale.to(q.dtype)[:, None]
        remembered = self.best_of_store(Scores(1.0), scaled, tokens, store, context)
        if not self.has_gate:
            return joined_softmax(local, remembered)[0], states
        gate = self.memory_gate.to(v.dtype) * remembered[1].isfinite()
        return torch.lerp(local[0], remembered[0], gate[..., None]), states
