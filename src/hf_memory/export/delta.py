"""Pure DeltaNet models as `olmo_hybrid`, and Kimi Delta Attention as `bailing_hybrid` and `kimi_linear`."""

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedConfig

from hf_memory.export import parts
from hf_memory.export.parts import Weights
from hf_memory.export.target import ANY, Target
from hf_memory.modeling.delta_net import DeltaNetConfig

OLMO_EPS = 1e-5  # epsilon of OLMo-Hybrid's output norm, which is a constant in its code
DELTA = {**ANY, "gate": ("scalar", "none"), "output_gate": ("silu",)}
KIMI = {**DELTA, "gate": ("vector", "scalar", "none"), "output_gate": ("sigmoid",)}


class OlmoHybrid(Target):
    """OLMo-Hybrid. Its attention layers have norms after, not before them, so only pure models fit."""

    name = model_type = "olmo_hybrid"
    family = DeltaNetConfig
    accepts = {**DELTA, "allow_negative_eigenvalues": None}
    memory_name = "linear_attn"

    def check(self, config: DeltaNetConfig) -> list[str]:
        return parts.check_output_norm(config, OLMO_EPS)

    def options(self, config: DeltaNetConfig) -> dict:
        return {
            **parts.shared_options(config),
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "rope_parameters": config.rope_parameters,
            **parts.delta_options(config),
            "linear_allow_neg_eigval": config.allow_negative_eigenvalues,
        }

    def memory(self, config: DeltaNetConfig, mixer: Weights) -> dict[str, Tensor]:
        A_log, dt_bias, decay = parts.decay_by_head(config, mixer)
        return _shared(config, mixer, config.memory_heads[0]) | {
            "g_proj.weight": parts.full_rank(mixer, "output_gate"),
            "a_proj.weight": decay,
            "A_log": A_log,
            "dt_bias": dt_bias,
        }

    def engines(self, config: DeltaNetConfig) -> dict[str, str]:
        return {"transformers": "", "vLLM": ""}


class Bailing(Target):
    """Ling 3.0."""

    name = "bailing"
    model_type = "bailing_hybrid"
    family = DeltaNetConfig
    accepts = KIMI
    memory_name = "self_attn"

    def check(self, config: DeltaNetConfig) -> list[str]:
        *_, K, V = config.memory_heads
        is_square = [] if K == V else [f"linear_value_head_dim=linear_key_head_dim={K}, got {V}"]
        return [*parts.check_output_norm(config, config.rms_norm_eps), *is_square]

    def options(self, config: DeltaNetConfig) -> dict:
        return {
            **parts.shared_options(config),
            **_latent_attention(config),
            "rope_parameters": config.rope_parameters,
            "head_dim": config.linear_key_head_dim,
            "short_conv_kernel_size": config.linear_conv_kernel_dim or 4,
            "kda_safe_gate": False,
            "first_k_dense_replace": config.num_hidden_layers + 1,
            "layer_group_size": config.num_hidden_layers + 1,
            "num_mtp_layers": 0,
        }

    def fields(self, config: DeltaNetConfig, theirs: PreTrainedConfig) -> dict:
        """The class name that vLLM uses."""
        return {"architectures": ["BailingMoeV3ForCausalLM"]}

    def top(self, outside: Weights) -> dict[str, Tensor]:
        """As ours, with an output head that is not tied to the embeddings."""
        return {**outside, "lm_head.weight": outside["lm_head.weight"].clone()}

    def memory(self, config: DeltaNetConfig, mixer: Weights) -> dict[str, Tensor]:
        A_log, dt_bias, down, up = _decay_by_channel(config, mixer)
        return _shared(config, mixer, config.num_output_heads) | {
            "g_proj.weight": parts.full_rank(mixer, "output_gate"),
            "forget_gate.f_proj.weight": (up.float() @ down.float()).to(up.dtype),
            "forget_gate.A_log": A_log,
            "forget_gate.dt_bias": dt_bias,
        }

    def engines(self, config: DeltaNetConfig) -> dict[str, str]:
        safe = "its decay is bounded (kda_safe_gate)"
        return {"transformers": "", "vLLM": "", "SGLang": "", "llama.cpp": safe, "MLX": safe}


class Kimi(Bailing):
    """Kimi Linear, whose gates are low-rank products."""

    name = "kimi"
    model_type = "kimi_linear"
    file_names = {".block_sparse_moe.": ".mlp."}  # for dense layers

    def check(self, config: DeltaNetConfig) -> list[str]:
        faults, K = super().check(config), config.linear_key_head_dim
        rank, heads = config.output_gate_low_rank_dim, config.num_output_heads
        if rank is None or rank > K:
            faults.append(f"output_gate_low_rank_dim of at most linear_key_head_dim={K}, got {rank}")
        if config.gate != "vector" and heads > K:
            faults.append(f"gate='vector' where there are more heads ({heads}) than channels of a key ({K})")
        return faults

    def options(self, config: DeltaNetConfig) -> dict:
        return {
            **parts.shared_options(config),
            **_latent_attention(config),
            "linear_head_dim": config.linear_key_head_dim,
            "linear_num_heads": config.num_output_heads,
            "linear_conv_kernel_dim": config.linear_conv_kernel_dim or 4,
        }

    def fields(self, config: DeltaNetConfig, theirs: PreTrainedConfig) -> dict:
        """Fields as in the published model: layers are counted from 1, and there is a RoPE that is not used."""
        layers = config.num_hidden_layers
        linear = {"num_heads": theirs.linear_num_heads, "head_dim": theirs.linear_head_dim}
        linear |= {"short_conv_kernel_size": theirs.linear_conv_kernel_dim}
        linear |= {"kda_layers": list(range(1, layers + 1)), "full_attn_layers": [layers + 1]}
        unused = {"rope_theta": 10000.0, "mla_use_nope": True, "moe_layer_freq": 1}
        return {"linear_attn_config": linear, "first_k_dense_replace": layers + 1, **unused}

    def memory(self, config: DeltaNetConfig, mixer: Weights) -> dict[str, Tensor]:
        """Lower ranks are padded with zeros."""
        K = config.linear_key_head_dim
        A_log, dt_bias, down, up = _decay_by_channel(config, mixer)
        gate = mixer["output_gate.proj.weight"]
        return _shared(config, mixer, config.num_output_heads) | {
            "g_a_proj.weight": parts.pad_rows(mixer["output_gate.down.weight"], K),
            "g_b_proj.weight": F.pad(gate, (0, K - gate.shape[1])),
            "forget_gate.f_a_proj.weight": parts.pad_rows(down, K),
            "forget_gate.f_b_proj.weight": F.pad(up, (0, K - up.shape[1])),
            "forget_gate.A_log": A_log.view(1, 1, -1, 1),
            "forget_gate.dt_bias": dt_bias,
        }

    def engines(self, config: DeltaNetConfig) -> dict[str, str]:
        eps = "" if config.rms_norm_eps == 1e-5 else "the eps of its output norm is 1e-5"
        return {"transformers": "", "vLLM": eps, "SGLang": "", "llama.cpp": "", "MLX": ""}


def _latent_attention(config: DeltaNetConfig) -> dict:
    """The smallest attention layer of Ling and Kimi, for a layer that adds zero; no experts, no tied embeddings."""
    K = config.linear_key_head_dim
    return {
        "tie_word_embeddings": False,
        "num_attention_heads": config.num_output_heads,
        "num_key_value_heads": config.num_output_heads,
        "kv_lora_rank": K,
        "qk_rope_head_dim": K,
        "qk_nope_head_dim": K,
        "v_head_dim": K,
        "num_local_experts": 1,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 0,
        "moe_intermediate_size": config.intermediate_size,
        "mlp_layer_types": ["dense"] * (config.num_hidden_layers + 1),
    }


def _shared(config: DeltaNetConfig, mixer: Weights, key_heads: int) -> dict[str, Tensor]:
    """The weights that all three call the same, with so many heads of queries and keys."""
    own = parts.spread(config, mixer, key_heads=key_heads)
    return {f"{part}_proj.weight": own[f"{part}_proj.weight"] for part in "qkvbo"} | {
        "conv1d.weight": parts.joined(own, "qkv", "conv1d.weight")[:, None],
        "o_norm.weight": mixer["output_gate.norm.weight"],
    }


def _decay_by_channel(config: DeltaNetConfig, mixer: Weights) -> tuple[Tensor, ...]:
    """A_log [HV], dt_bias [HV * K] and both factors of the projection; a decay per head is repeated for channels."""
    if config.gate == "vector":
        return tuple(mixer[f"decay.{x}"] for x in ("A_log", "dt_bias", "down.weight", "proj.weight"))
    A_log, dt_bias, decay = parts.decay_by_head(config, mixer)
    heads = torch.eye(len(decay), dtype=decay.dtype)
    dt_bias, up = (x.repeat_interleave(config.linear_key_head_dim, 0) for x in (dt_bias, heads))
    return A_log, dt_bias, decay, up
