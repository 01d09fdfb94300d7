"""Decoding of any causal language model of transformers with a datastore (kNN-LM, SPALM), or with early exit (CALM)."""

from hf_memory.decoding.datastore import Datastore, Neighbours, build_datastore
from hf_memory.decoding.early_exit import EarlyExit, calibrate, exit_loss, fit_classifier
from hf_memory.decoding.nearest_neighbours import NearestNeighbours, RetrievalGate, Spalm, tune

__all__ = [
    "Datastore",
    "EarlyExit",
    "NearestNeighbours",
    "Neighbours",
    "RetrievalGate",
    "Spalm",
    "build_datastore",
    "calibrate",
    "exit_loss",
    "fit_classifier",
    "tune",
]
