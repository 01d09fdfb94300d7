"""Linear attention in PyTorch, parallel inside chunks: the CPU path and the oracle for kernels.

With b the sum of g from the start of the chunk to each token, and S the state before the chunk:

    O = (Q e^b) S + A V,   A_ij = sum_d q_id k_jd e^(b_id - b_jd) for i >= j;   S <- e^(b_C) S + (K e^(b_C - b))^T V

No exponent is positive. The normaliser is one more column of values, all ones.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.ops.chunks import decay_mask, split_chunks, vector_scores, whole_blocks
from hf_memory.ops.contract import in_float32, repeat_heads
from hf_memory.ops.linear_attention.reference import EPS, LinearState

CHUNK = 64


@in_float32
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, *, initial_state: Tensor | LinearState, scale: float
) -> tuple[Tensor, Tensor | LinearState]:
    """Same function as the reference."""
    q, k = repeat_heads(q, v.shape[2]), repeat_heads(k, v.shape[2])
    if not isinstance(initial_state, LinearState):
        o, state = _unnormalized(q, k, v, g, initial_state)
        return scale * o, state
    o, state = _unnormalized(q, k, F.pad(v, (0, 1), value=1.0), g, torch.cat(
        [initial_state.memory, initial_state.normalizer[..., None]], dim=-1
    ))  # fmt: skip
    return o[..., :-1] / (o[..., -1:] + EPS), LinearState(state[..., :-1], state[..., -1])


def _unnormalized(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, S: Tensor) -> tuple[Tensor, Tensor]:
    T = q.shape[1]
    if T == 1:
        return _one_token(q, k, v, g, S)
    C = min(CHUNK, whole_blocks(T))
    q, k, v = (split_chunks(x, C) for x in (q, k, v))  # [B, H, NC, C, ...]
    g = None if g is None else split_chunks(g, C)
    if g is None:
        A, decay, q_in, k_out = (q @ k.mT).tril(), None, q, k
    else:
        b = (g if g.ndim == q.ndim else g[..., None]).cumsum(-2)  # [B, H, NC, C, K or 1]
        A = vector_scores(q, k, b) if g.ndim == q.ndim else (q @ k.mT) * decay_mask(b[..., 0])
        q_in, k_out, decay = q * b.exp(), k * (b[..., -1:, :] - b).exp(), b[..., -1, :, None].exp()
    states, S = _states(k_out.mT @ v, decay, S)
    o = q_in @ states + A @ v
    return o.flatten(2, 3).transpose(1, 2)[:, :T], S


def _one_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, S: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = q[:, 0], k[:, 0], v[:, 0]  # [B, H, D]
    if g is not None:
        S = S * (g[:, 0, :, None, None] if g.ndim == 3 else g[:, 0, ..., None]).exp()
    S = S + k[..., None] * v[..., None, :]
    return (q[..., None, :] @ S).transpose(1, 2), S


def _states(updates: Tensor, decay: Tensor | None, S: Tensor) -> tuple[Tensor, Tensor]:
    """The state before each chunk [B, H, NC, K, V], and after the last."""
    if decay is None:
        after = updates.cumsum(2) + S[:, :, None]
        return torch.cat([S[:, :, None], after[:, :, :-1]], dim=2), after[:, :, -1]
    before = []
    for n in range(updates.shape[2]):
        before.append(S)
        S = decay[:, :, n] * S + updates[:, :, n]
    return torch.stack(before, dim=2), S
