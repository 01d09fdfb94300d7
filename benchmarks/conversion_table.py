"""Students of one teacher: by family, pure and with a quarter of the attention kept; and what each stage is worth.

    python benchmarks/conversion_table.py      # an hour on two cores; goes on where it was stopped

The teacher is a Llama of 3.8 million parameters, trained here on 2.4 MB of the standard library's sources and the
language reference, of which every tenth section is held out. The control is the teacher trained on with the steps of a
student's distillation. Writes benchmarks/results/conversion_table.{json,png} after every row.
"""

import copy
import json
import sysconfig
from dataclasses import asdict
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from transformers import AutoModelForCausalLM

from hf_memory import demo
from hf_memory.conversion import Schedule, convert, measure, train

RESULTS = Path(__file__).parent / "results" / "conversion_table.json"
WORK = Path("demo_output/conversion_table")  # the teacher; not kept
BYTES = 2_400_000
reference = demo.sections
SETTINGS = demo.Settings(hidden_size=256, teacher=Schedule(steps=900, learning_rate=4e-3, batch_size=4))
TRANSFER = Schedule(steps=80, learning_rate=3e-3, batch_size=4)
DISTILLATION = Schedule(steps=160, learning_rate=1e-3, batch_size=4)
FAMILIES = {
    "linear": {},
    "gated": {"gate": "vector"},
    "deltanet": {"gate": "scalar"},
    "deltaformer": {},
    "titans": {"variant": "mag"},
}
NOTHING = Schedule(steps=0, learning_rate=0.0)


def library_sections() -> list[str]:
    """The language reference and modules of the standard library in order of name, cut into sections."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = "".join(reference())
    for file in sorted(folder.glob("*.py")):
        text += file.read_text(errors="ignore") if len(text) < BYTES else ""
    return [text[i : i + demo.SECTION] for i in range(0, BYTES, demo.SECTION)]


def make_teacher():
    """The teacher and its text; trained once."""
    demo.sections = library_sections
    corpus = demo.make_corpus(SETTINGS.vocab_size)
    if (WORK / "config.json").exists():
        return AutoModelForCausalLM.from_pretrained(WORK), corpus
    teacher = demo.make_teacher(SETTINGS, corpus.tokenizer)
    optimizer = demo.MuonWithAdamW(teacher, SETTINGS.teacher.learning_rate)
    train(teacher, corpus.training, SETTINGS.teacher, name="teacher", optimizer=optimizer)
    teacher.config.use_cache = True
    teacher.save_pretrained(WORK)
    return teacher, corpus


def rows_to_make() -> dict[str, dict]:
    """Name of a row: arguments of convert."""
    rows = {}
    for keep in ("none", "1/4"):
        for to, options in FAMILIES.items():
            rows[f"{to}, {'pure' if keep == 'none' else 'a quarter kept'}"] = {"to": to, "keep": keep, **options}
    ablation = {"to": "deltanet", "keep": "none", "gate": "scalar"}
    rows["deltanet, no distillation"] = {**ablation, "distillation": NOTHING}
    rows["deltanet, no transfer"] = {**ablation, "transfer": NOTHING}
    rows["deltanet, text instead of teacher"] = {**ablation, "cross_entropy": 1.0}
    return rows


def draw(rows: dict[str, dict]) -> None:
    """Perplexity ratios to the control."""
    names = [name for name in rows if name not in ("teacher", "control")]
    ratios = [rows[name]["perplexity"] / rows["control"]["perplexity"] for name in names]
    figure, axis = plt.subplots(figsize=(6.5, 0.3 * len(names) + 1), layout="constrained")
    axis.barh(names[::-1], ratios[::-1], color=["C1" if "kept" in name else "C0" for name in names[::-1]])
    axis.axvline(1, color="gray", linestyle="--")
    axis.set(xlabel="held-out perplexity, ratio to the control", xlim=(0.8, max(1.3, max(ratios) * 1.02)))
    figure.savefig(RESULTS.with_suffix(".png"), dpi=120)


def main() -> None:
    """Make the rows that are not there yet."""
    teacher, corpus = make_teacher()
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else {}

    def keep(name: str, model, of) -> None:
        rows[name] = asdict(measure(name, model, corpus.held_out, of))
        schedules = {"teacher": SETTINGS.teacher, "transfer": TRANSFER, "distillation": DISTILLATION}
        about = {name: str(schedule) for name, schedule in schedules.items()} | {
            "teacher_parameters": teacher.num_parameters(),
            "training_tokens": len(corpus.training),
            "torch": torch.__version__,
        }
        RESULTS.write_text(json.dumps({**about, "rows": rows}, indent=1))
        base = rows.get("control", rows["teacher"])["perplexity"]
        print(
            f"{name:36} perplexity {rows[name]['perplexity']:7.2f}  ratio {rows[name]['perplexity'] / base:.3f}",
            flush=True,
        )

    if "teacher" not in rows:
        keep("teacher", teacher, None)
    if "control" not in rows:
        control = copy.deepcopy(teacher)
        train(control, corpus.training, DISTILLATION, name="control", seed=1)
        keep("control", control, teacher)
    for name, arguments in rows_to_make().items():
        if name not in rows:
            schedules = {"transfer": TRANSFER, "distillation": DISTILLATION}
            keep(name, convert(teacher, corpus.training, **{**schedules, **arguments}).student, teacher)
    draw(rows)


if __name__ == "__main__":
    main()
