"""The dual form of two matrices in Triton: programs process weights of any width by tiles of hidden channels.

The letters are those of `dual`; rows K, X (written) and Q, Y (read) enter the two layers, D and E are their gradients:

    Z = K A_1,   X = s(Z),   E = X A_2 - V,   F = E A_2^T,   D = F .* s'(Z)
    U = beta .* Q W_1 + c .* Q S_1 - (P .* Q K^T) D,   Y = s(U)
    O = beta .* Y W_2 + c .* Y S_2 - (P .* Y X^T) E

Only writes depend on the previous chunk: one program for each row and head loops over the chunks, and stores all states
in global memory. Then all chunks are read in parallel, with BR rows for each program. Backward, reads come first, in
parallel, and then writes from the last chunk to the first; products over all chunks give the rest. As in `dual`, the
state before each group of chunks is saved, and the group is recomputed.
"""

from functools import partial
from math import isqrt
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_memory.ops.contract import first_derivatives_only
from hf_memory.ops.neural_memory import chunk, exact
from hf_memory.ops.neural_memory.kernels import exact as exact_kernels
from hf_memory.ops.neural_memory.kernels.backward import read_backward_kernel, write_backward_kernel
from hf_memory.ops.neural_memory.kernels.forward import read_kernel, write_kernel
from hf_memory.ops.neural_memory.network import ACTIVATIONS, Inputs, NeuralMemoryState, Rule
from hf_memory.ops.neural_memory.one_chunk import Memory
from hf_memory.ops.triton.launch import launcher

TILE = 16  # hidden channels; with more, registers spill
ROWS = 16  # rows that a program reads
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _constants(C: int, K: int, V: int, hidden: int, rule: Rule, dtype: torch.dtype, decay, momentum, anchor) -> dict:
    """Compile-time arguments and launch options of all kernels."""
    widths = {name: max(16, triton.next_power_of_2(D)) for name, D in (("BC", C), ("BK", K), ("BV", V), ("BH", hidden))}
    return {
        "K": K, "V": V, "HIDDEN": hidden, **widths, "BH": min(TILE, widths["BH"]), "BR": min(ROWS, widths["BC"]),
        "ACTIVATION": rule.activation, "RESIDUAL": rule.residual,
        "DECAY": decay, "MOMENTUM": momentum, "RETURNS": decay and rule.forget_to == "initial", "ANCHOR": anchor,
        "DTYPE": _TYPES[dtype], "num_warps": 8, "num_stages": 1,
    }  # fmt: skip


def _launch(kernel, grid: tuple, given: dict) -> None:
    """Run a kernel with those of the given arguments that it takes."""
    launcher(kernel, grid)(**{name: given[name] for name in (*kernel.arg_names, "num_warps", "num_stages")})


_ROWS = ("q", "k", "v", "P", "beta", "c", "m", "H")


def _write_group(constants: dict, rows: dict, closed, initial, states: Tensor) -> dict:
    """Compute the states of the chunks of `rows` and `closed`, and return the arguments of further kernels."""
    chunks, N, C = rows["q"].shape[:3]
    z, f = rows["q"].new_empty(2, chunks, N, C, constants["HIDDEN"])
    made = {"closed": closed, "initial": initial, "states": states, "z": z, "f": f, "e": torch.empty_like(rows["v"])}
    given = {**constants, **rows, **made, "chunks": chunks, "N": N, "C": C}
    _launch(write_kernel, (N,), given)
    return given


def _grid(given: dict) -> tuple[int, int, int]:
    """The grid of kernels that read."""
    return given["N"], given["chunks"], triton.cdiv(given["C"], given["BR"])


def _backward_group(given: dict, do: Tensor, d_states: Tensor) -> tuple[dict, Tensor | None]:
    """Gradients of the rows of a group and of the initial weights.

    d_states [chunks + 1, N, PARTS, SIZE] is filled; only its last entry is given.
    """
    chunks, N, C = do.shape[:3]
    y, du, dz = do.new_empty(3, chunks, N, C, given["HIDDEN"])
    scores, G = do.new_empty(2, 2, chunks, N, C, C)
    grads: Any = {name: None if given[name] is None else torch.empty_like(given[name]) for name in _ROWS}
    given |= {"do": do, "y": y, "du": du, "scores": scores, "G": G, **{f"d{name}": x for name, x in grads.items()}}
    _launch(read_backward_kernel, _grid(given), given)
    used, back = given["P"] * scores, given["P"] * G
    read = {"dd": -used[0].mT @ du, "dx": -back[1].mT @ y, "de": -used[1].mT @ do}
    given |= {**read, "dz": dz, "dw": do.new_empty(chunks, N, C), "d_states": d_states}
    _launch(write_backward_kernel, (N,), given)
    grads |= {"k": _of_keys(given) - back[0].mT @ given["q"], "v": -given["de"], "P": -(scores * G).sum(0)}
    grads["P"][:, :, -1] += given["dw"]
    return grads, _last(given, grads)


def _of_keys(given: dict) -> Tensor:
    """Gradient of the keys: through Z, and through the update of the first layer."""
    states, after = given["states"][:-1], given["d_states"][1:]
    A = states[:, :, 0]
    if given["ANCHOR"]:
        A = torch.where(given["closed"][..., None] != 0, A, states[:, :, -1])
    d = ACTIVATIONS[given["ACTIVATION"]].backward(given["f"], given["z"])
    dk = given["dz"] @ _first(A, given).mT - (given["P"][:, :, -1, :, None] * d) @ _first(after[:, :, 0], given).mT
    if given["MOMENTUM"]:
        dk -= (given["m"] * d) @ _first(after[:, :, 1], given).mT
    return dk + given["de"] if given["RESIDUAL"] else dk


def _first(flat: Tensor, given: dict) -> Tensor:
    """The first layer [..., K, HIDDEN] of [..., SIZE]."""
    K, hidden = given["K"], given["HIDDEN"]
    return flat[..., : K * hidden].unflatten(-1, (K, hidden))


def _last(given: dict, grads: dict) -> Tensor | None:
    """Add what the states after chunks give to gradients of beta, c and H; return that of the initial weights."""
    after = given["d_states"][1:]
    W, dW, d_initial = given["states"][:-1, :, 0], after[:, :, 0], None
    if given["RETURNS"]:
        W, rest = W - given["initial"], 1 - given["beta"]
        d_initial = _flat((_over_chunks(given["q"], rest * given["du"]), _over_chunks(given["y"], rest * given["do"])))
        d_initial += (rest[:, :, -1] * dW).sum(0)
    if given["DECAY"]:
        grads["beta"][:, :, -1, 0] += (dW * W).sum(-1)
    if given["MOMENTUM"]:
        S, dS = given["states"][:-1, :, 1], after[:, :, 1]
        grads["c"][:, :, -1, 0] += (dW * S).sum(-1)
        grads["H"][..., 0, 0] = (dS * S).sum(-1)
    return d_initial


def _over_chunks(x: Tensor, g: Tensor) -> Tensor:
    """x^T g of rows [NC, N, C, ...] of all chunks."""
    return torch.einsum("inck,incv->nkv", x, g)


class _Walk(torch.autograd.Function):
    """The loop over all chunks, from the state `start` [N, PARTS, SIZE]."""

    @staticmethod
    def forward(ctx, constants: dict, closed, start, initial, *rows):
        rows = tuple(x if x is None else x.contiguous() for x in rows)
        o, size = torch.empty_like(rows[2]), max(1, isqrt(len(rows[0])))
        kept: list[Tensor] = []
        for first in range(0, len(o), size):
            part, kept = slice(first, first + size), [*kept, start]
            states = start.new_empty(len(o[part]) + 1, *start.shape)
            states[0] = start
            given = _write_group(constants, *_part(part, rows, closed), initial, states)
            _launch(read_kernel, _grid(given), {**given, "o": o[part]})
            start = states[-1].clone()
        ctx.save_for_backward(closed, initial, torch.stack(kept), *rows)
        ctx.constants, ctx.size = constants, size
        return o, start

    @staticmethod
    @first_derivatives_only
    def backward(ctx, do, d_start):
        closed, initial, kept, *rows = ctx.saved_tensors
        do, d_initial, d_rows = do.contiguous(), None, [None if x is None else torch.empty_like(x) for x in rows]
        for n in reversed(range(len(kept))):
            part = slice(n * ctx.size, (n + 1) * ctx.size)
            states, d_states = kept.new_empty(2, len(do[part]) + 1, *d_start.shape)
            states[0], d_states[-1] = kept[n], d_start
            given = _write_group(ctx.constants, *_part(part, rows, closed), initial, states)
            grads, added = _backward_group(given, do[part], d_states)
            d_start, d_initial = d_states[0].clone(), added if d_initial is None else d_initial + added
            for whole, name in zip(d_rows, _ROWS):
                if whole is not None:
                    whole[part] = grads[name]
        return None, None, d_start, d_initial, *d_rows


def _part(part: slice, rows, closed) -> tuple[dict, Tensor | None]:
    """Some of the chunks."""
    some = [x if x is None else x[part] for x in (*rows, closed)]
    return dict(zip(_ROWS, some)), some[-1]


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
    anchor, C, (K, hidden) = any(x is not True for x in closed), q.shape[2], W[0].shape[1:]
    start = torch.stack([_flat(layers) for layers in (W, S, A if anchor else ()) if layers], dim=1)
    decay, momentum = coefficients.beta is not None, bool(S)
    constants = _constants(C, K, v.shape[-1], hidden, rule, dtype, decay, momentum, anchor)
    table = torch.stack([_row(x, q) for x in closed[:-1]]) if anchor else None
    o, final = _Walk.apply(
        constants, table, start, _flat(initial) if constants["RETURNS"] else None, q, k, v, *coefficients
    )
    after = [_layers(x, W) for x in final.unbind(1)]
    W, S = after[0], after[1] if S else ()
    if anchor:
        is_closed = _row(closed[-1], q).bool()[:, None, None]
        A = tuple(torch.where(is_closed, w, a) for w, a in zip(W, after[-1]))
    elif A:
        A = tuple(w.clone() for w in W)
    return o, (W, S, A)


def _flat(layers) -> Tensor:
    """[N, d_in, d_out] of each layer -> [N, SIZE]."""
    return torch.cat([x.flatten(1) for x in layers], dim=1)


def _layers(flat: Tensor, like) -> tuple[Tensor, ...]:
    """The inverse of `_flat`."""
    parts = flat.split([W.shape[1] * W.shape[2] for W in like], dim=1)
    return tuple(part.unflatten(1, W.shape[1:]) for part, W in zip(parts, like))


def _row(closed: bool | Tensor, like: Tensor) -> Tensor:
    """`closed` as a tensor [N] int32."""
    N = like.shape[1]
    if isinstance(closed, bool):
        return torch.full((N,), int(closed), dtype=torch.int32, device=like.device)
    return closed.flatten().to(torch.int32)
