"""DeltaFormer: attention over values that are corrected by what was written before. https://arxiv.org/abs/2505.19488."""

from typing import NamedTuple

import torch
from torch import Tensor

from hf_memory.ops.contract import (
    Backend,
    check_gate,
    check_inputs,
    check_tensor,
    choose_backend,
    per_sequence,
    repeat_heads,
)
from hf_memory.ops.deltaformer import chunk, reference
from hf_memory.ops.deltaformer.weights import KERNELS, Past

BETA_MODES = ("none", "erase", "delta")


class DeltaFormerState(NamedTuple):
    """Keys and corrected values of the past; it grows with the past, as a KV cache does."""

    k: Tensor  # [B, S, H, K]
    u: Tensor  # [B, S, HV, V]


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
    """Write values less what the past already says of their keys, and read them with attention.

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
        mask: [B, S + T], false at padding, which neither kernel sees; None means no padding.
        window: how many tokens, itself among them, a token sees in both sums; None means all.
        scale: of the read's products; default K ** -0.5 for softmax, else 1.
        write_scale: of the write's products; the same defaults.
        initial_state: keys [B, S, H, K] and corrected values [B, S, HV, V] of the past.
        output_final_state: return those of past and present; float32, or float64 for float64 inputs.
        cu_seqlens: boundaries [N + 1] of sequences packed into one row; without states.
        backend: "reference", "chunk", "triton" (for the softmax write of sequences without state, mask and window) or
            "auto": the kernels on CUDA where they can, else chunk.

    Returns:
        o [B, T, max(HQ, HV), V] in the dtype of q, and the final state or None.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    HV = v.shape[2] if v.ndim == 4 else 0
    grouped = q.ndim == 4 and k.ndim == 4 and q.shape[2] != k.shape[2] and HV and not q.shape[2] % HV
    dims = check_inputs(q[:, :, : k.shape[2]] if grouped else q, k, v, cu_seqlens)
    _check_word("write_kernel", write_kernel, KERNELS)
    _check_word("read_kernel", read_kernel, KERNELS)
    _check_word("beta_mode", beta_mode, BETA_MODES)
    past = _past(initial_state, dims, k)
    if cu_seqlens is not None and (initial_state is not None or output_final_state):
        raise ValueError("initial_state and output_final_state must be left out when cu_seqlens packs sequences")
    S = past.k.shape[1]
    refused = _kernel_refuses(k, v, past, mask, write_kernel, window)
    form = choose_backend(backend, q, refused)
    full_mask = _full_mask(mask, (dims.B, S + dims.T), q)
    settings = {"window": window, "backend": form}
    write = {"kernel": write_kernel, "beta_mode": beta_mode, "scale": write_scale, **settings}

    def one(q, k, v, beta, mask, *, initial_state):
        written = None if form == "triton" else mask
        u = corrected_values(k, v, beta, past=initial_state, mask=written, **write)
        k, u = torch.cat([initial_state.k, k], 1), torch.cat([initial_state.u, u.to(initial_state.u.dtype)], 1)
        o = read(q, k, u, mask=mask, age=initial_state.age, kernel=read_kernel, scale=scale, **settings)
        return o, DeltaFormerState(k, u)

    if beta is not None:
        check_gate("beta", beta, dims, like=q, vector=False)
    elif beta_mode != "none":
        raise ValueError(f"beta must be given when beta_mode is {beta_mode!r}, got None")
    if cu_seqlens is not None:
        nothing = past.age.new_zeros(dims.N)
        o, _ = per_sequence(_stateless(one, past), cu_seqlens, q, k, v, beta, full_mask, initial_state=nothing)
        return o, None
    o, state = one(q, k, v, beta, full_mask, initial_state=past)
    return o, state if output_final_state else None


def _stateless(one, past: Past):
    """The same without a past, as `per_sequence` calls it."""

    def op(q, k, v, beta, mask, *, initial_state):
        return one(q, k, v, beta, mask, initial_state=past)[0], initial_state

    return op


def corrected_values(
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    *,
    past: Past,
    mask: Tensor | None,
    kernel: str,
    beta_mode: str,
    scale: float | None = None,
    window: int | None = None,
    backend: Backend = "chunk",
) -> Tensor:
    """u [B, T, HV, V] in float32 (float64 for float64 inputs); the arguments are those of `deltaformer`."""
    form = choose_backend(backend, k, _kernel_refuses(k, v, past, mask, kernel, window))
    HV, wide = v.shape[2], torch.promote_types(v.dtype, torch.float32)
    one = v.new_ones(v.shape[:3], dtype=wide)
    beta = one if beta is None or beta_mode == "none" else beta.to(wide)
    a = beta if beta_mode == "delta" else one
    k, past = repeat_heads(k, HV), past._replace(k=repeat_heads(past.k, HV))
    scale = _scale(scale, kernel, k)
    if form == "triton":
        from hf_memory.ops.deltaformer.kernels import corrected_values as in_kernels

        return in_kernels(k, v, a, beta, scale)
    mask = _full_mask(mask, (k.shape[0], past.k.shape[1] + k.shape[1]), k)
    options = {"kernel": kernel, "scale": scale, "window": window}
    write = reference.corrected_values if form == "reference" else chunk.corrected_values
    return write(k.to(wide), k, v, a, beta, past, mask, **options)[0]


def read(
    q: Tensor,
    k: Tensor,
    u: Tensor,
    *,
    mask: Tensor,
    age: Tensor,
    kernel: str,
    scale: float | None = None,
    window: int | None = None,
    backend: Backend = "chunk",
) -> Tensor:
    """o [B, T, max(HQ, HV), V] in the dtype of q, from keys [B, S + T, H, K] and u [B, S + T, HV, V]."""
    heads = max(q.shape[2], u.shape[2])
    q, k, u = repeat_heads(q, heads), repeat_heads(repeat_heads(k, u.shape[2]), heads), repeat_heads(u, heads)
    form = reference if backend == "reference" else chunk
    return form.read(q, k, u, mask, age, kernel=kernel, scale=_scale(scale, kernel, k), window=window)[0]


def _kernel_refuses(
    k: Tensor, v: Tensor, past: Past, mask: Tensor | None, kernel: str, window: int | None
) -> str | None:
    """Why there is no kernel for a write; None if there is."""
    if kernel != "softmax" or window is not None or mask is not None or past.k.shape[1]:
        return "it writes with softmax, without a state, a mask or a window"
    if max(k.shape[-1], v.shape[-1]) > 128 or k.dtype == torch.float64:
        return f"K and V must be at most 128 and k not float64, got {k.shape[-1]}, {v.shape[-1]} and {k.dtype}"
    return None


def _scale(scale: float | None, kernel: str, k: Tensor) -> float:
    if scale is not None:
        return scale
    return k.shape[-1] ** -0.5 if kernel == "softmax" else 1.0


def _check_word(name: str, word: str, known: tuple[str, ...]) -> None:
    if word not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {word!r}")


def _full_mask(mask: Tensor | None, shape: tuple[int, int], q: Tensor) -> Tensor:
    """[B, S + T]; a mask of the present tokens alone says that all of the past is real."""
    if mask is None:
        return torch.ones(shape, dtype=torch.bool, device=q.device)
    if tuple(mask.shape) == (shape[0], q.shape[1]):
        past = mask.new_ones(shape[0], shape[1] - q.shape[1])
        mask = torch.cat([past, mask], 1)
    check_tensor("mask", mask, shape, like=q)
    return mask.bool()


def _past(state, dims, k: Tensor) -> Past:
    wide = torch.promote_types(k.dtype, torch.float32)
    if state is None:
        state = k.new_zeros(dims.B, 0, dims.H, dims.K), k.new_zeros(dims.B, 0, dims.HV, dims.V)
    if len(state) != 2:
        raise ValueError(f"initial_state must be (k, u), got {len(state)} entries")
    S = state[0].shape[1] if state[0].ndim == 4 else 0
    check_tensor("initial_state[0]", state[0], (dims.B, S, dims.H, dims.K), like=k)
    check_tensor("initial_state[1]", state[1], (dims.B, S, dims.HV, dims.V), like=k)
    return Past(state[0].to(wide), state[1].to(wide), torch.arange(S, 0, -1, device=k.device))
