"""The delta rule for one token in a few PyTorch calls, for decoding without kernels."""

import torch
from torch import Tensor

from hf_memory.ops.chunks import add_product, head_rows
from hf_memory.ops.contract import in_float32


@in_float32
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    *,
    initial_state: Tensor,
    scale: float,
    in_place: bool,
) -> tuple[Tensor, Tensor]:
    """Same function as the reference for T = 1; with `in_place` the initial state is overwritten and returned."""
    B, HV = v.shape[0], v.shape[2]
    q, k, v = (head_rows(x, HV) for x in (q, k, v))  # [B * HV, 1, D], q as many rows as read it
    decay = None if g is None else g.exp().reshape(B * HV, -1, 1)  # of each key channel, or of all
    S = initial_state.flatten(0, 1)
    error = torch.baddbmm(v, k if decay is None else k * decay.mT, S, alpha=-1)
    S = add_product(S, k.mT, beta.reshape(-1, 1, 1) * error, decay, in_place=in_place)
    o = scale * torch.bmm(q, S)
    return o.view(B, 1, -1, S.shape[-1]), initial_state if in_place else S.view_as(initial_state)


@in_float32
def diagonal_plus_rank_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    initial_state: Tensor,
    scale: float,
    in_place: bool,
) -> tuple[Tensor, Tensor]:
    """The same for the form with a and b."""
    B, HV = v.shape[0], v.shape[2]
    q, k, v, a, b = (head_rows(x, HV) for x in (q, k, beta[..., None] * v, a, b))  # [B * HV, 1, D]
    S = initial_state.flatten(0, 1)
    keys, values = torch.cat([b, k], 1), torch.cat([torch.bmm(a, S), v], 1)
    S = add_product(S, keys.mT, values, g.exp().reshape(B * HV, -1, 1), in_place=in_place)
    o = scale * torch.bmm(q, S)
    return o.view(B, 1, -1, S.shape[-1]), initial_state if in_place else S.view_as(initial_state)
