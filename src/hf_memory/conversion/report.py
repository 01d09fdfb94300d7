"""What a conversion leaves on disk: model, tokenizer, card, plot and results, all or nothing."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData
from torch import Tensor
from transformers import PreTrainedModel

from hf_memory.conversion.stages import DISTILLATION, TRANSFER, Schedule
from hf_memory.evaluation import (
    agreement,
    cache_bytes_after,
    copy_gain,
    perplexity,
    plot_conversion,
    tokens_per_second,
)
from hf_memory.evaluation.plots import History

RESULTS = "results.json"  # also the mark of a folder that may be replaced
CARD = Path(__file__).with_name("model_card.md")


@dataclass(frozen=True)
class ModelResult:
    """One row of the table of results."""

    name: str
    perplexity: float  # held-out
    copy_gain: float  # nats a token
    kl: float | None  # from the teacher, nats a token; None for the teacher itself
    agreement: float | None  # with the teacher's most likely token
    cache_bytes: int
    cache_tokens: int  # read before the cache was measured
    tokens_per_second: float


@dataclass(frozen=True)
class Results:
    """What is known of a conversion when it is done."""

    teacher: str
    model_type: str
    text: str  # what it learned on
    recipe: dict
    losses: dict[str, History]
    rows: list[ModelResult]


def measure(
    name: str, model: PreTrainedModel, held_out: Tensor, teacher: PreTrainedModel | None, *, cache_tokens: int = 1024
) -> ModelResult:
    """One row of the table; the teacher itself has none to be compared with."""
    like = None if teacher is None else agreement(model, teacher, held_out)
    return ModelResult(
        name=name,
        perplexity=perplexity(model, held_out),
        copy_gain=copy_gain(model, held_out),
        kl=None if like is None else like.kl,
        agreement=None if like is None else like.top1,
        cache_bytes=cache_bytes_after(model, cache_tokens),
        cache_tokens=cache_tokens,
        tokens_per_second=tokens_per_second(model),
    )


def recipe(to: str, transfer: Schedule, distillation: Schedule, **others) -> dict:
    """The settings of a conversion in words, for the card."""
    return {"student": to, TRANSFER: str(transfer), DISTILLATION: str(distillation), **others}


@contextmanager
def new_folder(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A folder beside `path` to write to, which takes its place when nothing went wrong.

    Raises:
        ValueError: if `path` is in use, unless `overwrite` is set and it is the result of an earlier run.
    """
    check_free(path, overwrite=overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        yield partial
        partial.chmod(0o755)
        if path.exists():
            old = partial.with_name(f"{partial.name}-old")
            path.rename(old)
            partial.rename(path)
            shutil.rmtree(old)
        else:
            partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_free(path: Path, *, overwrite: bool = False) -> None:
    """Raise ValueError if a folder must not be written to."""
    if not path.exists():
        return
    if not path.is_dir():
        raise ValueError(f"output must be a folder, got the file {path}")
    if not any(path.iterdir()) or (overwrite and (path / RESULTS).exists()):
        return
    if overwrite:
        raise ValueError(f"output must be a new folder or the result of an earlier run, got {path} with other files")
    raise ValueError(f"output must be a new folder, got {path}, which is not empty; --overwrite replaces it")


def write_report(folder: Path, model: PreTrainedModel, tokenizer, results: Results) -> None:
    """Write everything that the next user of a student needs."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    plot_conversion(folder / "conversion.png", results.losses, {row.name: row.perplexity for row in results.rows})
    model_card(results).save(folder / "README.md")
    (folder / RESULTS).write_text(json.dumps(asdict(results), indent=2) + "\n", encoding="utf-8")


def model_card(results: Results) -> ModelCard:
    """The card of a student, with its table of results."""
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=results.teacher if "/" in results.teacher and not Path(results.teacher).exists() else None,
        tags=["hf_memory", results.model_type, "linear-attention", "distillation"],
    )
    return ModelCard.from_template(data, template_path=str(CARD), results=results, header=HEADER, table=table(results))


HEADER = ("model", "perplexity", "ratio", "recall", "KL", "agreement", "cache kB", "tokens/s")


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
            f"{row.cache_bytes / 1000:.0f}",
            f"{row.tokens_per_second:.0f}",
        )
        for row in results.rows
    ]
