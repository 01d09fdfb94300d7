"""hf-memory chat."""

from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from hf_memory.cli.options import Seed, found
from hf_memory.cli.terminal import console
from hf_memory.serving import Conversation, load_memory, save_memory


def chat(
    model: Annotated[str, typer.Argument(help="Folder or Hub name of a memory model.")],
    memory: Annotated[Path | None, typer.Option(help="File to remember from, if it exists, and to keep.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 200,
    seed: Seed = 0,
) -> None:
    """Talk line by line on one memory, which does not grow; an empty line or the end of the input ends it."""
    tokenizer = AutoTokenizer.from_pretrained(found(model))
    loaded = AutoModelForCausalLM.from_pretrained(model)
    cache = load_memory(memory, loaded) if memory and memory.exists() else None
    conversation = Conversation(loaded, tokenizer, cache=cache, max_new_tokens=max_new_tokens, seed=seed)
    while line := _line():
        streamer = TextStreamer(tokenizer, skip_special_tokens=True)
        for token in conversation.answer(line):
            streamer.put(torch.tensor([token]))
        streamer.end()
    if memory and conversation.cache is not None:
        kept = conversation.memory()
        save_memory(kept, memory, loaded)
        console.print(f"kept {memory}: {kept.get_seq_length()} tokens", highlight=False, soft_wrap=True)


def _line() -> str:
    try:
        return console.input("> ")
    except EOFError:
        return ""
