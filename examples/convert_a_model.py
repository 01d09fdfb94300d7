"""Convert a Transformer that you have into a student with a small cache, and compare the two.

    python examples/convert_a_model.py path/or/repo/of/a/llama my_text.txt student

The command `hf-memory convert` does the same, and writes a card with measurements and pictures.
"""

import argparse
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: threads that wait sleep

from hf_memory.conversion import (
    Recipe,
    Schedule,
    convert,
    load_teacher,
    load_tokenizer,
    plan_rows,
    read_tokens,
)
from hf_memory.evaluation import agreement, cache_share

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
for name in ("teacher", "text", "student"):
    parser.add_argument(name)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--length", type=int, default=2048, help="tokens of a step")
arguments = parser.parse_args()

teacher, tokenizer = load_teacher(arguments.teacher), load_tokenizer(arguments.teacher)
tokens = read_tokens([arguments.text], tokenizer)
held_out = tokens[-len(tokens) // 10 :]
learned_from = tokens[: len(tokens) - len(held_out)]

# Without more, one key-value head of eleven keeps everything: those that predictions need most.
steps = Schedule.with_some(steps=arguments.steps, length=arguments.length)
converted = convert(teacher, learned_from, Recipe(distillation=steps))
for name, value in plan_rows(converted.plan):
    print(f"{name:26}{value}")
student = converted.student.eval()
student.save_pretrained(arguments.student)
tokenizer.save_pretrained(arguments.student)

near = agreement(student, teacher.eval(), held_out, length=min(arguments.length, len(held_out)))
print(f"KL from the teacher: {near.kl:.3f} nats a token")
print(f"the same next token: {near.top1:.1%}")
for context in (1024, 8192, 32768):
    share = cache_share(student.config, teacher.config, context)
    print(f"cache after {context:,} tokens: {share:.0%} of the teacher's")
