"""The delta rule for one token in a few PyTorch calls, for decoding without kernels."""

import torch
from torch import Tensor

from hf_memory.ops.chunks import add_product, head_rows
from hf_memory.ops.precision import in_float32


@in_float32
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    a: Tensor | None = None,
    b: Tensor | None = None,
    *,
    initial_state: Tensor,
    scale: float,
    in_place: bool,
) -> tuple[Tensor, Tensor]:
    """Same function as the reference for T = 1; with `in_place` the initial state is overwritten and returned."""
    B = v.shape[0]
    HV = v.shape[2]
    q, k, v = (head_rows(x, HV) for x in (q, k, v))  # [B * HV, 1, D], q as many rows as read it
    decay = None if g is None else g.exp().reshape(B * HV, -1, 1)  # of each key channel, or of all
    S = initial_state.flatten(0, 1)
    beta = beta.reshape(-1, 1, 1)
    if a is None or b is None:
        values = beta * torch.baddbmm(v, k if decay is None else k * decay.mT, S, alpha=-1)
    else:
        k = torch.cat([head_rows(b, HV), k], 1)
        values = torch.cat([torch.bmm(head_rows(a, HV), S), beta * v], 1)
    S = add_product(S, k.mT, values, decay, in_place=in_place)
    o = scale * torch.bmm(q, S)
    return o.view(B, 1, -1, S.shape[-1]), initial_state if in_place else S.view_as(initial_state)
