"""Which heads keep everything: those that retrieve, or those whose windows change the predictions? SmolLM2, untrained.

    python benchmarks/head_choice.py

Teacher and text are those of examples/real_teacher.py. A student keeps as many key-value heads as 4, 8 and 12 % of the
teacher's cache at 8,192 tokens allow; the others see 128 tokens and the first four. Nothing is trained. KL is that of
6 held-out windows of 2,048 tokens; recall is the part of the teacher's gain
on the second reading of 256 tokens after 512 others that is kept, on four held-out passages. Writes
benchmarks/results/head_choice.json; rows that it has are not made again.
"""

import json
import sys
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward
from transformers.utils import logging

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # for examples

from examples import real_teacher as example  # noqa: E402

from hf_memory.conversion import carry_over, load_teacher, load_tokenizer, make_student, read_tokens  # noqa: E402
from hf_memory.conversion.stages.divergence import divergence  # noqa: E402
from hf_memory.conversion.students import student_config  # noqa: E402
from hf_memory.conversion.students.placement import attention_by, by_layer, passages, rank_heads, ranked  # noqa: E402
from hf_memory.evaluation import agreement, cache_bytes, copy_gain  # noqa: E402
from hf_memory.files.text import Text  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "head_choice.json"
WINDOW, SINKS, CONTEXT = 128, 4, 8192
SHARES = (0.04, 0.08, 0.12)
MEASURED = {"length": 2048, "max_tokens": 6 * 2048}
POINTS = (1 / 6, 3 / 6, 5 / 6)  # gates at which gradients are averaged


def options_of(teacher, heads) -> dict:
    """Options of a student with windows in all heads but some."""
    chosen = by_layer([(layer, head) for layer, head, _ in heads], teacher.config.num_hidden_layers)
    return {"sliding_window": WINDOW, "num_sink_tokens": SINKS, "full_attention_heads": chosen}


def best(teacher, heads, share: float) -> list:
    """As many of ranked heads as a share of the teacher's cache allows."""

    def size(count: int) -> float:
        options = options_of(teacher, heads[:count])
        return cache_bytes(student_config(teacher.config, "attention", (), options), CONTEXT)

    allowed = share * cache_bytes(teacher.config, CONTEXT)
    return heads[: max(count for count in range(len(heads)) if size(count) <= allowed)]


def rank_heads_by_loss(teacher, tokens) -> list:
    """All key-value heads of a teacher, first the one whose window changes its predictions most.

    A gate g of each head mixes what it sees in a window with what it sees at all: o = near + g (full - near). At g = 1
    the teacher predicts what it predicts, and at g = 0 all its heads have windows. The score of a head is its part of
    the KL divergence between the two: minus the gradient of KL(teacher || gated) with respect to its gate, averaged
    over gates from 0 to 1 (integrated gradients, https://arxiv.org/abs/1703.01365). Texts are those of `rank_heads`.
    """
    gates = torch.zeros(teacher.config.num_hidden_layers, teacher.config.num_key_value_heads)

    def mixed(module, query, key, value, attention_mask, **kwargs):
        full, _ = eager_attention_forward(module, query, key, value, attention_mask, **kwargs)
        place = torch.arange(query.shape[2])
        is_far = (place[:, None] - place >= WINDOW) & (place >= SINKS)
        mask = attention_mask.masked_fill(is_far, torch.finfo(query.dtype).min)
        near, _ = eager_attention_forward(module, query, key, value, mask, **kwargs)  # [B, T, HQ, D]
        gate = gates[module.layer_idx].repeat_interleave(full.shape[2] // gates.shape[1])[:, None]
        return near + gate * (full - near), None

    def once(*args, **kwargs):
        return checkpoint(mixed, *args, use_reentrant=False, **kwargs)

    total, rows = torch.zeros_like(gates), list(passages(Text.of(tokens)))
    for row in rows:
        with torch.no_grad():
            target = teacher(row, use_cache=False).logits[0]
        for point in POINTS:
            gates = torch.full_like(gates, point).requires_grad_()
            with attention_by(teacher, once):
                logits = teacher(row, use_cache=False).logits[0]
                total -= torch.autograd.grad(divergence(logits, target) / len(POINTS) / len(logits), gates)[0]
    return ranked(total / len(rows))


def gain(model, held_out) -> float:
    """Nats a token that a first reading is worth."""
    return float(copy_gain(model, held_out, passage=256, gap=512, trials=4, max_tokens=None))


def rankings(teacher, tokens) -> dict:
    """All heads by each score."""
    by_recall, by_loss = rank_heads(teacher, tokens), rank_heads_by_loss(teacher, tokens)
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
    for share in SHARES:
        for name, heads in found["rankings"].items():
            row = f"{share:.0%}, {name}"
            if row in found["rows"]:
                continue
            kept = best(teacher, heads, share)
            student = make_student(teacher, "attention", **options_of(teacher, kept))
            carry_over(student, teacher)
            kl, recall = agreement(student, teacher, held_out, **MEASURED).kl, gain(student, held_out)
            found["rows"][row] = {"heads": len(kept), "KL": float(kl), "recall": recall / found["teacher's gain"]}
            print(row, found["rows"][row], flush=True)
            RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
