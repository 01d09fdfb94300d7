"""Linear attention with no, scalar or vector decay: the additive memories, from the Linear Transformer to Mamba-2."""

from typing import Any

from torch import Tensor

from hf_memory.ops.dispatch import Backend, Forms
from hf_memory.ops.inputs import Dims, check_gate, check_inputs, matrix_state, named_state
from hf_memory.ops.layout import without_padding
from hf_memory.ops.linear_attention import chunk, one_token, reference
from hf_memory.ops.linear_attention.reference import LinearState


def _kernels():
    from hf_memory.ops.linear_attention.kernels import linear_attention

    return linear_attention


FORMS = Forms(
    reference.linear_attention, chunk.linear_attention, one_token.linear_attention, _kernels, ("g",)
)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    normalize: bool = False,
    scale: float | None = None,
    mask: Tensor | None = None,
    initial_state: Tensor | LinearState | None = None,
    output_final_state: bool = False,
    in_place: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Any]:
    """Write k v^T into a memory that decays, and read it with q.

        S_t = e^(g_t) S_{t-1} + k_t v_t^T,   o_t = scale S_t^T q_t
        z_t = e^(g_t) z_{t-1} + k_t,         o_t = S_t^T q_t / (z_t^T q_t + 1e-6)   with `normalize`

    Args:
        q: queries after the feature map, [B, T, H, K], or [B, T, HQ, K] with HQ a multiple of HV: several heads that
            read one memory.
        k: keys [B, T, H, K], after the feature map; with `normalize`, z^T q must be positive.
        v: values [B, T, HV, V], HV a multiple of H.
        g: natural logarithm of the decay, <= 0: one for each value head [B, T, HV], or for each of its key channels
            [B, T, HV, K]; None means no decay.
        normalize: divide by the sum of the weights. `scale` would cancel and is not used.
        scale: factor of q, default K ** -0.5.
        mask: [B, T] bool, False at padding, which does not change the memory and has an output of zero; or None.
        initial_state: [N, HV, K, V], or `LinearState` with `normalize`; default: an empty memory.
        output_final_state: return the state after the last token; float32, or float64 for float64 inputs.
        in_place: without gradients, let one token overwrite `initial_state`, so that the final state is this tensor.
        cu_seqlens: boundaries [N + 1] of sequences packed into one row.
        backend: "reference", "chunk", "triton", or "auto": the kernels on CUDA, else chunk.

    Returns:
        o [B, T, HV, V], or with HQ heads of q [B, T, HQ, V], in the dtype of q, and the final state or None.

    Sources: https://arxiv.org/abs/2006.16236, https://arxiv.org/abs/2312.06635, https://arxiv.org/abs/2405.21060.
    """
    dims = check_inputs(q, k, v, cu_seqlens, grouped=True)
    check_gate("g", g, dims, like=q, vector=True)
    state = _initial_state(initial_state, dims, q, normalize)
    inputs = without_padding(mask, q, k, v, g)
    o, state = FORMS.run(
        backend, dims, inputs, state, scale=scale, in_place=in_place, cu_seqlens=cu_seqlens
    )
    return o, state if output_final_state else None


def _initial_state(state, dims: Dims, q: Tensor, normalize: bool) -> Tensor | LinearState:
    """The given state, or an empty one; float64 if q is, else float32."""
    if not normalize:
        if isinstance(state, tuple):
            raise ValueError(
                f"initial_state must be a tensor with normalize=False, got {type(state).__name__}"
            )
        return matrix_state("initial_state", state, dims, like=q)
    heads = (dims.N, dims.HV, dims.K)
    return named_state(state, LinearState, [(*heads, dims.V), heads], like=q)
