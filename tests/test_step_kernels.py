"""One token in kernels equals one token in the mixer's own words, in Triton's interpreter."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

from cases import CASES, Case, make_model, random_tokens
from hf_memory.mixers.base import Context
from hf_memory.ops import contract, decoding
from hf_memory.ops.decoding import Convolution, Decay, Output

FAMILIES = ("hf_memory_linear", "hf_memory_gated", "hf_memory_deltanet")
MORE = (
    Case("linear-dpfp", "hf_memory_linear", {"feature_map": "dpfp", "num_key_value_heads": 4, "output_norm": True}),
    Case("linear-elu-rope-norm", "hf_memory_linear", {"memory_rope": True, "use_qk_norm": True}),
    Case("gla-conv-of-one-token", "hf_memory_gated", {"linear_conv_kernel_dim": 1, "output_gate": "none"}),
    Case("retention-wide-values", "hf_memory_gated", {"gate": "retention", "linear_value_head_dim": 20}),
    Case("mamba2-of-one-key", "hf_memory_gated", {"gate": "mamba2", "linear_key_head_dim": 12}),
    Case("mamba2-no-conv", "hf_memory_gated", {"gate": "mamba2", "linear_conv_kernel_dim": 0}),
    Case("deltanet-no-conv", "hf_memory_deltanet", {"linear_conv_kernel_dim": 0, "output_gate": "sigmoid"}),
    Case("deltanet-norm-rope", "hf_memory_deltanet", {"use_qk_norm": True, "memory_rope": True}),
    Case("kda-grouped", "hf_memory_deltanet", {"gate": "vector", "linear_num_key_heads": 2,
         "linear_num_value_heads": 6, "linear_key_head_dim": 12, "linear_value_head_dim": 20}),
    Case("fewer-values", "hf_memory_deltanet", {"gate": "scalar", "linear_num_key_heads": 4,
         "linear_num_value_heads": 2}),
)  # fmt: skip
STEPPING = [case for case in CASES if case.model_type in FAMILIES] + list(MORE)
every_form = pytest.mark.parametrize("case", STEPPING, ids=[case.name for case in STEPPING])
DELTA = Case("gated-deltanet", "hf_memory_deltanet", {"gate": "scalar"})


def make_mixer(case, dtype=torch.float32):
    """The first memory of a model, with gates, norms and biases that are not what they start from."""
    model = make_model(case, mixer_backend="chunk")
    index = model.config.layer_types.index("memory")
    mixer = model.model.layers[index].mixer.to(dtype)
    for i, x in enumerate(mixer.parameters()):
        if x.ndim == 1:
            x.data += 0.3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(i)).to(dtype)
    return model, mixer


def read(model, mixer, T, states, mask=None, seed=0, dtype=torch.float32):
    """Hidden states of T tokens, and what a mixer must know beside them."""
    x = torch.randn(2, T, model.config.hidden_size, generator=torch.Generator().manual_seed(seed)).to(dtype)
    positions = model.model.rotary_emb(x, torch.arange(seed, seed + T)[None]) if model.config.memory_rope else None
    return x, Context(positions, mask, None, states)


def can_step(mixer, x, context, backend="triton"):
    mixer.config.mixer_backend = backend
    answer = mixer.can_step(x, context)
    mixer.config.mixer_backend = "chunk"
    return answer


def copy(states):
    return {name: x.clone(memory_format=torch.contiguous_format) for name, x in states.items()}


def assert_close(results, expected, tolerance=1e-5):
    """Each tensor on the scale of its largest entry."""
    for one, other in zip(results, expected, strict=True):
        scale = max(other.abs().flatten().tolist(), default=0.0)  # a convolution of one token has an empty window
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance * scale)


@every_form
@torch.no_grad()
def test_steps_equal_mixing(case):
    """Outputs and states of three tokens after six, where one row is padding now and then; the states stay in place."""
    model, mixer = make_mixer(case)
    _, expected = mixer.mix(*read(model, mixer, 6, {}))
    states = copy(expected)
    for t, row in enumerate((None, 1, None), start=6):
        mask = None if row is None else torch.arange(2)[:, None] != row
        x, context = read(model, mixer, 1, states, mask, seed=t)
        assert can_step(mixer, x, context)
        before = copy(states)
        output, states = mixer.step(x, context)
        expected_output, expected = mixer.mix(x, context._replace(states=expected))
        assert states.keys() == expected.keys()
        assert_close((output, *(states[name] for name in expected)), (expected_output, *expected.values()))
        assert states["memory"] is context.states["memory"]
        if row is not None:
            assert all(torch.equal(states[name][row], x[row]) for name, x in before.items())


@torch.no_grad()
@pytest.mark.parametrize("case", [DELTA, CASES[0], MORE[0]], ids=lambda case: case.name)
def test_a_step_in_bfloat16_loses_what_rounding_loses(case):
    model, mixer = make_mixer(case, torch.bfloat16)
    _, states = mixer.mix(*read(model, mixer, 6, {}, dtype=torch.bfloat16))
    x, context = read(model, mixer, 1, copy(states), seed=6, dtype=torch.bfloat16)
    rounded, _ = mixer.mix(x, context)
    output, _ = mixer.step(x, context)
    exact, _ = mixer.float().mix(x.float(), context._replace(states={n: s.float() for n, s in copy(states).items()}))
    assert output.dtype == torch.bfloat16
    assert (output - exact).norm() <= 1.2 * (rounded - exact).norm() + 0.004 * exact.norm()


@torch.no_grad()
def test_what_kernels_do_not_take_is_mixed():
    model, mixer = make_mixer(DELTA)
    _, states = mixer.mix(*read(model, mixer, 6, {}))
    x, context = read(model, mixer, 1, copy(states))
    assert can_step(mixer, x, context)
    assert not can_step(mixer, x, context._replace(states={}))
    assert not can_step(mixer, x, context._replace(cu_seqlens=torch.tensor([0, 1])))
    assert not can_step(mixer, x.expand(-1, 2, -1), context)
    assert not can_step(mixer, x, context._replace(states={**states, "memory": states["memory"].double()}))
    assert not can_step(mixer, x, context._replace(states={**states, "memory": states["memory"].mT}))
    with torch.enable_grad():
        assert not can_step(mixer, x, context)
    assert not can_step(mixer, x, context, backend="auto")


@pytest.mark.parametrize("case", [DELTA, CASES[2], CASES[6], CASES[-1]], ids=lambda case: case.name)
def test_compiled_steps_are_one_graph_and_equal_mixing(case, monkeypatch):
    """The states of a StaticCache change where they are, also where the graph is made functional."""
    monkeypatch.setattr(contract, "_triton_interprets", lambda: True)  # dynamo cannot trace Triton's own settings
    torch._dynamo.reset()
    model, tokens = make_model(case, mixer_backend="triton"), random_tokens(2, 11)
    cache = StaticCache(config=model.config, max_cache_len=12)
    step = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        model(tokens[:, :8], past_key_values=cache)
        layers = [layer for layer in cache.layers if hasattr(layer, "states")]
        before = [x.data_ptr() for layer in layers for x in layer.states.values()]
        logits = [step(tokens[:, t : t + 1], past_key_values=cache).logits for t in range(8, 11)]
        assert [x.data_ptr() for layer in layers for x in layer.states.values()] == before
        torch.testing.assert_close(torch.cat(logits, 1), model(tokens).logits[:, 8:], rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_steps_can_be_undone():
    model, tokens = make_model(DELTA, mixer_backend="triton"), random_tokens(1, 14)
    cache = DynamicCache(config=model.config)
    model(tokens[:, :8], past_key_values=cache)
    for layer in cache.layers:
        layer.activate_past_recording()
    for t in range(8, 12):
        model(tokens[:, t : t + 1], past_key_values=cache)
    cache.crop(-3)
    rest = [model(tokens[:, t : t + 1], past_key_values=cache).logits for t in range(9, 14)]
    torch.testing.assert_close(torch.cat(rest, 1), model(tokens).logits[:, 9:], rtol=1e-4, atol=1e-4)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def arguments(**changes):
    """Of `memory_step`, with all that is optional."""
    B, H, HV, K, V = 2, 2, 4, 6, 5
    gate = random(B, HV, K)
    return {
        "q": random(B, H, K), "k": random(B, H, K), "v": random(B, HV, V), "memory": random(B, HV, K, V),
        "normalizer": random(B, HV, K).exp(), "beta": random(B, HV), "mask": torch.tensor([True, False]),
        "decay": Decay("softplus", gate, A_log=random(HV), dt_bias=random(HV * K)), "activation": "silu",
        "output": Output(norm=random(V), eps=1e-6, gate=random(B, HV * V), activation="sigmoid"), **changes,
    }  # fmt: skip


def convolutions(B=2, W=3, channels=(6, 6, 10)):
    return tuple(Convolution(random(D, W), random(D), random(B, W - 1, D)) for D in channels)


def test_custom_ops_say_what_they_change():
    from hf_memory.ops.decoding import kernels

    a = arguments()
    q, k, v, memory, normalizer, beta, mask, decay, activation, output = a.values()
    given = (q, k, v, memory, normalizer, mask, beta, *decay, *output, activation, True, 2.0, 0.5)
    torch.library.opcheck(kernels.memory_step, given)
    weights, biases, windows = zip(*convolutions())
    given = (random(2, 6), random(2, 6), random(2, 10), *weights, *biases, *windows, mask)
    torch.library.opcheck(kernels.convolution_step, given)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("memory", {"memory": random(2, 4, 6, 5).double()}),
        ("memory", {"memory": random(2, 4, 5, 6).mT}),
        ("memory", {"memory": random(2, 4, 300, 5)}),
        ("q", {"q": random(2, 3, 6)}),
        ("k", {"k": random(2, 2, 5)}),
        ("v", {"v": random(2, 20)}),
        ("beta", {"beta": random(2, 2)}),
        ("normalizer", {"normalizer": random(2, 4, 5)}),
        ("mask", {"mask": torch.ones(2, 1, dtype=torch.bool)}),
        (r"decay\.dt_bias", {"decay": Decay("softplus", random(2, 4), A_log=random(4), dt_bias=random(24))}),
        (r"output\.gate", {"output": Output(gate=random(2, 4, 5), activation="silu")}),
    ],
)
def test_memory_step_names_what_does_not_fit(name, change):
    with pytest.raises(ValueError, match=f"^{name} must"):
        decoding.memory_step(**arguments(**change))


def test_convolution_step_names_what_does_not_fit():
    q, k, v = random(2, 6), random(2, 6), random(2, 10)
    with pytest.raises(ValueError, match=r"^v must be \[B, channels\]"):
        decoding.convolution_step(q, k, v[:, None], convolutions())
    with pytest.raises(ValueError, match=r"^window of q must have shape \(3, 2, 6\)"):
        decoding.convolution_step(random(3, 6), k, v, convolutions())
