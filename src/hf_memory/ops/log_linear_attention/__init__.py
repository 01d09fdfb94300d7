"""Log-linear attention: a memory for each of log2 T blocks of the past, additive or of the delta rule."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_memory.ops.dispatch import Backend, choose_backend
from hf_memory.ops.exported import varies
from hf_memory.ops.inputs import (
    check_gate,
    check_inputs,
    check_is_tensor,
    check_tensor,
    named_state,
)
from hf_memory.ops.layout import PIECE, per_sequence, without_padding
from hf_memory.ops.log_linear_attention import chunk, reference
from hf_memory.ops.log_linear_attention.reference import LogLinearState


def log_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    level_weights: Tensor,
    beta: Tensor | None = None,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    initial_state: LogLinearState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Any]:
    """Linear attention or the delta rule with a memory for each block of the past, and learned weights of the blocks.

    Token t sees itself at level 0. The t tokens before it are divided into blocks as the binary digits of t say, the
    largest first; the block of 2^(l - 1) tokens has level l. Level L has all that is further back. If W_ts is the
    weight that `linear_attention`, or with beta `delta_rule`, gives to the value of token s at token t, then

        o_t = sum_{s <= t} level_weights_t[level of s at t] W_ts v_s

    With all level weights one, the result is that of these ops. With beta, each block is corrected by what that block
    returns for a key.

    Args:
        q: queries [B, T, H, K].
        k: keys [B, T, H, K]; of unit length with beta.
        v: values [B, T, HV, V], HV a multiple of H.
        level_weights: weights of the levels [B, T, HV, L + 1], level 0 first.
        beta: write strength [B, T, HV] of the delta rule; None means an additive memory.
        g: natural logarithm of the decay of value heads [B, T, HV], or of their key channels [B, T, HV, K]; or None.
        scale: factor of q, default K ** -0.5.
        mask: [B, T] bool, False at padding, which no memory and no block counts, and whose output is zero; or None.
        initial_state: a state with L levels; default: an empty memory.
        output_final_state: return the state after the last token; float32, or float64 for float64 inputs.
        cu_seqlens: boundaries [N + 1] of sequences packed into one row.
        backend: "reference", "chunk" or "auto", which is chunk: there are no kernels.

    Returns:
        o [B, T, HV, V] in the dtype of q, and the final state or None.

    Source: https://arxiv.org/abs/2506.04761.
    """
    dims = check_inputs(q, k, v, cu_seqlens)
    check_is_tensor("level_weights", level_weights)
    L = max(1, level_weights.shape[-1] - 1)
    check_tensor("level_weights", level_weights, (dims.B, dims.T, dims.HV, L + 1), like=q)
    check_gate("beta", beta, dims, like=q)
    check_gate("g", g, dims, like=q, vector=True)
    state = named_state(
        initial_state, LogLinearState, [(dims.N, L, dims.HV, dims.K, dims.V), (dims.N,)], like=q
    )
    inputs = without_padding(mask, q, k, v, level_weights, beta, g)
    backend = choose_backend(backend, q, "log-linear attention has none")
    op = reference.log_linear_attention
    if backend == "chunk" and (dims.T > 1 or cu_seqlens is not None):
        is_empty = initial_state is None and not varies(dims.T)
        op = partial(chunk.log_linear_attention, is_empty=is_empty)
    if mask is None and varies(dims.T):
        mask = q.new_ones(dims.B, dims.T, dtype=torch.bool)  # what fills the last piece is no token
    counted = None if mask is None else mask.long()
    scale = dims.K**-0.5 if scale is None else scale
    o, state = per_sequence(
        op, cu_seqlens, *inputs, counted, initial_state=state, piece=PIECE, scale=scale
    )
    return o, state if output_final_state else None
