"""Mamba-3 is its published equations, and Mamba-2's where it has neither trapezoid nor rotation."""

import math

import torch
from torch.nn import functional as F

from cases import CASE, SIZES, make_model
from comparing import assert_close
from hf_memory.conversion import import_mixer, import_model
from hf_memory.mixers.base import Context
from hf_memory.ops import linear_attention


def made():
    """A layer in float64 whose parameters are all of size one, and a text."""
    mixer = make_model(CASE["mamba3"]).double().model.layers[0].mixer
    generator = torch.Generator().manual_seed(0)
    for parameter in mixer.parameters():
        parameter.data += 0.3 * torch.randn(
            parameter.shape, generator=generator, dtype=torch.float64
        )
    return mixer, torch.randn(2, 13, SIZES["hidden_size"], generator=generator, dtype=torch.float64)


def turned(x, angle):
    """Pairs of neighbouring channels as complex numbers, turned by [heads, pairs]; further channels are not."""
    n = angle.shape[-1]
    pairs = torch.view_as_complex(x[..., : 2 * n].unflatten(-1, (n, 2)).contiguous()) * torch.polar(
        torch.ones_like(angle), angle
    )
    return torch.cat([torch.view_as_real(pairs).flatten(-2), x[..., 2 * n :]], -1)


@torch.no_grad()
def test_a_layer_is_its_equations_one_token_at_a_time():
    mixer, tokens = made()
    heads = mixer.num_output_heads
    K = mixer.head_dim
    V = mixer.value_dim
    S = torch.zeros(2, heads, K, V).double()
    last = torch.zeros(2, heads, K, V).double()
    angle = 0.0
    outputs = []
    for x in tokens.unbind(1):
        q, k = (
            norm(proj(x).unflatten(-1, (-1, K)))
            for norm, proj in ((mixer.q_norm, mixer.q_proj), (mixer.k_norm, mixer.k_proj))
        )
        value = mixer.v_proj(x).unflatten(-1, (-1, V))
        share = mixer.share_proj(x).sigmoid()[..., None, None]
        step = F.softplus(mixer.decay.proj(x) + mixer.decay.dt_bias)
        decay = torch.exp(-step * F.softplus(mixer.decay.rate_proj(x)))[..., None, None]
        angle = angle + math.pi * step[..., None] * mixer.angle_proj(x).tanh()[:, None]
        q, k = (
            turned(y.repeat_interleave(heads // y.shape[1], 1) + bias, angle)
            for y, bias in ((q, mixer.q_bias), (k, mixer.k_bias))
        )
        new = k[..., None] * value[..., None, :]
        S = (
            decay * S
            + decay * step[..., None, None] * (1 - share) * last
            + step[..., None, None] * share * new
        )
        last = new
        o = torch.einsum("bhkv,bhk->bhv", S, q) + mixer.D[:, None] * value
        outputs.append(mixer.o_proj(o.flatten(1) * F.silu(mixer.g_proj(x))))
    assert_close(mixer(tokens)[0], torch.stack(outputs, 1))


@torch.no_grad()
def test_many_turns_lose_no_more_than_a_few():
    mixer, _ = made()
    mixer.decay.dt_bias += (
        20  # steps of 20: tokens turn by up to ten whole turns, so that a long text needs no time
    )
    x = torch.randn(
        1, 4096, SIZES["hidden_size"], generator=torch.Generator().manual_seed(1)
    ).double()
    expected = mixer(x)[0]
    lost = (mixer.float()(x.float())[0] - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert lost[:, -1024:].mean() < 4 * lost[:, :256].mean()


@torch.no_grad()
def test_without_trapezoid_and_rotation_it_is_mamba_2():
    mixer, x = made()
    mixer.share_proj.forward = lambda x: x.new_full(
        (*x.shape[:2], mixer.num_output_heads), torch.inf
    )
    mixer.angle_proj.weight.zero_()
    q, k, v, _ = mixer.heads_of(mixer.project(x, None), Context(None, None, None, {}))
    q = q + mixer.q_bias
    k = k + mixer.k_bias
    g, steps = mixer.decay(x)
    o = linear_attention(q, k, steps[..., None] * v, g, scale=1.0)[0] + mixer.D[:, None] * v
    assert_close(mixer(x)[0], mixer.o_proj(o.flatten(2) * F.silu(mixer.g_proj(x))))


THEIRS = {
    "model_type": "mamba3",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "expand": 2,
}
THEIRS |= {"state_size": 16, "n_groups": 2, "norm_eps": 1e-5, "rope_fraction": 0.5, "A_floor": 1e-4}


def their_weights():
    """Random float32 weights, in float64, with the names of flash-linear-attention and, in the mixer, of mamba-ssm."""
    shapes = {
        "in_proj.weight": (2 * 64 + 2 * 32 + 3 * 8 + 4, 32),
        "out_proj.weight": (32, 64),
        "dt_bias": (8,),
        "D": (8,),
    }
    shapes |= {
        f"{x}_{y}": shape
        for x in "BC"
        for y, shape in (("bias", (8, 1, 16)), ("norm.weight", (16,)))
    }
    shapes = {
        f"backbone.layers.{i}.mixer.{name}": shape
        for i in range(2)
        for name, shape in shapes.items()
    }
    shapes |= {f"backbone.layers.{i}.norm.weight": (32,) for i in range(2)}
    shapes |= {
        "backbone.embeddings.weight": (64, 32),
        "backbone.norm_f.weight": (32,),
        "lm_head.weight": (64, 32),
    }
    generator = torch.Generator().manual_seed(0)
    return {
        name: (0.3 * torch.randn(*shape, generator=generator)).double()
        for name, shape in shapes.items()
    }


def norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def their_layer(w, x):
    """One head of one token after the other, from the published step."""
    z, v, k, q, dt, rate, trap, angles = (x @ w["in_proj.weight"].T).split(
        [64, 64, 32, 32, 8, 8, 8, 4], -1
    )
    q, k = (
        norm(y.unflatten(-1, (2, 16)), w[f"{name}_norm.weight"]) for name, y in (("C", q), ("B", k))
    )
    outputs = torch.zeros(*x.shape[:2], 8, 8, dtype=x.dtype)
    for h in range(8):
        S = torch.zeros(len(x), 16, 8).double()
        before = torch.zeros(len(x), 16, 8).double()
        angle = 0.0
        for t in range(x.shape[1]):
            step = F.softplus(dt[:, t, h] + w["dt_bias"][h])
            angle = angle + math.pi * step[:, None] * angles[:, t].tanh()
            read, write = (
                turned((y[:, t, h // 4] + w[f"{name}_bias"][h, 0])[:, None], angle[:, None])[:, 0]
                for name, y in (("C", q), ("B", k))
            )
            alpha = (-step * F.softplus(rate[:, t, h])).exp()
            share = trap[:, t, h].sigmoid()
            value = v[:, t, 8 * h : 8 * h + 8]
            now = write[:, :, None] * value[:, None]
            S = (
                alpha[:, None, None] * S + (alpha * step * (1 - share))[:, None, None] * before
            ) + (step * share)[:, None, None] * now
            before = now
            outputs[:, t, h] = torch.einsum("bkv,bk->bv", S, read) + w["D"][h] * value
    return (outputs.flatten(2) * F.silu(z)) @ w["out_proj.weight"].T


@torch.no_grad()
def test_published_weights_are_imported():
    weights = their_weights()
    tokens = torch.arange(3, 31).view(2, 14)
    x = weights["backbone.embeddings.weight"][tokens]
    for i in range(2):
        own = {
            n.removeprefix(f"backbone.layers.{i}.mixer."): y
            for n, y in weights.items()
            if f"layers.{i}.mixer." in n
        }
        inputs = norm(x, weights[f"backbone.layers.{i}.norm.weight"])
        mixed = their_layer(own, inputs)
        assert_close(import_mixer(THEIRS, weights, i).double()(inputs)[0], mixed)
        x = x + mixed
    expected = norm(x, weights["backbone.norm_f.weight"]) @ weights["lm_head.weight"].T
    assert_close(import_model(THEIRS, weights).double()(tokens).logits, expected)
