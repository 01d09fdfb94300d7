"""Students of one teacher: by family, pure and with attention kept; which layer to keep; what each stage is worth.

    python benchmarks/conversion_table.py      # over an hour on two cores; goes on where it was stopped

The teacher is a Llama of 3.3 million parameters, trained here on 2.4 MB of the standard library's sources and the
language reference, of which every tenth section is held out. From so little text a model does not learn to recall, so
it first learns to do that with random tokens that repeat, and then the text that teacher, control and students are
trained on says many passages twice; what is held out does not. The control is the teacher trained on with the steps of
a student's distillation. Recall is the gain (nats a token) from having read a passage of 32 tokens 64 tokens ago,
twice as far as the windows of 32 reach. Writes benchmarks/results/conversion_table.{json,png}.
"""

import copy
import json
import sysconfig
from dataclasses import asdict
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_memory import demo
from hf_memory.conversion import Schedule, convert, measure, train
from hf_memory.evaluation import copy_gain

RESULTS = Path(__file__).parent / "results" / "conversion_table.json"
WORK = Path("demo_output/conversion_table")  # the teacher; not kept
BYTES = 2_400_000
PIECE, BACK = (16, 48), 6  # tokens of a piece of text, and how many pieces ago one that is said again may be
RECALLED = {"passage": 32, "gap": 32, "trials": 128}
SETTINGS = demo.Settings(
    vocab_size=2048, hidden_size=256, teacher=Schedule(steps=1100, learning_rate=4e-3, batch_size=4)
)
RECALL = Schedule(steps=350, learning_rate=4e-3, batch_size=16, length=64)
TRANSFER = Schedule(steps=80, learning_rate=3e-3, batch_size=4)
DISTILLATION = Schedule(steps=160, learning_rate=1e-3, batch_size=4)
FINE_TUNING = Schedule(steps=40, learning_rate=3e-4, batch_size=2, length=512)
LONG = FINE_TUNING._replace(batch_size=1, length=1024)
ABLATION: dict[str, dict] = {  # steps of as many tokens in all; "deltanet, pure" is the one without fine-tuning
    "three stages": {"transfer": 80, "distillation": 120, "fine_tuning": 40},
    "no transfer": {"transfer": 0, "distillation": 200, "fine_tuning": 40},
    "no distillation": {"transfer": 80, "distillation": 0, "fine_tuning": 160},
    "40 steps of distillation more": {"transfer": 80, "distillation": 200, "fine_tuning": 0},
    "40 steps of fine-tuning at 1024 tokens more": {"transfer": 80, "distillation": 160, "long": 40},
}
FAMILIES: dict[str, dict] = {
    "linear": {},
    "gated": {"gate": "vector"},
    "deltanet": {"gate": "scalar"},
    "deltaformer": {},
    "titans": {"variant": "mag"},
}
WINDOW = {"to": "titans", "variant": "mag", "sliding_window": 32}


def library_sections() -> list[str]:
    """The language reference and modules of the standard library in order of name, cut into sections."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = "".join(demo.sections())
    for file in sorted(folder.glob("*.py")):
        text += file.read_text(errors="ignore") if len(text) < BYTES else ""
    return [text[i : i + demo.SECTION] for i in range(0, BYTES, demo.SECTION)]


def repetitive(tokens: Tensor) -> Tensor:
    """[T] in pieces, half of them said before; the same at every call."""
    random, pieces = torch.Generator().manual_seed(0), []
    while len(tokens):
        if len(pieces) >= BACK and torch.rand((), generator=random) < 0.5:
            pieces.append(pieces[-1 - int(torch.randint(BACK, (), generator=random))])
        else:
            size = int(torch.randint(*PIECE, (), generator=random))
            pieces.append(tokens[:size])
            tokens = tokens[size:]
    return torch.cat(pieces)


def repeated_noise(vocab_size: int) -> Tensor:
    """[T] of 16 random tokens four times over, then 16 others, and so on."""
    random = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (20_000, 1, 16), generator=random).expand(-1, 4, -1).flatten()


def make_teacher():
    """The teacher, the text to train on, and the text held out; trained once."""
    corpus = demo.make_corpus(SETTINGS.vocab_size, library_sections())
    training = repetitive(corpus.training)
    if not (WORK / "config.json").exists():
        teacher = demo.make_teacher(SETTINGS, corpus.tokenizer)
        for tokens, schedule in ((repeated_noise(SETTINGS.vocab_size), RECALL), (training, SETTINGS.teacher)):
            optimizer = demo.MuonWithAdamW(teacher, schedule.learning_rate)
            train(teacher, tokens, schedule, name="teacher", optimizer=optimizer)
        teacher.config.use_cache = True
        teacher.save_pretrained(WORK)
    return AutoModelForCausalLM.from_pretrained(WORK), training, corpus.held_out


def rows_to_make() -> dict[str, dict]:
    """Name of a row: arguments of convert."""
    rows = {}
    for name, keep in (("pure", "none"), ("a quarter kept", "1/4")):
        rows |= {f"{to}, {name}": {"to": to, "keep": keep, **options} for to, options in FAMILIES.items()}
    rows["titans with a window of 32, pure"] = WINDOW
    rows["titans with a window of 32, a quarter kept"] = {**WINDOW, "keep": "1/4"}
    delta = {"to": "deltanet", "gate": "scalar"}
    rows |= {f"deltanet, layer {i} kept": {**delta, "keep": [i]} for i in range(SETTINGS.num_layers - 1)}
    rows["deltanet, the layer kept that auto chooses"] = {**delta, "keep": "auto"}
    schedules = {"transfer": TRANSFER, "distillation": DISTILLATION, "fine_tuning": FINE_TUNING, "long": LONG}
    for name, steps in ABLATION.items():
        stages = {stage: schedules[stage]._replace(steps=count) for stage, count in steps.items()}
        stages["fine_tuning"] = stages.pop("long", stages.get("fine_tuning"))
        rows[f"deltanet, {name}"] = delta | stages
    return rows


def draw(rows: dict[str, dict]) -> None:
    """Perplexity, as a ratio to the control, and recall, as a part of the teacher's."""
    names = [name for name in rows if name not in ("teacher", "control")][::-1]
    figure, axes = plt.subplots(1, 2, figsize=(11, 0.3 * len(names) + 1), layout="constrained", sharey=True)
    colours = ["C1" if "kept" in name else "C0" for name in names]
    for axis, column, base, label in (
        (axes[0], "perplexity", rows["control"], "held-out perplexity, ratio to the control"),
        (axes[1], "recall", rows["teacher"], "recall over 64 tokens, ratio to the teacher"),
    ):
        axis.barh(names, [rows[name][column] / base[column] for name in names], color=colours)
        axis.axvline(1, color="gray", linestyle="--")
        axis.set_xlabel(label)
    axes[0].set_xlim(0.8)
    figure.savefig(RESULTS.with_suffix(".png"), dpi=120)


def main() -> None:
    """Make the rows that are not there yet."""
    teacher, training, held_out = make_teacher()
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else {}

    def keep(name: str, model, of, **more) -> None:
        row = asdict(measure(name, model, held_out, of, contexts=(256, 1024)))
        rows[name] = row | {"recall": copy_gain(model, held_out, **RECALLED)} | more
        schedules = {"teacher": SETTINGS.teacher, "transfer": TRANSFER, "distillation": DISTILLATION}
        schedules |= {"fine_tuning": FINE_TUNING}
        about = {name: str(schedule) for name, schedule in schedules.items()} | {
            "teacher_parameters": teacher.num_parameters(),
            "training_tokens": len(training),
            "torch": torch.__version__,
        }
        RESULTS.write_text(json.dumps({**about, "rows": rows}, indent=1))
        ratio = row["perplexity"] / rows.get("control", rows["teacher"])["perplexity"]
        recall = rows[name]["recall"] / rows["teacher"]["recall"]
        print(f"{name:44} perplexity {row['perplexity']:7.2f}  ratio {ratio:.3f}  recall {recall:.0%}", flush=True)

    if "teacher" not in rows:
        keep("teacher", teacher, None)
    if "control" not in rows:
        control = copy.deepcopy(teacher)
        train(control, training, DISTILLATION, name="control", seed=1)
        keep("control", control, teacher)
    for name, arguments in rows_to_make().items():
        if name not in rows:
            made = convert(teacher, training, **{"transfer": TRANSFER, "distillation": DISTILLATION, **arguments})
            keep(name, made.student, teacher, kept=made.kept, ranking=made.ranking)
    draw(rows)


if __name__ == "__main__":
    main()
