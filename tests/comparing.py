"""The one way to compare results of different computations, which must not depend on how a processor orders sums."""

import copy

import torch
from torch.utils._pytree import tree_flatten, tree_map

EXACT = 1e-10  # in float64, where only mistakes are larger; times the largest element where it is above one
FACTOR = 32  # by which one order of sums may lose more than another


def assert_close(found, expected, rounded=None):
    """Check that tensors, or trees of tensors and None, are equal up to rounding, on the scale of the largest element.

    Args:
        found: the result of one computation, in float64 unless `rounded` is given.
        expected: the result of another computation, in float64.
        rounded: `expected`, computed in the precision of `found`. Its error is what rounding costs in this precision,
            and `found` may have FACTOR times this error.
    """
    expected, found = (tree_flatten(x)[0] for x in (expected, found))
    rounded = [None] * len(found) if rounded is None else tree_flatten(rounded)[0]
    for one, other, third in zip(found, expected, rounded, strict=True):
        if other is None or not other.is_floating_point():
            assert one is other or torch.equal(one, other)
            continue
        assert other.dtype == torch.float64
        assert one.dtype == (torch.float64 if third is None else third.dtype)
        atol = EXACT * max(1, _largest(other)) if third is None else FACTOR * _lost(third, other)
        torch.testing.assert_close(one.double(), other, rtol=0, atol=atol)


def in_float64(x):
    """A copy of a module, or of a tree of tensors, in float64."""
    if isinstance(x, torch.nn.Module):
        return copy.deepcopy(x).double()
    return tree_map(
        lambda y: y.double() if isinstance(y, torch.Tensor) and y.is_floating_point() else y, x
    )


def _lost(rounded: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest error of a result, or that of rounding its largest element if this is larger."""
    return max(_largest(rounded.double() - exact), torch.finfo(rounded.dtype).eps * _largest(exact))


def _largest(x: torch.Tensor) -> float:
    return x.detach().nan_to_num(0, 0, 0).abs().max().item() if x.numel() else 0.0
