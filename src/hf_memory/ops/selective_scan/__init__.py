"""The selective scan of Mamba: an additive memory in which every number decays at its own rate."""

import torch
from torch import Tensor

from hf_memory.ops.dispatch import Backend, choose_backend
from hf_memory.ops.inputs import check_inputs, check_tensor, matrix_state
from hf_memory.ops.layout import PIECE, per_sequence, without_padding
from hf_memory.ops.selective_scan import chunk, reference


def selective_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    rate: Tensor,
    *,
    mask: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Write k v^T into a memory whose numbers decay by e^(rate g), and read it with q.

        S_t[k, v] = e^(rate[k, v] g_t[v]) S_{t-1}[k, v] + k_t[k] v_t[v],   o_t = S_t^T q_t

    Mamba (https://arxiv.org/abs/2312.00752) is this with q = C, k = B, v = step x, g = -step and rate = -A.

    Args:
        q: queries [B, T, H, K].
        k: keys [B, T, H, K].
        v: values [B, T, HV, V], HV a multiple of H.
        g: natural logarithm of the decay at a rate of one, <= 0 [B, T, HV, V].
        rate: decay rate of each number of the state, > 0 [HV, K, V].
        mask: [B, T] bool, False at padding, which does not change the memory and has an output of zero; or None.
        initial_state: [N, HV, K, V]; default: an empty memory.
        output_final_state: return the state after the last token; float32, or float64 for float64 inputs.
        cu_seqlens: boundaries [N + 1] of sequences packed into one row.
        backend: "reference", "chunk" or "auto", which is chunk; there is no kernel.

    Returns:
        o [B, T, HV, V] in the dtype of q, and the final state or None.
    """
    dims = check_inputs(q, k, v, cu_seqlens)
    check_tensor("g", g, (dims.B, dims.T, dims.HV, dims.V), like=q)
    check_tensor("rate", rate, (dims.HV, dims.K, dims.V), like=q)
    state = matrix_state("initial_state", initial_state, dims, like=q)
    q, k, v, g = without_padding(mask, q, k, v, g)
    # -inf times a decay of zero would give a gradient of NaN
    g = g.clamp(min=torch.finfo(g.dtype).min)
    name = choose_backend(backend, q, "the selective scan runs in PyTorch alone")
    form = reference.selective_scan if name == "reference" else chunk.selective_scan
    o, state = per_sequence(
        form, cu_seqlens, q, k, v, g, initial_state=state, piece=PIECE, rate=rate
    )
    return o, state if output_final_state else None
