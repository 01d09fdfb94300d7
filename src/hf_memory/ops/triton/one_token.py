"""Linear attention and the delta rule for one token, in one kernel that updates the state where it is."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_memory.ops.triton.launch import contiguous, decay_kind, launcher
from hf_memory.ops.triton.tiles import program, state_tile


@triton.jit
def one_token_kernel(
    q,  # [B, H, K]
    k,  # [B, H, K]
    v,  # [B, HV, V]
    beta,  # [B, HV], or None for linear attention
    g,  # [B, HV] or [B, HV, K] or None
    a,  # [B, HV, K], or None for the delta rule without a and b
    b,  # [B, HV, K] or None
    S,  # [B, HV, K, V]
    o,  # [B, HV, V]
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DECAY: tl.constexpr,
):
    """One token of each row; a program has all keys and BV values of a head."""
    n, hv, tile = program(HV, (V + BV - 1) // BV)
    i_k, i_v = tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    in_k, in_v, row = i_k < K, i_v < V, n * HV + hv
    key_row = n * H + hv // (HV // H)
    at, inside = state_tile(n, hv, HV, i_k, in_k, i_v, in_v, K, V)
    q_t = tl.cast(tl.load(q + key_row * K + i_k, mask=in_k, other=0.0), tl.float32)
    k_t = tl.cast(tl.load(k + key_row * K + i_k, mask=in_k, other=0.0), tl.float32)
    v_t = tl.cast(tl.load(v + row * V + i_v, mask=in_v, other=0.0), tl.float32)
    S_t = tl.load(S + at, mask=inside, other=0.0)
    if beta is not None:
        strength = tl.cast(tl.load(beta + row), tl.float32)
    if a is not None:
        a_t = tl.cast(tl.load(a + row * K + i_k, mask=in_k, other=0.0), tl.float32)
        b_t = tl.cast(tl.load(b + row * K + i_k, mask=in_k, other=0.0), tl.float32)
        read = tl.sum(S_t * a_t[:, None], axis=0)
    if DECAY == 1:
        S_t *= tl.exp(tl.cast(tl.load(g + row), tl.float32))
    elif DECAY == 2:
        S_t *= tl.exp(tl.cast(tl.load(g + row * K + i_k, mask=in_k, other=0.0), tl.float32))[:, None]
    if a is not None:
        S_t += b_t[:, None] * read[None, :]
        v_t *= strength
    elif beta is not None:
        v_t = strength * (v_t - tl.sum(S_t * k_t[:, None], axis=0))
    S_t += k_t[:, None] * v_t[None, :]
    tl.store(S + at, S_t, mask=inside)
    o_t = scale * tl.sum(S_t * q_t[:, None], axis=0)
    tl.store(o + row * V + i_v, tl.cast(o_t, o.dtype.element_ty), mask=in_v)


def one_token_constants(H: int, HV: int, K: int, V: int, decay: int) -> dict:
    """Compile-time arguments and launch options: a tile of the state has 4096 numbers, 32 a thread."""
    width_k, width_v = max(16, triton.next_power_of_2(K)), max(16, triton.next_power_of_2(V))
    tile = min(width_v, max(16, 4096 // width_k))
    return {
        "H": H, "HV": HV, "K": K, "V": V, "BK": width_k, "BV": tile, "DECAY": decay, "num_warps": 4, "num_stages": 1,
    }  # fmt: skip


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
    (B, _, H, K), (HV, V) = k.shape, v.shape[2:]
    o, constants = torch.empty_like(v), one_token_constants(H, HV, K, V, decay_kind(g))
    grid = (B * HV * triton.cdiv(V, constants["BV"]),)
    launcher(one_token_kernel, grid)(*contiguous(q, k, v, beta, g, a, b), state, o, scale, **constants)
    return o


@one_token.register_fake
def _(q, k, v, state, scale, beta=None, g=None, a=None, b=None):
    return torch.empty_like(v)
