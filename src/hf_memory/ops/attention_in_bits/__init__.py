"""Attention of one token to keys and values in 8 or 4 bits, which are read as they are stored."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_memory.ops.attention_in_bits import chunk
from hf_memory.ops.bits import GROUP, packed_bytes, rotated
from hf_memory.ops.dispatch import MAX_KERNEL_DIM, Backend, choose_backend
from hf_memory.ops.inputs import check_tensor
from hf_memory.ops.precision import upcast, without_autocast
from hf_memory.ops.rows import Rows
from hf_memory.ops.soft_cap import soft_capped


def attention_in_bits(
    q: Tensor,
    keys: Tensor | Sequence[Tensor],
    values: Tensor | Sequence[Tensor],
    visible: Tensor | None = None,
    *,
    rows: Rows,
    scale: float,
    softcap: float | None = None,
    needs_mass: bool = True,
    backend: Backend = "auto",
) -> tuple[Tensor, Any]:
    """Softmax attention of one token of each row to packed rows, see `hf_memory.ops.bits`; without gradients.

        o = sum_j p_j v_j,   p = softmax_j(scale q k_j),   over the entries j that are visible

    The definition unpacks keys and values. In PyTorch, products of codes are faster, see `chunk`. Kernels read bytes,
    so that what they read of memory falls with the bits. Both turn queries and outputs in place of keys and values.

    Args:
        q: queries [B, H, G, D], the G queries of each head of keys.
        keys: [B, H, S, bytes] uint8, or B tensors [H, S, bytes] anywhere in memory, of `packed_bytes(D, bits)` each.
        values: the same.
        visible: [B or 1, H or 1, S] bool, which entries there are; or [B or 1, H or 1, G, S], which of them each query
            sees, for which there is no kernel; None: all.
        rows: the bits of keys and of values, 8 or 4 each.
        scale: factor of the products of queries and keys.
        softcap: c of c tanh(s / c), which replaces scores s; None: no cap.
        needs_mass: whether the mass of the softmax is asked for.
        backend: "triton", "chunk", which is PyTorch, or "auto": the kernel on CUDA where there is one.

    Returns:
        The outputs [B, H, G, D], zero for a row that sees nothing; and the logarithms of their mass in the softmax
        [B, H, G] in float32 (float64 for float64), or None.

    Raises:
        ValueError: an argument has a wrong shape or dtype, or there is no kernel for an explicit backend="triton".
    """
    B, H, _, D = q.shape
    S = keys.shape[2] if isinstance(keys, Tensor) else keys[0].shape[1]
    both: Any = rows
    _check("keys", keys, (B, H, S, packed_bytes(D, both.key_bits)), q)
    _check("values", values, (B, H, S, packed_bytes(D, both.value_bits)), q)
    how = scale, softcap or 0.0
    chosen = choose_backend(backend, q, kernel_refuses(q, visible))
    if visible is not None and chosen != "triton":
        visible = visible if visible.ndim == 4 else visible.unsqueeze(2)
    if chosen == "chunk" and (D % GROUP == 0 or rows == Rows(8, 8)):
        parts = _parts(keys), _parts(values)
        o, mass = without_autocast(chunk.attention, q, *parts, visible, rows, *how, needs_mass)
        return o.to(q.dtype), mass
    keys, values = (x if isinstance(x, Tensor) else torch.stack([*x]) for x in (keys, values))
    if chosen != "triton":
        given = q, keys, values, visible, rows
        o, mass = without_autocast(_attention, *given, *how, needs_mass)
        return o.to(q.dtype), mass
    from hf_memory.ops.attention_in_bits.kernels import attention_in_bits as kernel

    bits = rows.key_bits, rows.value_bits
    visible = None if visible is None else visible.expand(B, H, S)
    o, mass = kernel(rotated(q), keys, values, visible, *bits, *how)
    return rotated(o), mass if needs_mass else None


def _check(name: str, x: Tensor | Sequence[Tensor], shape: tuple[int, ...], q: Tensor) -> None:
    right = shape, torch.uint8, q.device
    if isinstance(x, Tensor) and (x.shape, x.dtype, x.device) == right:
        return
    rows: Sequence[Tensor] = [x] if isinstance(x, Tensor) else x
    if not isinstance(x, Tensor):
        if len(x) != shape[0]:
            raise ValueError(
                f"{name} must be {shape[0]} tensors, one for each row of q, got {len(x)}"
            )
        shape = shape[1:]
    for row in rows:
        check_tensor(name, row, shape, like=q)
        if row.dtype != torch.uint8:
            raise ValueError(f"{name} must have dtype torch.uint8, got {row.dtype}")


def _parts(x: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    """Rows of heads [rows, S, bytes] in as few parts as need no copy."""
    if isinstance(x, Tensor) and (x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)):
        return [x.flatten(0, 1)]
    return [*x]


def reads_bytes(q: Tensor, backend: str) -> bool:
    """Whether packed rows are read for queries [..., D] as they are stored; else they must be unpacked."""
    if torch.is_grad_enabled() or torch.compiler.is_exporting():
        return False
    return choose_backend(backend, q, kernel_refuses(q)) != "reference"


def kernel_refuses(q: Tensor, visible: Tensor | None = None) -> str | None:
    """Why no kernel reads packed rows for queries [..., D], as a clause; None if one does."""
    if visible is not None and visible.ndim == 4:
        return "visible differs between the queries of a head"
    if torch.is_grad_enabled():
        return "it has gradients"
    if q.dtype == torch.float64:
        return "q is float64"
    if q.shape[-1] > MAX_KERNEL_DIM:
        return f"D must be at most {MAX_KERNEL_DIM}, got {q.shape[-1]}"
    return None


def _attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor | None,
    rows: Rows,
    scale: float,
    softcap: float,
    needs_mass: bool,
) -> tuple[Tensor, Tensor | None]:
    """The definition: outputs, and their mass."""
    k, v = rows.numbers(keys, values, q, q)
    scores = soft_capped(upcast(scale * q @ k.mT), softcap)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    mass = scores.logsumexp(-1)
    # zeros where nothing is seen
    p = (scores - mass.clamp(min=torch.finfo(mass.dtype).min)[..., None]).exp()
    return p.to(q.dtype) @ v, mass if needs_mass else None
