"""hf-memory datastore."""

from pathlib import Path
from typing import Annotated

import torch
import typer

from hf_memory import conversion
from hf_memory.cli.options import MaxTokens
from hf_memory.cli.progress import signs_of_life
from hf_memory.cli.terminal import console, visible
from hf_memory.cli.writing import Device, Dtype, load
from hf_memory.conversion.data import check_tokens
from hf_memory.conversion.folders import check_output
from hf_memory.decoding import build_datastore

KEY_DTYPES = ("float16", "bfloat16", "float32")


def datastore(
    model: Annotated[str, typer.Argument(help="Folder, Hub name or GGUF file of any causal language model.")],
    text: Annotated[
        list[str],
        typer.Option(
            "--text",
            help="Text to look up: folder of text, text file, .jsonl or .parquet with a field text or messages, or "
            "name[:config] on the Hub; may be repeated.",
        ),
    ],
    output: Annotated[Path, typer.Option(help="New folder for the datastore.")],
    length: Annotated[int, typer.Option(help="Tokens of a window that the model reads at a time.", min=2)] = 1024,
    key_dtype: Annotated[str, typer.Option(help=f"Dtype of the keys: {', '.join(KEY_DTYPES)}.")] = "float16",
    module: Annotated[
        str | None, typer.Option(help="Name of the module whose input is the key; default: the last feed-forward one.")
    ] = None,
    index: Annotated[
        str | None,
        typer.Option(
            help="Index for faiss (needs hf-memory\\[retrieval]), such as IVF4096,PQ64; default: search all keys."
        ),
    ] = None,
    max_tokens: MaxTokens = None,
    device: Device = None,
    dtype: Dtype = "auto",
) -> None:
    """Build a datastore of a text for kNN-LM: a key and the next token for each token; see generate --datastore."""
    if key_dtype not in KEY_DTYPES:
        raise ValueError(f"key_dtype must be one of {', '.join(KEY_DTYPES)}, got {key_dtype}")
    check_output(output)
    loaded, tokenizer = load(model, device, dtype)
    with signs_of_life() as report:
        tokens = conversion.read_tokens(text, tokenizer, limit=max_tokens, report=report)
        check_tokens(tokens, loaded.config, min(length, len(tokens)))
        how: dict = {"length": length, "dtype": getattr(torch, key_dtype), "module": module, "index": index}
        made = build_datastore(loaded, tokens, output, **how, report=report)
    size = sum(file.stat().st_size for file in output.iterdir())
    console.out(visible(f"{output}: {len(made):,} keys of {made.keys.shape[1]} channels, {size / 1e6:,.1f} MB"))
