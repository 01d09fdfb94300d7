"""Test-time ridge regression: MesaNet and Gated KalmaNet, whose memories are read by solving a linear system."""

from typing import Any

import torch
from torch import Tensor

from hf_memory.ops.dispatch import Backend, choose_backend
from hf_memory.ops.inputs import check_gate, check_inputs, check_tensor, named_state
from hf_memory.ops.layout import PIECE, per_sequence, without_padding
from hf_memory.ops.variants.ridge_regression import chunk, reference
from hf_memory.ops.variants.ridge_regression.reference import RidgeState


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
    scale: float = 1.0,
    mask: Tensor | None = None,
    initial_state: RidgeState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Any]:
    """Read with q the linear map that fits all values so far best, where recent tokens count more.

        H_t = e^(g_t) H_{t-1} + beta_t k_t k_t^T,   S_t = e^(g_t) S_{t-1} + beta_t k_t v_t^T
        x_t = (H_t + L_t)^-1 q_t,   o_t = scale S_t^T (q_t + alpha_t (x_t - q_t)),   L_t = ridge + ratio |H_t|

    |H_t| is sqrt(1e-12 + sum of the squares of H_t), at least 1e-6: an empty memory can be read without a ridge.
    The reference solves the systems exactly, the chunk form by conjugate gradients, in both passes. Sources:
    https://arxiv.org/abs/2506.05233, https://arxiv.org/abs/2511.21016 (which solves by Chebyshev iteration).

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
        scale: factor of the output.
        mask: [B, T] bool, False at padding, which does not change the memory and has an output of zero; or None.
        initial_state: default: an empty memory.
        output_final_state: return the state after the last token; float32, or float64 for float64 inputs.
        cu_seqlens: boundaries [N + 1] of sequences packed into one row.
        backend: "reference", "chunk" or "auto", which is chunk: there are no kernels.

    Returns:
        o [B, T, HV, V] in the dtype of q, and the final state or None.
    """
    dims = check_inputs(q, k, v, cu_seqlens)
    check_gate("beta", beta, dims, like=q)
    alpha = torch.ones_like(beta) if alpha is None else alpha
    for name, x in (("g", g), ("alpha", alpha)):
        check_gate(name, x, dims, like=q)
    if ridge is None and ratio <= 0:
        raise ValueError(f"ratio must be positive without ridge, got {ratio}")
    ridge = q.new_zeros(dims.HV, dims.K) if ridge is None else ridge
    check_tensor("ridge", ridge, (dims.HV, dims.K), like=q)
    state = named_state(
        initial_state, RidgeState, [(dims.N, dims.HV, dims.K, n) for n in dims[4:6]], like=q
    )
    is_exact = choose_backend(backend, q, "ridge regression has none") == "reference"
    op = (reference if is_exact or (dims.T == 1 and cu_seqlens is None) else chunk).ridge_regression
    options: dict = {
        "initial_state": state,
        "ridge": ridge,
        "ratio": ratio,
        "steps": steps,
        "scale": scale,
    }
    o, state = per_sequence(
        op, cu_seqlens, *without_padding(mask, q, k, v, beta, g, alpha), piece=PIECE, **options
    )
    return o, state if output_final_state else None
