"""The mixers of the Memory Transformer, in tables by the names that its options have.

A layer has the mixer of its pattern, or that of its past unless this is `"cache"`; a layer of the type
`"sliding_heads"` has that of its positions. How many tokens it sees when it starts as a teacher's attention is told by
the mixer's `exact_up_to`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from hf_memory.mixers.base import MemoryMixer
from hf_memory.mixers.transformer.base import TransformerMixer
from hf_memory.mixers.transformer.buckets import ReformerMixer, RoutingMixer
from hf_memory.mixers.transformer.forgetting import ForgettingHeads, PlainHeads
from hf_memory.mixers.transformer.patterns import LOCAL, SPARSE
from hf_memory.mixers.transformer.relations import EMBEDDED, RELATIONS
from hf_memory.mixers.transformer.slots import CompressiveMixer, MostUsedMixer
from hf_memory.mixers.transformer.sparse import SparseMixer
from hf_memory.mixers.transformer.store import MemorizingMixer, TopTokensMixer
from hf_memory.mixers.transformer.windows import InfiniteMixer, LocalMixer, SegmentMixer
from hf_memory.mixers.windowed import WindowedMixer


class Kind(NamedTuple):
    """An attention pattern or a kind of past: what computes it, and with which options it goes together.

    Attributes:
        mixer: the class of the mixer.
        other_mixers: mixers in its place, by the name and the value of an option.
        takes_forget_gates: whether it can be used with position="forget".
        has_summaries: whether later tokens see `num_summary_tokens` of each block of `pattern_size` tokens.
        has_window: whether `sliding_window` is the size of its window.
        has_own_loss: whether parts of the mixer are trained by a loss of their own.
    """

    mixer: type[TransformerMixer]
    other_mixers: Mapping[tuple[str, str], type[TransformerMixer]] = {}
    takes_forget_gates: bool = True
    has_summaries: bool = False
    has_window: bool = False
    has_own_loss: bool = False


BUCKETS: dict[str, Kind] = {
    "reformer": Kind(ReformerMixer, takes_forget_gates=False),
    "routing": Kind(RoutingMixer, takes_forget_gates=False, has_own_loss=True),
    "routing_by_head": Kind(RoutingMixer, takes_forget_gates=False, has_own_loss=True),
}
PATTERNS: dict[str, Kind] = {
    "full": Kind(TransformerMixer),
    **dict.fromkeys(LOCAL, Kind(LocalMixer)),
    "adaptive_span": Kind(LocalMixer, has_own_loss=True),
    **dict.fromkeys(SPARSE, Kind(SparseMixer)),
    **dict.fromkeys(("fixed", "fixed_by_head"), Kind(SparseMixer, has_summaries=True)),
    "linformer": Kind(SparseMixer, takes_forget_gates=False, has_summaries=True),
    **BUCKETS,
}
PASTS: dict[str, Kind] = {
    "cache": Kind(TransformerMixer),
    "xl": Kind(SegmentMixer),
    "compressive": Kind(
        CompressiveMixer,
        {("compression", "most_used"): MostUsedMixer},
        takes_forget_gates=False,
    ),
    "memorizing": Kind(
        MemorizingMixer,
        {("memory_join", "attention"): TopTokensMixer},
        takes_forget_gates=False,
        has_window=True,
    ),
    "infinite": Kind(InfiniteMixer, has_window=True),
}
SLIDING_HEADS: dict[str, type[MemoryMixer]] = {  # by position
    "rope": WindowedMixer,
    **dict.fromkeys(("none", *EMBEDDED), PlainHeads),
    "forget": ForgettingHeads,
    **dict.fromkeys(RELATIONS, LocalMixer),
}


def mixer_of(config: Any, layer_idx: int) -> type[MemoryMixer]:
    """The mixer of a layer of type `"memory"` or `"sliding_heads"`."""
    if config.layer_types[layer_idx] == "sliding_heads":
        return SLIDING_HEADS[config.position]
    past = config.pasts[layer_idx]
    kind = PATTERNS[config.patterns[layer_idx]] if past == "cache" else PASTS[past]
    for (option, value), mixer in kind.other_mixers.items():
        if getattr(config, option) == value:
            return mixer
    return kind.mixer
