"""Gated DeltaNet as `qwen3_5_text`, and attention with or without q/k norm as Qwen3.5's gated attention."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedConfig

from hf_memory.export import parts
from hf_memory.export.parts import Weights
from hf_memory.export.target import ANY, Target
from hf_memory.modeling.delta_net import DeltaNetConfig

PIN = 4097.0  # 1 + w of pinned norms: w = 4096 is exact in every precision
HEAD_DIMS = (
    16,
    32,
    64,
    80,
    96,
    112,
    128,
    160,
    192,
    224,
    256,
)  # head sizes that attention kernels support
MLX = '''"""Qwen3.5 for text, by the name that config.json has; mlx-lm has it as a part of a larger model."""

import mlx.core as mx
from mlx_lm.models import qwen3_5
from mlx_lm.models.qwen3_5 import ModelArgs


class Model(qwen3_5.Model):
    def sanitize(self, weights):
        """Adds the bias of attention's output projection, which mlx-lm expects; it is zero and not in the file."""
        zeros = {
            name.replace("q_proj", "o_proj"): mx.zeros(len(weights[name.replace("q_proj.bias", "o_proj.weight")]))
            for name in weights
            if name.endswith("self_attn.q_proj.bias")
        }
        return super().sanitize(zeros | weights)
'''
FILES = {"mlx_model.py": MLX}
READERS = {  # matrices that read a norm's output
    "input_layernorm.weight": (
        "self_attn.q_proj.",
        "self_attn.k_proj.",
        "self_attn.v_proj.",
        "linear_attn.in_proj_",
    ),
    "post_attention_layernorm.weight": ("mlp.gate_proj.", "mlp.up_proj."),
}


class Qwen35(Target):
    """Qwen3.5 for text."""

    name = "qwen3_5"
    model_type = "qwen3_5_text"
    family = DeltaNetConfig
    accepts = {**ANY, "gate": ("scalar", "none"), "output_gate": ("silu",)}
    memory_name = "linear_attn"
    has_our_attention = True
    files = FILES
    unsaved = "self_attn.o_proj.bias"

    def check(self, config: DeltaNetConfig) -> list[str]:
        faults = parts.check_output_norm(config, config.rms_norm_eps)
        kept = parts.kept_layers(config)
        rotates = config.no_rope_layers
        if rotates is not None and not all(rotates[i] for i in kept):
            faults.append(f"no_rope_layers=1 in all layers that keep attention, got {rotates}")
        if (
            kept
            and config.use_qk_norm
            and config.query_pre_attn_scalar not in (None, config.head_dim)
        ):
            faults.append(
                f"query_pre_attn_scalar=head_dim={config.head_dim}, got {config.query_pre_attn_scalar}"
            )
        return faults

    def options(self, config: DeltaNetConfig) -> dict:
        D = _head_dim(config)
        return {
            **parts.shared_options(config),
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads if parts.kept_layers(config) else 1,
            "head_dim": D,
            "attention_bias": _is_pinned(config),
            "rope_parameters": {
                **config.rope_parameters,
                "partial_rotary_factor": config.rotary_dim / D,
            },
            **parts.delta_options(config),
        }

    def fields(self, config: DeltaNetConfig, theirs: PreTrainedConfig) -> dict:
        every = (
            {}
            if parts.interval(config) is None
            else {"full_attention_interval": parts.interval(config)}
        )
        bias = {"qkv_bias": True} if _is_pinned(config) else {}
        rope = {
            name: theirs.rope_parameters[name] for name in ("partial_rotary_factor", "rope_theta")
        }
        (module,) = FILES
        own = {"mamba_ssm_dtype": "float32", "output_gate_type": "silu", "model_file": module}
        return {**every, **bias, **rope, **own}

    def memory(self, config: DeltaNetConfig, mixer: Weights) -> dict[str, Tensor]:
        own = parts.spread(config, mixer, key_heads=config.memory_heads[0])
        A_log, dt_bias, decay = parts.decay_by_head(config, mixer)
        return {
            "in_proj_qkv.weight": parts.joined(own, "qkv", "proj.weight"),
            "conv1d.weight": parts.joined(own, "qkv", "conv1d.weight")[:, None],
            "in_proj_z.weight": parts.full_rank(mixer, "output_gate"),
            "in_proj_b.weight": mixer["b_proj.weight"],
            "in_proj_a.weight": decay,
            "A_log": A_log,
            "dt_bias": dt_bias,
            "norm.weight": mixer["output_gate.norm.weight"],
            "out_proj.weight": mixer["o_proj.weight"],
        }

    def attention(self, config: DeltaNetConfig, mixer: Weights) -> dict[str, Tensor]:
        """The gate is sigmoid(0) = 1/2, so the output projection is doubled."""
        D = _head_dim(config)
        heads = {
            part: mixer[f"{part}_proj.weight"].unflatten(0, (-1, config.head_dim)) for part in "qkv"
        }
        # zeros in new channels
        heads = {part: F.pad(x, (0, 0, 0, D - config.head_dim)) for part, x in heads.items()}
        out = mixer["o_proj.weight"].unflatten(1, (-1, config.head_dim))
        if _is_pinned(config):
            norms = _pinned(config, heads)
        else:
            norms = {f"{x}_norm.weight": mixer[f"{x}_norm.weight"] - 1 for x in "qk"}
        return norms | {
            "q_proj.weight": F.pad(heads["q"], (0, 0, 0, D)).flatten(0, 1),
            "k_proj.weight": heads["k"].flatten(0, 1),
            "v_proj.weight": heads["v"].flatten(0, 1),
            "o_proj.weight": 2 * F.pad(out, (0, D - config.head_dim)).flatten(1),
        }

    def block(self, config: DeltaNetConfig, layer: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert norms, which multiply by 1 + weight there. For a small w, w - 1 would lose digits in 16 bits.

        So w is multiplied by a power of two that makes it at least 2, and the matrices that read the norm are divided
        by it, which is exact.
        """
        layer = dict(layer)
        for norm, readers in READERS.items():
            smallest = max(layer[norm].abs().min().item(), 2**-8)
            factor = 2.0 ** max(0, math.ceil(math.log2(2 / smallest)))
            layer[norm] = layer[norm] * factor - 1
            for name in layer:
                if name.startswith(readers) and name.endswith(".weight"):
                    layer[name] = layer[name] / factor
        return layer

    def top(self, outside: Weights) -> dict[str, Tensor]:
        return {**outside, "model.norm.weight": outside["model.norm.weight"] - 1}

    def engines(self, config: DeltaNetConfig) -> dict[str, str]:
        *_, K, V = config.memory_heads
        periodic = (
            "" if parts.interval(config) else "it needs attention in exactly every n-th layer"
        )
        llama_cpp = parts.rope_fault(config, "default")
        return {
            "transformers": "",
            "vLLM": "",
            "SGLang": "its attention has no biases in this architecture"
            if _is_pinned(config)
            else periodic,
            "llama.cpp": llama_cpp if K == V else "it needs keys and values of the same width",
            "MLX": periodic,
            "TensorRT-LLM": "",
        }


def _is_pinned(config: DeltaNetConfig) -> bool:
    """Whether attention has no q/k norm, so that the target's q/k norms must be made to have no effect ("pinned")."""
    return bool(parts.kept_layers(config)) and not config.use_qk_norm


def _head_dim(config: DeltaNetConfig) -> int:
    """Channels of an attention head in the target; a pinned norm needs two more, for a constant in two parts."""
    D = config.head_dim
    return next(size for size in (*HEAD_DIMS, 2 * D) if size >= D + 2) if _is_pinned(config) else D


def _pinned(config: DeltaNetConfig, heads: Weights) -> dict[str, Tensor]:
    """Biases and q/k norms that only multiply queries and keys by a constant.

    Two new channels of every head hold constants, together of size c, that are so large that the root mean square of a
    head is always c / sqrt(D). The weights of the norm undo this division, and set the new channels to zero.
    """
    D = _head_dim(config)
    dtype = heads["q"].dtype
    c = PIN * math.sqrt(math.sqrt(D) / parts.attention_scale(config))
    coarse = torch.tensor(c * (1 - 2**-8)).to(dtype)  # below c also after rounding
    fine = torch.tensor(math.sqrt(c**2 - float(coarse) ** 2)).to(dtype)
    bias = torch.zeros(D, dtype=dtype)
    bias[config.head_dim] = coarse
    bias[config.head_dim + 1] = fine
    norm = torch.full((D,), PIN - 1, dtype=dtype)
    norm[config.head_dim :] = -1
    count = {part: len(x) for part, x in heads.items()}
    return {
        "q_proj.bias": F.pad(bias.expand(count["q"], D), (0, D)).flatten(),
        "k_proj.bias": bias.repeat(count["k"]),
        "v_proj.bias": torch.zeros(count["v"] * D, dtype=dtype),
        "o_proj.bias": torch.zeros(config.hidden_size, dtype=dtype),
        "q_norm.weight": norm,
        "k_norm.weight": norm.clone(),
    }
