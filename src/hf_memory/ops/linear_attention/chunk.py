"""Linear attention in PyTorch, parallel inside chunks: the CPU path and the oracle for kernels.

With b the sum of g from the start of the chunk to each token, and S the state before the chunk:

    O = (Q e^b) S + A V,   A_ij = sum_d q_id k_jd e^(b_id - b_jd) for i >= j;   S <- e^(b_C) S + (K e^(b_C - b))^T V

No exponent is positive. The normaliser is computed as one more column of values, which are all one.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.ops.chunks import (
    add_product,
    chunk_size,
    grouped_rows,
    in_segments,
    joined_chunks,
    rows_by_head,
    scalar_decays,
    split_chunks,
    vector_decays,
)
from hf_memory.ops.layout import repeat_heads
from hf_memory.ops.linear_attention.reference import EPS, LinearState
from hf_memory.ops.precision import with_bfloat16_products

CHUNK = 64


@with_bfloat16_products
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    *,
    initial_state: Tensor | LinearState,
    scale: float,
) -> tuple[Tensor, Tensor | LinearState]:
    """Same function as the reference."""
    q = repeat_heads(q, v.shape[2])
    k = repeat_heads(k, v.shape[2])
    C = chunk_size(v.shape[1], CHUNK)
    if not isinstance(initial_state, LinearState):
        return in_segments(_segment, C, initial_state, q, k, v, g, scale=scale)
    S = torch.cat([initial_state.memory, initial_state.normalizer[..., None]], dim=-1)
    o, S = in_segments(_normalized_segment, C, S, q, k, v, g, scale=1.0)
    # a later call may overwrite them
    return o, LinearState(S[..., :-1].contiguous(), S[..., -1].contiguous())


def _normalized_segment(C: int, S: Tensor, rows: tuple, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v, g = rows
    o, S = _segment(C, S, (q, k, F.pad(v, (0, 1), value=1.0), g), scale)
    return o[..., :-1] / (o[..., -1:] + EPS), S


def _segment(C: int, S: Tensor, rows: tuple, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v, g = rows
    B, _, H, _ = v.shape
    q, k, v = (split_chunks(x, C) for x in (scale * q, k, v))  # [NC, B * H, C, ...]
    q = grouped_rows(q, k)
    A, q_in, k_out, decay = decayed(q, k, None if g is None else split_chunks(g, C))
    outputs = []
    S = S.flatten(0, 1)
    decays = [None] * len(v) if decay is None else decay.unbind()
    for within_n, q_n, k_n, v_n, decay_n in zip(
        (A @ v).unbind(), q_in.unbind(), k_out.mT.unbind(), v.unbind(), decays
    ):
        outputs.append(torch.baddbmm(within_n, q_n, S.to(q_n.dtype)))
        S = add_product(S, k_n, v_n, decay_n)
    return joined_chunks(torch.stack(outputs), B, C), S.unflatten(0, (B, H))


def decayed(q: Tensor, k: Tensor, g: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The matrices of the module's docstring for chunks of q, k [..., C, K] and g [..., C] or [..., C, K].

    Returns A, the queries Q e^b that read the state before the chunk, the keys K e^(b_C - b) that write to the state
    after it, and the decay e^(b_C) of the state, None without g.
    """
    if g is None:
        return rows_by_head(q @ k.mT, k).tril().flatten(-3, -2), q, k, None
    queries = rows_by_head(q, k)
    if g.ndim == q.ndim:
        A, q_in, k_out, decay = vector_decays(queries, k.unsqueeze(-3), g.unsqueeze(-3))
        k_out = k_out.squeeze(-3)
        decay = decay.squeeze(-3)
    else:
        mask, enter, leave = scalar_decays(g)
        A = rows_by_head(q @ k.mT, k) * mask.unsqueeze(-3)
        q_in = enter.unsqueeze(-3) * queries
        k_out = leave * k
        decay = enter[..., -1:, :]
    A = A.flatten(-3, -2)
    q_in = q_in.flatten(-3, -2)
    return A.to(q.dtype), q_in.to(q.dtype), k_out.to(k.dtype), decay.mT
