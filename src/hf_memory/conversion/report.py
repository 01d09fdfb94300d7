"""Writes the results of a conversion: model, tokenizer, model card, plots and measurements."""

import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedModel

from hf_memory.address import INSTALL
from hf_memory.conversion.describe import limits, past, settings, story, ways_to_serve
from hf_memory.conversion.plan import Plan
from hf_memory.conversion.recipe import counted
from hf_memory.conversion.stages.distillation import DISTILLATION
from hf_memory.conversion.students.heads import HeadScore
from hf_memory.evaluation import longest_window, plot_conversion, plot_heads, plot_task
from hf_memory.evaluation.efficiency import BYTES, READ, WRITTEN
from hf_memory.evaluation.plots import plot_scores
from hf_memory.evaluation.record import said, scores_of
from hf_memory.evaluation.scores import ALL, RATIO, SCORE, SUMMARY, TEACHERS, WIN, is_unanswered
from hf_memory.evaluation.tasks import FACTOR, Found
from hf_memory.files.folders import RESULTS
from hf_memory.modeling.card import is_on_hub
from hf_memory.progress import History

CARD = Path(__file__).with_name("model_card.md")
PANELS = {  # of the picture by length: a task and its figure
    "held-out perplexity, by position": ("perplexity", "perplexity"),
    "KL from the teacher, by position": ("agreement", "KL"),
    "recall in nats per token, by length": ("recall", "recall"),
    "cache in bytes, by length": ("speed", BYTES),
}
FIGURES = {  # for the Hub: a task and its figure
    "perplexity": ("perplexity", "perplexity"),
    "KL from the teacher": ("agreement", "KL"),
    "agreement with the teacher": ("agreement", "same choice"),
}


@dataclass(frozen=True)
class Results:
    """The results of a conversion, as they are written to results.json and shown by the model card.

    Attributes:
        teacher: name of the teacher.
        model_type: type of the student.
        text: name of the training text.
        past: a clause about the size of the student's cache.
        story: how the student was made, a sentence for each step.
        recipe: settings by name.
        losses: losses by stage.
        rows: what `evaluate` has found of each model by its name, the reference first and the student last.
        limits: a sentence about what the student cannot recall; may be empty.
        window: tokens of the longest window of attention in the student; 0 if it has none.
        serving: how the student is served, a sentence for each way.
        heads: layer, number and score of all heads that could keep everything, if some of them were chosen.
        chosen: the same of those that keep everything.
        terms: license and languages of the teacher, see `license_and_language`.
    """

    teacher: str
    model_type: str
    text: str
    past: str
    story: list[str]
    recipe: dict
    losses: Mapping[str, History]
    rows: dict[str, Found]
    limits: str = ""
    window: int = 0
    serving: tuple[str, ...] = ()
    heads: tuple[HeadScore, ...] = ()
    chosen: tuple[HeadScore, ...] = ()
    terms: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_conversion(self) -> bool:
        """Whether the model is a student of a teacher, and not a model that was fine-tuned."""
        return "student" in self.recipe

    @property
    def is_far(self) -> bool:
        """Whether the student was measured on texts that are several times longer than its windows."""
        return self.longest >= FACTOR * self.window

    @property
    def longest(self) -> int:
        """Tokens of the longest texts on which the student was measured."""
        return max(map(int, self.last["speed"]))

    @property
    def last(self) -> Found:
        """What was found of the student."""
        return list(self.rows.values())[-1]


def results_of(
    plan: Plan,
    losses: Mapping[str, History],
    rows: dict[str, Found],
    *,
    teacher: str,
    text: str,
    training: Mapping,
    terms: Mapping[str, Any] | None = None,
) -> Results:
    """The results of a plan that was carried out with these training arguments; for the others see `Results`."""
    return Results(
        teacher=teacher,
        model_type=plan.student.model_type,
        text=text,
        past=past(plan.student, plan.teacher),
        story=story(plan),
        recipe=settings(plan, training),
        losses=losses,
        rows=rows,
        limits=limits(plan.student, plan.teacher),
        window=longest_window(plan.student),
        serving=tuple(ways_to_serve(plan.student)),
        heads=plan.choice.scores,
        chosen=tuple(plan.chosen_heads),
        terms=terms or {},
    )


def write_report(folder: Path, model: PreTrainedModel, tokenizer, results: Results) -> None:
    """Write a student with its tokenizer, model card, plots and results."""
    write_model(folder, model, tokenizer)
    add_results(folder, results)


def write_model(folder: Path, model: PreTrainedModel, tokenizer) -> None:
    """Write a model and its tokenizer before it is measured, so that it is safe if measuring fails."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / RESULTS).write_text("{}\n", encoding="utf-8")


def add_story(folder: Path, plan: Plan, teacher: str) -> None:
    """Say in the card of a model that is not measured yet what it was made of, and how."""
    file = folder / "README.md"
    card = ModelCard.load(file, ignore_metadata_errors=True) if file.exists() else ModelCard("")
    made_of = f"Made of `{teacher}`. {' '.join(story(plan))} Nothing was measured yet."
    card.content = f"{card.content.rstrip()}\n\n{made_of}\n".lstrip()
    card.save(file)


def add_results(path: Path, results: Results) -> None:
    """Write model card, plots and results into the folder of a model; each file is replaced as a whole."""
    last = {
        name: found["perplexity"][str(results.longest)]["perplexity"]["value"]
        for name, found in results.rows.items()
    }
    with tempfile.TemporaryDirectory(dir=path) as name:
        folder = Path(name)
        plot_conversion(folder / "conversion.png", results.losses, last)
        plot_task(
            folder / "contexts.png",
            {name: _by_length(found) for name, found in results.rows.items()},
        )
        plot_scores(
            folder / "scores.png", {name: scores_of(found) for name, found in results.rows.items()}
        )
        if results.heads:
            plot_heads(folder / "heads.png", results.heads, results.chosen)
        model_card(results).save(folder / "README.md")
        (folder / RESULTS).write_text(
            json.dumps(asdict(results), indent=2) + "\n", encoding="utf-8"
        )
        for file in sorted(folder.iterdir()):
            file.replace(path / file.name)


def model_card(results: Results) -> ModelCard:
    """The card of a student, with its table of results."""
    has_repository = is_on_hub(results.teacher)
    data = ModelCardData(
        **results.terms,
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=results.teacher if has_repository else None,
        base_model_relation="finetune" if has_repository else None,
        datasets=_datasets(results) or None,
        tags=[
            "hf_memory",
            results.model_type,
            *(["distillation"] if DISTILLATION in results.losses else []),
        ],
        model_name=results.model_type,
        eval_results=eval_results(results),
    )
    scores = score_table(results)
    passages = len(_figure(results.last, "recall", "recall", results.longest, "samples") or ())
    fields: dict = {
        "install": INSTALL,
        "score_header": score_header(results),
        "scores": scores,
        "unanswered": unanswered(results),
        "header": HEADER,
        "ratio_below": RATIO_BELOW,
        "table": table(results),
        "longest": results.longest,
        "items": max(
            (len(row[SCORE]["samples"]) for row in scores_of(results.last).values()), default=0
        ),
        "windows": counted(
            len(_figure(results.last, "perplexity", "perplexity", results.longest, "samples")),
            "window",
        ),
        "passages": counted(passages, "passage") if passages else "",
        "shares": shares(results),
        "forgets": forgets(results),
    }
    fields |= {"speed_header": SPEED_HEADER, "speeds": speed_table(results)}
    return ModelCard.from_template(data, template_path=str(CARD), results=results, **fields)


def eval_results(results: Results) -> list[EvalResult]:
    """The figures of the student that the Hub shows beside its card: those of the longest held-out texts.

    They stand in the card's `model-index`. Files in `.eval_results` are for scores on benchmarks of the Hub alone.
    """
    datasets = _datasets(results)
    is_one = len(datasets) == 1 and ", " not in results.text
    found = {name: _figure(results.last, *FIGURES[name], results.longest) for name in FIGURES}
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=datasets[0] if is_one else "text",  # what `datasets` calls text in files
            dataset_name=f"held-out part of {results.text}",
            metric_type=name.split()[0].lower(),
            metric_name=f"{name} at {results.longest:,} tokens",
            metric_value=round(value, 4),
        )
        for name, value in found.items()
        if value is not None and math.isfinite(value)
    ]


def _datasets(results: Results) -> list[str]:
    """The data sets of the Hub in a text; its files are named without their folders."""
    return [name.split(":")[0] for name in results.text.split(", ") if "/" in name]


HEADER = ("tokens", "model", "KL", "agreement", "perplexity", "ratio", "recall", "cache MB")
RECALLED = 0.1  # part of the teacher's recall below which a student recalls nothing
LEAST_RECALL = 0.1  # nats a token of the teacher, below which there is nothing to recall
RATIO_BELOW = (
    "A ratio of perplexities below one does not mean that the student is better than its teacher: training teaches "
    "it the style of the text. KL and agreement say how near it is to its teacher."
)
SPEED_HEADER = ("tokens", "model", "tokens/s read", "tokens/s written")


def score_header(results: Results) -> tuple[str, ...]:
    """The columns of `score_table`. The first model is the teacher of a conversion, or that before fine-tuning."""
    first = next(iter(results.rows))
    theirs = TEACHERS if results.is_conversion else f"score {first}"
    return "questions", theirs, "score", "ratio", "win and tie"


def score_table(results: Results) -> list[tuple[str, ...]]:
    """The scores of the first and the last model as text, with the columns of `score_header`.

    Kinds of questions that the first cannot answer are left out, see `unanswered`.
    """
    first = next(iter(results.rows.values()))
    last = results.last
    rows = {"all that the teacher can answer": last[SUMMARY][ALL]} if SUMMARY in last else {}
    rows |= {
        at: {TEACHERS: scores_of(first)[at][SCORE], **row}
        for at, row in scores_of(last).items()
        if not is_unanswered(row)
    }
    return [
        (at, *(said(row.get(name)) for name in (TEACHERS, SCORE, RATIO, WIN)))
        for at, row in rows.items()
    ]


def unanswered(results: Results) -> list[str]:
    """The kinds of questions that the first model cannot answer well above chance."""
    return [at for at, row in scores_of(results.last).items() if is_unanswered(row)]


def table(results: Results) -> list[tuple[str, ...]]:
    """The table of results as text, with the columns of HEADER: all models at one length after the other.

    Figures have their 95 % intervals, where there are several samples.
    """
    best = next(iter(results.rows.values()))
    rows = list[tuple[str, ...]]()
    for at in _lengths(results):
        theirs = _figure(best, "perplexity", "perplexity", at)
        for name, found in results.rows.items():
            perplexity = _figure(found, "perplexity", "perplexity", at)
            ratio = _cell(found, "agreement", "perplexity ratio", at, "z.3f")
            quality = (
                _cell(found, "agreement", "KL", at, "z.3f"),
                _cell(found, "agreement", "same choice", at, ".1%"),
                _cell(found, "perplexity", "perplexity", at, ".2f"),
                ratio or f"{perplexity / theirs:.3f}",
                _cell(found, "recall", "recall", at, "z.3f"),
            )
            size = _figure(found, "speed", BYTES, at) / 1e6
            rows.append((f"{at:,}", name, *quality, f"{size:,.2f}"))
    return rows


def _cell(found: Found, task: str, figure: str, at: int, form: str) -> str:
    """A figure with its interval as text; empty if it was not measured."""
    row = found.get(task, {}).get(str(at), {}).get(figure)
    if row is None:
        return ""
    numbers = [row[name] for name in ("value", "low", "high") if row.get(name) is not None]
    value, *ends = (format(x, form) for x in numbers)
    return f"{value} [{', '.join(ends)}]" if ends else value


def shares(results: Results) -> str:
    """What part of the outputs of layers their memories give, as a sentence; empty if there are none."""
    found = {
        layer.removeprefix("layer "): row["share"]["value"]
        for layer, row in results.last.get("memory", {}).items()
    }
    if not found:
        return ""
    least, most = min(found, key=found.__getitem__), max(found, key=found.__getitem__)
    mean = sum(found.values()) / len(found)
    beyond = "; above 100% the memory outweighs the rest" if found[most] > 1 else ""
    return (
        f"{mean:.0%} in the mean over layers, from {found[least]:.0%} (layer {int(least)}) to "
        f"{found[most]:.0%} (layer {int(most)}){beyond}"
    )


def forgets(results: Results) -> int | None:
    """The length from which on the last model recalls less than a tenth of what the first does, if there is one."""
    first = next(iter(results.rows.values()))
    forgotten = None
    for at in _lengths(results):
        theirs, ours = (_figure(x, "recall", "recall", at) for x in (first, results.last))
        if theirs is None or theirs < LEAST_RECALL:
            continue
        is_lost = ours < RECALLED * theirs
        forgotten = (at if forgotten is None else forgotten) if is_lost else None
    return forgotten


def speed_table(results: Results) -> list[tuple[str, ...]]:
    """The speed of the first and the last model by length as text, with the columns of SPEED_HEADER."""
    first, *_, last = results.rows.items()
    return [
        (
            f"{at:,}",
            name,
            *(f"{_figure(found, 'speed', figure, at):,.0f}" for figure in (READ, WRITTEN)),
        )
        for at in _lengths(results)
        for name, found in (first, last)
    ]


def _lengths(results: Results) -> list[int]:
    """The lengths that all models can read."""
    return sorted(
        map(int, set.intersection(*(set(found["speed"]) for found in results.rows.values())))
    )


def _figure(found: Found, task: str, figure: str, at: int, part: str = "value") -> Any:
    """A figure that was found, or another part of it; None if the task was not measured there."""
    row = found.get(task, {}).get(str(at))
    return row[figure][part] if row else None


def _by_length(found: Found) -> dict[str, dict]:
    """{tokens: {panel: figure}}."""
    rows: dict[str, dict] = {}
    for panel, (task, figure) in PANELS.items():
        for at, row in found.get(task, {}).items():
            rows.setdefault(at, {})[panel] = row[figure]
    return rows
