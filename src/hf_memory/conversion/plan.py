"""What a conversion would do and need, known from the teacher's config and the length of the text alone."""

import copy
from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hf_memory.conversion.convert import NO_FINE_TUNING, check_rankable, check_stages, has_transfer
from hf_memory.conversion.fine_tuning import FINE_TUNING, check_fine_tuning, num_learned
from hf_memory.conversion.placement import Keep, auto_count, kept_layers
from hf_memory.conversion.stages import DISTILLATION, TRANSFER, AttentionTransfer, Schedule
from hf_memory.conversion.students import make_student
from hf_memory.conversion.teacher_logits import bytes_of_logits
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
    fine_tuning: Schedule = NO_FINE_TUNING,
    lora_rank: int | None = None,
    teacher_bits: int | None = None,
    top_k: int | None = None,
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
        fine_tuning: of `convert`.
        lora_rank: of `convert`.
        teacher_bits: of a second teacher to learn from; see `load_quantized`.
        top_k: of `convert`, if the teacher's logits are saved ahead.
        **options: of the family's config.

    Raises:
        ValueError: if `convert` would not start.
    """
    check_stages(tokens, config, transfer, distillation, fine_tuning, lora_rank)
    teacher = _teacher(config)
    ranked, num_layers = auto_count(keep, config.num_hidden_layers), config.num_hidden_layers
    if ranked:
        check_rankable(_student(teacher, to, (), options), config, transfer)
    kept = range(ranked) if ranked else kept_layers(keep, num_layers)  # which of them makes no difference here
    student = _student(teacher, to, kept, options)
    transfer = transfer if has_transfer(student, config, transfer) else transfer._replace(steps=0)
    held = _bytes(student) + (_bytes(teacher) if teacher_bits is None else quantized_bytes(teacher, teacher_bits))
    learned = {
        TRANSFER: _count(AttentionTransfer(student, teacher).parameters()),
        DISTILLATION: num_learned(student, None),
        FINE_TUNING: num_learned(student, lora_rank),
    }
    stages = {TRANSFER: transfer, DISTILLATION: distillation, FINE_TUNING: fine_tuning}
    return [
        ("text", f"{len(tokens):,} tokens to learn on"),
        ("teacher", f"{config.model_type}, {_count(teacher.parameters()):,} parameters"),
        *_quantized_rows(teacher, teacher_bits),
        ("student", f"{student.config.model_type}, {_count(student.parameters()):,} parameters"),
        ("attention kept", f"{ranked} layers, to be ranked" if ranked else ", ".join(map(str, kept)) or "in no layer"),
        *([("ranking", f"first, {TRANSFER} of a student without attention")] if ranked else []),
        *_logit_rows(distillation, top_k),
        *chain.from_iterable(
            _stage_rows(name, stage, learned[name], held, len(tokens), lora_rank if name == FINE_TUNING else None)
            for name, stage in stages.items()
        ),
        *(_cache_row(student.config, teacher.config, context) for context in CONTEXTS),
    ]


def plan_fine_tuning(
    config: PreTrainedConfig, tokens: Tensor, schedule: Schedule, *, lora_rank: int | None = None
) -> list[tuple[str, str]]:
    """What `fine_tune` with these arguments would do; see `plan`.

    Args:
        config: of the model, which is held in float32.
        tokens: [T] of the text to learn on.
        schedule: of `fine_tune`.
        lora_rank: of `fine_tune`.

    Raises:
        ValueError: if `fine_tune` would not start.
    """
    check_fine_tuning(tokens, config, schedule, lora_rank)
    model = _meta(config)
    return [
        ("text", f"{len(tokens):,} tokens to learn on"),
        ("model", f"{config.model_type}, {_count(model.parameters()):,} parameters"),
        *_stage_rows(FINE_TUNING, schedule, num_learned(model, lora_rank), _bytes(model), len(tokens), lora_rank),
        *((f"cache of {context:,} tokens", _megabytes(cache_bytes(config, context))) for context in CONTEXTS),
    ]


def quantized_bytes(teacher: PreTrainedModel, bits: int) -> int:
    """Of a teacher whose linear layers but the last have weights of few bits."""
    linears = [x for x in teacher.modules() if isinstance(x, nn.Linear) and x is not teacher.get_output_embeddings()]
    return _bytes(teacher) - sum(x.weight.numel() * (8 * BYTES - bits) // 8 for x in linears)


def _quantized_rows(teacher: PreTrainedModel, bits: int | None) -> Iterable[tuple[str, str]]:
    if bits is not None:
        sizes = _megabytes(quantized_bytes(teacher, bits)), _megabytes(_bytes(teacher))
        yield f"teacher in {bits} bits", f"{sizes[0]}, beside {sizes[1]} in memory of the CPU"


def _logit_rows(distillation: Schedule, top_k: int | None) -> Iterable[tuple[str, str]]:
    if top_k is not None:
        yield "teacher's logits", f"{_megabytes(bytes_of_logits(distillation, top_k))} on disk, {top_k} tokens a place"


def _teacher(config: PreTrainedConfig) -> PreTrainedModel:
    find_teacher(config)
    return _meta(config)


def _meta(config: PreTrainedConfig) -> PreTrainedModel:
    config = copy.deepcopy(config)
    config.dtype = torch.float32
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _student(teacher: PreTrainedModel, to: str, keep: Keep, options: dict) -> MemoryForCausalLM:
    with torch.device("meta"):
        return make_student(teacher, to, keep=keep, **options)


def _stage_rows(
    name: str, stage: Schedule, learned: int, held: int, num_tokens: int, lora_rank: int | None
) -> Iterable[tuple[str, str]]:
    """What a stage reads, and the bytes of all models, gradients and the two moments of AdamW."""
    if not stage.steps:
        yield name, "none"
        return
    read = stage.steps * stage.batch_size * stage.length
    yield name, str(stage) + (f", LoRA of rank {lora_rank}" if lora_rank else "")
    yield "", f"{read:,} tokens, {read / num_tokens:.2g} times the text"
    yield "", f"{_megabytes(held + 3 * BYTES * learned)} of weights, gradients and optimizer"


def _cache_row(student: PreTrainedConfig, teacher: PreTrainedConfig, context: int) -> tuple[str, str]:
    ours, theirs = cache_bytes(student, context), cache_bytes(teacher, context)
    return (
        f"cache of {context:,} tokens",
        f"{_megabytes(ours)}, {ours / theirs:.1%} of the teacher's {_megabytes(theirs)}",
    )


def _count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(x.numel() for x in parameters)


def _bytes(*models: nn.Module) -> int:
    return BYTES * sum(_count(model.parameters()) for model in models)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.2f} MB"
