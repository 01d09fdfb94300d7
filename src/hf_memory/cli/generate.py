"""hf-memory generate."""

from typing import Annotated

import typer

from hf_memory.cli.options import Seed
from hf_memory.cli.writing import Device, Dtype, Greedy, Temperature, TopK, TopP, load, sampling, write


def generate(
    model: Annotated[str, typer.Argument(help="Folder or Hub name.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(help="Longest continuation, in tokens.", min=1)] = 100,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    greedy: Greedy = False,
    device: Device = None,
    dtype: Dtype = "auto",
    seed: Seed = 0,
) -> None:
    """Continue a prompt."""
    options = sampling(temperature, top_p, top_k, greedy)
    loaded, tokenizer = load(model, device, dtype)
    write(loaded, tokenizer, prompt, seed, max_new_tokens=max_new_tokens, **options).say_speed()
