"""Mamba-3 is its published equations, and Mamba-2's where it has neither trapezoid nor rotation."""

import math

import torch
from torch.nn import functional as F

from cases import CASE, SIZES, make_model
from comparing import assert_close
from hf_memory.mixers.base import Context
from hf_memory.ops import linear_attention


def made():
    """A layer in float64 whose parameters are all of size one, and a text."""
    mixer, generator = make_model(CASE["mamba3"]).double().model.layers[0].mixer, torch.Generator().manual_seed(0)
    for parameter in mixer.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
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
    heads, K, V = mixer.num_output_heads, mixer.head_dim, mixer.value_dim
    S, last, angle = torch.zeros(2, heads, K, V).double(), torch.zeros(2, heads, K, V).double(), 0.0
    outputs = []
    for x in tokens.unbind(1):
        q, k = (
            norm(proj(x).unflatten(-1, (-1, K)))
            for norm, proj in ((mixer.q_norm, mixer.q_proj), (mixer.k_norm, mixer.k_proj))
        )
        value, share = mixer.v_proj(x).unflatten(-1, (-1, V)), mixer.share_proj(x).sigmoid()[..., None, None]
        step = F.softplus(mixer.decay.proj(x) + mixer.decay.dt_bias)
        decay = torch.exp(-step * F.softplus(mixer.decay.rate_proj(x)))[..., None, None]
        angle = angle + math.pi * step[..., None] * mixer.angle_proj(x).tanh()[:, None]
        q, k = (
            turned(y.repeat_interleave(heads // y.shape[1], 1) + bias, angle)
            for y, bias in ((q, mixer.q_bias), (k, mixer.k_bias))
        )
        new = k[..., None] * value[..., None, :]
        S = decay * S + decay * step[..., None, None] * (1 - share) * last + step[..., None, None] * share * new
        last = new
        o = torch.einsum("bhkv,bhk->bhv", S, q) + mixer.D[:, None] * value
        outputs.append(mixer.o_proj(o.flatten(1) * F.silu(mixer.g_proj(x))))
    assert_close(mixer(tokens)[0], torch.stack(outputs, 1))


@torch.no_grad()
def test_without_trapezoid_and_rotation_it_is_mamba_2():
    mixer, x = made()
    mixer.share_proj.forward = lambda x: x.new_full((*x.shape[:2], mixer.num_output_heads), torch.inf)
    mixer.angle_proj.weight.zero_()
    q, k, v, _ = mixer.project(x, Context(None, None, None, {}))
    q, k = q + mixer.q_bias, k + mixer.k_bias
    g, steps = mixer.decay(x)
    o = linear_attention(q, k, steps[..., None] * v, g, scale=1.0)[0] + mixer.D[:, None] * v
    assert_close(mixer(x)[0], mixer.o_proj(o.flatten(2) * F.silu(mixer.g_proj(x))))
