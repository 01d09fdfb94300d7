"""Pure models with Kimi Delta Attention, or Gated DeltaNet with a sigmoid gate, as `kimi_linear`."""

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedConfig

from hf_memory.export import parts
from hf_memory.export.parts import Weights
from hf_memory.export.target import ANY, Target
from hf_memory.modeling.delta_net import DeltaNetConfig


class Kimi(Target):
    """Kimi Linear, whose gates are low-rank products."""

    name = "kimi"
    model_type = "kimi_linear"
    family = DeltaNetConfig
    accepts = {**ANY, "gate": ("vector", "scalar", "none"), "output_gate": ("sigmoid",)}
    memory_name = "self_attn"
    file_names = {".block_sparse_moe.": ".mlp."}  # for dense layers

    def check(self, config: DeltaNetConfig) -> list[str]:
        *_, K, V = config.memory_heads
        rank = config.output_gate_low_rank_dim
        heads = config.num_output_heads
        faults = parts.check_output_norm(config, config.rms_norm_eps)
        if K != V:
            faults.append(f"linear_value_head_dim=linear_key_head_dim={K}, got {V}")
        if rank is None or rank > K:
            faults.append(
                f"output_gate_low_rank_dim of at most linear_key_head_dim={K}, got {rank}"
            )
        if config.gate != "vector" and heads > K:
            faults.append(
                f"gate='vector' where there are more heads ({heads}) than channels of a key ({K})"
            )
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

    def top(self, outside: Weights) -> dict[str, Tensor]:
        """As ours, with an output head that is not tied to the embeddings."""
        return {**outside, "lm_head.weight": outside["lm_head.weight"].clone()}

    def memory(self, config: DeltaNetConfig, mixer: Weights) -> dict[str, Tensor]:
        """Lower ranks are padded with zeros."""
        K = config.linear_key_head_dim
        A_log, dt_bias, down, up = _decay_by_channel(config, mixer)
        gate = mixer["output_gate.proj.weight"]
        own = parts.spread(config, mixer, key_heads=config.num_output_heads)
        projections = {f"{part}_proj.weight": own[f"{part}_proj.weight"] for part in "qkvbo"}
        return projections | {
            "conv1d.weight": parts.joined(own, "qkv", "conv1d.weight")[:, None],
            "o_norm.weight": mixer["output_gate.norm.weight"],
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
    """The smallest attention layer of Kimi, for a layer that adds zero; no experts, no tied embeddings."""
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


def _decay_by_channel(config: DeltaNetConfig, mixer: Weights) -> tuple[Tensor, ...]:
    """A_log [HV], dt_bias [HV * K] and both factors of the projection; a decay per head is repeated for channels."""
    if config.gate == "vector":
        return tuple(
            mixer[f"decay.{x}"] for x in ("A_log", "dt_bias", "down.weight", "proj.weight")
        )
    A_log, dt_bias, decay = parts.decay_by_head(config, mixer)
    heads = torch.eye(len(decay), dtype=decay.dtype)
    dt_bias, up = (x.repeat_interleave(config.linear_key_head_dim, 0) for x in (dt_bias, heads))
    return A_log, dt_bias, decay, up
