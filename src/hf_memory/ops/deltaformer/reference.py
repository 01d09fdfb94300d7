"""The definition of DeltaFormer, one token at a time. Every other backend is tested against it."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.ops.deltaformer.weights import DeltaFormerState, Rule, weights
from hf_memory.ops.masks import seen
from hf_memory.ops.precision import in_float32
from hf_memory.ops.sample import Sample


@in_float32
def corrected_values(
    k: Tensor, v: Tensor, a: Tensor, beta: Tensor, past: DeltaFormerState, rule: Rule
) -> tuple[Tensor, tuple]:
    """u_t = a_t v_t - beta_t sum_{i<t} kernel(k_i, k_t) u_i; all heads repeated to those of v."""
    S = past.u.shape[1]
    T = v.shape[1]
    sees = seen(rule.mask, rule.columns.of(slice(S, S + T)), rule.columns)  # [B, 1, T, S + T]
    keys = torch.cat([past.k, k], 1)
    u = past.u
    for t in range(T):
        scores = rule.scale * torch.einsum("bhk,bshk->bhs", k[:, t], keys[:, : S + t])
        p = weights(scores, sees[:, :, t, : S + t], rule.kernel)
        recalled = torch.einsum("bhs,bshv->bhv", p, u)
        u_t = a[:, t, :, None] * v[:, t] - beta[:, t, :, None] * recalled
        u = torch.cat([u, u_t[:, None]], 1)
    return u[:, S:], ()


@in_float32
def read(q: Tensor, k: Tensor, u: Tensor, rule: Rule) -> tuple[Tensor, tuple]:
    """o_t = sum_{i<=t} kernel(k_i, q_t) u_i, over S past and T present tokens; all heads repeated to those of q."""
    queries = rule.columns.of(slice(k.shape[1] - q.shape[1], k.shape[1]))
    sees = seen(rule.mask, queries, rule.columns)
    p = weights(rule.scale * torch.einsum("bthk,bshk->bhts", q, k), sees, rule.kernel)
    return torch.einsum("bhts,bshv->bthv", p, u), ()


def example(
    *,
    write_kernel: str = "softmax",
    read_kernel: str = "softmax",
    beta_mode: str = "erase",
    **sizes: Any,
) -> dict:
    """Valid random arguments, with a state of three tokens; `sizes` are arguments of `Sample`."""
    s = Sample(**sizes)
    rows = {"q": 3 * s.unit(s.H, s.K), "k": s.unit(s.H, s.K), "v": s(s.HV, s.V)}
    beta = s(s.HV).sigmoid()
    past_k = F.normalize(s.normal(s.B, 3, s.H, s.K), dim=-1)
    return s.arguments(
        rows,
        beta=None if beta_mode == "none" else beta,
        mask=torch.ones(s.B, s.T, dtype=torch.bool),
        initial_state=(past_k, s.normal(s.B, 3, s.HV, s.V)),
        write_kernel=write_kernel,
        read_kernel=read_kernel,
        beta_mode=beta_mode,
    )
