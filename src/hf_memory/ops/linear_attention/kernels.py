"""Linear attention in Triton: programs walk a sequence chunk by chunk with a tile of the state in registers.

The letters are those of ops/inputs.py; b is the sum of g from the start of the chunk; no exponent is positive:

    O = (Q e^b) S + A V,   A_ij = sum_d q_id k_jd e^(b_id - b_jd) for i >= j;   S <- e^(b_C) S + (K e^(b_C - b))^T V

Backward, with dS the gradient of the state after the chunk, and dQ, dK and dg as in ops/triton/gradients.py:

    dV = (K e^(b_C - b)) dS + scale A^T dO    walked backwards, a tile of value channels at a time

The normaliser is one more value channel, whose values are one: z is its part of S, and dd its part of dO.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_memory.ops.linear_attention.reference import EPS, LinearState
from hf_memory.ops.triton.arguments import Call, Outputs, Rows, States
from hf_memory.ops.triton.gradients import query_and_key_gradients
from hf_memory.ops.triton.launch import (
    SCALAR,
    Constants,
    additive_constants,
    contiguous,
    decay_kind,
    launcher,
    or_empty,
)
from hf_memory.ops.triton.segments import (
    boundary_states,
    cut,
    number_of_segments,
    segment_length,
    tokens_of_sequences,
)
from hf_memory.ops.triton.tiles import (
    channels,
    decays,
    load_rows,
    load_state,
    normalizer_tile,
    program,
    read,
    scores,
    sequence_bounds,
    state_tile,
    store_numbers,
    store_rows,
    write,
)

LEAST = tl.constexpr(EPS)  # is added to denominators


@triton.jit
def _forward_kernel(
    rows,  # Rows
    states,  # States
    out,  # Outputs
    call,  # Call
    meta: tl.constexpr,
):
    """Holds S [BK, BV] for all key channels and the i-th tile of value channels."""
    n, head, key_head, tile = program(meta.V, meta.BV, meta)
    keys = channels(0, meta.BK, meta.K)
    values = channels(tile, meta.BV, meta.V)
    start, end = sequence_bounds(call, n)
    i_s, in_s = state_tile(n, head, keys, values)
    S = tl.load(states.S0 + i_s, mask=in_s, other=0.0)
    if meta.NORMALIZE:
        i_z, in_z = normalizer_tile(n, head, keys)
        z = tl.load(states.z0 + i_z, mask=in_z, other=0.0)
    for first in range(start, end, meta.C):
        t = tl.cast(first, tl.int64) + tl.arange(0, meta.C)
        tokens = (t, t < end)
        q_c = load_rows(rows.q, tokens, key_head, keys)
        k_c = load_rows(rows.k, tokens, key_head, keys)
        v_c = load_rows(rows.v, tokens, head, values)
        gates = 0.0
        enter = 1.0
        leave = 1.0
        whole = 1.0
        if meta.DECAY > 0:
            gates, enter, leave, whole = decays(rows.g, t, end, head, keys, meta.DECAY)
        if meta.NORMALIZE:
            den_c = tl.sum(tl.cast(q_c, tl.float32) * enter * z[None, :], axis=1)
            if meta.DECAY > 0:
                z *= tl.sum(whole, axis=0)
            z += tl.sum(tl.cast(k_c, tl.float32) * leave, axis=0)
        A = scores(q_c, k_c, gates, False, meta)
        o_c = read(q_c, S, enter, meta)
        o_c += tl.dot(tl.cast(A, v_c.dtype), v_c, input_precision=meta.PRECISION)
        if meta.NORMALIZE:
            den_c += tl.sum(A, axis=1) + LEAST
            o_c /= den_c[:, None]
            if tile == 0:
                store_numbers(out.den, den_c, tokens, head)
        else:
            o_c *= call.scale
        store_rows(out.o, o_c, tokens, head, values)
        if meta.DECAY > 0:
            S *= tl.trans(whole)
        S += write(k_c, v_c, leave, meta)
    if states.ST is not None:
        tl.store(states.ST + i_s, S, mask=in_s)
        if meta.NORMALIZE:  # noqa: SIM102  (one is known at compile time, the other is not)
            if tile == 0:
                tl.store(states.zT + i_z, z, mask=in_z)


@triton.jit
def _dv_kernel(
    rows,  # Rows, without v
    d_out,  # Outputs
    d_states,  # States: those after are given, those before are computed
    dv,  # [B, T, HV, V]
    call,  # Call
    meta: tl.constexpr,
):
    """Holds dS [BK, BV] for all key channels and the i-th tile of value channels."""
    n, head, key_head, tile = program(meta.V, meta.BV, meta)
    keys = channels(0, meta.BK, meta.K)
    values = channels(tile, meta.BV, meta.V)
    start, end = sequence_bounds(call, n)
    i_s, in_s = state_tile(n, head, keys, values)
    dS = load_state(d_states.ST, i_s, in_s)
    chunks = (end - start + meta.C - 1) // meta.C
    for back in range(chunks):
        t = start + (chunks - 1 - tl.cast(back, tl.int64)) * meta.C + tl.arange(0, meta.C)
        tokens = (t, t < end)
        q_c = load_rows(rows.q, tokens, key_head, keys)
        k_c = load_rows(rows.k, tokens, key_head, keys)
        do_c = load_rows(d_out.o, tokens, head, values)
        gates = 0.0
        enter = 1.0
        leave = 1.0
        whole = 1.0
        if meta.DECAY > 0:
            gates, enter, leave, whole = decays(rows.g, t, end, head, keys, meta.DECAY)
        A = call.scale * scores(q_c, k_c, gates, True, meta)
        dv_c = read(k_c, dS, leave, meta)
        dv_c += tl.dot(tl.cast(A, do_c.dtype), do_c, input_precision=meta.PRECISION)
        store_rows(dv, dv_c, tokens, head, values)
        if meta.DECAY > 0:
            dS *= tl.trans(whole)
        dS += call.scale * write(q_c, do_c, enter, meta)
    if d_states.S0 is not None:
        tl.store(d_states.S0 + i_s, dS, mask=in_s)


def _constants_of(q: Tensor, v: Tensor, g: Tensor | None) -> Constants:
    return additive_constants(
        q.shape[2], v.shape[2], q.shape[3], v.shape[3], decay_kind(g), q.dtype
    )[0]


@torch.library.custom_op("hf_memory::linear_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    S: Tensor,
    z: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    segment: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o, the final S and z, the denominators, and S and z before each segment; absent ones are empty tensors."""
    q, k, v, g, S, z = contiguous(q, k, v, g, S, z)
    B, T = q.shape[:2]
    HV, V = v.shape[2:]
    rows = Rows(q, k, v, g=g)
    meta, options = _constants_of(q, v, g)
    segments = cut(cu_seqlens, B, T, segment, q) if segment else None
    if segments is not None:
        (S, z), after = boundary_states(segments, rows, S, z)
        cu_seqlens = segments.bounds
    o = torch.empty_like(v)
    den = None if z is None else S.new_empty(B, T, HV)
    ST, zT = (None if x is None or segments else torch.empty_like(x) for x in (S, z))
    meta = meta._replace(NORMALIZE=z is not None)
    call = Call(cu_seqlens, tokens_of_sequences(q, S), scale)
    launcher(_forward_kernel, (S.shape[0] * HV * triton.cdiv(V, meta.BV),))(
        rows, States(S, ST, z, zT), Outputs(o, den), call, meta=meta, **options
    )
    if segments is None:
        return or_empty(S, o, ST, zT, den, None, None)
    return or_empty(S, o, *after, den, S, z)


@_forward.register_fake
def _(q, k, v, g, S, z, cu_seqlens, scale, segment):
    M = number_of_segments(q, cu_seqlens, S.shape[0], segment) if segment else 0
    den = None if z is None else S.new_empty(v.shape[:3])
    zT, normalizers = (
        (None, None) if z is None else (z.new_empty(z.shape), z.new_empty(M, *z.shape[1:]))
    )
    states, normalizers = (S.new_empty(M, *S.shape[1:]), normalizers) if segment else (None, None)
    return or_empty(S, v.new_empty(v.shape), S.new_empty(S.shape), zT, den, states, normalizers)


@torch.library.custom_op("hf_memory::linear_attention_backward", mutates_args=())
def _backward(
    rows: Sequence[Tensor | None],
    states: Sequence[Tensor | None],
    gradients: Sequence[Tensor | None],
    cu_seqlens: Tensor | None,
    scale: float,
    segment: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dg, dS0 and dz0; absent ones are empty tensors.

    `rows` are q, k, v and g, `states` S and z before each segment, `gradients` those of the numerator and the
    denominator and of the final S and z.
    """
    q, k, v, g = contiguous(*rows)
    S, z = contiguous(*states)
    do, dd, dST, dzT = contiguous(*gradients)
    B, T = q.shape[:2]
    HV, V = v.shape[2:]
    given = Rows(q, k, v, g=g)
    meta, options = _constants_of(q, v, g)
    segments = cut(cu_seqlens, B, T, segment, q) if segment else None
    if segments is not None:
        dST = segments.of_sequences(dST, S)
        reads = Rows(k=q, v=do, beta=dd, g=g)
        (dST, dzT), before = boundary_states(segments, reads, dST, dzT, scale=scale, backwards=True)
        cu_seqlens = segments.bounds
    dv = torch.empty_like(v)
    dS0 = None if segments else torch.empty_like(S)
    call = Call(cu_seqlens, tokens_of_sequences(q, S), scale)
    dq, dk, dg, dz0 = query_and_key_gradients(
        given, States(S, z0=z), Outputs(do, dd), States(ST=dST, zT=dzT), call
    )
    launcher(_dv_kernel, (S.shape[0] * HV * triton.cdiv(V, meta.BV),))(
        given._replace(v=None), Outputs(do), States(dS0, dST), dv, call, meta=meta, **options
    )
    if segments is not None:
        dS0, dz0 = before
    return or_empty(S, dq, dk, dv, dg, dS0, dz0)


@_backward.register_fake
def _(rows, states, gradients, cu_seqlens, scale, segment):
    q, k, v, g = rows
    S, z = states
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    wide = (None if x is None else S.new_empty(N, *x.shape[1:]) for x in (S, z))
    wide = None if g is None else S.new_empty(g.shape), *wide
    return or_empty(S, *(x.new_empty(x.shape) for x in (q, k, v)), *wide)


def _save(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    q, k, v, g, S, z, cu_seqlens, ctx.scale, ctx.segment = inputs
    o, _, _, den, states, normalizers = output
    if ctx.segment:
        S = states
        z = None if z is None else normalizers
    ctx.save_for_backward(q, k, v, g, S, z, cu_seqlens, *((None, None) if z is None else (o, den)))


def _gradients(ctx, do, dST, dzT, *_):
    q, k, v, g, S, z, cu_seqlens, o, den = ctx.saved_tensors
    do = torch.zeros_like(v) if do is None else do
    dd = None
    if z is None:
        dzT = None
    else:
        wide = do.float()
        dd = -(wide * o.float()).sum(-1) / den
        do = (wide / den[..., None]).to(v.dtype)
        N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        dzT = z.new_zeros(N, *z.shape[1:]) if dzT is None else dzT
    dq, dk, dv, dg, dS0, dz0 = _backward(
        (q, k, v, g), (S, z), (do, dd, dST, dzT), cu_seqlens, ctx.scale, ctx.segment
    )
    return (
        dq,
        dk,
        dv,
        None if g is None else dg.to(g.dtype),
        dS0,
        None if z is None else dz0,
        None,
        None,
        None,
    )


_forward.register_autograd(_gradients, setup_context=_save)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state: Tensor | LinearState,
    scale: float,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | LinearState]:
    """Same function as the reference, for K and V up to 256."""
    S, z = state if isinstance(state, LinearState) else (state, None)
    programs = v.shape[2] * triton.cdiv(v.shape[3], _constants_of(q, v, g).meta.BV)
    if decay_kind(g) == SCALAR:  # twice as many programs hide how long one takes to sum decays
        programs = triton.cdiv(programs, 2)
    segment = segment_length(q, S.shape[0], programs)
    o, ST, zT, *_ = _forward(q, k, v, g, S, z, cu_seqlens, scale if z is None else 1.0, segment)
    return o, ST if z is None else LinearState(ST, zT)
