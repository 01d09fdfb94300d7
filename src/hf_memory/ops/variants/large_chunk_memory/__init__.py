"""LaCT: a gated network that learns large chunks of tokens at once; a token reads complete earlier chunks."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from hf_memory.ops.dispatch import Backend, choose_backend
from hf_memory.ops.inputs import (
    Dims,
    check_chunk_size,
    check_gate,
    check_inputs,
    check_tensor,
    named_state,
)
from hf_memory.ops.layout import per_sequence, without_padding
from hf_memory.ops.neural_memory.layout import pieces_of
from hf_memory.ops.variants.large_chunk_memory import chunk, reference
from hf_memory.ops.variants.large_chunk_memory.reference import (
    LargeChunkRule,
    LargeChunkState,
    Layers,
)

__all__ = ["LargeChunkState", "large_chunk_memory"]


def large_chunk_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lr: Tensor,
    momentum: Tensor,
    weights: Layers,
    *,
    chunk_size: int,
    step_size: float = 1.0,
    mask: Tensor | None = None,
    initial_state: LargeChunkState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, LargeChunkState | None]:
    """Train a gated network f chunk by chunk so that f(k) has a large inner product with v, and apply it to q.

        o_t = f(q_t; A),   f(x; W) = (silu(x W_1) * x W_2) W_3
        S <- mean of eta_t over the chunk * S + sum over the chunk of lr_t grad <f(k_t; A), v_t>
        A <- A + step_size NS(S), each column scaled to its length in the initial weights

    The last two lines are computed at the end of each chunk, with gradients at A. NS stands for the five Newton-Schulz
    steps of Muon, which normalise S, so only the ratios of the learning rates matter. A token thus reads complete
    chunks only, and needs attention over a window for nearer tokens. The result depends on chunk_size. Chunks are
    counted from the first token of a sequence, across calls, and without padding.

    Args:
        q: queries [B, T, H, K].
        k: keys [B, T, H, K], best of unit length.
        v: values [B, T, HV, V], HV a multiple of H.
        lr: learning rate of each token [B, T, HV], >= 0.
        momentum: eta [B, T, HV], in [0, 1].
        weights: initial weights W_1 and W_2 [HV, K, width] and W_3 [HV, width, V].
        chunk_size: number of tokens of a chunk.
        step_size: factor of the update by a chunk.
        mask: [B, T] bool, False at padding, which does not change the memory and has an output of zero; or None.
        initial_state: the final state of an earlier call; default: `weights`, with no momentum.
        output_final_state: return the state after the last token; float32, or float64 for float64 inputs.
        cu_seqlens: boundaries [N + 1] of sequences packed into one row.
        backend: "reference", "chunk" or "auto", which is chunk; there is no kernel.

    Returns:
        o [B, T, HV, V] in the dtype of q, and the final state or None.

    Source: https://arxiv.org/abs/2505.23884.
    """
    dims = check_inputs(q, k, v, cu_seqlens)
    check_gate("lr", lr, dims, like=q)
    check_gate("momentum", momentum, dims, like=q)
    _check_weights(weights, dims, q)
    check_chunk_size(chunk_size)
    P = sum(W.shape[1] * W.shape[2] for W in weights)
    state = named_state(
        initial_state, LargeChunkState, [*[(dims.N, dims.HV, P)] * 3, (dims.N,)], like=q
    )
    chosen = choose_backend(backend, q, "this memory runs in PyTorch alone")
    rows = without_padding(mask, q, k, v, lr, momentum)
    aligned, mask = pieces_of(q, mask, initial_state is None)
    op: Callable = partial(chunk.large_chunk_memory, aligned=aligned)
    if chosen == "reference":
        op = reference.large_chunk_memory
    o, state = per_sequence(
        op,
        cu_seqlens,
        *rows,
        mask,
        initial_state=state,
        piece=chunk_size,
        weights=tuple(weights),
        rule=LargeChunkRule(chunk_size, step_size),
    )
    return o, state if output_final_state else None


def _check_weights(weights: Layers, dims: Dims, q: Tensor) -> None:
    if not isinstance(weights, (tuple, list)) or len(weights) != 3 or weights[0].ndim != 3:
        raise ValueError(
            f"weights must be three tensors [HV, d_in, d_out], got {type(weights).__name__}"
        )
    width = weights[0].shape[2]
    for n, shape in enumerate(((dims.K, width), (dims.K, width), (width, dims.V))):
        check_tensor(f"weights[{n}]", weights[n], (dims.HV, *shape), like=q)
