"""hf-memory datastore."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from hf_memory import conversion
from hf_memory.cli.command import ADVANCED, LONG, WHAT, WHERE
from hf_memory.cli.options import SOURCES, MaxTokens
from hf_memory.cli.progress import signs_of_life
from hf_memory.cli.terminal import say_made
from hf_memory.cli.writing import LoadingFlags
from hf_memory.decoding import Datastore, build_datastore
from hf_memory.decoding import tune as choose
from hf_memory.files.folders import check_output, size_of
from hf_memory.files.text import Text, check_tokens

KEY_DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class KeyFlags:
    """Flags of the keys of a new datastore."""

    length: Annotated[
        int,
        typer.Option(
            help="Tokens of a window that the model reads at a time.",
            min=2,
            rich_help_panel=LONG,
        ),
    ] = 1024
    key_dtype: Annotated[
        str,
        typer.Option(help=f"Dtype of the keys: {', '.join(KEY_DTYPES)}.", rich_help_panel=ADVANCED),
    ] = "float16"
    module: Annotated[
        str | None,
        typer.Option(
            help="Name of the module whose input is the key; default: the last feed-forward one.",
            rich_help_panel=ADVANCED,
        ),
    ] = None
    index: Annotated[
        str | None,
        typer.Option(
            help="Index for faiss (needs faiss-cpu), such as IVF4096,PQ64; default: search all keys.",
            rich_help_panel=ADVANCED,
        ),
    ] = None


def datastore(
    model: Annotated[
        str, typer.Argument(help="Folder, Hub name or GGUF file of any causal language model.")
    ],
    output: Annotated[
        Path,
        typer.Option(
            help="Folder for the datastore: a new one, or with --tune alone an old one.",
            rich_help_panel=WHERE,
        ),
    ],
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text", help=f"Text to look up: {SOURCES}; may be repeated.", rich_help_panel=WHAT
        ),
    ] = None,
    tune: Annotated[
        list[str] | None,
        typer.Option(
            "--tune",
            help="Other text, on which the weight of the datastore and the temperature are chosen, which it keeps.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    *,
    keys: KeyFlags,
    max_tokens: MaxTokens = None,
    loading: LoadingFlags,
) -> None:
    """Build a datastore of a text for kNN-LM: a key and the next token for each token; see generate --datastore.

    Example: hf-memory datastore student --text my_text.txt --output my_datastore
    """
    if keys.key_dtype not in KEY_DTYPES:
        raise ValueError(f"key_dtype must be one of {', '.join(KEY_DTYPES)}, got {keys.key_dtype}")
    if not text and not tune:
        raise ValueError("text must be given for a new datastore, or tune for an old one")
    made = None if text else Datastore(output)
    if made is None:
        check_output(output, overwrite=None)
    loaded, tokenizer = loading.load(model)
    with signs_of_life() as report:

        def read(sources: list[str], limit: int | None = None) -> Text:
            tokens = conversion.read_tokens(sources, tokenizer, limit=limit, report=report)
            check_tokens(tokens, loaded.config, min(keys.length, len(tokens)))
            return tokens

        if made is None:
            how: dict = {"length": keys.length, "module": keys.module, "index": keys.index}
            how["dtype"] = getattr(torch, keys.key_dtype)
            made = build_datastore(
                loaded, read(text or [], max_tokens), output, **how, report=report
            )
        if tune:
            made.keep_mixture(choose(loaded, made, read(tune), length=keys.length))
    mixture = "".join(f", {name} {x:.3g}" for name, x in made.mixture.items())
    size = f"{size_of(output) / 1e6:,.1f} MB"
    say_made(
        f"Wrote {output}: {len(made):,} keys of {made.keys.shape[1]} channels, {size}{mixture}",
        ["generate", model, "--datastore", output, "--prompt", "The"],
    )
