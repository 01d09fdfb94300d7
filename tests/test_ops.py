"""What every op keeps, over all of its forms: float64, where only mistakes are larger than 1e-10."""

import re

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map

from comparing import assert_close
from forms import (
    FORMS,
    every_form,
    every_op,
    gates_of,
    is_real,
    reference,
    run,
    tokens_of,
    widened,
    with_strong_gates,
)
from hf_memory.ops import (
    OPS,
    LinearState,
    delta_rule,
    linear_attention,
    log_linear_attention,
    selective_scan,
)

log_linear_example = next(op.example for op in OPS if op.op is log_linear_attention)
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 130)


every_gated_form = pytest.mark.parametrize(
    ("op", "variant"),
    [
        form
        for form in FORMS
        if gates_of(form.values[0], form.values[0].example(T=1, **form.values[1]))
    ],
)


def make(op, variant, T=65, **sizes):
    """Random float64 arguments of the op that ask for gradients."""
    sizes = {"B": 2, "H": 1, "HV": 2, "K": 6, "V": 5, "dtype": torch.float64, **sizes}
    arguments = op.example(T=T, **sizes, **variant)
    return tree_map(lambda x: x.requires_grad_() if is_real(x) else x, arguments)


def make_packed(op, variant, **sizes):
    """Arguments of four packed sequences, an empty one and one of a single token among them."""
    arguments = make(op, variant, 90, B=1, **sizes)
    states = make(op, variant, 1, B=4, seed=5, **sizes)["initial_state"]
    cu_seqlens = torch.tensor([0, 20, 20, 21, 90], dtype=torch.int32)
    arguments = {**arguments, "initial_state": states, "cu_seqlens": cu_seqlens}
    return {n: x for n, x in arguments.items() if op.growth != "token" or n != "initial_state"}


@every_form
@pytest.mark.parametrize("T", LENGTHS)
def test_chunk_equals_reference(op, variant, T):
    arguments = make(op, variant, T)
    assert_close(run(op, arguments, "chunk"), run(op, arguments, "reference"))


@pytest.mark.parametrize(("op", "variant"), [form for form in FORMS if form.values[0].is_linear])
@pytest.mark.parametrize("T", [1, 17])
def test_a_state_given_away_may_be_written_over(op, variant, T):
    """Where no graph needs it, and where it lies as the result would; what is not given away stays as it is."""
    arguments = make(op, variant, T)
    given = tree_flatten(arguments["initial_state"])[0]
    before = [x.detach().clone() for x in given]
    expected = run(op, arguments, "reference")
    assert_close(run(op, {**arguments, "in_place": True}, "chunk"), expected)
    with torch.no_grad():
        op.op(**arguments, output_final_state=True)
        turned = tree_map(lambda x: x.clone().mT.contiguous().mT, arguments["initial_state"])
        o, final = op.op(
            **{**arguments, "initial_state": turned, "in_place": True}, output_final_state=True
        )
        assert_close([o, *tree_flatten(final)[0]], expected[0])
        assert all(map(torch.equal, given, before))
        o, final = op.op(**arguments, in_place=True, output_final_state=True)
        results = [o, *(x.clone() for x in tree_flatten(final)[0])]
        _, after = op.op(
            **{**make(op, variant, 1), "initial_state": final},
            in_place=True,
            output_final_state=True,
        )
    assert_close(results, expected[0])
    assert all((x is y) == (T == 1) for x, y in zip(given, tree_flatten(final)[0]))
    assert all(x is y for x, y in zip(tree_flatten(final)[0], tree_flatten(after)[0]))


@every_gated_form
@pytest.mark.parametrize("gate", [-1e-4, -5.0])
def test_chunk_equals_reference_with_extreme_gates(op, variant, gate):
    arguments = make(op, variant, 70)
    for name in gates_of(op, arguments):
        arguments[name] = torch.full_like(arguments[name], gate, requires_grad=True)
    assert_close(run(op, arguments, "chunk"), run(op, arguments, "reference"))


@every_gated_form
def test_strong_gates_lose_nothing_in_float32(op, variant):
    """Sums of gates must not cancel: what is weak stands beside what is strong."""
    arguments = with_strong_gates(op, make_packed(op, variant, dtype=torch.float32))
    assert_close(run(op, arguments, "chunk"), *reference(op, arguments))


@every_form
def test_chunk_equals_reference_with_correlated_keys(op, variant):
    arguments = make(op, variant, 130, K=32)
    common = torch.nn.functional.normalize(arguments["k"].detach()[:, :1], dim=-1)
    apart = torch.nn.functional.normalize(arguments["k"].detach(), dim=-1)
    keys = torch.nn.functional.normalize(common * 3 + apart, dim=-1)
    assert torch.nn.functional.cosine_similarity(keys[:, 1:], keys[:, :-1], dim=-1).mean() > 0.85
    arguments["k"] = keys.requires_grad_()
    assert_close(run(op, arguments, "chunk"), run(op, arguments, "reference"))


@every_form
@pytest.mark.parametrize("backend", ["reference", "chunk"])
def test_segments_equal_the_whole(op, variant, backend):
    arguments = make(op, variant, 70)
    whole, state = op.op(**arguments, backend=backend, output_final_state=True)
    parts = []
    carried = arguments["initial_state"]
    for part in (slice(1), slice(1, 20), slice(20, 70)):
        o, carried = op.op(
            **{**tokens_of(arguments, part), "initial_state": carried},
            backend=backend,
            output_final_state=True,
        )
        parts.append(o)
    assert_close((torch.cat(parts, 1), carried), (whole, state))


@every_form
@pytest.mark.parametrize("backend", ["reference", "chunk"])
def test_packed_equals_apart(op, variant, backend):
    arguments = make_packed(op, variant)
    packed, gradients = run(op, arguments, backend)
    bounds = arguments.pop("cu_seqlens").tolist()
    states = arguments.get("initial_state")
    o = []
    finals = []
    for n, (start, end) in enumerate(zip(bounds, bounds[1:])):
        state = None if states is None else tree_map(lambda x, n=n: x[n : n + 1], states)
        if start == end:
            finals.append(state)
            continue
        part = {**tokens_of(arguments, slice(start, end)), "initial_state": state}
        out, final = op.op(**part, backend=backend, output_final_state=True)
        o.append(out)
        finals.append(final)
    joined = (
        []
        if op.growth == "token"
        else [torch.cat(leaves) for leaves in zip(*(tree_flatten(f)[0] for f in finals))]
    )
    assert_close(packed, [torch.cat(o, 1), *joined])
    assert all(g is not None for g in gradients)


@every_form
def test_packed_chunk_equals_packed_reference(op, variant):
    arguments = make_packed(op, variant)
    assert_close(run(op, arguments, "chunk"), run(op, arguments, "reference"))


@every_form
@pytest.mark.parametrize("backend", ["reference", "chunk"])
@pytest.mark.parametrize(
    "where", [slice(0, 9), slice(20, 30), slice(60, 65)], ids=["left", "middle", "right"]
)
def test_padding_leaves_no_trace_whatever_stands_there(op, variant, backend, where):
    arguments = {**make(op, variant, 65), "mask": torch.ones(2, 65, dtype=torch.bool)}
    keep = torch.ones(65, dtype=torch.bool)
    keep[where] = False
    padded = {
        n: x.detach().masked_fill(~keep.view(1, -1, *(1 for _ in x.shape[2:])), torch.nan)
        if is_real(x) and n != "initial_state" and x.shape[:2] == (2, 65)
        else x
        for n, x in arguments.items()
    }
    padded["mask"] = keep.expand(2, -1)
    o, state = op.op(**padded, backend=backend, output_final_state=True)
    expected, expected_state = op.op(
        **tokens_of(arguments, keep), backend=backend, output_final_state=True
    )
    assert_close(o[:, keep], expected)
    assert not o[:, ~keep].any()
    if op.growth != "token":  # else the state has rows for them, which nobody sees
        assert_close(state, expected_state)


@every_form
def test_grouped_values_equal_repeated_heads(op, variant):
    arguments = make(op, variant, 33, H=2, HV=4)
    repeated = {
        **arguments,
        "q": arguments["q"].repeat_interleave(2, 2),
        "k": arguments["k"].repeat_interleave(2, 2),
    }
    if op.growth == "token":
        k, u = arguments["initial_state"]
        repeated["initial_state"] = k.repeat_interleave(2, 2), u
    (o, state), (expected, expected_state) = (
        op.op(**a, backend="chunk", output_final_state=True) for a in (arguments, repeated)
    )
    assert_close(o, expected)
    assert_close(
        state[1] if op.growth == "token" else state,
        expected_state[1] if op.growth == "token" else expected_state,
    )


@pytest.mark.parametrize(("op", "variant"), [form for form in FORMS if form.values[0].is_linear])
@pytest.mark.parametrize(("backend", "T"), [("reference", 5), ("chunk", 37), ("chunk", 1)])
def test_query_heads_of_one_memory_equal_as_many_memories(op, variant, backend, T):
    arguments = make(op, variant, T, H=2, HV=2)
    arguments["q"] = make(op, variant, T, H=6, HV=6, seed=9)["q"]
    others = {n: x for n, x in arguments.items() if n not in ("q", "initial_state")}
    repeated = {
        "q": arguments["q"],
        "initial_state": tree_map(lambda x: x.repeat_interleave(3, 1), arguments["initial_state"]),
        **{n: x.repeat_interleave(3, 2) if is_real(x) else x for n, x in others.items()},
    }
    o, state = op.op(**arguments, backend=backend, output_final_state=True)
    expected, states = op.op(**repeated, backend="reference", output_final_state=True)
    assert_close((o, state), (expected, tree_map(lambda x: x[:, ::3], states)))
    inputs = [x for x in tree_flatten(arguments)[0] if is_real(x)]
    weights = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).double()
    first, second = (
        torch.autograd.grad((x * weights).sum(), inputs, allow_unused=True) for x in (o, expected)
    )
    assert_close(first, second)


@every_form
def test_an_empty_memory_is_the_default(op, variant):
    arguments = make(op, variant, 20)
    empty = tree_map(
        lambda x: x[:, :0] if op.growth == "token" else torch.zeros_like(x),
        arguments["initial_state"],
    )
    given = {**arguments, "initial_state": empty}
    default = {n: x for n, x in arguments.items() if n != "initial_state"}
    assert_close(op.op(**default)[0], op.op(**given)[0])
    assert op.op(**default)[1] is None


@every_form
def test_low_precision_goes_in_and_out_and_states_stay_wide(op, variant):
    arguments = op.example(T=40, dtype=torch.bfloat16, **variant)
    o, state = op.op(**arguments, output_final_state=True)
    assert o.dtype == torch.bfloat16
    assert {x.dtype for x in tree_flatten(state)[0] if x.is_floating_point()} == {torch.float32}
    expected = op.op(**widened(arguments), backend="reference")[0]
    rounding = (expected.bfloat16().double() - expected).norm() / expected.norm()
    factor = 4 if op.is_linear else 1.5  # inside it is float32
    assert (o.double() - expected).norm() / expected.norm() < factor * rounding


@every_form
def test_bfloat16_over_a_long_sequence_loses_what_rounding_of_the_inputs_loses(op, variant):
    """Against float64 on inputs that were not rounded; a plain bfloat16 form loses far more than 3 times this."""
    exact = op.op(**op.example(B=1, T=4096, H=1, dtype=torch.float64, **variant))[0]
    rounded = op.example(B=1, T=4096, H=1, dtype=torch.bfloat16, **variant)
    o = op.op(**rounded)[0]
    inevitable = (op.op(**widened(rounded))[0].bfloat16().double() - exact).norm()
    assert (o.double() - exact).norm() <= (3 if op.is_linear else 1.05) * inevitable


@pytest.mark.parametrize(("op", "variant"), [form for form in FORMS if form.values[0].is_linear])
@pytest.mark.parametrize("gate", [None, -5.0])
def test_bfloat16_loses_what_rounding_loses(op, variant, gate):
    """Outputs and gradients against float64 on the same inputs, as products may be rounded and sums may not."""
    arguments = make(op, variant, 200, B=1, K=16, V=16, dtype=torch.bfloat16)
    if gate and "g" in arguments:
        arguments["g"] = torch.full_like(arguments["g"], gate, requires_grad=True)
    results = run(op, arguments, "chunk")
    assert results[0][0].dtype == torch.bfloat16
    assert {x.dtype for x in results[0][1:] if x.is_floating_point()} == {torch.float32}
    for ours, exact in zip(results, run(op, widened(arguments), "chunk")):
        ours, exact = (
            [x.double() for x in leaves if x is not None and x.numel()] for leaves in (ours, exact)
        )
        largest = max(x.abs().max() for x in exact)
        assert all(
            (x - y).abs().max() <= 2.0**-5 * largest for x, y in zip(ours, exact, strict=True)
        )


@pytest.mark.parametrize(("op", "variant"), [form for form in FORMS if form.values[0].is_linear])
def test_states_do_not_drift_in_bfloat16(op, variant):
    errors = []
    for T in (512, 8192):
        arguments = op.example(T=T, B=1, H=1, dtype=torch.bfloat16, **variant)
        both = (op.op(**a, output_final_state=True)[1] for a in (arguments, widened(arguments)))
        state, exact = (tree_flatten(state)[0][0] for state in both)
        errors.append((state - exact).norm() / exact.norm())
    assert errors[1] <= 2 * errors[0] <= 2.0**-4


@every_form
def test_autocast_does_not_reach_inside(op, variant):
    arguments = op.example(T=40, **variant)
    expected = op.op(**arguments, output_final_state=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = op.op(**arguments, output_final_state=True)
    assert all(map(torch.equal, *(tree_flatten(x)[0] for x in (found, expected))))


def second_derivatives(way, f, x):
    """The second derivatives of f: tensor -> number, at x and along a vector of ones."""
    ones = torch.ones_like(x)
    if way == "create_graph":
        (gradient,) = torch.autograd.grad(f(x), x, create_graph=True)
        return torch.autograd.grad(gradient.sum(), x)[0]
    if way == "hessian":
        return torch.func.hessian(f)(x.detach()).flatten(x.ndim).sum(-1).view_as(x)
    return torch.func.jvp(torch.func.grad(f), (x.detach(),), (ones,))[1]


@pytest.mark.parametrize(
    ("op", "variant"), [form for form in FORMS if "round" not in form.values[1].values()]
)
@pytest.mark.parametrize("way", ["create_graph", "hessian", "jvp"])
def test_second_derivatives_are_those_of_differences_or_refused(op, variant, way):
    """Also where the incoming gradient is a constant, as that of a sum is; the reference refuses nothing."""
    arguments = {
        n: x.detach() if is_real(x) else x
        for n, x in make(op, variant, 5, B=1, HV=1, K=3, V=3).items()
    }
    x = arguments.pop("k")
    _ = arguments.pop("q")

    def total(x, backend="reference"):
        return op.op(q=x, k=x, **arguments, backend=backend)[0].sum()

    after, before = (
        torch.autograd.grad(total(y), y)[0]
        for y in ((x + h).requires_grad_() for h in (1e-4, -1e-4))
    )
    for backend in ("reference", "chunk"):
        try:
            found = second_derivatives(way, lambda x: total(x, backend), x.requires_grad_())  # noqa: B023
        except RuntimeError as refused:
            assert backend == "chunk"
            assert re.search("second derivatives|setup_context", str(refused))  # noqa: PT017
        else:
            expected = (after - before) / 2e-4
            torch.testing.assert_close(
                found, expected, rtol=0, atol=1e-6 * float(expected.abs().max())
            )


@every_op
def test_training_compiles_to_one_graph(op):
    torch._dynamo.reset()
    arguments = make(op, op.variants[0], 3, B=1, HV=1, K=4, V=4, dtype=torch.float64)
    compiled = op._replace(op=torch.compile(op.op, fullgraph=True, backend="aot_eager"))
    assert_close(run(compiled, arguments, "chunk"), run(op, arguments, "chunk"))


@every_op
@pytest.mark.parametrize(
    "sizes", [{"T": 0}, {"B": 0}, {"B": 1, "T": 0}], ids=["no tokens", "no rows", "packed"]
)
def test_a_call_without_tokens_is_refused(op, sizes):
    arguments = {**op.example(**{"T": 3, **sizes}, **op.variants[0])}
    if sizes.get("B") == 1:
        arguments["cu_seqlens"] = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="q must have at least one row and one token"):
        op.op(**arguments)


BAD = {
    "q": lambda a: {"q": a["q"][0]},
    "k": lambda a: {"k": a["k"][..., :-1]},
    "v": lambda a: {"v": a["v"][:, :-1]},
    "q, k and v": lambda a: {"k": a["k"].double()},
    "initial_state": lambda a: {"initial_state": tree_map(lambda x: x[:1], a["initial_state"])},
    "cu_seqlens": lambda a: {"cu_seqlens": torch.tensor([0, 20], dtype=torch.int32)},
    "backend": lambda a: {"backend": "cuda"},
    "k must be on": lambda a: {"k": a["k"].to("meta")},
    "floating": lambda a: {n: a[n].int() for n in "qkv"},
}


@every_form
@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused_by_name(op, variant, message):
    arguments = op.example(T=20, **variant)
    with pytest.raises(ValueError, match=message):
        op.op(**{**arguments, **BAD[message](arguments)})


@every_form
def test_a_gate_of_the_wrong_shape_is_refused(op, variant):
    arguments = op.example(T=20, **variant)
    for name in {"beta", "g", "a", "b", "lr", "momentum", "decay", "level_weights"} & set(
        arguments
    ) | {"mask"}:
        with pytest.raises(ValueError, match=f"^{name} must have shape"):
            op.op(**{**arguments, name: torch.zeros(2, 3)})


@every_form
def test_packing_that_does_not_end_at_the_last_token_is_refused(op, variant):
    arguments = op.example(T=20, B=1, **variant)
    with pytest.raises(ValueError, match="cu_seqlens"):
        op.op(**arguments, cu_seqlens=torch.tensor([0, 19], dtype=torch.int32))


@every_form
def test_an_explicit_backend_is_refused_where_it_cannot_run(op, variant):
    arguments = op.example(T=20, dtype=torch.float64, **variant)
    with pytest.raises(ValueError, match="backend='triton'"):
        op.op(**arguments, backend="triton")


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_linear_attention_equals_its_matrix_form():
    q, k, v = (random(1, 40, 2, 6, seed=i) for i in range(3))
    g = -random(1, 40, 2, seed=3).abs()
    b = g.cumsum(1).transpose(1, 2)
    mask = (b[..., :, None] - b[..., None, :]).exp().tril()
    expected = torch.einsum("bihd,bjhd,bhij,bjhv->bihv", q, k, mask, v)
    assert_close(linear_attention(q, k, v, g, scale=1.0, backend="reference")[0], expected)
    weights = torch.einsum("bihd,bjhd->bhij", q.exp(), k.exp()) * mask
    expected = torch.einsum("bhij,bjhv->bihv", weights / (weights.sum(-1, keepdim=True) + 1e-6), v)
    o, _ = linear_attention(q.exp(), k.exp(), v, g, normalize=True, backend="reference")
    assert_close(o, expected)


@pytest.mark.parametrize("normalize", [False, True])
def test_open_gates_equal_no_gates(normalize):
    q, k, v = (random(1, 70, 2, 6, seed=i).exp() for i in range(3))
    expected = linear_attention(q, k, v, normalize=normalize)[0]
    for shape in ((1, 70, 2), (1, 70, 2, 6)):
        assert_close(
            linear_attention(q, k, v, torch.zeros(shape), normalize=normalize)[0], expected
        )


def test_equal_gates_of_all_channels_equal_one_gate():
    q, k, v = (random(1, 70, 2, 6, seed=i) for i in range(3))
    g = -random(1, 70, 2, seed=3).abs()
    vector = linear_attention(q, k, v, g[..., None].expand(-1, -1, -1, 6))[0]
    assert_close(vector, linear_attention(q, k, v, g)[0])


def test_a_constant_gate_is_retention():
    q, k, v = (random(1, 70, 2, 6, seed=i) for i in range(3))
    gamma = 1 - 2.0 ** (-5 - torch.arange(2, dtype=torch.float64))
    distance = torch.arange(70)[:, None] - torch.arange(70)
    D = (gamma[:, None, None] ** distance.clamp(min=0)).tril()
    expected = torch.einsum("bihd,bjhd,hij,bjhv->bihv", q, k, D, v)
    o, _ = linear_attention(q, k, v, gamma.log().expand(1, 70, 2), scale=1.0)
    assert_close(o, expected)


def test_mamba2_is_a_scalar_gate():
    """h <- e^(A step) h + step B x^T;   y = h^T C + D x, B and C shared by all heads."""
    C = random(1, 70, 1, 6)
    B = random(1, 70, 1, 6, seed=1)
    x = random(1, 70, 4, 5, seed=2)
    step = random(1, 70, 4, seed=3).exp()
    A = -random(4, seed=4).exp()
    D = random(4, seed=5)
    h = torch.zeros(4, 6, 5, dtype=torch.float64)
    expected = []
    for t in range(70):
        h = (A * step[0, t]).exp()[:, None, None] * h
        h = h + step[0, t][:, None, None] * B[0, t, 0][None, :, None] * x[0, t][:, None, :]
        expected.append(torch.einsum("hkv,k->hv", h, C[0, t, 0]) + D[:, None] * x[0, t])
    o = linear_attention(C, B, step[..., None] * x, A * step, scale=1.0)[0] + D[:, None] * x
    assert_close(o[0], torch.stack(expected))


def test_a_selective_scan_is_a_sum_over_the_past():
    """Also where keys share a rate and channels a decay, which is a scalar gate."""
    q = random(1, 70, 2, 6)
    k = random(1, 70, 2, 6, seed=1)
    v = random(1, 70, 2, 5, seed=2)
    g = -random(1, 70, 2, 5, seed=3).exp()
    rate = random(2, 6, 5, seed=4).exp()
    b = g.cumsum(1)
    between = (b[:, :, None] - b[:, None])[..., None, :].clamp(max=0)  # [B, i, j, H, 1, V]
    causal = torch.ones(70, 70, dtype=torch.float64).tril()
    expected = torch.einsum(
        "bihk,bjhk,bjhv,ij,bijhkv->bihv", q, k, v, causal, (rate * between).exp()
    )
    assert_close(selective_scan(q, k, v, g, rate)[0], expected)
    scalar = g[..., :1]
    ones = torch.ones_like(rate)
    alike = selective_scan(q, k, v, scalar.expand_as(g), ones)[0]
    assert_close(alike, linear_attention(q, k, v, scalar[..., 0], scale=1.0)[0])


def test_a_selective_scan_keeps_less_than_a_state_of_each_token():
    arguments = make(next(op for op in OPS if op.op is selective_scan), {}, T=130, K=16, V=32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append(x.numel()) or x, lambda x: x
    ):
        selective_scan(**arguments)
    assert sum(kept) < arguments["v"].numel() * 16 / 2


def test_the_normalizer_is_a_column_of_ones():
    q, k, v = (random(1, 70, 2, 6, seed=i).exp() for i in range(3))
    o, state = linear_attention(q, k, v, normalize=True, output_final_state=True)
    wide, wide_state = linear_attention(
        q, k, torch.nn.functional.pad(v, (0, 1), value=1.0), scale=1.0, output_final_state=True
    )
    assert_close(o, wide[..., :-1] / (wide[..., -1:] + 1e-6))
    assert isinstance(state, LinearState)
    assert_close(torch.cat([state.memory, state.normalizer[..., None]], -1), wide_state)


def test_orthonormal_keys_return_their_values():
    q = torch.eye(6, dtype=torch.float64)[None, :, None]
    v = random(1, 6, 1, 5)
    assert_close(linear_attention(q, q, v, scale=1.0)[0], v)


def with_and_without_beta(decay, T):
    """Arguments of log-linear attention, the op that it is without levels, and that op's arguments."""
    for delta, op in ((False, linear_attention), (True, delta_rule)):
        arguments = log_linear_example(
            T=T, K=6, V=5, HV=4, dtype=torch.float64, decay=decay, delta=delta
        )
        del arguments["initial_state"]
        yield arguments, op, {n: x for n, x in arguments.items() if n != "level_weights"}


@pytest.mark.parametrize("decay", ["none", "scalar", "vector"])
def test_levels_that_weigh_one_are_none(decay):
    for arguments, op, same in with_and_without_beta(decay, 150):
        weights = torch.ones_like(arguments["level_weights"])
        o, state = log_linear_attention(
            **{**arguments, "level_weights": weights}, output_final_state=True
        )
        expected, memory = op(**same, output_final_state=True)
        assert_close((o, state.levels.sum(1)), (expected, memory))


def blocks_before(t):
    """The level of each token up to t: its own, then blocks from the right of as many tokens as ones of t stand for."""
    levels = [0]
    end = t
    while end:
        size = end & -end
        levels = [size.bit_length()] * size + levels
        end = end - size
    return levels


@pytest.mark.parametrize("decay", ["none", "scalar"])
@pytest.mark.parametrize("backend", ["reference", "chunk"])
def test_log_linear_attention_equals_its_matrix_form(decay, backend):
    T = 75
    levels = torch.tensor([blocks_before(t) + [0] * (T - 1 - t) for t in range(T)])
    for arguments, op, same in with_and_without_beta(decay, T):
        columns = torch.eye(T, dtype=torch.float64)[None, :, None].expand(2, T, 4, T)
        W = op(**{**same, "v": columns})[0]  # [B, T, HV, T]
        H = arguments["level_weights"].gather(-1, levels[None, :, None].expand(2, T, 4, T))
        o, state = log_linear_attention(**arguments, backend=backend, output_final_state=True)
        assert_close(o, torch.einsum("bths,bshv->bthv", W * H, arguments["v"]))
        held = state.levels.flatten(2).any(-1)
        assert (held == torch.tensor([T >> level & 1 for level in range(8)]).bool()).all()
