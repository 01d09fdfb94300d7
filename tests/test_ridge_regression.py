"""Identities of ridge regression: each holds in float64 to rounding."""

import pytest
import torch

from cases import CASE, SIZES, make_model
from comparing import assert_close
from hf_memory.layers import unit_length
from hf_memory.mixers.base import Context
from hf_memory.ops import OPS, linear_attention, ridge_regression

example = next(op.example for op in OPS if op.op is ridge_regression)
T = 40
K = 6


def inputs(**options):
    return example(T=T, K=K, V=5, dtype=torch.float64, **options)


@pytest.mark.parametrize("backend", ["reference", "chunk"])
def test_a_memory_is_the_map_that_fits_all_pairs_best(backend):
    """The minimum over M of sum_j w_j |M^T k_j - v_j|^2 + M^T L M, with weights that decay."""
    x = inputs(B=1, H=1)
    del x["initial_state"]
    o, _ = ridge_regression(**x, backend=backend)
    for t in (0, 3, T - 1):
        k = x["k"][0, : t + 1, 0]
        v = x["v"][0, : t + 1, 0]
        L = x["ridge"][0].diag()
        weights = (
            x["beta"][0, : t + 1, 0]
            * (x["g"][0, : t + 1, 0].flip(0).cumsum(0).flip(0) - x["g"][0, : t + 1, 0]).exp()
        )
        left = torch.cat([weights.sqrt()[:, None] * k, L.sqrt()])
        right = torch.cat([weights.sqrt()[:, None] * v, 0 * v[:1].expand(K, -1)])
        fit = torch.linalg.lstsq(left, right).solution
        assert_close(o[0, t, 0], x["q"][0, t, 0] @ fit)


@pytest.mark.parametrize("backend", ["reference", "chunk"])
@pytest.mark.parametrize("case", ["nothing is solved", "a huge ridge", "orthonormal keys"])
def test_what_is_linear_attention(backend, case):
    x = inputs()
    factor = 1.0
    del x["initial_state"]
    if case == "nothing is solved":
        x["alpha"] = torch.zeros_like(x["beta"])
    elif case == "a huge ridge":
        x["ridge"] = torch.full_like(x["ridge"], factor := 1e12)
    else:  # each is written once, so that keys have equal shares
        x = {name: y if name == "ridge" else y[:, :K] for name, y in x.items()}
        x["k"] = torch.eye(K, dtype=torch.float64)[:, None].expand(2, K, 2, K)
        x |= {
            "beta": torch.ones_like(x["beta"]),
            "g": torch.zeros_like(x["g"]),
            "ridge": torch.full_like(x["ridge"], 0.5),
        }
        x["q"] = x["k"]
        factor = 1.5
    o, _ = ridge_regression(**x, backend=backend)
    expected, _ = linear_attention(x["q"], x["k"], x["beta"][..., None] * x["v"], x["g"], scale=1.0)
    assert_close(factor * o, expected)


@pytest.mark.parametrize("case", ["mesa", "kalman"])
@torch.no_grad()
def test_a_layer_is_its_equations_one_token_at_a_time(case):
    """Strength, decay, ridge and share of the solution are those of each head."""
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    mixer = make_model(CASE[case], **heads).double().model.layers[0].mixer
    generator = torch.Generator().manual_seed(0)
    random = {"generator": generator, "dtype": torch.float64}
    for parameter in mixer.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, **random)
    x = torch.randn(1, 14, SIZES["hidden_size"], **random)
    q, k, v, _ = mixer.heads_of(mixer.project(x, None), Context(None, None, None, {}))
    q, k, v = (unit_length(q)[0], unit_length(k)[0], v[0])  # [T, heads, channels]
    is_kalman = case == "kalman"
    strength = mixer.b_proj(x)[0].sigmoid()
    g = (mixer.decay(x)[0] if is_kalman else mixer.decay(x))[0]
    share = mixer.alpha_proj(x)[0].sigmoid() if is_kalman else torch.ones_like(strength)
    D = mixer.head_dim
    o = torch.zeros_like(v)
    for h in range(4):
        H = torch.zeros(D, D, dtype=torch.float64)
        S = torch.zeros(D, v.shape[2], dtype=torch.float64)
        for t in range(14):
            key = k[t, h // 2]
            query = q[t, h // 2]
            beta = (strength[t, h] + 1e-6) ** 2 if is_kalman else strength[t, h]
            H = g[t, h].exp() * H + beta * key.outer(key)
            S = g[t, h].exp() * S + beta * key.outer(v[t, h])
            if is_kalman:
                ridge = H.norm() / 50 * torch.ones(D, dtype=torch.float64)
            else:
                ridge = (1 + mixer.ridge[h * D : (h + 1) * D].exp()).log() + 1 / 4
            solution = torch.linalg.solve(H + ridge.diag(), query)
            read = share[t, h] * solution + (1 - share[t, h]) * query
            o[t, h] = S.T @ read * (D**-0.5 if is_kalman else 1)
    gate = mixer.output_gate.project(x)
    assert_close(mixer(x)[0], mixer.o_proj(mixer.output_gate(o[None], gate)))


def test_a_memory_without_regulariser_is_refused():
    x = inputs()
    del x["ridge"]
    with pytest.raises(ValueError, match="ratio must be positive without ridge, got 0"):
        ridge_regression(**x)
