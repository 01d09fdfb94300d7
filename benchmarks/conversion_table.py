"""Students of one teacher: by family, pure and with attention kept; and what each stage is worth.

    python benchmarks/conversion_table.py      # over an hour on two cores; goes on where it was stopped

The teacher is a Llama of 3.3 million parameters, trained here on 2.4 MB of the standard library's modules and the
language reference, of which every tenth section is held out. From so little text a model does not learn to recall, so
it first learns to do that with random tokens that repeat, and then the text that teacher, control and students are
trained on says many passages twice; what is held out does not. The control is the teacher trained on with the steps of
a student's distillation. Recall is the gain (nats a token) from having read a passage of 32 tokens 64 tokens ago,
twice as far as the windows of 32 reach. What fine-tuning is worth is seen on text that the teacher does not know: the
standard library's packages. Writes benchmarks/results/conversion_table.{json,png}.
"""

import copy
import hashlib
import json
import os
import sysconfig
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait sleep: before torch is imported

import matplotlib.pyplot as plt
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_memory import demo
from hf_memory.conversion import Recipe, Schedule, convert, distill, fine_tune, resolve, train
from hf_memory.evaluation import OF_CARD, Subject, copy_gain, evaluate, perplexity

RESULTS = Path(__file__).parent / "results" / "conversion_table.json"
WORK = Path("demo_output/conversion_table")  # the teacher; not kept
BYTES = 2_400_000
PACKAGES = ("asyncio", "email", "http", "importlib", "json", "logging", "multiprocessing", "urllib", "xml")
PIECE, BACK = (16, 48), 6  # tokens of a piece of text, and how many pieces ago one that is said again may be
RECALLED = {"passage": 32, "gap": 32, "trials": 512, "max_tokens": None}
SETTINGS = demo.Settings(
    vocab_size=2048, hidden_size=256, teacher=Schedule(steps=1100, learning_rate=4e-3, batch_size=4)
)
RECALL = Schedule(steps=350, learning_rate=4e-3, batch_size=16, length=64)
TRANSFER = Schedule(steps=160, learning_rate=3e-3, batch_size=4)
DISTILLATION = Schedule(steps=320, learning_rate=1e-3, batch_size=4)
FINE_TUNING = Schedule(steps=40, learning_rate=3e-4, batch_size=4, length=1024)
MORE_DISTILLATION = FINE_TUNING._replace(batch_size=16, length=256)  # as many tokens
SHORT = 40  # steps of transfer, those saved spent on distillation
NO_TRANSFER, SHORT_TRANSFER = (
    {
        "transfer": TRANSFER._replace(steps=steps),
        "distillation": DISTILLATION._replace(steps=DISTILLATION.steps + TRANSFER.steps - steps),
    }
    for steps in (0, SHORT)
)
ABLATION: dict[str, dict] = {  # as many steps in all as the pure student has
    "no transfer": NO_TRANSFER,
    "short transfer": SHORT_TRANSFER,
    "distilled from the teacher alone": {"cross_entropy": 0.0},
    "distilled from the teacher alone, no transfer": {"cross_entropy": 0.0, **NO_TRANSFER},
    "no distillation": {"cross_entropy": 1.0},  # the text alone
}
MIX = 0.5  # part of the text's own loss in distillation
FAMILIES: dict[str, dict] = {
    "linear": {"cross_entropy": MIX},
    "gated": {"options": {"gate": "vector"}, "cross_entropy": MIX},
    "deltanet": {"options": {"gate": "scalar"}, "cross_entropy": MIX},
    "deltaformer": {},  # starts as its teacher, and learns the text alone
    "titans": {"options": {"variant": "mag"}},
}
DELTANET = {"to": "deltanet", **FAMILIES["deltanet"]}
WINDOW = {"to": "titans", "options": {"variant": "mag", "sliding_window": 32}, "cross_entropy": MIX}


def library_sections() -> list[str]:
    """The language reference and modules of the standard library in order of name, cut into sections."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = "".join(demo.sections())
    for file in sorted(folder.glob("*.py")):
        text += file.read_text(errors="ignore") if len(text) < BYTES else ""
    return cut(text[:BYTES])


def cut(text: str) -> list[str]:
    """In sections that are held out, or not, together."""
    return [text[i : i + demo.SECTION] for i in range(0, len(text), demo.SECTION)]


def new_text(tokenizer) -> tuple[Tensor, Tensor]:
    """Packages of the standard library, to learn and held out."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = "".join(
        file.read_text(errors="ignore") for name in PACKAGES for file in sorted((folder / name).rglob("*.py"))
    )
    sections = cut(text)
    held_out = sections[demo.HELD_OUT // 2 :: demo.HELD_OUT]
    del sections[demo.HELD_OUT // 2 :: demo.HELD_OUT]
    training, held_out = (torch.tensor(tokenizer.encode("".join(part))) for part in (sections, held_out))
    return training, held_out


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
    """The teacher, its tokenizer, the text to train on, and the text held out; trained once."""
    corpus = demo.make_corpus(SETTINGS.vocab_size, library_sections())
    training = repetitive(corpus.training)
    made_of = hashlib.sha256(repr((SETTINGS, RECALL)).encode() + training.numpy().tobytes())
    folder = WORK / made_of.hexdigest()[:8]
    if not (folder / "config.json").exists():
        teacher = demo.make_teacher(SETTINGS, corpus.tokenizer)
        for tokens, schedule in ((repeated_noise(SETTINGS.vocab_size), RECALL), (training, SETTINGS.teacher)):
            optimizer = demo.MuonWithAdamW(teacher, schedule.learning_rate)
            train(teacher, tokens, schedule, name="teacher", optimizer=optimizer)
        teacher.config.use_cache = True
        teacher.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder), corpus.tokenizer, training, corpus.held_out


def students() -> dict[str, dict]:
    """Name of a row: parts of its recipe."""
    rows = {f"{to}, pure": {"to": to, **options} for to, options in FAMILIES.items()}
    for to, options in FAMILIES.items():
        exact = to in ("deltaformer", "titans")  # whatever layer they keep
        rows[f"{to}, a quarter kept"] = {"to": to, "keep": "3" if exact else "0", **options}
    rows["titans with a window of 32, pure"] = WINDOW
    rows["titans with a window of 32, a quarter kept"] = {**WINDOW, "keep": "0"}
    return rows | {f"deltanet, {name}": {**DELTANET, **stages} for name, stages in ABLATION.items()}


def models(teacher, training: Tensor, new: Tensor) -> dict[str, Callable[[], tuple[PreTrainedModel, dict]]]:
    """Name of a row: what makes its model, and says what else is known of it."""

    def converted(arguments: dict):
        recipe = Recipe(**{"transfer": TRANSFER, "distillation": DISTILLATION, **arguments})
        made = convert(teacher, training, resolve(recipe, teacher.config, training))
        return made.student, {"kept": made.plan.kept}

    def trained_on():
        model = copy.deepcopy(teacher)
        train(model, training, DISTILLATION, name="control", seed=1)
        return model, {}

    def taught(make: Callable, teach: Callable, *arguments):
        model = copy.deepcopy(make()[0])
        teach(model, *arguments)
        return model, {}

    made = {"teacher": lambda: (teacher, {}), "control": cache(trained_on)}
    made |= {name: cache(partial(converted, options)) for name, options in students().items()}
    control, pure = made["control"], made["deltanet, pure"]
    return made | {
        "control, and fine-tuning on new text": partial(taught, control, fine_tune, new, FINE_TUNING),
        "deltanet, and fine-tuning on new text": partial(taught, pure, fine_tune, new, FINE_TUNING),
        "deltanet, and distillation on new text": partial(taught, pure, distill, teacher, new, MORE_DISTILLATION),
    }


def draw(rows: dict[str, dict]) -> None:
    """Perplexity as a ratio to the control, recall as a part of the teacher's, and perplexity on new text."""
    names = [name for name in rows if name not in ("teacher", "control")][::-1]
    plt.style.use("tableau-colorblind10")
    figure, axes = plt.subplots(1, 3, figsize=(14, 0.3 * len(names) + 1), layout="constrained", sharey=True)
    for axis, column, base, label in (
        (axes[0], "perplexity", rows["control"], "held-out perplexity, ratio to the control"),
        (axes[1], "recall", rows["teacher"], "recall over 64 tokens, ratio to the teacher"),
        (axes[2], "perplexity_on_new_text", rows["control"], "perplexity on new text, ratio to the control"),
    ):
        for kept, colour in ((False, "C0"), (True, "C1")):
            shown = [name for name in names if ("kept" in name) == kept]
            axis.plot([rows[name][column] / base[column] for name in shown], shown, "o", color=colour)
        axis.axvline(1, color="gray", linestyle="--")
        axis.grid(axis="y", alpha=0.3)
        axis.set_xlabel(label)
    figure.savefig(RESULTS.with_suffix(".png"), dpi=120)


def measured(name: str, model: PreTrainedModel, teacher, held_out: Tensor, new: Tensor) -> dict:
    """All columns of a row."""
    compared = None if name == "teacher" else teacher
    subject = Subject(model, held_out, compared, lengths=(256, 1024), max_tokens=None)
    row = evaluate(subject, OF_CARD) | {"perplexity": perplexity(model, held_out, max_tokens=None)}
    on_new_text = perplexity(model, new, length=FINE_TUNING.length, max_tokens=None)
    return row | {"recall": copy_gain(model, held_out, **RECALLED), "perplexity_on_new_text": on_new_text}


def main() -> None:
    """Make the rows that are not there yet."""
    teacher, tokenizer, training, held_out = make_teacher()
    new, new_held_out = new_text(tokenizer)
    about = {
        "teacher": str(SETTINGS.teacher),
        "transfer": str(TRANSFER),
        "distillation": f"{DISTILLATION}, {MIX} of the loss the text's own",
        "fine_tuning": str(FINE_TUNING),
        "teacher_parameters": teacher.num_parameters(),
        "training_tokens": len(training),
        "tokens_of_new_text": len(new),
        "torch": torch.__version__,
    }
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else {}
    for name, make in models(teacher, training, new).items():
        if name in rows:
            continue
        model, more = make()
        rows[name] = row = measured(name, model, teacher, held_out, new_held_out) | more
        RESULTS.write_text(json.dumps({**about, "rows": rows}, indent=1))
        ratio = row["perplexity"] / rows.get("control", row)["perplexity"]
        recall = row["recall"] / rows["teacher"]["recall"]
        print(
            f"{name:44} perplexity {row['perplexity']:6.2f}  ratio {ratio:.3f}  recall {recall:4.0%}  "
            f"on new text {row['perplexity_on_new_text']:6.2f}",
            flush=True,
        )
    draw(rows)


if __name__ == "__main__":
    main()
