"""One token in Triton: a launch for the convolutions of q, k and v, and one for all that follows up to the output.

In the second a program holds the whole memory S [K, V] of one head of one row. Numbers are float32 from the load of
the projections to the store of the output; between the steps of a mixer in 16 bits nothing is rounded.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_memory.ops.kernel_report import POINTERS, Variant, variant
from hf_memory.ops.linear_attention.reference import EPS
from hf_memory.ops.tiles import program

CHANNELS = 256  # of a program of the convolutions


@triton.jit
def _load(x, i, mask):
    return tl.cast(tl.load(x + i, mask=mask, other=0.0), tl.float32)


@triton.jit
def _silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def _softplus(x):
    """log(1 + e^x), with all digits of a small result."""
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    lost = u == 1.0
    return tl.maximum(x, 0.0) + tl.where(lost, e, tl.log(u) * (e / tl.where(lost, 1.0, u - 1.0)))


@triton.jit
def _unit(x):
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + 1e-6)


@triton.jit
def _convolve(x, weight, bias, window, y, n, tile, real, D: tl.constexpr, W: tl.constexpr, BD: tl.constexpr):
    """y = sum_w weight_w token_w + bias over the window and x, and the window one token on."""
    i = tile * BD + tl.arange(0, BD)
    in_d = i < D
    moves = i < tl.where(real, D, 0)  # the window stays at padding
    new = tl.load(x + n * D + i, mask=in_d, other=0.0)
    total = tl.cast(new, tl.float32) * _load(weight, i * W + W - 1, in_d)
    for w in tl.static_range(W - 1):
        slot = window + (n * (W - 1) + w) * D + i
        token = tl.load(slot, mask=in_d, other=0.0)
        total += tl.cast(token, tl.float32) * _load(weight, i * W + w, in_d)
        if w > 0:
            tl.store(slot - D, token, mask=moves)
    if W > 1:
        last = window + (n * (W - 1) + W - 2) * D + i
        tl.store(last, tl.cast(new, window.dtype.element_ty), mask=moves)
    if bias is not None:
        total += _load(bias, i, in_d)
    tl.store(y + n * D + i, tl.cast(tl.where(real, total, 0.0), y.dtype.element_ty), mask=in_d)


@triton.jit
def _convolution_kernel(
    q,  # [B, DQ]
    k,  # [B, DK]
    v,  # [B, DV]
    q_weight,  # [DQ, W]
    k_weight,  # [DK, W]
    v_weight,  # [DV, W]
    q_bias,  # [DQ] or None
    k_bias,  # [DK] or None
    v_bias,  # [DV] or None
    q_window,  # [B, W - 1, DQ], changed
    k_window,  # [B, W - 1, DK], changed
    v_window,  # [B, W - 1, DV], changed
    mask,  # [B] or None
    q_out,  # [B, DQ]
    k_out,  # [B, DK]
    v_out,  # [B, DV]
    DQ: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    W: tl.constexpr,
    BD: tl.constexpr,
):
    """A tile of the channels of q, k or v."""
    TQ: tl.constexpr = (DQ + BD - 1) // BD
    TK: tl.constexpr = (DK + BD - 1) // BD
    TV: tl.constexpr = (DV + BD - 1) // BD
    n, _, tile = program(1, TQ + TK + TV)
    real = tl.load(mask + n) != 0 if mask is not None else True
    if tile < TQ:
        _convolve(q, q_weight, q_bias, q_window, q_out, n, tile, real, DQ, W, BD)
    elif tile < TQ + TK:
        _convolve(k, k_weight, k_bias, k_window, k_out, n, tile - TQ, real, DK, W, BD)
    else:
        _convolve(v, v_weight, v_bias, v_window, v_out, n, tile - TQ - TK, real, DV, W, BD)


@triton.jit
def _step_kernel(
    q,  # [B, HQ, K]
    k,  # [B, HK, K]
    v,  # [B, HX, V]
    memory,  # S [B, HV, K, V], changed
    normalizer,  # z [B, HV, K], changed; or None
    mask,  # [B] or None
    beta,  # [B, HV] or None
    decay_gate,  # [B, HV], or [B, HV, K] if VECTOR; or None
    A_log,  # [HV] or None
    dt_bias,  # [HV], or [HV, K] if VECTOR; or None
    skip,  # [HV] or None
    norm,  # [V] or None
    gate,  # [B, HV, V] or None
    o,  # [B, HV, V]
    temperature,
    eps,
    strength,
    scale,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    HX: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DECAY: tl.constexpr,
    VECTOR: tl.constexpr,
    ACTIVATION: tl.constexpr,
    UNIT_LENGTH: tl.constexpr,
    GATE: tl.constexpr,
    EPS: tl.constexpr,
):
    """One head of one row."""
    n, hv, _ = program(HV, 1)
    head = n * HV + hv
    i_k, i_v = tl.arange(0, BK), tl.arange(0, BV)
    in_k, in_v = i_k < K, i_v < V
    in_s = in_k[:, None] & in_v[None, :]
    at_s = memory + head * K * V + i_k[:, None] * V + i_v[None, :]
    S = tl.load(at_s, mask=in_s, other=0.0)
    real = tl.load(mask + n) != 0 if mask is not None else True

    x_q = _load(q, (n * HQ + hv // (HV // HQ)) * K + i_k, in_k)
    x_k = _load(k, (n * HK + hv // (HV // HK)) * K + i_k, in_k)
    x_v = _load(v, (n * HX + hv // (HV // HX)) * V + i_v, in_v)
    if ACTIVATION == "silu":
        x_q, x_k, x_v = _silu(x_q), _silu(x_k), _silu(x_v)
    elif ACTIVATION == "elu":
        x_q = tl.where(x_q > 0.0, x_q + 1.0, tl.exp(x_q))
        x_k = tl.where(x_k > 0.0, x_k + 1.0, tl.exp(x_k))
    if UNIT_LENGTH:
        x_q, x_k = _unit(x_q), _unit(x_k)
    x_k = tl.where(i_k < tl.where(real, K, 0), x_k, 0.0)
    value = x_v

    if DECAY != "none":
        raw = 0.0
        if DECAY != "fixed":
            raw = _load(decay_gate, head * K + i_k, in_k) if VECTOR else tl.cast(tl.load(decay_gate + head), tl.float32)
        if DECAY == "fixed":
            keep = 1.0 - tl.exp2(-5.0 - tl.cast(hv, tl.float32))
        elif DECAY == "log":
            keep = tl.exp(raw)
        elif DECAY == "sigmoid":
            keep = tl.exp(-_softplus(-raw) / temperature)
        else:
            raw += _load(dt_bias, hv * K + i_k, in_k) if VECTOR else tl.cast(tl.load(dt_bias + hv), tl.float32)
            step = _softplus(raw)
            keep = tl.exp(-tl.exp(tl.cast(tl.load(A_log + hv), tl.float32)) * step)
            if skip is not None:
                value = x_v * step
        keep = tl.where(real, keep, 1.0)
        S *= keep[:, None] if VECTOR else keep

    if beta is not None:
        b = strength * tl.sigmoid(tl.cast(tl.load(beta + head), tl.float32))
        value = b * (value - tl.sum(S * x_k[:, None], axis=0))
    S += x_k[:, None] * value[None, :]
    tl.store(at_s, S, mask=in_s)
    read = tl.sum(S * x_q[:, None], axis=0)
    if normalizer is not None:
        at_z = normalizer + head * K + i_k
        z = tl.load(at_z, mask=in_k, other=0.0)
        if DECAY != "none":
            z *= keep
        z += x_k
        tl.store(at_z, z, mask=in_k)
        read /= tl.sum(z * x_q, axis=0) + EPS
    else:
        read *= scale

    if skip is not None:
        read += tl.cast(tl.load(skip + hv), tl.float32) * x_v
    if norm is not None:
        read *= tl.rsqrt(tl.sum(read * read, axis=0) / V + eps) * _load(norm, i_v, in_v)
    if GATE != "none":
        raw_gate = _load(gate, head * V + i_v, in_v)
        read *= _silu(raw_gate) if GATE == "silu" else tl.sigmoid(raw_gate)
    tl.store(o + head * V + i_v, tl.cast(read, o.dtype.element_ty), mask=in_v)


@torch.library.custom_op("hf_memory::convolution_step", mutates_args=("q_window", "k_window", "v_window"))
def convolution_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    v_weight: Tensor,
    q_bias: Tensor | None,
    k_bias: Tensor | None,
    v_bias: Tensor | None,
    q_window: Tensor,
    k_window: Tensor,
    v_window: Tensor,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `hf_memory.ops.decoding.convolution_step`."""
    inputs = [x.contiguous() for x in (q, k, v)]
    outputs = [torch.empty_like(x) for x in inputs]
    weights = [x.contiguous() for x in (q_weight, k_weight, v_weight)]
    constants = _convolution_constants(q.shape[1], k.shape[1], v.shape[1], q_weight.shape[1])
    tiles = sum(triton.cdiv(x.shape[1], CHANNELS) for x in inputs)
    _convolution_kernel[(q.shape[0] * tiles,)](
        *inputs, *weights, q_bias, k_bias, v_bias, q_window, k_window, v_window, mask, *outputs, **constants
    )
    return outputs[0], outputs[1], outputs[2]


@convolution_step.register_fake
def _(q, k, v, *others):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@torch.library.custom_op("hf_memory::memory_step", mutates_args=("memory", "normalizer"))
def memory_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    memory: Tensor,
    normalizer: Tensor | None,
    mask: Tensor | None,
    beta: Tensor | None,
    decay: str,
    decay_gate: Tensor | None,
    temperature: float,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    skip: Tensor | None,
    norm: Tensor | None,
    eps: float,
    gate: Tensor | None,
    gate_activation: str,
    activation: str,
    unit_length: bool,
    strength: float,
    scale: float,
) -> Tensor:
    """See `hf_memory.ops.decoding.memory_step`."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    decay_gate, gate, beta = (None if x is None else x.contiguous() for x in (decay_gate, gate, beta))
    B, HV, K, V = memory.shape
    o = v.new_empty(B, HV, V)
    vector = decay_gate is not None and decay_gate.ndim == 3
    _step_kernel[(B * HV,)](
        q, k, v, memory, normalizer, mask, beta, decay_gate, A_log, dt_bias, skip, norm, gate, o,
        temperature, eps, strength, scale, **_sizes(q.shape[1], k.shape[1], v.shape[1], HV, K, V),
        DECAY=decay, VECTOR=vector, ACTIVATION=activation, UNIT_LENGTH=unit_length, GATE=gate_activation, EPS=EPS,
    )  # fmt: skip
    return o


@memory_step.register_fake
def _(q, k, v, memory, *others):
    B, HV, _, V = memory.shape
    return v.new_empty(B, HV, V)


def _convolution_constants(DQ: int, DK: int, DV: int, W: int) -> dict:
    return {"DQ": DQ, "DK": DK, "DV": DV, "W": W, "BD": CHANNELS, "num_warps": CHANNELS // 64, "num_stages": 1}


def _sizes(HQ: int, HK: int, HX: int, HV: int, K: int, V: int) -> dict:
    """Sizes and launch options: a thread holds 32 numbers of the memory, or 64 of a large one."""
    BK, BV = triton.next_power_of_2(K), triton.next_power_of_2(V)
    warps = max(1, min(16, BK * BV // 1024))
    heads = {"HQ": HQ, "HK": HK, "HX": HX, "HV": HV}
    return {**heads, "K": K, "V": V, "BK": BK, "BV": BV, "num_warps": warps, "num_stages": 1}


def variants() -> list[Variant]:
    """What is compiled ahead of time: the mixers of each family at the usual sizes of a head."""
    sizes = [(K, V, dtype) for K, V in ((64, 64), (128, 128), (128, 256)) for dtype in POINTERS]
    return [made for size in sizes for made in _cases(*size)]


_NARROW = {"q", "k", "v", "o", "q_out", "k_out", "v_out", "q_weight", "k_weight", "v_weight"}
_NARROW |= {"q_window", "k_window", "v_window", "beta", "decay_gate", "A_log", "dt_bias", "skip", "norm", "gate"}
_DECAY, _DELTA, _OUTPUT = {"decay_gate", "A_log", "dt_bias"}, {"beta"}, {"norm", "gate"}


def _cases(K: int, V: int, dtype: torch.dtype) -> list[Variant]:
    forms = {  # the decay, whether by channel, and what there is of the optional tensors
        "linear": ("none", False, {"normalizer"}),
        "retention": ("fixed", False, _OUTPUT),
        "additive vector": ("sigmoid", True, _OUTPUT | {"decay_gate"}),
        "mamba2": ("softplus", False, _DECAY | {"skip", "gate"}),
        "delta none": ("none", False, _DELTA | {"norm"}),
        "delta scalar": ("softplus", False, _DECAY | _DELTA | _OUTPUT),
        "delta vector": ("softplus", True, _DECAY | _DELTA | _OUTPUT),
    }
    optional = set.union(_DECAY, _DELTA, _OUTPUT, {"normalizer", "skip"})
    ending = f"{K} {str(dtype)[6:]}" if K == V else f"{K} x {V} {str(dtype)[6:]}"
    made = []
    for name, (decay, vector, present) in forms.items():
        constants = _sizes(8, 8, 8, 8, K, V) | {"DECAY": decay, "VECTOR": vector, "EPS": EPS}
        constants |= {"UNIT_LENGTH": "beta" in present, "GATE": "silu" if "gate" in present else "none"}
        constants |= {"ACTIVATION": "elu" if name == "linear" else "silu"}
        absent = optional - present | {"mask"}
        made.append(variant(f"_step_kernel {name} {ending}", _step_kernel, constants, absent, _NARROW, dtype))
    constants = _convolution_constants(8 * K, 8 * K, 8 * V, 4)
    absent = {"mask", "q_bias", "k_bias", "v_bias"}
    name = f"_convolution_kernel delta scalar {ending}"
    return [*made, variant(name, _convolution_kernel, constants, absent, _NARROW, dtype)]
