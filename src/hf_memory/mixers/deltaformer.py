"""DeltaFormer's mixer: attention over corrected values u, which its states hold in place of values."""

from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_memory.cache import Spec, State, States
from hf_memory.layers import unit_length, upcast
from hf_memory.mixers.attention_blocks import full_attention
from hf_memory.mixers.base import Context, MemoryMixer, Projected
from hf_memory.mixers.pasts.everything import Everything
from hf_memory.mixers.pasts.ring import Ring
from hf_memory.mixers.pasts.rows import New
from hf_memory.mixers.positions import Positions
from hf_memory.ops.deltaformer import corrected_values, read


class DeltaFormerMixer(MemoryMixer):
    """u_t = a_t v_t - beta_t sum_{i<t} write(k_i, k_t) u_i;   o_t = sum_{i<=t} read(k_i, q_t) u_i.

    https://arxiv.org/abs/2505.19488. There is one u for each key-value head. The cache holds keys and u. Without
    `write_rope` it holds each key twice, rotated for reads and not rotated for writes. A softmax read is attention.

    With `cache_bits`, keys are packed, and u is not: later u are computed from it, so that its rounding would depend on
    how a text is divided into calls.
    """

    sees_positions = True
    padding_last = True

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.window = window_of(config, layer_idx)
        if config.beta_mode != "none":
            self.b_proj = nn.Linear(config.hidden_size, config.num_key_value_heads)

    def init_own_parameters(self) -> None:
        """Let beta start at zero if the activation allows it; the mixer then starts as softmax attention."""
        if self.config.beta_mode != "none" and self.config.beta_activation != "sigmoid":
            init.zeros_(self.b_proj.weight)
            init.zeros_(self.b_proj.bias)

    @classmethod
    def exact_up_to(cls, config, layer_idx: int, length: int) -> int | None:
        """See `Convertible.exact_up_to`: attention if beta starts at zero and the read kernel is softmax."""
        is_closed = config.beta_activation != "sigmoid" and config.beta_mode == "erase"
        if not is_closed or config.read_kernel != "softmax":
            return None
        return min(length, window_of(config, layer_idx) or length)

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """The states of `mix`."""
        _, heads, _, D, _ = config.memory_heads
        channels = D if config.write_rope else 2 * D
        spec = past_of(config, layer_idx).spec(heads, channels, D)
        spec["values"] = replace(spec["values"], kind=None)
        return {"tokens_read": State((), torch.long)} | spec

    def project(self, hidden_states: Tensor, positions: Positions | None) -> Projected:
        """q, k and v [B, T, heads, channels], not rotated, and the write strength beta, if there is one."""
        q, k, v = self.project_heads(hidden_states, None)
        beta = self._beta(hidden_states)
        rows = {"q": q, "k": k, "v": v}
        return rows if beta is None else rows | {"beta": beta}

    def mix(self, projected: Projected, context: Context) -> tuple[Tensor, States]:
        """The states are `tokens_read` [B]; and those of `Everything`, or of a `Ring` with a window: `keys`
        [B, tokens, H, D or 2 D], and `values` [B, tokens, H, D], which are u."""
        k_written = projected["k"]
        v = projected["v"]
        q, k = self.rotate(projected["q"], k_written, context.positions)
        tokens, tokens_read = context.tokens_and_count(k)
        keys = k if self.config.write_rope else torch.cat([k, k_written], -1)
        layout = past_of(self.config, self.layer_idx)
        new = New.of_keys(keys, v, layout.kind, context)
        keys, _ = new.seen
        before = layout.before(new, context)
        exists = None if context.attention_mask is None else tokens.position >= 0
        if before is not None:
            keys = torch.cat([before.keys, keys], 1)
            is_new = before.exists.new_ones(v.shape[:2]) if exists is None else exists
            exists = torch.cat([before.exists.expand(len(v), -1), is_new], 1)
        shared = {
            "mask": exists,
            "window": self.window,
            "cu_seqlens": context.cu_seqlens,
            "backend": context.backend,
        }
        u_before = None if before is None else before.values
        written = keys[..., -self.head_dim :]
        u = self._write(written, v, projected.get("beta"), u_before, shared)
        past = layout.read_many(new._replace(values=u, stored_values=u), tokens, context)
        if self.config.read_kernel == "softmax":
            near = past.near._replace(keys=past.near.keys[..., : self.head_dim])
            is_whole = context.is_whole
            o = full_attention(q, tokens, near, self.scores, window=self.window, is_whole=is_whole)
        else:
            k = unit_length(keys[..., : self.head_dim])
            u = u if u_before is None else torch.cat([u_before, u], 1)
            o = read(unit_length(q), k, u, kernel=self.config.read_kernel, **shared)
        return o.flatten(2), past.states | {"tokens_read": tokens_read}

    def _write(
        self, k: Tensor, v: Tensor, beta: Tensor | None, before: Tensor | None, shared: dict
    ) -> Tensor:
        """The new u [B, T, H, D], for keys k [B, S + T, H, D] and u `before` [B, S, H, D] of past tokens."""
        T = v.shape[1]
        k = k if self.config.write_kernel == "softmax" else unit_length(k)
        past = None if before is None else (k[:, :-T], before)
        kinds = {"kernel": self.config.write_kernel, "beta_mode": self.config.beta_mode}
        return corrected_values(k[:, -T:], v, beta, initial_state=past, **kinds, **shared).to(
            v.dtype
        )

    def _beta(self, hidden_states: Tensor) -> Tensor | None:
        """The write strength [B, T, H] in float32: how much of what is read for a key is subtracted from its value."""
        if self.config.beta_mode == "none":
            return None
        beta = upcast(self.b_proj(hidden_states))
        activation = self.config.beta_activation
        return beta if activation == "identity" else getattr(torch, activation)(beta)


def window_of(config, layer_idx: int) -> int | None:
    """Number of tokens that a layer sees; None: all."""
    return config.sliding_window if config.layer_types[layer_idx] == "sliding_memory" else None


def past_of(config, layer_idx: int) -> Everything | Ring:
    """What a layer sees."""
    window = window_of(config, layer_idx)
    return Everything() if window is None else Ring(window, kind="memory", is_long=True)
