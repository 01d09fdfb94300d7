"""Full attention and attention over a window, without a memory, as `granite_swa`."""

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from hf_memory.export import parts
from hf_memory.export.parts import Weights
from hf_memory.export.target import ANY, Target
from hf_memory.modeling.transformer import MemoryTransformerConfig

NO_SINK = -1e30  # the logit of a sink without any share
FREE = ("attention_bias", "attention_output_bias", "mlp_bias", "hidden_act", "memory_rope")
FREE += ("embedding_multiplier", "residual_multiplier")
MLX = '''"""Granite with windows and sinks, which mlx-lm does not have: its Granite, with other attention."""

from dataclasses import dataclass

import mlx.core as mx
from mlx import nn
from mlx_lm.models import granite
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.models.rope_utils import initialize_rope


@dataclass(kw_only=True)
class ModelArgs(granite.ModelArgs):
    head_dim: int
    sliding_window: int | None
    layer_types: list[str]
    layer_rope_theta: list[float]
    rope_parameters: dict


class Attention(nn.Module):
    def __init__(self, args: ModelArgs, layer: int):
        super().__init__()
        D = args.head_dim
        queries = args.num_attention_heads * D
        keys = args.num_key_value_heads * D
        self.q_proj = nn.Linear(args.hidden_size, queries, bias=args.attention_bias)
        self.k_proj = nn.Linear(args.hidden_size, keys, bias=args.attention_bias)
        self.v_proj = nn.Linear(args.hidden_size, keys, bias=args.attention_bias)
        self.o_proj = nn.Linear(queries, args.hidden_size, bias=args.attention_bias)
        self.sinks = mx.zeros(args.num_attention_heads)
        self.heads = args.num_attention_heads, args.num_key_value_heads
        self.scale = args.attention_multiplier
        self.window = args.sliding_window if args.layer_types[layer] == "sliding_attention" else None
        theta = args.layer_rope_theta[layer]
        longest = args.max_position_embeddings
        self.rope = initialize_rope(D, theta, False, args.rope_parameters, longest) if theta else None

    def __call__(self, x, mask=None, cache=None):
        """The mask that is given is the same for all layers, so each makes its own."""
        mask = create_attention_mask(x, cache, window_size=self.window)
        q = self._heads(self.q_proj(x), self.heads[0])
        k = self._heads(self.k_proj(x), self.heads[1])
        v = self._heads(self.v_proj(x), self.heads[1])
        if self.rope is not None:
            offset = 0 if cache is None else cache.offset
            q = self.rope(q, offset=offset)
            k = self.rope(k, offset=offset)
        if cache is not None:
            k, v = cache.update_and_fetch(k, v)
        sinks = self.sinks.astype(q.dtype)
        o = scaled_dot_product_attention(q, k, v, cache=cache, scale=self.scale, mask=mask, sinks=sinks)
        return self.o_proj(o.swapaxes(1, 2).flatten(-2))

    @staticmethod
    def _heads(x, count: int):
        return x.reshape(*x.shape[:2], count, -1).swapaxes(1, 2)


class Model(granite.Model):
    def __init__(self, args: ModelArgs):
        super().__init__(args)
        for i, layer in enumerate(self.layers):
            layer.self_attn = Attention(args, i)

    def make_cache(self):
        windows = [layer.self_attn.window for layer in self.layers]
        return [RotatingKVCache(max_size=window) if window else KVCache() for window in windows]
'''
FILES = {"mlx_model.py": MLX}
ROPE_OF_MLX = ("default", "linear", "llama3")


class GraniteSWA(Target):
    """Granite with windows and sinks: a Llama with biases, in which each layer has a window or sees all tokens."""

    name = model_type = "granite_swa"
    family = MemoryTransformerConfig
    accepts = {**ANY, **dict.fromkeys(FREE), "attention_sinks": None, "use_qk_norm": (False,)}
    layer_types = dict.fromkeys(("sliding_heads", "sliding_attention"), "sliding_attention")
    layer_types |= {"full_attention": "full_attention"}
    has_our_attention = True
    files = FILES

    def check(self, config: MemoryTransformerConfig) -> list[str]:
        partial = config.rotary_dim != config.head_dim
        return (
            [f"rotation of all {config.head_dim} channels of a head, got {config.rotary_dim}"]
            if partial
            else []
        )

    def options(self, config: MemoryTransformerConfig) -> dict:
        theta = config.rope_parameters["rope_theta"]
        rotates = config.no_rope_layers or [1] * config.num_hidden_layers
        return {
            **parts.shared_options(config),
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "hidden_act": config.hidden_act,
            # transformers asks for a window even if no layer has one
            "sliding_window": config.sliding_window or config.max_position_embeddings,
            "rope_parameters": config.rope_parameters,
            "layer_rope_theta": [theta if rotated else 0 for rotated in rotates],
            "attention_bias": _has_bias(config),
            "mlp_bias": config.mlp_bias,
            "attention_multiplier": parts.attention_scale(config),
            "embedding_multiplier": config.embedding_multiplier,
            "residual_multiplier": config.residual_multiplier,
        }

    def attention(self, config: MemoryTransformerConfig, mixer: Weights) -> dict[str, Tensor]:
        """A sink has no value there, but a value has the effect of biases; see `Sinks`."""
        projections = {name: x for name, x in mixer.items() if not name.startswith("sinks.")}
        found = parts.our_attention(projections, with_biases=_has_bias(config))
        out = mixer["o_proj.weight"]
        never = max(NO_SINK, torch.finfo(out.dtype).min)
        found["sinks"] = mixer.get(
            "sinks.logits", torch.full((config.num_attention_heads,), never).to(out)
        )
        if "sinks.values" in mixer:
            u = mixer["sinks.values"]
            of_queries = u.repeat_interleave(
                config.num_attention_heads // config.num_key_value_heads, 0
            ).flatten()
            changes = {"v": -u.flatten(), "o": out.float() @ of_queries.float()}
            for part, change in changes.items():
                bias = found[f"{part}_proj.bias"]
                found[f"{part}_proj.bias"] = (bias + change).to(bias.dtype)
        return found

    def fields(self, config: MemoryTransformerConfig, theirs: PreTrainedConfig) -> dict:
        """The RoPE field that some engines read, and the file for mlx-lm."""
        (module,) = FILES
        return {"rope_theta": theirs.rope_parameters["rope_theta"], "model_file": module}

    def engines(self, config: MemoryTransformerConfig) -> dict[str, str]:
        act = (
            "" if config.hidden_act == "silu" else f"its MLP has silu only, got {config.hidden_act}"
        )
        return {
            "transformers": "",
            "vLLM": act,
            "SGLang": act,
            "llama.cpp": act or parts.rope_fault(config, "default", "llama3"),
            "MLX": act or parts.rope_fault(config, *ROPE_OF_MLX),
        }


def _has_bias(config: MemoryTransformerConfig) -> bool:
    """Whether any projection of attention has a bias, so that all have one there."""
    return parts.has_bias(config) or config.attention_sinks
