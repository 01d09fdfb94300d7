"""The choice of a backend: which form of an op runs for given inputs."""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hf_memory.ops.exported import varies
from hf_memory.ops.inputs import Dims, may_overwrite
from hf_memory.ops.layout import PIECE, per_sequence

Backend = Literal["auto", "reference", "chunk", "triton"]
BACKENDS = ("auto", "reference", "chunk", "triton")
NO_KERNEL = "has no kernel for this call"  # in messages of calls that kernels do not support
# largest number of key or value channels of a head for which there are kernels
MAX_KERNEL_DIM = 256


def kernel_limits(q: Tensor, dims: Dims) -> str | None:
    """Why kernels that hold all key channels of a head cannot run a call; None if they can."""
    if max(dims.K, dims.V) > MAX_KERNEL_DIM:
        return f"K and V must be at most {MAX_KERNEL_DIM}, got {dims.K} and {dims.V}"
    if q.dtype == torch.float64:
        return "q must be float32, bfloat16 or float16, got float64"
    return None


def choose_backend(
    backend: str, q: Tensor, kernel_refuses: str | None
) -> Literal["reference", "chunk", "triton"]:
    """The backend that runs: a pure function of the arguments.

    Args:
        backend: the requested backend. Anything but "auto" runs as requested or raises an error.
        q: any input [B, T, ...]; kernels run on CUDA tensors, and on CPU tensors in Triton's interpreter. "auto" takes
            none in a graph that is exported for any number of tokens.
        kernel_refuses: the reason why no kernel supports these shapes and dtypes, as a clause; None if one does.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "auto":
        is_fixed = not varies(q.shape[1])
        has_kernels = is_fixed and kernel_refuses is None and no_kernels_on(q.device) is None
        return "triton" if has_kernels else "chunk"
    if backend == "triton":
        if not triton_is_installed():
            raise ValueError("backend='triton' needs the triton package, which is not installed")
        if kernel_refuses is not None:
            raise ValueError(f"backend='triton' {NO_KERNEL}: {kernel_refuses}")
        from triton import knobs

        if not q.is_cuda and not knobs.runtime.interpret:
            raise ValueError(
                f"backend='triton' needs CUDA tensors, got {q.device}; use 'auto' or 'chunk'"
            )
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
        """Run the form that the backend, the sizes and autograd allow.

        Args:
            backend: the backend that the user asked for.
            dims: sizes of the call.
            inputs: q, k, v, and then the inputs in the order of `names`, all checked and without padding.
            initial_state: the state before the tokens, a tensor or a pair of them.
            scale: factor of q, or None for K ** -0.5.
            in_place: whether the caller lets the op overwrite the initial state.
            cu_seqlens: boundaries [N + 1] of packed sequences, or None.

        Returns:
            The output [B, T, heads of q, V], and the final state.
        """
        scale = dims.K**-0.5 if scale is None else scale
        q = inputs[0]
        backend = choose_backend(backend, q, kernel_limits(q, dims))
        is_repeated = backend != "chunk" and q.shape[2] > dims.HV
        if is_repeated:
            inputs, initial_state = _per_query(inputs, initial_state, dims.HV)
        is_pair = isinstance(initial_state, tuple)
        is_step = dims.T == 1 and cu_seqlens is None
        in_place = may_overwrite(in_place, *(initial_state if is_pair else (initial_state,)))
        if backend == "chunk" and is_step:
            return self.one_token(
                *inputs, initial_state=initial_state, scale=scale, in_place=in_place
            )
        if backend == "triton" and is_step and not is_pair and not torch.is_grad_enabled():
            state = initial_state
            if not in_place:
                state = initial_state.clone(memory_format=torch.contiguous_format)
            o = self._one_token_kernel(inputs, state, scale)
        elif backend == "triton":
            o, state = self.kernels()(*inputs, initial_state, scale, cu_seqlens)
        else:
            op = self.reference if backend == "reference" else self.chunk
            o, state = per_sequence(
                op,
                cu_seqlens,
                *inputs,
                initial_state=initial_state,
                piece=PIECE,
                scale=scale,
            )
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


def no_kernels_on(device: torch.device | str) -> str | None:
    """Why "auto" takes no kernels on a device, as a clause; None if it takes them where there are any."""
    if torch.device(device).type != "cuda":
        return "kernels need a CUDA device"
    if not triton_is_installed():
        return "the triton package is not installed"
    return "kernels need NVIDIA GPUs" if _is_amd() else None


def triton_is_installed() -> bool:
    """Whether the triton package is installed; this does not import it."""
    from importlib.util import find_spec

    return find_spec("triton") is not None


@cache
def _is_amd() -> bool:
    """Whether GPUs are AMD's, which have no tf32 products; says once that ops then run without kernels."""
    if torch.version.hip is not None:
        warnings.warn(
            "the kernels of hf_memory need NVIDIA GPUs: backend='auto' is 'chunk' on AMD GPUs",
            stacklevel=2,
        )
    return torch.version.hip is not None
