"""Newer layers of flash-linear-attention under our names, beside loops over tokens written from their formulas."""

import pytest
import torch
from torch.nn import functional as F

from cases import random_tokens
from comparing import assert_close
from hf_memory.conversion import import_mixer, import_model
from test_other_libraries import FLA, convolve, fla_logits, norm

D = 8
H = 4
W = 32  # channels of a key, heads, and width
OPTIONS = {
    "comba": {"expand_v": 2.0, "num_v_heads": 8},
    "gated_deltaproduct": {
        "expand_v": 2.0,
        "num_householder": 2,
        "use_forget_gate": True,
        "allow_neg_eigval": True,
    },
    "kda": {"expand_v": 1.0, "num_v_heads": 8},
    "gated_deltanet2": {"expand_v": 1.0, "num_v_heads": 8, "allow_neg_eigval": True},
    "mesa_net": {},
    "forgetting_transformer": {"num_kv_heads": 2, "window_size": 7, "qkv_bias": True},
}


def config_of(kind):
    return {**FLA, "head_dim": D, "conv_size": 4, **OPTIONS[kind], "model_type": kind}


def shapes_of(kind):
    """Names and shapes in an attention layer."""
    config = config_of(kind)
    HV = config.get("num_v_heads", H)
    n = config.get("num_householder", 1)
    V = int(D * config.get("expand_v", 1))
    if kind == "forgetting_transformer":
        shapes = {
            f"{x}_proj.{y}": (rows, W)[: 2 if y == "weight" else 1]
            for x, rows in zip("qkvf", (W, W // 2, W // 2, H))
            for y in ("weight", "bias")
        }
        return shapes | {"o_proj.weight": (W, W)}
    rows = {"q": H * D, "k": n * H * D, "v": n * HV * V}
    shapes = {f"{x}_proj.weight": (size, W) for x, size in rows.items()} | {
        "o_proj.weight": (W, HV * V),
        "o_norm.weight": (V,),
    }
    shapes |= {
        f"{x}_conv1d.weight": (size, 1, 4)
        for x, size in rows.items()
        if kind != "mesa_net" or x != "v"
    }
    if kind in ("kda", "gated_deltanet2"):
        gates = HV if kind == "kda" else H
        shapes |= {
            "f_proj.0.weight": (V, W),
            "f_proj.1.weight": (gates * D, V),
            "A_log": (gates,),
            "dt_bias": (gates * D,),
        }
        shapes |= {
            "g_proj.0.weight": (V, W),
            "g_proj.1.weight": (HV * V, V),
            "g_proj.1.bias": (HV * V,),
        }
        more = (
            {"b_proj.weight": (HV, W)}
            if kind == "kda"
            else {"b_proj.weight": (H * D, W), "w_proj.weight": (HV * V, W)}
        )
        return shapes | more
    shapes |= {"a_proj.weight": (HV, W), "b_proj.weight": (n * HV, W)}
    if kind == "mesa_net":
        return shapes | {"a_proj.bias": (H,), "b_proj.bias": (H,), "lambda_params": (H * D,)}
    own = {"decay": (H,), "D": (H,)} if kind == "comba" else {}
    return shapes | own | {"A_log": (HV,), "dt_bias": (HV,), "g_proj.weight": (HV * V, W)}


def weights_of(kind):
    """Random float32 weights of a model of two layers, in float64."""
    block = {f"attn.{name}": shape for name, shape in shapes_of(kind).items()}
    block |= {"attn_norm.weight": (W,), "mlp_norm.weight": (W,), "mlp.gate_proj.weight": (48, W)}
    block |= {"mlp.up_proj.weight": (48, W), "mlp.down_proj.weight": (W, 48)}
    shapes = {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in block.items()}
    shapes |= {
        "model.embeddings.weight": (64, W),
        "model.norm.weight": (W,),
        "lm_head.weight": (64, W),
    }
    generator = torch.Generator().manual_seed(0)
    return {
        name: (0.3 * torch.randn(*shape, generator=generator)).double()
        for name, shape in shapes.items()
    }


def unit(x):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def forgetting(config, w, x):
    """Every pair of tokens of x [B, T, W] in a window."""
    q, k, v = (
        (x @ w[f"{y}_proj.weight"].T + w[f"{y}_proj.bias"]).unflatten(-1, (-1, D)) for y in "qkv"
    )
    forget = F.logsigmoid(x @ w["f_proj.weight"].T + w["f_proj.bias"])
    T = x.shape[1]
    o = torch.zeros_like(q)
    for h in range(H):
        for i in range(T):
            seen = range(max(0, i - config["window_size"] + 1), i + 1)
            s = [
                (q[:, i, h] * k[:, j, h // 2]).sum(-1) / D**0.5 + forget[:, j + 1 : i + 1, h].sum(1)
                for j in seen
            ]
            o[:, i, h] = torch.einsum("jb,bjd->bd", torch.stack(s).softmax(0), v[:, seen, h // 2])
    return o.flatten(2) @ w["o_proj.weight"].T


def decay_of(kind, config, w, x):
    """The logarithm of the decay [B, T, HV, 1 or D]."""
    if kind == "mesa_net":
        return F.logsigmoid(x @ w["a_proj.weight"].T + w["a_proj.bias"])[..., None]
    if "f_proj.0.weight" not in w:
        return (-w["A_log"].exp() * F.softplus(x @ w["a_proj.weight"].T + w["dt_bias"]))[..., None]
    g = F.softplus(x @ w["f_proj.0.weight"].T @ w["f_proj.1.weight"].T + w["dt_bias"]).unflatten(
        -1, (-1, D)
    )
    return (-w["A_log"].exp()[:, None] * g).repeat_interleave(
        config["num_v_heads"] // g.shape[2], 2
    )


def gate_of(kind, w, x):
    """What multiplies the output."""
    if "g_proj.0.weight" in w:
        return (x @ w["g_proj.0.weight"].T @ w["g_proj.1.weight"].T + w["g_proj.1.bias"]).sigmoid()
    if "g_proj.weight" not in w:
        return 1
    return (torch.sigmoid if kind == "comba" else F.silu)(x @ w["g_proj.weight"].T)


def layer(kind, config, w, x):
    """What a layer computes for x [B, T, W], one token and one step after the other."""
    if kind == "forgetting_transformer":
        return forgetting(config, w, x)
    HV = config.get("num_v_heads", H)
    n = config.get("num_householder", 1)
    parts = {y: x @ w[f"{y}_proj.weight"].T for y in "qkv"}
    for y in "qk" if kind == "mesa_net" else "qkv":
        parts[y] = F.silu(convolve(parts[y], w[f"{y}_conv1d.weight"]))
    q, k, v = (
        parts[y].unflatten(-1, shape)
        for y, shape in (("q", (H, D)), ("k", (n, H, D)), ("v", (n, HV, -1)))
    )
    p = k
    if kind == "comba":
        p = k * w["decay"].sigmoid()[:, None]
        q = q - w["D"][:, None] * p[:, :, 0]
    q, k, p = (unit(y).repeat_interleave(HV // H, -2) for y in (q, k, p))
    over = 2 if config.get("allow_neg_eigval") else 1
    beta = over * (x @ w["b_proj.weight"].T + w.get("b_proj.bias", 0)).sigmoid()
    g = decay_of(kind, config, w, x)
    S = torch.zeros(len(x), HV, D, v.shape[-1]).to(x)
    outputs = []
    products = torch.zeros(len(x), HV, D, D).to(x)
    for t in range(x.shape[1]):
        before = S
        decay = g[:, t].exp()[..., None]
        query = q[:, t]
        S = decay * S
        for i in range(n):
            key = k[:, t, i]
            value = v[:, t, i]
            reads = p[:, t, i]
            strength = beta[:, t].unflatten(-1, (n, -1))[:, i, :, None]
            if kind == "mesa_net":
                reads = 0 * reads
                products = decay * products + (strength * key)[..., None] * key[..., None, :]
                ridge = torch.diag_embed(F.softplus(w["lambda_params"]).view(H, D) + 0.25)
                query = D**0.5 * torch.linalg.solve(products + ridge, query)
            if kind == "gated_deltanet2":
                reads = beta[:, t].unflatten(-1, (H, D)).repeat_interleave(HV // H, 1) * reads
                strength = 1
                value = (x[:, t] @ w["w_proj.weight"].T).sigmoid().unflatten(-1, (HV, -1)) * value
            error = value - torch.einsum("bhkv,bhk->bhv", before if kind == "comba" else S, reads)
            S = S + key[..., None] * (strength * error)[..., None, :]
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, query) / D**0.5)
    o = norm(torch.stack(outputs, 1), w["o_norm.weight"], config).flatten(2)
    return (o * gate_of(kind, w, x)) @ w["o_proj.weight"].T


@pytest.mark.parametrize("kind", OPTIONS)
@torch.no_grad()
def test_an_imported_model_is_its_formulas(kind):
    config = config_of(kind)
    weights = weights_of(kind)
    tokens = random_tokens(2, 20)
    assert_close(
        import_model(config, weights).double()(tokens).logits,
        fla_logits(kind, config, weights, tokens, layer),
    )


@pytest.mark.parametrize("kind", ["gated_deltanet2", "forgetting_transformer"])
@torch.no_grad()
def test_one_layer_is_imported_alone(kind):
    config = config_of(kind)
    weights = weights_of(kind)
    x = torch.randn(2, 9, W, generator=torch.Generator().manual_seed(0)).double()
    mine = {
        name.removeprefix("model.layers.1.attn."): y
        for name, y in weights.items()
        if "layers.1.attn." in name
    }
    assert_close(import_mixer(config, weights, 1).double()(x)[0], layer(kind, config, mine, x))


@pytest.mark.parametrize(
    ("kind", "option", "message"),
    [
        ("comba", {"use_inner_decay": False}, "use_inner_decay must be True"),
        ("kda", {"lower_bound": -5.0}, "lower_bound must be None"),
        ("mesa_net", {"lambda_lower_bound": 0.1}, "lambda_lower_bound must be 0.25"),
        ("forgetting_transformer", {"qk_norm": True}, "qk_norm must be False"),
    ],
)
def test_what_is_not_ours_is_refused(kind, option, message):
    with pytest.raises(ValueError, match=message):
        import_model(config_of(kind) | option, weights_of(kind))
