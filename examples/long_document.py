"""Read a long document once, keep what the model holds of it as a file, and ask about it later.

    python examples/long_document.py student read book.txt memory.safetensors
    python examples/long_document.py student ask memory.safetensors "Who wrote the letter?"

The file has the same size for every document if the model's cache does not grow.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: threads that wait sleep

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import hf_memory

PIECE = 2048  # tokens that are read at once


def read(document: str, memory: str) -> None:
    """Read in pieces: a document of any length needs no more RAM than a piece and the memory."""
    text = Path(document).read_text(encoding="utf-8")
    tokens = tokenizer(text, return_tensors="pt", verbose=False).input_ids
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for piece in tokens.split(PIECE, dim=1):
            model(piece, past_key_values=cache, logits_to_keep=1)
    hf_memory.save_memory(cache, memory, model)
    print(f"{tokens.shape[1]:,} tokens are {Path(memory).stat().st_size:,} bytes in {memory}")


def ask(memory: str, question: str) -> None:
    """Go on from the file; it stays as it is."""
    cache = hf_memory.load_memory(memory, model)
    conversation = hf_memory.Conversation(model, tokenizer, cache=cache, max_new_tokens=60)
    print(tokenizer.decode(list(conversation.answer(question))))


commands = {"read": read, "ask": ask}
if len(sys.argv) != 5 or sys.argv[2] not in commands:
    sys.exit(__doc__)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
commands[sys.argv[2]](*sys.argv[3:])
