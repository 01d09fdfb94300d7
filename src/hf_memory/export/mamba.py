"""The Mamba-2 gate as `granitemoehybrid` without experts, and as `mamba2`."""

import math

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from hf_memory.export import parts
from hf_memory.export.parts import Weights
from hf_memory.export.target import ANY, Target
from hf_memory.modeling.gated_linear_attention import GatedLinearAttentionConfig

# inner width relative to hidden_size in llama.cpp; a GGUF file is padded to it
LLAMA_CPP_EXPAND = 2
# mlx-lm's default for Granite would be (0.001, 100)
UNLIMITED = {"time_step_limit": [0.0, math.inf]}
FREE = (
    "attention_bias",
    "attention_output_bias",
    "output_gate",
    "gate_low_rank_dim",
    "gate_logit_normalizer",
)
MAMBA = {**ANY, **dict.fromkeys(FREE), "gate": ("mamba2",)}


class Granite(Target):
    """Granite 4 without experts.

    Args:
        expand: smallest inner width as a multiple of hidden_size; see `_sizes`.
    """

    name = "granite"
    model_type = "granitemoehybrid"
    family = GatedLinearAttentionConfig
    accepts = {**MAMBA, "embedding_multiplier": None}
    memory_name = "mamba"
    has_our_attention = True

    def __init__(self, expand: int | None = None):
        self.expand = expand

    def check(self, config: GatedLinearAttentionConfig) -> list[str]:
        faults = _check(config)
        kept = parts.kept_layers(config)
        rotates = config.no_rope_layers
        if rotates is not None and len({bool(rotates[i]) for i in kept}) > 1:
            faults.append(
                f"no_rope_layers the same in all layers that keep attention, got {rotates}"
            )
        if kept and config.use_qk_norm:
            faults.append("use_qk_norm=False (attention has no q/k norm there), got True")
        if kept and config.head_dim * config.num_attention_heads != config.hidden_size:
            expected = f"hidden_size / num_attention_heads = {config.hidden_size / config.num_attention_heads:g}"
            faults.append(f"head_dim={expected}, got {config.head_dim}")
        if kept and config.rope_parameters.get("partial_rotary_factor", 1.0) != 1:
            faults.append(
                f"partial_rotary_factor=1, got {config.rope_parameters['partial_rotary_factor']}"
            )
        return faults

    def options(self, config: GatedLinearAttentionConfig) -> dict:
        n_groups, heads, expand = _sizes(config, self.expand)
        *_, K, V = config.memory_heads
        kept = parts.kept_layers(config)
        rope = config.no_rope_layers
        rotates = kept and (rope is None or rope[kept[0]])
        return {
            **parts.shared_options(config),
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads if kept else 1,
            "rope_parameters": config.rope_parameters,
            "position_embedding_type": "rope" if rotates else "nope",  # null would mean RoPE in MLX
            "attention_bias": parts.has_bias(config),
            "attention_multiplier": parts.attention_scale(config),
            "embedding_multiplier": config.embedding_multiplier,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": config.intermediate_size,
            "mamba_n_groups": n_groups,
            "mamba_n_heads": heads,
            "mamba_d_state": K,
            "mamba_d_head": V,
            "mamba_d_conv": config.linear_conv_kernel_dim,
            "mamba_expand": expand,
            "mamba_conv_bias": True,
            "mamba_proj_bias": parts.has_bias(config),
        }

    def fields(self, config: GatedLinearAttentionConfig, theirs: PreTrainedConfig) -> dict:
        """Layer types as in published models, which llama.cpp and MLX read, and the RoPE field that SGLang reads."""
        words = [
            "mamba" if kind == "linear_attention" else "attention" for kind in theirs.layer_types
        ]
        return {
            "layer_types": words,
            "rope_theta": theirs.rope_parameters["rope_theta"],
            **UNLIMITED,
        }

    def memory(self, config: GatedLinearAttentionConfig, mixer: Weights) -> dict[str, Tensor]:
        """Rows of in_proj are z, x, B, C and dt, which are our g, v, k, q and decay."""
        query_heads, *_, K, V = config.memory_heads
        n_groups, heads, _ = _sizes(config, self.expand)
        own = parts.spread(config, mixer, key_heads=query_heads)
        own |= {
            "g_proj.weight": mixer["g_proj.weight"],
            "d_proj.weight": mixer["decay.proj.weight"],
        }
        rows = {"g": heads * V, "v": heads * V, "k": n_groups * K, "q": n_groups * K, "d": heads}
        for name, x in own.items():
            part, _, kind = name.partition("_")
            if part in rows and kind.startswith(("proj", "conv1d")):
                own[name] = parts.pad_rows(x, rows[part])
        found = {
            "in_proj.weight": parts.joined(own, "gvkqd", "proj.weight"),
            "conv1d.weight": parts.joined(own, "vkq", "conv1d.weight")[:, None],
            "conv1d.bias": parts.joined(own, "vkq", "conv1d.bias"),
            "A_log": parts.pad_rows(mixer["decay.A_log"], heads),
            "dt_bias": parts.pad_rows(mixer["decay.dt_bias"], heads),
            "D": parts.pad_rows(mixer["D"], heads),
            "norm.weight": parts.pad_rows(mixer["o_norm.weight"], heads * V),
            "out_proj.weight": parts.pad_rows(mixer["o_proj.weight"].mT, heads * V).mT.contiguous(),
        }
        if parts.has_bias(config):
            zeros = {part: mixer["q_proj.weight"].new_zeros(count) for part, count in rows.items()}
            biases = {f"{part}_b": own.get(f"{part}_proj.bias", zeros[part]) for part in rows}
            found["in_proj.bias"] = parts.joined(biases, "gvkqd", "b")
            found["out_proj.bias"] = mixer.get(
                "o_proj.bias", torch.zeros_like(mixer["o_proj.weight"][:, 0])
            )
        return found

    def attention(self, config: GatedLinearAttentionConfig, mixer: Weights) -> dict[str, Tensor]:
        """If any projection has a bias, all need one."""
        return parts.our_attention(mixer, with_biases=parts.has_bias(config))

    def block(
        self, config: GatedLinearAttentionConfig, layer: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """The MLP is a shared expert."""
        rest = {name: x for name, x in layer.items() if not name.startswith("mlp.")}
        return rest | {
            "shared_mlp.input_linear.weight": torch.cat(
                [layer["mlp.gate_proj.weight"], layer["mlp.up_proj.weight"]]
            ),
            "shared_mlp.output_linear.weight": layer["mlp.down_proj.weight"],
        }

    def engines(self, config: GatedLinearAttentionConfig) -> dict[str, str]:
        n_groups, *_ = _sizes(config)
        llama_cpp = parts.rope_fault(config, "default", "llama3")
        if parts.has_bias(config):
            llama_cpp = "its memory layers have no biases"
        if _sizes(config, LLAMA_CPP_EXPAND)[2] != LLAMA_CPP_EXPAND:
            llama_cpp = "it needs values that are at most twice as wide as the model"
        mlx = "" if n_groups == 1 else "its norm does not separate groups of heads"
        return {"transformers": "", "vLLM": "", "SGLang": "", "llama.cpp": llama_cpp, "MLX": mlx}


class Mamba2(Granite):
    """Mamba-2."""

    name = model_type = "mamba2"
    accepts = {**MAMBA, "intermediate_size": (0,)}
    names = {
        "model.embed_tokens.": "backbone.embeddings.",
        "model.layers.": "backbone.layers.",
        "model.norm.": "backbone.norm_f.",
    }
    memory_name = "mixer"
    needs_attention = has_our_attention = has_mlp = False

    def check(self, config: GatedLinearAttentionConfig) -> list[str]:
        return _check(config)

    def options(self, config: GatedLinearAttentionConfig) -> dict:
        n_groups, heads, expand = _sizes(config)
        *_, K, V = config.memory_heads
        shared = parts.shared_options(config)
        for name in ("intermediate_size", "max_position_embeddings"):
            del shared[name]
        return {
            **shared,
            "layer_norm_epsilon": shared.pop("rms_norm_eps"),
            "n_groups": n_groups,
            "num_heads": heads,
            "state_size": K,
            "head_dim": V,
            "conv_kernel": config.linear_conv_kernel_dim,
            "expand": expand,
            "use_bias": parts.has_bias(config),
        }

    def fields(self, config: GatedLinearAttentionConfig, theirs: PreTrainedConfig) -> dict:
        """Fields that MLX reads."""
        return {"intermediate_size": theirs.num_heads * theirs.head_dim, **UNLIMITED}

    def block(
        self, config: GatedLinearAttentionConfig, layer: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """The only norm is called `norm`."""
        return {
            "norm.weight" if name == "input_layernorm.weight" else name: x
            for name, x in layer.items()
        }


def _sizes(config: GatedLinearAttentionConfig, expand: int | None = None) -> tuple[int, int, int]:
    """Number of groups of value heads, number of value heads, and inner width as a multiple of hidden_size.

    Groups of zeros are added at the end until this is a whole number and at least `expand`.
    """
    query_heads, *_, V = config.memory_heads
    heads = config.num_output_heads // query_heads
    n_groups = query_heads
    while (
        n_groups * heads * V % config.hidden_size
        or (expand or 0) > n_groups * heads * V // config.hidden_size
    ):
        n_groups += 1
    return n_groups, n_groups * heads, n_groups * heads * V // config.hidden_size


def _check(config: GatedLinearAttentionConfig) -> list[str]:
    """Reasons against both targets."""
    return [] if config.linear_conv_kernel_dim else ["linear_conv_kernel_dim above 0, got 0"]
