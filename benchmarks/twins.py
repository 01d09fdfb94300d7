"""Twins at equal bytes and equal training: what a window is worth beside slots, and beside kept tokens.

    python benchmarks/twins.py "kept, 8 heads, 256 entries, seed 1"  # one row; goes on where it was stopped
    python benchmarks/twins.py                                       # all that are missing: many hours on one core

Students of SmolLM2-135M-Instruct (benchmarks/smollm2.py) that read 61,440 tokens in rows of 2,048 in bfloat16; the seed
gives the order of the text and new weights. Beside heads that keep all tokens, or 2,560, the others hold as many bytes
as 259 tokens of a window and four first ones, or half of it. KL is of 12 windows of 2,048 held-out tokens and two of
8,192, by position; recall as in smollm2.py; of needles the part of the digits that is most likely, three depths at each
length. Each row is a file in benchmarks/results/twins; the picture and the table of docs/windows.md have means and 95 %
intervals over seeds.
"""

import hashlib
import json
import sys
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils import logging

import smollm2
from hf_memory.conversion import Recipe, load_teacher, load_tokenizer, read_tokens
from hf_memory.evaluation import Agreement, agreement_by_position, cache_bytes
from hf_memory.evaluation.needles import RIGHT, SINGLE, hunt, samples_of

RESULTS = smollm2.ROOT / "benchmarks" / "results" / "twins"
WORK = smollm2.WORK / "twins"
SEEDS = (0, 1, 2)
BOUNDED = {"full_attention_window": 2560}
HEADS: dict[str, dict] = {  # what keeps everything
    "8 heads": {"keep": "heads:1/11"},
    "4 heads": {"keep": "heads:1/22"},
    "3 heads of 2,560 tokens": {"keep": "heads:1/30", "options": BOUNDED},
    "no head": {"keep": "none"},
}
SIZES: dict[str, dict[str, dict]] = {  # options of as many bytes
    "256 entries": {
        "windows": {"sliding_window": 259},
        "kept": {"sliding_window": 64, "num_kept_tokens": 158},
        "slots": {"sliding_window": 192},
    },
    "128 entries": {
        "windows": {"sliding_window": 127},
        "kept": {"sliding_window": 32, "num_kept_tokens": 76, "kept_block_size": 16},
        "slots": {"sliding_window": 60},
    },
}
WINDOWS = {2048: 12, 8192: 2}  # tokens of a held-out window, and how many
NEEDLES = (512, 1024, 2048, 4096, 7000)
DEPTHS = 3


def recipes() -> dict[str, Recipe]:
    """Name of a row: how its student is made; seed by seed, so that the first ones say most."""
    best, _ = smollm2.recipe_of(smollm2.example.RECIPE)
    best = replace(best, transfer=best.transfer._replace(steps=16))
    best = replace(best, distillation=best.distillation._replace(steps=22, repeats=0.25))
    rows = {}
    for (heads, held), (size, kinds), seed in product(HEADS.items(), SIZES.items(), SEEDS):
        for kind, seen in kinds.items():
            made = best if kind == "slots" else smollm2.without_memory(best)
            options = {"num_sink_tokens": 4, **held.get("options", {}), **seen}
            rows[f"{kind}, {heads}, {size}, seed {seed}"] = replace(made, keep=held["keep"], options=options, seed=seed)
    return rows


class Remembered(nn.Module):
    """A teacher whose log-probabilities of rows that it has read before are in a folder, in 16 bits."""

    def __init__(self, teacher: PreTrainedModel, folder: Path):
        super().__init__()
        self.teacher, self.folder = teacher, folder
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def device(self) -> torch.device:
        """Of the teacher."""
        return self.teacher.device

    def forward(self, input_ids: Tensor, **kwargs) -> CausalLMOutput:
        """The logits of the teacher, up to a constant."""
        file = self.folder / f"{hashlib.sha256(input_ids.numpy().tobytes()).hexdigest()[:16]}.pt"
        if not file.exists():
            logits = self.teacher(input_ids, **kwargs).logits
            for row in logits.flatten(0, 1).split(512):
                row.copy_(row.log_softmax(-1))
            torch.save(logits.half(), partial := file.with_suffix(".partial"))
            partial.rename(file)
        return CausalLMOutput(logits=torch.load(file))


def by_position(student: PreTrainedModel, teacher: nn.Module, held_out: Tensor, length: int) -> dict[str, dict]:
    """KL, agreement and ratio of perplexities by position, and of all tokens."""
    found = agreement_by_position(student, teacher, held_out, length=length, windows=WINDOWS[length], max_tokens=None)
    ends = [1, *found]  # the first token is not predicted
    sizes = torch.tensor([b - a for a, b in zip(ends, ends[1:])]).double()

    def row(figures: Agreement) -> dict[str, float]:
        return {name: float(x) for name, x in figures._asdict().items()}

    each = [row(figures) for figures in found.values()]
    columns = {name: torch.tensor([x[name] for x in each]).double() for name in each[0]}
    columns["ratio"] = columns["ratio"].log()
    mean = {name: ((x * sizes).sum() / sizes.sum()).item() for name, x in columns.items()}
    return {"all": mean | {"ratio": torch.tensor(mean["ratio"]).exp().item()}, **dict(zip(map(str, found), each))}


def measured(student: PreTrainedModel, teacher: PreTrainedModel, tokenizer, held_out: Tensor) -> dict:
    """All columns of a row that are of the student alone."""
    remembered = Remembered(teacher, WORK / "teacher")
    gains = json.loads(smollm2.RESULTS.read_text(encoding="utf-8"))["teacher's recall, nats a token"]
    found = {str(n): by_position(student, remembered, held_out, n) for n in WINDOWS}
    recall = {gap: gain / gains[gap] for gap, gain in smollm2.recall(student, held_out).items()}
    needles = {
        str(n): float(hunt(student, tokenizer, samples_of(tokenizer, held_out, SINGLE, n, count=DEPTHS))[RIGHT])
        for n in NEEDLES
    }
    share = cache_bytes(student.config, smollm2.CONTEXT) / cache_bytes(teacher.config, smollm2.CONTEXT)
    return {"agreement": found, "recall": recall, "needles": needles, "cache at 8k / teacher": share}


def main() -> None:
    """Make the rows that are asked for, or all, and that are not there yet."""
    logging.disable_progress_bar()
    RESULTS.mkdir(parents=True, exist_ok=True)
    file = str(smollm2.example.fetch_teacher())
    teacher, tokenizer = load_teacher(file).eval(), load_tokenizer(file)
    tokens = read_tokens([smollm2.example.fetch_text()], tokenizer, limit=400_000)
    tokens, held_out = tokens[: -(len(tokens) // 10)], tokens[-(len(tokens) // 10) :]
    rows = recipes()
    for name in sys.argv[1:] or rows:
        result = RESULTS / f"{name.replace(', ', '-').replace(' ', '_')}.json"
        if result.exists():
            continue
        student, seconds = smollm2.make(f"twins, {name}", rows[name], teacher, tokenizer, tokens, {"bf16": True})
        row = {
            "name": name,
            "recipe": json.loads(json.dumps(asdict(rows[name]), default=str)),
            "CPU seconds": seconds,
            **measured(AutoModelForCausalLM.from_pretrained(student), teacher, tokenizer, held_out),
        }
        partial = result.with_suffix(".partial")
        partial.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
        partial.rename(result)
        print(name, {n: round(x["all"]["kl"], 4) for n, x in row["agreement"].items()}, row["recall"], flush=True)


if __name__ == "__main__":
    main()
