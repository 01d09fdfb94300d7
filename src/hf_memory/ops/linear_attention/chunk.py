"""Linear attention in PyTorch, parallel inside chunks: the CPU path and the oracle for kernels.

With b the sum of g from the start of the chunk to each token, and S the state before the chunk:

    O = (Q e^b) S + A V,   A_ij = sum_d q_id k_jd e^(b_id - b_jd) for i >= j;   S <- e^(b_C) S + (K e^(b_C - b))^T V

No exponent is positive. The normaliser is one more column of values, all ones.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.ops.contract import in_float32, repeat_heads
from hf_memory.ops.linear_attention.reference import EPS, LinearState

CHUNK = 64
BLOCK = 16  # rows of a sub-block, inside which a vector decay is applied channel by channel


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
    C = min(CHUNK, -(-T // BLOCK) * BLOCK)
    q, k, v, g = (None if x is None else _chunks(x, C) for x in (q, k, v, g))  # [B, H, NC, C, ...]
    if g is None:
        A, decay, q_in, k_out = (q @ k.mT).tril(), None, q, k
    else:
        b = (g if g.ndim == q.ndim else g[..., None]).cumsum(-2)  # [B, H, NC, C, K or 1]
        A = _vector_scores(q, k, b) if g.ndim == q.ndim else (q @ k.mT) * _decay_mask(b[..., 0])
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


def _chunks(x: Tensor, C: int) -> Tensor:
    """[B, T, H, ...] -> [B, H, NC, C, ...]; the last chunk is filled with zeros, which are identity tokens."""
    x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, -x.shape[1] % C))
    return x.transpose(1, 2).unflatten(2, (-1, C))


def _decay_mask(b: Tensor) -> Tensor:
    """e^(b_i - b_j) for i >= j, else 0: [..., C] -> [..., C, C]."""
    later = torch.ones(b.shape[-1], b.shape[-1], dtype=torch.bool, device=b.device).triu(1)
    return (b[..., :, None] - b[..., None, :]).masked_fill(later, -torch.inf).exp()


def _vector_scores(q: Tensor, k: Tensor, b: Tensor) -> Tensor:
    """A of the module's docstring [..., C, C], in rows of blocks; each row refers its exponents to its first token."""
    C = q.shape[-2]
    rows = []
    for start in range(0, C, BLOCK):
        here, past = slice(start, start + BLOCK), slice(start)
        b_here, first = b[..., here, :], b[..., start : start + 1, :]
        scores = _decay_scores(q[..., here, :], k[..., here, :], b_here)
        if start:
            q_row, k_past = q[..., here, :] * (b_here - first).exp(), k[..., past, :] * (first - b[..., past, :]).exp()
            scores = torch.cat([q_row @ k_past.mT, scores], dim=-1)
        rows.append(F.pad(scores, (0, C - start - BLOCK)))
    return torch.cat(rows, dim=-2)


def _decay_scores(q: Tensor, k: Tensor, b: Tensor) -> Tensor:
    """Inside a block: sum_d q_id k_jd e^(b_id - b_jd) for i >= j, each channel with its own decay."""
    later = torch.ones(b.shape[-2], b.shape[-2], dtype=torch.bool, device=b.device).triu(1)[..., None]
    decay = (b[..., :, None, :] - b[..., None, :, :]).masked_fill(later, -torch.inf).exp()  # [..., C, C, K]
    return torch.einsum("...id,...jd,...ijd->...ij", q, k, decay)


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
