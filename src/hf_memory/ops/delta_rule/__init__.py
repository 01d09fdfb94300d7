"""The delta rule with no, scalar or vector decay: DeltaNet, Gated DeltaNet, Kimi Delta Attention; and RWKV-7's."""

from typing import Any

import torch
from torch import Tensor

from hf_memory.ops.contract import (
    Backend,
    Dims,
    Forms,
    check_gate,
    check_inputs,
    check_tensor,
    matrix_state,
    without_padding,
)
from hf_memory.ops.delta_rule import chunk, one_token, reference


def _kernels():
    from hf_memory.ops.delta_rule.kernels import delta_rule

    return delta_rule


FORMS = Forms(reference.delta_rule, chunk.delta_rule, one_token.delta_rule, _kernels)
RANK_ONE = Forms(
    reference.diagonal_plus_rank_one, chunk.diagonal_plus_rank_one, one_token.diagonal_plus_rank_one
)  # with a and b


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    a: Tensor | None = None,
    b: Tensor | None = None,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    in_place: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Any]:
    """Replace what a decaying memory recalls for k by v, and read it with q.

        S <- e^(g_t) S_{t-1};   S_t = S + beta_t k_t (v_t - S^T k_t)^T;   o_t = scale S_t^T q_t

    Keys should have unit length: longer ones make the memory diverge. With beta in (1, 2] it is turned over along k.
    With a and b the memory is asked, and changed by its answer, along other vectors than it is written (RWKV-7). It is
    asked before it decays, so that a = -e^g k and b = beta k is the rule above:

        S_t = (diag(e^(g_t)) + b_t a_t^T) S_{t-1} + beta_t k_t v_t^T

    Args:
        q: queries [B, T, H, K].
        k: keys [B, T, H, K].
        v: values [B, T, HV, V], HV a multiple of H.
        beta: write strength [B, T, HV], in [0, 2].
        g: natural logarithm of the decay, <= 0: one for each value head [B, T, HV] (Gated DeltaNet), or for each of its
            key channels [B, T, HV, K] (Kimi Delta Attention); None means no decay (DeltaNet).
        a: what is found, S^T a, [B, T, HV, K]; None means that the memory is asked with k.
        b: where it is added to the memory, [B, T, HV, K]; given with a. This form has no kernels yet.
        scale: factor of q, default K ** -0.5.
        mask: [B, T] bool, False at padding, which leaves the memory as it is whatever stands there, and whose output is
            zero. None means no padding.
        initial_state: [N, HV, K, V]; default: an empty memory.
        output_final_state: return the state after the last token; float32, or float64 for float64 inputs.
        in_place: the caller gives `initial_state` away. Without gradients one token may then be written into it, and
            the final state is this tensor; otherwise it is a new one.
        cu_seqlens: boundaries [N + 1] of sequences packed into one row.
        backend: "reference", "chunk", "triton", or "auto": the kernels on CUDA, else chunk.

    Returns:
        o [B, T, HV, V] in the dtype of q, and the final state or None.

    Raises:
        ValueError: naming the argument that does not fit.

    Sources: https://arxiv.org/abs/2406.06484, https://arxiv.org/abs/2412.06464, https://arxiv.org/abs/2510.26692, and
    https://arxiv.org/abs/2503.14456, equation 16, for a and b.
    """
    dims = check_inputs(q, k, v, cu_seqlens)
    check_gate("beta", beta, dims, like=q, vector=False)
    if g is not None:
        check_gate("g", g, dims, like=q, vector=True)
    state = matrix_state("initial_state", initial_state, dims, like=q)
    forms, rest = FORMS, [g]
    if a is not None or b is not None:
        forms, rest = RANK_ONE, _rank_one(g, a, b, dims, q)
    inputs = without_padding(mask, q, k, v, beta, *rest)
    o, state = forms.run(backend, dims, inputs, state, scale=scale, in_place=in_place, cu_seqlens=cu_seqlens)
    return o, state if output_final_state else None


def _rank_one(g: Tensor | None, a: Tensor | None, b: Tensor | None, dims: Dims, q: Tensor) -> list[Tensor | None]:
    """g of every channel, a and b."""
    if a is None or b is None:
        raise ValueError(f"a and b must be given together, got {'b' if a is None else 'a'} alone")
    for name, x in (("a", a), ("b", b)):
        check_tensor(name, x, (dims.B, dims.T, dims.HV, dims.K), like=q)
    if g is None:
        g = torch.zeros_like(a)
    return [g if g.ndim == 4 else g[..., None].expand_as(a), a, b]
