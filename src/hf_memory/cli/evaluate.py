"""hf-memory evaluate."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from hf_memory import conversion
from hf_memory.cli.command import LONG, WHAT, WHERE
from hf_memory.cli.options import SOURCES, Config, Items, MaxTokens, MeasureTokens, in_file
from hf_memory.cli.progress import signs_of_life
from hf_memory.cli.terminal import console, print_table, say_made
from hf_memory.cli.writing import LoadingFlags
from hf_memory.decoding import Datastore, NearestNeighbours
from hf_memory.evaluation import ITEMS, LENGTHS, PROMPTS, TASKS, Subject, record
from hf_memory.evaluation import evaluate as carry_out
from hf_memory.evaluation.scores import KINDS, UNANSWERED, check_tolerance
from hf_memory.evaluation.tasks import SCORED_AT, TOLERANCE
from hf_memory.files.documents import read_prompts
from hf_memory.files.fingerprints import (
    model_fingerprint,
    tokenizer_fingerprint,
    tokens_fingerprint,
)
from hf_memory.files.folders import folder_lock
from hf_memory.files.text import Text, check_tokens, hold_out

TITLE = "figures with their 95 % intervals"
ALL = ",".join(x for x in TASKS if x != "reasoning")
USUAL = ",".join(map(str, LENGTHS))
SCORED = ",".join(map(str, SCORED_AT))
NEED_NO_TEXT = (*KINDS, "answers")
EXPLAINED = "; ".join(f"{name}: {task.says}" for name, task in TASKS.items())


@dataclass(frozen=True)
class MeasureFlags:
    """Flags of what is measured, on which text, and of what models are asked."""

    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            help=f"Text that the model was not trained on: {SOURCES}; may be repeated. Scores and answers need none.",
            rich_help_panel=WHAT,
        ),
    ] = None
    max_tokens: MaxTokens = None
    held_out: Annotated[
        bool,
        typer.Option(
            "--held-out",
            help="Use only the last tenth of the text, which convert holds out.",
            rich_help_panel=WHAT,
        ),
    ] = False
    tasks: Annotated[
        str,
        typer.Option(help=f"What to measure: {EXPLAINED}.", rich_help_panel=WHAT),
    ] = ALL
    lengths: Annotated[
        str,
        typer.Option(
            help="Lengths of contexts in tokens; those that the model or the text does not have are left out.",
            rich_help_panel=LONG,
        ),
    ] = USUAL
    measure_tokens: MeasureTokens = 2**16
    items: Items = ITEMS
    score_lengths: Annotated[
        str,
        in_file("Lengths in tokens of the prompts of scored questions with a long text."),
    ] = SCORED
    tolerance: Annotated[
        float,
        in_file("Part of the teacher's score by which that of a tie may be less.", min=0, max=1),
    ] = TOLERANCE
    samples: Annotated[
        int,
        in_file(
            "Needles for each length, at depths from the beginning to the end of the context.",
            min=2,
        ),
    ] = 10
    seed: Annotated[int, in_file("Random seed for needles and scored questions.")] = 0
    prompts: Annotated[
        Path | None,
        in_file(f"File with a prompt in each line; default: {len(PROMPTS)} built-in prompts."),
    ] = None
    max_new_tokens: Annotated[int, in_file("Largest number of tokens of an answer.", min=1)] = 48
    config: Config = None

    def settings(self) -> dict[str, Any]:
        """Those that an evaluation takes and a record names alike."""
        check_tolerance(self.tolerance)
        named = {name: getattr(self, name) for name in ("samples", "seed", "items", "tolerance")}
        return named | {"prompts": read_prompts(self.prompts) if self.prompts else list(PROMPTS)}


def evaluate(
    model: Annotated[
        str, typer.Argument(help="Folder, Hub name or GGUF file of any causal language model.")
    ],
    against: Annotated[
        str | None,
        typer.Option(
            help="Model to compare with, such as its teacher; it must have the same tokenizer.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    datastore: Annotated[
        Path | None,
        typer.Option(
            help="Folder that hf-memory datastore has built, which the model looks up.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    output: Annotated[
        Path,
        typer.Option(
            help="Folder for the table, pictures and JSON; results of several models can share it.",
            rich_help_panel=WHERE,
        ),
    ] = Path("evaluation"),
    *,
    flags: MeasureFlags,
    loading: LoadingFlags,
) -> None:
    """Measure a model, and compare it with its teacher. Each figure has a 95 % interval.

    A run that was stopped continues where it was. Other models with the same settings are added to the table in OUTPUT.

    Example: hf-memory evaluate student --against teacher --text my_text.txt --held-out
    """
    chosen = [name.strip() for name in flags.tasks.split(",")]
    sizes = _numbers(flags.lengths)
    if unknown := [name for name in chosen if name not in TASKS]:
        raise ValueError(f"tasks must be from {', '.join(TASKS)}, got {', '.join(unknown)}")
    if flags.text is None and (others := [name for name in chosen if name not in NEED_NO_TEXT]):
        raise ValueError(
            f"text must be given for {', '.join(others)}; of all tasks only {', '.join(NEED_NO_TEXT)} need none"
        )
    how = flags.settings()
    store = Datastore(datastore) if datastore else None
    mine = f"{model} with {datastore.name}" if datastore else model
    if loading.cache_bits is not None:
        mine += f" with cache_bits={loading.cache_bits}"
    if against == mine:
        raise _same_model(mine, mine)
    with folder_lock(output), signs_of_life() as report:
        sources = ({against: against} if against else {}) | {mine: model}
        as_saved = replace(loading, cache_bits=None)
        loaders = dict.fromkeys(sources, as_saved) | {mine: loading}
        models = {name: loaders[name].load(source) for name, source in sources.items()}
        weights = _weights(models, store)
        tokens = Text(torch.empty(0, dtype=torch.long))
        if flags.text:
            tokens = conversion.read_tokens(
                flags.text, models[mine][1], limit=flags.max_tokens, report=report
            )
            tokens = hold_out(tokens)[1] if flags.held_out else tokens
            for loaded, _ in models.values():
                check_tokens(tokens, loaded.config, min(sizes), name="lengths")
        settings = how | {
            x: getattr(flags, x) for x in ("lengths", "measure_tokens", "max_new_tokens")
        }
        settings |= {
            "dtype": loading.dtype,
            "device": models[mine][0].device.type,
            "text": tokens_fingerprint(tokens),
        }
        known = record.open_record(
            output, settings | {"against": weights[against] if against else None}
        )
        keep = partial(record.keep, output, known)
        how |= {
            "lengths": sizes,
            "max_tokens": flags.measure_tokens,
            "new_tokens": flags.max_new_tokens,
        }
        how |= {"score_lengths": _numbers(flags.score_lengths, "score_lengths")}
        with NearestNeighbours(models[mine][0], store) if store else nullcontext():
            for name, (loaded, tokenizer) in models.items():
                found = record.row_of(known, name, weights[name])
                subject = Subject(loaded, tokens, tokenizer=tokenizer, **how)
                carry_out(subject, chosen, found, keep=keep, name=Path(name).name, report=report)
                how |= {"teacher": loaded, "theirs": found}
        if not found:
            wanted = "tasks must have one that can be measured at these lengths, agreement only with --against"
            raise ValueError(f"{wanted}, got {flags.tasks} at {flags.lengths}")
        record.draw(output, known)
    _show(known)
    say_made(f"Wrote {output}: {record.FILE}, and a picture of each task.", ["chat", model])


def _weights(models: dict[str, tuple], store: Datastore | None) -> dict[str, str]:
    """Fingerprints of the models with their tokenizers; the last of them has the datastore."""
    weights = {
        name: f"{model_fingerprint(x)} {tokenizer_fingerprint(words)}"
        for name, (x, words) in models.items()
    }
    *against, mine = models
    if store:
        weights[mine] += f" {tokens_fingerprint(store.tokens)} {store.mixture}"
    for other in against:
        if models[other][1].get_vocab() != models[mine][1].get_vocab():
            raise ValueError(
                f"against must be a model with the same tokenizer, got {other} with another one"
            )
        if weights[other] == weights[mine]:
            raise _same_model(mine, other)
    return weights


def _same_model(mine: str, other: str) -> ValueError:
    return ValueError(
        f"against must be another model than {mine}, got {other} with the same weights"
    )


def _numbers(lengths: str, name: str = "lengths") -> tuple[int, ...]:
    try:
        sizes = sorted({int(length) for length in lengths.split(",")})
    except ValueError as error:
        raise ValueError(
            f"{name} must be numbers with commas between them, got {lengths!r}"
        ) from error
    if sizes[0] < 2:
        raise ValueError(f"{name} must be at least 2 tokens, got {lengths!r}")
    return tuple(sizes)


def _show(known: dict[str, Any]) -> None:
    """Print the table, and the answers side by side."""
    names = list(record.labels(known).values())
    rows = list[Any]()
    # each is named once, and is a section
    for task, found in groupby(record.table(known), key=itemgetter(0)):
        rows += [None, *((task if i == 0 else "", *cells) for i, (_, *cells) in enumerate(found))]
    print_table(rows, (*record.HEADER, *names), title=TITLE)
    if kinds := record.unanswered(known):
        console.print(f"{UNANSWERED}{', '.join(kinds)}.", soft_wrap=True)
    for prompt, *texts in record.side_by_side(known):
        console.print(f"\n{prompt}", style="bold", soft_wrap=True)
        for name, text in zip(names, texts):
            console.print(f"  {name}: {' '.join(text.split())}", soft_wrap=True)
