"""The loop of `exact` over the chunks in Triton: a program holds a tile of value channels of weights and momentum.

All that does not need the state is computed in `exact`, for all chunks at once. With M = (W, S) stacked:

    U = values - keys M,   O = reads U + asks M,   M <- through M + leaves^T U (+ back)

Backward, a kernel loops backwards with dM, the gradient of M after a chunk; products over all chunks give the rest:

    dU = reads^T dO + leaves dM,   dM <- through^T dM + asks^T dO - keys^T dU
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_memory.ops.contract import first_derivatives_only
from hf_memory.ops.neural_memory.kernels.parts import load_part, load_tile, store_tile
from hf_memory.ops.triton.launch import launcher, precision

TILE = 1024  # size of the part of the weights that a program holds


@triton.jit
def _forward_kernel(
    reads,  # [NC, N, C, C]
    asks,  # [NC, N, C, PARTS, K]
    values,  # [NC, N, C, V]
    keys,  # [NC, N, C, PARTS, K]
    leaves,  # [NC, N, C, PARTS, K]
    through,  # [NC, N, PARTS, PARTS] or None
    back,  # [NC, N, K, V] or None
    states,  # [NC + 1, N, PARTS, K, V]: the first is given
    u,  # [NC, N, C, V]
    o,  # [NC, N, C, V]
    chunks,
    N,
    C,
    K: tl.constexpr,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (i, n) holds the i-th tile of head n."""
    n, rows, i_k, i_v = tl.program_id(1), tl.arange(0, BC), tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
    WIDTH, STATE = PARTS * K, PARTS * K * V
    W = load_tile(states + tl.cast(n, tl.int64) * STATE, i_k, K, i_v, V)
    if PARTS == 2:
        S = load_tile(states + tl.cast(n, tl.int64) * STATE + K * V, i_k, K, i_v, V)
    for chunk in tl.range(chunks, disable_licm=True):
        at = tl.cast(chunk, tl.int64) * N + n
        row = at * C * WIDTH
        u_c = load_tile(values + at * C * V, rows, C, i_v, V)
        u_c -= tl.dot(load_part(keys + row, rows, C, i_k, K, WIDTH), W, input_precision=PRECISION)
        o_c = tl.dot(load_part(asks + row, rows, C, i_k, K, WIDTH), W, input_precision=PRECISION)
        if PARTS == 2:
            u_c -= tl.dot(load_part(keys + row + K, rows, C, i_k, K, WIDTH), S, input_precision=PRECISION)
            o_c += tl.dot(load_part(asks + row + K, rows, C, i_k, K, WIDTH), S, input_precision=PRECISION)
        o_c += tl.dot(load_tile(reads + at * C * C, rows, C, rows, C), u_c, input_precision=PRECISION)
        store_tile(u + at * C * V, u_c, rows, C, i_v, V)
        store_tile(o + at * C * V, o_c, rows, C, i_v, V)
        if through is not None:
            W *= tl.load(through + at * PARTS * PARTS)
            if PARTS == 2:
                W += tl.load(through + at * 4 + 1) * S
                S *= tl.load(through + at * 4 + 3)
        if back is not None:
            W += load_tile(back + at * K * V, i_k, K, i_v, V)
        W += tl.dot(tl.trans(load_part(leaves + row, rows, C, i_k, K, WIDTH)), u_c, input_precision=PRECISION)
        store_tile(states + (at + N) * STATE, W, i_k, K, i_v, V)
        if PARTS == 2:
            S += tl.dot(tl.trans(load_part(leaves + row + K, rows, C, i_k, K, WIDTH)), u_c, input_precision=PRECISION)
            store_tile(states + (at + N) * STATE + K * V, S, i_k, K, i_v, V)


@triton.jit
def _backward_kernel(
    reads,  # [NC, N, C, C]
    asks,  # [NC, N, C, PARTS, K]
    keys,  # [NC, N, C, PARTS, K]
    leaves,  # [NC, N, C, PARTS, K]
    through,  # [NC, N, PARTS, PARTS] or None
    do,  # [NC, N, C, V]
    d_states,  # [NC + 1, N, PARTS, K, V]: the last is given
    du,  # [NC, N, C, V]
    chunks,
    N,
    C,
    K: tl.constexpr,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (i, n) holds the gradient of the i-th tile of head n."""
    n, rows, i_k, i_v = tl.program_id(1), tl.arange(0, BC), tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
    WIDTH, STATE = PARTS * K, PARTS * K * V
    end = d_states + (tl.cast(chunks, tl.int64) * N + n) * STATE
    dW = load_tile(end, i_k, K, i_v, V)
    if PARTS == 2:
        dS = load_tile(end + K * V, i_k, K, i_v, V)
    for reverse in tl.range(chunks, disable_licm=True):
        at = (chunks - 1 - tl.cast(reverse, tl.int64)) * N + n
        row = at * C * WIDTH
        do_c = load_tile(do + at * C * V, rows, C, i_v, V)
        du_c = tl.dot(tl.trans(load_tile(reads + at * C * C, rows, C, rows, C)), do_c, input_precision=PRECISION)
        du_c += tl.dot(load_part(leaves + row, rows, C, i_k, K, WIDTH), dW, input_precision=PRECISION)
        if PARTS == 2:
            du_c += tl.dot(load_part(leaves + row + K, rows, C, i_k, K, WIDTH), dS, input_precision=PRECISION)
        store_tile(du + at * C * V, du_c, rows, C, i_v, V)
        if through is not None:
            if PARTS == 2:
                dS = tl.load(through + at * 4 + 1) * dW + tl.load(through + at * 4 + 3) * dS
            dW *= tl.load(through + at * PARTS * PARTS)
        dW += tl.dot(tl.trans(load_part(asks + row, rows, C, i_k, K, WIDTH)), do_c, input_precision=PRECISION)
        dW -= tl.dot(tl.trans(load_part(keys + row, rows, C, i_k, K, WIDTH)), du_c, input_precision=PRECISION)
        store_tile(d_states + at * STATE, dW, i_k, K, i_v, V)
        if PARTS == 2:
            dS += tl.dot(tl.trans(load_part(asks + row + K, rows, C, i_k, K, WIDTH)), do_c, input_precision=PRECISION)
            dS -= tl.dot(tl.trans(load_part(keys + row + K, rows, C, i_k, K, WIDTH)), du_c, input_precision=PRECISION)
            store_tile(d_states + at * STATE + K * V, dS, i_k, K, i_v, V)


def _constants(C: int, K: int, V: int, parts: int, dtype: torch.dtype) -> dict:
    """Compile-time arguments and launch options of both kernels."""
    width_c, width_k, width_v = (max(16, triton.next_power_of_2(D)) for D in (C, K, V))
    return {
        "K": K, "V": V, "PARTS": parts, "BC": width_c, "BK": width_k, "BV": min(width_v, max(16, TILE // width_k)),
        "PRECISION": precision(dtype),
        "num_warps": 4 if width_k <= 64 else 8, "num_stages": 1,
    }  # fmt: skip


class _Pass(torch.autograd.Function):
    """The loop over all chunks; the arguments are those of `exact._pass`."""

    @staticmethod
    def forward(ctx, dtype, reads, asks, values, keys, leaves, through, back, M):
        given = [x if x is None else x.contiguous() for x in (reads, asks, values, keys, leaves, through, back)]
        (NC, N, C, V), width = values.shape, M.shape[1]
        parts = 1 if through is None else through.shape[-1]
        states, u, o = M.new_empty(NC + 1, *M.shape), torch.empty_like(given[2]), torch.empty_like(given[2])
        states[0] = M
        constants = _constants(C, width // parts, V, parts, dtype)
        launcher(_forward_kernel, (triton.cdiv(V, constants["BV"]), N))(*given, states, u, o, NC, N, C, **constants)
        reads, asks, _, keys, leaves, through, _ = given
        ctx.save_for_backward(reads, asks, keys, leaves, through, states, u)
        ctx.constants, ctx.returns = constants, back is not None
        return o, states[-1].clone()

    @staticmethod
    @first_derivatives_only
    def backward(ctx, do, dM):
        reads, asks, keys, leaves, through, states, u = ctx.saved_tensors
        (NC, N, C, V), do = u.shape, do.contiguous()
        d_states, du = torch.empty_like(states), torch.empty_like(u)
        d_states[-1] = dM
        launcher(_backward_kernel, (triton.cdiv(V, ctx.constants["BV"]), N))(
            reads, asks, keys, leaves, through, do, d_states, du, NC, N, C, **ctx.constants
        )
        before, after = states[:-1], d_states[1:]
        d_through, parts = None, ctx.constants["PARTS"]
        if through is not None:
            d_through = after.reshape(NC, N, parts, -1) @ before.reshape(NC, N, parts, -1).mT
        d_back = after[:, :, : ctx.constants["K"]] if ctx.returns else None
        d_rows = (do @ u.mT, do @ before.mT, du, -du @ before.mT, u @ after.mT)
        return None, *d_rows, d_through, d_back, d_states[0].clone()


def walk(reads, asks, values, keys, leaves, through, back, M: Tensor, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Same function as `exact._pass`; products are as exact as `dtype`."""
    return _Pass.apply(dtype, reads, asks, values, keys, leaves, through, back, M)
