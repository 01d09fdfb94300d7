"""hf-memory info."""

from collections.abc import Iterator
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM, PreTrainedConfig

from hf_memory.cli.options import found
from hf_memory.cli.terminal import console, print_table
from hf_memory.conversion import load_config
from hf_memory.evaluation import bytes_per_token, cache_bytes, kv_cache_bytes, layer_types

CONTEXTS = (1024, 8192, 32768, 131072)
HEADER = ("context (tokens)", "this model", "all layers attention", "ratio")


def info(model: Annotated[str, typer.Argument(help="Folder or Hub name of a model; weights are not loaded.")]) -> None:
    """Show parameters, layers, and the size of the cache compared with the KV cache of the same Transformer."""
    config = load_config(found(model))
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).num_parameters()
    kinds = layer_types(config)
    layers = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    console.out(f"{model}: {config.model_type}, {parameters:,} parameters, layers: {layers}")
    print_table(_memory(config), HEADER, title="memory of one sequence")


def _memory(config: PreTrainedConfig) -> Iterator[tuple[str, ...]]:
    for tokens in CONTEXTS:
        ours, theirs = cache_bytes(config, tokens), kv_cache_bytes(config, tokens)
        yield f"{tokens:,}", f"{ours / 1e6:,.2f} MB", f"{theirs / 1e6:,.2f} MB", f"{ours / theirs:.2%}"
    ours, theirs = bytes_per_token(config), kv_cache_bytes(config, 1)
    yield "each more", f"{ours:,} bytes", f"{theirs:,} bytes", f"{ours / theirs:.2%}"
