"""Other ways to decode any causal language model of transformers, ours or not: with a datastore beside it."""

from hf_memory.decoding.datastore import Datastore, Neighbours, build_datastore
from hf_memory.decoding.nearest_neighbours import NearestNeighbours

__all__ = ["Datastore", "NearestNeighbours", "Neighbours", "build_datastore"]
