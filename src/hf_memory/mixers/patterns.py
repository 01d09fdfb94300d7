"""Which tokens a token sees in each pattern of attention: a mask, and how far back it reaches without gaps."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from hf_memory.ops.masks import (
    Mask,
    bigbird,
    block_local,
    blockwise,
    dilated,
    fixed,
    own_block,
    sinks,
    strided,
    window,
)


class Pattern(NamedTuple):
    """A pattern whose far tokens, if any, are the first ones, or few."""

    sees: Mask  # of earlier tokens
    reach: int  # tokens that are near, the present one among them
    first: int = 0  # of the sequence, that are seen from afar
    has_gaps: bool = False  # among those that are near


def _shifts(config) -> torch.Tensor:
    """[HQ, 1, 1]: how many blocks back each head looks."""
    return (torch.arange(config.num_attention_heads) % config.num_block_shifts)[:, None, None]


LOCAL: dict[str, Callable[..., Pattern]] = {  # of a config; nothing else is seen, so that nothing else is kept
    "sliding": lambda c: Pattern(window(c.pattern_size), c.pattern_size),
    "block_local": lambda c: Pattern(block_local(c.pattern_size), 2 * c.pattern_size),
    "dilated": lambda c: Pattern(dilated(c.pattern_size, c.dilation), c.pattern_size * c.dilation, has_gaps=True),
    "longformer": lambda c: Pattern(
        window(c.pattern_size) | sinks(c.num_global_tokens), c.pattern_size, c.num_global_tokens
    ),
    "blockwise": lambda c: Pattern(
        blockwise(c.pattern_size, _shifts(c)), c.num_block_shifts * c.pattern_size, has_gaps=True
    ),
}
SPARSE: dict[str, Callable[..., Pattern]] = {
    "strided": lambda c: Pattern(strided(c.pattern_size), c.pattern_size + 1),
    "fixed": lambda c: Pattern(fixed(c.pattern_size, c.num_summary_tokens), c.pattern_size),
    "bigbird": lambda c: Pattern(bigbird(c.pattern_size, c.num_random_blocks, c.pattern_seed), 2 * c.pattern_size),
    "linformer": lambda c: Pattern(own_block(c.pattern_size), c.pattern_size),  # and summaries of earlier blocks
}


def pattern_of(config, layer_idx: int) -> Any:
    """That of a layer; None where it sees everything, or what tokens say decides."""
    name = config.patterns[layer_idx]
    if name == "adaptive_span":
        reach = config.span_limits[layer_idx] if config.span_limits else config.max_span + config.span_ramp
        return Pattern(window(reach), reach)
    return (LOCAL | SPARSE)[name](config) if name in LOCAL | SPARSE else None
