"""The delta rule with a and b in Triton, in the same way as in launch.py. V are values times beta here.

Forward, with the letters of chunk.py; the matrices of a chunk are P and R, decayed products of q with k and with b, and

    U = (I - A_ab)^-1,   W = U A_ak,   E = W V + U (A e^b') S
    O = (Q e^b) S + P V + R E,   S <- e^(b_C) S + (K e^(b_C - b))^T V + (B e^(b_C - b))^T E

Backward, a kernel loops backwards, where a and b, and q and k, have exchanged roles. With X the gradient of what is
written at b, from outputs of the chunk and from all later chunks:

    X = R^T dO + (B e^(b_C - b)) dS,   dE = U^T X,   dV = P^T dO + (K e^(b_C - b)) dS + W^T X
    dS <- e^(b_C) dS + (Q e^b)^T dO + (A e^b')^T dE

The remaining gradients are those of an additive memory: for each token it is read by a (with gradient dE), decays, E is
written at b and V at k, and it is read by q (with gradient dO); see rank_one_gradients.py.

Beside the kernels of launch.py, which compute the same where a = -e^g k and b = beta k: not timed.
"""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from hf_memory.ops.delta_rule.kernels.launch import (
    chunks_of,
    fake_forward,
    forward_by_segments,
)
from hf_memory.ops.delta_rule.kernels.rank_one import (
    Matrices,
    rank_one_backward_kernel,
    rank_one_chunk_kernel,
    rank_one_forward_kernel,
)
from hf_memory.ops.delta_rule.kernels.rank_one_gradients import Pairs, row_gradients
from hf_memory.ops.layout import repeat_heads
from hf_memory.ops.triton.arguments import Call, Outputs, Rows, States
from hf_memory.ops.triton.launch import (
    VECTOR,
    Constants,
    contiguous,
    delta_constants,
    launcher,
    rank_one_constants,
)
from hf_memory.ops.triton.segments import (
    boundary_states_of,
    cut,
    segment_length,
    tokens_of_sequences,
)


def _walk_constants(HV: int, K: int, V: int, dtype: torch.dtype) -> Constants:
    """How the kernels that loop over chunks are compiled and launched."""
    return delta_constants(HV, HV, K, V, VECTOR, dtype)[1]


def _matrices(rows: Rows, cu_seqlens: Tensor | None) -> Matrices:
    """[P, R] and [W, U] of every chunk."""
    B, T, HV, K = rows.q.shape
    (meta, options), _ = rank_one_constants(HV, K, 1, rows.q.dtype)
    matrices = Matrices(
        *(rows.q.new_empty(B, T, HV, 2 * meta.C, dtype=x) for x in (rows.q.dtype, torch.float32))
    )
    bounds, chunks = chunks_of(rows.q, cu_seqlens, meta.C)
    launcher(rank_one_chunk_kernel, (chunks * HV,))(
        rows._replace(v=None), matrices, Call(bounds, T), meta=meta, **options
    )
    return matrices


def _walk(kernel, rows: Rows, given: tuple, state: Tensor, call: Call) -> None:
    """Launch the kernel of one direction, which has `given` besides rows, for states of the shape of `state`."""
    M, HV, K, V = state.shape
    meta, options = _walk_constants(HV, K, V, rows.q.dtype)
    launcher(kernel, (M * HV * triton.cdiv(V, meta.BV),))(rows, *given, call, meta=meta, **options)


@torch.library.custom_op("hf_memory::diagonal_plus_rank_one", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    a: Tensor,
    b: Tensor,
    S: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
    segment: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o, the final state, E, and the state before and the transition of each segment; empty without segments."""
    q, k, v, g, a, b, S = contiguous(q, k, v, g, a, b, S)
    rows = Rows(q, k, v, g=g, a=a, b=b)
    matrices = _matrices(rows, cu_seqlens)

    def walk(v, S0, o, e, ST, bounds):
        state = S0 if ST is None else ST
        call = Call(bounds, tokens_of_sequences(q, state), scale)
        given = (matrices, States(S0, ST), Outputs(o, e=e))
        _walk(rank_one_forward_kernel, rows._replace(v=v), given, state, call)

    return forward_by_segments(walk, q, v, S, cu_seqlens, segment)


@_forward.register_fake
def _(q, k, v, g, a, b, S, cu_seqlens, scale, segment):
    return fake_forward(q, v, S, cu_seqlens, segment)


@torch.library.custom_op("hf_memory::diagonal_plus_rank_one_backward", mutates_args=())
def _backward(
    rows: Sequence[Tensor],
    states: Sequence[Tensor | None],
    gradients: Sequence[Tensor | None],
    cu_seqlens: Tensor | None,
    scale: float,
    segment: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dg, da, db and dS0.

    `rows` are q, k, v, g, a, b and E, `states` those before each segment and the transitions or None, `gradients` those
    of o and of the final state.
    """
    q, k, v, g, a, b, e = contiguous(*rows)
    S, transition = contiguous(*states)
    do, dST = contiguous(*gradients)
    read = Rows(q, k, g=g, a=a, b=b)
    B, T = q.shape[:2]
    matrices = _matrices(read, cu_seqlens)
    segments = cut(cu_seqlens, B, T, segment, q) if segment else None
    cu_seqlens = cu_seqlens if segments is None else segments.bounds
    call = Call(cu_seqlens, tokens_of_sequences(q, S), scale)
    de = torch.empty_like(do)
    dv = torch.empty_like(do)
    dS0 = torch.empty_like(S)

    def walk(d_states, de, dv):
        _walk(rank_one_backward_kernel, read, (matrices, d_states, Outputs(do, e=de), dv), S, call)

    if segments is not None and transition is not None:
        walk(States(dS0), None, None)
        dST = segments.of_sequences(dST, S)
        dST, dS0 = boundary_states_of(transition, dS0, dST, segments, backwards=True)
    walk(States(None if segments else dS0, dST), de, dv)
    d_rows = row_gradients(Pairs(q, a, k, b, v, e, do, de, g), S, dST, call)
    return d_rows.q, d_rows.k, dv, d_rows.g, d_rows.a, d_rows.b, dS0


@_backward.register_fake
def _(rows, states, gradients, cu_seqlens, scale, segment):
    q, *others, _ = rows
    S, _ = states
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dq, dk, dv, dg, da, db = (
        like.new_empty(x.shape) for like, x in zip((q, q, q, S, q, q), (q, *others))
    )
    return dq, dk, dv, dg, da, db, S.new_empty(N, *S.shape[1:])


def _save(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    q, k, v, g, a, b, S, cu_seqlens, ctx.scale, ctx.segment = inputs
    _, _, e, states, transition = output
    S, transition = (states, transition) if ctx.segment else (S, None)
    ctx.save_for_backward(q, k, v, g, a, b, e, S, transition, cu_seqlens)


def _gradients(ctx, do, dST, *_):
    *rows, S, transition, cu_seqlens = ctx.saved_tensors
    gradients = torch.zeros_like(rows[-1]) if do is None else do, dST
    dq, dk, dv, dg, *others = _backward(
        rows, (S, transition), gradients, cu_seqlens, ctx.scale, ctx.segment
    )
    return dq, dk, dv, dg.to(rows[3].dtype), *others, None, None, None


_forward.register_autograd(_gradients, setup_context=_save)


def diagonal_plus_rank_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor,
    scale: float,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Same function as the reference, for K and V up to 256."""
    HV, V = v.shape[2:]
    q = repeat_heads(q, HV)
    k = repeat_heads(k, HV)
    v = (beta[..., None] * v).to(v.dtype)
    programs = HV * triton.cdiv(V, _walk_constants(HV, q.shape[3], V, q.dtype).meta.BV)
    segment = segment_length(q, state.shape[0], programs)
    return _forward(q, k, v, g, a.to(q.dtype), b.to(q.dtype), state, cu_seqlens, scale, segment)[:2]
