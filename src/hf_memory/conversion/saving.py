"""A whole conversion from files to a folder: check, choose, plan, train, save, measure, and write the card."""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from hf_memory.conversion.choice import Choice
from hf_memory.conversion.choosing import final_plan
from hf_memory.conversion.convert import convert
from hf_memory.conversion.plan import Plan
from hf_memory.conversion.report import Results, add_results, add_story, results_of, write_model
from hf_memory.conversion.request import MADE, Prepared, Request, device, prepare
from hf_memory.conversion.stages.fine_tuning import FINE_TUNING, fine_tune
from hf_memory.conversion.stages.sharding import processes
from hf_memory.conversion.teachers.gguf import describe_weights, find_gguf
from hf_memory.conversion.teachers.loading import (
    has_weights,
    load_quantized,
    load_teacher,
    load_terms,
)
from hf_memory.conversion.untrained import untrained_student
from hf_memory.evaluation import OF_CARD, Subject, evaluate, lengths_beyond, record
from hf_memory.evaluation.tasks import QUALITY, Found
from hf_memory.files.fingerprints import model_fingerprint, tokens_fingerprint
from hf_memory.files.folders import folder_lock, new_folder, written
from hf_memory.files.ram import memory_for
from hf_memory.modeling.card import copy_license
from hf_memory.progress import IS_FIRST, History


class Saved(NamedTuple):
    """The result of `convert_and_save`.

    Attributes:
        model: the student, or the model that was fine-tuned.
        plan: the final plan.
        results: what the card of the model shows.
    """

    model: PreTrainedModel
    plan: Plan
    results: Results


class Trained(NamedTuple):
    """A new model, and how it is measured once it is saved."""

    model: PreTrainedModel
    plan: Plan
    losses: Mapping[str, History]
    measure: Callable[[], Iterator[tuple[str, Found]]]  # of each model, by name
    adapter: Path | None = None  # folder of LoRA weights


class Models(NamedTuple):
    """The models that a student learns from."""

    teacher: PreTrainedModel
    quantized: PreTrainedModel | None


def convert_and_save(request: Request) -> Saved | None:
    """Convert a model, save the student in a folder, measure it beside its teacher, and write its card.

    All that can be wrong is found before any work. The same call goes on from the checkpoints of one that was stopped;
    if its model was saved, only what was not measured is measured, unless teacher or text are others by now.

    Args:
        request: what is converted, how, and where the student goes. With a recipe whose `to` is None, the model is
            fine-tuned instead.

    Returns:
        The student with its plan and results; None in all processes of a launch except the first.

    Raises:
        ValueError: for what cannot work, see `resolve` and `check_run`; if another process writes to the output; or if
            a stopped call has saved a model there that it made of another teacher or text, without `overwrite`.
        OSError: if a file cannot be read or written.
    """
    with ExitStack() as stack:
        stack.enter_context(folder_lock(request.output) if IS_FIRST else nullcontext())
        prepared = prepare(request)
        if request.recipe.to is None:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            trained = _fine_tuned(prepared, scratch)
        else:
            trained = _converted(prepared)
        if trained is None:
            return None
        if prepared.made is None:
            _save(prepared, trained)
        try:
            results = _results(prepared, trained)
        except BaseException as error:
            error.add_note(
                f"The model is saved in {request.output}. The same command goes on with measuring it, and so does "
                f"hf-memory evaluate {request.output} --held-out"
            )
            raise
        add_results(request.output, results)
        (request.output / record.FILE).unlink(missing_ok=True)
        return Saved(trained.model, trained.plan, results)


def dry_run(request: Request, *, uses_weights: bool = True) -> Plan:
    """The plan that `convert_and_save` would run; nothing is written.

    Args:
        request: what would be converted.
        uses_weights: whether the teacher decides what the recipe leaves to its weights, if they are on this machine and
            fit into its memory. Else the plan is not final, and its sizes and costs are right all the same. A goal,
            which decides sizes too, always needs the weights.

    Raises:
        ValueError, OSError: as `convert_and_save`.
    """
    prepared = prepare(request, is_dry=True)
    draft = prepared.draft
    if draft.is_final or (draft.goal is None and not (uses_weights and _is_loadable(prepared))):
        return draft
    models = load_models(request, draft)
    run = replace(prepared.request.run, checkpoints=None)
    return final_plan(models.teacher, prepared.tokens, draft, run, quantized=models.quantized)


def load_models(request: Request, plan: Plan) -> Models:
    """The teacher, and its quantised form, each on its device."""
    teacher = load_teacher(request.model)
    processes()  # from here on, each process has its own device
    place = device()
    bits = plan.recipe.teacher_bits
    quantized = None if bits is None else load_quantized(request.model, bits, place)
    teacher.to(place if quantized is None else "cpu")  # type: ignore[arg-type]
    return Models(teacher, quantized)


def _is_loadable(prepared: Prepared) -> bool:
    """Whether the teacher is on this machine, and fits into its memory."""
    draft = prepared.draft
    if draft.recipe.teacher_bits is not None or not has_weights(prepared.request.model):
        return False
    return draft.teacher_bytes < memory_for(torch.device(device()))


def _converted(prepared: Prepared) -> Trained | None:
    """The student and its measurements; None in all processes except the first."""
    models = load_models(prepared.request, prepared.draft)
    prepared.recognize(models.teacher)
    if prepared.made is None:
        made = convert(
            models.teacher,
            prepared.tokens,
            prepared.draft,
            prepared.request.run,
            quantized=models.quantized,
        )
        student = made.student
        plan = made.plan
        losses = made.losses
    else:
        plan = prepared.draft.with_choice(Choice.of_json(prepared.made["choice"]))
        student = load_teacher(str(prepared.request.output)).to(device())  # type: ignore[arg-type,assignment]
        losses = prepared.made["losses"]
    group = processes()
    group.destroy_process_group()
    if not group.is_main_process:
        return None
    measure = partial(_measure_conversion, prepared, student, plan, models)
    return Trained(student, plan, losses, measure)


def _measure_conversion(
    prepared: Prepared, student: PreTrainedModel, plan: Plan, models: Models
) -> Iterator[tuple[str, Found]]:
    """The measurements of the teacher, and of the student before and after its training."""
    teacher = models.teacher.to(student.device)  # type: ignore[arg-type]
    measure = partial(_measure, prepared, plan)
    yield "teacher", measure("teacher", teacher)
    after = measure("student", student, teacher)
    if plan.stages:
        student.cpu()
        before, _ = untrained_student(teacher, prepared.tokens, plan, quantized=models.quantized)
        found = measure("before training", before, teacher, tasks=QUALITY)
        yield "before training", found | {"speed": after["speed"]}
    yield "student", after


def _fine_tuned(prepared: Prepared, scratch: Path) -> Trained | None:
    """The trained model and its measurements before and after; None in all processes except the first."""
    model = load_teacher(prepared.request.model)
    prepared.recognize(model)
    group = processes()
    model.to(device())  # type: ignore[arg-type]
    plan = prepared.draft
    before = dict[str, Found]()
    if group.is_main_process:
        before["before"] = _measure(prepared, plan, "before", model, is_saved=False)
    (stage,) = plan.stages
    adapter = None if stage.lora_rank is None else scratch / "adapter"
    if prepared.made is None:
        history = fine_tune(
            model,
            prepared.tokens,
            stage.schedule,
            lora_rank=stage.lora_rank,
            adapter=adapter,
            seed=stage.seed,
            run=prepared.request.run,
        )
        losses = {FINE_TUNING: history}
    else:
        model = load_teacher(str(prepared.request.output)).to(device())  # type: ignore[arg-type]
        losses = prepared.made["losses"]
    group.destroy_process_group()
    if not group.is_main_process:
        return None

    def measure() -> Iterator[tuple[str, Found]]:
        yield from before.items()
        yield "after", _measure(prepared, plan, "after", model)

    return Trained(model, plan, losses, measure, adapter)


def _measure(
    prepared: Prepared,
    plan: Plan,
    name: str,
    model: PreTrainedModel,
    teacher: PreTrainedModel | None = None,
    *,
    tasks: Sequence[str] = OF_CARD,
    is_saved: bool = True,
) -> Found:
    """Measure a model, and compare it with a teacher if there is one; what is known is not measured again.

    Args:
        prepared: the request.
        plan: the final plan.
        name: the model's name.
        model: the model.
        teacher: the teacher.
        tasks: what is measured.
        is_saved: whether the new model is saved already, so that each figure is saved beside it.
    """
    request = prepared.request
    held_out = prepared.held_out
    of_these = f"{model_fingerprint(model)} {tokens_fingerprint(held_out)}"
    found = record.row_of(prepared.known, name, of_these)
    first = next(iter(prepared.known["models"].values()))["found"]
    subject = Subject(
        model,
        held_out,
        teacher,
        lengths_beyond(plan.student, len(held_out)),
        request.measure_tokens,
        prepared.tokenizer,
        items=request.items,
        theirs={} if found is first else first,
    )
    how: dict = {"tasks": tasks, "found": found, "name": name, "report": request.run.report}
    if is_saved:
        how["keep"] = partial(record.keep, request.output, prepared.known)
    return evaluate(subject, **how)


def _save(prepared: Prepared, trained: Trained) -> None:
    """Write a model with what is known of it, before it is measured, which may take long."""
    request = prepared.request
    checkpoints = request.run.checkpoints
    goes_on = f", and the same call resumes from {checkpoints}" if checkpoints else ""
    with (
        written("result", request.output, f"what was there is unchanged{goes_on}"),
        new_folder(request.output, overwrite=request.overwrite) as folder,
    ):
        write_model(folder, trained.model, prepared.tokenizer)
        add_story(folder, trained.plan, _name_of(request.model))
        copy_license(request.model, folder)
        if trained.adapter is not None:
            shutil.copytree(trained.adapter, folder / "adapter")
        for name, content in request.extra_files(trained.plan).items():
            (folder / name).write_text(content, encoding="utf-8")
        prepared.known[MADE] = {
            "choice": trained.plan.choice.to_json(),
            "losses": trained.losses,
        }
        record.keep(folder, prepared.known)


def _name_of(model: str) -> str:
    """The name of a model for cards."""
    file = find_gguf(model)
    return model if file is None else file.name


def _results(prepared: Prepared, trained: Trained) -> Results:
    """What is measured of a model that was saved."""
    request = prepared.request
    rows = dict(trained.measure())
    file = find_gguf(request.model)
    texts = [Path(x).name if Path(x).exists() else x for x in request.text]
    results = results_of(
        trained.plan,
        trained.losses,
        rows,
        teacher=_name_of(request.model),
        text=", ".join(texts),
        training=request.run.training,
        terms=load_terms(request.model),
    )
    if file is not None:
        weights = trained.plan.teacher_parameters or trained.plan.student_parameters
        results.recipe["teacher_weights"] = describe_weights(file, weights)
    return results
