"""What backward passes of autograd.Functions share."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from hf_memory.ops.precision import without_autocast


def first_derivatives_only(backward: Callable) -> Callable:
    """Make `backward` of an autograd.Function raise an error if its result would be differentiated again.

    PyTorch's once_differentiable raises only if the incoming gradient requires a gradient; otherwise it returns zeros.
    """

    @wraps(backward)
    def checked(ctx, *gradients):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph must be False, got True: only backend='reference' has second derivatives"
            )
        return backward(ctx, *gradients)

    return checked


def computed_again(function: Callable, *given: Any) -> Any:
    """`function(*given)`, which its backward pass computes again, so that nothing is saved but what is given.

    Arguments and results are tensors and tuples of tensors, whatever else is in them; without autocast. PyTorch's
    checkpoint does the same for compiled graphs. In small steps it takes half as long again, since it has hooks for
    each saved tensor.
    """
    if not torch.is_grad_enabled():
        return function(*given)
    if torch.compiler.is_compiling():
        return checkpoint(function, *given, use_reentrant=False, preserve_rng_state=False)
    leaves, structure = tree_flatten(given)
    structures: list = []
    results = _ComputedAgain.apply(function, structure, structures, *leaves)
    return tree_unflatten(results, structures[0])


class _ComputedAgain(torch.autograd.Function):
    """See `computed_again`."""

    @staticmethod
    def forward(ctx, function, structure, structures, *leaves):
        is_tensor = [isinstance(x, Tensor) for x in leaves]
        ctx.function = function
        ctx.structure = structure
        ctx.others = [None if is_one else x for x, is_one in zip(leaves, is_tensor)]
        ctx.save_for_backward(*(x if is_one else None for x, is_one in zip(leaves, is_tensor)))
        results, of_results = tree_flatten(function(*tree_unflatten(leaves, structure)))
        structures.append(of_results)
        return tuple(results)

    @staticmethod
    @first_derivatives_only
    def backward(ctx, *gradients):
        needs = ctx.needs_input_grad[3:]
        saved = zip(ctx.saved_tensors, ctx.others, needs)
        leaves = [y if x is None else x.detach().requires_grad_(need) for x, y, need in saved]
        inputs = [x for x, need in zip(leaves, needs) if need]

        def found(_) -> tuple:
            results = tree_flatten(ctx.function(*tree_unflatten(leaves, ctx.structure)))[0]
            pairs = zip(results, gradients)
            known = [(x, g) for x, g in pairs if g is not None and x.requires_grad]
            outputs, of_outputs = zip(*known)
            return torch.autograd.grad(outputs, inputs, of_outputs, allow_unused=True)

        with torch.enable_grad():
            grads = iter(without_autocast(found, next(g for g in gradients if g is not None)))
        return None, None, None, *(next(grads) if need else None for need in needs)
