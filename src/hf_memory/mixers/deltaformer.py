"""DeltaFormer's mixer: attention over corrected values u, which its states hold in place of values."""

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_memory.cache import Spec, State, States
from hf_memory.layers import unit_length, upcast
from hf_memory.mixers.attention_blocks import Columns, full_attention
from hf_memory.mixers.base import Context, MemoryMixer
from hf_memory.mixers.pasts import take
from hf_memory.ops.bits import pack, rounded, unpack
from hf_memory.ops.deltaformer import corrected_values, read
from hf_memory.ops.exported import varies
from hf_memory.ops.layout import true_first
from hf_memory.ops.masks import Tokens, causal, window


class DeltaFormerMixer(MemoryMixer):
    """u_t = a_t v_t - beta_t sum_{i<t} write(k_i, k_t) u_i;   o_t = sum_{i<=t} read(k_i, q_t) u_i.

    https://arxiv.org/abs/2505.19488. There is one u for each key-value head. The cache holds keys and u. Without
    `write_rope` it holds each key twice, rotated for reads and not rotated for writes. A softmax read is attention.

    With `cache_bits`, u is computed from those u of its own call that are not rounded yet, and from rounded ones of
    earlier calls; so results depend on how a text is divided into calls, by a part of what rounding changes.
    """

    sees_positions = True

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
        W = window_of(config, layer_idx)
        at_most = None if W is None else W - 1
        bits = config.bits_of("memory")
        channels = D if config.write_rope else 2 * D
        keys = State((heads, channels), None, "token", at_most).in_bits(bits)
        u = State((heads, D), None, "token", at_most).in_bits(bits)
        positions = State((), torch.int32, "token", at_most, absent=-1)
        return {
            "tokens_read": State((), torch.long),
            "keys": keys,
            "values": u,
            "positions": positions,
        }

    @classmethod
    def kinds_in_bits(cls, config, layer_idx: int) -> tuple[str, ...]:
        """See `Projections.kinds_in_bits`."""
        return ("memory",)

    def mix(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, States]:
        """The states are `tokens_read` [B]; and of all tokens, or of those within the window, `keys` [B, tokens, H, D
        or 2 D], `values` [B, tokens, H, D], which are u, and `positions` [B, tokens]."""
        q, k_written, v = self.project_heads(hidden_states, None)
        q, k = self.rotate(q, k_written, context.positions)
        tokens, tokens_read = context.tokens_and_count(k)
        cached_k = k if self.config.write_rope else torch.cat([k, k_written], -1)
        cached_k, stored_k = self._rounded(cached_k)
        position = tokens.position.expand(k.shape[0], -1).int()
        before = self._in_numbers(context, cached_k)
        past, _ = before.grown({"keys": cached_k, "positions": position})
        is_full = context.is_whole or context.cu_seqlens is not None
        shared = {
            "mask": None if is_full else past["positions"] >= 0,
            "window": self.window,
            "cu_seqlens": context.cu_seqlens,
            "backend": self.config.mixer_backend,
        }
        u = self._write(
            past["keys"][..., -self.head_dim :], v, self._beta(hidden_states), before, shared
        )
        u, stored_u = self._rounded(u)
        past |= before.grown({"values": u})[0]
        k = past["keys"][..., : self.head_dim]
        u = past["values"]
        if self.config.read_kernel == "softmax":
            sees = causal if self.window is None else causal & window(self.window)
            columns = Columns(Tokens(past["positions"], tokens.sequence), k, u, sees)
            o = full_attention(
                q, tokens, columns, self.scores, window=self.window, is_whole=context.is_whole
            )
        else:
            o = read(unit_length(q), unit_length(k), u, kernel=self.config.read_kernel, **shared)
        stored = past
        if stored_k is not cached_k:
            new = {"keys": stored_k, "positions": position, "values": stored_u}
            stored, _ = context.grown(new)
        states = self._kept(stored, shared["mask"])
        return self.o_proj(o.flatten(2)), {"tokens_read": tokens_read} | states

    def _rounded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [B, T, H, ...] as later tokens see them, and as the states have them: both are x without bits."""
        bits = self.config.bits_of("memory")
        if bits is None:
            return x, x
        packed = pack(x, bits)
        return rounded(x, packed, bits), packed

    def _in_numbers(self, context: Context, keys: Tensor) -> Context:
        """The context with the states' keys, which have the channels of these, and u as numbers."""
        bits = self.config.bits_of("memory")
        if bits is None or not context.states:
            return context
        channels = {"keys": keys.shape[-1], "values": self.value_dim}
        numbers = {
            name: unpack(context.states[name], size, bits, keys.dtype)
            for name, size in channels.items()
        }
        return context._replace(states=context.states | numbers)

    def _kept(self, past: States, mask: Tensor | None) -> States:
        """The last tokens that the window of the next token sees, with padding before them; or all."""
        if self.window is None:
            return past
        before = past["values"].shape[1] - self.window + 1
        first = torch.sym_max(0, before) if varies(before) else max(0, before)
        if mask is None:
            return {name: x[:, first:] for name, x in past.items()}
        order = true_first(~mask)[:, first:]
        return {name: take(x, order) for name, x in past.items()}

    def _write(
        self, k: Tensor, v: Tensor, beta: Tensor | None, context: Context, shared: dict
    ) -> Tensor:
        """The new u [B, T, H, D], for keys k [B, S + T, H, D] of past and new tokens."""
        T = v.shape[1]
        k = k if self.config.write_kernel == "softmax" else unit_length(k)
        past = (k[:, :-T], context.states["values"]) if context.states else None
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
