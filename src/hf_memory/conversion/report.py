"""Writes the results of a conversion: model, tokenizer, model card, plots and measurements."""

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedModel

from hf_memory.conversion.describe import past, settings, story
from hf_memory.conversion.engines import ways_to_serve
from hf_memory.conversion.plan import Plan
from hf_memory.conversion.stages.distillation import DISTILLATION
from hf_memory.conversion.students.heads import HeadScore
from hf_memory.evaluation import Cost, ModelResult, longest_window, plot_contexts, plot_conversion, plot_heads
from hf_memory.evaluation.model_result import FACTOR
from hf_memory.evaluation.plots import plot_scores
from hf_memory.evaluation.record import said
from hf_memory.evaluation.scores import RATIO, SCORE, TEACHERS, WIN
from hf_memory.files.folders import RESULTS
from hf_memory.progress import History

CARD = Path(__file__).with_name("model_card.md")


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
        rows: measurements of each model, the reference first and the student last.
        window: tokens of the longest window of attention in the student; 0 if it has none.
        serving: how the student is served, a sentence for each way.
        heads: layer, number and score of all heads that could keep everything, if some of them were chosen.
        chosen: the same of those that keep everything.
    """

    teacher: str
    model_type: str
    text: str
    past: str
    story: list[str]
    recipe: dict
    losses: dict[str, History]
    rows: list[ModelResult]
    window: int = 0
    serving: tuple[str, ...] = ()
    heads: tuple[HeadScore, ...] = ()
    chosen: tuple[HeadScore, ...] = ()

    @property
    def is_far(self) -> bool:
        """Whether the student was measured on texts that are several times longer than its windows."""
        return self.longest >= FACTOR * self.window

    @property
    def longest(self) -> int:
        """Tokens of the longest texts on which the student was measured."""
        return self.rows[-1].costs[-1].context


def results_of(
    plan: Plan, losses: dict[str, History], rows: list[ModelResult], *, teacher: str, text: str, training: Mapping
) -> Results:
    """The results of a plan that was carried out with these training arguments; for the others see `Results`."""
    return Results(
        teacher=teacher,
        model_type=plan.student.model_type,
        text=text,
        past=past(plan.student, plan.teacher),
        story=[sentence for sentence in story(plan) if sentence],
        recipe=settings(plan, training),
        losses=losses,
        rows=rows,
        window=longest_window(plan.student),
        serving=tuple(ways_to_serve(plan.student)),
        heads=plan.heads,
        chosen=tuple(plan.chosen),
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


def add_results(path: Path, results: Results) -> None:
    """Write model card, plots and results into the folder of a model; each file is replaced as a whole."""
    last = {row.name: row.perplexity[max(row.perplexity)] for row in results.rows}
    with tempfile.TemporaryDirectory(dir=path) as name:
        folder = Path(name)
        plot_conversion(folder / "conversion.png", results.losses, last)
        plot_contexts(folder / "contexts.png", **curves(results))
        plot_scores(folder / "scores.png", {row.name: row.scores for row in results.rows if row.scores})
        if results.heads:
            plot_heads(folder / "heads.png", results.heads, results.chosen)
        model_card(results).save(folder / "README.md")
        (folder / RESULTS).write_text(json.dumps(asdict(results), indent=2) + "\n", encoding="utf-8")
        for file in sorted(folder.iterdir()):
            file.replace(path / file.name)


def model_card(results: Results) -> ModelCard:
    """The card of a student, with its table of results."""
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=results.teacher if "/" in results.teacher and not Path(results.teacher).exists() else None,
        tags=["hf_memory", results.model_type, *(["distillation"] if DISTILLATION in results.losses else [])],
        model_name=results.model_type,
        eval_results=eval_results(results),
    )
    fields: dict = {
        "score_header": SCORE_HEADER,
        "scores": score_table(results),
        "header": HEADER,
        "table": table(results),
        "longest": results.longest,
    }
    fields |= {"speed_header": SPEED_HEADER, "speeds": speed_table(results)}
    return ModelCard.from_template(data, template_path=str(CARD), results=results, **fields)


def eval_results(results: Results) -> list[EvalResult]:
    """The results that the Hub shows for a model: those of the student, the last row, at the longest length."""
    student = results.rows[-1]
    length = results.longest
    scored = [
        EvalResult(
            task_type="text-generation",
            dataset_type="generated",
            dataset_name="generated questions with checkable answers",
            metric_type=name.replace(" ", "_"),
            metric_name=f"{name}, relative to the teacher" if name == SCORE else name,
            metric_value=round(student.summary[figure]["value"], 4),
        )
        for name, figure in ((SCORE, RATIO), (WIN, WIN))
        if student.summary
    ]
    found = {"perplexity": student.perplexity, "KL from the teacher": student.kl, "agreement": student.agreement}
    return scored + [
        EvalResult(
            task_type="text-generation",
            dataset_type="text",
            dataset_name=f"a held-out part of {results.text}",
            metric_type=name.split()[0].lower(),
            metric_name=f"{name} at {length:,} tokens",
            metric_value=round(curve[length], 4),
        )
        for name, curve in found.items()
        if curve
    ]


SCORE_HEADER = ("questions", "teacher's score", "score", "ratio", "win and tie")
HEADER = ("tokens", "model", "perplexity", "ratio", "KL", "agreement", "recall", "cache kB")
SPEED_HEADER = ("tokens", "model", "tokens/s read", "tokens/s written")


def score_table(results: Results) -> list[tuple[str, ...]]:
    """The scores of the first and the last model as text, with the columns of SCORE_HEADER."""
    first, last = results.rows[0], results.rows[-1]
    rows = {"all that the teacher can answer": last.summary} if last.summary else {}
    rows |= {at: {TEACHERS: first.scores[at][SCORE], **row} for at, row in last.scores.items()}
    return [(at, *(said(row.get(name)) for name in (TEACHERS, SCORE, RATIO, WIN))) for at, row in rows.items()]


def table(results: Results) -> list[tuple[str, ...]]:
    """The table of results as text, with the columns of HEADER: all models at one length after the other."""
    best = results.rows[0].perplexity
    return [
        (
            f"{x.context:,}",
            row.name,
            f"{row.perplexity[x.context]:.2f}",
            f"{row.perplexity[x.context] / best[x.context]:.3f}",
            f"{row.kl[x.context]:.3f}" if row.kl else "",
            f"{row.agreement[x.context]:.1%}" if row.agreement else "",
            f"{row.recall[x.context]:.3f}",
            f"{x.cache_bytes / 1000:.0f}",
        )
        for row, x in _by_length(results)
    ]


def speed_table(results: Results) -> list[tuple[str, ...]]:
    """The speed of the first and the last model by length as text, with the columns of SPEED_HEADER."""
    shown = (results.rows[0], results.rows[-1])
    rows = ((row, x) for row, x in _by_length(results) if row in shown)
    return [(f"{x.context:,}", row.name, f"{x.reading:.0f}", f"{x.writing:.0f}") for row, x in rows]


def _by_length(results: Results) -> Iterator[tuple[ModelResult, Cost]]:
    """Each model with its cost at one length after the other, up to the longest that all models can read."""
    at_lengths = zip(*(row.costs for row in results.rows))
    return ((row, cost) for costs in at_lengths for row, cost in zip(results.rows, costs))


def curves(results: Results) -> dict[str, dict]:
    """The results by length as curves, for `plot_contexts`."""
    measures = {
        "held-out perplexity": ("position", lambda row: row.perplexity),
        "KL from the teacher": ("position", lambda row: row.kl),
        "recall (nats per token)": ("length of the text", lambda row: row.recall),
        "cache (MB)": ("length of the text", lambda row: {x.context: x.cache_bytes / 1e6 for x in row.costs}),
    }
    panels = {name: {row.name: curve(row) for row in results.rows} for name, (_, curve) in measures.items()}
    panels = {name: models for name, models in panels.items() if any(models.values())}
    return {"panels": panels, "xlabels": {name: f"{x} (tokens)" for name, (x, _) in measures.items()}}
