"""The dual form of two matrices in Triton: programs process weights of any width by tiles of hidden channels.

The letters are those of `dual`; rows K, X (written) and Q, Y (read) enter the two layers, D and E are their gradients:

    Z = K A_1,   X = s(Z),   E = X A_2 - V,   F = E A_2^T,   D = F .* s'(Z)
    U = beta .* Q W_1 + c .* Q S_1 - (P .* Q K^T) D,   Y = s(U)
    O = beta .* Y W_2 + c .* Y S_2 - (P .* Y X^T) E

Only writes depend on the previous chunk: one program for each row and head loops over the chunks. If weights and
momentum of a head fit into its registers, they stay there, and it reads each chunk before it writes (`_Held`). Else it
stores all states in global memory, and all chunks are read in parallel, with BR rows for each program (`_Tiled`).
Backward, reads come first, in parallel, and then writes from the last chunk to the first. As in `dual`, the state
before each group of chunks is saved, and the group is recomputed.
"""

from functools import partial
from itertools import pairwise
from math import isqrt
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_memory.ops.autograd import first_derivatives_only
from hf_memory.ops.neural_memory import chunk, exact
from hf_memory.ops.neural_memory.dual import pick
from hf_memory.ops.neural_memory.kernels import exact as exact_kernels
from hf_memory.ops.neural_memory.kernels.backward import (
    Inner,
    read_backward_kernel,
    write_backward_kernel,
)
from hf_memory.ops.neural_memory.kernels.forward import read_kernel, write_kernel
from hf_memory.ops.neural_memory.kernels.held import (
    StateGradients,
    held_backward_kernel,
    held_kernel,
)
from hf_memory.ops.neural_memory.kernels.parts import Chunks, Learned, Meta, Reads, Rows, Sizes
from hf_memory.ops.neural_memory.network import (
    ACTIVATIONS,
    Inputs,
    NeuralMemoryState,
    Rule,
    pack,
    unpack,
)
from hf_memory.ops.neural_memory.one_chunk import Memory
from hf_memory.ops.triton.launch import architecture, contiguous, launcher

TILE = 16  # hidden channels; with more, registers spill
ROWS = 16  # rows that a program reads
HELD = 128 << 10  # bytes in float32 of a state that registers hold: half of those of 8 warps
LAUNCH = {"num_warps": 8, "num_stages": 1}
# Kinds of GPUs: before 3.8, Triton gives held memories more tensor memory than these have, and makes code that traps.
NOT_HELD = range(100, 110) if triton.__version__.startswith(("3.5", "3.6", "3.7")) else range(0)
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_TORCH_TYPES = {name: dtype for dtype, name in _TYPES.items()}


def _meta(
    q: Tensor, V: int, hidden: int, rule: Rule, dtype: torch.dtype, decay, momentum, anchor
) -> Meta:
    """What kernels are compiled for, for queries [NC, N, C, K]."""
    C, K = q.shape[2:]
    BC, BK, BV, width = (max(16, triton.next_power_of_2(D)) for D in (C, K, V, hidden))
    most = HELD if dtype != torch.float32 else HELD // 4  # whose products need more registers
    held = BC <= ROWS and not anchor and 4 * (1 + momentum) * width * (BK + BV) <= most
    held = held and architecture(q.device) not in NOT_HELD
    return Meta(
        K=K, V=V, HIDDEN=hidden, SIZE=(K + V) * hidden, PARTS=1 + momentum + anchor,
        BC=BC, BK=BK, BV=BV, BH=width if held else min(TILE, width), BR=min(ROWS, BC),
        ACTIVATION=rule.activation, RESIDUAL=rule.residual,
        DECAY=decay, MOMENTUM=momentum, RETURNS=decay and rule.forget_to == "initial", ANCHOR=anchor, HELD=held,
        DTYPE=_TYPES[dtype],
    )  # fmt: skip


class _Tiled(NamedTuple):
    """Some chunks with the states before and after them, which programs process by tiles."""

    chunks: Chunks
    meta: Meta

    @classmethod
    def after(cls, start: Tensor, chunks: Chunks, meta: Meta) -> "_Tiled":
        """Write the chunks after the state `start`."""
        sizes = Sizes(*chunks.rows.q.shape[:3])
        states = start.new_empty(sizes.NC + 1, *start.shape)
        states[0] = start
        chunks = chunks._replace(states=states, learned=_learned(chunks.rows, meta))
        launcher(write_kernel, (sizes.N,))(chunks, sizes, meta=meta, **LAUNCH)
        return cls(chunks, meta)

    @classmethod
    def forward(cls, o: Tensor, end: Tensor, *given) -> None:
        """Write the output [NC, N, C, V] to o, and the state after the chunks to end."""
        chunks, meta = cls.after(*given)
        sizes = Sizes(*o.shape[:3])
        launcher(read_kernel, _grid(sizes, meta))(chunks, o, sizes, meta=meta, **LAUNCH)
        end.copy_(chunks.states[-1])

    def backward(self, do: Tensor, d_after: Tensor) -> tuple[Rows, Tensor, Tensor | None]:
        """Gradients of the rows, of the state before the group, and of the initial weights, None for zero."""
        sizes = Sizes(*do.shape[:3])
        rows, _, states, *_ = self.chunks
        meta = self.meta
        d_states = torch.empty_like(states)
        d_states[-1] = d_after
        reads, grads = _read_backward(self.chunks, meta, do)
        y, du, scores, G = reads
        used = rows.P * scores
        back = rows.P * G
        dd = -used[0].mT @ du
        dx = -back[1].mT @ y
        de = -used[1].mT @ do
        inner = Inner(dd, dx, de, torch.empty_like(dd), do.new_empty(sizes), grads.m)
        launcher(write_backward_kernel, (sizes.N,))(
            self.chunks, reads, do, d_states, inner, sizes, meta=meta, **LAUNCH
        )
        dP = -(scores * G).sum(0)
        dP[:, :, -1] += inner.w
        dk = self._of_keys(inner, d_states[1:]) - back[0].mT @ rows.q
        d_initial = self._of_initial(y, du, do, d_states[1:])
        self._add_last(grads, d_states[1:])
        return grads._replace(k=dk, v=-de, P=dP), d_states[0].clone(), d_initial

    def _of_keys(self, inner: Inner, after: Tensor) -> Tensor:
        """Gradient of the keys: through Z, and through the update of the first layer."""
        meta = self.meta
        rows, _, states, learned, closed = self.chunks
        A = states[:-1, :, 0]
        if meta.ANCHOR:
            A = torch.where(closed[..., None] != 0, A, states[:-1, :, -1])

        def first(flat: Tensor) -> Tensor:
            """The first layer, transposed, of weights [..., SIZE]."""
            return flat[..., : meta.K * meta.HIDDEN].unflatten(-1, (meta.K, meta.HIDDEN)).mT

        d = ACTIVATIONS[meta.ACTIVATION].backward(learned.f, learned.z)
        dk = inner.z @ first(A) - (rows.P[:, :, -1, :, None] * d) @ first(after[:, :, 0])
        if meta.MOMENTUM:
            dk -= (rows.m * d) @ first(after[:, :, 1])
        return dk + inner.e if meta.RESIDUAL else dk

    def _of_initial(self, y: Tensor, du: Tensor, do: Tensor, after: Tensor) -> Tensor | None:
        """Gradient of the initial weights, None if weights do not decay to them."""
        if not self.meta.RETURNS:
            return None
        rows = self.chunks.rows
        rest = 1 - rows.beta
        reads = ((rows.q, rest * du), (y, rest * do))
        read = pack([torch.einsum("inck,incv->nkv", x, g) for x, g in reads])
        return read + (rest[:, :, -1] * after[:, :, 0]).sum(0)

    def _add_last(self, grads: Rows, after: Tensor) -> None:
        """Add what the states after chunks give to gradients of beta and c, and compute that of H."""
        states = self.chunks.states
        initial = self.chunks.initial
        W = states[:-1, :, 0]
        dW = after[:, :, 0]
        if self.meta.DECAY:
            grads.beta[:, :, -1, 0] += (dW * (W - initial if self.meta.RETURNS else W)).sum(-1)
        if self.meta.MOMENTUM:
            S = states[:-1, :, 1]
            dS = after[:, :, 1]
            grads.c[:, :, -1, 0] += (dW * S).sum(-1)
            grads.H[..., 0, 0] = (dS * S).sum(-1)


class _Held(NamedTuple):
    """Some chunks with the states before them, where a program holds the state of a head."""

    chunks: Chunks
    meta: Meta

    @classmethod
    def after(cls, start: Tensor, chunks: Chunks, meta: Meta) -> "_Held":
        """Write the chunks after the state `start`."""
        sizes = Sizes(*chunks.rows.q.shape[:3])
        states = torch.empty(
            sizes.NC, *start.shape, dtype=_TORCH_TYPES[meta.DTYPE], device=start.device
        )
        chunks = chunks._replace(states=states, learned=_learned(chunks.rows, meta))
        launcher(held_kernel, (sizes.N,))(chunks, start, None, None, sizes, meta=meta, **LAUNCH)
        return cls(chunks, meta)

    @classmethod
    def forward(cls, o: Tensor, end: Tensor, start: Tensor, chunks: Chunks, meta: Meta) -> None:
        """Write the output [NC, N, C, V] to o, and the state after the chunks to end."""
        sizes = Sizes(*o.shape[:3])
        launcher(held_kernel, (sizes.N,))(chunks, start, end, o, sizes, meta=meta, **LAUNCH)

    def backward(self, do: Tensor, d_after: Tensor) -> tuple[Rows, Tensor, Tensor | None]:
        """Gradients of the rows, of the state before the group, and of the initial weights, None for zero."""
        chunks, meta = self
        sizes = Sizes(*do.shape[:3])
        d_initial = torch.zeros_like(chunks.initial) if meta.RETURNS else None
        d_states = StateGradients(d_after.contiguous(), torch.empty_like(d_after), d_initial)
        reads, grads = _read_backward(chunks, meta, do)
        launcher(held_backward_kernel, (sizes.N,))(
            chunks, reads, do, grads, d_states, sizes, meta=meta, **LAUNCH
        )  # fmt: skip
        return grads, d_states.start, d_initial


def _learned(rows: Rows, meta: Meta) -> Learned:
    """Room for what writes compute."""
    z, f = rows.q.new_empty(2, *rows.q.shape[:3], meta.HIDDEN)
    return Learned(z, f, torch.empty_like(rows.v))


def _grid(sizes: Sizes, meta: Meta) -> tuple[int, int, int]:
    """The grid of kernels that read."""
    return sizes.N, sizes.NC, triton.cdiv(sizes.C, meta.BR)


def _read_backward(chunks: Chunks, meta: Meta, do: Tensor) -> tuple[Reads, Rows]:
    """What the backward of writes needs, and gradients of rows, of which those of q, beta and c are computed."""
    NC, N, C = sizes = Sizes(*do.shape[:3])
    reads = Reads(*do.new_empty(2, NC, N, C, meta.HIDDEN), *do.new_empty(2, 2, NC, N, C, C))
    grads = Rows(*map(_empty, chunks.rows))
    launcher(read_backward_kernel, _grid(sizes, meta))(
        chunks, do, reads, grads, sizes, meta=meta, **LAUNCH
    )  # fmt: skip
    return reads, grads


def _empty(x: Tensor | None) -> Tensor | None:
    return None if x is None else torch.empty_like(x)


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
            _form(meta).forward(o[part], after, before, _part(part, given, initial, closed), meta)
        ctx.save_for_backward(closed, initial, kept[:-1], *given)
        ctx.meta = meta
        ctx.size = size
        return o, kept[-1].clone()

    @staticmethod
    @first_derivatives_only
    def backward(ctx, do, d_start):
        closed, initial, kept, *rows = ctx.saved_tensors
        rows = Rows(*rows)
        do = do.contiguous()
        d_initial = None
        d_rows = Rows(*map(_empty, rows))
        for n in reversed(range(len(kept))):
            part = slice(n * ctx.size, (n + 1) * ctx.size)
            group = _form(ctx.meta).after(kept[n], _part(part, rows, initial, closed), ctx.meta)
            grads, d_start, added = group.backward(do[part], d_start)
            d_initial = added if d_initial is None else d_initial + added
            for whole, grad in zip(d_rows, grads):
                if whole is not None:
                    whole[part] = grad
        return None, None, d_start, d_initial, *d_rows


def _form(meta: Meta) -> type[_Held] | type[_Tiled]:
    """How memories of this size are processed."""
    return _Held if meta.HELD else _Tiled


def _part(part: slice, rows: Rows, initial: Tensor | None, closed: Tensor | None) -> Chunks:
    """Some of the chunks, without states."""
    *some, closed = (None if x is None else x[part] for x in (*rows, closed))
    return Chunks(Rows(*some), initial, None, None, closed)


def neural_memory(*rows: Tensor | None, **memory) -> tuple[Tensor, NeuralMemoryState]:
    """Same function as the reference, for a matrix with chunk_size=1 and for the memories that `run` supports."""
    dtype = rows[0].dtype  # type: ignore[union-attr]
    forms = (
        partial(exact.run, walk=partial(exact_kernels.walk, dtype=dtype)),
        partial(run, dtype=dtype),
    )
    return chunk.neural_memory(*rows, forms=forms, **memory)


def run(inputs: Inputs, coefficients, memory: Memory, *, dtype: torch.dtype):
    """Same function as `dual.run`, for two matrices and the usual rule; products are of operands in `dtype`."""
    W, S, A, initial, _, closed, rule = memory
    q, k, v = inputs[:3]
    closed = closed if A else [True] * len(closed)
    anchor = any(x is not True for x in closed[:-1])
    NC = len(q)
    hidden = W[0].shape[2]
    states = [
        torch.stack([pack(layers) for layers in (W, S, A if anchor else ()) if layers], dim=1)
    ]
    decay = coefficients.beta is not None
    momentum = bool(S)
    meta = _meta(q, v.shape[-1], hidden, rule, dtype, decay, momentum, anchor)
    table = torch.stack([_row(x, q) for x in closed[:-1]]) if anchor else None
    outputs = []
    last = (
        NC if anchor or closed[-1] is True else NC - 1
    )  # the next anchor is then known before the last
    for first, end in pairwise(dict.fromkeys((0, last, NC))):
        rows = (None if x is None else x[first:end] for x in (q, k, v, *coefficients))
        o, state = _Walk.apply(
            meta, table, states[-1], pack(initial) if meta.RETURNS else None, *rows
        )
        outputs.append(o)
        states.append(state)
    after = [unpack(x, W) for x in states[-1].unbind(1)]
    old = after[-1] if anchor else unpack(states[-2][:, 0], W)
    A = tuple(w.clone() for w in pick(closed[-1], after[0], old)) if A else ()
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs), (
        after[0],
        after[1] if S else (),
        A,
    )


def _row(closed: bool | Tensor, like: Tensor) -> Tensor:
    """`closed` as a tensor [N] int32."""
    N = like.shape[1]
    if isinstance(closed, bool):
        return torch.full((N,), int(closed), dtype=torch.int32, device=like.device)
    return closed.flatten().to(torch.int32)
