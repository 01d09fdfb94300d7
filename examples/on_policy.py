"""Train a student on what it writes itself, with TRL's DistillationTrainer (pip install trl datasets).

    hf-memory convert TEACHER --text text.txt --output student
    python examples/on_policy.py TEACHER student text.txt better

In each step the student continues beginnings of passages, and learns what its teacher would have predicted there, by
KL(student || teacher): https://arxiv.org/abs/2306.13649. Embeddings and feed-forward layers stay as they are.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # threads that wait sleep: before torch is imported

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DistillationConfig, DistillationTrainer

import hf_memory  # noqa: F401  # so that transformers knows the student's class

STEPS = 30
PROMPT = 512  # tokens of a beginning
COMPLETION = 128  # tokens that the student writes after it


def main(teacher_name: str, student_name: str, text: Path, output: Path) -> None:
    """Train the student, and write it with its tokenizer to `output`."""
    tokenizer = AutoTokenizer.from_pretrained(student_name)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    teacher = AutoModelForCausalLM.from_pretrained(teacher_name, dtype=torch.float32)
    student = AutoModelForCausalLM.from_pretrained(student_name, dtype=torch.float32)
    student.model.embed_tokens.requires_grad_(False)
    student.get_output_embeddings().requires_grad_(False)
    for layer in student.model.layers:
        layer.mlp.requires_grad_(False)
    tokens = tokenizer(text.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    prompts = tokenizer.batch_decode(tokens.split(PROMPT))
    config = DistillationConfig(
        f"{output}-checkpoints",
        max_steps=STEPS,
        learning_rate=1e-5,
        per_device_train_batch_size=1,
        max_completion_length=COMPLETION,
        beta=1.0,  # 0 for KL(teacher || student)
        bf16=torch.cuda.is_available(),
        logging_steps=1,
        report_to="none",
    )
    data = Dataset.from_dict({"prompt": prompts})
    trainer = DistillationTrainer(
        student, teacher, config, train_dataset=data, processing_class=tokenizer
    )
    trainer.train()
    trainer.save_model(str(output))


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
