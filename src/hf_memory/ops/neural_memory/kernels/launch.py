"""The dual form of two matrices in Triton: programs process weights of any width by tiles of hidden channels.

The letters are those of `dual`; rows K, X (written) and Q, Y (read) enter the two layers, D and E are their gradients:

    Z = K A_1,   X = s(Z),   E = X A_2 - V,   F = E A_2^T,   D = F .* s'(Z)
    U = beta .* Q W_1 + c .* Q S_1 - (P .* Q K^T) D,   Y = s(U)
    O = beta .* Y W_2 + c .* Y S_2 - (P .* Y X^T) E

Only writes depend on the previous chunk: one program for each row and head loops over the chunks and stores all states
in global memory; then all chunks are read in parallel, with BR rows for each program. Backward, reads come first, in
parallel, and then writes from the last chunk to the first. The state before each group of chunks is saved, and the
group is recomputed.
"""

from functools import partial
from itertools import pairwise
from math import isqrt

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_memory.ops.autograd import first_derivatives_only
from hf_memory.ops.neural_memory import chunk
from hf_memory.ops.neural_memory.chunk import pick
from hf_memory.ops.neural_memory.kernels.backward import (
    Inner,
    read_backward_kernel,
    write_backward_kernel,
)
from hf_memory.ops.neural_memory.kernels.forward import read_kernel, write_kernel
from hf_memory.ops.neural_memory.kernels.parts import Chunks, Learned, Meta, Reads, Rows, Sizes
from hf_memory.ops.neural_memory.network import (
    ACTIVATIONS,
    Memory,
    NeuralMemoryState,
    Rule,
    pack,
    unpack,
)
from hf_memory.ops.triton.launch import contiguous, launcher, width

TILE = 16  # hidden channels; with more, registers spill
ROWS = 16  # rows that a program reads
LAUNCH = {"num_warps": 8, "num_stages": 1}
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def neural_memory(*rows: Tensor | None, **memory) -> tuple[Tensor, NeuralMemoryState]:
    """Same function as the reference, for two matrices and Titans' rule; products are of operands like q."""
    dtype = rows[0].dtype  # type: ignore[union-attr]
    return chunk.neural_memory(*rows, loop=partial(over_chunks, dtype=dtype), **memory)


def over_chunks(given, memory: Memory, closed: list, *, dtype: torch.dtype):
    """Same function as `chunk.over_chunks`; products are of operands in `dtype`."""
    W, S, A, initial, _, rule = memory
    rows = Rows(given.q, given.k, given.v, given.P, given.beta, given.c, given.m, given.H)
    has_anchor = len(A) > 0 and any(x is not True for x in closed)
    state = torch.stack([pack(layers) for layers in (W, S, *([A] if has_anchor else []))], dim=1)
    table = torch.stack([_row(x, given.q) for x in closed[:-1]]) if has_anchor else None
    meta = _meta(rows, W[0].shape[2], rule, dtype, has_anchor)
    o, state = _Walk.apply(meta, table, state, pack(initial), *rows)
    W, S, *old = (unpack(x, W) for x in state.unbind(1))
    if A:
        A = tuple(x.clone() for x in pick(closed[-1], W, old[0] if old else W))
    return o, memory._replace(W=W, S=S, A=A)


def _row(closed: bool | Tensor, like: Tensor) -> Tensor:
    """`closed` as a tensor [N] int32."""
    N = like.shape[1]
    if isinstance(closed, bool):
        return torch.full((N,), int(closed), dtype=torch.int32, device=like.device)
    return closed.flatten().to(torch.int32)


def _meta(rows: Rows, hidden: int, rule: Rule, dtype: torch.dtype, has_anchor: bool) -> Meta:
    """What kernels are compiled for."""
    C, K = rows.q.shape[2:]
    V = rows.v.shape[3]
    BC = width(C)
    return Meta(
        K=K,
        V=V,
        HIDDEN=hidden,
        SIZE=(K + V) * hidden,
        PARTS=2 + has_anchor,
        BC=BC,
        BK=width(K),
        BV=width(V),
        BH=min(TILE, width(hidden)),
        BR=min(ROWS, BC),
        ACTIVATION=rule.activation,
        RESIDUAL=rule.residual,
        ANCHOR=has_anchor,
        DTYPE=TYPES[dtype],
    )


class _Walk(torch.autograd.Function):
    """The loop over all chunks, from the state `start` [N, PARTS, SIZE]."""

    @staticmethod
    def forward(ctx, meta: Meta, closed, start, initial, *rows):
        given = Rows(*contiguous(*rows))
        o = torch.empty_like(given.v)
        size = max(1, isqrt(len(given.q)))
        kept = start.new_empty(1 + triton.cdiv(len(o), size), *start.shape)
        kept[0] = start
        for n, (before, after) in enumerate(pairwise(kept)):
            part = slice(n * size, (n + 1) * size)
            chunks = _written(before, _part(part, given, initial, closed), meta)
            sizes = Sizes(*o[part].shape[:3])
            launcher(read_kernel, _grid(sizes, meta))(chunks, o[part], sizes, meta=meta, **LAUNCH)
            after.copy_(chunks.states[-1])
        ctx.save_for_backward(closed, initial, kept[:-1], *given)
        ctx.meta = meta
        ctx.size = size
        return o, kept[-1].clone()

    @staticmethod
    @first_derivatives_only
    def backward(ctx, do, d_state):
        closed, initial, kept, *rows = ctx.saved_tensors
        rows = Rows(*rows)
        do = do.contiguous()
        d_initial = torch.zeros_like(initial)
        d_rows = Rows(*map(torch.empty_like, rows))
        for n in reversed(range(len(kept))):
            part = slice(n * ctx.size, (n + 1) * ctx.size)
            chunks = _written(kept[n], _part(part, rows, initial, closed), ctx.meta)
            grads, d_state, added = _backward(chunks, ctx.meta, do[part], d_state)
            d_initial += added
            for whole, grad in zip(d_rows, grads):
                whole[part] = grad
        return None, None, d_state, d_initial, *d_rows


def _part(part: slice, rows: Rows, initial: Tensor, closed: Tensor | None) -> Chunks:
    """Some of the chunks, without states."""
    some = Rows(*(x[part] for x in rows))
    return Chunks(some, initial, None, None, None if closed is None else closed[part])


def _written(start: Tensor, chunks: Chunks, meta: Meta) -> Chunks:
    """The chunks with their states and inner gradients, after the state `start`."""
    sizes = Sizes(*chunks.rows.q.shape[:3])
    states = start.new_empty(sizes.NC + 1, *start.shape)
    states[0] = start
    z, f = start.new_empty(2, *sizes, meta.HIDDEN)
    learned = Learned(z, f, torch.empty_like(chunks.rows.v))
    chunks = chunks._replace(states=states, learned=learned)
    launcher(write_kernel, (sizes.N,))(chunks, sizes, meta=meta, **LAUNCH)
    return chunks


def _grid(sizes: Sizes, meta: Meta) -> tuple[int, int, int]:
    """The grid of kernels that read."""
    return sizes.N, sizes.NC, triton.cdiv(sizes.C, meta.BR)


def _backward(
    chunks: Chunks, meta: Meta, do: Tensor, d_after: Tensor
) -> tuple[Rows, Tensor, Tensor]:
    """Gradients of the rows, of the state before the chunks, and of the initial weights."""
    NC, N, C = sizes = Sizes(*do.shape[:3])
    rows, _, states, *_ = chunks
    reads = Reads(*do.new_empty(2, NC, N, C, meta.HIDDEN), *do.new_empty(2, 2, NC, N, C, C))
    grads = Rows(*map(torch.empty_like, rows))
    launcher(read_backward_kernel, _grid(sizes, meta))(
        chunks, do, reads, grads, sizes, meta=meta, **LAUNCH
    )
    y, du, scores, G = reads
    used = rows.P * scores
    back = rows.P * G
    dd = -used[0].mT @ du
    dx = -back[1].mT @ y
    de = -used[1].mT @ do
    inner = Inner(dd, dx, de, torch.empty_like(dd), do.new_empty(sizes), grads.m)
    d_states = torch.empty_like(states)
    d_states[-1] = d_after
    launcher(write_backward_kernel, (N,))(
        chunks, reads, do, d_states, inner, sizes, meta=meta, **LAUNCH
    )
    dP = -(scores * G).sum(0)
    dP[:, :, -1] += inner.w
    dk = _of_keys(chunks, meta, inner, d_states[1:]) - back[0].mT @ rows.q
    _add_last(chunks, grads, d_states[1:])
    d_initial = _of_initial(rows, reads, do, d_states[1:])
    return grads._replace(k=dk, v=-de, P=dP), d_states[0].clone(), d_initial


def _of_keys(chunks: Chunks, meta: Meta, inner: Inner, after: Tensor) -> Tensor:
    """Gradient of the keys: through Z, and through the update of the first layer."""
    rows, _, states, learned, closed = chunks
    A = states[:-1, :, 0]
    if closed is not None:
        A = torch.where(closed[..., None] != 0, A, states[:-1, :, -1])

    def first(flat: Tensor) -> Tensor:
        """The first layer, transposed, of weights [..., SIZE]."""
        return flat[..., : meta.K * meta.HIDDEN].unflatten(-1, (meta.K, meta.HIDDEN)).mT

    d = ACTIVATIONS[meta.ACTIVATION].backward(learned.f, learned.z)
    dk = inner.z @ first(A) - (rows.P[:, :, -1, :, None] * d) @ first(after[:, :, 0])
    dk -= (rows.m * d) @ first(after[:, :, 1])
    return dk + inner.e if meta.RESIDUAL else dk


def _of_initial(rows: Rows, reads: Reads, do: Tensor, after: Tensor) -> Tensor:
    """Gradient of the initial weights, to which weights decay."""
    rest = 1 - rows.beta
    layers = ((rows.q, rest * reads.du), (reads.y, rest * do))
    read = pack([torch.einsum("inck,incv->nkv", x, g) for x, g in layers])
    return read + (rest[:, :, -1] * after[:, :, 0]).sum(0)


def _add_last(chunks: Chunks, grads: Rows, after: Tensor) -> None:
    """Add what the states after chunks give to gradients of beta and c, and compute that of H."""
    W, S = chunks.states[:-1, :, :2].unbind(2)
    dW, dS = after[:, :, :2].unbind(2)
    grads.beta[:, :, -1, 0] += (dW * (W - chunks.initial)).sum(-1)
    grads.c[:, :, -1, 0] += (dW * S).sum(-1)
    grads.H[..., 0, 0] = (dS * S).sum(-1)
