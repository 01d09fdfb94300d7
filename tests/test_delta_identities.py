"""Identities between memories: each holds in float64 to rounding."""

import pytest
import torch
from torch.nn import functional as F
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from cases import CASE, SIZES, make_model
from comparing import assert_close
from hf_memory.layers import unit_length
from hf_memory.mixers.base import Context
from hf_memory.mixers.levels import Written
from hf_memory.mixers.variants.delta_rules import DeltaProductMixer
from hf_memory.ops import delta_rule, linear_attention

T = 70
D = 8
NOTHING = Context(None, None, None, {})  # neither padding nor past


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(B=1, H=2):
    """q, k of unit length, v, beta in (0, 2), g."""
    q, k, v = (random(B, T, H, D, seed=i) for i in range(3))
    return (
        q,
        F.normalize(k, dim=-1),
        v,
        2 * random(B, T, H, seed=3).sigmoid(),
        -random(B, T, H, seed=4).abs(),
    )


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
    I = torch.eye(T, dtype=torch.float64)
    write = beta[..., None] * v
    passed = g.cumsum(-1)
    decay = (passed[..., None] - passed[..., None, :]).tril().exp().tril()
    read = (q @ k.mT).tril()
    erase = beta[..., None] * (k @ k.mT).tril(-1)
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
    v = random(1, 3, 1, D, seed=1)
    one = torch.ones(1, 3, 1, dtype=torch.float64)
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
        delta_rule(*x[:5], initial_state=x[5], output_final_state=True)
        for x in (exact, (q, k, v, beta, g, state))
    )
    assert_close(found, expected, rounded)


def test_alike_keys_do_not_break_the_solve():
    """Where products of powers of A would overflow: keys of cosine above 0.99, written with strength 2."""
    common = random(1, 1, 1, 32)
    k = F.normalize(common + 0.05 * random(1, 200, 1, 32, seed=1), dim=-1)
    q = random(1, 200, 1, 32, seed=2)
    v = random(1, 200, 1, 4, seed=3)
    beta = torch.full((1, 200, 1), 2.0, dtype=torch.float64)
    expected = delta_rule(q, k, v, beta, backend="reference")[0]
    assert_close(delta_rule(q, k, v, beta)[0], expected)


MEMORIES = ("deltaproduct", "gdn2", "comba", "preconditioned")


def memory(case, **options):
    """The first memory layer of a case, in float64, with what its `update` is given."""
    mixer = make_model(CASE[case], **options).double().model.layers[0].mixer
    for parameter in mixer.parameters():
        parameter.data += 0.3 * random(*parameter.shape)
    x = random(2, 12, SIZES["hidden_size"])
    q, k, v, _ = mixer.heads_of(mixer.project(x, None), NOTHING)
    beta = mixer.largest_beta * mixer.b_proj(x).sigmoid()
    return mixer, x, q, k, v, mixer.decay(x)[0] if mixer.decays else None, beta


def same_weights(one, other):
    """Give one layer the weights of another, as far as it has weights of that name and shape."""
    own = one.state_dict()
    one.load_state_dict(
        {n: y for n, y in other.state_dict().items() if n in own and own[n].shape == y.shape},
        strict=False,
    )


@torch.no_grad()
@pytest.mark.parametrize(
    ("case", "options"),
    [*((case, {}) for case in MEMORIES), ("preconditioned", {"gate": "preconditioned_vector"})],
)
def test_a_memory_is_its_equations_one_token_at_a_time(case, options):
    mixer, x, q, k, v, g, beta = memory(case, **options)
    found, _ = mixer.update(mixer.project(x, None), NOTHING, Written(q, k, v, g, beta))
    n = getattr(mixer, "steps", 1)
    HV = v.shape[2]
    g = g if g.ndim == 4 else g[..., None]
    q, k = (y.repeat_interleave(HV // y.shape[2], 2) for y in (q, unit_length(k)))
    S = torch.zeros(2, HV, *k.shape[3:], v.shape[3], dtype=torch.float64)
    A = 0.0
    for t in range(12):
        reads = k[:, t * n]
        query = q[:, t]
        before = S
        S = g[:, t, :, :, None].exp() * S
        writes = k[:, t * n]
        values = v[:, t * n]
        strength = beta[:, t]
        if case == "gdn2":
            reads = strength.view_as(reads) * reads
            strength = 1
            values = mixer.w_proj(x[:, t]).sigmoid().view_as(values) * values
        elif case == "comba":
            p = (
                mixer.inner_decay.sigmoid()[:, None]
                * mixer.heads_of(mixer.project(x, None), NOTHING)[1][:, t]
            )
            query = mixer.heads_of(mixer.project(x, None), NOTHING)[0][:, t] - mixer.D[:, None] * p
            reads = unit_length(p).repeat_interleave(HV // p.shape[1], 1)
            query = query.repeat_interleave(2, 1)
        elif case == "preconditioned":
            f = mixer.key_decay(x)[0][:, t]
            c = mixer.c_proj(x[:, t]).sigmoid()
            A = f.exp()[..., None] * A + c[..., None] * reads**2
            r = (A + 1e-6).log() - mixer.center[:, None]
            writes = reads * 1.5 ** (-r / (1 + r.abs()))
        for i in range(n):
            if case == "deltaproduct":
                reads = writes = k[:, t * n + i]
                values = v[:, t * n + i]
                strength = beta[:, t].unflatten(-1, (n, -1))[:, i]
            asked = before if case == "comba" else S
            error = values - torch.einsum("bhkv,bhk->bhv", asked, reads)
            strong = (
                strength if isinstance(strength, int) or case == "gdn2" else strength[..., None]
            )
            S = S + torch.einsum("bhk,bhv->bhkv", writes, strong * error)
        expected = torch.einsum("bhkv,bhk->bhv", S, unit_length(query)) * k.shape[3] ** -0.5
        assert_close(found[:, t], expected)


STARTS = {  # as published
    "comba": {"inner_decay": 1.0, "D": 1.0},
    "preconditioned": {"center": -0.2},
    "mamba2": {"D": 1.0},
    "mamba3": {"D": 1.0, "q_bias": 1.0, "k_bias": 1.0},
}


@pytest.mark.parametrize("case", STARTS)
def test_a_new_memory_starts_as_published(case):
    mixer = make_model(CASE[case]).model.layers[0].mixer
    for name, value in STARTS[case].items():
        start = getattr(mixer, name)
        assert torch.equal(start, torch.full_like(start, value))


@torch.no_grad()
def test_a_student_with_comba_asks_for_its_queries_alone():
    mixer = memory("comba")[0]
    mixer.start_open(half_life=16)
    assert mixer.D.shape == (2,)
    assert not mixer.D.any()


@torch.no_grad()
def test_one_step_of_deltaproduct_is_deltanet():
    mixer, x, *_ = memory("deltanet")
    one = DeltaProductMixer(mixer.config, 0).double()
    same_weights(one, mixer)
    assert_close(one(x)[0], mixer(x)[0])


@torch.no_grad()
def test_equal_gates_of_gated_deltanet_2_are_kimi_delta_attention():
    mixer, x, *_ = memory("gdn2")
    mixer.w_proj.weight.copy_(mixer.b_proj.weight)
    for projection in (mixer.b_proj, mixer.w_proj):
        projection.weight.copy_(
            projection.weight[:: mixer.head_dim].repeat_interleave(mixer.head_dim, 0)
        )
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    kimi = memory("kda", output_gate_low_rank_dim=None, **heads)[0]
    same_weights(kimi, mixer)
    kimi.b_proj.weight.copy_(mixer.b_proj.weight[:: mixer.head_dim])
    assert_close(mixer(x)[0], kimi(x)[0])


@torch.no_grad()
def test_comba_without_decay_and_correction_is_deltanet():
    mixer, x, *_ = memory("comba")
    mixer.D.zero_()
    mixer.decay.A_log.fill_(-torch.inf)
    mixer.inner_decay.fill_(
        50.0
    )  # a sigmoid of one: unit_length adds 1e-6 to the square of a length
    options = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": mixer.value_dim,
    }
    delta = memory("deltanet", output_gate="sigmoid", allow_negative_eigenvalues=False, **options)[
        0
    ]
    same_weights(delta, mixer)
    assert_close(mixer(x)[0], delta(x)[0])


@torch.no_grad()
def test_a_preconditioner_of_all_channels_is_a_stronger_write():
    mixer, x, q, k, v, g, beta = memory("preconditioned")
    mixer.center.fill_(1e30)
    plain = memory("gated-deltanet-sliding", layer_types=["memory"] * 2)[0]
    found = mixer.update(mixer.project(x, None), NOTHING, Written(q, k, v, g, beta))
    expected = plain.update(plain.project(x, None), NOTHING, Written(q, k, v, g, 1.5 * beta))
    assert_close((found[0], found[1]["memory"]), (expected[0], expected[1]["memory"]))
