"""The mixers of the Memory Transformer by the names of their options: which tokens before it a token sees."""

from hf_memory.mixers.transformer.base import TransformerMixer
from hf_memory.mixers.transformer.buckets import ReformerMixer, RoutingMixer
from hf_memory.mixers.transformer.patterns import LOCAL, SPARSE
from hf_memory.mixers.transformer.slots import CompressiveMixer
from hf_memory.mixers.transformer.sparse import SparseMixer
from hf_memory.mixers.transformer.store import MemorizingMixer
from hf_memory.mixers.transformer.windows import InfiniteMixer, LocalMixer, SegmentMixer

BUCKETS: dict[str, type[TransformerMixer]] = {
    "reformer": ReformerMixer,
    "routing": RoutingMixer,
    "routing_by_head": RoutingMixer,
}
PATTERNS: dict[str, type[TransformerMixer]] = {
    "full": TransformerMixer,
    **dict.fromkeys(LOCAL, LocalMixer),
    "adaptive_span": LocalMixer,
    **dict.fromkeys(SPARSE, SparseMixer),
    **BUCKETS,
}
PASTS: dict[str, type[TransformerMixer]] = {
    "cache": TransformerMixer,
    "xl": SegmentMixer,
    "compressive": CompressiveMixer,
    "memorizing": MemorizingMixer,
    "infinite": InfiniteMixer,
}
