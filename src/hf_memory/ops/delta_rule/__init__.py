"""The delta rule with no, scalar or vector decay: DeltaNet, Gated DeltaNet and Kimi Delta Attention."""

from typing import Any

from torch import Tensor

from hf_memory.ops.contract import (
    Backend,
    Forms,
    check_gate,
    check_inputs,
    matrix_state,
    without_padding,
)
from hf_memory.ops.delta_rule import chunk, one_token, reference


def _kernels():
    from hf_memory.ops.delta_rule.kernels import delta_rule

    return delta_rule


FORMS = Forms(reference.delta_rule, chunk.delta_rule, one_token.delta_rule, _kernels)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
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

    Args:
        q: queries [B, T, H, K].
        k: keys [B, T, H, K].
        v: values [B, T, HV, V], HV a multiple of H.
        beta: write strength [B, T, HV], in [0, 2].
        g: natural logarithm of the decay, <= 0: one for each value head [B, T, HV] (Gated DeltaNet), or for each of its
            key channels [B, T, HV, K] (Kimi Delta Attention); None means no decay (DeltaNet).
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

    Sources: https://arxiv.org/abs/2406.06484, https://arxiv.org/abs/2412.06464, https://arxiv.org/abs/2510.26692.
    """
    dims = check_inputs(q, k, v, cu_seqlens)
    check_gate("beta", beta, dims, like=q, vector=False)
    if g is not None:
        check_gate("g", g, dims, like=q, vector=True)
    state = matrix_state("initial_state", initial_state, dims, like=q)
    inputs = without_padding(mask, q, k, v, beta, g)
    o, state = FORMS.run(backend, dims, inputs, state, scale=scale, in_place=in_place, cu_seqlens=cu_seqlens)
    return o, state if output_final_state else None
