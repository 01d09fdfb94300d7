"""The neural memory's kernels equal its reference, in Triton's interpreter."""

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map

from comparing import assert_close, in_float64
from forms import is_real, read_in_parts
from hf_memory.ops.neural_memory import neural_memory
from hf_memory.ops.neural_memory.reference import example

FORMS = {
    "residual": {"depth": 2, "chunk_size": 16, "residual": True},
    "gelu": {"depth": 2, "chunk_size": 16, "activation": "gelu"},
    "gelu_tanh": {"depth": 2, "chunk_size": 8, "activation": "gelu_tanh"},
    "without decay": {"depth": 2, "chunk_size": 20, "decay": False, "V": 10},
    "of every token": {"depth": 2, "chunk_size": 1, "T": 4},
}
FORM = FORMS["residual"]


def make(form=FORM, T=24, **sizes):
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


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_kernels_equal_the_reference(form):
    """Outputs, states and all gradients; rows begin at phases of their own, and the last chunk is not full."""
    arguments = make(form)
    assert_close(run(arguments, "triton"), *reference(arguments))


@pytest.mark.parametrize("T", [1, 16, 24, 80])
def test_kernels_equal_the_reference_from_the_start_of_a_sequence(T):
    """Of one chunk, and of five in groups of two."""
    arguments = {**make(FORM, T, HV=1), "initial_state": None, "mask": None}
    assert_close(run(arguments, "triton"), *reference(arguments))


def test_kernels_equal_the_reference_with_a_ragged_mask():
    arguments = make(B=3)
    arguments["mask"] = torch.rand(3, 24, generator=torch.Generator().manual_seed(1)) > 0.3
    arguments["mask"][1, 5:] = False
    arguments["mask"][2] = False
    assert_close(run(arguments, "triton"), *reference(arguments))


def test_packed_sequences_in_kernels_equal_the_reference():
    arguments = make(B=1)
    arguments["initial_state"] = make(B=4, T=1, seed=5)["initial_state"]
    arguments["cu_seqlens"] = torch.tensor([0, 5, 5, 6, 24])
    assert_close(run(arguments, "triton"), *reference(arguments))


def test_any_split_in_kernels_equals_the_whole():
    arguments = make()
    options = {"backend": "reference", "output_final_state": True}
    whole = [neural_memory(**x, **options) for x in (in_float64(arguments), arguments)]
    for bounds in ([0, 16, 24], [0, 1, 18, 19, 24]):
        assert_close(read_in_parts(neural_memory, arguments, bounds, backend="triton"), *whole)


def test_wide_memories_run_in_tiles():
    arguments = make(T=17, B=1, HV=1, K=40, V=40, expansion=3)
    assert_close(run(arguments, "triton"), *reference(arguments))


def test_a_gate_that_is_shut_forgets_everything_in_kernels():
    arguments = make()
    arguments["decay"][:, 7] = -torch.inf
    arguments["momentum"][:, 9] = -torch.inf
    assert_close(run(arguments, "triton"), *reference(arguments))


def test_kernels_in_16_bits_lose_what_rounding_loses():
    """float16, since the interpreter multiplies the bit patterns of bfloat16."""
    arguments = make(dtype=torch.float16)
    expected = neural_memory(**in_float64(arguments), backend="reference")[0]
    o = neural_memory(**arguments, backend="triton")[0]
    assert o.dtype == torch.float16
    assert (
        o.double() - expected
    ).norm() / expected.norm() < 2e-3  # operands of 11 bits, a few roundings in turn


REFUSED = {
    "weights must be 2 matrices, got 3": {"depth": 3},
    "weights must be 2 matrices, got 1": {"depth": 1, "chunk_size": 1},
    "weights must be without bias": {"bias": True},
    "norm must be None": {"norm": True},
    "momentum must be given, got None": {"momentum": False},
    "muon_lr must be None": {"muon": True},
    "earlier must be None": {"earlier": 1},
    "forget_to must be 'initial', got 'zero'": {"forget_to": "zero"},
    "max_grad_norm must be None, got 2.0": {"max_grad_norm": 2.0},
    "loss must be 'squared', got 'cubed'": {"loss": "cubed"},
    "retention must be 'all', got 'norm'": {"retention": "norm"},
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
