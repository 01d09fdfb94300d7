"""Attention of the Transformers of the survey: any positions, as one mixer."""

from typing import Any

import torch
from torch import Tensor, nn

from hf_memory.cache import Spec, State, States
from hf_memory.mixers.attention_blocks import Columns, full_attention
from hf_memory.mixers.base import Context, MemoryMixer
from hf_memory.mixers.relations import RELATIONS
from hf_memory.ops.masks import Tokens


class TransformerMixer(MemoryMixer):
    """o_i = sum_{j<=i} softmax_j(s_ij) v_j,   s_ij = q_i k_j / sqrt(D) as the position of i and j changes it."""

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.relation: Any = RELATIONS[config.position](config) if config.position in RELATIONS else None

    @property
    def sees_positions(self) -> bool:
        """Where they are rotations."""
        return self.rotates

    @property
    def new_part(self) -> nn.Module | None:
        """None where positions are a teacher's; else all, since they change what queries and keys mean."""
        return None if self.config.position == "rope" else self

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """See `mix`."""
        _, heads, _, K, V = config.attention_heads
        spec = {"count": State((), torch.long), "keys": State((heads, K), None, "token")}
        spec |= {"values": State((heads, V), None, "token")}
        return spec | {"positions": State((), torch.int32, "token", absent=-1)}

    def mix(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, States]:
        """States: `count` [B] tokens read; `keys` and `values` [B, tokens, H, D] and `positions` [B, tokens]."""
        q, k, v = self.split_heads(self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states))
        q, k = self.normalize_and_rotate(q, k, context.positions)
        tokens, count = context.places(k)
        new = {"keys": k, "values": v, "positions": tokens.position.expand(len(k), -1).int()}
        if context.states:
            new = {name: torch.cat([context.states[name].to(x.dtype), x], 1) for name, x in new.items()}
        past = Columns(Tokens(new["positions"], tokens.sequence), new["keys"], new["values"])
        softcap = self.config.attn_logit_softcapping
        o = full_attention(q, tokens, past, scaling=self.scaling, softcap=softcap, relation=self.relation)
        return self.o_proj(o.flatten(2)), {"count": count, **new}
