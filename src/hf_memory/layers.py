"""Parts that mixers and blocks share. What transformers has, we take from it."""

from transformers.models.llama.modeling_llama import LlamaMLP as SwiGLU
from transformers.models.llama.modeling_llama import LlamaRMSNorm as RMSNorm
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding as RotaryEmbedding
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

__all__ = ["RMSNorm", "RotaryEmbedding", "SwiGLU", "apply_rotary_pos_emb"]
