"""Train a Gated DeltaNet from scratch on a JSON Lines file, each line of which has a field "text".

    python examples/train_from_scratch.py --text my_text.jsonl --output_dir my_model \\
        --per_device_train_batch_size 8 --learning_rate 1e-3 --max_steps 10000

It trains a tokenizer, packs documents into rows, and calls transformers' Trainer, whose flags it has.
"""

import json
import os
from dataclasses import dataclass

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: threads that wait sleep

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import HfArgumentParser, PreTrainedTokenizerFast, Trainer, TrainingArguments

import hf_memory

END = "<|endoftext|>"


@dataclass
class Sizes:
    text: str
    vocab_size: int = 32_000
    hidden_size: int = 512
    num_layers: int = 8
    length: int = 2048  # tokens of a row


def pack(documents: list[list[int]], length: int) -> list[dict]:
    """Rows of tokens. Positions begin again in each document, so that none sees another."""
    tokens = torch.tensor([token for document in documents for token in document])
    positions = torch.cat([torch.arange(len(document)) for document in documents])
    labels = tokens.masked_fill(positions == 0, -100)  # no document predicts the next one
    columns = {"input_ids": tokens, "position_ids": positions, "labels": labels}
    starts = range(0, len(tokens) - length + 1, length)
    return [{name: x[start : start + length] for name, x in columns.items()} for start in starts]


sizes, training = HfArgumentParser((Sizes, TrainingArguments)).parse_args_into_dataclasses()
with open(sizes.text, encoding="utf-8") as file:
    texts = [json.loads(line)["text"] for line in file]
bpe = ByteLevelBPETokenizer()
bpe.train_from_iterator(texts, sizes.vocab_size, special_tokens=[END], show_progress=False)
special = {"bos_token": END, "eos_token": END, "pad_token": END}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, **special)
rows = pack([tokenizer.encode(text + END) for text in texts], sizes.length)
width = sizes.hidden_size
shape = {"hidden_size": width, "intermediate_size": 3 * width, "num_attention_heads": width // 64}
shape |= {"num_hidden_layers": sizes.num_layers, "vocab_size": len(tokenizer)}
others = {"tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
model = hf_memory.DeltaNetForCausalLM(hf_memory.DeltaNetConfig(gate="scalar", **shape, **others))
print(f"{model.num_parameters():,} parameters, {len(rows):,} rows of {sizes.length} tokens")
training.dataloader_pin_memory &= torch.cuda.is_available()
trainer = Trainer(model, training, train_dataset=rows, processing_class=tokenizer)
trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
trainer.save_model()  # with the tokenizer
