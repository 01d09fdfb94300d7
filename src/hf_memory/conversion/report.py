"""Writes the results of a conversion: model, tokenizer, model card, plots and measurements."""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedModel

from hf_memory.conversion.describe import past, settings, story
from hf_memory.conversion.folders import RESULTS
from hf_memory.conversion.plan import Plan
from hf_memory.conversion.stages.distillation import DISTILLATION
from hf_memory.evaluation import ModelResult, plot_contexts, plot_conversion
from hf_memory.evaluation.plots import History

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
    """

    teacher: str
    model_type: str
    text: str
    past: str
    story: list[str]
    recipe: dict
    losses: dict[str, History]
    rows: list[ModelResult]


def results_of(
    plan: Plan, losses: dict[str, History], rows: list[ModelResult], *, teacher: str, text: str, training: Mapping
) -> Results:
    """The results of a plan that was carried out.

    Args:
        plan: the plan.
        losses: losses by stage.
        rows: measurements of each model, the reference first and the student last.
        teacher: name of the teacher.
        text: name of the text.
        training: training arguments of the run.
    """
    return Results(
        teacher=teacher,
        model_type=plan.student.model_type,
        text=text,
        past=past(plan.student, plan.teacher),
        story=[sentence for sentence in story(plan) if sentence],
        recipe=settings(plan, training),
        losses=losses,
        rows=rows,
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
    with tempfile.TemporaryDirectory(dir=path) as folder:
        _write_results(Path(folder), results)
        for file in sorted(Path(folder).iterdir()):
            file.replace(path / file.name)


def _write_results(folder: Path, results: Results) -> None:
    plot_conversion(folder / "conversion.png", results.losses, {row.name: row.perplexity for row in results.rows})
    plot_contexts(folder / "contexts.png", **curves(results))
    model_card(results).save(folder / "README.md")
    (folder / RESULTS).write_text(json.dumps(asdict(results), indent=2) + "\n", encoding="utf-8")


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
    fields: dict = {"header": HEADER, "table": table(results)}
    fields |= {"context_header": CONTEXT_HEADER, "contexts": context_table(results)}
    return ModelCard.from_template(data, template_path=str(CARD), results=results, **fields)


def eval_results(results: Results) -> list[EvalResult]:
    """The results that the Hub shows for a model: those of the student, which is the last row."""
    student = results.rows[-1]
    found = {"perplexity": student.perplexity, "KL from the teacher": student.kl, "agreement": student.agreement}
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type="text",
            dataset_name=f"a held-out part of {results.text}",
            metric_type=name.split()[0].lower(),
            metric_name=name,
            metric_value=round(value, 4),
        )
        for name, value in found.items()
        if value is not None
    ]


HEADER = ("model", "perplexity", "ratio", "recall", "KL", "agreement", "cache kB", "tokens/s")
CONTEXT_HEADER = ("tokens", "model", "perplexity", "recall", "cache kB", "tokens/s read", "tokens/s written")


def table(results: Results) -> list[tuple[str, ...]]:
    """The table of results as text, with the columns of HEADER; ratios are relative to the first model."""
    best = results.rows[0].perplexity
    return [
        (
            row.name,
            f"{row.perplexity:.2f}",
            f"{row.perplexity / best:.3f}",
            f"{row.copy_gain:.3f}",
            "" if row.kl is None else f"{row.kl:.3f}",
            "" if row.agreement is None else f"{row.agreement:.1%}",
            f"{row.costs[-1].cache_bytes / 1000:.0f}",
            f"{row.costs[-1].writing:.0f}",
        )
        for row in results.rows
    ]


def context_table(results: Results) -> list[tuple[str, ...]]:
    """The table of results by context length as text, with the columns of CONTEXT_HEADER."""
    return [
        (
            f"{cost.context:,}",
            row.name,
            f"{row.perplexity_by_position[cost.context]:.2f}",
            f"{row.recall_by_distance[cost.context // 2]:.3f}",
            f"{cost.cache_bytes / 1000:.0f}",
            f"{cost.reading:.0f}",
            f"{cost.writing:.0f}",
        )
        for costs in zip(*(row.costs for row in results.rows))
        for row, cost in zip(results.rows, costs)
    ]


def curves(results: Results) -> dict[str, dict]:
    """The results by context length as curves, for `plot_contexts`."""
    measures = {
        "held-out perplexity": ("position", lambda row: row.perplexity_by_position),
        "recall (nats a token)": ("distance", lambda row: row.recall_by_distance),
        "cache (MB)": ("context", lambda row: {x.context: x.cache_bytes / 1e6 for x in row.costs}),
        "tokens written a second": ("context", lambda row: {x.context: x.writing for x in row.costs}),
    }
    panels = {name: {row.name: curve(row) for row in results.rows} for name, (_, curve) in measures.items()}
    return {"panels": panels, "xlabels": {name: f"{x} (tokens)" for name, (x, _) in measures.items()}}
