"""A layer of Memory Mosaics is the published equations, one token at a time."""

import torch
from torch.nn import functional as F

from cases import CASE, make_model
from comparing import assert_close

D = 8


def unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def norm(x, layer):
    return F.rms_norm(x, x.shape[-1:], layer.weight, layer.variance_epsilon)


def leaky(x, average):
    """Keys of all tokens [T, H, D]."""
    n = torch.zeros_like(x[0])
    keys = []
    for x_t in x:
        n = torch.exp(-average.rate.abs())[:, None] * n + x_t
        keys.append(average.scale.exp()[:, None] * unit(n))
    return torch.stack(keys)


@torch.no_grad()
def test_a_layer_is_its_equations():
    mixer = make_model(CASE["mosaic-full"]).double().model.layers[0].mixer
    for x in mixer.parameters():
        x += 0.2 * torch.randn(
            x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(x.numel())
        )
    x = torch.randn(1, 9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u = norm(x[0], mixer.input_layernorm)
    k = leaky(mixer.k_proj(u).unflatten(-1, (-1, D)), mixer.key_average)
    w = mixer.v_proj(u).unflatten(-1, (-1, D))
    value = mixer.value_average
    share = value.share[:, None]
    scale = value.scale.exp()[:, None]
    v = torch.stack([scale * unit(share * w[i] + (1 - share) * w[i + 1]) for i in range(8)])
    recalled = [torch.zeros_like(k[0])]
    for t in range(1, 9):
        weights = torch.einsum("hd,ihd->ih", k[t], k[:t]).softmax(0)
        recalled.append(torch.einsum("ih,ihd->hd", weights, v[:t]))
    y = mixer.o_proj(torch.stack(recalled).flatten(1))
    q = mixer.q_proj(norm(x[0] + y, mixer.post_attention_layernorm)).unflatten(-1, (-1, D))
    q = leaky(q, mixer.query_average)
    memory = mixer.persistent
    weights = torch.einsum("thd,hnd->thn", q, memory.keys).softmax(-1)
    z = torch.einsum("thn,hnd->thd", weights, memory.values) * memory.scale.exp()[:, None]
    expected = y + mixer.persistent_o_proj(z.flatten(1))
    assert_close(mixer(x)[0][0], expected)
