"""What backward passes of autograd.Functions share."""

from collections.abc import Callable
from functools import wraps

import torch


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
