"""The selective scan in PyTorch, a chunk of tokens at a time: the CPU path.

Since every number of the state has its own decay, a chunk cannot be written as matrix products. So decays, writes and
reads of all tokens of a chunk are computed at once, but its states one after the other, with a multiplication and an
addition each. Nothing is divided by a decay, and the work is linear in T. Only the states between chunks are saved. The
backward pass recomputes the others and goes through them from the end, where dS_t is the gradient of S_t:

    dS_t = q_t do_t^T + e^(rate g_{t+1}) dS_{t+1},   E_t = dS_t e^(rate g_t) S_{t-1}
    dq_t = S_t do_t,   dk_t = dS_t v_t,   dv_t = dS_t^T k_t,   dg_t = sum_k rate E_t,   drate = sum_t g_t E_t
"""

import torch
from torch import Tensor

from hf_memory.ops.autograd import first_derivatives_only
from hf_memory.ops.layout import repeat_heads
from hf_memory.ops.precision import in_float32

CHUNK = 32


@in_float32
def selective_scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, initial_state: Tensor, rate: Tensor
) -> tuple[Tensor, Tensor]:
    """Same function as the reference."""
    q = repeat_heads(q, v.shape[2])
    k = repeat_heads(k, v.shape[2])
    o, S = _Scan.apply(*(x.transpose(0, 1).contiguous() for x in (q, k, v, g)), rate, initial_state)
    return o.transpose(0, 1), S


class _Scan(torch.autograd.Function):
    """The scan, with tokens in the first dimension: q and k [T, B, H, K], v and g [T, B, H, V]."""

    @staticmethod
    def forward(ctx, q, k, v, g, rate, S):
        outputs = []
        before = []
        for q_n, *write in zip(*(x.split(CHUNK) for x in (q, k, v, g))):
            before.append(S)
            _, states = _walk(S, *write, rate)
            outputs.append(_times(states.mT, q_n))
            S = states[-1].clone()  # a view would keep all states of the chunk in memory
        ctx.save_for_backward(q, k, v, g, rate, torch.stack(before))
        return torch.cat(outputs), S

    @staticmethod
    @first_derivatives_only
    def backward(ctx, do, dS):
        q, k, v, g, rate, before = ctx.saved_tensors
        chunks = [x.split(CHUNK) for x in (q, k, v, g, do)]
        drate = torch.zeros_like(rate)
        gradients = []
        for S, q_n, k_n, v_n, g_n, do_n in reversed(list(zip(before, *chunks))):
            decay, states = _walk(S, k_n, v_n, g_n, rate)
            dstates = _walk_back(dS, q_n, do_n, decay)
            dS = decay[0] * dstates[0]
            dq = _times(states, do_n)
            dk = _times(dstates, v_n)
            dv = _times(dstates.mT, k_n)
            E = decay.mul_(dstates)
            E[1:].mul_(states[:-1])
            E[0].mul_(S)
            gradients.append((dq, dk, dv, (E * rate).sum(-2)))
            drate += E.mul_(g_n[..., None, :]).sum((0, 1))
        return *(torch.cat(parts) for parts in zip(*reversed(gradients))), drate, dS


def _walk(S: Tensor, k: Tensor, v: Tensor, g: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
    """The decay before each token of a chunk and the state after it, [C, B, H, K, V] each."""
    decay = (rate * g[..., None, :]).exp_()
    states = k[..., None] * v[..., None, :]
    if torch.compiler.is_exporting():
        return decay, _walked(S, decay, states)
    for decay_t, state in zip(decay.unbind(), states.unbind()):
        S = state.addcmul_(decay_t, S)
    return decay, states


def _walked(S: Tensor, decay: Tensor, writes: Tensor) -> Tensor:
    """The states [C, B, H, K, V]. Writing into parts of a tensor fixes the number of rows of an exported graph."""
    states = []
    for decay_t, write in zip(decay.unbind(), writes.unbind()):
        S = torch.addcmul(write, decay_t, S)
        states.append(S)
    return torch.stack(states)


def _times(matrices: Tensor, x: Tensor) -> Tensor:
    return (matrices @ x[..., None])[..., 0]


def _walk_back(dS: Tensor, q: Tensor, do: Tensor, decay: Tensor) -> Tensor:
    """The gradients [C, B, H, K, V] of the states of a chunk, given that of the last state, `dS`, by later chunks."""
    dstates = q[..., None] * do[..., None, :]
    last = dstates[-1].add_(dS)
    for state, decay_after in zip(reversed(dstates[:-1].unbind()), reversed(decay[1:].unbind())):
        last = state.addcmul_(decay_after, last)
    return dstates
