"""What a conversion would do and need, known from the teacher's config and the length of the text alone."""

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hf_memory.conversion.convert import check_rankable, has_transfer
from hf_memory.conversion.data import check_tokens
from hf_memory.conversion.placement import Keep, auto_count, kept_layers
from hf_memory.conversion.stages import DISTILLATION, TRANSFER, AttentionTransfer, Schedule
from hf_memory.conversion.students import make_student
from hf_memory.conversion.teachers import find_teacher
from hf_memory.evaluation import cache_bytes
from hf_memory.modeling.base import MemoryForCausalLM

CONTEXTS = (1024, 32768)
BYTES = 4  # of a number in float32


def plan(
    config: PreTrainedConfig,
    tokens: Tensor,
    *,
    to: str,
    keep: Keep,
    transfer: Schedule,
    distillation: Schedule,
    **options,
) -> list[tuple[str, str]]:
    """What `convert` with these arguments would do, as rows of two columns; no weights are loaded or made.

    Args:
        config: of the teacher, which is held in float32.
        tokens: [T] of the text to learn on.
        to: of `convert`.
        keep: of `convert`.
        transfer: of `convert`.
        distillation: of `convert`.
        **options: of the family's config.

    Raises:
        ValueError: if `convert` would not start.
    """
    stages = {TRANSFER: transfer, DISTILLATION: distillation}
    check_tokens(tokens, config, *(stage.length for stage in stages.values() if stage.steps))
    teacher = _teacher(config)
    ranked, num_layers = auto_count(keep, config.num_hidden_layers), config.num_hidden_layers
    if ranked:
        check_rankable(_student(teacher, to, (), options))
    kept = range(ranked) if ranked else kept_layers(keep, num_layers)  # which of them makes no difference here
    student = _student(teacher, to, kept, options)
    return [
        ("text", f"{len(tokens):,} tokens to learn on"),
        ("teacher", f"{config.model_type}, {_count(teacher.parameters()):,} parameters"),
        ("student", f"{student.config.model_type}, {_count(student.parameters()):,} parameters"),
        ("attention kept", f"{ranked} layers, to be ranked" if ranked else ", ".join(map(str, kept)) or "in no layer"),
        *([("ranking", f"first, {TRANSFER} of a student without attention")] if ranked else []),
        *_stage_rows(student, teacher, stages, len(tokens)),
        *(_cache_row(student.config, teacher.config, context) for context in CONTEXTS),
    ]


def _teacher(config: PreTrainedConfig) -> PreTrainedModel:
    find_teacher(config)
    config = copy.deepcopy(config)
    config.dtype = torch.float32
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _student(teacher: PreTrainedModel, to: str, keep: Keep, options: dict) -> MemoryForCausalLM:
    with torch.device("meta"):
        return make_student(teacher, to, keep=keep, **options)


def _stage_rows(
    student: MemoryForCausalLM, teacher: PreTrainedModel, stages: dict[str, Schedule], num_tokens: int
) -> Iterable[tuple[str, str]]:
    """What each stage reads, and the bytes of both models, gradients and the two moments of AdamW."""
    learn = {TRANSFER: AttentionTransfer(student, teacher), DISTILLATION: student}
    both = _count(student.parameters()) + _count(teacher.parameters())
    for name, stage in stages.items():
        if not stage.steps or (name == TRANSFER and not has_transfer(student, stage)):
            yield name, "none"
            continue
        read = stage.steps * stage.batch_size * stage.length
        size = BYTES * (both + 3 * _count(learn[name].parameters()))
        yield name, str(stage)
        yield "", f"{read:,} tokens, {read / num_tokens:.2g} times the text"
        yield "", f"{_megabytes(size)} of weights, gradients and optimizer"


def _cache_row(student: PreTrainedConfig, teacher: PreTrainedConfig, context: int) -> tuple[str, str]:
    ours, theirs = cache_bytes(student, context), cache_bytes(teacher, context)
    return (
        f"cache of {context:,} tokens",
        f"{_megabytes(ours)}, {ours / theirs:.1%} of the teacher's {_megabytes(theirs)}",
    )


def _count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(x.numel() for x in parameters)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.2f} MB"
