"""The first steps of a user, in an empty folder and without network: README, commands, one call, custom_generate.

`python first_steps.py REPOSITORY` runs them with the package that is installed beside this Python. Their teacher is a
small Llama that is made here, whose numbers are random.
"""

import os
import pydoc_data.topics
import re
import subprocess
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    set_seed,
)

REPOSITORY = Path(sys.argv[1]).absolute()
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"  # of the teacher in README
CONVERT = (
    "convert teacher --text text.txt --output student --items 0 --distillation steps=2 --overwrite"
)


def main() -> None:
    """Raise the first error of a step."""
    make_teacher()
    for command in ("--version", "--help", "check", CONVERT, "info student"):
        run(Path(sys.executable).with_name("hf-memory"), *command.split())
    Path("readme.py").write_text(readme(), encoding="utf-8")
    run(sys.executable, "readme.py")

    import hf_memory

    teacher = AutoModelForCausalLM.from_pretrained("teacher")
    inputs = AutoTokenizer.from_pretrained("student")("The import system", return_tensors="pt")
    length = {"max_new_tokens": 300, "do_sample": False, "eos_token_id": None}
    student = AutoModelForCausalLM.from_pretrained("student")
    assert student.generate(**inputs, **length).shape[1] > 300
    small = hf_memory.shrink_cache(teacher, "student/config.json")
    folder = str(REPOSITORY / "examples" / "custom_generate")
    ways = {"custom_generate": folder, "trust_remote_code": True, "small_cache": "student"}
    written = teacher.generate(**inputs, **length, **ways)
    assert torch.equal(written, small.generate(**inputs, **length))
    print("The first steps work.")


def make_teacher() -> None:
    """Write a small Llama and its tokenizer into the folder teacher, and a text beside it."""
    text = "\n".join(pydoc_data.topics.topics.values())
    Path("text.txt").write_text(text[:100_000], encoding="utf-8")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([text], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained("teacher")
    set_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=len(fast), bos_token_id=0, eos_token_id=1, **sizes, **heads)
    LlamaForCausalLM(config).save_pretrained("teacher")


def readme() -> str:
    """The Python code of README, with the small teacher."""
    page = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    code = "".join(re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    assert NAME in code
    return code.replace(NAME, "teacher")


def run(*command: str | Path) -> None:
    """Run a command, and end with its exit code if it fails."""
    print("$", Path(command[0]).name, *command[1:], flush=True)
    subprocess.run(command, check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})


if __name__ == "__main__":
    main()
