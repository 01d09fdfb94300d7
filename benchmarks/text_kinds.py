"""Which text a conversion should read: documents, what the teacher writes itself, or both, at equal tokens.

    python benchmarks/text_kinds.py  # half an hour on one core; goes on where it was stopped

The student of the row "1/10 of heads, window 128, no memory" of smollm2.py, with a third of its tokens. Documents are
the prose of examples/real_teacher.py; the teacher's own text are its answers to questions that it asks itself; a
mixture takes windows of each in turn. A quarter of each is held out, and every student is measured on all three. Writes
benchmarks/results/text_kinds.{json,png}.
"""

import json

import matplotlib.pyplot as plt
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

import smollm2
from hf_memory.conversion import load_teacher, load_tokenizer, read_tokens
from hf_memory.conversion.teacher_text import write_text
from hf_memory.evaluation import agreement
from hf_memory.progress import Progress
from smollm2 import ROOT, WORK

RESULTS = ROOT / "benchmarks" / "results" / "text_kinds.json"
OWN = 30_000  # tokens that the teacher writes
HELD_OUT = 4 * 1024  # tokens of each kind that are measured


def tell(progress: Progress) -> None:
    """How far the teacher is with its text."""
    print(f"  {progress.task} {progress.done:,}/{progress.total:,}", flush=True)


def texts(teacher: PreTrainedModel, tokenizer) -> dict[str, tuple[Tensor, Tensor]]:
    """Tokens to train on and held-out tokens of each kind of text, and of a mixture with as many of either kind."""
    own = write_text(WORK, teacher, tokenizer, OWN, report=tell)
    kinds = {}
    for name, file, most in (("documents", smollm2.example.fetch_text(), 400_000), ("teacher's own", own, OWN)):
        tokens = read_tokens([file], tokenizer, limit=most).tokens
        kinds[name] = tokens[: -len(tokens) // 4], tokens[-len(tokens) // 4 :][:HELD_OUT]
    shortest = min(len(train) for train, _ in kinds.values())
    parts = [part for train, _ in kinds.values() for part in train[:shortest].split(2048)]
    half = len(parts) // 2
    mixed = torch.cat([x for pair in zip(parts[:half], parts[half:]) for x in pair])
    return kinds | {"mixture": (mixed, torch.cat([held[: HELD_OUT // 2] for _, held in kinds.values()]))}


def row(name: str, student: PreTrainedModel, teacher: PreTrainedModel, held_out: dict[str, Tensor]) -> dict:
    """How near a student of one kind of text is to its teacher on each kind."""
    found = {}
    for kind, tokens in held_out.items():
        like = agreement(student, teacher, tokens, length=1024)
        found[kind] = {"perplexity / teacher": like.ratio, "KL": like.kl, "agreement": like.top1}
        print(f"{name:16} on {kind:16} ratio {like.ratio:.3f}  KL {like.kl:.3f}  agreement {like.top1:.1%}", flush=True)
    return found


def draw(rows: dict[str, dict]) -> None:
    """KL of each student on each kind."""
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for i, (name, row) in enumerate(rows.items()):
        axis.bar([k + 0.25 * i for k in range(len(row))], [x["KL"] for x in row.values()], 0.25, label=name)
    kinds = list(next(iter(rows.values())))
    axis.set_xticks([k + 0.25 for k in range(len(kinds))], [f"measured on\n{kind}" for kind in kinds])
    axis.set(ylabel="KL from the teacher")
    axis.legend(title="trained on")
    figure.savefig(RESULTS.with_suffix(".png"), dpi=120)


def main() -> None:
    """Make what is not there yet."""
    logging.disable_progress_bar()
    file = smollm2.example.fetch_teacher()
    teacher, tokenizer = load_teacher(str(file)).eval(), load_tokenizer(str(file))
    kinds = texts(teacher, tokenizer)
    recipe = smollm2.times(
        1 / 3, smollm2.recipes(smollm2.recipe_of(smollm2.SLOTS)[0])["1/10 of heads, window 128, no memory"]
    )
    held_out = {kind: held for kind, (_, held) in kinds.items()}
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"] if RESULTS.exists() else {}
    for name, (tokens, _) in kinds.items():
        if name not in rows:
            folder, _ = smollm2.make(f"text {name.replace(chr(39), '')}", recipe, teacher, tokenizer, tokens)
            rows[name] = row(name, AutoModelForCausalLM.from_pretrained(folder), teacher, held_out)
            about = {"command": "python benchmarks/text_kinds.py", "tokens": smollm2.read(recipe), "rows": rows}
            RESULTS.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    draw(rows)


if __name__ == "__main__":
    main()
