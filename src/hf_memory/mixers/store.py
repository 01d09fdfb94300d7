"""Attention to the last tokens, and to the best of a store of older ones, which is searched."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from hf_memory.cache import Spec, State, States
from hf_memory.layers import unit_length
from hf_memory.mixers.attention_blocks import BLOCK, Blocks, attention_scores, joined_softmax, softmax_of
from hf_memory.mixers.base import Context
from hf_memory.mixers.pasts import RowsMixer
from hf_memory.mixers.transformer import Attended
from hf_memory.mixers.window_attention import after, columns, last
from hf_memory.ops.masks import Tokens, causal, older, window

JOINS = ("gate", "softmax", "attention")
LEAST = torch.finfo(torch.float32).tiny  # changes no score but zero


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
        later_first = LEAST * blocks.asked[:, None, None]  # among scores that are exactly zero
        unseen = torch.where(blocks.visible, later_first, -torch.inf)  # adding it is much faster than masked_fill_
        scores = self.scores(blocks).add_(unseen[:, :, None])  # [B, H, G, C, S]
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
