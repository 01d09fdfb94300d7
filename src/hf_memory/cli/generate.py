"""hf-memory generate."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from hf_memory.cli.command import ADVANCED, LONG, WHAT
from hf_memory.cli.writing import LoadingFlags, SamplingFlags, write
from hf_memory.decoding import Datastore, NearestNeighbours


def generate(
    model: Annotated[
        str, typer.Argument(help="Folder, Hub name or GGUF file of any causal language model.")
    ],
    prompt: Annotated[str, typer.Option(help="Text to continue.", rich_help_panel=WHAT)],
    max_new_tokens: Annotated[
        int,
        typer.Option(help="Largest number of tokens to generate.", min=1, rich_help_panel=LONG),
    ] = 100,
    datastore: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a datastore that hf-memory datastore has built with this model.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    datastore_weight: Annotated[
        float | None,
        typer.Option(
            help="Weight of the datastore's prediction, 0 to 1; default: that chosen by --tune, or 0.25.",
            rich_help_panel=ADVANCED,
        ),
    ] = None,
    *,
    sampling: SamplingFlags,
    loading: LoadingFlags,
) -> None:
    """Continue a prompt.

    Example: hf-memory generate student --prompt "The with statement"
    """
    options = {"max_new_tokens": max_new_tokens, **sampling.options()}
    if datastore_weight is not None and datastore is None:
        raise ValueError(
            f"datastore_weight must not be given without datastore, got {datastore_weight}"
        )
    store = Datastore(datastore) if datastore else None
    loaded, tokenizer = loading.load(model)
    with NearestNeighbours(loaded, store, weight=datastore_weight) if store else nullcontext():
        write(loaded, tokenizer, prompt, sampling.seed, **options).say_speed()
