"""Compression that keeps the token of each block that received the most attention."""

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.cache import Spec, State, States
from hf_memory.layers import wide
from hf_memory.mixers.attention_blocks import BLOCK, Columns, attention_weights, near_blocks
from hf_memory.mixers.base import Context
from hf_memory.mixers.pasts import SlotsMixer, slots_of
from hf_memory.mixers.window_attention import after, columns, count_on, last, take
from hf_memory.ops.masks import Tokens, causal, segments


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
        sums, i = q.new_zeros(len(q), near.keys.shape[1] + 2 * BLOCK, near.keys.shape[2], dtype=wide(q).dtype), 0
        for blocks in near_blocks(q, tokens, near, None):
            weights, _ = attention_weights(blocks, self.scaling, self.config.attn_logit_softcapping, self.relation)
            received = weights.sum((2, 3)).mT.unflatten(0, (len(q), -1))  # [B, blocks, columns, H]
            C, (n, S) = blocks.queries.shape[1], received.shape[1:3]
            places = i + C * torch.arange(n, device=q.device)[:, None] + torch.arange(S, device=q.device)
            sums.index_add_(1, places.flatten(), received.flatten(1, 2))
            i += n * C
        return sums[:, : near.keys.shape[1]]
