"""From a teacher to a student in one call."""

from pathlib import Path
from typing import NamedTuple

from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback

from hf_memory.conversion.checkpoints import claim, model_fingerprint, tokens_fingerprint
from hf_memory.conversion.data import check_tokens
from hf_memory.conversion.placement import Keep, LayerScore, auto_count, kept_layers, rank_layers
from hf_memory.conversion.stages import DISTILLATION, TRANSFER, Schedule, attention_transfer, distill
from hf_memory.conversion.starts import start_near
from hf_memory.conversion.students import is_exact, make_student
from hf_memory.conversion.weights import CarriedWeights
from hf_memory.evaluation.plots import History
from hf_memory.modeling.base import MemoryForCausalLM

TRANSFER_SCHEDULE = Schedule(steps=100, learning_rate=3e-3)
DISTILLATION_SCHEDULE = Schedule(steps=250, learning_rate=1e-3)


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
    temperature: float = 1.0,
    cross_entropy: float | None = None,
    seed: int = 0,
    checkpoints: Path | None = None,
    callbacks: tuple[TrainerCallback, ...] = (),
    **options,
) -> Conversion:
    """Turn a Transformer into a memory model: its weights, then attention transfer, then logit distillation.

    The same arguments and seed give the same student. A stage of no steps is left out.

    Args:
        teacher: a causal language model of a type in TEACHERS; stays as it is.
        tokens: [T] of the text to learn on, made by the teacher's tokenizer.
        to: the family, such as `"linear"`.
        keep: the layers that keep the teacher's attention: numbers, counted from 0, or the words of `kept_layers`, or
            `"auto"`, which keeps the quarter of the layers that recall needs most, `"auto:1/8"` an eighth. To find
            them, a student without attention goes through attention transfer first; see `rank_layers`.
        transfer: of `attention_transfer`.
        distillation: of `distill`.
        temperature: of `distill`.
        cross_entropy: of `distill`; default: 0, or 1 for a student that is its teacher before any training, which has
            nothing to learn from it. For such a student there is no attention transfer either.
        seed: of new weights and of the order of the text.
        checkpoints: folder for checkpoints; a conversion that was stopped, or killed at any moment, goes on from them
            when called again with the same arguments.
        callbacks: of the Trainer in both stages.
        **options: of the family's config, such as `gate`.

    Raises:
        ValueError: if the teacher, the family, a layer or an option is not supported, the text does not fit, the
            checkpoints are of other arguments, or a loss is not finite.
    """
    num_layers, ranking = teacher.config.num_hidden_layers, ()
    count = auto_count(keep, num_layers)
    student = make_student(teacher, to, keep=() if count else keep, seed=seed, **options)
    if count:
        check_rankable(student)
    check_tokens(tokens, teacher.config, *(stage.length for stage in (transfer, distillation) if stage.steps))
    if checkpoints:
        how: dict = {"to": to, "keep": keep, "transfer": transfer, "distillation": distillation, "seed": seed}
        how |= {"temperature": temperature, "cross_entropy": cross_entropy, **options}
        claim(checkpoints, {**how, "teacher": model_fingerprint(teacher), "tokens": tokens_fingerprint(tokens)})
    if count:
        run = {"seed": seed, "checkpoints": checkpoints and checkpoints / "placement", "callbacks": callbacks}
        ranking = _ranking(student, teacher, tokens, transfer, **run)
        keep = [score.layer for score in ranking[:count]]
        student = make_student(teacher, to, keep=keep, seed=seed, **options)
    weights = start_near(student, teacher, tokens, transfer.length)
    losses: dict[str, History] = {}
    if has_transfer(student, transfer):
        run = {"seed": seed, "checkpoints": checkpoints and checkpoints / "transfer", "callbacks": callbacks}
        losses[TRANSFER] = attention_transfer(student, teacher, tokens, transfer, **run)
    if distillation.steps:
        cross_entropy = float(is_exact(student.config)) if cross_entropy is None else cross_entropy
        run = {"seed": seed + 1, "checkpoints": checkpoints and checkpoints / "distillation", "callbacks": callbacks}
        losses[DISTILLATION] = distill(
            student, teacher, tokens, distillation, temperature=temperature, cross_entropy=cross_entropy, **run
        )
    student.config.use_cache = True  # the Trainer turns it off
    return Conversion(student, weights, losses, kept_layers(keep, num_layers), ranking)


def has_transfer(student: MemoryForCausalLM, transfer: Schedule) -> bool:
    """Whether there is a stage of attention transfer: layers of memory that have something to learn from attention."""
    memories = any("memory" in kind for kind in student.config.mixer_types)
    return bool(transfer.steps) and memories and not is_exact(student.config)


def check_rankable(student: MemoryForCausalLM) -> None:
    """Raise ValueError if the layers of a student have no order in which to keep attention."""
    if is_exact(student.config):
        raise ValueError("keep must not be auto for a student that starts as its teacher whatever it keeps")


def _ranking(student: MemoryForCausalLM, teacher: PreTrainedModel, tokens: Tensor, transfer: Schedule, **run):
    """All layers, the best to keep first."""
    start_near(student, teacher, tokens, transfer.length)
    if transfer.steps:
        attention_transfer(student, teacher, tokens, transfer, **run)
    return tuple(rank_layers(student, teacher, tokens, length=transfer.length))
