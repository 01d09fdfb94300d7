"""Models of other libraries are the same function under our names."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from cases import random_tokens
from comparing import assert_close, in_float64
from hf_memory.conversion import import_mixer, import_model, rwkv7_config
from hf_memory.conversion.other_libraries import SOURCES
from hf_memory.modeling.registration import IMPORTED
from hf_memory.ops import delta_rule, linear_attention

DELTA_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3,
    "pad_token_id": 0,
}
LINEAR = ["linear_attention"] * 2
HYBRID = ["linear_attention", "full_attention"]
MAMBA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "head_dim": 16,
    "state_size": 8,
}
MAMBA |= {"pad_token_id": 0, "chunk_size": 16}
OWN = {
    "mamba": (
        MambaConfig,
        MambaForCausalLM,
        {**MAMBA, "time_step_rank": 3, "tie_word_embeddings": False},
    ),
    "mamba-tied": (MambaConfig, MambaForCausalLM, {**MAMBA, "use_conv_bias": False}),
    "mamba2": (Mamba2Config, Mamba2ForCausalLM, {**MAMBA, "n_groups": 1}),
    "mamba2-groups": (
        Mamba2Config,
        Mamba2ForCausalLM,
        {**MAMBA, "n_groups": 2, "use_conv_bias": False},
    ),
    "kimi_linear": (
        KimiLinearConfig,
        KimiLinearForCausalLM,
        {
            **{
                name: x
                for name, x in DELTA_SIZES.items()
                if not name.startswith("linear_num") and "_dim" not in name
            },
            "linear_num_heads": 4,
            "linear_head_dim": 8,
            "linear_conv_kernel_dim": 3,
            "num_experts": 2,
            "num_experts_per_token": 1,
            "moe_intermediate_size": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
            "eos_token_id": 2,
        },
    ),
    "olmo_hybrid": (
        OlmoHybridConfig,
        OlmoHybridForCausalLM,
        {**DELTA_SIZES, "linear_allow_neg_eigval": True},
    ),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM, {**DELTA_SIZES, "num_experts": 0}),
}


def make_own(name, layer_types=None):
    """A random model of transformers; no parameter is zero or one, which would hide that it was not carried over."""
    config, model, options = OWN[name]
    if layer_types and "mamba" not in name:
        options = {**options, "layer_types": layer_types, "num_hidden_layers": len(layer_types)}
    torch.manual_seed(0)
    made = model(config(**options)).eval()
    for parameter in made.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return made


WHOLE = [
    "mamba",
    "mamba-tied",
    "mamba2",
    "mamba2-groups",
    "qwen3_next",
]  # OLMo-Hybrid must have attention


@pytest.mark.parametrize("name", WHOLE)
@torch.no_grad()
def test_a_head_that_a_config_ties_in_vain_is_imported(name):
    theirs = make_own(name, LINEAR)
    theirs.lm_head.weight = torch.nn.Parameter(torch.randn_like(theirs.lm_head.weight))
    theirs.config.tie_word_embeddings = True
    ours = import_model(theirs.config, theirs.state_dict())
    tokens = random_tokens(2, 20)
    expected = in_float64(ours)(tokens).logits
    assert_close(theirs(tokens, use_cache=False).logits, expected, ours(tokens).logits)
    assert torch.equal(ours.model.embed_tokens.weight, theirs.get_input_embeddings().weight)


@pytest.mark.parametrize("name", WHOLE)
def test_logits_equal_those_of_transformers(name):
    theirs = make_own(name, LINEAR)
    ours = import_model(theirs.config, theirs.state_dict())
    tokens = random_tokens(2, 50)
    cache = DynamicCache(config=ours.config)
    with torch.no_grad():
        exact = in_float64(ours)
        expected = exact(tokens).logits
        assert_close(theirs(tokens, use_cache=False).logits, expected, ours(tokens).logits)
        steps = [
            exact(token, past_key_values=cache).logits for token in tokens[:, :9].split(1, dim=1)
        ]
        assert_close(torch.cat(steps, 1), expected[:, :9])


@pytest.mark.parametrize("name", ["kimi_linear", "olmo_hybrid", "qwen3_next"])
def test_one_memory_layer_of_a_hybrid_is_taken_over(name):
    theirs = make_own(name, HYBRID)
    mixer = import_mixer(theirs.config, theirs.state_dict(), 0)
    x = torch.randn(2, 20, 32)
    with torch.no_grad():
        layer = theirs.model.layers[0]
        found = (layer.self_attn if name == "kimi_linear" else layer.linear_attn)(x)
        assert_close(found, in_float64(mixer)(x.double())[0], mixer(x)[0])
    with pytest.raises(ValueError, match="import_mixer imports single layers"):
        import_model(theirs.config, theirs.state_dict())


FLA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "norm_eps": 1e-5,
    "attn": None,
}
FLA |= {"hidden_act": "swish"}
FLA_CONFIGS = {
    "linear_attn": {"feature_map": "elu", "expand_k": 1.0, "expand_v": 1.0},
    "retnet": {"expand_k": 1.0, "expand_v": 2.0},
    "gla": {"expand_k": 0.5, "expand_v": 1.0, "num_kv_heads": 2},
    "delta_net": {
        "expand_k": 1.0,
        "expand_v": 1.0,
        "conv_size": 4,
        "use_gate": False,
        "allow_neg_eigval": True,
    },
    "gated_deltanet": {
        "expand_v": 2.0,
        "head_dim": 8,
        "num_v_heads": 8,
        "conv_size": 4,
        "use_gate": True,
    },
}


def fla_weights(kind, config, seed=0):
    """Random float64 weights with flash-linear-attention's names and shapes."""
    width = config["hidden_size"]
    heads = config["num_heads"]
    generator = torch.Generator().manual_seed(seed)
    keys = int(width * config.get("expand_k", 1))
    values = int(width * config["expand_v"])
    groups = heads // (config.get("num_kv_heads") or heads)
    value_heads = config.get("num_v_heads") or heads
    if kind == "gated_deltanet":
        keys = heads * config["head_dim"]
        values = value_heads * int(config["head_dim"] * config["expand_v"])
    shapes = {"q_proj.weight": (keys, width), "k_proj.weight": (keys // groups, width)}
    shapes |= {"v_proj.weight": (values // groups, width), "o_proj.weight": (width, values)}
    norm = {"linear_attn": "norm", "retnet": "g_norm_swish_gate", "gla": "g_norm_swish_gate"}.get(
        kind, "o_norm"
    )
    shapes[f"{norm}.weight"] = (values // value_heads,)
    if kind in ("retnet", "gla") or config.get("use_gate"):
        shapes["g_proj.weight"] = (values, width)
    if kind == "gla":
        shapes |= {"gk_proj.0.weight": (16, width), "gk_proj.1.weight": (keys // groups, 16)}
        shapes["gk_proj.1.bias"] = (keys // groups,)
    if "delta" in kind:
        shapes |= {"b_proj.weight": (value_heads, width), "q_conv1d.weight": (keys, 1, 4)}
        shapes |= {"k_conv1d.weight": (keys, 1, 4), "v_conv1d.weight": (values, 1, 4)}
    if kind == "gated_deltanet":
        shapes |= {
            "a_proj.weight": (value_heads, width),
            "A_log": (value_heads,),
            "dt_bias": (value_heads,),
        }
    block = {f"attn.{name}": shape for name, shape in shapes.items()}
    block |= {
        "attn_norm.weight": (width,),
        "mlp_norm.weight": (width,),
        "mlp.gate_proj.weight": (48, width),
    }
    block |= {"mlp.up_proj.weight": (48, width), "mlp.down_proj.weight": (width, 48)}
    shapes = {
        f"model.layers.{i}.{name}": s
        for i in range(config["num_hidden_layers"])
        for name, s in block.items()
    }
    shapes |= {
        "model.embeddings.weight": (64, width),
        "model.norm.weight": (width,),
        "lm_head.weight": (64, width),
    }
    return {
        name: torch.randn(*s, generator=generator, dtype=torch.float64) * 0.3
        for name, s in shapes.items()
    }


def fla_mixer(kind, config, w, x):
    """What a layer of flash-linear-attention computes, written from its formulas."""
    heads = config["num_heads"]
    q, k, v = (x @ w[f"{name}_proj.weight"].T for name in "qkv")
    if "delta" in kind:
        q, k, v = (
            F.silu(convolve(y, w[f"{name}_conv1d.weight"])) for name, y in zip("qkv", (q, k, v))
        )
    D = q.shape[-1] // heads
    q = q.unflatten(-1, (heads, D))
    k = k.unflatten(-1, (-1, D))
    v = v.unflatten(-1, (config.get("num_v_heads") or k.shape[2], -1))
    reference = {"backend": "reference"}
    if kind == "linear_attn":
        o = linear_attention(F.elu(q) + 1, F.elu(k) + 1, v, **reference)[0]
        return norm(o, w["norm.weight"], config).flatten(-2) @ w["o_proj.weight"].T
    if kind == "retnet":
        g = torch.log(1 - 2.0 ** (-5 - torch.arange(heads, dtype=torch.float64)))
        o = linear_attention(rotate(q), rotate(k), v, g.expand(*x.shape[:2], heads), **reference)[0]
    elif kind == "gla":
        g = x @ w["gk_proj.0.weight"].T @ w["gk_proj.1.weight"].T + w["gk_proj.1.bias"]
        k, v, g = (
            y.repeat_interleave(heads // k.shape[2], 2) for y in (k, v, g.unflatten(-1, (-1, D)))
        )
        o = linear_attention(q, k, v, F.logsigmoid(g) / 16, **reference)[0]
    else:
        q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
        beta = (x @ w["b_proj.weight"].T).sigmoid() * (2 if config.get("allow_neg_eigval") else 1)
        g = None
        if kind == "gated_deltanet":
            g = -w["A_log"].exp() * F.softplus(x @ w["a_proj.weight"].T + w["dt_bias"])
        o = delta_rule(q, k, v, beta, g, **reference)[0]
    o = norm(o, w.get("g_norm_swish_gate.weight", w.get("o_norm.weight")), config).flatten(-2)
    return (o * F.silu(x @ w["g_proj.weight"].T) if "g_proj.weight" in w else o) @ w[
        "o_proj.weight"
    ].T


def norm(x, weight, config):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config["norm_eps"]) * weight


def convolve(x, weight):
    return F.conv1d(F.pad(x.mT, (weight.shape[-1] - 1, 0)), weight, groups=len(weight)).mT


def rotate(x):
    D = x.shape[-1]
    angle = torch.arange(x.shape[1]).to(x)[:, None] * (10000.0 ** (-torch.arange(0, D, 2) / D)).to(
        x
    )
    (a, b), cos, sin = x.chunk(2, -1), angle.cos()[:, None], angle.sin()[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def fla_logits(kind, config, weights, tokens, mixer=fla_mixer):
    x = weights["model.embeddings.weight"][tokens]
    for i in range(config["num_hidden_layers"]):
        w = {name[15:]: y for name, y in weights.items() if name.startswith(f"model.layers.{i}.")}
        attn = {name[5:]: y for name, y in w.items() if name.startswith("attn.")}
        x = x + mixer(kind, config, attn, norm(x, w["attn_norm.weight"], config))
        y = norm(x, w["mlp_norm.weight"], config)
        gate = F.silu(y @ w["mlp.gate_proj.weight"].T)
        x = x + (gate * (y @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
    return norm(x, weights["model.norm.weight"], config) @ weights["lm_head.weight"].T


@pytest.mark.parametrize("kind", FLA_CONFIGS)
def test_logits_equal_the_formulas_of_flash_linear_attention(kind):
    config = {**FLA, **FLA_CONFIGS[kind], "model_type": kind}
    weights = {name: x.float() for name, x in fla_weights(kind, config).items()}
    tokens = random_tokens(2, 40)
    expected, rounded = (
        fla_logits(kind, config, x, tokens) for x in (in_float64(weights), weights)
    )
    with torch.no_grad():
        logits = import_model(config, weights)(tokens).logits
    assert expected.std() > 0.1
    assert_close(logits, expected, rounded)


RWKV7 = {
    "model_type": "rwkv7",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "head_dim": 8,
}
RWKV7 |= {
    "decay_low_rank_dim": 4,
    "a_low_rank_dim": 5,
    "v_low_rank_dim": 6,
    "gate_low_rank_dim": 7,
    "norm_eps": 1e-5,
}
RWKV7 |= {
    "hidden_ratio": 2.0,
    "intermediate_size": None,
    "attn": None,
    "hidden_act": "sqrelu",
    "value_dim": [32] * 3,
}
LORAS = {"w": 4, "a": 5, "v": 6, "g": 7}


def rwkv7_weights():
    """Random weights with flash-linear-attention's names and shapes; float32 holds them exactly."""
    D = RWKV7["hidden_size"]
    H = RWKV7["head_dim"]
    norm = {"weight": (D,), "bias": (D,)}
    attn = {f"{x}_proj.weight": (D, D) for x in "rkvo"} | {f"x_{x}": (1, 1, D) for x in "rwkvag"}
    attn |= {"k_k": (D,), "k_a": (D,), "r_k": (D // H, H)} | {
        f"g_norm.{name}": shape for name, shape in norm.items()
    }
    for x, rank in LORAS.items():
        attn |= {f"{x}_lora.lora.0.weight": (rank, D), f"{x}_lora.lora.2.weight": (D, rank)}
        attn |= {} if x == "g" else {f"{x}_lora.lora.2.bias": (D,)}
    block = {f"attn.{name}": shape for name, shape in attn.items()}
    block |= {
        f"{part}_norm.{name}": shape for part in ("attn", "ffn") for name, shape in norm.items()
    }
    block |= {"ffn.x_k": (D,), "ffn.key.weight": (2 * D, D), "ffn.value.weight": (D, 2 * D)}
    shapes = {f"model.layers.{i}.{name}": shape for i in range(3) for name, shape in block.items()}
    shapes |= {
        f"{part}.{name}": shape
        for part in ("model.layers.0.pre_norm", "model.norm")
        for name, shape in norm.items()
    }
    shapes |= {"model.embeddings.weight": (64, D), "lm_head.weight": (64, D)}
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(*shape, generator=generator) * 0.4 for name, shape in shapes.items()
    }
    return {name: x for name, x in weights.items() if "layers.0.attn.v_lora" not in name}


def rwkv7_pth(weights):
    """The same under the names of the .pth files, with low ranks transposed and what the first layer does not use."""
    parts = {
        "attn.": "att.",
        "attn_norm": "ln1",
        "ffn_norm": "ln2",
        "pre_norm": "ln0",
        "r_proj": "receptance",
    }
    parts |= {
        "k_proj": "key",
        "v_proj": "value",
        "o_proj": "output",
        "g_norm": "ln_x",
        "model.layers": "blocks",
    }
    parts |= {
        "model.embeddings": "emb",
        "model.norm": "ln_out",
        "lm_head": "head",
        "_lora.lora.2.bias": "0",
    }
    parts |= {"_lora.lora.0.weight": "1", "_lora.lora.2.weight": "2"}
    renamed = {"blocks.0.att.v1": torch.randn(32, 6)}
    for name, x in weights.items():
        y = x.T if re.search("_lora.*weight", name) else x
        for old, new in parts.items():
            name = name.replace(old, new)
        renamed[name] = y.view(1, 1, -1) if re.search(r"\.([wav]0|k_k|k_a|ffn\.x_k)$", name) else y
    return renamed


def rwkv7_old(weights):
    """The same with the mixes of a layer in one tensor."""
    others = {name: x for name, x in weights.items() if ".attn.x_" not in name}
    mixes = {f"model.layers.{i}.attn.x_x": torch.cat([weights[f"model.layers.{i}.attn.x_{x}"][0] for x in "rwkvag"])
             for i in range(3)}  # fmt: skip
    return others | mixes


def rwkv7_logits(weights, tokens):
    """https://arxiv.org/abs/2503.14456, section 4 and appendix, one token at a time, of [T] tokens."""
    w = {name.removeprefix("model."): x.double() for name, x in weights.items()}
    D = 8
    H = 4
    before = {(i, part): torch.zeros(32).double() for i in range(3) for part in ("attn", "ffn")}
    S = [torch.zeros(H, D, D).double() for _ in range(3)]
    logits = []  # rows are values here, as in the paper

    def layer_norm(x, name):
        return (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt() * w[f"{name}.weight"] + w[
            f"{name}.bias"
        ]

    def shifted(x, i, part, mix):
        return x + (before[i, part] - x) * w[f"layers.{i}.{part}.x_{mix}"].flatten()

    def lora(x, i, name, activation=lambda x: x):
        base = f"layers.{i}.attn.{name}_lora.lora"
        return w[f"{base}.2.weight"] @ activation(w[f"{base}.0.weight"] @ x) + w.get(
            f"{base}.2.bias", 0
        )

    for token in tokens:
        x = layer_norm(w["embeddings.weight"][token], "layers.0.pre_norm")
        for i in range(3):
            own = {
                name.removeprefix(f"layers.{i}.attn."): y
                for name, y in w.items()
                if f"layers.{i}.attn." in name
            }
            y = layer_norm(x, f"layers.{i}.attn_norm")
            m = {mix: shifted(y, i, "attn", mix) for mix in "rwkvag"}
            before[i, "attn"] = y
            r, k, v = (own[f"{name}_proj.weight"] @ m[name] for name in "rkv")
            if i == 0:
                first = v
            else:
                v = v + (first - v) * lora(m["v"], i, "v").sigmoid()
            decay = torch.exp(-math.exp(-0.5) * lora(m["w"], i, "w", torch.tanh).sigmoid()).view(
                H, D
            )
            a = lora(m["a"], i, "a").sigmoid()
            g = lora(m["g"], i, "g", torch.sigmoid)
            kappa = (k * own["k_k"]).view(H, D)
            kappa = kappa / kappa.norm(dim=-1, keepdim=True)
            k = (k * (1 + (a - 1) * own["k_a"])).view(H, D)
            r = r.view(H, D)
            v = v.view(H, D)
            a = a.view(H, D)
            o = torch.empty(H, D).double()
            for h in range(H):
                S[i][h] = S[i][h] @ (
                    decay[h].diag() - torch.outer(kappa[h], a[h] * kappa[h])
                ) + torch.outer(v[h], k[h])
                o[h] = S[i][h] @ r[h]
            o = (o - o.mean(-1, keepdim=True)) / (
                o.var(-1, correction=0, keepdim=True) + D * 1e-5
            ).sqrt()
            o = o.flatten() * own["g_norm.weight"] + own["g_norm.bias"]
            o = o + ((r * k * own["r_k"]).sum(-1, keepdim=True) * v).flatten()
            x = x + own["o_proj.weight"] @ (o * g)
            y = layer_norm(x, f"layers.{i}.ffn_norm")
            m_k = shifted(y, i, "ffn", "k")
            before[i, "ffn"] = y
            x = (
                x
                + w[f"layers.{i}.ffn.value.weight"]
                @ (w[f"layers.{i}.ffn.key.weight"] @ m_k).relu().square()
            )
        logits.append(w["lm_head.weight"] @ layer_norm(x, "norm"))
    return torch.stack(logits)


@pytest.mark.parametrize("named", [dict, rwkv7_old, rwkv7_pth], ids=["fla", "old fla", "pth"])
def test_rwkv7_equals_its_published_equations(named):
    weights = rwkv7_weights()
    tokens = random_tokens(1, 40)
    theirs = named(weights)
    config = rwkv7_config(theirs) if named is rwkv7_pth else RWKV7
    expected = rwkv7_logits(weights, tokens[0])
    with torch.no_grad():
        logits = import_model(config, theirs).double()(tokens).logits[0]
    assert expected.std() > 0.1
    assert_close(logits, expected)


@pytest.mark.parametrize(
    ("kind", "option", "message"),
    [
        ("gla", {"use_short_conv": True}, "use_short_conv must be False"),
        ("linear_attn", {"feature_map": "elementwise_product"}, "feature_map must be 'elu' or"),
        ("delta_net", {"qk_norm": "sum"}, "qk_norm must be 'l2'"),
        ("delta_net", {"attn": {"layers": [1]}}, "attn must be None"),
        (
            "delta_net",
            {"model_type": "rwkv6"},
            "model_type must be one of linear_attn, .*got 'rwkv6'",
        ),
        ("delta_net", {"num_hidden_layers": 1}, "unknown"),
        ("delta_net", {"num_hidden_layers": 3}, "missing"),
        ("gla", {"vocab_size": 7}, r"model.embed_tokens.weight must have shape \[7, .*got \["),
    ],
)
def test_what_is_not_ours_is_refused(kind, option, message):
    config = {**FLA, **FLA_CONFIGS[kind], "model_type": kind}
    weights = fla_weights(kind, config)
    with pytest.raises(ValueError, match=message):
        import_model({**config, **option}, weights)


def save_gla(folder):
    """A folder as flash-linear-attention saves it; returns its config and weights."""
    config = {**FLA, **FLA_CONFIGS["gla"], "model_type": "gla", "architectures": ["GLAForCausalLM"]}
    weights = fla_weights("gla", config)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: x.contiguous() for name, x in weights.items()}, folder / "model.safetensors")
    return config, weights


def test_a_folder_of_another_library_is_imported(tmp_path):
    config, weights = save_gla(tmp_path)
    tokens = random_tokens(1, 9)
    with torch.no_grad():
        expected = import_model(config, weights)(tokens).logits
        assert torch.equal(import_model(str(tmp_path))(tokens).logits, expected)


def test_the_page_imports_a_folder(tmp_path, tokenizer, monkeypatch):
    """The code of docs/from_fla.md, where the folder that it names exists."""
    save_gla(tmp_path / "gla")
    tokenizer.save_pretrained(tmp_path / "gla")
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[1] / "docs" / "from_fla.md").read_text(encoding="utf-8")
    (code,) = (
        x
        for x in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
        if "import_model" in x
    )
    names = {}
    exec(code, names)
    assert names["model"].config.model_type == "hf_memory_gated"


def test_loading_a_folder_of_another_library_names_the_import(tmp_path, run):
    save_gla(tmp_path)
    with pytest.raises(ValueError, match=r"'gla' .*import_model\(FOLDER\)"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    code, _, error = run("info", tmp_path)
    assert code == 2
    assert "import_model(FOLDER)" in error


def test_types_that_name_the_import_are_those_of_other_libraries():
    ours_too = {"kimi_linear", "mamba", "mamba2", "qwen3_next", "olmo_hybrid"}  # transformers' own
    assert {*IMPORTED} == SOURCES.keys() - ours_too


def test_an_import_refuses_what_is_neither_a_folder_nor_a_config(tmp_path):
    with pytest.raises(ValueError, match=r"config must be the content .* got .*nowhere"):
        import_model(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text('{"model_type": "gla"}', encoding="utf-8")
    with pytest.raises(ValueError, match="weights must be given"):
        import_model(tmp_path)
    with pytest.raises(ValueError, match=r"weights must be a state dict, .* got NoneType"):
        import_model({"model_type": "gla"})
    with pytest.raises(ValueError, match="config must be a config"):
        import_mixer(str(tmp_path), {}, 0)


def test_a_layer_that_is_imported_must_exist():
    theirs = make_own("qwen3_next", HYBRID)
    with pytest.raises(ValueError, match=r"layer must be the number of a layer, .* got 2"):
        import_mixer(theirs.config, theirs.state_dict(), 2)


def test_steps_of_mamba2_may_not_be_clamped():
    theirs = make_own("mamba2")
    config = {**theirs.config.to_dict(), "time_step_limit": (0.0, 0.1)}
    with pytest.raises(ValueError, match="time_step_limit must be"):
        import_model(config, theirs.state_dict())
    assert math.isinf(theirs.config.time_step_limit[1])
