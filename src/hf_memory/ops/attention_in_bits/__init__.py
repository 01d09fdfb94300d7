"""Attention of one token to keys and values in 8 or 4 bits, which are read as they are stored."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hf_memory.ops import cpu
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
    sizes: tuple[int, ...] | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Any]:
    """Softmax attention of one token of each row to packed rows, see `hf_memory.ops.bits`; without gradients.

        o = sum_j p_j v_j,   p = softmax_j(scale q k_j),   over the entries j that are visible

    The definition unpacks keys and values. In PyTorch, products of codes are faster, see `chunk`. Kernels read bytes,
    so that what they read of memory falls with the bits; on a CPU it is compiled code, see
    `hf_memory.ops.cpu`. All turn queries and outputs in place of keys and values.

    Args:
        q: queries [B, H, G, D], the G queries of each head of keys.
        keys: [B, H, S, bytes] uint8, or B tensors [H, S, bytes] anywhere in memory, of `packed_bytes(D, bits)` each.
        values: the same.
        visible: [B or 1, H or 1, S] bool, which entries there are; None: all.
        rows: the bits of keys and of values, 8 or 4 each.
        scale: factor of the products of queries and keys.
        softcap: c of c tanh(s / c), which replaces scores s; None: no cap.
        needs_mass: whether the mass of the softmax is asked for.
        sizes: the numbers of entries of several heads, which are S together; H is 1 then, and the G queries are those
            of these heads in turn. For this there is no kernel on CUDA. None: heads have equal numbers, S.
        backend: "triton", "chunk", which is PyTorch, or "auto": the kernel where there is one.

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
    chosen = choose_backend(backend, q, kernel_refuses(q, sizes))
    bits = both.key_bits, both.value_bits
    is_whole = isinstance(keys, Tensor) and isinstance(values, Tensor)
    if backend == "auto" and cpu.takes_rows(q, *bits, in_graphs=is_whole):
        run = cpu.attention_in_graph if torch.compiler.is_compiling() else cpu.attention
        return run(q, keys, values, visible, bits, sizes, *how)
    if chosen != "triton":
        visible = seen_by_queries(visible, sizes, q)
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


def kernel_refuses(q: Tensor, sizes: tuple[int, ...] | None = None) -> str | None:
    """Why no kernel reads packed rows for queries [..., D], as a clause; None if one does."""
    if sizes is not None:
        return "heads have different numbers of entries"
    if torch.is_grad_enabled():
        return "it has gradients"
    if q.dtype == torch.float64:
        return "q is float64"
    if q.shape[-1] > MAX_KERNEL_DIM:
        return f"D must be at most {MAX_KERNEL_DIM}, got {q.shape[-1]}"
    return None


def seen_by_queries(
    visible: Tensor | None, sizes: tuple[int, ...] | None, q: Tensor
) -> Tensor | None:
    """Which entries each query [B, H, G, D] sees, [B or 1, H or 1, G or 1, S] bool, for arguments of the op."""
    seen = None if visible is None else visible.unsqueeze(2)
    if sizes is None:
        return seen
    # a mask without data must not be kept
    is_plain = type(q) is Tensor and not torch.compiler.is_compiling()
    make = _kept_mask if is_plain else _new_mask
    own = make(sizes, q.shape[2] // len(sizes), q.device)
    return own if seen is None else seen & own


def _new_mask(sizes: tuple[int, ...], groups: int, device: torch.device) -> Tensor:
    heads = torch.arange(len(sizes), device=device)
    of_entry = heads.repeat_interleave(torch.tensor(sizes, device=device), output_size=sum(sizes))
    return heads.repeat_interleave(groups)[:, None] == of_entry


@lru_cache
def _kept_mask(sizes: tuple[int, ...], groups: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return _new_mask(sizes, groups, device)


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
