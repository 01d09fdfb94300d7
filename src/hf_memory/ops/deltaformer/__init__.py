"""DeltaFormer: attention over values from which earlier values of similar keys are subtracted.

https://arxiv.org/abs/2505.19488."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.ops.deltaformer import chunk, reference
from hf_memory.ops.deltaformer.weights import KERNELS, DeltaFormerState, rule
from hf_memory.ops.dispatch import Backend, choose_backend
from hf_memory.ops.inputs import check_gate, check_inputs, check_tensor
from hf_memory.ops.layout import blank, per_sequence, repeat_heads

BETA_MODES = ("none", "erase", "delta")
FORMS = {"reference": reference, "chunk": chunk}


def deltaformer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    *,
    write_kernel: str = "softmax",
    read_kernel: str = "softmax",
    beta_mode: str = "erase",
    mask: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    write_scale: float | None = None,
    initial_state: DeltaFormerState | tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, DeltaFormerState | None]:
    """Subtract from each value what the past returns for its key, and read the results with attention.

        u_t = a_t v_t - beta_t sum_{i<t} write(k_i, k_t) u_i;   o_t = sum_{i<=t} read(k_i, q_t) u_i

    With softmax the weights of a row sum to one; `"linear"` is the scaled product itself, `"relu"` its positive part,
    `"round"` its nearest integer, through which gradients pass unchanged.

    Args:
        q: queries [B, T, HQ, K]; HQ is that of the keys, or a multiple of HV: query head j reads value head
            j // (HQ // HV).
        k: keys [B, T, H, K].
        v: values [B, T, HV, V], HV a multiple of H.
        beta: [B, T, HV], or None in mode "none".
        write_kernel: one of KERNELS.
        read_kernel: one of KERNELS.
        beta_mode: "erase" (a = 1), "delta" (a = beta), "none" (a = beta = 1).
        mask: [B, T], or [B, S + T] with the past: zero at padding and at unused entries of a buffer, whose keys and
            values are not read and whose output is zero; or None.
        window: number of tokens that a token sees in both sums, itself included; None means all.
        scale: factor of the products of queries and keys in the read; default: K ** -0.5 for softmax, else 1.
        write_scale: factor of the products of keys in the write; the same defaults.
        initial_state: keys [B, S, H, K] and corrected values [B, S, HV, V] of the past.
        output_final_state: return keys and corrected values of all tokens; float32, or float64 for float64 inputs.
        cu_seqlens: boundaries [N + 1] of sequences packed into one row; without states.
        backend: "reference", "chunk", "triton" (for the softmax write of sequences without state, mask and window) or
            "auto": the kernels on CUDA where they can, else chunk.

    Returns:
        o [B, T, max(HQ, HV), V] in the dtype of q, and the final state or None.
    """
    check_inputs(q, k, v, cu_seqlens, grouped=True)
    state = _state(initial_state, k, v)
    if cu_seqlens is not None and (initial_state is not None or output_final_state):
        raise ValueError(
            "initial_state and output_final_state must be left out when cu_seqlens packs sequences"
        )
    _check_word("write_kernel", write_kernel, KERNELS)
    _check_word("read_kernel", read_kernel, KERNELS)
    shared: Any = {"mask": mask, "window": window, "cu_seqlens": cu_seqlens, "backend": backend}
    write: Any = {
        "kernel": write_kernel,
        "beta_mode": beta_mode,
        "scale": write_scale,
        "initial_state": initial_state,
    }
    u = corrected_values(k, v, beta, **write, **shared)
    state = DeltaFormerState(
        torch.cat([state.k, k.to(state.k.dtype)], 1), torch.cat([state.u, u], 1)
    )
    o = read(q, state.k, state.u, kernel=read_kernel, scale=scale, **shared)
    return o, state if output_final_state else None


def corrected_values(
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    *,
    kernel: str = "softmax",
    beta_mode: str = "erase",
    mask: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    initial_state: DeltaFormerState | tuple[Tensor, Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """The write alone: u [B, T, HV, V], in float32 or float64; the arguments are those of `deltaformer`."""
    dims = check_inputs(k, k, v, cu_seqlens)
    _check_word("kernel", kernel, KERNELS)
    _check_word("beta_mode", beta_mode, BETA_MODES)
    if beta is not None:
        check_gate("beta", beta, dims, like=k)
    elif beta_mode != "none":
        raise ValueError(f"beta must be given when beta_mode is {beta_mode!r}, got None")
    past = _state(initial_state, k, v, dims.N)
    form = choose_backend(backend, k, _kernel_refuses(k, v, past, mask, kernel, window))
    wide = past.u.dtype
    if not v.numel():
        return v.to(wide)
    S = past.k.shape[1]
    mask = _full_mask(mask, S, k)
    one = v.new_ones(v.shape[:3], dtype=wide)
    beta = one if beta is None or beta_mode == "none" else beta.to(wide)
    k, v, beta = (x if mask is None else blank(x, mask[:, S:]) for x in (k, v, beta))

    def write(k, v, a, beta, mask, *, initial_state):
        now = rule(kernel, scale, k, S, mask, window, strict=True)
        k = repeat_heads(k, v.shape[2])
        past = initial_state._replace(k=repeat_heads(initial_state.k, v.shape[2]))
        if form == "triton":
            from hf_memory.ops.deltaformer.kernels import corrected_values as in_kernels

            return in_kernels(k, v, a, beta, now.scale), initial_state
        return FORMS[form].corrected_values(k.to(wide), v, a, beta, past, now)[0], initial_state

    a = beta if beta_mode == "delta" else one
    return per_sequence(write, cu_seqlens, k, v, a, beta, mask, initial_state=past)[0]


def read(
    q: Tensor,
    k: Tensor,
    u: Tensor,
    *,
    kernel: str = "softmax",
    mask: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """The read alone: o [B, T, max(HQ, HV), V] in the dtype of q, from keys [B, S + T, H, K] and u [B, S + T, HV, V].

    The arguments are those of `deltaformer`. There are no kernels: "triton" stands for "chunk".
    """
    heads = max(q.shape[2], u.shape[2])
    S = k.shape[1] - q.shape[1]
    _check_read(q, k, u, heads)
    _check_word("kernel", kernel, KERNELS)
    if not q.numel():
        return q.new_zeros(*q.shape[:2], heads, u.shape[-1])
    mask = _full_mask(mask, S, q)
    if mask is not None:
        q = blank(q, mask[:, S:])
        k = blank(k, mask)
        u = blank(u, mask)
    form = reference if backend == "reference" else chunk

    def attend(q, k, u, mask, *, initial_state):
        now = rule(kernel, scale, k[:, S:], S, mask, window, strict=False)
        k = repeat_heads(repeat_heads(k, u.shape[2]), heads)
        u = repeat_heads(u, heads)
        return form.read(repeat_heads(q, heads), k, u, now)[0], initial_state

    return per_sequence(attend, cu_seqlens, q, k, u, mask, initial_state=())[0]


def _check_read(q: Tensor, k: Tensor, u: Tensor, heads: int) -> None:
    B, S, H, K = k.shape
    T = q.shape[1]
    if q.shape[0] != B or q.shape[3] != K or T > S or heads % q.shape[2] or heads % u.shape[2]:
        raise ValueError(
            f"q must have shape ({B}, T, HQ, {K}) with T at most {S}, and HQ {H} or a multiple of {u.shape[2]}, "
            f"got {tuple(q.shape)}"
        )
    check_tensor("u", u, (B, S, *u.shape[2:]), like=k)


def _kernel_refuses(
    k: Tensor,
    v: Tensor,
    past: DeltaFormerState,
    mask: Tensor | None,
    kernel: str,
    window: int | None,
) -> str | None:
    """The reason why no kernel supports a write; None if one does."""
    if kernel != "softmax" or window is not None or mask is not None or past.k.shape[1]:
        return "it writes with softmax, without a state, a mask or a window"
    if max(k.shape[-1], v.shape[-1]) > 128 or k.dtype == torch.float64:
        return f"K and V must be at most 128 and k not float64, got {k.shape[-1]}, {v.shape[-1]} and {k.dtype}"
    return None


def _check_word(name: str, word: str, known: tuple[str, ...]) -> None:
    if word not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {word!r}")


def _full_mask(mask: Tensor | None, S: int, q: Tensor) -> Tensor | None:
    """The mask [B, S + T]; a given mask [B, T] means that all tokens of the past are real."""
    if mask is None:
        return None
    B, T = q.shape[:2]
    if tuple(mask.shape) == (B, T):
        mask = F.pad(mask, (S, 0), value=1)
    check_tensor("mask", mask, (B, S + T), like=q)
    return mask.bool()


def _state(state, k: Tensor, v: Tensor, N: int | None = None) -> DeltaFormerState:
    wide = torch.promote_types(k.dtype, torch.float32)
    B, _, H, K = k.shape
    _, _, HV, V = v.shape
    N = B if N is None else N
    if state is None:
        state = k.new_zeros(N, 0, H, K), k.new_zeros(N, 0, HV, V)
    if len(state) != 2:
        raise ValueError(f"initial_state must be (k, u), got {len(state)} entries")
    S = state[0].shape[1] if state[0].ndim == 4 else 0
    check_tensor("initial_state[0]", state[0], (N, S, H, K), like=k)
    check_tensor("initial_state[1]", state[1], (N, S, HV, V), like=k)
    return DeltaFormerState(state[0].to(wide), state[1].to(wide))
