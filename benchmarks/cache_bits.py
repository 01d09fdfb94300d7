"""The table of caches in few bits: an untrained student of SmolLM2-135M, and the teacher, in 16, 8 and 4 bits.

    python benchmarks/cache_bits.py        # ten minutes of one core; downloads what `make smollm2` does

The student is that of recipes/smollm2.yaml before training. KL is from the teacher in 16 bits, in two held-out texts of
2,048 tokens; bytes of the cache are relative to the teacher's in 16 bits. Writes benchmarks/results/cache_bits.json.
"""

import copy
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported

import torch
import yaml
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from hf_memory.conversion import carry_over, load_teacher, load_tokenizer, make_student
from hf_memory.evaluation import cache_bytes, kv_cache_bytes

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "cache_bits.json"
LENGTH = 2048
TEXTS = 2
HELD_OUT = 900_000  # characters at the end of the text, which no recipe learns
CACHE_AT = 8192
MIXED = {"full_attention_heads": 4, "window": 8}
STUDENTS = (  # how many times the kept tokens of the recipe, and bits
    (1, None),
    (1, 8),
    (1, MIXED),
    (2, 8),
    (2, MIXED),
    (5, MIXED),
)
TEACHERS = (8, 4)


def predictions(model: PreTrainedModel, text: Tensor) -> Tensor:
    """Logarithms of the probabilities of the next token, after each token of a text [1, T]."""
    return model(text).logits.float().log_softmax(-1)


def distances(
    expected: list[Tensor], model: PreTrainedModel, texts: list[Tensor]
) -> dict[str, float]:
    """KL from what a teacher predicts, in nats a token: of all tokens, and of the last half of each text."""
    pairs = ((x, predictions(model, text)) for x, text in zip(expected, texts, strict=True))
    kl = torch.cat([(x.exp() * (x - given)).sum(-1) for x, given in pairs])
    return {"kl": kl.mean().item(), "kl_last_half": kl[:, LENGTH // 2 :].mean().item()}


def student_of(teacher: PreTrainedModel, times: int) -> PreTrainedModel:
    """The student of the recipe, with so many times its kept tokens, untrained."""
    options = yaml.safe_load((ROOT / "recipes" / "smollm2.yaml").read_text())["option"]
    options["num_kept_tokens"] = [times * x for x in options["num_kept_tokens"]]
    student = make_student(teacher, to="attention", keep="none", **options)
    carry_over(student, teacher)
    return student.eval()


def teacher_in_bits(teacher: PreTrainedModel) -> PreTrainedModel:
    """The teacher as a model of ours whose layers all keep their attention."""
    layers = tuple(range(teacher.config.num_hidden_layers))
    same = make_student(teacher, to="attention", keep=layers, num_sink_tokens=0, num_kept_tokens=0)
    carry_over(same, teacher)
    return same.eval()


def bytes_in_16_bits(count: Callable, config: PreTrainedConfig) -> int:
    """Bytes of the cache of a model that runs in bfloat16."""
    config = copy.deepcopy(config)
    config.dtype = torch.bfloat16
    return count(config, CACHE_AT)


@torch.no_grad()
def main() -> None:
    """Measure each, and write the table after each row."""
    sys.path.insert(0, str(ROOT / "examples"))
    import real_teacher

    file = str(real_teacher.fetch_teacher("smollm2"))
    teacher = load_teacher(file).float().eval()
    text = real_teacher.fetch_text().read_text(encoding="utf-8")[-HELD_OUT:]
    tokens = load_tokenizer(file)(text, return_tensors="pt").input_ids[:, : TEXTS * LENGTH]
    texts = list(tokens.split(LENGTH, 1))
    expected = [predictions(teacher, x) for x in texts]
    whole = bytes_in_16_bits(kv_cache_bytes, teacher.config)
    rows = []
    models = {times: student_of(teacher, times) for times in {times for times, _ in STUDENTS}}
    named = [(f"student, {times} x kept tokens", models[times], bits) for times, bits in STUDENTS]
    named += [("teacher", teacher_in_bits(teacher), bits) for bits in TEACHERS]
    for name, model, bits in named:
        model.config.cache_bits = bits
        part = bytes_in_16_bits(cache_bytes, model.config) / whole
        rows.append({"model": name, "bits": bits or 16, **distances(expected, model, texts)})
        rows[-1]["part_of_cache"] = part
        print(json.dumps(rows[-1]), flush=True)
        RESULT.write_text(
            json.dumps({"texts": TEXTS, "length": LENGTH, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
