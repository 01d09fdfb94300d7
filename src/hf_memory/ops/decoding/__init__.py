"""One new token in each row: kernels that change the windows of convolutions and the memories where they lie.

They exist for CUDA and Triton's interpreter alone. What they compute is what `linear_attention` and `delta_rule` do
with one token, together with what stands before and after these in a mixer.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hf_memory.ops.contract import MAX_KERNEL_DIM, check_tensor

Activation = Literal["none", "silu", "elu"]
MAX_NARROW_DIM = 128  # of the smaller of K and V: one program holds a head's memory


class Convolution(NamedTuple):
    """A short convolution, and the tokens before the present one."""

    weight: Tensor  # [channels, W], the present token last
    bias: Tensor | None  # [channels]
    window: Tensor  # [B, W - 1, channels]


class Decay(NamedTuple):
    """How the logarithm g of what a memory keeps comes from a projection of the token.

    none: 0   fixed: log(1 - 2^(-5 - h))   log: gate   sigmoid: log sigmoid(gate) / temperature
    softplus: -e^A_log step with step = softplus(gate + dt_bias)
    """

    kind: Literal["none", "fixed", "log", "sigmoid", "softplus"] = "none"
    gate: Tensor | None = None  # [B, HV], or [B, HV, K] for one by key channel
    temperature: float = 1.0
    A_log: Tensor | None = None  # [HV]
    dt_bias: Tensor | None = None  # [HV] or [HV * K]


class Output(NamedTuple):
    """What happens to what was read: v past the memory, RMSNorm, and a gate."""

    skip: Tensor | None = None  # D [HV] of Mamba-2; with it what is written is v times the step of the decay
    norm: Tensor | None = None  # weight [V]
    eps: float = 0.0
    gate: Tensor | None = None  # [B, HV * V]
    activation: Literal["none", "silu", "sigmoid"] = "none"


NO_DECAY, AS_READ = Decay(), Output()


def takes(memory: Tensor) -> bool:
    """Whether there is a kernel for a memory [B, HV, K, V]: float32, and small enough for one program a head."""
    K, V = memory.shape[2:]
    return memory.dtype == torch.float32 and max(K, V) <= MAX_KERNEL_DIM and min(K, V) <= MAX_NARROW_DIM


def convolution_step(
    q: Tensor, k: Tensor, v: Tensor, convolutions: tuple[Convolution, ...], mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The short convolutions of one token, in one launch.

    Args:
        q: [B, channels], like k and v, which may have other numbers of channels.
        k: see q.
        v: see q.
        convolutions: those of q, k and v; their windows move on by one token, in place.
        mask: [B] bool, false at padding, where the result is zero and the window stays; or None.

    Returns:
        The three results, shaped like q, k and v.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    for name, x, (weight, bias, window) in zip("qkv", (q, k, v), convolutions, strict=True):
        if x.ndim != 2:
            raise ValueError(f"{name} must be [B, channels], got shape {tuple(x.shape)}")
        (B, channels), W = x.shape, weight.shape[1]
        check_tensor(f"weight of {name}", weight, (channels, W), like=x)
        check_tensor(f"window of {name}", window, (B, W - 1, channels), like=x)
        _check_contiguous(f"window of {name}", window)
        if bias is not None:
            check_tensor(f"bias of {name}", bias, (channels,), like=x)
    from hf_memory.ops.decoding.kernels import convolution_step as in_kernel

    weights, biases, windows = zip(*convolutions)
    return in_kernel(q, k, v, *weights, *biases, *windows, mask)


def memory_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    memory: Tensor,
    *,
    normalizer: Tensor | None = None,
    beta: Tensor | None = None,
    strength: float = 1.0,
    decay: Decay = NO_DECAY,
    output: Output = AS_READ,
    mask: Tensor | None = None,
    activation: Activation = "none",
    unit_length: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Write one token into a memory, in place, and read it.

        S <- e^g S;   S <- S + k v^T, or with beta S <- S + b k (v - S^T k)^T for b = strength sigmoid(beta)
        o = scale S^T q, or with a normaliser z <- e^g z + k, o = S^T q / (z^T q + 1e-6)

    Args:
        q: [B, heads, K], before `activation` and `unit_length`. The heads of q, k and v each divide HV; value head j
            reads head j // (HV // heads).
        k: [B, heads, K], see q.
        v: [B, heads, V], before `activation`.
        memory: S [B, HV, K, V] float32, contiguous; changed.
        normalizer: z [B, HV, K] float32, contiguous; changed. Or None.
        beta: write strength [B, HV] before its sigmoid; None adds v to what the memory recalls instead of replacing it.
        strength: the largest write strength.
        decay: see `Decay`.
        output: see `Output`.
        mask: [B] bool, false at padding, which leaves S and z as they are; or None.
        activation: "silu" of q, k and v, "elu" (plus one) of q and k, or "none".
        unit_length: divide q and k by their length.
        scale: of q, default K ** -0.5; not used with a normaliser.

    Returns:
        o [B, HV, V] in the dtype of v.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    B, HV, K, V = memory.shape
    if not takes(memory):
        raise ValueError(
            f"memory must be float32 with K and V up to {MAX_KERNEL_DIM}, one of them up to {MAX_NARROW_DIM}, "
            f"got {memory.dtype} and shape {tuple(memory.shape)}"
        )
    _check_contiguous("memory", memory)
    for name, x, D in (("q", q, K), ("k", k, K), ("v", v, V)):
        if x.ndim != 3 or x.shape[1] == 0 or HV % x.shape[1]:
            raise ValueError(f"{name} must be [B, heads, {D}] with heads a divisor of {HV}, got {tuple(x.shape)}")
        check_tensor(name, x, (B, x.shape[1], D), like=memory)
    vector = decay.gate is not None and decay.gate.ndim == 3
    per_head = (HV, K) if vector else (HV,)
    shapes = {
        "normalizer": (normalizer, (B, HV, K)),
        "beta": (beta, (B, HV)),
        "mask": (mask, (B,)),
        "decay.gate": (decay.gate, (B, *per_head)),
        "decay.A_log": (decay.A_log, (HV,)),
        "decay.dt_bias": (decay.dt_bias, (HV * K if vector else HV,)),
        "output.skip": (output.skip, (HV,)),
        "output.norm": (output.norm, (V,)),
        "output.gate": (output.gate, (B, HV * V)),
    }
    for name, (optional, shape) in shapes.items():
        if optional is not None:
            check_tensor(name, optional, shape, like=q)
    if normalizer is not None:
        _check_contiguous("normalizer", normalizer)
    from hf_memory.ops.decoding.kernels import memory_step as in_kernel

    scale = K**-0.5 if scale is None else scale
    return in_kernel(
        q, k, v, memory, normalizer, mask, beta, *decay, *output, activation, unit_length, strength, scale
    )  # fmt: skip


def _check_contiguous(name: str, x: Tensor) -> None:
    if not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous, since it is changed in place, got strides {x.stride()}")
