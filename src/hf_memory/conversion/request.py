"""A conversion from files to a folder: what it is asked for, and what is checked and read before any training."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from hf_memory.conversion.plan import Plan, check_run, check_space, resolve
from hf_memory.conversion.recipe import Recipe
from hf_memory.conversion.run import Run
from hf_memory.conversion.run_identity import describe
from hf_memory.conversion.stages.sharding import processes
from hf_memory.conversion.teacher_text import parse_source, write_text
from hf_memory.conversion.teachers.gguf import find_gguf
from hf_memory.conversion.teachers.loading import (
    check_bitsandbytes,
    load_config,
    load_teacher,
    load_tokenizer,
)
from hf_memory.evaluation import ITEMS, record
from hf_memory.export.targets import find_target, servable_memory
from hf_memory.files.fingerprints import model_fingerprint, tokens_fingerprint
from hf_memory.files.folders import RESULTS, check_output
from hf_memory.files.text import ANY_TEXT, Text, hold_out
from hf_memory.files.tokenised import read_tokens
from hf_memory.modeling.configuration import MemoryConfig

TOKENS = "tokens"  # folder beside checkpoints
MADE = "made"  # of a record: how the model was made that is measured
MADE_OF = "made_of"  # of a record: fingerprints of the model and the text that this was made of


WITHOUT_SERVABLE = "without it transformers runs the student, and vLLM with our plugin"


def ignore(folder: Path) -> None:
    """Do nothing about a model that a stopped call has saved."""


def no_files(plan: Plan) -> dict[str, str]:
    """No further files for the folder of a result."""
    return {}


@dataclass(frozen=True)
class Request:
    """A conversion from files to a folder, or with a recipe whose `to` is None, a fine-tuning.

    Args:
        model: folder, Hub name or GGUF file of the teacher, or of the model to fine-tune.
        text: sources of the training text, see `read_tokens`. `teacher:500k`, or `teacher:500k:FILE` with prompts in a
            file, is so many tokens that the teacher writes first. The last tenth of the text is held out.
        output: folder for the result, a path or a string.
        recipe: the recipe.
        run: checkpoints, progress reports and options of the Trainer. With `eval_steps`, a tenth of the training text
            becomes its `validation`.
        weights: of each source in a mixture; default: the sources follow each other.
        max_tokens: largest number of tokens of the text to read; default: all.
        assistant_only: whether only the assistant's turns are learnt in conversations.
        measure_tokens: number of held-out tokens on which models are compared.
        items: questions of each kind on which answers are scored; 0: none.
        overwrite: whether the result of an earlier run in `output` is replaced.
        extra_files: texts of further files for the folder, by name, given the final plan.
        goes_on: is called with `output` if a stopped call has saved its model there, so that nothing is trained.
    """

    model: str
    text: Sequence[str]
    output: Path
    recipe: Recipe = field(default_factory=Recipe)
    run: Run = field(default_factory=Run)
    weights: Sequence[float] | None = None
    max_tokens: int | None = None
    assistant_only: bool = False
    measure_tokens: int = 2**16
    items: int = ITEMS
    overwrite: bool = False
    extra_files: Callable[[Plan], Mapping[str, str]] = no_files
    goes_on: Callable[[Path], None] = ignore

    def __post_init__(self) -> None:
        object.__setattr__(self, "output", Path(self.output))

    def settings(self, plan: Plan) -> dict[str, str]:
        """What determines the result, by name, so that a call that was stopped is known again."""
        apart = ("recipe", "run", "overwrite", "extra_files", "goes_on", "output")
        given = {x.name: getattr(self, x.name) for x in fields(self) if x.name not in apart}
        return describe({**given, **plan.describe(self.run)})

    def unfinished(self, settings: Mapping[str, str]) -> record.Record | None:
        """The record in the output if it has the model of the same request, which was stopped while it was measured."""
        with suppress(ValueError, OSError):  # of damaged files, of other requests, or without files
            results = json.loads((self.output / RESULTS).read_text(encoding="utf-8"))
            known = record.open_record(self.output, dict(settings))
            if results == {} and MADE in known:
                return known
        return None


class Prepared(NamedTuple):
    """A request that was checked, with all that it needs except models."""

    request: Request
    draft: Plan  # final if nothing is left to choose
    tokenizer: Any
    tokens: Text  # the training text
    held_out: Text
    # what a stopped call has measured; and how the model was made, if it was saved
    known: record.Record

    @property
    def made(self) -> dict[str, Any] | None:
        """Choice and losses of a model that a stopped call has saved."""
        return self.known.get(MADE)

    def recognize(self, model: PreTrainedModel) -> None:
        """Find out whether a stopped call has saved a model, and made it of this one and of this text.

        Args:
            model: the teacher, or the model to fine-tune, before it is trained.

        Raises:
            ValueError: if it was made of another model or text, unless it may be replaced: then all begins again.
        """
        output = self.request.output
        text = self.tokens, self.held_out
        now = {"model": model_fingerprint(model), "text": " ".join(map(tokens_fingerprint, text))}
        before = self.known.get(MADE_OF, {})
        self.known[MADE_OF] = now
        if self.made is None:
            return
        others = [name for name in now if now[name] != before.get(name)]
        if not others:
            self.request.goes_on(output)
            return
        if not self.request.overwrite:
            raise ValueError(
                f"output must be a new folder or one of the same run, got {output} of a run that was stopped, with "
                f"another {' and '.join(others)}; --overwrite replaces it"
            )
        del self.known[MADE]
        self.known["models"].clear()


def prepare(request: Request, *, is_dry: bool = False) -> Prepared:
    """Check a request, and read its text.

    Args:
        request: the request.
        is_dry: whether nothing is written; then the disks and libraries of this machine are not checked either.

    Raises:
        ValueError: for what `resolve` and `check_run` refuse, before the text is read; or if the text is too short.
        OSError: if a file cannot be read, or a disk is too full.
    """
    recipe = request.recipe
    if recipe.teacher_bits and find_gguf(request.model):
        raise ValueError(
            f"teacher_bits must not be given for a GGUF file, got {recipe.teacher_bits}"
        )
    config = load_config(request.model)
    draft = resolve(recipe, config, ANY_TEXT)
    _check_draft(request, draft)
    settings = request.settings(draft)
    unfinished = request.unfinished(settings)
    check_output(
        request.output,
        overwrite=request.overwrite or unfinished is not None,
        beside={"checkpoints": request.run.checkpoints},
    )
    if not is_dry:
        check_bitsandbytes(recipe.teacher_bits)
    tokenizer = load_tokenizer(request.model)  # after the checks: reading a text may take long
    tokens, held_out = hold_out(_read(request, tokenizer, is_dry))
    if "eval_steps" in request.run.training:
        tokens, validation = hold_out(tokens)
        request = replace(request, run=replace(request.run, validation=validation))
    draft = draft.with_text(tokens)
    if not is_dry:
        check_space(draft, request.run, output=request.output)
    known = unfinished or {"settings": settings, "models": {}}
    return Prepared(request, draft, tokenizer, tokens, held_out, known)


def _check_draft(request: Request, draft: Plan) -> None:
    """Refuse what can be seen without the text and weights."""
    validation = None
    if "eval_steps" in request.run.training:
        longest = max(stage.schedule.length for stage in draft.stages)
        validation = torch.zeros(longest, dtype=torch.long)  # of which only the length matters
    check_run(draft, replace(request.run, validation=validation))
    if request.recipe.servable:
        check_servable(draft.student, str(request.recipe.to))  # type: ignore[arg-type]


def check_servable(student: MemoryConfig, to: str) -> None:
    """Raise NotExportable if engines do not have a student, whose memory is `to`."""
    other = servable_memory(student)
    advice = "Leave out --servable, or options that are named here"
    if other is None:
        advice = "No engine has students of such a teacher. Leave out --servable"
    elif other != to:
        advice = f"Give --to {other}, or leave out --servable"
    find_target(student, advice=f"{advice}: {WITHOUT_SERVABLE}")


def _read(request: Request, tokenizer, is_dry: bool) -> Text:
    """The text, whose tokens are kept beside the checkpoints if there are any."""
    sources = [_written(source, request, tokenizer, is_dry) for source in request.text]
    how: dict = {
        "weights": request.weights,
        "limit": request.max_tokens,
        "assistant_only": request.assistant_only,
        "report": request.run.report,
    }
    checkpoints = request.run.checkpoints
    if checkpoints is None or is_dry:
        return read_tokens(sources, tokenizer, **how)
    with processes().main_process_first():
        return read_tokens(sources, tokenizer, cache=checkpoints / TOKENS, **how)


def _written(source: str, request: Request, tokenizer, is_dry: bool) -> str:
    """A source of text; for teacher:... the file of generated text beside the output."""
    wanted = parse_source(source)
    if wanted is None:
        return source
    if is_dry:
        raise ValueError(
            f"text must exist for a dry run, got {source}, which the teacher would have to generate"
        )
    num_tokens, prompts = wanted
    folder = request.output.with_name(f"{request.output.name}-text")
    teacher = load_teacher(request.model).to(device())  # type: ignore[arg-type]
    with processes().main_process_first():
        file = write_text(
            folder,
            teacher,
            tokenizer,
            num_tokens,
            prompts=prompts,
            seed=request.recipe.seed,
            report=request.run.report,
        )
    return str(file)


def device() -> str:
    """The device on which models run."""
    return "cuda" if torch.cuda.is_available() else "cpu"
