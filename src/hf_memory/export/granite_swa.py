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


class GraniteSWA(Target):
    """Granite with windows and sinks: a Llama with biases, in which each layer has a window or sees all tokens."""

    name = model_type = "granite_swa"
    family = MemoryTransformerConfig
    accepts = {**ANY, **dict.fromkeys(FREE), "attention_sinks": None, "use_qk_norm": (False,)}
    layer_types = dict.fromkeys(("sliding_heads", "sliding_attention"), "sliding_attention")
    layer_types |= {"full_attention": "full_attention"}
    has_our_attention = True

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
            "sliding_window": config.sliding_window,
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
        """The RoPE field that some engines read."""
        return {"rope_theta": theirs.rope_parameters["rope_theta"]}

    def engines(self, config: MemoryTransformerConfig) -> dict[str, str]:
        act = (
            "" if config.hidden_act == "silu" else f"its MLP has silu only, got {config.hidden_act}"
        )
        return {
            "transformers": "",
            "vLLM": act,
            "llama.cpp": act or parts.llama_cpp_rope(config, "default", "llama3"),
        }


def _has_bias(config: MemoryTransformerConfig) -> bool:
    """Whether any projection of attention has a bias, so that all have one there."""
    return parts.has_bias(config) or config.attention_sinks
