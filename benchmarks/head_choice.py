"""Which heads or layers keep everything: those that retrieve, or those that predictions need? SmolLM2, untrained.

    python benchmarks/head_choice.py

Teacher and text are those of examples/real_teacher.py. A student keeps as many key-value heads as 4, 8 and 12 % of the
teacher's cache at 8,192 tokens allow; the others see 128 tokens and the first four, or, at 12 %, 64 tokens, the first
four and 174 kept ones. Or it keeps four or seven layers, those whose heads have the largest scores together, and the
others see 152 or 176 tokens and the first four. Nothing is trained. KL is that of 6 held-out windows of 2,048 tokens;
recall is the part of the teacher's gain on the second reading of 256 tokens after 512 others that is kept, on four
held-out passages. Writes benchmarks/results/head_choice.json; rows that it has are not made again.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait sleep: before torch is imported

import torch
from transformers.utils import logging

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # for examples

from examples import real_teacher as example  # noqa: E402

from hf_memory.conversion import carry_over, load_teacher, load_tokenizer, make_student, read_tokens  # noqa: E402
from hf_memory.conversion.students import student_config  # noqa: E402
from hf_memory.conversion.students.heads import (  # noqa: E402
    HeadScore,
    by_layer,
    layers_by_heads,
    passages,
    rank_heads_by_retrieval,
    ranked,
    window_divergences,
)
from hf_memory.evaluation import agreement, cache_bytes, copy_gain  # noqa: E402
from hf_memory.files.text import Text  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "head_choice.json"
WINDOW, SINKS, CONTEXT = 128, 4, 8192
WINDOWS = {"sliding_window": WINDOW, "num_sink_tokens": SINKS}
KEPT = {"sliding_window": 64, "num_sink_tokens": SINKS, "num_kept_tokens": 174, "kept_block_size": 16}
ROWS = {"4%": (0.04, WINDOWS), "8%": (0.08, WINDOWS), "12%": (0.12, WINDOWS), "12%, kept tokens": (0.12, KEPT)}
LAYERS = {f"{n} layers": (n, {"sliding_window": w, "num_sink_tokens": SINKS}) for n, w in ((4, 152), (7, 176))}
MEASURED = {"length": 2048, "max_tokens": 6 * 2048}


def options_of(teacher, heads, seen: dict) -> dict:
    """Options of a student with windows in all heads but some."""
    chosen = by_layer([(layer, head) for layer, head, _ in heads], teacher.config.num_hidden_layers)
    return {**seen, "full_attention_heads": chosen}


def best(teacher, heads, share: float, seen: dict) -> list:
    """As many of ranked heads as a share of the teacher's cache allows."""

    def size(count: int) -> float:
        options = options_of(teacher, heads[:count], seen)
        return cache_bytes(student_config(teacher.config, "attention", (), options), CONTEXT)

    allowed = share * cache_bytes(teacher.config, CONTEXT)
    return heads[: max(count for count in range(len(heads)) if size(count) <= allowed)]


def of_layers(heads, number: int) -> list:
    """The heads of so many layers, those whose heads have the largest scores together."""
    layers = layers_by_heads(HeadScore(*x) for x in heads)[:number]
    return [x for x in heads if x[0] in layers]


def gain(model, held_out) -> float:
    """Nats a token that a first reading is worth."""
    return float(copy_gain(model, held_out, passage=256, gap=512, trials=4, max_tokens=None))


def rankings(teacher, tokens) -> dict:
    """All heads by each score."""
    by_recall = rank_heads_by_retrieval(teacher, tokens)
    rows = [(row, torch.arange(row.shape[1])) for row in passages(Text.of(tokens))]
    by_loss = ranked(window_divergences(teacher, rows, window=WINDOW, first=SINKS))
    top = {name: max(x.score for x in heads) for name, heads in (("recall", by_recall), ("loss", by_loss))}
    of_loss = {(x.layer, x.head): x.score / top["loss"] for x in by_loss}
    summed = [x._replace(score=x.score / top["recall"] + of_loss[x.layer, x.head]) for x in by_recall]
    return {"retrieval": by_recall, "loss": by_loss, "both": sorted(summed, key=lambda x: -x.score)}


def main() -> None:
    """All rows."""
    logging.set_verbosity_error()
    file, text = example.fetch_teacher(), example.fetch_text()
    teacher, tokenizer = load_teacher(str(file)).eval(), load_tokenizer(str(file))
    whole = read_tokens([text], tokenizer, limit=400_000)
    tokens, held_out = whole[: -len(whole) // 10], whole[-len(whole) // 10 :]
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": {}}
    if "rankings" not in found:
        found["rankings"] = {name: [tuple(x) for x in heads] for name, heads in rankings(teacher, tokens).items()}
        found["teacher's gain"] = gain(teacher, held_out)
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for size, (part, seen) in {**ROWS, **LAYERS}.items():
        for name, heads in found["rankings"].items():
            row = f"{size}, {name}"
            if row in found["rows"]:
                continue
            kept = of_layers(heads, part) if size in LAYERS else best(teacher, heads, part, seen)
            student = make_student(teacher, "attention", **options_of(teacher, kept, seen))
            carry_over(student, teacher)
            kl, recall = agreement(student, teacher, held_out, **MEASURED).kl, gain(student, held_out)
            found["rows"][row] = {"heads": len(kept), "KL": float(kl), "recall": recall / found["teacher's gain"]}
            print(row, found["rows"][row], flush=True)
            RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
