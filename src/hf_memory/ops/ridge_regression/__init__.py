"""Test-time ridge regression: MesaNet and Gated KalmaNet, whose memories are read by solving a linear system."""

from typing import Any

import torch
from torch import Tensor

from hf_memory.ops.contract import (
    Backend,
    Dims,
    check_gate,
    check_inputs,
    check_tensor,
    choose_backend,
    per_sequence,
    without_padding,
)
from hf_memory.ops.ridge_regression import chunk, reference
from hf_memory.ops.ridge_regression.reference import RidgeState


def ridge_regression(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    alpha: Tensor | None = None,
    *,
    ridge: Tensor | None = None,
    ratio: float = 0.0,
    steps: int = 30,
    scale: float | None = None,
    mask: Tensor | None = None,
    initial_state: RidgeState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Any]:
    """Read with q the linear map that fits all values so far best, where recent tokens count more.

        H_t = e^(g_t) H_{t-1} + beta_t k_t k_t^T,   S_t = e^(g_t) S_{t-1} + beta_t k_t v_t^T
        x_t = (H_t + L_t)^-1 q_t,   o_t = scale S_t^T (q_t + alpha_t (x_t - q_t)),   L_t = ridge + ratio |H_t|

    The reference solves the systems exactly, and the chunk form by conjugate gradients, both in the forward and in the
    backward pass.

    Args:
        q: queries [B, T, H, K].
        k: keys [B, T, H, K], of unit length: the condition of the systems grows with their squares.
        v: values [B, T, HV, V], HV a multiple of H.
        beta: write strength [B, T, HV], >= 0.
        g: natural logarithm of the decay of each value head [B, T, HV], <= 0.
        alpha: how much of the solution reads [B, T, HV], in [0, 1]; with 0 this is linear attention. Default: all.
        ridge: the regulariser of each channel [HV, K], > 0. Default: none.
        ratio: the regulariser relative to the Frobenius norm of H_t. One of both must be positive.
        steps: number of steps of conjugate gradients; as many as K are exact but for rounding.
        scale: factor of the output, default 1.
        mask: [B, T] bool, False at padding, which does not change the memory and has an output of zero. None means no
            padding.
        initial_state: default: an empty memory.
        output_final_state: return the state after the last token; float32, or float64 for float64 inputs.
        cu_seqlens: boundaries [N + 1] of sequences packed into one row.
        backend: "reference", "chunk" or "auto", which is chunk: there are no kernels.

    Returns:
        o [B, T, HV, V] in the dtype of q, and the final state or None.

    Raises:
        ValueError: if an argument has a wrong shape, dtype or value; the message names it.

    Sources: https://arxiv.org/abs/2506.05233, https://arxiv.org/abs/2511.21016 (which solves by Chebyshev iteration).
    """
    dims = check_inputs(q, k, v, cu_seqlens)
    alpha = torch.ones_like(beta) if alpha is None else alpha
    for name, x in (("beta", beta), ("g", g), ("alpha", alpha)):
        check_gate(name, x, dims, like=q, vector=False)
    if ridge is None and ratio <= 0:
        raise ValueError(f"ratio must be positive without ridge, got {ratio}")
    ridge = q.new_zeros(dims.HV, dims.K) if ridge is None else ridge
    check_tensor("ridge", ridge, (dims.HV, dims.K), like=q)
    state = _initial_state(initial_state, dims, q)
    inputs = without_padding(mask, q, k, v, beta, g, alpha)
    backend = choose_backend(backend, q, "ridge regression has none")
    is_step = dims.T == 1 and cu_seqlens is None
    op = (reference if backend == "reference" or is_step else chunk).ridge_regression
    scale = 1.0 if scale is None else scale
    options: dict = {"ridge": ridge, "ratio": ratio, "steps": steps, "initial_state": state, "scale": scale}
    o, state = per_sequence(op, cu_seqlens, *inputs, **options)
    return o, state if output_final_state else None


def _initial_state(state: RidgeState | None, dims: Dims, q: Tensor) -> RidgeState:
    """The given state, or an empty one; float64 if q is, else float32."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    shapes = [(dims.N, dims.HV, dims.K, n) for n in (dims.K, dims.V)]
    if state is None:
        return RidgeState(*(q.new_zeros(shape, dtype=dtype) for shape in shapes))
    if not isinstance(state, tuple) or len(state) != 2:
        raise ValueError(f"initial_state must be a RidgeState, got {type(state).__name__}")
    for name, x, shape in zip(RidgeState._fields, state, shapes):
        check_tensor(f"initial_state.{name}", x, shape, like=q)
    return RidgeState(*(x.to(dtype) for x in state))
