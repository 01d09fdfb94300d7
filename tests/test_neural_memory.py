"""The neural memory: its forms agree in float64, and with the right options it is every memory it contains."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_map

from comparing import assert_close, in_float64
from forms import is_real, read_in_parts, tokens_of
from hf_memory.ops.delta_rule import delta_rule
from hf_memory.ops.linear_attention import linear_attention
from hf_memory.ops.neural_memory import NeuralMemoryState, neural_memory
from hf_memory.ops.neural_memory.network import ACTIVATIONS
from hf_memory.ops.neural_memory.reference import example

PER_TOKEN = (
    "q",
    "k",
    "v",
    "lr",
    "momentum",
    "decay",
    "threshold",
    "muon_lr",
    "earlier",
    "mask",
)
TTT = {
    "residual": True,
    "norm": True,
    "bias": True,
    "momentum": False,
    "decay": False,
    "activation": "gelu_tanh",
}
MIRAS = {
    "residual": True,
    "norm": True,
    "momentum": False,
    "forget_to": "zero",
    "activation": "gelu",
}
OPTIONS = {
    "titans": {},
    "no momentum": {"momentum": False},
    "no decay": {"decay": False},
    "plain": {"momentum": False, "decay": False},
    "zero": {"forget_to": "zero", "bias": True},
    "initial": {"forget_to": "initial", "residual": True, "bias": True, "activation": "gelu"},
    "anchor": {"forget_to": "anchor", "bias": True},
    "short": {"max_grad_norm": 0.5, "residual": True, "bias": True},
    "short steps of another loss": {"max_grad_norm": 0.1, "loss": "cubed"},
    "ttt": TTT,
    "moneta": {**MIRAS, "loss": "cubed", "retention": "norm"},
    "yaad": {**MIRAS, "loss": "huber"},
    "memora": {
        **MIRAS,
        "retention": "softmax",
        "forget_to": "initial",
        "momentum": True,
        "bias": True,
    },
    "atlas": {"muon": True, "earlier": 2, "activation": "gelu", "forget_to": "zero"},
    "omega": {"earlier": 1, "bias": True, "momentum": False},
    "all": {**TTT, "momentum": True, "decay": True, "forget_to": "initial"},
}
backends = pytest.mark.parametrize("backend", ["reference", "chunk"])
some_forms = pytest.mark.parametrize(
    "form",
    [
        {"depth": 1, "chunk_size": 1},
        {"depth": 1, "chunk_size": 1, "forget_to": "initial", "bias": True},
        {"depth": 1, "chunk_size": 16, **TTT},
        {"depth": 2, "chunk_size": 4},
        {"depth": 2, "chunk_size": 16, **OPTIONS["all"]},
        {"depth": 2, "chunk_size": 4, "forget_to": "anchor"},
        {"depth": 3, "chunk_size": 37, "forget_to": "zero"},
        {"depth": 2, "chunk_size": 16, **OPTIONS["yaad"]},
        {"depth": 2, "chunk_size": 4, **OPTIONS["atlas"]},
    ],
    ids=str,
)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are too small for more
    yield
    torch.set_num_threads(threads)


def make(T, **sizes):
    return example(T=T, **{"B": 2, "H": 1, "HV": 2, "K": 4, "dtype": torch.float64, **sizes})


def run(arguments, backend):
    """Outputs, final state, and gradients of a random function of both for every tensor; None is zero."""
    arguments = tree_map(lambda x: x.detach().requires_grad_() if is_real(x) else x, arguments)
    o, state = neural_memory(**arguments, backend=backend, output_final_state=True)
    outputs = [o, *state[:3]]
    generator = torch.Generator().manual_seed(1)
    total = sum(
        (torch.randn(x.shape, generator=generator, dtype=x.dtype) * x).sum() for x in outputs
    )
    inputs = [x for x in tree_flatten(arguments)[0] if is_real(x)]
    gradients = torch.autograd.grad(total, inputs, allow_unused=True)
    return o, state, [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, gradients)]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("b", [1, 4, 16, 37, 64])
def test_chunk_equals_reference(depth, b):
    """Outputs, states and the written gradients of every input; rows begin at phases of their own."""
    arguments = make(70 if depth < 3 else 41, B=3, depth=depth, chunk_size=b)
    assert_close(run(arguments, "chunk"), run(arguments, "reference"))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("depth", "b"), [(1, 1), (1, 4), (2, 1), (2, 4), (3, 5)])
def test_chunk_equals_reference_with_every_option(options, depth, b):
    arguments = make(18, depth=depth, chunk_size=b, **OPTIONS[options])
    assert_close(run(arguments, "chunk"), run(arguments, "reference"))


@pytest.mark.parametrize("T", [1, 3, 4, 13])
@pytest.mark.parametrize("depth", [1, 2])
def test_chunk_equals_reference_from_the_start_of_a_sequence(T, depth):
    arguments = {**make(T, depth=depth, chunk_size=4), "initial_state": None, "mask": None}
    assert_close(run(arguments, "chunk"), run(arguments, "reference"))


@some_forms
def test_chunk_equals_reference_with_a_ragged_mask(form):
    arguments = make(45, B=3, **form)
    arguments["mask"] = torch.rand(3, 45, generator=torch.Generator().manual_seed(1)) > 0.3
    arguments["mask"][1, 5:] = False
    arguments["mask"][2] = False
    assert_close(run(arguments, "chunk"), run(arguments, "reference"))


@some_forms
@pytest.mark.parametrize("fresh", [True, False])
def test_decoding_and_any_split_equal_the_whole(form, fresh):
    arguments = make(40, **form)
    arguments = {**arguments, "initial_state": None, "mask": None} if fresh else arguments
    whole = neural_memory(**arguments, output_final_state=True)
    for bounds in ([0, 1, 17, 18, 37, 40], [0, 16, 32, 40], [0, 15, 40], range(41)):
        assert_close(read_in_parts(neural_memory, arguments, bounds, backend="chunk"), whole)
    assert_close(
        read_in_parts(neural_memory, arguments, [0, 3, 17, 40], backend="reference"), whole
    )


@some_forms
@backends
def test_masked_tokens_leave_no_trace(form, backend):
    """Rows padded at the left, in the middle and at the right equal the rows alone, whatever stands in the padding."""
    arguments = make(40, B=3, **form)
    keep = torch.ones(3, 40, dtype=torch.bool)
    keep[0, :7] = False
    keep[1, 18:30] = False
    keep[2, 33:] = False
    for x in tree_flatten([arguments.get(name) for name in PER_TOKEN[:-1]])[0]:
        if x is not None:
            x[~keep] = torch.nan
    o, state = neural_memory(
        **{**arguments, "mask": keep}, backend=backend, output_final_state=True
    )
    assert not o[~keep].any()
    for n in range(3):
        row = tree_map(
            lambda x, n=n: None if x is None else x[n : n + 1, keep[n]],
            {name: x for name, x in arguments.items() if name in PER_TOKEN},
        )
        row = {**arguments, **row}
        row["initial_state"] = NeuralMemoryState(
            *(x[n : n + 1] for x in arguments["initial_state"])
        )
        alone, alone_state = neural_memory(
            **{**row, "mask": None}, backend="reference", output_final_state=True
        )
        assert_close(
            (o[n, keep[n]], [x[n] for x in state]), (alone[0], [x[0] for x in alone_state])
        )


@some_forms
@backends
def test_packed_equals_apart(form, backend):
    arguments = make(30, B=1, **form)
    bounds = [0, 11, 11, 12, 30]
    arguments["initial_state"] = make(1, B=4, seed=5, **form)["initial_state"]
    o, state = neural_memory(
        **arguments, cu_seqlens=torch.tensor(bounds), backend=backend, output_final_state=True
    )
    for n, (start, end) in enumerate(zip(bounds, bounds[1:])):
        alone = NeuralMemoryState(*(x[n : n + 1] for x in arguments["initial_state"]))
        if end > start:
            part = {**tokens_of(arguments, slice(start, end)), "initial_state": alone}
            out, alone = neural_memory(**part, backend=backend, output_final_state=True)
            assert_close(o[:, start:end], out)
        assert_close([x[n : n + 1] for x in state], list(alone))


@some_forms
def test_later_tokens_do_not_reach_earlier_outputs(form):
    arguments = make(20, B=1, **form)
    given = tree_flatten([arguments.get(name) for name in PER_TOKEN[:-1]])[0]
    inputs = [x.requires_grad_() for x in given if x is not None]
    o = neural_memory(**arguments)[0]
    for g in torch.autograd.grad(o[:, 9].sum(), inputs):
        assert not g[:, 10:].any()
        assert g[:, 9].any()


@some_forms
def test_a_state_of_zeros_has_read_nothing(form):
    arguments = make(20, **form)
    zeros = NeuralMemoryState(*(torch.zeros_like(x) for x in arguments["initial_state"]))
    assert_close(
        neural_memory(**{**arguments, "initial_state": zeros}),
        neural_memory(**{**arguments, "initial_state": None}),
    )
    assert neural_memory(**arguments)[1] is None


def matrix(T=40, *, chunk_size=1, **options):
    """A matrix that begins at zero, so that the initial state is empty."""
    arguments = make(T, depth=1, HV=1, chunk_size=chunk_size, **options)
    arguments["weights"] = (torch.zeros_like(arguments["weights"][0]),)
    return {**arguments, "initial_state": None}


@backends
def test_without_momentum_and_decay_it_is_the_delta_rule(backend):
    a = matrix(momentum=False, decay=False)
    expected = delta_rule(a["q"], a["k"], a["v"], a["lr"], scale=1.0)[0]
    assert_close(neural_memory(**a, backend=backend)[0], expected)


@backends
def test_with_decay_it_is_a_gated_delta_rule(backend):
    """With beta = lr / a and values a v, as gradients are those of the memory before it decays."""
    a = matrix(momentum=False)
    keep = a["decay"].exp()
    expected = delta_rule(
        a["q"], a["k"], keep[..., None] * a["v"], a["lr"] / keep, a["decay"], scale=1.0
    )[0]
    assert_close(neural_memory(**a, backend=backend)[0], expected)


@backends
def test_with_momentum_it_is_the_momentum_delta_rule(backend):
    """N <- eta N + lr k (k^T M - v)^T;   M <- a M - N, with heads apart."""
    a = matrix()
    M = N = torch.zeros(2, 4, 4, dtype=torch.float64)
    expected = []
    for t in range(40):
        k = a["k"][:, t, 0]
        v = a["v"][:, t, 0]
        lr = a["lr"][:, t, 0, None, None]
        surprise = k[:, :, None] * (torch.einsum("bk,bkv->bv", k, M) - v)[:, None]
        N = a["momentum"][:, t, 0, None, None].exp() * N + lr * surprise
        M = a["decay"][:, t, 0, None, None].exp() * M - N
        expected.append(torch.einsum("bk,bkv->bv", a["q"][:, t, 0], M))
    assert_close(neural_memory(**a, backend=backend)[0][:, :, 0], torch.stack(expected, 1))


@backends
def test_in_one_chunk_it_is_linear_attention(backend):
    """The gradient at a matrix of zeros is -k v^T."""
    a = matrix(momentum=False, decay=False, chunk_size=64)
    expected = linear_attention(a["q"], a["k"], a["lr"][..., None] * a["v"], scale=1.0)[0]
    assert_close(neural_memory(**a, backend=backend)[0], expected)


def gradient_of_norm_and_loss(Z, target, gamma, beta):
    """With respect to Z, of half the squared error of a layer norm; as TTT fuses it."""
    std = (Z.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()
    x_hat = (Z - Z.mean(-1, keepdim=True)) / std
    g = (gamma * x_hat + beta - target) * gamma
    width = Z.shape[-1]
    return (width * g - g.sum(-1, keepdim=True) - x_hat * (g * x_hat).sum(-1, keepdim=True)) / (
        width * std
    )


def ttt(q, k, v, eta, layers, gamma, beta):
    """One mini-batch as TTT writes it, dual form and target v - k: its outputs, and the layers after it.

    q, k, v [b, d], eta [b, b] lower triangular, layers ((W, bias), ...) with GELU between them.
    """
    inputs = [k]
    pre = []
    for W, bias in layers:
        pre.append(inputs[-1] @ W + bias)
        inputs.append(F.gelu(pre[-1], approximate="tanh"))
    gradients = [gradient_of_norm_and_loss(pre[-1], v - k, gamma, beta)]
    for (W, _), Z in zip(layers[:0:-1], pre[-2::-1]):
        slope = torch.func.vmap(
            torch.func.vmap(torch.func.grad(lambda x: F.gelu(x, approximate="tanh")))
        )(Z)
        gradients.insert(0, gradients[0] @ W.T * slope)
    x = q
    after = []
    for (W, bias), X, g in zip(layers, inputs, gradients):
        Z = x @ W - (eta * (x @ X.T)) @ g + bias - eta @ g
        x = F.gelu(Z, approximate="tanh")
        after.append((W - (eta[-1, :, None] * X).T @ g, bias - eta[-1:] @ g))
    return q + F.layer_norm(Z, Z.shape[-1:], eps=1e-6) * gamma + beta, after


@backends
@pytest.mark.parametrize("depth", [1, 2])
def test_ttt_linear_and_ttt_mlp(backend, depth):
    a = {
        **make(32, B=1, HV=1, depth=depth, chunk_size=16, forget_to="anchor", **TTT),
        "initial_state": None,
    }
    q = a["q"][0, :, 0]
    k = a["k"][0, :, 0]
    v = a["v"][0, :, 0]
    lr = a["lr"][0, :, 0]
    tau = (
        1 / torch.arange(1, 17, dtype=torch.float64) + 0.1
    )  # the rate's factor for each position of a mini-batch
    a["decay"] = F.pad(tau.log().diff(), (1, 0)).repeat(2)[None, :, None]
    a["lr"] = lr[None, :, None] * tau.repeat(2)[None, :, None]
    layers = [(W[0, :-1], W[0, -1:]) for W in a["weights"]]
    outputs = []
    for part in (slice(0, 16), slice(16, 32)):
        eta = (tau[:, None] * lr[part]).tril()
        output, layers = ttt(q[part], k[part], v[part], eta, layers, *a["norm"])
        outputs.append(output)
    assert_close(neural_memory(**a, backend=backend)[0][0, :, 0], torch.cat(outputs))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("b", [1, 4])
def test_a_gate_that_is_shut_forgets_everything(depth, b):
    arguments = make(18, depth=depth, chunk_size=b)
    arguments["decay"][:, 7] = -torch.inf
    arguments["momentum"][:, 9] = -torch.inf
    results = run(arguments, "chunk")
    assert all(x.isfinite().all() for x in tree_flatten(results)[0])
    assert_close(results, run(arguments, "reference"))


def recall(depth, *, reset=False, T=2048, **options):
    """Mean squared error of 32 random pairs after T tokens, with one token that forgets everything in the middle."""
    generator = torch.Generator().manual_seed(0)
    keys = F.normalize(torch.randn(32, 64, generator=generator), dim=-1)
    values = torch.randn(32, 64, generator=generator)
    order = torch.cat([torch.randperm(32, generator=generator) for _ in range(T // 32)])
    k = keys[order][None, :, None]
    v = values[order][None, :, None]
    decay = torch.full((1, T, 1), 1 - 5e-4).log()
    if reset:
        decay[:, T // 2] = -torch.inf
    sizes = [64, *[128] * (depth - 1), 64]
    weights = tuple(
        torch.randn(1, i, o, generator=generator) * i**-0.5 for i, o in zip(sizes, sizes[1:])
    )
    options = {"chunk_size": 16, **options}
    lr = torch.full((1, T, 1), 0.04)
    state = neural_memory(k, k, v, lr, None, decay, weights, output_final_state=True, **options)[1]
    ask = keys[None, :, None]
    never = torch.zeros(1, 32, 1)
    o = neural_memory(
        ask, ask, 0 * ask, never, None, None, weights, initial_state=state, **options
    )[0]
    return (o[0, :, 0] - values).square().mean().item()


def test_two_layers_recall_more_than_one_and_outlive_a_reset():
    """A deep memory that decays to zero instead stays there: all its gradients vanish."""
    assert recall(2) < 0.012 < 0.1 < recall(1)
    assert recall(2, reset=True) < 0.03
    assert recall(2, reset=True, forget_to="zero") > 0.2


def test_short_gradients_keep_a_deep_memory_finite():
    """Keys that are alike and long values: each chunk overshoots by more than the last, in 256 tokens to no number."""
    arguments = {
        **make(256, B=1, depth=3, chunk_size=16, residual=True, dtype=torch.float32),
        "initial_state": None,
    }
    arguments["k"] = F.normalize(arguments["k"] + 1.5 * torch.ones(4), dim=-1)
    arguments["lr"] = torch.full_like(arguments["lr"], 1 / 16)
    arguments["decay"] = None
    assert not neural_memory(**{**arguments, "v": 4 * arguments["v"]})[0].isfinite().all()
    assert (
        neural_memory(**{**arguments, "v": 4 * arguments["v"]}, max_grad_norm=2.0)[0].abs().max()
        < 1e4
    )


@some_forms
def test_grouped_values_equal_repeated_heads(form):
    if form.get("residual") is None:
        form = {**form, "V": 3}
    arguments = make(20, H=2, HV=4, **form)
    repeated = {**arguments, **{n: arguments[n].repeat_interleave(2, 2) for n in ("q", "k")}}
    if "earlier" in arguments:
        k, *others = arguments["earlier"]
        repeated["earlier"] = (k.repeat_interleave(2, 2), *others)
    assert_close(neural_memory(**arguments)[0], neural_memory(**repeated)[0])


@some_forms
def test_low_precision_goes_in_and_out_and_states_stay_wide(form):
    arguments = example(T=40, dtype=torch.bfloat16, **form)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, state = neural_memory(**arguments, output_final_state=True)
    assert o.dtype == torch.bfloat16
    assert {x.dtype for x in state[:3]} == {torch.float32}
    expected, expected_state = neural_memory(
        **in_float64(arguments), backend="reference", output_final_state=True
    )
    rounded = expected.bfloat16()
    assert_close(o, expected, rounded)
    narrow = tree_map(lambda x: x.float() if is_real(x) else x, arguments)
    _, rounded_state = neural_memory(**narrow, backend="reference", output_final_state=True)
    assert_close(state[:3], expected_state[:3], rounded_state[:3])


def test_a_backward_pass_under_autocast_computes_chunks_again_without_it():
    arguments = make(40, depth=2, chunk_size=4, dtype=torch.float32)
    weights = [W.requires_grad_() for W in arguments["weights"]]
    o = neural_memory(**arguments)[0].sum()
    expected = torch.autograd.grad(o, weights, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.autograd.grad(o, weights)
    assert all(map(torch.equal, found, expected))


def test_training_is_one_compiled_graph():
    torch._dynamo.reset()
    arguments = make(5, HV=1, depth=1, chunk_size=4)
    arguments |= {"mask": None, "initial_state": None}
    weights = [W.requires_grad_() for W in arguments["weights"]]
    compiled = torch.compile(neural_memory, backend="eager", fullgraph=True)
    outputs = [op(**arguments)[0] for op in (compiled, neural_memory)]
    assert_close(*outputs)
    assert_close(*(torch.autograd.grad(o.square().sum(), weights) for o in outputs))


def test_no_gradients_are_needed_for_the_reference_to_learn():
    arguments = make(12, depth=2, chunk_size=4)
    expected = neural_memory(**arguments, backend="reference")[0]
    with torch.inference_mode():
        assert_close(neural_memory(**arguments, backend="reference")[0], expected)
        assert_close(neural_memory(**arguments)[0], expected)


@pytest.mark.parametrize("options", OPTIONS)
def test_second_derivatives_of_the_reference_are_those_of_differences(options):
    """The inner gradient is one derivative already, so these are third ones of the norm and the activation."""
    arguments = make(2, B=1, HV=1, K=3, depth=2, chunk_size=2, **OPTIONS[options])
    named = {name: arguments.pop(name).requires_grad_() for name in ("q", "k", "v", "lr")}
    weights = tuple(W.requires_grad_() for W in arguments.pop("weights"))

    def outputs(*inputs):
        given = dict(zip(named, inputs))
        return neural_memory(**given, weights=inputs[4:], **arguments, backend="reference")[0]

    assert torch.autograd.gradgradcheck(outputs, (*named.values(), *weights), fast_mode=True)


def test_states_are_kept_before_groups_of_chunks_only():
    """What training saves for 64 chunks is less than the weights before each of them."""
    arguments = make(256, B=1, HV=1, depth=2, chunk_size=4, expansion=8)
    arguments["q"].requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        neural_memory(**arguments)
    size = arguments["weights"][0].numel()  # of each of the two matrices
    weights = {x.data_ptr() for x in saved if x.numel() == size}
    assert 0 < len(weights) < 64


@pytest.mark.parametrize("name", ACTIVATIONS)
@torch.no_grad()
def test_exported_graphs_have_the_derivatives_of_activations(name, monkeypatch):
    """By operations that every runtime has, in place of PyTorch's own backward functions."""
    x = torch.linspace(-6, 6, 50, dtype=torch.float64)
    g = torch.cos(x)
    expected = ACTIVATIONS[name].backward(g, x)
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    assert_close(ACTIVATIONS[name].backward(g, x), expected)


BAD = {
    "lr must have shape": {"lr": torch.zeros(2, 3)},
    "momentum must have shape": {"momentum": torch.zeros(2, 3)},
    "decay must have shape": {"decay": torch.zeros(2, 3)},
    "weights must be a tuple": {"weights": torch.zeros(2, 4, 4)},
    "weights must be .HV, d_in, d_out.": {"weights": (torch.zeros(4, 4),)},
    r"weights\[1\] must have shape \(2, 8, 4\)": {"weights": (torch.zeros(2, 4, 8), torch.zeros(2, 7, 4))},
    r"weights\[0\] must have shape": {"weights": (torch.zeros(2, 6, 4),)},
    "chunk_size must be a positive integer, got 0": {"chunk_size": 0},
    "activation must be one of silu, gelu, gelu_tanh, got 'relu'": {"activation": "relu"},
    "forget_to must be one of initial, anchor, zero": {"forget_to": "one"},
    "loss must be one of squared, cubed, huber, got 'log'": {"loss": "log"},
    "retention must be one of all, norm, softmax, got 'some'": {"retention": "some"},
    "threshold must be given with loss='huber'": {"loss": "huber"},
    "momentum must be given with muon_lr": {"muon_lr": torch.zeros(2, 9, 2), "momentum": None, "initial_state": None},
    r"earlier.k must have shape \(2, 9, 1, 3, 4\)": {"earlier": tuple(torch.zeros(2, 9, 2, 3, 4) for _ in range(3))},
    "earlier must be EarlierPairs": {"earlier": torch.zeros(2, 9, 1, 3, 4)},
    "max_grad_norm must be positive, or None with another retention": {"max_grad_norm": 1.0, "retention": "norm"},
    "norm must be a pair": {"norm": torch.zeros(2, 4)},
    r"norm\[1\] must have shape": {"norm": (torch.zeros(2, 4), torch.zeros(4))},
    "mask must have shape": {"mask": torch.ones(2, 3, dtype=torch.bool)},
    "mask must have dtype torch.bool": {"mask": torch.ones(2, 9)},
    "residual must be": {"residual": True, "v": torch.ones(2, 9, 2, 3).double(), "weights": (torch.ones(2, 4, 3),)},
    "initial_state must be a NeuralMemoryState": {"initial_state": torch.zeros(2, 4)},
    "initial_state.weights must have shape": {"initial_state": NeuralMemoryState(*torch.zeros(4, 1, 2, 3))},
    "backend must be one of": {"backend": "cuda"},
    "backend='triton' has no kernel": {"backend": "triton"},
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused_by_name(message):
    with pytest.raises(ValueError, match=message):
        neural_memory(**{**make(9, depth=2, chunk_size=4), **BAD[message]})


def test_a_state_of_another_memory_is_refused_by_name():
    arguments = make(9, depth=2, chunk_size=4)
    for other in (
        {"depth": 1, "chunk_size": 4},
        {"depth": 2, "chunk_size": 1},
        {"depth": 2, "momentum": False},
    ):
        with pytest.raises(ValueError, match=r"initial_state\.\w+ must have shape"):
            neural_memory(**{**arguments, "initial_state": make(9, **other)["initial_state"]})
