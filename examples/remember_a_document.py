"""Read a long document once, keep the memory as a file, and ask about it in a later process.

    make demo                                              # makes the model
    python examples/remember_a_document.py read            # reads the language reference, writes document.safetensors
    python examples/remember_a_document.py ask "A class definition"

The file has the same size whatever the length of the document.
"""

import os
import sys
from pathlib import Path
from pydoc_data.topics import topics

os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # threads that wait sleep: before torch is imported

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import hf_memory

MODEL = "demo_output/student"
MEMORY = Path("document.safetensors")
PIECE = 2048
model = AutoModelForCausalLM.from_pretrained(MODEL)
tokenizer = AutoTokenizer.from_pretrained(MODEL)


@torch.no_grad()
def read(text: str) -> None:
    """Read piece by piece, so that a document of any length fits."""
    tokens = tokenizer(text, return_tensors="pt").input_ids
    cache = DynamicCache(config=model.config)
    for piece in tokens.split(PIECE, dim=1):
        model(piece, cache=cache, logits_to_keep=1)
    hf_memory.save_memory(cache, MEMORY, model)
    print(f"{tokens.shape[1]} tokens are now {MEMORY.stat().st_size} bytes in {MEMORY}")


def ask(text: str) -> None:
    """Go on from the memory."""
    conversation = hf_memory.Conversation(
        model, tokenizer, cache=hf_memory.load_memory(MEMORY, model), max_new_tokens=60
    )
    print(text + tokenizer.decode(list(conversation.answer(text))))


if sys.argv[1:] == ["read"]:
    read("\n\n".join(topics.values()))
elif sys.argv[1:2] == ["ask"] and len(sys.argv) == 3:
    ask(sys.argv[2])
else:
    sys.exit(__doc__)
