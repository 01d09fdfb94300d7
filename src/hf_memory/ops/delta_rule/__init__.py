"""The delta rule with no, scalar or vector decay: DeltaNet, Gated DeltaNet, Kimi Delta Attention and RWKV-7."""

from typing import Any

import torch
from torch import Tensor

from hf_memory.ops.delta_rule import chunk, one_token, reference
from hf_memory.ops.dispatch import Backend, Forms
from hf_memory.ops.inputs import Dims, check_gate, check_inputs, check_tensor, matrix_state
from hf_memory.ops.layout import without_padding


def _kernels():
    from hf_memory.ops.delta_rule.kernels import delta_rule

    return delta_rule


def _kernels_of_rank_one():
    from hf_memory.ops.delta_rule.kernels import diagonal_plus_rank_one

    return diagonal_plus_rank_one


FORMS = Forms(reference.delta_rule, chunk.delta_rule, one_token.delta_rule, _kernels, ("beta", "g"))
RANK_ONE = FORMS._replace(  # with a and b
    chunk=chunk.diagonal_plus_rank_one, kernels=_kernels_of_rank_one, names=("beta", "g", "a", "b")
)


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
    """Write v into a decaying memory in place of what it returns for k, and read it with q.

        S <- e^(g_t) S_{t-1};   S_t = S + beta_t k_t (v_t - S^T k_t)^T;   o_t = scale S_t^T q_t

    Keys should have unit length: with longer keys the memory diverges. With beta in (1, 2] a write negates part of what
    the memory holds along k. With a and b (RWKV-7) the memory is read along a, and the result is added along b, instead
    of k. It is read before it decays, so the rule above is a = -e^g k and b = beta k:

        S_t = (diag(e^(g_t)) + b_t a_t^T) S_{t-1} + beta_t k_t v_t^T

    Args:
        q: queries [B, T, H, K], or [B, T, HQ, K] with HQ a multiple of HV: several heads that read one memory.
        k: keys [B, T, H, K].
        v: values [B, T, HV, V], HV a multiple of H.
        beta: write strength [B, T, HV], in [0, 2].
        g: natural logarithm of the decay, <= 0: one for each value head [B, T, HV] (Gated DeltaNet), or for each of its
            key channels [B, T, HV, K] (Kimi Delta Attention); None means no decay (DeltaNet).
        a: vectors [B, T, HV, K] that read the memory before the write, S^T a; None means the rule above.
        b: vectors [B, T, HV, K] along which the result is added; required with a.
        scale: factor of q, default K ** -0.5.
        mask: [B, T] bool, False at padding, which does not change the memory and has an output of zero; or None.
        initial_state: [N, HV, K, V]; default: an empty memory.
        output_final_state: return the state after the last token; float32, or float64 for float64 inputs.
        in_place: without gradients, let one token overwrite `initial_state`, so that the final state is this tensor.
        cu_seqlens: boundaries [N + 1] of sequences packed into one row.
        backend: "reference", "chunk", "triton", or "auto": the kernels on CUDA, else chunk.

    Returns:
        o [B, T, HV, V], or with HQ heads of q [B, T, HQ, V], in the dtype of q, and the final state or None.

    Sources: https://arxiv.org/abs/2406.06484, https://arxiv.org/abs/2412.06464, https://arxiv.org/abs/2510.26692, and
    https://arxiv.org/abs/2503.14456, equation 16, for a and b.
    """
    dims = check_inputs(q, k, v, cu_seqlens, grouped=True)
    check_gate("beta", beta, dims, like=q)
    check_gate("g", g, dims, like=q, vector=True)
    state = matrix_state("initial_state", initial_state, dims, like=q)
    forms, rest = (FORMS, [g]) if a is b is None else (RANK_ONE, _rank_one(g, a, b, dims, q))
    inputs = without_padding(mask, q, k, v, beta, *rest)
    o, state = forms.run(
        backend, dims, inputs, state, scale=scale, in_place=in_place, cu_seqlens=cu_seqlens
    )
    return o, state if output_final_state else None


def _rank_one(
    g: Tensor | None, a: Tensor | None, b: Tensor | None, dims: Dims, q: Tensor
) -> list[Tensor | None]:
    """g for every key channel, a and b."""
    if a is None or b is None:
        raise ValueError(f"a and b must be given together, got {'b' if a is None else 'a'} alone")
    for name, x in (("a", a), ("b", b)):
        check_tensor(name, x, (dims.B, dims.T, dims.HV, dims.K), like=q)
    if g is None:
        g = torch.zeros_like(a)
    return [g if g.ndim == 4 else g[..., None].expand_as(a), a, b]
