"""The neural memory's kernels equal its reference, in Triton's interpreter."""

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map

from comparing import assert_close, in_float64
from forms import is_real, read_in_parts
from hf_memory.ops.neural_memory import neural_memory
from hf_memory.ops.neural_memory.kernels import launch
from hf_memory.ops.neural_memory.reference import example

FORMS = {
    "network": {"depth": 2, "chunk_size": 16, "residual": True},
    "network without momentum": {"depth": 2, "chunk_size": 16, "momentum": False, "activation": "gelu"},
    "network without decay": {"depth": 2, "chunk_size": 16, "decay": False, "activation": "gelu_tanh"},
    "network that forgets to zero": {"depth": 2, "chunk_size": 20, "forget_to": "zero", "V": 10},
    "network of every token": {"depth": 2, "chunk_size": 1, "T": 4},
    "matrix": {"depth": 1, "chunk_size": 1},
    "matrix without momentum": {"depth": 1, "chunk_size": 1, "momentum": False},
    "plain matrix": {"depth": 1, "chunk_size": 1, "momentum": False, "decay": False, "V": 10},
    "matrix with all": {"depth": 1, "chunk_size": 1, "bias": True, "residual": True, "forget_to": "initial"},
}  # fmt: skip
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
some_forms = pytest.mark.parametrize(
    "form", [FORMS["network"], FORMS["matrix"]], ids=["network", "matrix"]
)


def make(form, T=24, **sizes):
    return example(**{"T": T, "H": 1, "HV": 2, "K": 16, **form, **sizes})


def run(arguments, backend):
    """Outputs, final state, and gradients of a random function of both for every tensor."""
    arguments = tree_map(lambda x: x.detach().requires_grad_() if is_real(x) else x, arguments)
    o, state = neural_memory(**arguments, backend=backend, output_final_state=True)
    generator = torch.Generator().manual_seed(1)
    outputs = [o, *(x for x in state[:3] if x.numel())]
    total = sum(
        (torch.randn(x.shape, generator=generator, dtype=torch.float64) * x).sum() for x in outputs
    )
    inputs = [x for x in tree_flatten(arguments)[0] if is_real(x) and x.numel()]
    return outputs, state.phase, torch.autograd.grad(total, inputs, materialize_grads=True)


def reference(arguments):
    """The same of the reference, in float64 and in float32."""
    return [run(x, "reference") for x in (in_float64(arguments), arguments)]


@every_form
def test_kernels_equal_the_reference(form):
    """Outputs, states and all gradients; rows begin at phases of their own, and the last chunk is not full."""
    arguments = make(form)
    assert_close(run(arguments, "triton"), *reference(arguments))


@some_forms
@pytest.mark.parametrize("T", [1, 16, 24])
def test_kernels_equal_the_reference_from_the_start_of_a_sequence(form, T):
    arguments = {**make(form, T), "initial_state": None, "mask": None}
    assert_close(run(arguments, "triton"), *reference(arguments))


HELD = {
    name: {**form, "chunk_size": 8} for name, form in FORMS.items() if name.startswith("network")
}


def from_the_start(form, **sizes):
    """Five chunks, of which the last is not full, in groups of two."""
    return {**make(form, T=37, H=1, HV=1, **sizes), "initial_state": None, "mask": None}


@pytest.mark.parametrize("form", HELD.values(), ids=HELD)
def test_memories_that_registers_hold_equal_the_reference(form, monkeypatch):
    monkeypatch.setattr(launch, "_Tiled", None)
    arguments = from_the_start(form)
    assert_close(run(arguments, "triton"), *reference(arguments))


def test_no_memory_is_held_where_triton_would_make_code_that_traps(monkeypatch):
    monkeypatch.setattr(launch, "NOT_HELD", [100])
    monkeypatch.setattr(launch, "architecture", lambda device: 100)
    monkeypatch.setattr(launch, "_Held", None)
    arguments = from_the_start(HELD["network"])
    assert_close(run(arguments, "triton"), *reference(arguments))


def test_memories_that_registers_hold_lose_in_16_bits_what_tiles_lose(monkeypatch):
    """Outputs, states and gradients; a head as wide as those of Titans, in float16 for the interpreter."""
    arguments = from_the_start(HELD["network"], K=64, expansion=2, dtype=torch.float16)
    (o, _, d), (held_o, _, held_d) = (
        run(in_float64(arguments), "reference"),
        run(arguments, "triton"),
    )
    monkeypatch.setattr(launch, "HELD", 0)
    tiled_o, _, tiled_d = run(arguments, "triton")
    for x, y, exact in zip((*held_o, *held_d), (*tiled_o, *tiled_d), (*o, *d)):
        assert (x.double() - exact).norm() <= 1.5 * (
            y.double() - exact
        ).norm() + 1e-3 * exact.norm()


@some_forms
def test_kernels_equal_the_reference_with_a_ragged_mask(form):
    arguments = make(form, B=3)
    arguments["mask"] = torch.rand(3, 24, generator=torch.Generator().manual_seed(1)) > 0.3
    arguments["mask"][1, 5:] = False
    arguments["mask"][2] = False
    assert_close(run(arguments, "triton"), *reference(arguments))


@some_forms
def test_packed_sequences_in_kernels_equal_the_reference(form):
    arguments = make(form, B=1)
    arguments["initial_state"] = make(form, B=4, T=1, seed=5)["initial_state"]
    arguments["cu_seqlens"] = torch.tensor([0, 5, 5, 6, 24])
    assert_close(run(arguments, "triton"), *reference(arguments))


@some_forms
def test_any_split_in_kernels_equals_the_whole(form):
    arguments = make(form)
    options = {"backend": "reference", "output_final_state": True}
    whole = [neural_memory(**x, **options) for x in (in_float64(arguments), arguments)]
    for bounds in ([0, 16, 24], [0, 1, 18, 19, 24]):
        assert_close(read_in_parts(neural_memory, arguments, bounds, backend="triton"), *whole)


@some_forms
def test_wide_memories_run_in_tiles(form):
    arguments = make(form, T=17, B=1, HV=1, K=40, V=40, expansion=3)
    assert_close(run(arguments, "triton"), *reference(arguments))


@some_forms
def test_a_gate_that_is_shut_forgets_everything_in_kernels(form):
    arguments = make(form)
    arguments["decay"][:, 7] = -torch.inf
    arguments["momentum"][:, 9] = -torch.inf
    assert_close(run(arguments, "triton"), *reference(arguments))


@some_forms
def test_kernels_in_16_bits_lose_what_rounding_loses(form):
    """float16, since the interpreter multiplies the bit patterns of bfloat16."""
    arguments = make(form, dtype=torch.float16)
    expected = neural_memory(**in_float64(arguments), backend="reference")[0]
    o = neural_memory(**arguments, backend="triton")[0]
    assert o.dtype == torch.float16
    assert (
        o.double() - expected
    ).norm() / expected.norm() < 2e-3  # operands of 11 bits, a few roundings in turn


REFUSED = {
    "norm must be None": {"norm": True},
    "weights must be 2 matrices, or 1 with chunk_size=1, got 3": {"depth": 3},
    "weights must be 2 matrices, or 1 with chunk_size=1, got 1": {"depth": 1},
    "muon_lr must be None": {"muon": True},
    "earlier must be None": {"earlier": 1},
    "loss must be 'squared', got 'cubed'": {"loss": "cubed"},
    "retention must be 'all', got 'norm'": {"retention": "norm"},
    "weights must be without bias": {"bias": True},
    "forget_to must be 'initial' or 'zero', got 'anchor'": {"forget_to": "anchor"},
    "chunk_size must be at most 32 with 16 channels in torch.float32, got 33": {"chunk_size": 33},
    "K and V must be at most 64 in torch.float32, got 16 and 65": {"V": 65},
    "K and V must be at most 128 in torch.bfloat16, got 16 and 130": {
        "V": 130,
        "dtype": torch.bfloat16,
    },
    "chunk_size must be at most 16 with 65 channels in torch.bfloat16, got 17": {
        "chunk_size": 17,
        "V": 65,
        "dtype": torch.bfloat16,
    },
    "q must be float32, bfloat16 or float16, got float64": {"dtype": torch.float64},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_has_no_kernels_is_refused_by_name_and_runs_without(message):
    arguments = make({"depth": 2, "chunk_size": 16, **REFUSED[message]}, T=3)
    with pytest.raises(
        ValueError, match=f"backend='triton' has no kernel for this call: {message}"
    ):
        neural_memory(**arguments, backend="triton")
    neural_memory(**arguments)
