"""The definition of the large-chunk memory, one token at a time, with inner gradients by autograd."""

import torch
from torch import Tensor
from torch.func import grad
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from hf_memory.ops.contract import in_float32, normal_numbers, repeat_heads
from hf_memory.ops.large_chunk_memory.network import LargeChunkState, Layers, enter, learned, leave, network
from hf_memory.ops.neural_memory.network import keep


@in_float32
def large_chunk_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lr: Tensor,
    momentum: Tensor,
    mask: Tensor | None,
    *,
    initial_state: LargeChunkState,
    weights: Layers,
    chunk_size: int,
    step_size: float,
) -> tuple[Tensor, LargeChunkState]:
    """The recurrence in the op's docstring."""
    q, k = repeat_heads(q, v.shape[2]), repeat_heads(k, v.shape[2])
    A, S, total = enter(initial_state, weights)
    none, phase, outputs = tuple(map(torch.zeros_like, S)), initial_state.phase, []
    for t in range(q.shape[1]):
        real = torch.ones_like(phase, dtype=torch.bool) if mask is None else mask[:, t]
        o = network(q[:, t, :, None], A)[:, :, 0]
        outputs.append(o * real[:, None, None])
        g = _gradient(A, k[:, t, :, None], v[:, t, :, None], lr[:, t, :, None, None])
        share = momentum[:, t, :, None, None] / chunk_size
        total = keep(real, tuple(x + share * s + y for x, s, y in zip(total, S, g)), total)
        phase = (phase + real) % chunk_size
        is_full = real & (phase == 0)
        A, S = keep(is_full, learned(A, total, weights, step_size), A), keep(is_full, total, S)
        total = keep(is_full, none, total)
    return torch.stack(outputs, dim=1), leave(A, S, total, phase, weights)


def _gradient(weights: Layers, k: Tensor, v: Tensor, lr: Tensor) -> Layers:
    """The gradient of lr <f(k), v>."""
    return grad(lambda weights: (lr * network(k, weights) * v).sum())(weights)


def example(
    *,
    B: int = 2,
    T: int = 65,
    H: int = 2,
    HV: int | None = None,
    K: int = 8,
    V: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    chunk_size: int = 32,
    width: int = 6,
) -> dict:
    """Valid random arguments of the op."""
    HV, V, wide = HV or H, V or K, torch.promote_types(dtype, torch.float32)
    random = normal_numbers(seed)
    shapes = ((K, width), (K, width), (width, V))
    P = sum(d_in * d_out for d_in, d_out in shapes)
    open_phase = torch.arange(1, B + 1) % chunk_size
    open_sum = random(B, HV, P) * (open_phase > 0)[:, None, None]
    moved, momentum = 0.1 * random(B, HV, P), random(B, HV, P)
    state = LargeChunkState(moved.to(wide), momentum.to(wide), open_sum.to(wide), open_phase)
    arguments = {
        "q": random(B, T, H, K).to(dtype),
        "k": F.normalize(random(B, T, H, K), dim=-1).to(dtype),
        "v": random(B, T, HV, V).to(dtype),
        "lr": random(B, T, HV).exp().to(wide),
        "momentum": random(B, T, HV).sigmoid().to(wide),
        "weights": tuple((random(HV, *shape) * shape[0] ** -0.5).to(wide) for shape in shapes),
        "mask": torch.ones(B, T, dtype=torch.bool),
        "initial_state": state,
    }
    return {**tree_map_only(Tensor, lambda x: x.to(device), arguments), "chunk_size": chunk_size}
