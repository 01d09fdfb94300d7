"""Conventions of all ops: names of dimensions, input checks, choice of the backend, float32 inside, packed sequences.

Dimensions, which have these letters throughout the package:

    B   rows of the batch                   T   tokens
    H   query and key heads                 HV  value heads, a multiple of H: value head j reads key head j // (HV // H)
    HQ  query heads, if more than value heads: query head j reads the memory of value head j // (HQ // HV)
    K   key channels of a head              V   value channels of a head
    N   sequences: B, or the number of packed sequences
    C   tokens of a chunk                   NC  chunks of a sequence
"""

import warnings
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

Backend = Literal["auto", "reference", "chunk", "triton"]
BACKENDS = ("auto", "reference", "chunk", "triton")
MAX_KERNEL_DIM = 256
CPU_MULTIPLIES_BFLOAT16 = torch.cpu._is_avx512_bf16_supported()  # otherwise slower than float32 in PyTorch


class Dims(NamedTuple):
    """The sizes in a call of an op; see the module's docstring for the letters."""

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int


def check_inputs(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None, *, grouped: bool = False) -> Dims:
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


def check_tensor(name: str, x: Tensor, shape: tuple[int, ...], *, like: Tensor) -> None:
    """Raise ValueError unless `x` has this shape and is on the device of `like`."""
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(x.shape)}")
    if x.device != like.device:
        raise ValueError(f"{name} must be on {like.device}, the device of q, got {x.device}")


def check_gate(name: str, g: Tensor | None, dims: Dims, *, like: Tensor, vector: bool = False) -> None:
    """Check that a gate, if there is one, is [B, T, HV], or, if `vector` allows it, [B, T, HV, K]."""
    scalar_shape = (dims.B, dims.T, dims.HV)
    if g is None:
        return None
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
        raise ValueError(f"q must have B=1 with cu_seqlens, which packs sequences into one row, got B={B}")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens must have shape [N + 1] with N >= 1, got {tuple(cu_seqlens.shape)}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")
    return cu_seqlens.shape[0] - 1


def matrix_state(name: str, state: Tensor | None, dims: Dims, *, like: Tensor) -> Tensor:
    """The given initial state [N, HV, K, V], or zeros; float64 if `like` is, else float32."""
    shape, dtype = (dims.N, dims.HV, dims.K, dims.V), torch.promote_types(like.dtype, torch.float32)
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
    wide = torch.promote_types(like.dtype, torch.float32)
    dtypes = [torch.long if len(shape) == 1 else wide for shape in shapes]
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


def kernel_limits(q: Tensor, dims: Dims) -> str | None:
    """Why kernels that hold all key channels of a head cannot run a call; None if they can."""
    if max(dims.K, dims.V) > MAX_KERNEL_DIM:
        return f"K and V must be at most {MAX_KERNEL_DIM}, got {dims.K} and {dims.V}"
    if q.dtype == torch.float64:
        return "q must be float32, bfloat16 or float16, got float64"
    return None


def choose_backend(backend: str, q: Tensor, kernel_refuses: str | None) -> Literal["reference", "chunk", "triton"]:
    """The backend that runs: a pure function of the arguments.

    Args:
        backend: the requested backend. Anything but "auto" runs as requested or raises an error.
        q: any input; kernels run on CUDA tensors, and on CPU tensors in Triton's interpreter.
        kernel_refuses: the reason why no kernel supports these shapes and dtypes, as a clause; None if one does.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "auto":
        has_kernels = q.is_cuda and kernel_refuses is None and triton_is_installed() and not _is_amd()
        return "triton" if has_kernels else "chunk"
    if backend == "triton":
        if not triton_is_installed():
            raise ValueError("backend='triton' needs the triton package, which is not installed")
        if kernel_refuses is not None:
            raise ValueError(f"backend='triton' has no kernel for this call: {kernel_refuses}")
        from triton import knobs

        if not q.is_cuda and not knobs.runtime.interpret:
            raise ValueError(f"backend='triton' needs CUDA tensors, got {q.device}; use 'auto' or 'chunk'")
    return backend  # type: ignore[return-value]


class Forms(NamedTuple):
    """The implementations of an op whose state is a matrix for each head. All compute the same function.

    If the op supports HQ query heads, the chunk form and the form for one token do so too; for the other forms the
    memory is repeated for every query head.
    """

    reference: Callable
    chunk: Callable
    one_token: Callable  # may overwrite the initial state
    kernels: Callable[[], Callable]  # imports the kernels
    names: tuple[str, ...]  # of the inputs after q, k and v

    def run(
        self,
        backend: str,
        dims: Dims,
        inputs: list,
        initial_state,
        *,
        scale: float | None,
        in_place: bool,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Any]:
        """The output and the final state; `inputs` were checked, and start with q."""
        scale, q = dims.K**-0.5 if scale is None else scale, inputs[0]
        backend = choose_backend(backend, q, kernel_limits(q, dims))
        is_repeated = backend != "chunk" and q.shape[2] > dims.HV
        if is_repeated:
            inputs, initial_state = _per_query(inputs, initial_state, dims.HV)
        is_pair, is_step = isinstance(initial_state, tuple), dims.T == 1 and cu_seqlens is None
        own = may_overwrite(in_place, *(initial_state if is_pair else (initial_state,)))
        if backend == "chunk" and is_step:
            return self.one_token(*inputs, initial_state=initial_state, scale=scale, in_place=own)
        if backend == "triton" and is_step and not is_pair and not torch.is_grad_enabled():
            state = initial_state if own else initial_state.clone(memory_format=torch.contiguous_format)
            o = self._one_token_kernel(inputs, state, scale)
        elif backend == "triton":
            o, state = self.kernels()(*inputs, initial_state, scale, cu_seqlens)
        else:
            op = self.reference if backend == "reference" else self.chunk
            o, state = per_sequence(op, cu_seqlens, *inputs, initial_state=initial_state, scale=scale)
        if is_repeated:  # the states of a group are equal
            state = tree_map(lambda x: x[:, :: x.shape[1] // dims.HV], state)
        return o, state

    def _one_token_kernel(self, inputs: list, state: Tensor, scale: float) -> Tensor:
        from hf_memory.ops.triton.one_token import one_token

        q, k, v, *others = inputs
        return one_token(q, k, v, state, scale, **dict(zip(self.names, others)))


def _per_query(inputs: list, state: Any, HV: int) -> tuple[list, Any]:
    """The inputs and the state, repeated so that all have as many heads as q."""
    q, *others = inputs
    G = q.shape[2] // HV
    others = [x if x is None else x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in others]
    return [q, *others], tree_map(lambda x: x.repeat_interleave(G, 1), state)


def triton_is_installed() -> bool:
    """Whether the triton package is installed; this does not import it."""
    from importlib.util import find_spec

    return find_spec("triton") is not None


@cache
def _is_amd() -> bool:
    """Whether GPUs are AMD's, which have no tf32 products; says once that ops then run without kernels."""
    if torch.version.hip is not None:
        warnings.warn("the kernels of hf_memory need NVIDIA GPUs: backend='auto' is 'chunk' on AMD GPUs", stacklevel=2)
    return torch.version.hip is not None


def first_derivatives_only(backward: Callable) -> Callable:
    """Make `backward` of an autograd.Function raise an error if its result would be differentiated again.

    PyTorch's once_differentiable raises only if the incoming gradient requires a gradient; otherwise it returns zeros.
    """

    @wraps(backward)
    def checked(ctx, *gradients):
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph must be False, got True: only backend='reference' has second derivatives")
        return backward(ctx, *gradients)

    return checked


def in_float32(op: Callable) -> Callable:
    """Run `op(q, ...)` without autocast in float32, or float64 if q is; only the output o has the dtype of q."""
    return _widened(op, lambda q: 0)


def with_bfloat16_products(op: Callable) -> Callable:
    """Like `in_float32`, but q, k and v stay bfloat16 if the hardware multiplies bfloat16; all else is float32."""
    return _widened(op, lambda q: 3 if q.dtype == torch.bfloat16 and (q.is_cuda or CPU_MULTIPLIES_BFLOAT16) else 0)


def without_autocast(function: Callable, x: Tensor, *others: Any, **kwargs: Any) -> Any:
    """The result of `function(x, *others, **kwargs)` in the dtypes of these arguments, whatever autocast says."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):  # the context is expensive, this test is not
        return function(x, *others, **kwargs)
    with torch.autocast(kind, enabled=False):
        return function(x, *others, **kwargs)


def wide(x: Tensor) -> Tensor:
    """x in float64 if it is float64, else in float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def soft_capped(scores: Tensor, cap: float | None) -> Tensor:
    """cap tanh(scores / cap), as in Gemma 2; the scores themselves if there is no cap, None or 0."""
    return cap * torch.tanh(scores / cap) if cap else scores


def _widened(op: Callable, kept: Callable[[Tensor], int]) -> Callable:
    """`op` without autocast, with all but the first `kept(q)` arguments in float32; its output o has the dtype of q."""

    @wraps(op)
    def wide_op(*args, **kwargs):
        q, n = args[0], kept(args[0])
        wide = torch.promote_types(q.dtype, torch.float32)
        others = [_widen(x, wide) for x in args[n:]]
        kwargs = {name: _widen(x, wide) for name, x in kwargs.items()}
        o, state = without_autocast(op, *args[:n], *others, **kwargs)
        return o.to(q.dtype), state

    return wide_op


def _widen(x, dtype: torch.dtype):
    """Convert floating point tensors, also within tuples, to a dtype; those that have it stay the same objects."""
    if isinstance(x, Tensor):
        return x.to(dtype) if x.is_floating_point() else x
    if not isinstance(x, tuple) or all(not isinstance(y, Tensor) or y.dtype == dtype for y in x):
        return x
    return tree_map(lambda y: _widen(y, dtype), x)


def repeat_heads(x: Tensor, HV: int) -> Tensor:
    """[B, T, H, ...] -> [B, T, HV, ...]: repeat key heads for their value heads; HQ query heads are not changed."""
    return x if x.shape[2] >= HV else x.repeat_interleave(HV // x.shape[2], dim=2)


def without_padding(mask: Tensor | None, q: Tensor, *others: Tensor | None) -> list:
    """The inputs [B, T, ...] of an op, with zeros where the mask [B, T] is False."""
    if mask is None:
        return [q, *others]
    check_tensor("mask", mask, tuple(q.shape[:2]), like=q)
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must have dtype torch.bool, got {mask.dtype}")
    return [x if x is None else blank(x, mask) for x in (q, *others)]


def blank(x: Tensor, mask: Tensor) -> Tensor:
    """x with zeros at masked tokens [B, T], even where x is NaN, so that they affect neither results nor gradients."""
    return x.masked_fill(~beside(mask, x), 0)


def beside(x: Tensor, other: Tensor) -> Tensor:
    """x [B, T] as [B, T, 1, ...]: with dimensions of size one after its own, so that it has as many as `other`."""
    return x.view(*x.shape, *(1 for _ in other.shape[x.ndim :]))


class Sample:
    """Sizes and random float64 numbers for the example of an op. A call of it gives numbers for each token."""

    def __init__(
        self,
        *,
        B: int = 2,
        T: int = 65,
        H: int = 2,
        HV: int | None = None,
        K: int = 16,
        V: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        seed: int = 0,
    ):
        self.B, self.T, self.H, self.HV, self.K, self.V = B, T, H, HV or H, K, V or K
        self.dtype, self.device, self.generator = dtype, device, torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        """Normal numbers of this shape."""
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def __call__(self, *shape: int) -> Tensor:
        """Normal numbers [B, T, *shape]."""
        return self.normal(self.B, self.T, *shape)

    def unit(self, *shape: int) -> Tensor:
        """Random vectors of unit length [B, T, *shape]."""
        return F.normalize(self(*shape), dim=-1)

    def decay(self, kind: str) -> Tensor | None:
        """Logarithms of a decay; `kind` is "none", "scalar" or "vector"."""
        shapes = {"scalar": (self.HV,), "vector": (self.HV, self.K)}
        return F.logsigmoid(self(*shapes[kind]) + 1) if kind in shapes else None

    def state(self) -> Tensor:
        """A matrix for each head."""
        return self.normal(self.B, self.HV, self.K, self.V)

    def arguments(self, rows: dict[str, Any], **others: Any) -> dict[str, Any]:
        """Arguments of a call: rows in its dtype, the others in that of states; those that are None are left out."""

        def cast(x: Any, dtype: torch.dtype) -> Any:
            if not isinstance(x, Tensor):
                return x
            return x.to(self.device, dtype if x.is_floating_point() else x.dtype)

        wide, given = torch.promote_types(self.dtype, torch.float32), {n: x for n, x in others.items() if x is not None}
        return tree_map(lambda x: cast(x, self.dtype), rows) | tree_map(lambda x: cast(x, wide), given)


def varies(size: int) -> bool:
    """Whether a graph is exported with this size as a variable; a loop over it then cannot be unrolled."""
    return torch.compiler.is_exporting() and isinstance(size, torch.SymInt)


def per_sequence(op: Callable, cu_seqlens: Tensor | None, q: Tensor, *others: Tensor | None, initial_state, **kwargs):
    """Run `op(q, *others, initial_state=..., **kwargs)` once for each packed sequence and join the results.

    Args:
        op: takes tensors [B, T, ...] and a state [N, ...]; returns (o [B, T, ...], state [N, ...]).
        cu_seqlens: boundaries [N + 1], or None if each row is a sequence.
        q: [1, T, ...].
        *others: [1, T, ...] each, or None; k and v come first.
        initial_state: tensor or NamedTuple of tensors [N, ...].
        **kwargs: passed on.
    """
    if cu_seqlens is None:
        return op(q, *others, initial_state=initial_state, **kwargs)
    bounds, T = cu_seqlens.tolist(), q.shape[1]
    if bounds[0] != 0 or bounds[-1] != T or any(b < a for a, b in zip(bounds, bounds[1:])):
        raise ValueError(f"cu_seqlens must increase from 0 to T={T}, got {bounds}")
    outputs, states = [], []
    for n, (start, end) in enumerate(zip(bounds, bounds[1:])):
        state = tree_map(lambda s: s[n : n + 1], initial_state)  # noqa: B023
        if end > start:
            o, state = op(*(x if x is None else x[:, start:end] for x in (q, *others)), initial_state=state, **kwargs)
            outputs.append(o)
        states.append(tree_flatten(state))
    _, structure = states[0]
    joined = [torch.cat(parts) for parts in zip(*(leaves for leaves, _ in states))]
    o = torch.cat(outputs, dim=1) if outputs else others[1]
    return o, tree_unflatten(joined, structure)
