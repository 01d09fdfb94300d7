"""Twins at equal bytes and equal training: what a window is worth beside slots, and beside kept tokens.

    python benchmarks/twins.py "kept, 8 heads, 256 entries, seed 1"  # one row; goes on where it was stopped
    python benchmarks/twins.py                                       # all that are missing: many hours on one core

Students of SmolLM2-135M-Instruct (benchmarks/smollm2.py) whose attention and memory layers learn from 40,960 tokens in
rows of 2,048 in bfloat16; the seed gives the order of the text and new weights. Beside heads that keep all tokens, or
2,560, the others hold as many bytes as 259 tokens of a window and four first ones, or half of it. KL is of 12 windows
of 2,048 held-out tokens and two of 8,192, by position; recall as in smollm2.py; of needles the part of the digits that
is most likely, three depths at each length. Each row is a file in benchmarks/results/twins, and a column of all rows is
made before the next. The table of docs/results.md has means and 95 % intervals over seeds, docs/windows.md ratios and
the picture.
"""

import hashlib
import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait sleep: before torch is imported

import matplotlib.pyplot as plt
import torch
from matplotlib.ticker import PercentFormatter
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils import logging

import smollm2
from hf_memory.conversion import Recipe
from hf_memory.evaluation import Agreement, agreement_by_position, cache_bytes
from hf_memory.evaluation.needles import RIGHT, SINGLE, hunt, samples_of

RESULTS = smollm2.ROOT / "benchmarks" / "results" / "twins"
WORK = smollm2.WORK / "twins"
SEEDS = (0, 1, 2)
BOUNDED = {"full_attention_window": 2560}
_options = smollm2.recipe_of(smollm2.ROOT / "recipes" / "smollm2.yaml")[0].options
ANSWER = {"full_attention_heads": _options["full_attention_heads"]}  # heads that answers need
HEADS: dict[str, dict] = {  # what keeps everything
    "8 heads": {"keep": "retrieval:1/11"},
    "4 heads": {"keep": "retrieval:1/22"},
    "3 heads of 2,560 tokens": {"keep": "retrieval:1/30", "options": BOUNDED},
    "7 heads of 2,560 tokens": {"keep": "retrieval:1/13", "options": BOUNDED},
    "no head": {"keep": "none"},
    "8 heads that answers need": {"keep": "none", "options": ANSWER},
    "8 heads of 2,560 tokens that answers need": {"keep": "none", "options": {**ANSWER, **BOUNDED}},
}
SIZES: dict[str, dict[str, dict]] = {  # options of as many bytes
    "256 entries": {
        "windows": {"sliding_window": 259},
        "kept": {"sliding_window": 64, "num_kept_tokens": 174, "kept_block_size": 16},
        "slots": {"sliding_window": 192},
    },
    "128 entries": {
        "windows": {"sliding_window": 127},
        "kept": {"sliding_window": 32, "num_kept_tokens": 76, "kept_block_size": 16},
        "slots": {"sliding_window": 78},
    },
}
SPREAD_8 = "44 44 435 44 174 174 44 435 435 435 44 44 44 44 435 435 44 174 44 174 416 174 174 174 174 44 174 44 174 44"
SPREAD: dict[str, list[int]] = {  # kept tokens of each layer, 174 in the mean, as `--spread-kept` finds them
    "8 heads": [int(x) for x in SPREAD_8.split()],
    "8 heads that answers need": _options["num_kept_tokens"],
    "8 heads of 2,560 tokens that answers need": _options["num_kept_tokens"],
}
WHOLE = {  # students whose weights all learn
    "windows": {"sliding_window": 259},
    "kept": {"sliding_window": 64, "num_kept_tokens": 158},
}
WINDOWS = {2048: 12, 8192: 2}  # tokens of a held-out window, and how many
NEEDLES = (512, 1024, 2048, 4096, 7000)
DEPTHS = 3
CONTEXT = smollm2.CONTEXT
COLUMNS = ("by position to 2048", "recall", "by position to 8192", "needles")
START, END = "<!-- twins -->", "<!-- /twins -->"  # around the table of smollm2.PAGE, and that of RATIOS_PAGE
RATIOS_PAGE = smollm2.ROOT / "docs" / "windows.md"
BESIDE = [name for name in HEADS if "answers" not in name]  # heads of the table of ratios
STYLES = {"windows": "--", "kept": "-", "slots": ":"}  # of lines in the picture
T_975 = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776}  # quantile of Student's t for so many seeds


def recipes() -> dict[str, Recipe]:
    """Name of a row: how its student is made; seed by seed, so that the first ones say most."""
    best, _ = smollm2.recipe_of(smollm2.SLOTS)
    whole = replace(best, transfer=best.transfer._replace(steps=16))
    whole = replace(whole, distillation=best.distillation._replace(steps=22, repeats=0.25))
    shorter = best.distillation._replace(steps=16, repeats=0.4)
    best = replace(best, train="attention", transfer=best.transfer._replace(steps=8), distillation=shorter)
    rows = {}
    for (heads, held), (size, kinds), seed in product(HEADS.items(), SIZES.items(), SEEDS):
        for kind, seen in kinds.items():
            made = best if kind == "slots" else smollm2.without_memory(best)
            options = {"num_sink_tokens": 4, **held.get("options", {}), **seen}
            recipe = replace(made, keep=held["keep"], options=options, seed=seed)
            rows[f"{kind}, {heads}, {size}, seed {seed}"] = recipe
            if seed == 0:
                rows[f"{kind} before training, {heads}, {size}, seed 0"] = smollm2.times(0, recipe)
    for (heads, numbers), seed in product(SPREAD.items(), SEEDS):
        equal = rows[f"kept, {heads}, 256 entries, seed {seed}"]
        recipe = replace(equal, options={**equal.options, "num_kept_tokens": numbers})
        rows[f"kept by layer, {heads}, 256 entries, seed {seed}"] = recipe
    for kind, seen in WHOLE.items():
        recipe = replace(smollm2.without_memory(whole), options={"num_sink_tokens": 4, **seen})
        rows[f"{kind} that train whole, 8 heads, 256 entries, seed 0"] = recipe
    return rows


class Remembered(nn.Module):
    """A teacher whose log-probabilities of rows that it has read before are in a folder, in 16 bits."""

    def __init__(self, teacher: PreTrainedModel, folder: Path):
        super().__init__()
        self.teacher, self.folder = teacher, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.config, self.device = teacher.config, teacher.device

    def forward(self, input_ids: Tensor, **kwargs) -> CausalLMOutput:
        """The logits of the teacher, up to a constant."""
        file = self.folder / f"{hashlib.sha256(input_ids.numpy().tobytes()).hexdigest()[:16]}.pt"
        if not file.exists():
            rows = self.teacher(input_ids, **kwargs).logits.split(512, 1)  # those of long texts are large
            torch.save(
                torch.cat([row.log_softmax(-1).half() for row in rows], 1), partial := file.with_suffix(".partial")
            )
            del rows
            partial.rename(file)
        return CausalLMOutput(logits=torch.load(file, mmap=True))


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


def measures(student: PreTrainedModel, teacher: PreTrainedModel, tokenizer, held_out: Tensor) -> dict[str, Callable]:
    """How each column of a row is measured, those that say most first."""
    remembered = Remembered(teacher, WORK / "teacher")
    gains = smollm2.teachers_recall(teacher, held_out)

    def needles() -> dict[str, float]:
        samples = {n: samples_of(tokenizer, held_out, SINGLE, n, count=DEPTHS) for n in NEEDLES}
        return {str(n): float(hunt(student, tokenizer, x)[RIGHT]) for n, x in samples.items()}

    return {
        "by position to 2048": lambda: by_position(student, remembered, held_out, 2048),
        "recall": lambda: {gap: gain / gains[gap] for gap, gain in smollm2.recall(student, held_out).items()},
        "by position to 8192": lambda: by_position(student, remembered, held_out, 8192),
        "needles": needles,
    }


def complete(
    file: Path, column: str, name: str, recipe: Recipe, models: list, tokens: Tensor, held_out: Tensor
) -> None:
    """Make a column of a row if it is missing, and the student if that is."""
    if column in read(file):
        return
    teacher, tokenizer = models
    folder, seconds = smollm2.make(f"twins, {name}", recipe, teacher, tokenizer, tokens, {"bf16": True})
    about = {"name": name, "recipe": json.loads(json.dumps(asdict(recipe), default=str)), "CPU seconds": seconds}
    student = AutoModelForCausalLM.from_pretrained(folder).eval()
    about["cache at 8k / teacher"] = cache_bytes(student.config, CONTEXT) / cache_bytes(teacher.config, CONTEXT)
    found = measures(student, teacher, tokenizer, held_out)[column]()
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(about | read(file) | {column: found}, indent=1) + "\n", encoding="utf-8")
    partial.rename(file)
    print(name, column, found, flush=True)


def file_name(name: str) -> str:
    """The name of a row's file, without its ending."""
    return name.replace(", ", "-").replace(" ", "_")


def read(file: Path) -> dict:
    """A row, as far as it is there."""
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def students() -> dict[str, list[dict]]:
    """The rows of each kind of student, one for each seed, as far as they are there."""
    found: dict[str, list[dict]] = {}
    for row in map(read, sorted(RESULTS.glob("*.json"))):
        found.setdefault(row["name"].rpartition(", ")[0], []).append(row)
    order = list(dict.fromkeys(name.rpartition(", ")[0] for name in recipes()))
    return {name: found[name] for name in sorted(found, key=order.index)}


def over_seeds(found: list[float], form: str) -> str:
    """The mean of a figure with half of its 95 % interval by Student's t, if seeds differ."""
    if len(set(found)) < 2:
        return "".join(f"{x:{form}}" for x in found[:1])
    return f"{statistics.mean(found):{form}} ± {T_975[len(found)] * statistics.stdev(found) / len(found) ** 0.5:{form}}"


FIGURES: dict[str, tuple[str, str, Callable]] = {  # of the table: the column of a row, the format, and the figure
    "cache at 8,192": ("cache at 8k / teacher", ".1%", float),
    "KL": ("by position to 2048", ".4f", lambda found: found["all"]["kl"]),
    "perplexity / teacher": ("by position to 2048", ".3f", lambda found: found["all"]["ratio"]),
    "recall at 512": ("recall", "z.0%", lambda found: found["512"]),
    "at 2,048": ("recall", "z.0%", lambda found: found["2048"]),
    "KL, last half of 8,192": ("by position to 8192", ".3f", lambda found: found["8192"]["kl"]),
    "needles": ("needles", ".0%", lambda found: statistics.mean(found.values())),
}


def table(kinds: dict[str, list[dict]]) -> str:
    """The students in Markdown."""
    lines = []
    for name, rows in kinds.items():
        columns = FIGURES.values()
        cells = [over_seeds([value(x[column]) for x in rows if column in x], form) for column, form, value in columns]
        lines.append([name, str(len(rows)), *cells])
    return smollm2.markdown(["student", "seeds", *FIGURES], lines)


def ratios(kinds: dict[str, list[dict]]) -> str:
    """In Markdown: KL of students with kept tokens and slots relative to windows of as many bytes; means over seeds."""
    column, _, value = FIGURES["KL"]
    kl = {name: statistics.mean(value(row[column]) for row in rows) for name, rows in kinds.items()}

    def ratio(kind: str, heads: str, size: str) -> str:
        names = f"{kind}, {heads}, {size}", f"windows, {heads}, {size}"
        return f"{kl[names[0]] / kl[names[1]]:.2f}" if all(name in kl for name in names) else ""

    pairs = product(("kept", "slots"), SIZES)
    lines = [[f"{kind}, {size}", *(ratio(kind, heads, size) for heads in BESIDE)] for kind, size in pairs]
    return smollm2.markdown(["KL / that of windows", *BESIDE], lines)


def draw(kinds: dict[str, list[dict]]) -> None:
    """KL by position in texts of two lengths, and needles by length: a line for each kind, a mark for each seed.

    What students have beside their memory is told by the colour.
    """
    plt.style.use("tableau-colorblind10")
    titles = {
        "by position to 2048": "KL from the teacher, texts of 2,048",
        "by position to 8192": "KL from the teacher, texts of 8,192",
        "needles": "digits of needles that are most likely",
    }
    titles = {x: title for x, title in titles.items() if any(x in row for rows in kinds.values() for row in rows)}
    size = 4.7 * len(titles), 4 + 0.1 * len(kinds)
    figure, axes = plt.subplots(1, len(titles), figsize=size, layout="constrained", squeeze=False)
    beside = {name: name.split(maxsplit=1)[1] for name in kinds}
    colours = {x: f"C{i}" for i, x in enumerate(dict.fromkeys(beside.values()))}
    for axis, (column, title) in zip(axes[0], titles.items()):
        ticks: set[int] = set()
        for name, rows in kinds.items():
            found = [{int(n): x for n, x in row[column].items() if n != "all"} for row in rows if column in row]
            curves = [{n: x["kl"] if isinstance(x, dict) else x for n, x in curve.items()} for curve in found]
            ticks |= {n for curve in curves for n in curve if n >= 64}
            means = {n: statistics.mean(curve[n] for curve in curves) for n in sorted(ticks)} if curves else {}
            style, colour = STYLES[name.split()[0].strip(",")], colours[beside[name]]
            axis.plot(list(means), list(means.values()), style, color=colour, label=f"{name} ({len(rows)})")
            for curve in curves:
                axis.plot(list(means), [curve[n] for n in means], "o", color=colour, markersize=4)
        axis.set(title=title, xscale="log", xlabel="tokens")
        axis.set_xticks(sorted(ticks), [f"{n:,}" for n in sorted(ticks)], fontsize="small")
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        if column == "needles":
            axis.yaxis.set_major_formatter(PercentFormatter(1))
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize="small", title="students (seeds)")
    figure.savefig(RESULTS.with_suffix(".png"), dpi=120)


def main() -> None:
    """Make the rows that are asked for, or all, as far as they are missing; then the table and the picture."""
    logging.disable_progress_bar()
    RESULTS.mkdir(parents=True, exist_ok=True)
    *models, tokens, held_out = smollm2.materials()
    rows = recipes()
    for column, name in product(COLUMNS, sys.argv[1:] or rows):
        file = RESULTS / f"{file_name(name)}.json"
        complete(file, column, name, rows[name], models, tokens, held_out)
        draw(students())
        smollm2.put(smollm2.PAGE, START, table(students()), END)
        smollm2.put(RATIOS_PAGE, START, ratios(students()), END)


if __name__ == "__main__":
    main()
