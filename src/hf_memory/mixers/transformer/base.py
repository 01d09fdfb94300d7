"""Attention with any kind of positions, to all tokens."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from hf_memory.cache import Spec, States
from hf_memory.cache_argument import takes_cache
from hf_memory.mixers.attention_blocks import (
    Attended,
    Columns,
    Scores,
    attended_rows,
    full_attention,
    near_blocks,
)
from hf_memory.mixers.base import Context, MemoryMixer, Projected
from hf_memory.mixers.pasts.everything import Everything
from hf_memory.mixers.pasts.ring import Window
from hf_memory.mixers.pasts.rows import New, Past
from hf_memory.mixers.positions import Positions
from hf_memory.mixers.transformer.forgetting import BoundedKeys, ForgetGates, counts, kept_heads
from hf_memory.mixers.transformer.patterns import pattern_of
from hf_memory.mixers.transformer.relations import RELATIONS
from hf_memory.ops.masks import Tokens


class TransformerMixer(MemoryMixer):
    """o_i = sum_{j<=i} softmax_j(s_ij) v_j,   s_ij = q_i k_j / sqrt(D), changed by the positions of i and j.

    Subclasses attend to some of the tokens, or to what stands for them.
    """

    projects_all = False

    takes_packed = True  # whether `attend` keeps packed sequences apart
    can_have_few_bits = True  # whether keys and values can be stored in few bits

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.relation: Any = (
            RELATIONS[config.position](config) if config.position in RELATIONS else None
        )
        self.forget: Any = None
        if config.position == "forget":
            self.forget = ForgetGates(config, self.scaling)
        self.bounded = [
            BoundedKeys(name, [slice(None)])
            for name, state in self.plain_spec.items()
            if name.endswith("keys") and state.growth == "fixed"
        ]

    @property
    def sees_positions(self) -> bool:
        """Whether positions are rotations."""
        return self.rotates

    @property
    def new_part(self) -> nn.Module | None:
        """None with rotary positions, as in a teacher; otherwise all, since queries and keys change their meaning."""
        return None if self.config.position == "rope" else self

    @classmethod
    def exact_up_to(cls, config, layer_idx: int, length: int) -> int | None:
        """See `Convertible.exact_up_to`; for rotary positions."""
        return length

    @property
    def scores(self) -> Scores:
        """See `MemoryMixer.scores`; changed by the relation or the gates."""
        gates = None if self.forget is None else self.forget.sums_in
        return Scores(self.scaling, self.config.attn_logit_softcapping, self.relation, gates)

    @classmethod
    def kind(cls, config, layer_idx: int) -> str | None:
        """What `cache_bits` calls keys and values; None with forget gates, whose sums are channels of keys."""
        if not cls.can_have_few_bits or config.position == "forget":
            return None
        return "window" if config.layer_types[layer_idx] == "sliding_heads" else "memory"

    @classmethod
    def stored(cls, past: Any, config, layer_idx: int) -> Any:
        """A past whose keys and values are called so."""
        return past._replace(kind=cls.kind(config, layer_idx))

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """See `attend`."""
        heads, D = kept_heads(config)
        return counts(config) | cls.stored(Everything(), config, layer_idx).spec(heads, D, D)

    @takes_cache
    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        cu_seqlens: Tensor | None = None,
        step: int | None = None,
        *,
        with_own_loss: bool = False,
        **kwargs,
    ) -> Any:
        """See `MemoryMixer.forward`; with `with_own_loss`, `own_loss` [B, T] is a third result, if there is one."""
        where = attention_mask, cache, cu_seqlens, step
        results = super().forward(hidden_states, position_embeddings, *where, **kwargs)
        if not with_own_loss:
            return results
        inputs = self.inputs(hidden_states, None, attention_mask, cu_seqlens)
        x, context = self.in_context(inputs, {}, cu_seqlens)
        own_loss = self.own_loss(x, context)
        if own_loss is None:
            return results
        return *results, context.in_their_places(own_loss).reshape(hidden_states.shape[:2])

    def own_loss(self, hidden_states: Tensor, context: Context) -> Tensor | None:
        """What trains parts of the mixer besides the prediction: of each token, [B, T]; None if there is nothing.

        The model averages it over tokens as it averages the loss of predictions. What padding has is not used.
        """
        return None

    def project(self, hidden_states: Tensor, positions: Positions | None) -> Projected:
        """The hidden states, of which subclasses make what they need."""
        return {"x": hidden_states}

    def mix(self, projected: Projected, context: Context) -> tuple[Tensor, States]:
        """The heads [B, T, HQ * D] and the states of `attend`; packed sequences have no states."""
        hidden_states = projected["x"]
        if context.cu_seqlens is None or self.takes_packed:
            o, states = self.attend(hidden_states, context)
        else:
            parts = [
                self.attend(hidden_states[:, here], alone)[0] for here, alone in context.apart()
            ]
            o = torch.cat(parts, 1)
            states = {}
        if self.forget is not None and states:
            c = self.forget.sums(self.forget(hidden_states), context)[:, -1]
            states = self.forget.settled(states, c, self.bounded)
        return o[..., : self.value_dim].flatten(2), states

    def attend(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, States]:
        """The heads [B, T, HQ, D], and the states: those of `Everything`, and `tokens_read` [B]."""
        q, tokens, past = self.read(Everything(), hidden_states, context)
        return full_attention(
            q, tokens, past.near, self.scores, is_whole=context.is_whole
        ), past.states

    def read(
        self, cached: Everything | Window, hidden_states: Tensor, context: Context
    ) -> tuple[Tensor, Tokens, Past]:
        """Queries [B, T, HQ, D], their positions, and the past with their keys and values.

        The states of the past are those of `cached`, and `tokens_read` [B].
        """
        q, k, v = self.projected(hidden_states, context)
        tokens, tokens_read = context.tokens_and_count(k)
        past = self.read_past(cached, k, v, tokens, context)
        return q, tokens, past._replace(states=past.states | {"tokens_read": tokens_read})

    def read_past(
        self, cached: Everything | Window, k: Tensor, v: Tensor, tokens: Tokens, context: Context
    ) -> Past:
        """What the tokens of keys and values [B, T, H, D] see, and its states."""
        stored = self.stored(cached, self.config, self.layer_idx)
        return stored.read_many(New.of(k, v, stored.kind, context), tokens, context)

    def attend_near(self, q: Tensor, tokens: Tokens, near: Columns) -> Attended:
        """Attention of queries [B, T, HQ, D] to the tokens near them; see `near_blocks`."""
        return attended_rows(
            map(self.scores.attend_with_mass, near_blocks(q, tokens, near, None)), q
        )

    def projected(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, T, HQ, D], k and v [B, T, H, D], rotated if the context has positions; for `kept_heads` channels."""
        q, k, v = self.project_heads(hidden_states, context.positions)
        pattern = pattern_of(self.config, self.layer_idx)
        self.check_split(q, 1 if pattern is None else pattern.kinds)
        if self.forget is None:
            return q, k, v
        return self.forget.extend(q, k, v, self.forget.sums(self.forget(hidden_states), context))

    def check_split(self, q: Tensor, kinds: int) -> None:
        """Raise an error if tensor parallelism separates heads [B, T, HQ, D] that see different tokens."""
        heads = q.shape[2]
        total = self.config.num_attention_heads
        if heads < total and heads % kinds:
            raise ValueError(
                f"tensor parallelism must give each process a multiple of {kinds} heads with "
                f"pattern={self.config.patterns[self.layer_idx]!r}, got {heads} of {total} heads"
            )
