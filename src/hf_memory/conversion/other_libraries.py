"""Import of memory models from other libraries, as models of this package that compute the same function.

Supported are `linear_attn`, `retnet`, `gla`, `delta_net`, `gated_deltanet`, `gated_deltanet2`, `comba`,
`gated_deltaproduct`, `kda`, `mesa_net`, `mamba3`, `forgetting_transformer` and `rwkv7` of flash-linear-attention, the
authors' checkpoints of RWKV-7, Mamba and Mamba-2 of transformers, and the linear layers of Qwen3-Next, OLMo-Hybrid and
Kimi Linear. A model with an option that this package does not have is refused.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.utils import CONFIG_NAME

from hf_memory.mixers.base import MemoryMixer
from hf_memory.modeling import FAMILIES
from hf_memory.modeling.base import MemoryForCausalLM
from hf_memory.modeling.checks import check
from hf_memory.modeling.delta_net import DeltaNetConfig
from hf_memory.modeling.gated_linear_attention import GatedLinearAttentionConfig
from hf_memory.modeling.linear_transformer import LinearTransformerConfig
from hf_memory.modeling.rwkv7 import RANKS, Rwkv7Config
from hf_memory.modeling.transformer import MemoryTransformerConfig

Weights = Mapping[str, Tensor]
ENDS = ("model.embed_tokens.weight", "lm_head.weight")
SAME = ("vocab_size", "hidden_size", "num_hidden_layers", "tie_word_embeddings")
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")

OUTSIDE = {  # names outside layers, and what is outside here: theirs and ours
    "model.embeddings": "model.embed_tokens",
    "backbone.embeddings": "model.embed_tokens",
    "backbone.norm_f": "model.norm",
    "model.layers.0.pre_norm": "model.embed_norm",
    "blocks.0.ln0": "model.embed_norm",
    "emb": "model.embed_tokens",
    "ln_out": "model.norm",
    "head": "lm_head",
}
INSIDE = {  # names inside a layer: attn of flash-linear-attention, mixer and linear_attn of transformers
    "norm": "input_layernorm",
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attn.g_norm_swish_gate": "mixer.output_gate.norm",
    "attn.g_norm": "mixer.output_gate.norm",
    "attn.o_norm": "mixer.output_gate.norm",
    "attn.norm": "mixer.o_norm",
    "attn.g_proj.0": "mixer.output_gate.down",
    "attn.g_proj.1": "mixer.output_gate.proj",
    "attn.g_proj": "mixer.output_gate.proj",
    "attn.f_proj.0": "mixer.decay.down",
    "attn.f_proj.1": "mixer.decay.proj",
    "attn.f_proj": "mixer.forget.proj",
    "attn.decay": "mixer.inner_decay",
    "attn.lambda_params": "mixer.ridge",
    "self_attn.forget_gate.f_a_proj": "mixer.decay.down",
    "self_attn.forget_gate.f_b_proj": "mixer.decay.proj",
    "self_attn.forget_gate": "mixer.decay",
    "self_attn.g_a_proj": "mixer.output_gate.down",
    "self_attn.g_b_proj": "mixer.output_gate.proj",
    "self_attn.o_norm": "mixer.output_gate.norm",
    "attn.gk_proj.0": "mixer.decay.down",
    "attn.gk_proj.1": "mixer.decay.proj",
    "mixer.norm": "mixer.o_norm",
    "mixer.dt_down": "mixer.decay.down",
    "mixer.dt_proj.bias": "mixer.decay.dt_bias",
    "mixer.dt_proj": "mixer.decay.proj",
    "mixer.out_proj": "mixer.o_proj",
    "mixer.rate_proj": "mixer.decay.rate_proj",
    **{
        f"mixer.{old}_{x}": f"mixer.{new}_{x}"
        for old, new in (("B", "k"), ("C", "q"))
        for x in ("norm", "bias")
    },
    "linear_attn.norm": "mixer.output_gate.norm",
    "linear_attn.o_norm": "mixer.output_gate.norm",
    "linear_attn.g_proj": "mixer.output_gate.proj",
    "linear_attn.out_proj": "mixer.o_proj",
    **{f"{part}.a_proj": "mixer.decay.proj" for part in ("attn", "linear_attn")},
    **{
        f"{part}.{x}": f"mixer.decay.{x}"
        for part in ("attn", "mixer", "linear_attn")
        for x in ("A_log", "dt_bias")
    },
    **dict.fromkeys(("attn", "linear_attn", "self_attn"), "mixer"),
}
_RWKV7 = (  # names here, in flash-linear-attention, and in .pth files
    ("mixer.input_layernorm", "attn_norm", "ln1"),
    ("mixer.post_attention_layernorm", "ffn_norm", "ln2"),
    ("mixer.q_proj", "attn.r_proj", "att.receptance"),
    ("mixer.k_proj", "attn.k_proj", "att.key"),
    ("mixer.v_proj", "attn.v_proj", "att.value"),
    ("mixer.o_proj", "attn.o_proj", "att.output"),
    ("mixer.o_norm", "attn.g_norm", "att.ln_x"),
    *((f"mixer.{x}_lora.up_proj.bias", f"attn.{x}_lora.lora.2.bias", f"att.{x}0") for x in "wav"),
    *(
        (f"mixer.{x}_lora.down_proj.weight", f"attn.{x}_lora.lora.0.weight", f"att.{x}1")
        for x in "wavg"
    ),
    *(
        (f"mixer.{x}_lora.up_proj.weight", f"attn.{x}_lora.lora.2.weight", f"att.{x}2")
        for x in "wavg"
    ),
    ("mixer", "attn", "att"),
    ("mixer.mlp.up_proj", "ffn.key", "ffn.key"),
    ("mixer.mlp.down_proj", "ffn.value", "ffn.value"),
    ("mixer.mlp", "ffn", "ffn"),
)
INSIDE_RWKV7 = {theirs: ours for ours, *both in _RWKV7 for theirs in both}
Rows = Mapping[str, tuple[int, Mapping[str, int]]]


class Source(NamedTuple):
    """A type of model in another library.

    Args:
        config: the config class of this package.
        options: arguments for it from their config; raises ValueError for options that this package does not have.
        fused: for projections of several parts, {theirs: (number of groups of rows, {ours: rows in a group})}.
        change: splits or changes other tensors.
        inside: their and our names inside a layer.
    """

    config: type
    options: Callable[[dict], dict]
    fused: Callable[[dict], Rows] = lambda config: {}
    change: Callable[[dict, str, Tensor], Weights] = lambda config, name, x: {name: x}
    inside: Mapping[str, str] = INSIDE


def _refuse(config: dict, **expected: tuple) -> None:
    for name, values in expected.items():
        given = config.get(name, values[0])
        check(given in values, name, f"{' or '.join(map(repr, values))} to be imported", given)


def _fla(config: dict) -> dict:
    """Options that all models of flash-linear-attention have."""
    _refuse(
        config,
        attn=(None,),
        conv_bias=(False,),
        elementwise_affine=(True,),
        hidden_act=("swish", "silu"),
    )
    heads = config["num_heads"]
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_kv_heads") or heads,
        "rms_norm_eps": config["norm_eps"],
    }


def _fla_heads(config: dict) -> dict:
    width = config["hidden_size"]
    heads = config["num_heads"]
    return {
        "linear_key_head_dim": int(width * config["expand_k"]) // heads,
        "linear_value_head_dim": int(width * config["expand_v"]) // heads,
    }


def _linear_attn(config: dict) -> dict:
    _refuse(config, feature_map=("elu", "relu", "identity"), norm_q=(False,), norm_k=(False,))
    _refuse(config, expand_k=(1, 1.0), expand_v=(1, 1.0), norm_feature_map=(False,))
    options = {"feature_map": config["feature_map"], "normalize": False}
    return {
        **_fla(config),
        **options,
        "output_norm": config.get("output_norm", "rmsnorm") == "rmsnorm",
    }


def _retnet(config: dict) -> dict:
    _refuse(config, feature_map=(None,), use_short_conv=(False,), use_output_gate=(True,))
    sizes = _fla_heads(config)
    return {**_fla(config), **sizes, "gate": "retention", "head_dim": sizes["linear_key_head_dim"]}


def _gla(config: dict) -> dict:
    _refuse(config, feature_map=(None,), use_short_conv=(False,), clamp_min=(None,))
    options = {
        name: config[name]
        for name in ("gate_low_rank_dim", "gate_logit_normalizer")
        if name in config
    }
    gate = "silu" if config.get("use_output_gate", True) else "none"
    return {**_fla(config), **_fla_heads(config), **options, "gate": "vector", "output_gate": gate}


def _delta_net(config: dict) -> dict:
    _refuse(config, qk_activation=("silu",), qk_norm=("l2",), use_beta=(True,))
    return {**_fla(config), **_fla_heads(config), **_delta(config), "gate": "none"}


def _own_head_dim(config: dict) -> dict:
    """Options of models whose heads have a size of their own."""
    return {
        "linear_num_key_heads": config["num_heads"],
        "linear_num_value_heads": config.get("num_v_heads") or config["num_heads"],
        "linear_key_head_dim": config["head_dim"],
        "linear_value_head_dim": int(config["head_dim"] * config.get("expand_v", 1)),
        "head_dim": config["head_dim"],
        **_fla(config),
        **_delta(config),
    }


def _comba(config: dict) -> dict:
    _refuse(config, use_inner_decay=(True,), use_output_correction=(True,))
    gate = "sigmoid" if config.get("use_output_gate", True) else "none"
    return {**_own_head_dim(config), "gate": "comba", "output_gate": gate}


def _gated_deltaproduct(config: dict) -> dict:
    gate = "silu" if config.get("use_output_gate", True) else "none"
    options = {"gate": "scalar" if config.get("use_forget_gate") else "none", "output_gate": gate}
    return {**_own_head_dim(config), **options, "num_householder": config["num_householder"]}


def _kda(config: dict) -> dict:
    _refuse(config, expand_v=(1, 1.0), safe_gate=(False,), lower_bound=(None,))
    options = {
        "output_gate": "sigmoid",
        "output_gate_low_rank_dim": config["head_dim"],
        "output_gate_bias": True,
    }
    return {**_own_head_dim(config), **options, "gate": "vector"}


def _kimi_linear(config: dict) -> dict:
    _refuse(config, hidden_act=("silu",))
    heads = config["linear_num_heads"]
    channels = config["linear_head_dim"]
    own = {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": channels,
        "gate": "vector",
    }
    rest = {name: config[name] for name in ("rms_norm_eps", "linear_conv_kernel_dim")}
    return {**own, **rest, "output_gate_low_rank_dim": channels}


def _mesa_net(config: dict) -> dict:
    _refuse(config, lambda_lower_bound=(0.25,), use_short_conv=(True,))
    gate = "silu" if config.get("use_output_gate") else "none"
    return {**_own_head_dim(config), "gate": "mesa", "output_gate": gate}


def _forgetting_transformer(config: dict) -> dict:
    _refuse(config, qk_norm=(False,), use_output_gate=(False,))
    options = {"position": "forget", "attention_bias": config.get("qkv_bias", False)}
    if window := config.get("window_size"):
        options |= {
            "layer_types": ["sliding_heads"] * config["num_hidden_layers"],
            "sliding_window": window,
        }
    return {**_fla(config), **options}


def _delta(config: dict) -> dict:
    """Options of convolutions, of an output gate, and of negative eigenvalues where there are any."""
    over = (
        {"allow_negative_eigenvalues": bool(config["allow_neg_eigval"])}
        if "allow_neg_eigval" in config
        else {}
    )
    return {
        "linear_conv_kernel_dim": config["conv_size"] if config.get("use_short_conv", True) else 0,
        "output_gate": "silu" if config.get("use_gate") else "none",
        **over,
    }


def _any_mamba(config: dict) -> dict:
    """Options that Mamba and Mamba-2 have."""
    _refuse(config, use_bias=(False,), hidden_act=("silu", "swish"))
    return {
        "intermediate_size": 0,
        "num_attention_heads": 1,
        "linear_key_head_dim": config["state_size"],
        "linear_conv_kernel_dim": config["conv_kernel"],
        "rms_norm_eps": config["layer_norm_epsilon"],
    }


def _mamba(config: dict) -> dict:
    width = int(config["expand"] * config["hidden_size"])
    own = {
        "gate": "mamba",
        "linear_value_head_dim": width,
        "gate_low_rank_dim": config["time_step_rank"],
    }
    return _any_mamba(config) | own


def _mamba2(config: dict) -> dict:
    _refuse(config, expand=(1, 2, 4))
    low, high = config["time_step_limit"]
    check(
        low <= 0 and high == float("inf"), "time_step_limit", "(0, inf) to be imported", (low, high)
    )
    heads = {
        "linear_num_key_heads": config["n_groups"],
        "linear_num_value_heads": config["num_heads"],
    }
    return _any_mamba(config) | {
        "gate": "mamba2",
        "linear_value_head_dim": config["head_dim"],
        **heads,
    }


def _mamba3(config: dict) -> dict:
    _refuse(
        config, use_bias=(False,), hidden_act=("silu",), is_mimo=(False,), is_outproj_norm=(False,)
    )
    _refuse(config, rope_fraction=(0.5,), A_floor=(1e-4,))
    return {
        "gate": "mamba3",
        "intermediate_size": 0,
        "num_attention_heads": 1,
        "linear_num_key_heads": config["n_groups"],
        "linear_num_value_heads": _heads_of_mamba3(config),
        "linear_key_head_dim": config["state_size"],
        "linear_value_head_dim": config["head_dim"],
        "rms_norm_eps": config["norm_eps"],
    }


def _heads_of_mamba3(config: dict) -> int:
    return int(config["expand"] * config["hidden_size"]) // config["head_dim"]


def _gated_delta_layers(config: dict) -> dict:
    """Options of the linear layers of Qwen3-Next and OLMo-Hybrid."""
    _refuse(config, hidden_act=("silu",))
    names: tuple[str, ...] = (
        "num_attention_heads",
        "num_key_value_heads",
        "rms_norm_eps",
        "linear_num_key_heads",
    )
    names += (
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
    )
    return {"gate": "scalar", "output_gate": "silu", **{name: config[name] for name in names}}


def _olmo_hybrid(config: dict) -> dict:
    more = {
        "allow_negative_eigenvalues": config["linear_allow_neg_eigval"],
        "output_norm_eps": 1e-5,
    }
    return {**_gated_delta_layers(config), **more}


def _rwkv7(config: dict) -> dict:
    _refuse(config, attn=(None,), norm_first=(True,), norm_bias=(True,), hidden_act=("sqrelu",))
    width = config["hidden_size"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_heads"]
    _refuse(config, value_dim=(None, width, [width] * len(config.get("value_dim") or ())))
    wide = config.get("intermediate_size") or 32 * -(
        -int(width * config.get("hidden_ratio", 4)) // 32
    )
    ranks = {name: config.get(name) for name in RANKS}
    options = {
        "num_attention_heads": width // head_dim,
        "head_dim": head_dim,
        "intermediate_size": wide,
    }
    return {**options, **ranks, "layer_norm_eps": config.get("norm_eps", 1e-5)}


def rwkv7_config(weights: Weights) -> dict:
    """The config, as in a config.json, for the weights of an RWKV-7 .pth file as its authors publish it."""
    heads, head_dim = weights["blocks.0.att.r_k"].shape
    names = {
        "decay_low_rank_dim": "0.att.w1",
        "a_low_rank_dim": "0.att.a1",
        "gate_low_rank_dim": "0.att.g1",
    }
    ranks = {
        name: weights.get(f"blocks.{place}")
        for name, place in {**names, "v_low_rank_dim": "1.att.v1"}.items()
    }
    return {
        "model_type": "rwkv7",
        "vocab_size": len(weights["emb.weight"]),
        "hidden_size": heads * head_dim,
        "head_dim": head_dim,
        "num_hidden_layers": 1
        + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks.")),
        "intermediate_size": len(weights["blocks.0.ffn.key.weight"]),
        **{name: x.shape[1] for name, x in ranks.items() if x is not None},
    }


def _split_rwkv7(config: dict, name: str, x: Tensor) -> Weights:
    """Vectors have extra dimensions there; .pth files have transposed low-rank matrices, and unused weights."""
    if name.endswith("attn.x_x"):  # old files have all token-shift weights in one tensor
        return {name.replace("x_x", f"x_{part}"): y for part, y in zip("rwkvag", x.flatten(1))}
    if re.fullmatch(r"blocks\.0\.att\.v[012]", name):
        return {}
    if re.fullmatch(r"blocks\.\d+\.att\.[wavg][12]", name):
        return {name: x.mT}
    return {name: x if name.endswith(".weight") else x.flatten()}


def _repeat_gate(config: dict, name: str, x: Tensor) -> Weights:
    """GLA has a gate for each key head, we have one for each query head: repeat it for the heads of a group."""
    if ".gk_proj.1." not in name or not config.get("num_kv_heads"):
        return {name: x}
    heads = config["num_kv_heads"]
    return {
        name: x.unflatten(0, (heads, -1))
        .repeat_interleave(config["num_heads"] // heads, 0)
        .flatten(0, 1)
    }


def _repeat_keys(config: dict, name: str, x: Tensor) -> Weights:
    """Gated DeltaNet-2 erases and decays key heads, we value heads: repeat these gates for the heads of a group."""
    values = config.get("num_v_heads") or config["num_heads"]
    if (
        not re.search(r"\.(b_proj|f_proj\.1|A_log|dt_bias)\b", name)
        or values == config["num_heads"]
    ):
        return {name: x}
    heads = x.unflatten(0, (config["num_heads"], -1))
    return {name: heads.repeat_interleave(values // config["num_heads"], 0).flatten(0, 1)}


def _without_ones(config: dict, name: str, x: Tensor) -> Weights:
    """Kimi Linear's rates and Mamba-3's biases have dimensions of size one."""
    return {
        name: x.flatten()
        if name.endswith("A_log")
        else x.flatten(0, 1)
        if name.endswith(("B_bias", "C_bias"))
        else x
    }


def _add_one(config: dict, name: str, x: Tensor) -> Weights:
    """Norms of Qwen3-Next outside its memories multiply by 1 + weight."""
    return {name: 1 + x if name.endswith("norm.weight") and "linear_attn" not in name else x}


def _convolution(config: dict) -> Rows:
    """The joint convolution of OLMo-Hybrid and Qwen3-Next, and of Kimi Linear, whose heads are all alike."""
    if "linear_num_heads" in config:
        keys = values = config["linear_num_heads"] * config["linear_head_dim"]
    else:
        keys, values = (
            config[f"linear_num_{x}_heads"] * config[f"linear_{x}_head_dim"]
            for x in ("key", "value")
        )
    return {"conv1d": (1, {"q_conv1d": keys, "k_conv1d": keys, "v_conv1d": values})}


def _by_key_head(config: dict) -> Rows:
    """Rows of Qwen3-Next's projections are sorted by key head."""
    heads = config["linear_num_key_heads"]
    groups = config["linear_num_value_heads"] // heads
    keys = config["linear_key_head_dim"]
    values = groups * config["linear_value_head_dim"]
    return {
        **_convolution(config),
        "in_proj_qkvz": (
            heads,
            {"q_proj": keys, "k_proj": keys, "v_proj": values, "g_proj": values},
        ),
        "in_proj_ba": (heads, {"b_proj": groups, "a_proj": groups}),
    }


def _parts_of_mamba(config: dict) -> Rows:
    """x and z are our v and g; B and C are our k and q."""
    values = int(config["expand"] * config["hidden_size"])
    keys = config["state_size"]
    return {
        "in_proj": (1, {"v_proj": values, "g_proj": values}),
        "x_proj": (1, {"dt_down": config["time_step_rank"], "k_proj": keys, "q_proj": keys}),
        "conv1d": (1, {"v_conv1d": values}),
    }


def _parts_of_mamba2(config: dict) -> Rows:
    """z, x, B, C and dt are our g, v, k, q and decay."""
    values = config["num_heads"] * config["head_dim"]
    keys = config["n_groups"] * config["state_size"]
    parts = {"v": values, "k": keys, "q": keys}
    return {
        "in_proj": (
            1,
            {
                "g_proj": values,
                **{f"{x}_proj": n for x, n in parts.items()},
                "dt_proj": config["num_heads"],
            },
        ),
        "conv1d": (1, {f"{x}_conv1d": n for x, n in parts.items()}),
    }


def _parts_of_mamba3(config: dict) -> Rows:
    """z, x, B, C, dt, A, trap and the angles are our g, v, k, q, decay, share and angle."""
    heads = _heads_of_mamba3(config)
    keys = config["n_groups"] * config["state_size"]
    wide = dict.fromkeys("gv", heads * config["head_dim"]) | dict.fromkeys("kq", keys)
    narrow = dict.fromkeys(("dt", "rate", "share"), heads) | {"angle": config["state_size"] // 4}
    return {"in_proj": (1, {f"{x}_proj": n for x, n in (wide | narrow).items()})}


SOURCES = {
    "linear_attn": Source(LinearTransformerConfig, _linear_attn),
    "retnet": Source(GatedLinearAttentionConfig, _retnet),
    "gla": Source(GatedLinearAttentionConfig, _gla, change=_repeat_gate),
    "delta_net": Source(DeltaNetConfig, _delta_net),
    "gated_deltanet": Source(
        DeltaNetConfig, lambda config: {**_own_head_dim(config), "gate": "scalar"}
    ),
    "gated_deltanet2": Source(
        DeltaNetConfig, lambda config: {**_kda(config), "gate": "gdn2"}, change=_repeat_keys
    ),
    "comba": Source(DeltaNetConfig, _comba),
    "gated_deltaproduct": Source(DeltaNetConfig, _gated_deltaproduct),
    "kda": Source(DeltaNetConfig, _kda),
    "kimi_linear": Source(DeltaNetConfig, _kimi_linear, _convolution, _without_ones),
    "mesa_net": Source(GatedLinearAttentionConfig, _mesa_net),
    "forgetting_transformer": Source(MemoryTransformerConfig, _forgetting_transformer),
    "rwkv7": Source(Rwkv7Config, _rwkv7, change=_split_rwkv7, inside=INSIDE_RWKV7),
    "mamba": Source(GatedLinearAttentionConfig, _mamba, _parts_of_mamba),
    "mamba2": Source(GatedLinearAttentionConfig, _mamba2, _parts_of_mamba2),
    "mamba3": Source(GatedLinearAttentionConfig, _mamba3, _parts_of_mamba3, _without_ones),
    "qwen3_next": Source(DeltaNetConfig, _gated_delta_layers, _by_key_head, _add_one),
    "olmo_hybrid": Source(DeltaNetConfig, _olmo_hybrid, _convolution),
}


def import_model(
    config: PreTrainedConfig | Mapping[str, Any] | str | Path, weights: Weights | None = None
) -> MemoryForCausalLM:
    """Import a model of another library as a model of this package that computes the same function.

    Args:
        config: its folder; or its config, or the content of its config.json, with `model_type` one of SOURCES; for a
            .pth file `rwkv7_config(weights)`.
        weights: its state dict, as in its safetensors files; None: those of the folder.

    Raises:
        ValueError: if the type of model or one of its options is not supported, a weight is missing or left over, or
            there are no weights.
        OSError: if the folder has no config.json.
    """
    if isinstance(config, str | Path):
        folder = Path(config)
        config = _read_config(folder)
        weights = _read_weights(folder) if weights is None else weights
    if not isinstance(weights, Mapping):
        raise ValueError(
            f"weights must be a state dict, tensors by name, got {type(weights).__name__}"
        )
    source, theirs = _find(config)
    for i, kind in enumerate(theirs.get("layer_types") or ()):
        if kind not in ("linear_attention", "mamba", "mamba2"):
            raise ValueError(
                f"layer_types must all be linear attention, got {kind!r} for layer {i}, which this package does not "
                "have; import_mixer imports single layers"
            )
    gates = [
        x.shape[0] for name, x in weights.items() if name.endswith("layers.0.mlp.gate_proj.weight")
    ]
    shared = {name: theirs[name] for name in (*SAME, *TOKENS) if name in theirs} | {
        "intermediate_size": sum(gates)
    }
    ours = source.config(**{**shared, **source.options(theirs)})
    found = _ours(source, theirs, weights)
    ends = [found[name] for name in ENDS if name in found]
    if len(ends) == 2 and not torch.equal(*ends):
        ours.tie_word_embeddings = False  # whatever the config says, as transformers reads it
    causal_lm = next(family.causal_lm for family in FAMILIES if family.config is source.config)
    model = causal_lm(ours)
    _load(model, found)
    return model.eval()


def import_mixer(
    config: PreTrainedConfig | Mapping[str, Any], weights: Weights, layer: int
) -> MemoryMixer:
    """Import one memory layer of another library's model as a mixer that computes the same function.

    Args:
        config: the config, or the content of its config.json, with `model_type` one of SOURCES.
        weights: the state dict; only the weights of this layer are needed.
        layer: number of the layer, counted from 0.

    Raises:
        ValueError: as `import_model` does, or if there is no such layer.
    """
    source, theirs = _find(config)
    check(
        layer in range(theirs["num_hidden_layers"]),
        "layer",
        "the number of a layer, counted from 0",
        layer,
    )
    sizes = {"hidden_size": theirs["hidden_size"], "num_hidden_layers": theirs["num_hidden_layers"]}
    ours = source.config(**sizes, **source.options(theirs))
    mixer: Any = ours.mixer_class(layer)(ours, layer)
    prefix = f"model.layers.{layer}.mixer."
    found = _ours(
        source,
        theirs,
        {name: x for name, x in weights.items() if re.search(rf"layers\.{layer}\.", name)},
    )
    _load(
        mixer,
        {name.removeprefix(prefix): x for name, x in found.items() if name.startswith(prefix)},
    )
    return mixer.eval()


def _read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise ValueError(
            "config must be the content of a config.json or a folder with it, which "
            f"huggingface_hub.snapshot_download makes of a repository, got {folder}"
        )
    return json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))


def _read_weights(folder: Path) -> Weights:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"weights must be given for {folder}, which has no safetensors files")
    return {name: x for file in files for name, x in load_file(file).items()}


def _find(config: PreTrainedConfig | Mapping[str, Any]) -> tuple[Source, dict]:
    is_config = isinstance(config, PreTrainedConfig | Mapping)
    check(is_config, "config", "a config or the content of a config.json", config)
    theirs = config.to_dict() if isinstance(config, PreTrainedConfig) else dict(config)
    kind: Any = theirs.get("model_type")
    check(kind in SOURCES, "model_type", f"one of {', '.join(SOURCES)}", kind)
    return SOURCES[kind], theirs


def _ours(source: Source, theirs: dict, weights: Weights) -> dict[str, Tensor]:
    """Weights under our names; convolutions have no dimension of size one here."""
    fused = source.fused(theirs)
    parts = {n: y for name, x in weights.items() for n, y in _apart(fused, name, x).items()}
    parts = {n: y for name, x in parts.items() for n, y in source.change(theirs, name, x).items()}
    found = {}
    for before, x in parts.items():
        name = _replace_start(before, OUTSIDE)
        if layer := re.fullmatch(r"(?:model\.layers|backbone\.layers|blocks)\.(\d+)\.(.+)", name):
            name = f"model.layers.{layer[1]}.{_replace_start(layer[2], source.inside)}"
        found[name] = x.squeeze(1) if name.endswith("_conv1d.weight") else x
    return found


def _apart(fused: Rows, name: str, x: Tensor) -> Weights:
    for projection, (groups, rows) in fused.items():
        if f".{projection}." in name:
            expected = groups * sum(rows.values())
            if len(x) != expected:
                raise ValueError(
                    f"weights must fit the config: {name} must have {expected} rows, got {len(x)}"
                )
            parts = x.unflatten(0, (groups, -1)).split([*rows.values()], dim=1)
            return {name.replace(projection, part): y.flatten(0, 1) for part, y in zip(rows, parts)}
    return {name: x}


def _replace_start(name: str, starts: Mapping[str, str]) -> str:
    start = next((start for start in starts if f"{name}.".startswith(f"{start}.")), "")
    return starts.get(start, "") + name.removeprefix(start)


def _load(module: nn.Module, found: dict[str, Tensor]) -> None:
    own = module.state_dict()
    for name, x in own.items():  # convolutions of the other library may have no bias
        if name.endswith("_conv1d.bias"):
            found.setdefault(name, torch.zeros_like(x))
    tied = (
        {"lm_head.weight"}
        if getattr(getattr(module, "config", None), "tie_word_embeddings", False)
        else set()
    )
    missing = sorted(set(own) - set(found) - tied)
    left = sorted(set(found) - set(own))
    if missing or left:
        raise ValueError(f"weights must fit the config: missing {missing[:3]}, unknown {left[:3]}")
    for name, x in found.items():
        shapes = [[*y.shape] for y in (own[name], x)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"weights must fit the config: {name} must have shape {shapes[0]}, got {shapes[1]}"
            )
    module.load_state_dict(found, strict=not tied)
