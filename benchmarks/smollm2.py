"""A real teacher, SmolLM2-135M-Instruct: what students keep of it, with their memory and without, at equal tokens.

    python benchmarks/smollm2.py                  # all rows: hours on one core; goes on where it was stopped
    python benchmarks/smollm2.py "1/10 of heads"  # one row
    python benchmarks/smollm2.py --untimed        # without what a token costs, which needs a quiet machine

Teacher and text are those of examples/real_teacher.py; the first row is of recipes/smollm2-slots.yaml, and a twin
without memory spends the tokens of transfer on distillation. Students of other recipes are made by `hf-memory convert`,
which also takes the time to measure them. Of the text a tenth is held out. Perplexity, KL and agreement are of 12
windows of 1,024 tokens; recall is the part of the teacher's gain that is kept on the second reading of 256 tokens after
512 (four passages) or 2,048 others (three); bytes are of caches in 16 bits. What a token costs is CPU time of one
thread beside the teacher's, in turn, after contexts that are set and not read (decode.py). Writes
benchmarks/results/smollm2.json and the table in docs/research/students.md.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
import yaml
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # for examples

from examples import real_teacher as example  # noqa: E402

from decode import by_context  # noqa: E402
from hf_memory.cli.run_file import read_schedule  # noqa: E402
from hf_memory.conversion import (  # noqa: E402
    SERVABLE,
    Recipe,
    Run,
    Schedule,
    convert,
    load_teacher,
    load_tokenizer,
    read_tokens,
    resolve,
    write_model,
)
from hf_memory.conversion.defaults import DISTILLATION_SCHEDULE, TRANSFER_SCHEDULE  # noqa: E402
from hf_memory.evaluation import agreement, bytes_per_token, cache_share, copy_gain  # noqa: E402
from hf_memory.files.fingerprints import tokens_fingerprint  # noqa: E402
from hf_memory.files.text import Text  # noqa: E402
from hf_memory.progress import Progress  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "smollm2.json"
NOTES = ROOT / "docs" / "research"  # pages with tables that scripts write
WORK = ROOT / "runs" / "smollm2"
SLOTS = ROOT / "recipes" / "smollm2-slots.yaml"
BETWEEN = {512: 4, 2048: 3}  # tokens between two readings of a passage, and how many passages
CONTEXT = 8192  # tokens of the caches
RETRIEVE = "17,18,20,21,22,23,24"  # layers that hold all of the nine heads that retrieve most
COMMANDS = {  # rows that `hf-memory convert` makes, by a file in recipes
    "8 of 90 heads that answers need, window 64, kept tokens by layer in 8 bits, practice": "smollm2",
    "7 of 30 layers, those that predictions need, window 176, sinks, 2,048 tokens, no memory": "smollm2-7-layers",
    "4 of 30 layers, those that retrieve, window 152, sinks, 2,048 tokens, no memory": "smollm2-4-layers",
}
ALONE = {"num_kept_tokens": 0, "cache_bits": None}  # a window
START = "<!-- smollm2 -->"
END = "<!-- /smollm2 -->"  # around the table
DECODED = (1024, 8192, 32768)  # tokens that a token is decoded after


def recipe_of(file: Path) -> tuple[Recipe, int]:
    """A recipe of a file, and how many tokens of the text it reads."""
    run = yaml.safe_load(file.read_text(encoding="utf-8"))
    usual = {"transfer": TRANSFER_SCHEDULE, "distillation": DISTILLATION_SCHEDULE}
    given = {
        name: read_schedule(name, [f"{field}={value}" for field, value in run[name].items()])
        for name in usual
    }
    stages = {name: usual[name]._replace(**given[name].given) for name in usual}
    same = {name: run[name] for name in ("to", "train", "servable") if name in run}
    return Recipe(keep=run["keep"], options=run["option"], **same, **stages), run["max-tokens"]


def without_memory(recipe: Recipe) -> Recipe:
    """The same window and heads alone, for as many tokens."""
    steps = read(recipe) // (recipe.distillation.batch_size * recipe.distillation.length)
    return replace(
        recipe,
        to="attention",
        options={**recipe.options, **ALONE},
        transfer=recipe.transfer._replace(steps=0),
        distillation=recipe.distillation._replace(steps=steps),
    )


def with_window(tokens: int, recipe: Recipe) -> Recipe:
    """The same with another window."""
    return replace(recipe, options={**recipe.options, "sliding_window": tokens})


def times(factor: float, recipe: Recipe) -> Recipe:
    """For so many times the tokens."""
    stages = {name: getattr(recipe, name) for name in ("transfer", "distillation")}
    return replace(
        recipe, **{name: x._replace(steps=round(factor * x.steps)) for name, x in stages.items()}
    )


def recipes(best: Recipe) -> dict[str, Recipe]:
    """Name of a row: how its student is made."""
    quickest = best
    longer = replace(best, transfer=best.transfer._replace(steps=16))
    best = replace(longer, distillation=best.distillation._replace(steps=22, repeats=0.25))
    quicker = replace(best, distillation=best.distillation._replace(steps=18))
    first = replace(
        with_window(64, best),
        keep="retrieval:1/10",
        transfer=best.transfer._replace(steps=24),
        distillation=best.distillation._replace(steps=36, length=1024),
    )
    short = times(2 / 3, first)
    quick = times(1 / 3, first)
    none, quarter = (replace(quick, keep=keep) for keep in ("none", "1/4"))
    few = with_window(64, replace(best, keep="retrieval:1/22"))
    bounded = {"full_attention_window": 2560}  # a cache that does not grow
    four = replace(short, keep="retrieval:1/22", options={**first.options, **bounded})
    three = replace(best, keep="retrieval:1/30", options={**best.options, **bounded})
    whole = replace(
        short,
        keep="1/4",
        options={"gate": "scalar"},
        transfer=short.transfer._replace(learning_rate=3e-3),
        distillation=short.distillation._replace(memory_factor=5.0),
    )
    of_files = {
        name: recipe_of(ROOT / "recipes" / f"{file}.yaml")[0] for name, file in COMMANDS.items()
    }
    sinks = Recipe(
        to="attention",
        train="all",
        keep="retrieval:1/11",
        # as many bytes as the best
        options={"sliding_window": 263, "attention_sinks": True, **ALONE},
        transfer=Schedule(24, 4e-2, 1, 1024, warmup=0.1),
        distillation=Schedule(24, 1.2e-4, 1, 2048, memory_factor=40, warmup=0.1, repeats=0.3),
    )
    return {
        "1/11 of heads, window 192, 12 steps of transfer, 20 of 2,048 tokens": quickest,
        "1/11 of heads, window 192, 20 steps of 2,048 tokens": longer,
        "1/11 of heads, window 192, 18 steps of 2,048 tokens": quicker,
        "1/11 of heads, window 192, 2,048 tokens": best,
        "1/11 of heads, window 263, 2,048 tokens, sinks, no memory": sinks,
        "1/11 of heads, window 259, 2,048 tokens, no memory": with_window(
            259, without_memory(best)
        ),  # as many bytes
        "1/10 of heads, window 128, 2,048 tokens": with_window(
            128, replace(best, keep="retrieval:1/10")
        ),
        "1/10 of heads": first,
        "1/10 of heads, no memory": without_memory(first),
        "1/10 of heads, window 128, no memory": with_window(128, without_memory(first)),
        "1/22 of heads": replace(quick, keep="retrieval:1/22"),
        "1/22 of heads, 2,048 tokens": few,
        "1/22 of heads, window 80, 2,048 tokens": with_window(80, few),
        "1/22 of heads, window 110, 2,048 tokens, no memory": with_window(
            110, without_memory(few)
        ),  # as many bytes
        "1/22 of heads for 2,560 tokens, window 48, no memory": with_window(
            48, without_memory(four)
        ),
        "1/30 of heads for 2,560 tokens, window 76, 2,048 tokens, no memory": with_window(
            76, without_memory(three)
        ),
        "no full head": none,
        "no full head, no memory": without_memory(none),
        "no full head, window 128, no memory": with_window(128, without_memory(none)),
        "1/4 of layers": whole,
        "1/4 of layers, servable": replace(whole, options=SERVABLE["deltanet"]),
        "1/4 of layers, servable, Mamba-2": replace(whole, to="gated", options=SERVABLE["gated"]),
        "1/4 of layers, windows": quarter,
        "1/4 of layers, windows, no memory": without_memory(quarter),
        "1/4 of layers, those that retrieve, windows": replace(quarter, keep=RETRIEVE),
        "1/4 of layers, those that retrieve, windows, no memory": without_memory(
            replace(quarter, keep=RETRIEVE)
        ),
        "1/4 of layers, those that retrieve, windows, 2,048 tokens": with_window(
            64, replace(best, keep=RETRIEVE)
        ),
        **of_files,
        "1/10 of heads, linear": replace(quick, to="linear"),
        "1/10 of heads, gated": replace(quick, to="gated"),
        "1/10 of heads, a third of the tokens": quick,
        "1/10 of heads, a third of the tokens, transfer alone": replace(
            quick,
            transfer=quick.transfer._replace(steps=20),
            distillation=quick.distillation._replace(steps=0),
        ),
        "1/10 of heads, a third of the tokens, distillation alone": replace(
            quick,
            transfer=quick.transfer._replace(steps=0),
            distillation=quick.distillation._replace(steps=20),
        ),
        "1/10 of heads, a third of the tokens, half of the loss from the text": replace(
            quick, cross_entropy=0.5
        ),
        "1/10 of heads, start alone": times(0, first),
    }


class Stopwatch:
    """CPU seconds of a conversion, kept in a file so that they add up over calls; says how far it is."""

    def __init__(self, file: Path):
        self.file = file
        self.start = time.process_time()
        self.before = float(file.read_text()) if file.exists() else 0.0

    @property
    def seconds(self) -> float:
        """Until now."""
        return self.before + time.process_time() - self.start

    def tell(self, progress: Progress) -> None:
        """Report of a run."""
        self.file.write_text(str(self.seconds))
        print(
            f"  {self.seconds:6.0f} s  {progress.task} {progress.done}/{progress.total} {progress.loss}",
            flush=True,
        )


def folder_of(name: str) -> Path:
    """Where the student of a row is kept."""
    return WORK / name.replace("/", "-").replace(", ", "-").replace(" ", "-")


def make(
    name: str,
    recipe: Recipe,
    teacher: PreTrainedModel,
    tokenizer,
    tokens: Tensor,
    training: dict | None = None,
) -> tuple[Path, float]:
    """The folder of a student and the CPU seconds that it took, now or before; `training` as of `Run`."""
    folder = folder_of(name)
    student = folder / "student"
    watch = folder / "cpu_seconds"
    folder.mkdir(parents=True, exist_ok=True)
    if not student.exists() and name in COMMANDS:
        before = os.times()
        subprocess.run(
            [sys.executable, "-m", "hf_memory", *command_of(name, student)], cwd=ROOT, check=True
        )
        after = os.times()
        spent = (
            after.children_user
            + after.children_system
            - before.children_user
            - before.children_system
        )
        watch.write_text(str(spent))
    if not student.exists():
        clock = Stopwatch(watch)
        if training is None:  # as in the recipes of these students
            training = {"bf16": True} if recipe.options.get("attention_sinks") else {}
        run = Run(folder / "checkpoints", report=clock.tell, training=training)
        made = convert(teacher, tokens, resolve(recipe, teacher.config, tokens), run)
        watch.write_text(str(clock.seconds))
        partial = folder / "student.partial"
        write_model(partial, made.student, tokenizer)
        partial.rename(student)
    return student, float(watch.read_text())


def command_of(name: str, output: Path) -> list[str]:
    """What follows `hf-memory` in the command of a row that is made so."""
    text = (
        example.text_flags("smollm2")
        if COMMANDS[name] == "smollm2"
        else ["--text", example.fetch_text()]
    )
    given = (
        example.fetch_teacher(),
        *text,
        "--output",
        output,
        "--config",
        f"recipes/{COMMANDS[name]}.yaml",
    )
    return ["convert", *map(str, given)]


def recall(model: PreTrainedModel, held_out: Tensor) -> dict[str, float]:
    """Nats a token that a first reading is worth on the second."""
    return {
        str(gap): copy_gain(model, held_out, passage=256, gap=gap, trials=trials, max_tokens=None)
        for gap, trials in BETWEEN.items()
    }


def decoding(student: PreTrainedModel, teacher: PreTrainedModel) -> dict[str, dict[str, float]]:
    """By context: tokens that one thread writes in a second of its time, and the part of the teacher's time that is."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    taken = by_context({"Llama": teacher, "student": student}, rounds=3, contexts=DECODED)
    torch.set_num_threads(threads)
    return {
        str(context): {
            "teacher's tokens/s": 1e3 / row["Llama"]["ms"],
            "tokens/s": 1e3 / row["student"]["ms"],
            "time / teacher": row["student"]["ratio"],
        }
        for context, row in taken.items()
    }


def teachers_recall(teacher: PreTrainedModel, held_out: Text) -> dict[str, float]:
    """The recall of the teacher on this text, which is measured once."""
    file = WORK / f"recall-{tokens_fingerprint(held_out)[:16]}.json"
    if not file.exists():
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(recall(teacher, held_out)), encoding="utf-8")
        partial.rename(file)
    return json.loads(file.read_text(encoding="utf-8"))


def measured(
    student: PreTrainedModel, teacher: PreTrainedModel, held_out: Tensor, gains: dict[str, float]
) -> dict:
    """All columns of a row that are of the student alone."""
    like = agreement(student, teacher, held_out, length=1024, max_tokens=12 * 1024)
    return {
        "perplexity / teacher": like.ratio,
        "KL": like.kl,
        "agreement": like.top1,
        **{
            f"recall kept after {gap}": gain / gains[gap]
            for gap, gain in recall(student, held_out).items()
        },
        "cache at 8k / teacher": cache_share(student.config, teacher.config, CONTEXT),
        "bytes a token of context": bytes_per_token(student.config),
    }


def read(recipe: Recipe) -> int:
    """Tokens that a recipe trains on."""
    return sum(x.steps * x.batch_size * x.length for x in (recipe.transfer, recipe.distillation))


def described(name: str, row: dict) -> str:
    """A row in a line."""
    cells = {
        "{:,} tokens": row["tokens"],
        "{:.0f} CPU s": row["CPU seconds"],
        "perplexity {:.3f}": row["perplexity / teacher"],
        "KL {:.3f}": row["KL"],
        "agreement {:.1%}": row["agreement"],
        "recall {:.0%}": row["recall kept after 512"],
        "and {:.0%}": row["recall kept after 2048"],
        "cache {:.1%}": row["cache at 8k / teacher"],
        "{:.0f} bytes a token": row["bytes a token of context"],
    }
    return "  ".join([f"{name:36}", *(cell.format(value) for cell, value in cells.items())])


def table(rows: dict[str, dict]) -> str:
    """Rows in Markdown."""
    header = "student|tokens|KL|recall at 512, 2,048|cache|time for a token at 8,192"
    lines = [header, "|".join(["---"] * (header.count("|") + 1))]
    for name, row in rows.items():
        timed = row["decoding"].get("8192", {}).get("time / teacher") if "decoding" in row else None
        recall = [
            round(row[f"recall kept after {gap}"], 2) + 0.0 for gap in BETWEEN
        ]  # + 0.0: -0 is 0
        cells = (
            name,
            f"{row['tokens']:,}",
            f"{row['KL']:.3f}",
            ", ".join(f"{x:.0%}" for x in recall),
            f"{row['cache at 8k / teacher']:.1%}",
            "" if timed is None else f"{timed:.2f}",
        )
        lines.append("|".join(cells))
    return "\n".join(f"| {line.replace('|', ' | ')} |" for line in lines)


def write(about: dict, rows: dict[str, dict], order: Iterable[str]) -> None:
    """JSON and table, with the rows in their order."""
    rows = {name: rows[name] for name in order if name in rows}
    RESULTS.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    put(NOTES / "students.md", START, table(rows), END)


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    header = list(header)
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *rows))


def put(page: Path, start: str, text: str, end: str) -> None:
    """Replace what a page has between two marks."""
    before, _, rest = page.read_text(encoding="utf-8").partition(start)
    page.write_text(f"{before}{start}\n\n{text}\n\n{end}{rest.partition(end)[2]}", encoding="utf-8")


def materials(most: int = 400_000) -> tuple:
    """The teacher, its tokenizer, the tokens to train on, and the last tenth of the text's, which are held out."""
    file = str(example.fetch_teacher())
    text = example.fetch_text()
    teacher = load_teacher(file).eval()
    tokenizer = load_tokenizer(file)
    tokens = read_tokens([text], tokenizer, limit=most)
    return teacher, tokenizer, tokens[: -(len(tokens) // 10)], tokens[-(len(tokens) // 10) :]


def main() -> None:
    """Make the rows that are asked for, or all, and that are not there yet."""
    logging.disable_progress_bar()
    WORK.mkdir(parents=True, exist_ok=True)
    best, most = recipe_of(SLOTS)
    teacher, tokenizer, tokens, held_out = materials(most)
    known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    gains = teachers_recall(teacher, held_out)
    about = {
        "teacher's bytes a token of context": bytes_per_token(teacher.config),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    rows = recipes(best)
    asked = [name for name in sys.argv[1:] if name != "--untimed"]
    timed = asked == sys.argv[1:]
    for name in asked or rows:
        if name in known.get("rows", {}):
            continue
        student, seconds = make(name, rows[name], teacher, tokenizer, tokens)
        model = AutoModelForCausalLM.from_pretrained(student)
        row = {
            "command": " ".join(
                ["python benchmarks/smollm2.py", *([] if timed else ["--untimed"]), f'"{name}"']
            ),
            "recipe": {
                x: str(y) if isinstance(y, tuple) else y for x, y in vars(rows[name]).items()
            },
            "tokens": read(rows[name]),
            "CPU seconds": seconds,
            "teacher's recall, nats a token": gains,
            **measured(model, teacher, held_out, gains),
        }
        if timed:
            row["decoding"] = decoding(model, teacher)
        known = (
            json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
        )  # of calls beside this one
        known["rows"] = {**known.get("rows", {}), name: row}
        write(about, known["rows"], rows)
        print(described(name, row), flush=True)


if __name__ == "__main__":
    main()
