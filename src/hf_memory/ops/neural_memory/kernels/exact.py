"""The loop of `exact` over the chunks in Triton: a program holds a tile of value channels of weights and momentum.

All that does not need the state is computed in `exact`, for all chunks at once. With M = (W, S) stacked:

    U = values - keys M,   O = reads U + asks M,   M <- through M + leaves^T U (+ back)

Backward, a kernel loops backwards with dM, the gradient of M after a chunk; products over all chunks give the rest:

    dU = reads^T dO + leaves dM,   dM <- through^T dM + asks^T dO - keys^T dU
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_memory.ops.autograd import first_derivatives_only
from hf_memory.ops.neural_memory.exact import Products
from hf_memory.ops.neural_memory.kernels.parts import Sizes, load_part, load_tile, store_tile
from hf_memory.ops.triton.launch import contiguous, launcher, precision, width

TILE = 1024  # size of the part of the weights that a program holds


class Meta(NamedTuple):
    """What is known when the kernels are compiled."""

    K: int
    V: int
    PARTS: int  # of the state: weights and momentum
    BC: int  # tile sizes
    BK: int
    BV: int
    PRECISION: str


@triton.jit
def _forward_kernel(
    products,  # Products
    states,  # [NC + 1, N, PARTS, K, V]: the first is given
    u,  # [NC, N, C, V]
    o,  # [NC, N, C, V]
    sizes,  # Sizes
    meta: tl.constexpr,
):
    """Program (i, n) holds the i-th tile of head n."""
    K: tl.constexpr = meta.K
    V: tl.constexpr = meta.V
    PARTS: tl.constexpr = meta.PARTS
    PRECISION: tl.constexpr = meta.PRECISION
    reads, asks, values, keys, leaves, through, back = products
    N = sizes.N
    C = sizes.C
    n = tl.program_id(1)
    rows = tl.arange(0, meta.BC)
    i_k = tl.arange(0, meta.BK)
    i_v = tl.program_id(0) * meta.BV + tl.arange(0, meta.BV)
    WIDTH = PARTS * K
    STATE = PARTS * K * V
    W = load_tile(states + tl.cast(n, tl.int64) * STATE, i_k, K, i_v, V)
    if PARTS == 2:
        S = load_tile(states + tl.cast(n, tl.int64) * STATE + K * V, i_k, K, i_v, V)
    for chunk in tl.range(sizes.NC, disable_licm=True):
        at = tl.cast(chunk, tl.int64) * N + n
        row = at * C * WIDTH
        u_c = load_tile(values + at * C * V, rows, C, i_v, V)
        u_c -= tl.dot(load_part(keys + row, rows, C, i_k, K, WIDTH), W, input_precision=PRECISION)
        o_c = tl.dot(load_part(asks + row, rows, C, i_k, K, WIDTH), W, input_precision=PRECISION)
        if PARTS == 2:
            u_c -= tl.dot(
                load_part(keys + row + K, rows, C, i_k, K, WIDTH), S, input_precision=PRECISION
            )
            o_c += tl.dot(
                load_part(asks + row + K, rows, C, i_k, K, WIDTH), S, input_precision=PRECISION
            )
        o_c += tl.dot(
            load_tile(reads + at * C * C, rows, C, rows, C), u_c, input_precision=PRECISION
        )
        store_tile(u + at * C * V, u_c, rows, C, i_v, V)
        store_tile(o + at * C * V, o_c, rows, C, i_v, V)
        if through is not None:
            W *= tl.load(through + at * PARTS * PARTS)
            if PARTS == 2:
                W += tl.load(through + at * 4 + 1) * S
                S *= tl.load(through + at * 4 + 3)
        if back is not None:
            W += load_tile(back + at * K * V, i_k, K, i_v, V)
        W += tl.dot(
            tl.trans(load_part(leaves + row, rows, C, i_k, K, WIDTH)),
            u_c,
            input_precision=PRECISION,
        )
        store_tile(states + (at + N) * STATE, W, i_k, K, i_v, V)
        if PARTS == 2:
            S += tl.dot(
                tl.trans(load_part(leaves + row + K, rows, C, i_k, K, WIDTH)),
                u_c,
                input_precision=PRECISION,
            )
            store_tile(states + (at + N) * STATE + K * V, S, i_k, K, i_v, V)


@triton.jit
def _backward_kernel(
    products,  # Products, without values and back
    do,  # [NC, N, C, V]
    d_states,  # [NC + 1, N, PARTS, K, V]: the last is given
    du,  # [NC, N, C, V]
    sizes,  # Sizes
    meta: tl.constexpr,
):
    """Program (i, n) holds the gradient of the i-th tile of head n."""
    K: tl.constexpr = meta.K
    V: tl.constexpr = meta.V
    PARTS: tl.constexpr = meta.PARTS
    PRECISION: tl.constexpr = meta.PRECISION
    reads, asks, _, keys, leaves, through, _ = products
    N = sizes.N
    C = sizes.C
    n = tl.program_id(1)
    rows = tl.arange(0, meta.BC)
    i_k = tl.arange(0, meta.BK)
    i_v = tl.program_id(0) * meta.BV + tl.arange(0, meta.BV)
    WIDTH = PARTS * K
    STATE = PARTS * K * V
    end = d_states + (tl.cast(sizes.NC, tl.int64) * N + n) * STATE
    dW = load_tile(end, i_k, K, i_v, V)
    if PARTS == 2:
        dS = load_tile(end + K * V, i_k, K, i_v, V)
    for reverse in tl.range(sizes.NC, disable_licm=True):
        at = (sizes.NC - 1 - tl.cast(reverse, tl.int64)) * N + n
        row = at * C * WIDTH
        do_c = load_tile(do + at * C * V, rows, C, i_v, V)
        du_c = tl.dot(
            tl.trans(load_tile(reads + at * C * C, rows, C, rows, C)),
            do_c,
            input_precision=PRECISION,
        )
        du_c += tl.dot(
            load_part(leaves + row, rows, C, i_k, K, WIDTH), dW, input_precision=PRECISION
        )
        if PARTS == 2:
            du_c += tl.dot(
                load_part(leaves + row + K, rows, C, i_k, K, WIDTH), dS, input_precision=PRECISION
            )
        store_tile(du + at * C * V, du_c, rows, C, i_v, V)
        if through is not None:
            if PARTS == 2:
                dS = tl.load(through + at * 4 + 1) * dW + tl.load(through + at * 4 + 3) * dS
            dW *= tl.load(through + at * PARTS * PARTS)
        dW += tl.dot(
            tl.trans(load_part(asks + row, rows, C, i_k, K, WIDTH)), do_c, input_precision=PRECISION
        )
        dW -= tl.dot(
            tl.trans(load_part(keys + row, rows, C, i_k, K, WIDTH)), du_c, input_precision=PRECISION
        )
        store_tile(d_states + at * STATE, dW, i_k, K, i_v, V)
        if PARTS == 2:
            dS += tl.dot(
                tl.trans(load_part(asks + row + K, rows, C, i_k, K, WIDTH)),
                do_c,
                input_precision=PRECISION,
            )
            dS -= tl.dot(
                tl.trans(load_part(keys + row + K, rows, C, i_k, K, WIDTH)),
                du_c,
                input_precision=PRECISION,
            )
            store_tile(d_states + at * STATE + K * V, dS, i_k, K, i_v, V)


def _meta(C: int, K: int, V: int, parts: int, dtype: torch.dtype) -> Meta:
    """What both kernels are compiled for."""
    BK = width(K)
    least = 16 if BK <= 64 else 32
    BV = min(width(V), max(least, TILE // BK))
    return Meta(K, V, parts, width(C), BK, BV, precision(dtype))


def _launch(kernel, meta: Meta, *given) -> None:
    """Run a kernel, whose sizes are the last of what is given.

    Four warps get 16 columns at least: with 8, Hopper read beyond the shared memory of a program (kernel_report).
    """
    options = {"num_warps": 8 if meta.BK > 64 and meta.BV > 16 else 4, "num_stages": 1}
    launcher(kernel, (triton.cdiv(meta.V, meta.BV), given[-1].N))(*given, meta=meta, **options)


class _Pass(torch.autograd.Function):
    """The loop over all chunks; the arguments are those of `exact._pass`."""

    @staticmethod
    def forward(ctx, dtype, M, *products):
        given = Products(*contiguous(*products))
        NC, N, C, V = given.values.shape
        through = given.through
        parts = 1 if through is None else through.shape[-1]
        states = M.new_empty(NC + 1, *M.shape)
        u = torch.empty_like(given.values)
        o = torch.empty_like(given.values)
        states[0] = M
        ctx.meta = _meta(C, M.shape[1] // parts, V, parts, dtype)
        _launch(_forward_kernel, ctx.meta, given, states, u, o, Sizes(NC, N, C))
        ctx.save_for_backward(states, u, *given._replace(values=None, back=None))
        ctx.returns = given.back is not None
        return o, states[-1].clone()

    @staticmethod
    @first_derivatives_only
    def backward(ctx, do, dM):
        states, u, *products = ctx.saved_tensors
        sizes = Sizes(*do.shape[:3])
        do = do.contiguous()
        through = products[5]
        d_states = torch.empty_like(states)
        du = torch.empty_like(u)
        d_states[-1] = dM
        _launch(_backward_kernel, ctx.meta, Products(*products), do, d_states, du, sizes)
        before = states[:-1]
        after = d_states[1:]
        d_through = None
        parts = ctx.meta.PARTS
        if through is not None:
            d_through = (
                after.reshape(*sizes[:2], parts, -1) @ before.reshape(*sizes[:2], parts, -1).mT
            )
        d_back = after[:, :, : ctx.meta.K] if ctx.returns else None
        d_rows = (do @ u.mT, do @ before.mT, du, -du @ before.mT, u @ after.mT)
        return None, d_states[0].clone(), *d_rows, d_through, d_back


def walk(products: Products, M: Tensor, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Same function as `exact._pass`; products are as exact as `dtype`."""
    return _Pass.apply(dtype, M, *products)
