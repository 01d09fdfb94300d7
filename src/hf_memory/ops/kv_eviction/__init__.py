"""Attention to a window and kept tokens, in two steps: which entries each block sees, and then what it reads of them.

Which entries stay after a block depends on those that it saw, so the first step goes from block to block; it is the
smaller part of the work. Then all blocks are read in parallel. `hf_memory.mixers.pasts.kept` has the definition.
"""

import torch
from torch import Tensor

from hf_memory.ops.dispatch import Backend, choose_backend
from hf_memory.ops.kv_eviction import chunk
from hf_memory.ops.kv_eviction.chunk import Rule
from hf_memory.ops.kv_eviction.policies import (
    DECAY,
    Block,
    change_of_output,
    random_choice,
    received_attention,
)

__all__ = [
    "Block",
    "Rule",
    "change_of_output",
    "random_choice",
    "received_attention",
    "retained_attention",
]

# policies by which a kernel decides; what others choose is chosen in PyTorch
KERNEL_POLICIES = received_attention, change_of_output
# what registers of a program hold: numbers for all entries that a query sees, and tiles of keys of so many bytes
MOST_ENTRIES = 4096
MOST_BYTES = 512


def retained_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    number: Tensor,
    score: Tensor,
    rule: Rule,
    *,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Attention of new tokens in blocks of c: after each block it is decided which entries the next one sees.

    A query sees the entries that are held before its block, and the tokens of its block up to itself.

    Args:
        q: queries [B, T, HQ, D], rotated; T is a multiple of c.
        k: keys [B, H, stay + T, D] of the entries that are held at first, and of the new tokens.
        v: values [B, H, stay + T, D].
        number: [B, H, stay + T] int32, of the tokens in their sequences, from 1; 0: no token.
        score: [B, H, stay] float32, what the entries that are held are worth.
        rule: the sizes of blocks and of what always stays, the policy, and how scores are computed.
        backend: "triton", "chunk", which is PyTorch, or "auto": kernels on CUDA where they support the keys.

    Returns:
        The outputs [B, T, HQ, D]; the logarithms of their mass in the softmax [B, T, HQ] in float32, which may be
        None unless the rule says that they are needed; the places [B, H, stay] of the entries that are held in the end,
        in the order of the text; and what these are worth [B, H, stay]. A block that is not complete changes neither.
    """
    refusal = kernel_refuses(k, k.shape[2] - q.shape[1] + rule.block, rule)
    if choose_backend(backend, q, refusal) != "triton":
        return chunk.retained_attention(q, k, v, number, score, rule)
    from hf_memory.ops.kv_eviction import kernels

    if rule.policy not in KERNEL_POLICIES:
        places, score = chunk.retained_places(
            q.detach(), k.detach(), v.detach(), number, score, rule
        )
    if rule.gates is not None:
        q = rule.gates.of_one_product(q, q.shape[2] // k.shape[1])
    if rule.policy in KERNEL_POLICIES:
        sizes = rule.block, rule.first, rule.window, DECAY, rule.scale, rule.softcap
        rows = q.detach(), k.detach(), v.detach(), number, score
        places, score = kernels.retained_places(*rows, *sizes, rule.policy is change_of_output)
    o, mass = kernels.retained_attention(q, k, v, number, places, rule.scale, rule.softcap)
    return o, mass, places[:, :, -1], score


def kernel_refuses(k: Tensor, entries: int, rule: Rule) -> str | None:
    """Why kernels do not support keys [B, T, H, D] if a query sees so many entries, as a clause."""
    if rule.gates is not None and rule.softcap:
        # kernels have gates as channels of the products, which they cap
        return "decays of forget gates are added after a soft cap"
    if k.dtype == torch.float64:
        return "keys are float64"
    if entries > MOST_ENTRIES:
        return f"a query sees {entries} entries, more than {MOST_ENTRIES}"
    size = k.shape[-1] * k.element_size()
    return None if size <= MOST_BYTES else f"a key has {size} bytes, more than {MOST_BYTES}"
