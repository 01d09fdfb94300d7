"""Attention patterns: a mask that says which tokens a token sees, and how far back it reaches."""

from collections.abc import Callable
from operator import or_
from typing import Any, NamedTuple

from hf_memory.mixers.pasts.ring import Window
from hf_memory.ops.masks import (
    Mask,
    bigbird,
    block_before,
    block_ends,
    block_local,
    by_head,
    causal,
    dilated,
    multiples,
    own_block,
    sinks,
    window,
)


def _strided(config) -> tuple[Mask, Mask]:
    return window(config.pattern_size + 1), multiples(config.pattern_size)


def _fixed(config) -> tuple[Mask, Mask]:
    return own_block(config.pattern_size), block_ends(
        config.pattern_size, config.num_summary_tokens
    )


def _blockwise(config) -> Window:
    n = config.num_block_shifts
    size = config.pattern_size
    return Window(
        by_head(*(block_before(size, shift) for shift in range(n))),
        n * size,
        has_gaps=True,
        kinds=n,
    )


def _longformer_by_head(config) -> Window:
    w = config.pattern_size
    step = config.dilation
    first = config.num_sink_tokens
    near = (by_head(window(w), dilated(w, step)) | sinks(first)) & window(w * step)
    return Window(near, w * step, first, has_gaps=True, kinds=2)


class Pattern(NamedTuple):
    """A pattern of a name: what it is for a config, and which options of the config it reads."""

    window: Callable[[Any], Window]
    options: tuple[str, ...] = ("pattern_size",)


IN_STEPS = ("pattern_size", "dilation")
IN_SUMMARIES = ("pattern_size", "num_summary_tokens")
LOCAL = {  # by name; caches drop all tokens that are not seen
    "block_local": Pattern(lambda c: Window(block_local(c.pattern_size), 2 * c.pattern_size)),
    "dilated": Pattern(
        lambda c: Window(
            dilated(c.pattern_size, c.dilation), c.pattern_size * c.dilation, has_gaps=True
        ),
        IN_STEPS,
    ),
    "longformer_by_head": Pattern(_longformer_by_head, (*IN_STEPS, "num_sink_tokens")),
    "blockwise": Pattern(_blockwise, ("pattern_size", "num_block_shifts")),
}
SPARSE = {
    "strided": Pattern(lambda c: Window(or_(*_strided(c)), c.pattern_size + 1)),
    "strided_by_head": Pattern(
        lambda c: Window(by_head(*_strided(c)), c.pattern_size + 1, has_gaps=True, kinds=2)
    ),
    "fixed": Pattern(lambda c: Window(or_(*_fixed(c)), c.pattern_size), IN_SUMMARIES),
    "fixed_by_head": Pattern(
        lambda c: Window(by_head(*_fixed(c)), c.pattern_size, has_gaps=True, kinds=2), IN_SUMMARIES
    ),
    "bigbird": Pattern(
        lambda c: Window(
            bigbird(c.pattern_size, c.num_random_blocks, c.pattern_seed), 2 * c.pattern_size
        ),
        ("pattern_size", "num_random_blocks", "pattern_seed"),
    ),
    "linformer": Pattern(  # summaries are separate
        lambda c: Window(own_block(c.pattern_size), c.pattern_size), IN_SUMMARIES
    ),
}


def exact_with_pattern(config, layer_idx: int, length: int) -> int | None:
    """See `Convertible.exact_up_to`: all tokens, as long as the pattern leaves none out."""
    pattern = pattern_of(config, layer_idx)
    is_exact = not pattern.has_gaps and length <= pattern.reach + pattern.first
    return length if is_exact else None


def pattern_of(config, layer_idx: int) -> Any:
    """The pattern of a layer; None if it sees all tokens, or if the choice depends on their content."""
    name = config.patterns[layer_idx]
    if config.layer_types[layer_idx] == "sliding_heads":
        return Window.of_last(config.sliding_window, config.num_sink_tokens)
    if name == "adaptive_span":
        reach = (
            config.span_limits[layer_idx]
            if config.span_limits
            else config.max_span + config.span_ramp
        )
        return Window.of_last(reach)
    if name not in LOCAL | SPARSE:
        return None
    pattern = (LOCAL | SPARSE)[name].window(config)
    return pattern._replace(sees=causal & pattern.sees)
