"""A plan in words: for a dry run, for the card of a model, and for the file that repeats a run."""

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig

from hf_memory.conversion.plan import BYTES, Plan, Stage
from hf_memory.conversion.stages.fine_tuning import FINE_TUNING
from hf_memory.conversion.stages.logits import bytes_of_logits
from hf_memory.conversion.stages.trainer import TRAINING
from hf_memory.conversion.stages.transfer import TRANSFER
from hf_memory.evaluation import bytes_per_token, cache_bytes
from hf_memory.evaluation.efficiency import FAR

CONTEXTS = (1024, 32768)


def plan_rows(plan: Plan) -> list[tuple[str, str]]:
    """What will be done and what it needs, as rows of two columns."""
    rows = [("text", f"{plan.num_tokens:,} tokens to learn on")]
    if plan.recipe.to is not None:
        rows += [("teacher", f"{plan.teacher.model_type}, {plan.teacher_parameters:,} parameters")]
        rows += _quantized_row(plan)
    rows += [("student", f"{plan.student.model_type}, {plan.student_parameters:,} parameters")]
    rows += _attention_rows(plan)
    if plan.top_k is not None:
        size = _megabytes(bytes_of_logits(plan.recipe.distillation, plan.top_k))
        rows += [("teacher's logits", f"{size} on disk, {plan.top_k} tokens a place")]
    for stage in plan.stages:
        rows += _stage_rows(stage, plan)
    if not plan.stages:
        rows += [("stages", "none")]
    return rows + [_cache_row(plan, context) for context in CONTEXTS]


def settings(plan: Plan, training: Mapping[str, Any]) -> dict[str, Any]:
    """What was set, by name, and nothing that had no part in it."""
    recipe = plan.recipe
    parts = [stage.cross_entropy for stage in plan.stages if stage.slot == "distillation"]
    named: dict[str, Any] = {"student": recipe.to}
    named |= {stage.name: str(stage.schedule) for stage in plan.stages}
    named |= {"temperature": recipe.temperature if parts and parts[0] < 1 else None, "lora_rank": recipe.lora_rank}
    named |= {"cross_entropy": parts[0] if parts else None, "teacher_bits": recipe.teacher_bits, "top_k": plan.top_k}
    named |= {"kept_layers": _kept(plan) if recipe.to else None, "seed": recipe.seed}
    return {name: x for name, x in named.items() if x is not None} | {**recipe.options, **training}


def story(plan: Plan) -> list[str]:
    """How a student came about, a sentence for each thing that was done."""
    if plan.recipe.to is None:
        return ["It went on to learn the text itself.", _of_lora(plan)]
    start = "The student has the teacher's weights, carried over by name."
    if plan.is_exact:
        start += " What it has beside them starts closed, so that it was its teacher before any training."
    stages = [_stage_sentence(stage, plan) for stage in plan.stages]
    return [start, *(stages or ["It has learned nothing since then."]), _of_lora(plan)]


def past(student: PreTrainedConfig, teacher: PreTrainedConfig) -> str:
    """What a model's past is: of one size, or growing as its teacher's does."""
    grows, first, last = bytes_per_token(student), *(cache_bytes(student, context) for context in (CONTEXTS[0], FAR))
    if not grows and first == last:
        return f"its past is a memory of one size, {_megabytes(last)}, however much it has read"
    if not grows:
        return f"its past grows with the text up to {_megabytes(last)}, and no further"
    teachers = bytes_per_token(teacher)
    share = grows / teachers if teachers else float("inf")
    how = "as its teacher's does" if share == 1 else f"{share:.0%} as fast as its teacher's"
    return f"its past is a cache that grows with the text, {how}: {grows:,} bytes a token"


def _stage_sentence(stage: Stage, plan: Plan) -> str:
    if stage.name == TRANSFER:
        return (
            "Then each memory layer learned what its attention layer gave, on the teacher's own hidden states "
            "(attention transfer)."
        )
    if stage.name == TRAINING:
        return "Then the whole student learned the text itself, and nothing from its teacher."
    if stage.name == FINE_TUNING:
        return "At last it learned the text itself (fine-tuning)."
    source = f"its {plan.top_k} most likely tokens at each place, " if plan.top_k else ""
    mix = f", with {stage.cross_entropy:g} of the loss the text's own" if stage.cross_entropy else ""
    return f"Then the whole student learned the teacher's predictions ({source}KL divergence of the logits{mix})."


def _of_lora(plan: Plan) -> str:
    return "Fine-tuning learned low-rank updates, which are merged." if plan.recipe.lora_rank else ""


def _kept(plan: Plan) -> str:
    if heads := getattr(plan.student, "full_attention_heads", None):
        named = (f"{i}/{head}" for i, kept in enumerate(heads) for head in kept)
        longest = getattr(plan.student, "full_attention_window", None)
        reach = f", of the last {longest:,} tokens" if longest else ""
        return f"key-value heads {', '.join(named)} (layer/head){reach}"
    layers, words = ", ".join(map(str, plan.kept)) or "none", plan.recipe.keep
    is_said = not isinstance(words, str) or words == layers.replace(" ", "")
    return layers if is_said else f"{layers} ({words})"


def _attention_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    if plan.ranked:
        yield "attention kept", f"{plan.ranked} layers, to be ranked"
        yield "ranking", f"first, {TRANSFER} of a student without attention"
    elif plan.ranked_heads:
        yield "attention kept", f"in {plan.ranked_heads} key-value heads, chosen by one reading of the teacher"
    elif plan.recipe.to is not None:
        yield "attention kept", ", ".join(map(str, plan.kept)) or "in no layer"
        if plan.is_exact:
            yield "start", "the teacher itself, so that there is no attention transfer"


def _quantized_row(plan: Plan) -> Iterator[tuple[str, str]]:
    if plan.bits is not None:
        whole = _megabytes(BYTES * plan.teacher_parameters)
        yield f"teacher in {plan.bits} bits", f"{_megabytes(plan.teacher_bytes)}, beside {whole} in memory of the CPU"


def _stage_rows(stage: Stage, plan: Plan) -> Iterator[tuple[str, str]]:
    """What a stage reads, and the bytes of all models, gradients and the two moments of AdamW."""
    schedule, held = stage.schedule, BYTES * plan.student_parameters + plan.teacher_bytes
    read = schedule.steps * schedule.batch_size * schedule.length
    yield stage.name, str(schedule) + (f", LoRA of rank {stage.lora_rank}" if stage.lora_rank else "")
    if 0 < stage.cross_entropy < 1:
        yield "", f"{stage.cross_entropy:g} of the loss is the text's own"
    yield "", f"{read:,} tokens, {read / plan.num_tokens:.2g} times the text"
    yield "", f"{_megabytes(held + 3 * BYTES * stage.learned)} of weights, gradients and optimizer"


def _cache_row(plan: Plan, context: int) -> tuple[str, str]:
    name, ours = f"cache of {context:,} tokens", cache_bytes(plan.student, context)
    if plan.recipe.to is None:
        return name, _megabytes(ours)
    theirs = cache_bytes(plan.teacher, context)
    return name, f"{_megabytes(ours)}, {ours / theirs:.1%} of the teacher's {_megabytes(theirs)}"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.2f} MB"
