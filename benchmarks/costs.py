"""Is the memory that a plan predicts the memory that a stage takes? Predicted and measured peaks of small conversions.

    python benchmarks/costs.py

Each conversion runs in a process of its own, on the CPU; its peak is the largest resident size (ru_maxrss) beyond that
of the process before it has a model. Prints the table and writes benchmarks/results/costs.json.
"""

import json
import resource
import subprocess
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_memory.conversion import Recipe, Run, Schedule, convert, resolve
from hf_memory.conversion.costs import costs

RESULTS = Path(__file__).parent / "results" / "costs.json"
TEACHER = LlamaConfig(
    vocab_size=16384,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=4096,
)
NONE = Schedule(0, 1e-4, 1, 1024)
ROWS = Schedule(2, 1e-4, 1, 2048)
HEADS = {
    "to": "attention",
    "keep": "heads:1/11",
    "options": {"sliding_window": 256, "num_kept_tokens": 0, "cache_bits": None},
    "transfer": NONE,
}
WHOLE = {"to": "deltanet", "keep": "none", "options": {"gate": "scalar"}}
CASES: dict[str, tuple[Recipe, dict]] = {
    "heads and windows": (Recipe(**HEADS, distillation=ROWS), {}),
    "in bfloat16": (Recipe(**HEADS, distillation=ROWS), {"bf16": True}),
    "with checkpointing": (Recipe(**HEADS, distillation=ROWS), {"activation_checkpointing": True}),
    "two rows": (Recipe(**HEADS, distillation=ROWS._replace(batch_size=2)), {}),
    "fine-tuning": (Recipe(**HEADS, distillation=NONE, fine_tuning=ROWS), {}),
    "Gated DeltaNet, transfer": (Recipe(**WHOLE, transfer=ROWS, distillation=NONE), {}),
    "Gated DeltaNet, distillation": (
        Recipe(**WHOLE, transfer=NONE, distillation=ROWS),
        {},
    ),
}


def run(name: str) -> tuple[int, int]:
    """Bytes that were predicted and measured."""
    recipe, training = CASES[name]
    tokens = torch.randint(TEACHER.vocab_size, (8192,))
    plan = resolve(recipe, TEACHER, tokens)
    (cost,) = costs(plan, training)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    convert(LlamaForCausalLM(TEACHER), tokens, plan, Run(training=training))
    return cost.peak, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def main() -> None:
    """All cases, each in its own process."""
    if sys.argv[1:]:
        print(json.dumps(run(sys.argv[1])))
        return
    found = {}
    print(f"{'':30}{'predicted':>12}{'measured':>12}{'ratio':>8}")
    for name in CASES:
        done = subprocess.run(
            [sys.executable, __file__, name], capture_output=True, text=True, check=True
        )
        predicted, measured = json.loads(done.stdout.splitlines()[-1])
        found[name] = {"predicted": predicted, "measured": measured}
        print(
            f"{name:30}{predicted / 1e6:9,.0f} MB{measured / 1e6:9,.0f} MB{predicted / measured:8.2f}",
            flush=True,
        )
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
