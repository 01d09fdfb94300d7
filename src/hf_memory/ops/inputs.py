"""Conventions of all ops: the letters of dimensions, and checks of inputs and states.

Dimensions, which have these letters throughout the package:

    B   rows of the batch                   T   tokens
    H   query and key heads                 HV  value heads, a multiple of H: value head j reads key head j // (HV // H)
    HQ  query heads, if more than value heads: query head j reads the memory of value head j // (HQ // HV)
    K   key channels of a head              V   value channels of a head
    N   sequences: B, or the number of packed sequences
    C   tokens of a chunk                   NC  chunks of a sequence
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Dims(NamedTuple):
    """The sizes in a call of an op; see the module's docstring for the letters."""

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int


def check_inputs(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None, *, grouped: bool = False
) -> Dims:
    """Check what all ops share and return the sizes.

    Args:
        q: queries [B, T, H, K].
        k: keys [B, T, H, K].
        v: values [B, T, HV, V].
        cu_seqlens: boundaries of packed sequences [N + 1], or None.
        grouped: whether q may have HQ heads, a multiple of HV.

    Raises:
        ValueError: if a shape or dtype is wrong; the message names the argument.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_is_tensor(name, x)
    if q.ndim != 4:
        raise ValueError(f"q must be [B, T, H, K], got shape {tuple(q.shape)}")
    B, T, H, K = q.shape
    if grouped and k.ndim == v.ndim == 4 and v.shape[2] and not H % v.shape[2]:
        H = k.shape[2]
    if not B or not T:
        raise ValueError(f"q must have at least one row and one token, got B={B} and T={T}")
    check_tensor("k", k, (B, T, H, K), like=q)
    if v.ndim != 4 or v.shape[:2] != (B, T) or H == 0 or v.shape[2] % H:
        raise ValueError(
            f"v must be [B, T, HV, V] with B={B}, T={T} and HV a multiple of H={H}, got shape {tuple(v.shape)}"
        )
    check_tensor("v", v, tuple(v.shape), like=q)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not x.is_floating_point():
            raise ValueError(f"{name} must have a floating point dtype, got {x.dtype}")
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    N = B if cu_seqlens is None else _check_cu_seqlens(cu_seqlens, B)
    return Dims(B, T, H, v.shape[2], K, v.shape[3], N)


def shape_or_type(x: Any) -> str:
    """What was given in place of some tensor, for a message: the shape of another one, or a type."""
    return f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def check_is_tensor(name: str, x: Any) -> None:
    """Raise ValueError unless `x` is a tensor of torch, and not an array or a list."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(x).__name__}")


def check_tensor(name: str, x: Tensor, shape: tuple[int, ...], *, like: Tensor) -> None:
    """Raise ValueError unless `x` has this shape and is on the device of `like`."""
    check_is_tensor(name, x)
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(x.shape)}")
    if x.device != like.device:
        raise ValueError(f"{name} must be on {like.device}, the device of q, got {x.device}")


def check_gate(
    name: str, g: Tensor | None, dims: Dims, *, like: Tensor, vector: bool = False
) -> None:
    """Check that a gate, if there is one, is [B, T, HV], or, if `vector` allows it, [B, T, HV, K]."""
    scalar_shape = (dims.B, dims.T, dims.HV)
    if g is None:
        return None
    check_is_tensor(name, g)
    if vector and tuple(g.shape) == (*scalar_shape, dims.K):
        return check_tensor(name, g, tuple(g.shape), like=like)
    if tuple(g.shape) != scalar_shape:
        wanted = f"{scalar_shape} or {(*scalar_shape, dims.K)}" if vector else f"{scalar_shape}"
        raise ValueError(f"{name} must have shape {wanted}, got {tuple(g.shape)}")
    return check_tensor(name, g, scalar_shape, like=like)


def check_chunk_size(chunk_size: int) -> None:
    """Check that a memory can learn in chunks of so many tokens."""
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size must be a positive integer, got {chunk_size!r}")


def _check_cu_seqlens(cu_seqlens: Tensor, B: int) -> int:
    """Check shape and dtype and return N; values are not checked, since that would wait for the device."""
    if B != 1:
        raise ValueError(
            f"q must have B=1 with cu_seqlens, which packs sequences into one row, got B={B}"
        )
    check_is_tensor("cu_seqlens", cu_seqlens)
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"cu_seqlens must have shape [N + 1] with N >= 1, got {tuple(cu_seqlens.shape)}"
        )
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")
    return cu_seqlens.shape[0] - 1


def matrix_state(name: str, state: Tensor | None, dims: Dims, *, like: Tensor) -> Tensor:
    """The given initial state [N, HV, K, V], or zeros; float64 if `like` is, else float32."""
    shape = (dims.N, dims.HV, dims.K, dims.V)
    dtype = torch.promote_types(like.dtype, torch.float32)
    if state is None:
        return like.new_zeros(shape, dtype=dtype)
    if not isinstance(state, Tensor):
        raise ValueError(f"{name} must be a tensor of shape {shape}, got {type(state).__name__}")
    check_tensor(name, state, shape, like=like)
    return state.to(dtype)


def named_state(state: Any, State: Any, shapes: Sequence[tuple[int, ...]], *, like: Tensor) -> Any:
    """The given initial state, or zeros; float64 if `like` is, else float32, but numbers of tokens [N] are int64.

    Args:
        state: a NamedTuple, a tuple of as many tensors, or None.
        State: the type of the NamedTuple.
        shapes: those of its tensors.
        like: q.
    """
    float_dtype = torch.promote_types(like.dtype, torch.float32)
    dtypes = [torch.long if len(shape) == 1 else float_dtype for shape in shapes]
    if state is None:
        return State(*(like.new_zeros(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes)))
    if not isinstance(state, tuple) or len(state) != len(shapes):
        raise ValueError(f"initial_state must be a {State.__name__}, got {type(state).__name__}")
    for name, x, shape in zip(State._fields, state, shapes):
        check_tensor(f"initial_state.{name}", x, shape, like=like)
    return State(*(x.to(dtype) for x, dtype in zip(state, dtypes)))


def may_overwrite(in_place: bool, *states: Tensor) -> bool:
    """Whether an op may overwrite states: only if the caller allows it and autograd does not need them."""
    return in_place and not torch.is_grad_enabled() and all(x.is_contiguous() for x in states)
