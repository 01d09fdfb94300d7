"""The calls that tests of ops and of their kernels run over: each op in all of its variants."""

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map

from hf_memory.ops import OPS

FORMS = [
    pytest.param(op, variant, id="-".join([op.name, *(f"{k}={v}" for k, v in variant.items())]))
    for op in OPS
    for variant in op.variants
]
every_form = pytest.mark.parametrize(("op", "variant"), FORMS)
every_op = pytest.mark.parametrize("op", OPS, ids=[op.name for op in OPS])


def gates_of(op, arguments):
    """The names of decays that a call has."""
    return [name for name in op.gates if arguments.get(name) is not None]


def is_real(x):
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def widened(arguments):
    """The same in float64."""
    return tree_map(lambda x: x.detach().double().requires_grad_() if is_real(x) else x, arguments)


def run(op, arguments, backend, **kwargs):
    """Outputs, final state, and gradients of a random function of both, with respect to every tensor argument."""
    has_state = not (op.growth == "token" and "cu_seqlens" in {**arguments, **kwargs})
    o, state = op.op(**arguments, backend=backend, output_final_state=has_state, **kwargs)
    outputs = [o, *(x for x in tree_flatten(state)[0] if x is not None)]
    generator = torch.Generator().manual_seed(1)
    weights = [
        torch.randn(x.shape, generator=generator).bfloat16().to(x) for x in outputs
    ]  # exact in all dtypes
    inputs = [x for x in tree_flatten(arguments)[0] if is_real(x)]
    gradients = torch.autograd.grad(
        sum((w * x).sum() for w, x in zip(weights, outputs)), inputs, allow_unused=True
    )
    return outputs, gradients


def reference(op, arguments, **kwargs):
    """The same of the reference, in float64 and in the precision of the arguments."""
    return [run(op, x, "reference", **kwargs) for x in (widened(arguments), arguments)]


def with_strong_gates(op, arguments):
    """One gate of twenty at each of -50, -1e4, -1e8 and -inf."""
    for name in gates_of(op, arguments):
        g = arguments[name].detach().clone()
        dice = torch.rand(g.shape, generator=torch.Generator().manual_seed(3))
        for n, strength in enumerate((-50.0, -1e4, -1e8, -torch.inf)):
            g[(dice * 20).long() == n] = strength
        arguments[name] = g.requires_grad_()
    return arguments


def tokens_of(arguments, part):
    """The same call for some of its tokens."""
    shape = arguments["q"].shape[:2]
    whole = ("initial_state", "weights", "norm")

    def of(x):
        return x[:, part] if isinstance(x, torch.Tensor) and x.shape[:2] == shape else x

    return {name: x if name in whole else tree_map(of, x) for name, x in arguments.items()}


def read_in_parts(op, arguments, bounds, **options):
    """The outputs of several calls, each of which goes on from the state of the one before, and the last state."""
    state = arguments.get("initial_state")
    outputs = []
    for start, end in zip(bounds, bounds[1:]):
        part = {**tokens_of(arguments, slice(start, end)), "initial_state": state}
        o, state = op(**part, output_final_state=True, **options)
        outputs.append(o)
    return torch.cat(outputs, 1), state
