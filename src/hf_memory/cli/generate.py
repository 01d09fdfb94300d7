"""hf-memory generate."""

from typing import Annotated

import torch
import typer
from transformers import pipeline

from hf_memory.cli.options import Seed, found
from hf_memory.cli.terminal import console


def generate(
    model: Annotated[str, typer.Argument(help="Folder or Hub name.")],
    prompt: Annotated[str, typer.Option(help="The beginning of the text.")],
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to add.")] = 100,
    seed: Seed = 0,
) -> None:
    """Continue a prompt."""
    console.print(continuation(model, prompt, max_new_tokens, seed), markup=False, highlight=False, soft_wrap=True)


def continuation(model: str, prompt: str, max_new_tokens: int, seed: int) -> str:
    """A prompt and what a model writes after it."""
    torch.manual_seed(seed)
    write = pipeline("text-generation", model=found(model))
    return write(prompt, max_new_tokens=max_new_tokens)[0]["generated_text"]
