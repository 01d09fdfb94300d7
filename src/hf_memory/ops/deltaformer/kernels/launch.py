"""DeltaFormer's softmax write in Triton, for sequences without a past.

The letters are those of chunk.py. The logarithm L of each row's sum comes first, so that P = exp(X - L) is known for
any pair of tokens. Then (I + diag(beta) P) U = diag(a) V is solved panel by panel (substitution.py), and so is the
transposed system for G, from the last panel to the first. All other gradients are sums over blocks (gradients.py).
U and L are saved. Products read U and beta G in the dtype of the keys.
"""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from hf_memory.ops.deltaformer.kernels.blocks import Place, System
from hf_memory.ops.deltaformer.kernels.gradients import (
    Gradients,
    beta_gradient_kernel,
    key_gradient_kernel,
)
from hf_memory.ops.deltaformer.kernels.substitution import (
    gather_kernel,
    inverse_kernel,
    normalizer_kernel,
    substitute_kernel,
)
from hf_memory.ops.triton.arguments import Meta
from hf_memory.ops.triton.launch import contiguous, launcher, precision, width

PANEL = 512  # tokens that one program a head solves in series between two parallel sums


def _meta(k: Tensor, V: int = 0) -> Meta:
    """What all kernels are compiled for, those that read values with V channels."""
    H, K = k.shape[2:]
    C = 32 if k.dtype.itemsize == 2 else 16
    return Meta(
        H, K=K, V=V, C=C, BK=width(K), BV=width(V) if V else 0, PRECISION=precision(k.dtype)
    )


def _tall(meta: Meta, dtype: torch.dtype) -> Meta:
    """The same for kernels that only sum: larger blocks, of more rows than columns, so that less is read twice."""
    return meta._replace(C=64, ROWS=128) if dtype.itemsize == 2 else meta._replace(C=16, ROWS=32)


def _programs(k: Tensor, tokens: int, rows: int) -> tuple[int]:
    return (k.shape[0] * k.shape[2] * triton.cdiv(tokens, rows),)


def _normalizers(k: Tensor, scale: float) -> Tensor:
    """L [B, T, H]."""
    meta = _tall(_meta(k), k.dtype)
    T = k.shape[1]
    L = k.new_empty(k.shape[:3], dtype=torch.float32)
    launcher(normalizer_kernel, _programs(k, T, meta.ROWS))(
        k, L, scale, T, meta=meta, num_warps=8, num_stages=3
    )  # fmt: skip
    return L


def _solve(system: System, scale: float, *, backward: bool) -> tuple[Tensor, Tensor]:
    """U, or G of the transposed system. Also what products read of them, in the dtype of k."""
    k = system.k
    v = system.v
    meta = _meta(k, v.shape[-1])._replace(BACKWARDS=backward)
    T = k.shape[1]
    tall = _tall(meta, k.dtype)
    W = _inverses(system, scale)
    out = torch.empty_like(v, dtype=torch.float32)
    x = torch.empty_like(v, dtype=k.dtype) if backward or k.dtype != torch.float32 else out
    panels = range(0, T, PANEL)
    for panel in reversed(panels) if backward else panels:
        end = min(panel + PANEL, T)
        place = Place(scale, panel, end, T)
        launcher(gather_kernel, _programs(k, end - panel, tall.ROWS))(
            system, x, out, place, meta=tall, num_warps=8, num_stages=2
        )
        launcher(substitute_kernel, _programs(k, 1, 1))(
            system, W, out, x, place, meta=meta, num_warps=4, num_stages=1
        )
    return out, x


def _inverses(system: System, scale: float) -> Tensor:
    """W [B, T, H, C]."""
    k = system.k
    meta = _meta(system.k)
    W = k.new_empty(*k.shape[:3], meta.C, dtype=torch.float32)
    T = k.shape[1]
    launcher(inverse_kernel, _programs(k, T, meta.C))(
        system._replace(v=None, a=None), W, scale, T, meta=meta, num_warps=4, num_stages=1
    )
    return W


@torch.library.custom_op("hf_memory::corrected_values", mutates_args=())
def _forward(k: Tensor, v: Tensor, a: Tensor, beta: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """u and the base-two logarithms L of the rows' sums."""
    k, v, a, beta = contiguous(k, v, a, beta)
    L = _normalizers(k, scale)
    return _solve(System(k, v, a, beta, L), scale, backward=False)[0], L


@_forward.register_fake
def _(k, v, a, beta, scale):
    return v.new_empty(v.shape, dtype=torch.float32), beta.new_empty(
        beta.shape, dtype=torch.float32
    )


@torch.library.custom_op("hf_memory::corrected_values_backward", mutates_args=())
def _backward(
    given: Sequence[Tensor], u: Tensor, du: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of k, v, a and beta, which are given with L."""
    system = System(*contiguous(*given))
    du = du.contiguous()
    k, v = system[:2]
    g, z = _solve(system._replace(v=du, a=None), scale, backward=True)
    meta = _meta(k, v.shape[-1])
    T = k.shape[1]
    u = u.to(k.dtype)
    grads = Gradients(*map(torch.empty_like, system))
    tall = _tall(meta, k.dtype)
    launcher(beta_gradient_kernel, _programs(k, T, tall.ROWS))(
        system, u, g, grads._replace(k=None), scale, T, meta=tall, num_warps=8, num_stages=1
    )
    square = tall._replace(ROWS=0)
    of_keys = grads._replace(v=None, a=None, beta=None)
    launcher(key_gradient_kernel, _programs(k, T, square.C))(
        system._replace(v=None, a=None, beta=None), u, z, of_keys, scale, T,
        meta=square, num_warps=4, num_stages=1,
    )  # fmt: skip
    return grads[:4]


@_backward.register_fake
def _(given, u, du, scale):
    return tuple(x.new_empty(x.shape) for x in given[:4])


def _save(ctx, inputs, output):
    k, v, a, beta, ctx.scale = inputs
    u, L = output
    ctx.save_for_backward(k, v, a, beta, L, u)


def _gradients(ctx, du, _):
    *given, u = ctx.saved_tensors
    return *_backward(given, u, du, ctx.scale), None


_forward.register_autograd(_gradients, setup_context=_save)


def corrected_values(k: Tensor, v: Tensor, a: Tensor, beta: Tensor, scale: float) -> Tensor:
    """u [B, T, H, V] in float32 with w = k, for k [B, T, H, K], v [B, T, H, V], a and beta [B, T, H]."""
    return _forward(k, v, a, beta, scale)[0]
