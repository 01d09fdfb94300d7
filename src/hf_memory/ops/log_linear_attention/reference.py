"""The definition of log-linear attention, one token at a time. The chunk form is tested against it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.ops.layout import repeat_heads
from hf_memory.ops.precision import in_float32
from hf_memory.ops.sample import Sample


class LogLinearState(NamedTuple):
    """A memory for each block of tokens; there is a block for each one in the binary form of the number of tokens."""

    # [N, L, HV, K, V]: index l - 1 has the block of level l (2^(l - 1) tokens) or zeros
    levels: Tensor
    tokens_read: Tensor  # [N] int64


def level_between(a: Tensor, b: Tensor, L: int) -> Tensor:
    """The level at which token a reads token b: the number of bits up to the highest one that differs, at most L."""
    return torch.bucketize((a ^ b).contiguous(), 2 ** torch.arange(L, device=a.device), right=True)


@in_float32
def log_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    level_weights: Tensor,
    beta: Tensor | None,
    g: Tensor | None,
    counted: Tensor | None,
    *,
    initial_state: LogLinearState,
    scale: float,
) -> tuple[Tensor, LogLinearState]:
    """S_l <- (I - beta k k^T) e^g S_l;   S_0 = beta k v^T;   o = scale sum_l lambda_l S_l^T q;   then merge blocks.

    `counted` [B, T] is 1 for tokens and 0 for padding, None if all are tokens. Other arguments are those of the op.
    """
    S, n = initial_state  # [B, L, HV, K, V], [B]
    q = repeat_heads(q, v.shape[2])
    k = repeat_heads(k, v.shape[2])
    outputs = []
    for t in range(q.shape[1]):
        if g is not None:
            decay = g[:, t].exp() if g.ndim == 4 else g[:, t, :, None].exp()  # [B, HV, K or 1]
            S = decay[:, None, ..., None] * S
        write = k[:, t]
        if beta is not None:
            write = beta[:, t, :, None] * write
            recalled = torch.einsum("blhkv,bhk->blhv", S, k[:, t])
            S = S - torch.einsum("bhk,blhv->blhkv", write, recalled)
        # levels 0 to L
        S = torch.cat([torch.einsum("bhk,bhv->bhkv", write, v[:, t])[:, None], S], dim=1)
        outputs.append(torch.einsum("bhl,blhkv,bhk->bhv", level_weights[:, t], S, q[:, t]))
        after = n + (1 if counted is None else counted[:, t])
        S = _joined(S, level_between(after, n, S.shape[1] - 1))
        n = after
    return scale * torch.stack(outputs, dim=1), LogLinearState(S, n)


def _joined(S: Tensor, level: Tensor) -> Tensor:
    """Merge all levels up to `level` [B] into it, like the carry of a binary counter; padding merges nothing."""
    level = level.view(-1, *(1 for _ in S.shape[1:]))
    levels = torch.arange(S.shape[1], device=S.device).view(1, -1, *(1 for _ in S.shape[2:]))
    joined = S.where(levels <= level, 0).sum(1, keepdim=True)
    return torch.where(levels == level, joined, S.where(levels > level, 0))[:, 1:]


def example(*, decay: str = "none", delta: bool = False, levels: int = 8, **sizes: Any) -> dict:
    """Valid random arguments; `decay` is "none", "scalar" or "vector", with `delta` there is a beta.

    `sizes` are arguments of `Sample`.
    """
    s = Sample(**sizes)
    rows = {"q": s(s.H, s.K), "k": s.unit(s.H, s.K), "v": s(s.HV, s.V)}
    level_weights = F.softplus(s(s.HV, levels + 1))
    beta = 2 * s(s.HV).sigmoid() if delta else None
    g = s.decay(decay)
    tokens_read = 13 - 7 * torch.arange(s.B) % 16  # another number for each row
    state = LogLinearState(s.normal(s.B, levels, s.HV, s.K, s.V), tokens_read)
    return s.arguments(rows, level_weights=level_weights, beta=beta, g=g, initial_state=state)
