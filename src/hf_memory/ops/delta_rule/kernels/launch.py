"""The delta rule in Triton: a kernel for all chunks in parallel, then a kernel that loops over the chunks.

Forward, with the letters of chunk.py; A' are the products of keys, E the errors v - S^T k that each token finds:

    U = (I + A' diag(beta))^-1,   E = U (V - (K e^b) S),   X = diag(beta) E
    O = (Q e^b) S + P X,   S <- e^(b_C) S + (K e^(b_C - b))^T X

Backward, with W = (I + diag(beta) A')^-1, a kernel loops backwards and computes the gradient of X,
D = W^T (scale P^T dO + (K e^(b_C - b)) dS). Then dV = diag(beta) D and dbeta = rowsum(D E). The remaining gradients are
those of an additive memory that is read by k (with gradient -dV) and by q (with gradient dO), and to which E is written
at k with weights beta, as ops/triton/gradients.py computes them.

Segments (ops/triton/segments.py) are processed twice. The first time gives no outputs, only the state from an empty
memory, and the state from the identity with v = 0, which is the segment's transition matrix. Its transpose is the
transition of gradients.
"""

from collections.abc import Callable, Sequence

import torch
import triton
from torch import Tensor

from hf_memory.ops.delta_rule.kernels.backward import solve_kernel
from hf_memory.ops.delta_rule.kernels.forward import Matrices, chunk_kernel, forward_kernel
from hf_memory.ops.triton.arguments import Call, Outputs, Rows, States
from hf_memory.ops.triton.gradients import query_and_key_gradients
from hf_memory.ops.triton.launch import (
    Constants,
    contiguous,
    decay_kind,
    delta_constants,
    launcher,
    or_empty,
)
from hf_memory.ops.triton.segments import (
    boundary_states_of,
    cut,
    number_of_segments,
    segment_length,
    tokens_of_sequences,
)

Walk = Callable[..., None]


def _constants_of(q: Tensor, V: int, HV: int, g: Tensor | None) -> tuple[Constants, Constants]:
    return delta_constants(q.shape[2], HV, q.shape[3], V, decay_kind(g), q.dtype)


def _matrices(rows: Rows, cu_seqlens: Tensor | None, *, backward: bool) -> Matrices:
    """P and U of every chunk, or P and W for the backward."""
    q = rows.q
    B, T, HV = rows.beta.shape
    (meta, options), _ = _constants_of(q, 1, HV, rows.g)
    P, inverse = (q.new_empty(B, T, HV, meta.C, dtype=dtype) for dtype in (q.dtype, torch.float32))
    matrices = Matrices(P, W=inverse) if backward else Matrices(P, U=inverse)
    bounds, chunks = chunks_of(q, cu_seqlens, meta.C)
    launcher(chunk_kernel, (chunks * HV,))(
        rows._replace(v=None), matrices, Call(bounds, T), meta=meta, **options
    )
    return matrices


def chunks_of(q: Tensor, cu_seqlens: Tensor | None, C: int) -> tuple[Tensor | None, int]:
    """The bounds of chunks of packed sequences, and the number of chunks."""
    B, T = q.shape[:2]
    bounds = None
    if cu_seqlens is not None:
        bounds = cut(cu_seqlens, B, T, C, q).bounds
    return bounds, B * triton.cdiv(T, C) if bounds is None else bounds.shape[0] - 1


def forward_by_segments(
    walk: Walk, q: Tensor, v: Tensor, S: Tensor, cu_seqlens: Tensor | None, segment: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o, the final state, errors, and before each segment the state and of each the transition; empty without.

    Args:
        walk: launches the forward kernel with v, S0, o, e, ST and the bounds of sequences, and writes to o, e and ST;
            what is None is left out.
        q: [B, T, H, K].
        v: [B, T, HV, V].
        S: [N, HV, K, V], the first states.
        cu_seqlens: [N + 1] or None.
        segment: tokens of a segment, 0 for none.
    """
    B, T = q.shape[:2]
    o = torch.empty_like(v)
    e = torch.empty_like(v)
    if not segment:
        walk(v, S, o, e, ST := torch.empty_like(S), cu_seqlens)
        return or_empty(S, o, ST, e, None, None)
    segments = cut(cu_seqlens, B, T, segment, q)
    _, HV, K, V = S.shape
    own, transition = (S.new_empty(segments.number, HV, K, x) for x in (V, K))
    for values, after in ((v, own), (None, transition)):
        walk(values, None, None, None, after, segments.bounds)
    before, ST = boundary_states_of(transition, own, S, segments)
    walk(v, before, o, e, None, segments.bounds)
    return o, ST, e, before, transition


def fake_forward(
    q: Tensor, v: Tensor, S: Tensor, cu_seqlens: Tensor | None, segment: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Empty results of `forward_by_segments`."""
    N, HV, K, V = S.shape
    states = None
    transition = None
    if segment:
        M = number_of_segments(q, cu_seqlens, N, segment)
        states = S.new_empty(M, HV, K, V)
        transition = S.new_empty(M, HV, K, K)
    return or_empty(
        S, v.new_empty(v.shape), S.new_empty(S.shape), v.new_empty(v.shape), states, transition
    )


@torch.library.custom_op("hf_memory::delta_rule", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    S: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
    segment: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o, the final state, errors, and before each segment the state and of each the transition; empty without."""
    q, k, v, beta, g, S = contiguous(q, k, v, beta, g, S)
    rows = Rows(q, k, v, beta, g)
    matrices = _matrices(rows, cu_seqlens, backward=False)

    def walk(v, S0, o, e, ST, bounds):
        state = S0 if ST is None else ST
        M, HV, _, V = state.shape
        _, (meta, options) = _constants_of(q, V, HV, g)
        call = Call(bounds, tokens_of_sequences(q, state), scale)
        given = rows._replace(v=v), matrices._replace(P=None if o is None else matrices.P)
        launcher(forward_kernel, (M * HV * triton.cdiv(V, meta.BV),))(
            *given, States(S0, ST), Outputs(o, e=e), call, meta=meta, **options
        )

    return forward_by_segments(walk, q, v, S, cu_seqlens, segment)


@_forward.register_fake
def _(q, k, v, beta, g, S, cu_seqlens, scale, segment):
    return fake_forward(q, v, S, cu_seqlens, segment)


@torch.library.custom_op("hf_memory::delta_rule_backward", mutates_args=())
def _backward(
    rows: Sequence[Tensor | None],
    states: Sequence[Tensor | None],
    gradients: Sequence[Tensor | None],
    cu_seqlens: Tensor | None,
    scale: float,
    segment: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dbeta, dg (empty without g) and dS0.

    `rows` are q, k, the errors, beta and g, `states` those before each segment and the transitions or None, `gradients`
    those of o and of the final state.
    """
    q, k, e, beta, g = contiguous(*rows)
    S, transition = contiguous(*states)
    do, dST = contiguous(*gradients)
    B, T = q.shape[:2]
    HV, V = e.shape[2:]
    _, (meta, options) = _constants_of(q, V, HV, g)
    given = Rows(q, k, e, beta, g)
    d_out = Outputs(do)
    tiles = triton.cdiv(V, meta.BV)
    matrices = _matrices(given, cu_seqlens, backward=True)
    segments = cut(cu_seqlens, B, T, segment, q) if segment else None
    cu_seqlens = cu_seqlens if segments is None else segments.bounds
    call = Call(cu_seqlens, tokens_of_sequences(q, S), scale, B * T)
    dv = torch.empty_like(e)
    dbeta = S.new_empty(tiles, B, T, HV)
    dS0 = torch.empty_like(S)

    def solve(rows, d_rows, d_states):
        launcher(solve_kernel, (S.shape[0] * HV * tiles,))(
            rows, matrices, d_out, d_rows, d_states, call, meta=meta, **options
        )

    if segments is not None and transition is not None:
        solve(given._replace(v=None), Rows(), States(dS0))
        dST = segments.of_sequences(dST, S)
        dST, dS0 = boundary_states_of(transition, dS0, dST, segments, backwards=True)
    solve(given, Rows(v=dv, beta=dbeta), States(None if segments else dS0, dST))
    dq, dk, dg, _ = query_and_key_gradients(
        given, States(S), Outputs(do, e=dv), States(ST=dST), call
    )
    return or_empty(S, dq, dk, dv, dbeta.sum(0), dg, dS0)


@_backward.register_fake
def _(rows, states, gradients, cu_seqlens, scale, segment):
    q, k, e, beta, g = rows
    S, _ = states
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dq, dk, dv = (q.new_empty(x.shape) for x in (q, k, e))
    dbeta, dg = (None if x is None else S.new_empty(x.shape) for x in (beta, g))
    return or_empty(S, dq, dk, dv, dbeta, dg, S.new_empty(N, *S.shape[1:]))


def _save(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    q, k, _, beta, g, S, cu_seqlens, ctx.scale, ctx.segment = inputs
    _, _, e, states, transition = output
    S, transition = (states, transition) if ctx.segment else (S, None)
    ctx.save_for_backward(q, k, e, beta, g, S, transition, cu_seqlens)


def _gradients(ctx, do, dST, *_):
    *rows, S, transition, cu_seqlens = ctx.saved_tensors
    _, _, e, beta, g = rows
    gradients = torch.zeros_like(e) if do is None else do, dST
    dq, dk, dv, dbeta, dg, dS0 = _backward(
        rows, (S, transition), gradients, cu_seqlens, ctx.scale, ctx.segment
    )
    return (
        dq,
        dk,
        dv,
        dbeta.to(beta.dtype),
        None if g is None else dg.to(g.dtype),
        dS0,
        None,
        None,
        None,
    )


_forward.register_autograd(_gradients, setup_context=_save)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    state: Tensor,
    scale: float,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Same function as the reference, for K and V up to 256."""
    HV, V = v.shape[2:]
    programs = HV * triton.cdiv(V, _constants_of(q, V, HV, g)[1].meta.BV)
    segment = segment_length(q, state.shape[0], programs)
    return _forward(q, k, v, beta, g, state, cu_seqlens, scale, segment)[:2]
