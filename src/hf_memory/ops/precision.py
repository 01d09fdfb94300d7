"""The precision in which ops compute: float32 or float64 inside, without autocast."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

# otherwise slower than float32 in PyTorch
CPU_MULTIPLIES_BFLOAT16 = torch.cpu._is_avx512_bf16_supported()


def in_float32(op: Callable) -> Callable:
    """Run `op(q, ...)` without autocast in float32, or float64 if q is; only the output o has the dtype of q."""
    return _in_float32_after(op, lambda q: 0)


def with_bfloat16_products(op: Callable) -> Callable:
    """Like `in_float32`, but q, k and v stay bfloat16 if the hardware multiplies bfloat16; all else is float32."""
    return _in_float32_after(
        op,
        lambda q: 3 if q.dtype == torch.bfloat16 and (q.is_cuda or CPU_MULTIPLIES_BFLOAT16) else 0,
    )


def without_autocast(function: Callable, x: Tensor, *others: Any, **kwargs: Any) -> Any:
    """The result of `function(x, *others, **kwargs)` in the dtypes of these arguments, whatever autocast says."""
    kind = x.device.type
    # the context is expensive, this test is not; the meta device has no autocast
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return function(x, *others, **kwargs)
    with torch.autocast(kind, enabled=False):
        return function(x, *others, **kwargs)


def upcast(x: Tensor) -> Tensor:
    """x in float64 if it is float64, else in float32."""
    # comparing takes a tenth of the time of `torch.promote_types`
    return x if x.dtype in (torch.float32, torch.float64) else x.to(torch.float32)


def _in_float32_after(op: Callable, num_unchanged: Callable[[Tensor], int]) -> Callable:
    """`op` without autocast, whose arguments after the first `num_unchanged(q)` are float32, and whose o is like q."""

    @wraps(op)
    def op_in_float32(*args, **kwargs):
        q = args[0]
        n = num_unchanged(q)
        dtype = torch.promote_types(q.dtype, torch.float32)
        others = [_converted(x, dtype) for x in args[n:]]
        kwargs = {name: _converted(x, dtype) for name, x in kwargs.items()}
        o, state = without_autocast(op, *args[:n], *others, **kwargs)
        return o.to(q.dtype), state

    return op_in_float32


def _converted(x, dtype: torch.dtype):
    """Floating point tensors, also within tuples, in a dtype; those that have it stay the same objects."""
    if isinstance(x, Tensor):
        return x.to(dtype) if x.is_floating_point() else x
    if not isinstance(x, tuple) or all(not isinstance(y, Tensor) or y.dtype == dtype for y in x):
        return x
    return tree_map(lambda y: _converted(y, dtype), x)
