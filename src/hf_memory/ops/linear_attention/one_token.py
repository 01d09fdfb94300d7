"""Linear attention for one token in a few PyTorch calls, for decoding without kernels."""

import torch
from torch import Tensor

from hf_memory.ops.chunks import add_product, head_rows
from hf_memory.ops.linear_attention.reference import EPS, LinearState
from hf_memory.ops.precision import in_float32


@in_float32
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    *,
    initial_state: Tensor | LinearState,
    scale: float,
    in_place: bool,
) -> tuple[Tensor, Tensor | LinearState]:
    """Same function as the reference for T = 1; with `in_place` the initial state is overwritten and returned."""
    B = v.shape[0]
    HV = v.shape[2]
    q, k, v = (head_rows(x, HV) for x in (q, k, v))  # [B * HV, 1, D], q as many rows as read it
    decay = None if g is None else g.exp().reshape(B * HV, -1, 1)  # of each key channel, or of all
    if not isinstance(initial_state, LinearState):
        S = add_product(initial_state.flatten(0, 1), k.mT, v, decay, in_place=in_place)
        o = scale * torch.bmm(q, S)
        return o.view(B, 1, -1, S.shape[-1]), initial_state if in_place else S.view_as(
            initial_state
        )
    memory, normalizer = initial_state
    S = add_product(memory.flatten(0, 1), k.mT, v, decay, in_place=in_place)
    z = normalizer.flatten(0, 1)[..., None]  # [B * HV, K, 1]
    out = z if in_place else None
    z = torch.add(z, k.mT, out=out) if decay is None else torch.addcmul(k.mT, z, decay, out=out)
    o = torch.bmm(q, S) / (torch.bmm(q, z) + EPS)
    state = initial_state if in_place else LinearState(S.view_as(memory), z.view_as(normalizer))
    return o.view(B, 1, -1, S.shape[-1]), state
