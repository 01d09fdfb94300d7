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
        options: names of the config's options that it reads, and that mean nothing without it.
        takes_forget_gates: whether it can be used with position="forget".
        has_own_loss: whether parts of the mixer are trained by a loss of their own.
    """

    mixer: type[TransformerMixer]
    other_mixers: Mapping[tuple[str, str], type[TransformerMixer]] = {}
    options: tuple[str, ...] = ()
    takes_forget_gates: bool = True
    has_own_loss: bool = False


SEGMENTS = ("segment_length", "past_window")
SLOTS = ("compression", "compression_rate", "compressed_length")
STORE = ("memory_size", "memory_top_k", "memory_join")
SPANS = ("max_span", "span_ramp", "span_limits", "span_loss_weight")

BUCKETS: dict[str, Kind] = {
    "reformer": Kind(
        ReformerMixer, options=("num_buckets", "num_hashes"), takes_forget_gates=False
    ),
    "routing": Kind(
        RoutingMixer, options=("num_buckets",), takes_forget_gates=False, has_own_loss=True
    ),
    "routing_by_head": Kind(
        RoutingMixer,
        options=("num_buckets", "pattern_size"),
        takes_forget_gates=False,
        has_own_loss=True,
    ),
}
PATTERNS: dict[str, Kind] = {
    "full": Kind(TransformerMixer),
    **{name: Kind(LocalMixer, options=pattern.options) for name, pattern in LOCAL.items()},
    "adaptive_span": Kind(LocalMixer, options=SPANS, has_own_loss=True),
    **{name: Kind(SparseMixer, options=pattern.options) for name, pattern in SPARSE.items()},
    "linformer": Kind(SparseMixer, options=SPARSE["linformer"].options, takes_forget_gates=False),
    **BUCKETS,
}
PASTS: dict[str, Kind] = {
    "cache": Kind(TransformerMixer),
    "xl": Kind(SegmentMixer, options=SEGMENTS),
    "compressive": Kind(
        CompressiveMixer,
        {("compression", "most_used"): MostUsedMixer},
        options=(*SEGMENTS, *SLOTS),
        takes_forget_gates=False,
    ),
    "memorizing": Kind(
        MemorizingMixer,
        {("memory_join", "attention"): TopTokensMixer},
        options=(*STORE, "sliding_window"),
        takes_forget_gates=False,
    ),
    "infinite": Kind(InfiniteMixer, options=("sliding_window", "num_sink_tokens")),
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
