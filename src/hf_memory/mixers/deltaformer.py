"""DeltaFormer's mixer: attention over corrected values u, which an ordinary KV cache holds in place of values."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.cache_utils import Cache, StaticLayer, StaticSlidingWindowLayer

from hf_memory.cache import Spec, update
from hf_memory.layers import unit_length, wide
from hf_memory.mixers.attention import AttentionMixer
from hf_memory.mixers.positions import Positions
from hf_memory.ops.deltaformer import corrected_values, read


class Past(NamedTuple):
    """The content of a cache, and a mask of real tokens among its columns and the new tokens."""

    kept: Tensor  # [B, S, H, K], or [B, S, H, 2 K]: keys for reads, then keys for writes
    u: Tensor  # [B, S, HV, V]
    mask: Tensor | None  # [B, S + T]; None if all columns are tokens


class DeltaFormerMixer(AttentionMixer):
    """u_t = a_t v_t - beta_t sum_{i<t} write(k_i, k_t) u_i;   o_t = sum_{i<=t} read(k_i, q_t) u_i.

    https://arxiv.org/abs/2505.19488. There is one u for each key-value head. The cache holds keys and u. Without
    `write_rope` it holds each key twice, rotated for reads and not rotated for writes. A softmax read is attention.
    """

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        if config.beta_mode != "none":
            self.b_proj = nn.Linear(config.hidden_size, config.num_key_value_heads)

    def init_own_parameters(self) -> None:
        """Let beta start at zero if the activation allows it; the mixer then starts as softmax attention."""
        if self.config.beta_mode != "none" and self.config.beta_activation != "sigmoid":
            init.zeros_(self.b_proj.weight)
            init.zeros_(self.b_proj.bias)

    @property
    def new_part(self) -> nn.Module | None:
        """The whole mixer, as for memories."""
        return self

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """The states of attention; without `write_rope`, keys are stored twice."""
        spec = super().state_spec(config, layer_idx)
        heads, D = spec["keys"].shape
        return spec | {"keys": replace(spec["keys"], shape=(heads, D if config.write_rope else 2 * D))}

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        cu_seqlens: Tensor | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """[B, T, hidden_size] -> ([B, T, hidden_size], attention weights or None); see `AttentionMixer`."""
        q, k, v = self.split_heads(self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states))
        q, k_written = self.normalize_and_rotate(q, k, None)
        q, k = self.rotate(q, k_written, Positions(*position_embeddings))
        kept = k if self.config.write_rope else torch.cat([k, k_written], -1)
        layer = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        past = _past(layer, kept, v, attention_mask if cu_seqlens is None else None)
        u = self._write(kept, v, self._beta(hidden_states), past, cu_seqlens)
        output, weights = None, None
        if self.config.read_kernel != "softmax":
            output = self._read(q, k, u, past, cu_seqlens)  # before `update`, which may overwrite the past
        kept, u = kept.transpose(1, 2), u.transpose(1, 2)  # [B, H, T, D]
        if past_key_values is not None:
            kept, u = update(past_key_values, self.layer_idx, kept, u)  # and those of the past
        if output is None:
            output, weights = self.attend(q.transpose(1, 2), kept[..., : self.head_dim], u, attention_mask, **kwargs)
        return self.o_proj(output.flatten(-2)), weights

    def _beta(self, hidden_states: Tensor) -> Tensor | None:
        """The write strength [B, T, H] in float32: how much of what is read for a key is subtracted from its value."""
        if self.config.beta_mode == "none":
            return None
        beta, activation = wide(self.b_proj(hidden_states)), self.config.beta_activation
        return beta if activation == "identity" else getattr(torch, activation)(beta)

    def _write(self, kept: Tensor, v: Tensor, beta: Tensor | None, past: Past, cu_seqlens: Tensor | None) -> Tensor:
        keys, before = (x[..., -self.head_dim :] for x in (kept, past.kept))
        if self.config.write_kernel != "softmax":
            keys, before = unit_length(keys), unit_length(before)
        u = corrected_values(
            _row(keys, cu_seqlens),
            _row(v, cu_seqlens),
            None if beta is None else _row(beta, cu_seqlens),
            kernel=self.config.write_kernel,
            beta_mode=self.config.beta_mode,
            mask=past.mask,
            window=self.sliding_window,
            initial_state=None if cu_seqlens is not None else (before, past.u),
            cu_seqlens=cu_seqlens,
            backend=self.config.mixer_backend,
        )
        return u.view_as(v).to(v.dtype)

    def _read(self, q: Tensor, k: Tensor, u: Tensor, past: Past, cu_seqlens: Tensor | None) -> Tensor:
        """Read with a kernel that transformers' attention interface does not have."""
        k, u = torch.cat([past.kept[..., : self.head_dim], k], 1), torch.cat([past.u.to(u.dtype), u], 1)
        o = read(
            _row(unit_length(q), cu_seqlens),
            _row(unit_length(k), cu_seqlens),
            _row(u, cu_seqlens),
            kernel=self.config.read_kernel,
            mask=past.mask,
            window=self.sliding_window,
            cu_seqlens=cu_seqlens,
            backend=self.config.mixer_backend,
        )
        return o.view(*q.shape[:3], -1)


def _row(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Put packed sequences into one row."""
    return x if cu_seqlens is None else x.flatten(0, 1)[None]


def _past(layer: Any, k: Tensor, v: Tensor, attention_mask: Tensor | None) -> Past:
    """The past of the tokens k, v [B, T, H, D] in a cache layer, given the mask for the layer's attention."""
    B, T = k.shape[:2]
    if layer is None or not layer.is_initialized:
        return Past(k[:, :0], v[:, :0], None if attention_mask is None else _tokens(attention_mask, B)[:, :T])
    if isinstance(layer, StaticLayer):
        return _past_in_buffer(layer, k, attention_mask)
    nothing_new = k[:, :0].transpose(1, 2), v[:, :0].transpose(1, 2)
    past_k, past_u = (x.transpose(1, 2) for x in layer.update(*nothing_new))
    mask = None
    if attention_mask is not None:
        mask = _tokens(attention_mask, B)
        mask = F.pad(mask, (past_k.shape[1] + T - mask.shape[1], 0))
    return Past(past_k, past_u, mask)


def _past_in_buffer(layer: Any, k: Tensor, attention_mask: Tensor | None) -> Past:
    """The same for a static cache, which has columns for tokens that were not read yet."""
    (B, T), S, filled = k.shape[:2], layer.max_cache_len, layer.cumulative_length
    keys, u = layer.keys.transpose(1, 2), layer.values.transpose(1, 2)
    columns = torch.arange(S, device=k.device)
    if isinstance(layer, StaticSlidingWindowLayer) and layer.cumulative_length_int + T > S:
        S = min(layer.cumulative_length_int, S)
        seen = k.new_ones(B, S + T, dtype=torch.bool) if attention_mask is None else _tokens(attention_mask, B)
        return Past(keys[:, :S], u[:, :S], F.pad(seen, (S + T - seen.shape[1], 0)))
    seen = k.new_ones(B, S, dtype=torch.bool) if attention_mask is None else _tokens(attention_mask, B)
    present = seen.index_select(1, filled + torch.arange(T, device=k.device))
    return Past(keys, u, torch.cat([seen & (columns < filled), present], 1))


def _tokens(attention_mask: Tensor, B: int) -> Tensor:
    """The columns that any query sees, [B, columns] bool, from a mask [B, columns] or [B, 1, T, columns]."""
    if attention_mask.ndim == 2:
        return attention_mask.bool()
    seen = attention_mask if attention_mask.dtype == torch.bool else attention_mask >= 0
    return seen.any(-2)[:, 0].expand(B, -1)
