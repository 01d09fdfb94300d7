"""Linear attention and the delta rule for one token, in one kernel that updates the state where it is.

Beside the kernels for chunks, which take one token as well: not timed.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_memory.ops.triton.arguments import Meta, Rows
from hf_memory.ops.triton.launch import Constants, contiguous, decay_kind, launcher, width
from hf_memory.ops.triton.tiles import channels, program, state_tile


@triton.jit
def one_token_kernel(
    rows,  # Rows of one token; beta is None for linear attention, a and b for the delta rule without
    S,  # [B, HV, K, V]
    o,  # [B, HV, V]
    scale,
    meta: tl.constexpr,
):
    """One token of each row; a program has all keys and BV values of a head."""
    n, head, key_head, tile = program(meta.V, meta.BV, meta)
    keys = channels(0, meta.BK, meta.K)
    values = channels(tile, meta.BV, meta.V)
    i_k, in_k, K = keys
    i_v, in_v, V = values
    row = n * meta.HV + head[0]
    key_row = n * meta.H + key_head[0]
    at, inside = state_tile(n, head, keys, values)
    q_t = tl.cast(tl.load(rows.q + key_row * K + i_k, mask=in_k, other=0.0), tl.float32)
    k_t = tl.cast(tl.load(rows.k + key_row * K + i_k, mask=in_k, other=0.0), tl.float32)
    v_t = tl.cast(tl.load(rows.v + row * V + i_v, mask=in_v, other=0.0), tl.float32)
    S_t = tl.load(S + at, mask=inside, other=0.0)
    if rows.beta is not None:
        strength = tl.cast(tl.load(rows.beta + row), tl.float32)
    if rows.a is not None:
        a_t = tl.cast(tl.load(rows.a + row * K + i_k, mask=in_k, other=0.0), tl.float32)
        b_t = tl.cast(tl.load(rows.b + row * K + i_k, mask=in_k, other=0.0), tl.float32)
        read = tl.sum(S_t * a_t[:, None], axis=0)
    if meta.DECAY == 1:
        S_t *= tl.exp(tl.cast(tl.load(rows.g + row), tl.float32))
    elif meta.DECAY == 2:
        S_t *= tl.exp(tl.cast(tl.load(rows.g + row * K + i_k, mask=in_k, other=0.0), tl.float32))[
            :, None
        ]
    if rows.a is not None:
        S_t += b_t[:, None] * read[None, :]
        v_t *= strength
    elif rows.beta is not None:
        v_t = strength * (v_t - tl.sum(S_t * k_t[:, None], axis=0))
    S_t += k_t[:, None] * v_t[None, :]
    tl.store(S + at, S_t, mask=inside)
    o_t = scale * tl.sum(S_t * q_t[:, None], axis=0)
    tl.store(o + row * V + i_v, tl.cast(o_t, o.dtype.element_ty), mask=in_v)


@cache  # decoding asks for each token
def one_token_constants(H: int, HV: int, K: int, V: int, decay: int) -> Constants:
    """How the kernel is compiled and launched: a tile of the state has 4096 numbers, 32 a thread."""
    width_k = width(K)
    meta = Meta(H, HV, K, V, BK=width_k, BV=min(width(V), max(16, 4096 // width_k)), DECAY=decay)
    return Constants(meta, {"num_warps": 4, "num_stages": 1})


@torch.library.custom_op("hf_memory::one_token", mutates_args=("state",))
def one_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    scale: float,
    beta: Tensor | None = None,
    g: Tensor | None = None,
    a: Tensor | None = None,
    b: Tensor | None = None,
) -> Tensor:
    """o [B, 1, HV, V] of one token of each row, without gradients; `state` [B, HV, K, V] becomes that after it."""
    B, _, H, K = k.shape
    HV, V = v.shape[2:]
    o = torch.empty_like(v)
    meta, options = one_token_constants(H, HV, K, V, decay_kind(g))
    rows = Rows(*contiguous(q, k, v, beta, g, a, b))
    grid = (B * HV * triton.cdiv(V, meta.BV),)
    launcher(one_token_kernel, grid)(rows, state, o, scale, meta=meta, **options)
    return o


@one_token.register_fake
def _(q, k, v, state, scale, beta=None, g=None, a=None, b=None):
    return torch.empty_like(v)
