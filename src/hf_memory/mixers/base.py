"""What all mixers share: projections named as in Llama, rotary positions, padding, packing, reading and writing states."""

from abc import ABC, abstractmethod

from torch import Tensor, nn
from transformers.cache_utils import Cache

from hf_memory.cache import memory_layer
from hf_memory.layers import RMSNorm, apply_rotary_pos_emb

States = dict[str, Tensor]


class Projections(nn.Module):
    """q, k, v and o projections that hold the weights of a Llama, Mistral, Qwen2 or Qwen3 attention as they are."""

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        width, kv_width = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.attention_output_bias)
        if config.use_qk_norm:
            self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def heads(self, x: Tensor) -> Tensor:
        """[B, T, H * D] -> [B, T, H, D]; H is read from the tensor, which holds fewer heads under tensor parallelism."""
        return x.unflatten(-1, (-1, self.head_dim))

    def normalize_and_rotate(self, q: Tensor, k: Tensor, position_embeddings) -> tuple[Tensor, Tensor]:
        """Apply q/k norm where the config has it, and rotary positions where they are given, to [B, T, H, D]."""
        if self.config.use_qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if position_embeddings is not None:
            q, k = apply_rotary_pos_emb(q, k, *position_embeddings, unsqueeze_dim=2)
        return q, k


class MemoryMixer(Projections, ABC):
    """A mixer whose past is a state of fixed size. A subclass says in `mix` how the state is read and written."""

    layer_type = "memory"

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        cu_seqlens: Tensor | None = None,
        **kwargs,
    ) -> tuple[Tensor, None]:
        """Mix tokens with each other and with the past.

        Args:
            hidden_states: [B, T, hidden_size].
            position_embeddings: (cos, sin) [1 or B, T, head_dim]; used if the config has `memory_rope`.
            attention_mask: [B, T], zero at padding, or None. A padded token leaves the memory as it is.
            past_key_values: states are read from and written to its layer `layer_idx`.
            cu_seqlens: boundaries [N + 1] of sequences packed into the B * T tokens, or None.
            **kwargs: of other mixers; not used.

        Returns:
            ([B, T, hidden_size], None): a memory has no attention weights to show.
        """
        B, T = hidden_states.shape[:2]
        if not self.config.memory_rope:
            position_embeddings = None
        if cu_seqlens is not None and B > 1:
            hidden_states, position_embeddings = _one_row(hidden_states, position_embeddings)
        layer = None if past_key_values is None else memory_layer(past_key_values, self.layer_idx)
        states = {} if layer is None else layer.read()
        output, new_states = self.mix(hidden_states, position_embeddings, attention_mask, states, cu_seqlens)
        if layer is not None:
            layer.write(T, **new_states)
        return output.view(B, T, -1), None

    @abstractmethod
    def mix(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None,
        attention_mask: Tensor | None,
        states: States,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, States]:
        """The output [B, T, hidden_size] and the states after it; an empty dict of states is an empty memory."""

    def repeat_key_value_heads(self, x: Tensor) -> Tensor:
        """[B, T, num_key_value_heads, D] -> [B, T, num_attention_heads, D]."""
        groups = self.num_key_value_groups
        return x if groups == 1 else x.repeat_interleave(groups, dim=2)


def mask_tokens(x: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Zero x [B, T, ...] where the mask [B, T] is zero."""
    if attention_mask is None:
        return x
    return x * attention_mask.to(x.dtype).view(*attention_mask.shape, *(1 for _ in x.shape[2:]))


def _one_row(hidden_states: Tensor, position_embeddings):
    """[B, T, ...] -> [1, B * T, ...]: packed sequences never cross a row, so rows are packed sequences too."""
    B, T, _ = hidden_states.shape
    if position_embeddings is not None:
        position_embeddings = tuple(x.expand(B, T, -1).reshape(1, B * T, -1) for x in position_embeddings)
    return hidden_states.reshape(1, B * T, -1), position_embeddings
