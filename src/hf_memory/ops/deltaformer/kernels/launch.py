"""DeltaFormer's softmax write in Triton, for sequences without a past.

The letters are those of chunk.py. The logarithm L of each row's sum comes first, so that P = exp(X - L) is known for
any pair of tokens. Then (I + diag(beta) P) U = diag(a) V is solved panel by panel (substitution.py), and so is the
transposed system for G, from the last panel to the first. All other gradients are sums over blocks (gradients.py).
U and L are saved. Products read U and beta G in the dtype of the keys.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from hf_memory.ops.deltaformer.kernels.gradients import beta_gradient_kernel, key_gradient_kernel
from hf_memory.ops.deltaformer.kernels.substitution import (
    gather_kernel,
    inverse_kernel,
    normalizer_kernel,
    substitute_kernel,
)
from hf_memory.ops.triton.launch import contiguous, launcher, precision

PANEL = 512  # tokens that one program a head solves in series between two parallel sums


def _constants(k: Tensor, V: int | None = None) -> dict:
    """Compile-time arguments and launch options of all kernels, for those that read values with V channels."""
    H, K = k.shape[2:]
    constants = {"H": H, "K": K, "BK": _width(K), "PRECISION": precision(k.dtype)}
    if V is not None:
        constants |= {"V": V, "BV": _width(V)}
    return constants | {"C": 32 if k.dtype.itemsize == 2 else 16, "num_warps": 4}


def _width(D: int) -> int:
    return max(16, triton.next_power_of_2(D))


def _tall(constants: dict, dtype: torch.dtype) -> dict:
    """The constants of kernels that only sum: larger blocks, of more rows than columns, so that less is read twice."""
    sizes = {"C": 64, "ROWS": 128} if dtype.itemsize == 2 else {"C": 16, "ROWS": 32}
    return {**constants, **sizes, "num_warps": 8}


def _programs(k: Tensor, tokens: int, rows: int) -> tuple[int]:
    return (k.shape[0] * k.shape[2] * triton.cdiv(tokens, rows),)


def _normalizers(k: Tensor, scale: float) -> Tensor:
    """L [B, T, H]."""
    constants, T = _tall(_constants(k), k.dtype), k.shape[1]
    L = k.new_empty(k.shape[:3], dtype=torch.float32)
    launcher(normalizer_kernel, _programs(k, T, constants["ROWS"]))(k, L, scale, T, **constants, num_stages=3)
    return L


def _solve(
    k: Tensor, right: Tensor, a: Tensor, beta: Tensor, L: Tensor, scale: float, *, backward: bool
) -> tuple[Tensor, Tensor]:
    """U for the right side V; backward G for dU. Also what products read of them, in the dtype of k."""
    constants: dict[str, Any] = _constants(k, right.shape[-1]) | {"BACKWARD": backward}
    T, tall = k.shape[1], _tall(constants, k.dtype)
    W = _inverses(k, beta, L, scale)
    out = torch.empty_like(right, dtype=torch.float32)
    x = torch.empty_like(right, dtype=k.dtype) if backward or k.dtype != torch.float32 else out
    panels = range(0, T, PANEL)
    for panel in reversed(panels) if backward else panels:
        end = min(panel + PANEL, T)
        place = (scale, panel, end, T)
        programs = _programs(k, end - panel, tall["ROWS"])
        launcher(gather_kernel, programs)(k, right, a, beta, L, x, out, *place, **tall, num_stages=2)
        launcher(substitute_kernel, _programs(k, 1, 1))(k, beta, L, W, out, x, *place, **constants, num_stages=1)
    return out, x


def _inverses(k: Tensor, beta: Tensor, L: Tensor, scale: float) -> Tensor:
    """W [B, T, H, C]."""
    constants, T = _constants(k), k.shape[1]
    W = k.new_empty(*k.shape[:3], constants["C"], dtype=torch.float32)
    launcher(inverse_kernel, _programs(k, T, constants["C"]))(k, beta, L, W, scale, T, **constants, num_stages=1)
    return W


@torch.library.custom_op("hf_memory::corrected_values", mutates_args=())
def _forward(k: Tensor, v: Tensor, a: Tensor, beta: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """u and the base-two logarithms L of the rows' sums."""
    k, v, a, beta = contiguous(k, v, a, beta)
    L = _normalizers(k, scale)
    return _solve(k, v, a, beta, L, scale, backward=False)[0], L


@_forward.register_fake
def _(k, v, a, beta, scale):
    return v.new_empty(v.shape, dtype=torch.float32), beta.new_empty(beta.shape, dtype=torch.float32)


@torch.library.custom_op("hf_memory::corrected_values_backward", mutates_args=())
def _backward(
    k: Tensor, v: Tensor, a: Tensor, beta: Tensor, u: Tensor, L: Tensor, du: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of k, v, a and beta."""
    k, v, a, beta, du = contiguous(k, v, a, beta, du)
    g, z = _solve(k, du, a, beta, L, scale, backward=True)
    constants, T, u = _constants(k, v.shape[-1]), k.shape[1], u.to(k.dtype)
    dk, dv, da, dbeta = (torch.empty_like(x) for x in (k, v, a, beta))
    tall, p = _tall(constants, k.dtype), torch.empty_like(L)
    programs = _programs(k, T, tall["ROWS"])
    launcher(beta_gradient_kernel, programs)(
        k, v, a, beta, u, L, g, dv, da, dbeta, p, scale, T, **tall, num_stages=1
    )  # fmt: skip
    square = {**constants, "C": tall["C"]}
    programs = _programs(k, T, square["C"])
    launcher(key_gradient_kernel, programs)(k, u, z, L, p, dk, scale, T, **square, num_stages=1)
    return dk, dv, da, dbeta


@_backward.register_fake
def _(k, v, a, beta, u, L, du, scale):
    return tuple(x.new_empty(x.shape) for x in (k, v, a, beta))


def _save(ctx, inputs, output):
    k, v, a, beta, ctx.scale = inputs
    ctx.save_for_backward(k, v, a, beta, *output)


def _gradients(ctx, du, _):
    return *_backward(*ctx.saved_tensors, du, ctx.scale), None


_forward.register_autograd(_gradients, setup_context=_save)


def corrected_values(k: Tensor, v: Tensor, a: Tensor, beta: Tensor, scale: float) -> Tensor:
    """u [B, T, H, V] in float32 with w = k, for k [B, T, H, K], v [B, T, H, V], a and beta [B, T, H]."""
    return _forward(k, v, a, beta, scale)[0]
