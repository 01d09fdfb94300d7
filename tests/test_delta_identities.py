"""Identities between memories: each holds in float64 to rounding."""

import pytest
import torch
from torch.nn import functional as F
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from comparing import assert_close
from hf_memory.ops import delta_rule, linear_attention

T, D = 70, 8


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(B=1, H=2):
    """q, k of unit length, v, beta in (0, 2), g."""
    q, k, v = (random(B, T, H, D, seed=i) for i in range(3))
    return q, F.normalize(k, dim=-1), v, 2 * random(B, T, H, seed=3).sigmoid(), -random(B, T, H, seed=4).abs()


def test_open_gates_equal_no_gates():
    q, k, v, beta, g = inputs()
    expected = delta_rule(q, k, v, beta)[0]
    assert_close(delta_rule(q, k, v, beta, 0 * g)[0], expected)
    assert_close(delta_rule(q, k, v, beta, torch.zeros_like(k))[0], expected)


def test_equal_gates_of_all_channels_equal_one_gate():
    q, k, v, beta, g = inputs()
    vector = g[..., None].expand_as(k)
    assert_close(delta_rule(q, k, v, beta, vector)[0], delta_rule(q, k, v, beta, g)[0])


@pytest.mark.parametrize("gated", [False, True])
def test_orthonormal_keys_written_fully_are_linear_attention(gated):
    q, _, v, _, g = (x[:, :D] for x in inputs())
    k = torch.eye(D, dtype=torch.float64)[None, :, None].expand(1, D, 2, D)
    g = g if gated else None
    beta = torch.ones(1, D, 2, dtype=torch.float64)
    assert_close(delta_rule(q, k, v, beta, g)[0], linear_attention(q, k, v, g)[0])


def test_delta_rule_equals_its_matrix_forms():
    q, k, v, beta, g = (x.transpose(1, 2) for x in inputs())  # [B, H, T, ...]
    I, write = torch.eye(T, dtype=torch.float64), beta[..., None] * v
    passed = g.cumsum(-1)
    decay = (passed[..., None] - passed[..., None, :]).tril().exp().tril()
    read, erase = (q @ k.mT).tril(), beta[..., None] * (k @ k.mT).tril(-1)
    expected = (read * decay) @ torch.linalg.inv(I + erase * decay) @ write
    other = (read @ torch.linalg.inv(I + erase) * decay) @ write
    o = delta_rule(*inputs(), scale=1.0)[0].transpose(1, 2)
    assert_close(o, expected)
    assert_close(o, other)
    ungated = read @ torch.linalg.inv(I + erase) @ write
    assert_close(delta_rule(*inputs()[:4], scale=1.0)[0].transpose(1, 2), ungated)


@pytest.mark.parametrize("decay", ["none", "scalar", "vector"])
def test_to_find_and_erase_along_the_key_is_the_delta_rule(decay):
    """RWKV-7 writes beta k with strength 1, asks with -e^g k and erases along beta k."""
    q, k, v, beta, g = inputs()
    g = {"none": None, "scalar": g, "vector": -random(1, T, 2, D, seed=6).abs()}[decay]
    kept = 1.0 if g is None else g.view(1, T, 2, -1).exp()
    options = {"initial_state": random(1, 2, D, D, seed=5), "output_final_state": True}
    write = beta[..., None] * k
    theirs = delta_rule(q, write, v, torch.ones_like(beta), g, -kept * k, write, **options)
    assert_close(delta_rule(q, k, v, beta, g, **options), theirs)


def test_a_and_b_come_together():
    q, k, v, beta, _ = inputs()
    with pytest.raises(ValueError, match="a and b must be given together, got b alone"):
        delta_rule(q, k, v, beta, b=k)


def test_a_rewritten_key_returns_its_last_value():
    k = F.normalize(random(1, 1, 1, D), dim=-1).expand(1, 3, 1, D)
    v, one = random(1, 3, 1, D, seed=1), torch.ones(1, 3, 1, dtype=torch.float64)
    assert_close(delta_rule(k, k, v, one, scale=1.0)[0], v)
    summed = linear_attention(k, k, v, scale=1.0)[0]
    assert_close(summed, v.cumsum(1))


def test_strength_two_swaps_two_values():
    a, b = torch.eye(D, dtype=torch.float64)[:2]
    k = torch.stack([a, b, (a - b) / 2**0.5])[None, :, None]
    v = torch.cat([random(1, 2, 1, D), torch.zeros(1, 1, 1, D)], 1).double()
    beta = torch.tensor([1.0, 1.0, 2.0], dtype=torch.float64)[None, :, None]
    state = delta_rule(k, k, v, beta, output_final_state=True)[1][0, 0]
    assert_close(state.mT @ a, v[0, 1, 0])
    assert_close(state.mT @ b, v[0, 0, 0])


@pytest.mark.parametrize("theirs", [torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule])
def test_transformers_form_agrees(theirs):
    """Theirs are in float32, whatever their inputs."""
    exact = *inputs(B=2), random(2, 2, D, D, seed=5)
    q, k, v, beta, g, state = (x.float() for x in exact)
    found = theirs(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True)
    expected, rounded = (
        delta_rule(*x[:5], initial_state=x[5], output_final_state=True) for x in (exact, (q, k, v, beta, g, state))
    )
    assert_close(found, expected, rounded)


def test_alike_keys_do_not_break_the_solve():
    """Where products of powers of A would overflow: keys of cosine above 0.99, written with strength 2."""
    common = random(1, 1, 1, 32)
    k = F.normalize(common + 0.05 * random(1, 200, 1, 32, seed=1), dim=-1)
    q, v = random(1, 200, 1, 32, seed=2), random(1, 200, 1, 4, seed=3)
    beta = torch.full((1, 200, 1), 2.0, dtype=torch.float64)
    expected = delta_rule(q, k, v, beta, backend="reference")[0]
    assert_close(delta_rule(q, k, v, beta)[0], expected)
