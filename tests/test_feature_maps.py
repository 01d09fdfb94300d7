"""The feature maps compute the kernels that they are named for, and none looks ahead."""

import math

import pytest
import torch
from transformers import DynamicCache

from cases import Case, make_config, make_model, random_tokens
from comparing import assert_close
from hf_memory.mixers.base import Context
from hf_memory.mixers.feature_map import FeatureMap
from hf_memory.ops import feature_maps, linear_attention
from hf_memory.ops.feature_maps import FEATURE_MAPS


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_map(name):
    torch.manual_seed(0)
    config = make_config(Case("", "hf_memory_linear", {"feature_map": name, "feature_dim": 12}))
    phi = FeatureMap(config).double()
    phi.init_own_parameters()
    return phi


def attend(phi, q, k, v, state=None, backend="chunk", cu_seqlens=None, mask=None, normalize=True):
    """Linear attention on features; the state is that of the op, and that of the map."""
    state, states = state or (None, {})
    q, k, g, states = phi(q, k, Context(None, mask, cu_seqlens, states))
    options = {
        "normalize": normalize,
        "output_final_state": True,
        "initial_state": state,
        "backend": backend,
    }
    mask = None if mask is None else mask.bool()
    o, state = linear_attention(q, k, v, g, mask=mask, cu_seqlens=cu_seqlens, **options)
    return o, (state, states)


@pytest.mark.parametrize("name", FEATURE_MAPS)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("T", [1, 63, 64, 65, 200])
def test_chunk_equals_reference_on_features(name, normalize, T):
    phi = make_map(name)
    results = []
    for backend in ("chunk", "reference"):
        inputs = [random(1, T, 4, 8, seed=i).requires_grad_() for i in range(3)]
        past = attend(
            phi, *(random(1, 5, 4, 8, seed=i + 9) for i in range(3)), normalize=normalize
        )[1]
        o, _ = attend(phi, *inputs, past, backend, normalize=normalize)
        results.append([o, *torch.autograd.grad(o.square().sum(), inputs)])
    for chunk, reference in zip(
        *results, strict=True
    ):  # where features may be negative, the normaliser may be small
        assert_close(chunk, reference)


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_packed_and_padded_features_equal_those_alone(name):
    phi = make_map(name)
    bounds = [0, 20, 20, 21, 90]
    q, k, v = (random(1, 90, 4, 8, seed=i) for i in range(3))
    packed, _ = attend(phi, q, k, v, cu_seqlens=torch.tensor(bounds), normalize=False)
    apart = [
        attend(phi, q[:, a:b], k[:, a:b], v[:, a:b], normalize=False)[0]
        for a, b in zip(bounds, bounds[1:])
        if b > a
    ]
    assert_close(packed, torch.cat(apart, 1))
    mask = torch.ones(1, 90, dtype=torch.long)
    mask[:, :7] = 0
    padded, state = attend(phi, q, k, v, mask=mask, normalize=False)
    alone, expected = attend(phi, q[:, 7:], k[:, 7:], v[:, 7:], normalize=False)
    assert_close(padded[:, 7:], alone)
    assert_close(state[0], expected[0])


@pytest.mark.parametrize("name", FEATURE_MAPS)
@torch.no_grad()
def test_a_model_of_every_map_decodes_as_it_reads(name):
    normalize = name not in ("identity", "rfa", "relu")  # whose weights may sum to zero
    options = {
        "feature_map": name,
        "feature_dim": 16,
        "normalize": normalize,
        "output_norm": not normalize,
    }
    model = make_model(Case("", "hf_memory_linear", options)).double()
    tokens = random_tokens(2, 7)
    cache = DynamicCache(config=model.config)
    steps = [model(tokens[:, t : t + 1], past_key_values=cache).logits for t in range(7)]
    full = model(tokens).logits
    assert_close(torch.cat(steps, 1), full)


def test_an_unknown_map_is_refused_by_name():
    with pytest.raises(Exception, match="feature_map must be one of"):
        make_config(Case("", "hf_memory_linear", {"feature_map": "cosine"}))
    with pytest.raises(Exception, match="feature_dim must be set"):
        make_config(Case("", "hf_memory_linear", {"feature_map": "favor"}))


def test_simple_maps():
    x = random(3, 4)
    assert_close(feature_maps.elu(x), torch.where(x > 0, x + 1, x.exp()))
    assert_close(feature_maps.exp(x), x.exp())
    assert feature_maps.identity(x) is x
    assert feature_maps.exp(x.bfloat16()).dtype == torch.bfloat16


def test_dpfp_is_products_of_rolled_halves():
    x = random(5)
    r = torch.cat([x.relu(), (-x).relu()])
    expected = [r[i] * r[(i - j) % 10] for j in (1, 2) for i in range(10)]
    assert_close(feature_maps.dpfp(x, 2), torch.stack(expected))


def test_taylor_is_the_exponential_to_second_order():
    q = random(7, 6)
    k = random(7, 6, seed=1)
    s = (q * k).sum(-1) / math.sqrt(6)
    assert_close((feature_maps.taylor(q) * feature_maps.taylor(k)).sum(-1), 1 + s + s**2 / 2)


def test_hedgehog_is_a_distribution_over_signed_channels():
    x = random(1, 3, 2, 4)
    weight = random(2, 4, 4)
    y = torch.einsum("bthd,hdf->bthf", x, weight)
    assert_close(feature_maps.hedgehog(x, weight), torch.cat([y, -y], -1).softmax(-1))


def test_rfa_is_a_gaussian_kernel_on_average():
    x, y = torch.nn.functional.normalize(random(2, 8), dim=-1)
    W = feature_maps.orthogonal_projection(20000, 8, torch.Generator().manual_seed(0))
    kernel = (feature_maps.rfa(x, W) * feature_maps.rfa(y, W)).sum()
    assert kernel.item() == pytest.approx(math.exp(-(x - y).square().sum() / 2), abs=0.01)


def test_favor_is_softmax_on_average():
    q, k, v = (random(1, 12, 1, 8, seed=i) * 0.4 for i in range(3))
    W = feature_maps.orthogonal_projection(20000, 8, torch.Generator().manual_seed(0))
    phi_k, g, _ = feature_maps.favor_key(k, W)
    o, _ = linear_attention(feature_maps.favor_query(q, W), phi_k, v, g, normalize=True)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True
    ).transpose(1, 2)
    torch.testing.assert_close(o, expected, rtol=0, atol=0.03)


def test_favors_running_maximum_changes_nothing_but_the_range():
    q, k, v = (random(1, 70, 1, 8, seed=i) for i in range(3))
    W = feature_maps.orthogonal_projection(16, 8, torch.Generator().manual_seed(0)).double()
    x = k * 8**-0.25
    plain = (x @ W.mT - x.square().sum(-1, keepdim=True) / 2).exp()
    phi_k, g, m = feature_maps.favor_key(k, W)
    phi_q = feature_maps.favor_query(q, W)
    weights = torch.einsum("bihf,bjhf->bhij", phi_q, plain).tril()
    expected = torch.einsum("bhij,bjhv->bihv", weights / weights.sum(-1, keepdim=True), v)
    o, _ = linear_attention(phi_q, phi_k, v, g, normalize=True)
    torch.testing.assert_close(
        o, expected, rtol=0, atol=1e-3
    )  # the normaliser's eps is on another scale
    assert (g <= 0).all()
    assert phi_k.max() <= 1
    assert_close(m, plain.log().amax((1, 3)))


def test_favor_of_large_keys_stays_finite_and_causal():
    k = random(1, 30, 1, 8) * 100
    W = feature_maps.orthogonal_projection(16, 8, torch.Generator().manual_seed(0))
    features, g, _ = feature_maps.favor_key(k, W)
    assert features.isfinite().all()
    assert g.isfinite().all()
    for one, other in zip(
        feature_maps.favor_key(k[:, :20], W)[:2], (features[:, :20], g[:, :20]), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_orthogonal_projection_is_orthogonal_in_blocks():
    W = feature_maps.orthogonal_projection(10, 4, torch.Generator().manual_seed(0)).double()
    for block in W.split(4):
        gram = block @ block.mT
        torch.testing.assert_close(gram, gram.diagonal().diag(), rtol=0, atol=1e-5)
