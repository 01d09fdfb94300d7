"""What a conversion leaves on disk: model, tokenizer, card, plot and results."""

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from torch import Tensor
from transformers import PreTrainedModel

from hf_memory.conversion.describe import past, settings, story
from hf_memory.conversion.folders import RESULTS
from hf_memory.conversion.plan import Plan
from hf_memory.conversion.run import Progress, silent
from hf_memory.conversion.stages.distillation import DISTILLATION
from hf_memory.evaluation import (
    Cost,
    agreement,
    copy_gain,
    cost_by_context,
    perplexity,
    perplexity_by_position,
    plot_contexts,
    plot_conversion,
    recall_by_distance,
)
from hf_memory.evaluation.language import BUDGET
from hf_memory.evaluation.plots import History

CARD = Path(__file__).with_name("model_card.md")
CONTEXTS = (256, 512, 1024, 2048, 4096)  # tokens that the costs, the recall and the perplexity are measured at


@dataclass(frozen=True)
class ModelResult:
    """One row of the table of results."""

    name: str
    perplexity: float  # held-out
    copy_gain: float  # nats a token
    kl: float | None  # from the teacher, nats a token; None for the teacher itself
    agreement: float | None  # with the teacher's most likely token
    perplexity_by_position: dict[int, float]  # held-out, {last position: perplexity}
    recall_by_distance: dict[int, float]  # {tokens from one reading to the next: copy_gain}
    costs: tuple[Cost, ...]


@dataclass(frozen=True)
class Results:
    """What is known of a conversion when it is done."""

    teacher: str
    model_type: str
    text: str  # what it learned on
    past: str  # what the cache of the new model does
    story: list[str]  # how it was made
    recipe: dict
    losses: dict[str, History]
    rows: list[ModelResult]


def measure(
    name: str,
    model: PreTrainedModel,
    held_out: Tensor,
    teacher: PreTrainedModel | None,
    *,
    contexts: Iterable[int] = CONTEXTS,
    max_tokens: int | None = BUDGET,
    report: Callable[[Progress], None] = silent,
) -> ModelResult:
    """All that is known of one model; the teacher itself has none to be compared with.

    Args:
        name: of the row in tables.
        model: to measure.
        held_out: [T] of text that it has not seen.
        teacher: to compare with.
        contexts: lengths to measure at, of which those are left out that the model or the text is too short for.
        max_tokens: that the model reads to be measured, beside what it takes to time it; None: as many as a measure
            can use.
        report: is told how far it is.
    """
    task, found = f"measuring {name}", dict[str, Any]()

    def tell(read: int = 0) -> None:
        report(Progress(task, len(found), len(parts)))

    def share(part: float) -> dict:
        return {"progress": tell, "max_tokens": max_tokens and int(part * max_tokens)}

    longest = min(getattr(model.config, "max_position_embeddings", None) or len(held_out), len(held_out))
    contexts = [x for x in contexts if x <= longest]
    parts: dict[str, Callable] = {
        "like": lambda: None if teacher is None else agreement(model, teacher, held_out, **share(1 / 8)),
        "perplexity": lambda: perplexity(model, held_out, **share(1 / 8)),
        "copy_gain": lambda: copy_gain(model, held_out, **share(1 / 8)),
        "perplexity_by_position": lambda: perplexity_by_position(model, held_out, length=max(contexts), **share(1 / 8)),
        "recall_by_distance": lambda: recall_by_distance(
            model, held_out, [x // 2 for x in contexts], **share(1 / 2)
        ),  # of which the last distances take most, for few tokens that say something
        "costs": lambda: cost_by_context(model, contexts),
    }
    for part, find in parts.items():
        tell()
        found[part] = find()
    tell()
    like = found.pop("like")
    return ModelResult(name, kl=like and like.kl, agreement=like and like.top1, **found)


def results_of(
    plan: Plan, losses: dict[str, History], rows: list[ModelResult], *, teacher: str, text: str, training: Mapping
) -> Results:
    """What is known of a plan that was carried out.

    Args:
        plan: what was done.
        losses: by stage.
        rows: of the models, the one that others are held to first and the new one last.
        teacher: what it is called.
        text: what the text is called.
        training: arguments of the run.
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
    """Write everything that the next user of a student needs."""
    write_model(folder, model, tokenizer)
    add_results(folder, results)


def write_model(folder: Path, model: PreTrainedModel, tokenizer) -> None:
    """Write a model of which nothing is known yet, so that to measure it cannot lose it."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / RESULTS).write_text("{}\n", encoding="utf-8")


def add_results(path: Path, results: Results) -> None:
    """Write what is known of a model into its folder, each file whole."""
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
    """What the Hub shows beside a model: the figures of the student, which is the last row."""
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
    """The rows of the table of results, as text under HEADER; the first model is the one that others are held to."""
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
    """The rows of the table of contexts, as text under CONTEXT_HEADER."""
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
    """The same as curves over tokens, for `plot_contexts`."""
    measures = {
        "held-out perplexity": ("position", lambda row: row.perplexity_by_position),
        "recall (nats a token)": ("distance", lambda row: row.recall_by_distance),
        "cache (MB)": ("context", lambda row: {x.context: x.cache_bytes / 1e6 for x in row.costs}),
        "tokens written a second": ("context", lambda row: {x.context: x.writing for x in row.costs}),
    }
    panels = {name: {row.name: curve(row) for row in results.rows} for name, (_, curve) in measures.items()}
    return {"panels": panels, "xlabels": {name: f"{x} (tokens)" for name, (x, _) in measures.items()}}
