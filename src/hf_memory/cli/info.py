"""hf-memory info."""

from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM

from hf_memory.cli.options import CacheBits, found, set_cache_bits
from hf_memory.cli.terminal import console, print_table
from hf_memory.conversion import load_config
from hf_memory.evaluation import bytes_per_token, cache_bytes, kv_cache_bytes, layer_types
from hf_memory.evaluation.efficiency import in_16_bits

CONTEXTS = (1024, 8192, 32768, 131072)
HEADER = ("context (tokens)", "this model", "all layers attention", "ratio")


def info(
    model: Annotated[
        str,
        typer.Argument(help="Folder, Hub name or GGUF file of a model; weights are not loaded."),
    ],
    cache_bits: CacheBits = None,
) -> None:
    """Show parameters, layers, and the size of the cache compared with the KV cache of the same Transformer.

    Example: hf-memory info student
    """
    config = load_config(found(model))
    set_cache_bits(config, cache_bits)
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).num_parameters()
    kinds = layer_types(config)
    layers = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    console.out(f"{model}: {config.model_type}, {parameters:,} parameters, layers: {layers}")
    config = in_16_bits(config)  # in which models are served; a student may be saved in float32
    rows = []
    for tokens in CONTEXTS:
        ours = cache_bytes(config, tokens)
        theirs = kv_cache_bytes(config, tokens)
        rows.append(
            (
                f"{tokens:,}",
                f"{ours / 1e6:,.2f} MB",
                f"{theirs / 1e6:,.2f} MB",
                f"{ours / theirs:.2%}",
            )
        )
    ours = bytes_per_token(config)
    theirs = kv_cache_bytes(config, 1)
    rows.append(("each more", f"{ours:,} bytes", f"{theirs:,} bytes", f"{ours / theirs:.2%}"))
    print_table(
        rows, HEADER, title="cache of one sequence, in 16 bits but for what cache_bits packs"
    )
