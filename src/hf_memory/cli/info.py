"""hf-memory info."""

from typing import Annotated

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedConfig

from hf_memory.cli.options import found
from hf_memory.cli.terminal import console
from hf_memory.conversion import load_config
from hf_memory.evaluation import bytes_per_token, cache_bytes, kv_cache_bytes, layer_types

CONTEXTS = (1024, 8192, 32768, 131072)


def info(model: Annotated[str, typer.Argument(help="Folder or Hub name of a model; weights are not loaded.")]) -> None:
    """Show parameters, layers, and the size of the cache compared with the KV cache of the same Transformer."""
    config = load_config(found(model))
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).num_parameters()
    kinds = layer_types(config)
    layers = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    console.out(f"{model}: {config.model_type}, {parameters:,} parameters, layers: {layers}")
    console.print(_memory_table(config))


def _memory_table(config: PreTrainedConfig) -> Table:
    header = "context (tokens)", "this model", "all layers attention", "ratio"
    rows = Table(*header, box=SIMPLE_HEAD, collapse_padding=True, title="memory of one sequence")
    for tokens in CONTEXTS:
        ours, theirs = cache_bytes(config, tokens), kv_cache_bytes(config, tokens)
        rows.add_row(f"{tokens:,}", f"{ours / 1e6:,.2f} MB", f"{theirs / 1e6:,.2f} MB", f"{ours / theirs:.2%}")
    ours, theirs = bytes_per_token(config), kv_cache_bytes(config, 1)
    rows.add_row("each more", f"{ours:,} bytes", f"{theirs:,} bytes", f"{ours / theirs:.2%}")
    return rows
