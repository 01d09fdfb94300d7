"""From a teacher to a student in one call."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from accelerate.utils import broadcast_object_list
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, TrainerCallback

from hf_memory.conversion.checkpoints import claim
from hf_memory.conversion.data import check_tokens
from hf_memory.conversion.fine_tuning import (
    FINE_TUNING,
    FINE_TUNING_SCHEDULE,
    check_fine_tuning,
    fine_tune,
)
from hf_memory.conversion.placement import Keep, LayerScore, auto_count, kept_layers, rank_layers
from hf_memory.conversion.sharding import processes
from hf_memory.conversion.stages import (
    DISTILLATION,
    TRANSFER,
    Schedule,
    attention_transfer,
    check_cross_entropy,
    check_training,
    distill,
)
from hf_memory.conversion.starts import start_near
from hf_memory.conversion.students import is_exact, make_student
from hf_memory.conversion.teacher_logits import TOP_K, distill_from_logits, save_logits
from hf_memory.conversion.weights import CarriedWeights
from hf_memory.evaluation.plots import History
from hf_memory.modeling.base import MemoryForCausalLM

TRANSFER_SCHEDULE = Schedule(steps=100, learning_rate=3e-3)
DISTILLATION_SCHEDULE = Schedule(steps=250, learning_rate=1e-3)
NO_FINE_TUNING = FINE_TUNING_SCHEDULE._replace(steps=0)


class Conversion(NamedTuple):
    """A student, and how it came about."""

    student: MemoryForCausalLM
    weights: CarriedWeights
    losses: dict[str, History]  # by stage
    kept: tuple[int, ...] = ()  # the layers with the teacher's attention
    ranking: tuple[LayerScore, ...] = ()  # of all layers, the best to keep first, if that is how they were chosen


def convert(
    teacher: PreTrainedModel,
    tokens: Tensor,
    *,
    to: str = "linear",
    keep: Keep = (),
    transfer: Schedule = TRANSFER_SCHEDULE,
    distillation: Schedule = DISTILLATION_SCHEDULE,
    fine_tuning: Schedule = NO_FINE_TUNING,
    lora_rank: int | None = None,
    temperature: float = 1.0,
    cross_entropy: float | None = None,
    quantized: PreTrainedModel | None = None,
    teacher_logits: Path | None = None,
    top_k: int = TOP_K,
    seed: int = 0,
    checkpoints: Path | None = None,
    callbacks: tuple[TrainerCallback, ...] = (),
    training: Mapping[str, Any] | None = None,
    **options,
) -> Conversion:
    """Turn a Transformer into a memory model: its weights, attention transfer, logit distillation, fine-tuning.

    The same arguments and seed give the same student. A stage of no steps is left out. In a program that torchrun or
    accelerate started in several processes, each calls this with the same arguments, and each has the student.

    Args:
        teacher: a causal language model of a type in TEACHERS; stays as it is.
        tokens: [T] of the text to learn on, made by the teacher's tokenizer.
        to: the family, such as `"linear"`.
        keep: the layers that keep the teacher's attention: numbers, counted from 0, or the words of `kept_layers`, or
            `"auto"`, which keeps the quarter of the layers that recall needs most, `"auto:1/8"` an eighth. To find
            them, a student without attention goes through attention transfer first; see `rank_layers`.
        transfer: of `attention_transfer`.
        distillation: of `distill`.
        fine_tuning: of `fine_tune`; its windows may be longer than the teacher's positions.
        lora_rank: of `fine_tune`.
        temperature: of `distill`.
        cross_entropy: of `distill`; default: 0, or 1 for a student that is its teacher before any training, which has
            nothing to learn from it. For such a student there is no attention transfer either.
        quantized: the same teacher in few bits (see `load_quantized`), to learn from in place of `teacher`, from which
            the student has its weights all the same; the student is made on its device.
        teacher_logits: folder of the teacher's most likely tokens, which are saved there first unless they are there
            already, so that distillation runs no teacher; see `save_logits`. Several students may share it.
        top_k: of `save_logits`.
        seed: of new weights and of the order of the text.
        checkpoints: folder for checkpoints; a conversion that was stopped, or killed at any moment, goes on from them
            when called again with the same arguments.
        callbacks: of the Trainer in all stages.
        training: more arguments of transformers' TrainingArguments in all stages, such as `bf16`,
            `activation_checkpointing` and `gradient_accumulation_steps`, which leaves the schedules as they are.
        **options: of the family's config, such as `gate`.

    Raises:
        ValueError: if the teacher, the family, a layer or an option is not supported, the text does not fit, the
            checkpoints are of other arguments, or a loss is not finite.
    """
    shared: dict = {"callbacks": callbacks, "training": training or {}}  # by all stages
    check_training(shared["training"])
    num_layers, ranking = teacher.config.num_hidden_layers, ()
    count = auto_count(keep, num_layers)
    observed = teacher if quantized is None else quantized
    student = make_student(teacher, to, keep=() if count else keep, seed=seed, **options)
    if count:
        check_rankable(student, teacher.config, transfer)
    check_stages(tokens, teacher.config, transfer, distillation, fine_tuning, lora_rank)
    check_cross_entropy(cross_entropy or 0)
    if checkpoints and processes().is_main_process:
        how: dict = {"to": to, "keep": keep, "transfer": transfer, "distillation": distillation, "seed": seed}
        how |= {"fine_tuning": fine_tuning, "lora_rank": lora_rank, "quantized": quantized, "top_k": top_k}
        how |= {"temperature": temperature, "cross_entropy": cross_entropy, **options, **shared["training"]}
        claim(checkpoints, {**how, "teacher": teacher, "tokens": tokens, "teacher_logits": bool(teacher_logits)})

    def run(stage: str, number: int) -> dict:
        return {"seed": seed + number, "checkpoints": checkpoints and checkpoints / stage, **shared}

    if count:
        found = _ranking(student, teacher, quantized, tokens, transfer, **run("placement", 0))
        (ranking,) = broadcast_object_list([found])
        keep = [score.layer for score in ranking[:count]]
        student = make_student(teacher, to, keep=keep, seed=seed, **options)
    student.to(observed.device)  # type: ignore[arg-type]
    weights = start_near(student, teacher, tokens, transfer.length, quantized=quantized)
    losses: dict[str, History] = {}
    if has_transfer(student, teacher.config, transfer):
        losses[TRANSFER] = attention_transfer(student, observed, tokens, transfer, **run("transfer", 0))
    if distillation.steps:
        how = run("distillation", 1) | {"temperature": temperature, "cross_entropy": cross_entropy}
        losses[DISTILLATION] = _distill(student, observed, tokens, distillation, teacher_logits, top_k, **how)
    if fine_tuning.steps:
        how = run("fine_tuning", 2) | {"lora_rank": lora_rank}
        losses[FINE_TUNING] = fine_tune(student, tokens, fine_tuning, **how)
    student.config.use_cache = True  # the Trainer turns it off
    return Conversion(student, weights, losses, kept_layers(keep, num_layers), ranking)


def check_stages(
    tokens: Tensor,
    config: PreTrainedConfig,
    transfer: Schedule,
    distillation: Schedule,
    fine_tuning: Schedule,
    lora_rank: int | None,
) -> None:
    """Raise ValueError if a stage cannot read a text with a teacher of this config, or its schedule is none."""
    transfer.check(TRANSFER)
    distillation.check(DISTILLATION)
    check_tokens(tokens, config, *(stage.length for stage in (transfer, distillation) if stage.steps))
    check_fine_tuning(tokens, config, fine_tuning, lora_rank)


def has_transfer(student: MemoryForCausalLM, teacher: PreTrainedConfig, transfer: Schedule) -> bool:
    """Whether there is a stage of attention transfer: layers of memory that have something to learn from attention."""
    memories = any("memory" in kind for kind in student.config.mixer_types)
    return bool(transfer.steps) and memories and not is_exact(student.config, teacher, transfer.length)


def check_rankable(student: MemoryForCausalLM, teacher: PreTrainedConfig, transfer: Schedule) -> None:
    """Raise ValueError if the layers of a student have no order in which to keep attention."""
    if is_exact(student.config, teacher, transfer.length):
        raise ValueError("keep must not be auto for a student that starts as its teacher whatever it keeps")


def _ranking(
    student: MemoryForCausalLM,
    teacher: PreTrainedModel,
    quantized: PreTrainedModel | None,
    tokens: Tensor,
    transfer: Schedule,
    **run,
):
    """All layers, the best to keep first."""
    observed = teacher if quantized is None else quantized
    student.to(observed.device)  # type: ignore[arg-type]
    start_near(student, teacher, tokens, transfer.length, quantized=quantized)
    if transfer.steps:
        attention_transfer(student, observed, tokens, transfer, **run)
    return tuple(rank_layers(student, observed, tokens, length=transfer.length))


def _distill(
    student: MemoryForCausalLM,
    teacher: PreTrainedModel,
    tokens: Tensor,
    schedule: Schedule,
    folder: Path | None,
    top_k: int,
    *,
    cross_entropy: float | None,
    **how,
) -> History:
    """From the teacher, or from what it is known to say; an exact student learns the text."""
    exact = is_exact(student.config, teacher.config, schedule.length)
    part = float(exact) if cross_entropy is None else cross_entropy
    if folder is None or part == 1:
        return distill(student, teacher, tokens, schedule, cross_entropy=part, **how)
    order = {"seed": how["seed"], "temperature": how["temperature"]}
    with processes().main_process_first():
        save_logits(folder, teacher, tokens, schedule, k=top_k, **order)
    return distill_from_logits(student, folder, tokens, schedule, cross_entropy=part, **how)
