"""DeltaFormer's mixer: attention over corrected values, with an ordinary KV cache that holds them instead of values."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.cache_utils import Cache, StaticLayer, StaticSlidingWindowLayer

from hf_memory.layers import unit_length
from hf_memory.mixers.attention import AttentionMixer
from hf_memory.mixers.positions import Positions
from hf_memory.ops.deltaformer import Past, corrected_values, read


class BetaProjection(nn.Linear):
    """How much of what the past says of a key is taken from its value, for each head, in float32."""

    def __init__(self, hidden_size: int, heads: int, activation: str):
        super().__init__(hidden_size, heads)
        self.activation = activation

    def init_own_parameters(self) -> None:
        """Closed at first where the activation can be: then the mixer is softmax attention."""
        if self.activation != "sigmoid":
            init.zeros_(self.weight)
            init.zeros_(self.bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[B, T, hidden_size] -> [B, T, H]."""
        beta = super().forward(hidden_states).float()
        return beta if self.activation == "identity" else getattr(torch, self.activation)(beta)


class _Columns(NamedTuple):
    """The past as a cache holds it, and which of its and the present columns are no padding."""

    past: Past
    mask: Tensor | None  # [B, S + T]; None where no token is padding


class DeltaFormerMixer(AttentionMixer):
    """u_t = a_t v_t - beta_t sum_{i<t} write(k_i, k_t) u_i;   o_t = sum_{i<=t} read(k_i, q_t) u_i.

    https://arxiv.org/abs/2505.19488. One u for each key-value head. The cache holds keys and u; where `write_rope` is
    off, a key is kept twice, rotated for the read and as it was for the write.
    """

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        if config.beta_mode != "none":
            self.b_proj = BetaProjection(config.hidden_size, config.num_key_value_heads, config.beta_activation)

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
        beta = self.b_proj(hidden_states) if self.config.beta_mode != "none" else None
        layer = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        columns = _columns(layer, kept, v, attention_mask if cu_seqlens is None else None)
        u = self._write(kept, v, beta, columns, cu_seqlens).to(v.dtype)
        kept_all, u_all = kept.transpose(1, 2), u.transpose(1, 2)  # [B, H, S + T, D]
        if past_key_values is not None:
            kept_all, u_all = past_key_values.update(kept_all, u_all, self.layer_idx)
        if self.config.read_kernel == "softmax":
            keys = kept_all[..., : self.head_dim]
            output, weights = self.attend(q.transpose(1, 2), keys, u_all, attention_mask, **kwargs)
        else:
            output, weights = self._read(q, kept, u, columns, cu_seqlens), None
        return self.o_proj(output.flatten(-2)), weights

    def _write_keys(self, kept: Tensor) -> Tensor:
        keys = kept[..., -self.head_dim :]
        return keys if self.config.write_kernel == "softmax" else unit_length(keys)

    def _write(self, kept: Tensor, v: Tensor, beta: Tensor | None, columns: _Columns, cu_seqlens) -> Tensor:
        past = columns.past._replace(k=self._write_keys(columns.past.k))

        def write(k, v, beta, mask):
            options = {"kernel": self.config.write_kernel, "beta_mode": self.config.beta_mode}
            window = {"window": self.sliding_window, "backend": self._write_backend(past, mask)}
            return corrected_values(k, v, beta, past=_rows(past, len(k)), mask=mask, **options, **window)

        return _each_sequence(write, cu_seqlens, self._write_keys(kept), v, beta, columns.mask)

    def _write_backend(self, past: Past, mask: Tensor | None) -> str:
        """The config's, but kernels only where there is no past, padding or window."""
        has_kernel = self.config.write_kernel == "softmax" and self.sliding_window is None
        wants_kernel = self.config.mixer_backend == "triton"
        if wants_kernel and not (has_kernel and mask is None and past.k.shape[1] == 0):
            return "chunk"
        return self.config.mixer_backend

    def _read(self, q: Tensor, kept: Tensor, u: Tensor, columns: _Columns, cu_seqlens) -> Tensor:
        """With a kernel that the attention interface does not have."""
        past = columns.past

        def read_one(q, k, u, mask):
            before = _rows(past, len(k))
            k, u = torch.cat([before.k[..., : self.head_dim], k], 1), torch.cat([before.u.to(u.dtype), u], 1)
            backend = "reference" if self.config.mixer_backend == "reference" else "chunk"
            options = {"kernel": self.config.read_kernel, "window": self.sliding_window, "backend": backend}
            mask = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device) if mask is None else mask
            return read(unit_length(q), unit_length(k), u, mask=mask, age=past.age, **options)

        return _each_sequence(read_one, cu_seqlens, q, kept[..., : self.head_dim], u, columns.mask)


def _rows(past: Past, B: int) -> Past:
    """Of as many rows: packed sequences are in one, and have no past."""
    return past._replace(k=past.k[:B], u=past.u[:B])


def _each_sequence(op, cu_seqlens: Tensor | None, first: Tensor, *others: Tensor | None) -> Tensor:
    """op of tensors [B, T, ...], or of each packed sequence in their B * T tokens by itself."""
    if cu_seqlens is None:
        return op(first, *others)
    B, T = first.shape[:2]
    rows = [x if x is None else x.flatten(0, 1)[None] for x in (first, *others)]
    bounds = cu_seqlens.tolist()
    ranges = [slice(start, end) for start, end in zip(bounds, bounds[1:]) if end > start]
    parts = [op(*(x if x is None else x[:, tokens] for x in rows)) for tokens in ranges]
    return torch.cat(parts, dim=1).unflatten(1, (B, T))[0]


def _columns(layer, k: Tensor, v: Tensor, attention_mask: Tensor | None) -> _Columns:
    """What is before the tokens k, v [B, T, H, D] in a cache layer, given the mask for the layer's attention."""
    B, T = k.shape[:2]
    if layer is None or not layer.is_initialized:
        past = Past(k[:, :0], v[:, :0], torch.zeros(0, dtype=torch.long, device=k.device))
        return _Columns(past, None if attention_mask is None else _padding(attention_mask, B, T, k)[:, :T])
    past, by_position = _past(layer, k, v)
    S = past.age.shape[0]
    if by_position is None:
        seen = _padding(attention_mask, B, S + T, k)
        return _Columns(past, F.pad(seen, (S + T - seen.shape[1], 0)))
    seen = _padding(attention_mask, B, S, k)
    present = by_position + torch.arange(T, device=k.device)
    return _Columns(past, torch.cat([seen, seen.index_select(1, present)], 1))


def _past(layer: Any, k: Tensor, v: Tensor) -> tuple[Past, Tensor | None]:
    """Keys, u and ages in a cache layer; and where the present tokens go in a buffer that has room for them."""
    if not isinstance(layer, StaticLayer):
        nothing_new = k[:, :0].transpose(1, 2), v[:, :0].transpose(1, 2)
        past_k, past_u = (x.transpose(1, 2) for x in layer.update(*nothing_new))
        return Past(past_k, past_u, torch.arange(past_k.shape[1], 0, -1, device=k.device)), None
    by_position: Tensor | None = layer.cumulative_length
    keys: Any = layer.keys
    u: Any = layer.values
    filled: Tensor | int = layer.cumulative_length
    if isinstance(layer, StaticSlidingWindowLayer) and layer.cumulative_length_int + k.shape[1] > layer.max_cache_len:
        filled, by_position = min(layer.cumulative_length_int, layer.max_cache_len), None
        keys, u = keys[:, :, :filled], u[:, :, :filled]
    age = filled - torch.arange(keys.shape[2], device=k.device)
    return Past(keys.transpose(1, 2), u.transpose(1, 2), age), by_position


def _padding(attention_mask: Tensor | None, B: int, length: int, like: Tensor) -> Tensor:
    """Which columns are seen by any row: [B, columns]; from a mask [B, columns] or [B, 1, T, columns]."""
    if attention_mask is None:
        return torch.ones(B, length, dtype=torch.bool, device=like.device)
    seen = attention_mask if attention_mask.dtype == torch.bool else attention_mask >= 0
    if attention_mask.ndim == 2:
        return attention_mask.bool()
    return seen.any(-2)[:, 0].expand(B, -1)
