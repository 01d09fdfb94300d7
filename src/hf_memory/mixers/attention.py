"""Softmax attention, full or sliding, through transformers' attention interface."""

from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_memory.cache import (
    Spec,
    check_keys_and_values,
    keep_keys_and_values,
    storage_of,
    update,
)
from hf_memory.cache_argument import takes_cache
from hf_memory.convertible import Convertible
from hf_memory.layers import upcast
from hf_memory.mixers.base import Projected, Projections
from hf_memory.mixers.pasts.rows import states_of_rows
from hf_memory.mixers.positions import Positions
from hf_memory.ops.soft_cap import soft_capped


class AttentionMixer(Convertible, Projections):
    """Attention as in Llama and its successors: grouped heads, and optional biases, q/k norm, window and soft cap."""

    is_causal = True

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        is_sliding = config.layer_types[layer_idx].startswith("sliding")
        self.sliding_window = config.sliding_window if is_sliding else None

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """Keys and values of all tokens, or of those within the window."""
        _, heads, _, K, V = config.attention_heads
        window = (
            config.sliding_window if config.layer_types[layer_idx].startswith("sliding") else None
        )
        at_most = None if window is None else window - 1
        keys, values = states_of_rows("attention", (heads,), K, V, growth="token", at_most=at_most)
        return {"keys": keys, "values": values}

    def check_cache(self, cache: Cache, layer_idx: int) -> None:
        """See `Projections.check_cache`."""
        check_keys_and_values(cache, layer_idx, self.sliding_window)

    @takes_cache
    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        cu_seqlens: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """[B, T, hidden_size] -> ([B, T, hidden_size], attention weights or None).

        Packing is part of the mask, or of `cu_seq_lens_q` and its kin in `kwargs` for attention without masks, which
        would find packed sequences of its own in `position_ids`.
        """
        projected = self.project(hidden_states, Positions(*position_embeddings))
        mixed, weights = self.mix(projected, attention_mask, cache, **kwargs)
        return self.finish(mixed), weights

    def project(self, hidden_states: Tensor, positions: Positions | None) -> Projected:
        """The first step: q, k and v [B, T, heads, D], rotated."""
        q, k, v = self.project_heads(hidden_states, positions)
        return {"q": q, "k": k, "v": v}

    def mix(
        self,
        projected: Projected,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """The second step: attention to the tokens, and to those of a cache, [B, T, width], and its weights or None."""
        q, k, v = (projected[name].transpose(1, 2) for name in "qkv")  # [B, H, T, D]
        k, v = self.seen(k, v, cache)
        output, weights = self.attend(q, k, v, attention_mask, **kwargs)
        return output.flatten(-2), weights

    def seen(self, k: Tensor, v: Tensor, cache: Cache | None) -> tuple[Tensor, Tensor]:
        """New keys and values [B, H, T, D] after those of a cache, if there is one, as queries see them."""
        bits = self.default_bits
        if cache is None:
            rows = storage_of(bits, "attention")
            return rows.seen(k, v, *rows.stored(k, v))
        keep_keys_and_values(cache, self.layer_idx, bits)
        return update(cache, self.layer_idx, k, v)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention_mask: Tensor | None,
        with_own_loss=False,
        **kwargs,
    ):
        """q, k and v [B, H, T, D] -> (outputs [B, T, H, D], attention weights or None)."""
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention
        )
        return attend(
            self,
            q,
            k,
            v,
            attention_mask,
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            softcap=self.softcap,
            **kwargs,
        )


def eager_attention(
    mixer: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    **kwargs,
) -> tuple[Tensor, Tensor]:
    """Attention as in Gemma 2, whose implementation in transformers has a softmax in float32 for float64 too."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = soft_capped(q @ k.mT * scaling, softcap)
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = F.dropout(upcast(scores).softmax(-1).to(q.dtype), dropout, mixer.training)
    return (weights @ v).transpose(1, 2), weights
