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
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_memory.ops.contract import first_derivatives_only
from hf_memory.ops.neural_memory import chunk, exact
from hf_memory.ops.neural_memory.dual import pick
from hf_memory.ops.neural_memory.kernels import exact as exact_kernels
from hf_memory.ops.neural_memory.kernels.backward import read_backward_kernel, write_backward_kernel
from hf_memory.ops.neural_memory.kernels.forward import read_kernel, write_kernel
from hf_memory.ops.neural_memory.kernels.held import held_backward_kernel, held_kernel
from hf_memory.ops.neural_memory.kernels.parts import Learned, Meta, Rows
from hf_memory.ops.neural_memory.network import ACTIVATIONS, Inputs, NeuralMemoryState, Rule, pack, unpack
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


def _meta(q: Tensor, V: int, hidden: int, rule: Rule, dtype: torch.dtype, decay, momentum, anchor) -> Meta:
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

    rows: Rows
    initial: Any  # [N, SIZE], or None
    states: Tensor  # [NC + 1, N, PARTS, SIZE]
    learned: Learned
    meta: Meta
    closed: Any  # [NC, N] int32, or None

    @classmethod
    def after(cls, start: Tensor, rows: Rows, closed, initial, meta: Meta) -> "_Tiled":
        """Write the chunks of `rows` after the state `start`."""
        (NC, N, C), states = rows.q.shape[:3], start.new_empty(len(rows.q) + 1, *start.shape)
        states[0], learned = start, _learned(rows, meta)
        launcher(write_kernel, (N,))(rows, closed, initial, states, learned, NC, N, C, meta.compiled, **LAUNCH)
        return cls(rows, initial, states, learned, meta, closed)

    @classmethod
    def forward(cls, o: Tensor, end: Tensor, *given) -> None:
        """Write the output [NC, N, C, V] to o, and the state after the chunks to end."""
        group = cls.after(*given)
        launcher(read_kernel, _grid(o, group.meta))(*group[:4], o, *o.shape[1:3], group.meta.compiled, **LAUNCH)
        end.copy_(group.states[-1])

    def backward(self, do: Tensor, d_after: Tensor) -> tuple[Rows, Tensor, Tensor | None]:
        """Gradients of the rows, of the state before the group, and of the initial weights, None for zero."""
        (NC, N, C), rows, meta = do.shape[:3], self.rows, self.meta
        d_states, dz = torch.empty_like(self.states), do.new_empty(NC, N, C, meta.HIDDEN)
        d_states[-1] = d_after
        y, du, scores, G, grads = _read_backward(*self[:5], do)
        used, back, dw = rows.P * scores, rows.P * G, do.new_empty(NC, N, C)
        dd, dx, de = -used[0].mT @ du, -back[1].mT @ y, -used[1].mT @ do
        launcher(write_backward_kernel, (N,))(
            *(rows, self.closed, self.states, self.learned, y, du, do, d_states, dd, dx, de, dz, dw, grads.m),
            *(NC, N, C, meta.compiled),
            **LAUNCH,
        )
        dP = -(scores * G).sum(0)
        dP[:, :, -1] += dw
        dk = self._of_keys(dz, de, d_states[1:]) - back[0].mT @ rows.q
        d_initial = self._of_initial(y, du, do, d_states[1:])
        self._add_last(grads, d_states[1:])
        return grads._replace(k=dk, v=-de, P=dP), d_states[0].clone(), d_initial

    def _of_keys(self, dz: Tensor, de: Tensor, after: Tensor) -> Tensor:
        """Gradient of the keys: through Z, and through the update of the first layer."""
        meta, rows, A = self.meta, self.rows, self.states[:-1, :, 0]
        if meta.ANCHOR:
            A = torch.where(self.closed[..., None] != 0, A, self.states[:-1, :, -1])

        def first(flat: Tensor) -> Tensor:
            """The first layer, transposed, of weights [..., SIZE]."""
            return flat[..., : meta.K * meta.HIDDEN].unflatten(-1, (meta.K, meta.HIDDEN)).mT

        d = ACTIVATIONS[meta.ACTIVATION].backward(self.learned.f, self.learned.z)
        dk = dz @ first(A) - (rows.P[:, :, -1, :, None] * d) @ first(after[:, :, 0])
        if meta.MOMENTUM:
            dk -= (rows.m * d) @ first(after[:, :, 1])
        return dk + de if meta.RESIDUAL else dk

    def _of_initial(self, y: Tensor, du: Tensor, do: Tensor, after: Tensor) -> Tensor | None:
        """Gradient of the initial weights, None if weights do not decay to them."""
        if not self.meta.RETURNS:
            return None
        rest = 1 - self.rows.beta
        reads = ((self.rows.q, rest * du), (y, rest * do))
        read = pack([torch.einsum("inck,incv->nkv", x, g) for x, g in reads])
        return read + (rest[:, :, -1] * after[:, :, 0]).sum(0)

    def _add_last(self, grads: Rows, after: Tensor) -> None:
        """Add what the states after chunks give to gradients of beta and c, and compute that of H."""
        W, dW = self.states[:-1, :, 0], after[:, :, 0]
        if self.meta.DECAY:
            grads.beta[:, :, -1, 0] += (dW * (W - self.initial if self.meta.RETURNS else W)).sum(-1)
        if self.meta.MOMENTUM:
            S, dS = self.states[:-1, :, 1], after[:, :, 1]
            grads.c[:, :, -1, 0] += (dW * S).sum(-1)
            grads.H[..., 0, 0] = (dS * S).sum(-1)


class _Held(NamedTuple):
    """Some chunks with the states before them, where a program holds the state of a head."""

    rows: Rows
    initial: Any  # [N, SIZE], or None
    states: Tensor  # [NC, N, PARTS, SIZE], as products round them
    learned: Learned
    meta: Meta

    @classmethod
    def after(cls, start: Tensor, rows: Rows, closed, initial, meta: Meta) -> "_Held":
        """Write the chunks of `rows` after the state `start`."""
        (NC, N, C), learned = rows.q.shape[:3], _learned(rows, meta)
        states = torch.empty(NC, *start.shape, dtype=_TORCH_TYPES[meta.DTYPE], device=start.device)
        given = rows, initial, start, None, states, learned, None
        launcher(held_kernel, (N,))(*given, NC, N, C, meta.compiled, **LAUNCH)
        return cls(rows, initial, states, learned, meta)

    @classmethod
    def forward(cls, o: Tensor, end: Tensor, start: Tensor, rows: Rows, closed, initial, meta: Meta) -> None:
        """Write the output [NC, N, C, V] to o, and the state after the chunks to end."""
        sizes = *o.shape[:3], meta.compiled
        launcher(held_kernel, sizes[1:2])(rows, initial, start, end, None, None, o, *sizes, **LAUNCH)

    def backward(self, do: Tensor, d_after: Tensor) -> tuple[Rows, Tensor, Tensor | None]:
        """Gradients of the rows, of the state before the group, and of the initial weights, None for zero."""
        (NC, N, C), d_before = do.shape[:3], torch.empty_like(d_after)
        d_initial = torch.zeros_like(self.initial) if self.meta.RETURNS else None
        *read, grads = _read_backward(*self, do)
        y, du, scores, G = read
        launcher(held_backward_kernel, (N,))(
            *(*self[:4], y, du, do, scores, G, grads, d_after.contiguous(), d_before, d_initial),
            *(NC, N, C, self.meta.compiled),
            **LAUNCH,
        )
        return grads, d_before, d_initial


def _learned(rows: Rows, meta: Meta) -> Learned:
    """Room for what writes compute."""
    z, f = rows.q.new_empty(2, *rows.q.shape[:3], meta.HIDDEN)
    return Learned(z, f, torch.empty_like(rows.v))


def _grid(o: Tensor, meta: Meta) -> tuple[int, int, int]:
    """The grid of kernels that read."""
    NC, N, C = o.shape[:3]
    return N, NC, triton.cdiv(C, meta.BR)


def _read_backward(rows: Rows, initial, states: Tensor, learned: Learned, meta: Meta, do: Tensor):
    """Y, dU, the scores and their gradients G, and `Rows` of gradients, in which those of q, beta and c are."""
    NC, N, C = do.shape[:3]
    y, du = do.new_empty(2, NC, N, C, meta.HIDDEN)
    scores, G = do.new_empty(2, 2, NC, N, C, C)
    grads = Rows(*map(_empty, rows))
    launcher(read_backward_kernel, _grid(do, meta))(
        rows, initial, states, learned, do, y, du, scores, G, grads, NC, N, C, meta.compiled, **LAUNCH
    )
    return y, du, scores, G, grads


def _empty(x: Tensor | None) -> Tensor | None:
    return None if x is None else torch.empty_like(x)


class _Walk(torch.autograd.Function):
    """The loop over all chunks, from the state `start` [N, PARTS, SIZE]."""

    @staticmethod
    def forward(ctx, meta: Meta, closed, start, initial, *rows):
        given = Rows(*contiguous(*rows))
        o, size = torch.empty_like(given.v), max(1, isqrt(len(given.q)))
        kept = start.new_empty(1 + triton.cdiv(len(o), size), *start.shape)
        kept[0] = start
        for n, (before, after) in enumerate(pairwise(kept)):
            part = slice(n * size, (n + 1) * size)
            _form(meta).forward(o[part], after, before, *_part(part, given, closed), initial, meta)
        ctx.save_for_backward(closed, initial, kept[:-1], *given)
        ctx.meta, ctx.size = meta, size
        return o, kept[-1].clone()

    @staticmethod
    @first_derivatives_only
    def backward(ctx, do, d_start):
        closed, initial, kept, *rows = ctx.saved_tensors
        rows, do, d_initial = Rows(*rows), do.contiguous(), None
        d_rows = Rows(*map(_empty, rows))
        for n in reversed(range(len(kept))):
            part = slice(n * ctx.size, (n + 1) * ctx.size)
            group = _form(ctx.meta).after(kept[n], *_part(part, rows, closed), initial, ctx.meta)
            grads, d_start, added = group.backward(do[part], d_start)
            d_initial = added if d_initial is None else d_initial + added
            for whole, grad in zip(d_rows, grads):
                if whole is not None:
                    whole[part] = grad
        return None, None, d_start, d_initial, *d_rows


def _form(meta: Meta) -> type[_Held] | type[_Tiled]:
    """How memories of this size are processed."""
    return _Held if meta.HELD else _Tiled


def _part(part: slice, rows: Rows, closed: Tensor | None) -> tuple[Rows, Tensor | None]:
    """Some of the chunks."""
    return Rows(*(None if x is None else x[part] for x in rows)), None if closed is None else closed[part]


def neural_memory(*rows: Tensor | None, **memory) -> tuple[Tensor, NeuralMemoryState]:
    """Same function as the reference, for a matrix with chunk_size=1 and for the memories that `run` supports."""
    dtype = rows[0].dtype  # type: ignore[union-attr]
    forms = partial(exact.run, walk=partial(exact_kernels.walk, dtype=dtype)), partial(run, dtype=dtype)
    return chunk.neural_memory(*rows, forms=forms, **memory)


def run(inputs: Inputs, coefficients, memory: Memory, *, dtype: torch.dtype):
    """Same function as `dual.run`, for two matrices and the usual rule; products are of operands in `dtype`."""
    W, S, A, initial, _, closed, rule = memory
    q, k, v = inputs[:3]
    closed = closed if A else [True] * len(closed)
    anchor, NC, hidden = any(x is not True for x in closed[:-1]), len(q), W[0].shape[2]
    states = [torch.stack([pack(layers) for layers in (W, S, A if anchor else ()) if layers], dim=1)]
    decay, momentum = coefficients.beta is not None, bool(S)
    meta = _meta(q, v.shape[-1], hidden, rule, dtype, decay, momentum, anchor)
    table = torch.stack([_row(x, q) for x in closed[:-1]]) if anchor else None
    outputs, last = [], NC if anchor or closed[-1] is True else NC - 1  # the next anchor is then known before the last
    for first, end in pairwise(dict.fromkeys((0, last, NC))):
        rows = (None if x is None else x[first:end] for x in (q, k, v, *coefficients))
        o, state = _Walk.apply(meta, table, states[-1], pack(initial) if meta.RETURNS else None, *rows)
        outputs.append(o)
        states.append(state)
    after = [unpack(x, W) for x in states[-1].unbind(1)]
    old = after[-1] if anchor else unpack(states[-2][:, 0], W)
    A = tuple(w.clone() for w in pick(closed[-1], after[0], old)) if A else ()
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs), (after[0], after[1] if S else (), A)


def _row(closed: bool | Tensor, like: Tensor) -> Tensor:
    """`closed` as a tensor [N] int32."""
    N = like.shape[1]
    if isinstance(closed, bool):
        return torch.full((N,), int(closed), dtype=torch.int32, device=like.device)
    return closed.flatten().to(torch.int32)
