"""Descriptions of a plan and of its student: for a dry run, for the model card, and for the file that repeats a run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from transformers import PreTrainedConfig

from hf_memory.conversion.choice import CONTEXT, Tried
from hf_memory.conversion.costs import UTILISATION, costs, read_device
from hf_memory.conversion.defaults import notes
from hf_memory.conversion.plan import BYTES, Plan, Stage, resolve
from hf_memory.conversion.recipe import TRAINED, counted, lora_rank_of
from hf_memory.conversion.stages.fine_tuning import FINE_TUNING
from hf_memory.conversion.stages.trainer import TRAINING
from hf_memory.conversion.stages.transfer import TRANSFER
from hf_memory.conversion.students.heads import HEAD_SCORES
from hf_memory.evaluation import bytes_per_token, cache_bytes, cache_share, layer_types
from hf_memory.evaluation.efficiency import FAR, in_16_bits
from hf_memory.export import NotExportable, find_target
from hf_memory.integrations.vllm import placement
from hf_memory.modeling.configuration import MemoryConfig

CONTEXTS = (1024, 32768)
NO_SMALLER = 0.95  # part of the teacher's cache from which on a student saves nothing
COMMANDS = {
    "transformers": "transformers serve served",
    "vLLM": "vllm serve served",
    "SGLang": "python -m sglang.launch_server --model-path served",
    "llama.cpp": "llama-server -m served.gguf",
    "MLX": "mlx_lm.server --model served --trust-remote-code",
}


def plan_rows(plan: Plan) -> list[tuple[str, str]]:
    """A plan and what it needs in time and memory, as rows of two columns."""
    chosen = (
        "" if plan.text.share == 1 else f", {plan.text.share:.0%} of them in the assistant's turns"
    )
    rows = [("text", f"{plan.num_tokens:,} tokens to learn on{chosen}")]
    if plan.recipe.to is not None:
        rows += [("teacher", f"{plan.teacher.model_type}, {plan.teacher_parameters:,} parameters")]
    if plan.recipe.teacher_bits is not None:
        whole = _megabytes(BYTES * plan.teacher_parameters)
        size = f"{_megabytes(plan.teacher_bytes)}, beside {whole} in memory of the CPU"
        rows += [(f"teacher in {plan.recipe.teacher_bits} bits", size)]
    rows += [("student", f"{plan.student.model_type}, {plan.student_parameters:,} parameters")]
    rows += [("", f"saved in float32, {_megabytes(BYTES * plan.student_parameters)}")]
    rows += _attention_rows(plan)
    rows += _option_rows(plan)
    for stage in plan.stages:
        rows += _stage_rows(stage, plan)
    if not plan.stages:
        rows += [("stages", "none")]
    rows += [_cache_row(plan, context) for context in CONTEXTS]
    if plan.recipe.to is not None:
        rows += [
            ("note", words) for words in notes(plan.given, plan.recipe, plan.teacher, plan.student)
        ]
    return rows + [("warning", words) for words in _warnings(plan)]


def _warnings(plan: Plan) -> Iterator[str]:
    """What a user may not expect of a student, a sentence for each."""
    if plan.recipe.to is None:
        return
    longest = CONTEXTS[-1]
    share = cache_share(plan.student, plan.teacher, longest)
    if share >= NO_SMALLER:
        other = "choose another --to, such as attention, whose heads have windows"
        if plan.recipe.to == "attention":
            other = "keep fewer heads or layers, or give smaller windows"
        yield f"The cache is {share:.0%} of the teacher's, so that nothing is saved: {other}."
    has_none = set(layer_types(plan.student)) == {"memory"} and not getattr(
        plan.student, "sliding_window", None
    )
    if has_none and not (plan.num_layers_to_rank or plan.num_heads_to_rank) and share < NO_SMALLER:
        yield (
            "No layer has attention, so that the student recalls little of a long text: --keep 1/4 or --keep auto "
            "keeps it in some layers."
        )


def device_rows(plan: Plan, training: Mapping[str, Any], words: str) -> list[tuple[str, str]]:
    """The memory of each stage by part, and its time, on devices such as `h100` or `8xh200`, which share a model."""
    rows, (number, device) = [], read_device(words)
    for cost in costs(plan, training, processes=number):
        parts = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in cost.parts.items() if size)
        fits = f"{cost.peak / 1e9:.1f} of {device.memory / 1e9:.0f} GB of a GPU at most"
        rows += [(f"{cost.stage.name} on {words}", fits), ("", f"GB by part: {parts}")]
        seconds = cost.seconds(device, number)
        time = f"{timedelta(seconds=round(seconds))}, {cost.tokens / seconds:,.0f} tokens/s"
        rows += [
            ("", f"{time}, if {cost.flops:.2g} operations run at {UTILISATION:.0%} of its peak")
        ]
    return rows


def fits(plan: Plan, training: Mapping[str, Any], words: str) -> bool:
    """Whether each stage fits into the memory of devices such as `h100` or `8xh200`."""
    number, device = read_device(words)
    return all(cost.peak <= device.memory for cost in costs(plan, training, processes=number))


def advice_rows(plan: Plan, training: Mapping[str, Any], words: str) -> list[tuple[str, str]]:
    """What to do if a plan does not fit on devices: measures, each in addition to those before it, with their memory.

    They come in the order of what they cost the student: the first gives the same student more slowly.
    """
    number, device = read_device(words)
    rows = list[tuple[str, str]]()
    training = dict(training)
    for measure, change in MEASURES.items():
        changed = change(plan, training)
        if changed is None:
            continue
        plan, training = changed
        peak = max((cost.peak for cost in costs(plan, training, processes=number)), default=0)
        enough = ", which fits" if peak <= device.memory else ""
        size = f"{peak / 1e9:.1f} of {device.memory / 1e9:.0f} GB{enough}"
        rows.append((f"and {measure}" if rows else measure, size))
        if enough:
            return rows
    return [
        *rows,
        ("and", f"more or larger devices than {words}, or a smaller batch_size or length"),
    ]


def _checkpointing(plan: Plan, training: dict) -> tuple[Plan, dict] | None:
    if training.get("activation_checkpointing") or any(
        x.schedule.chunk_length for x in plan.stages
    ):
        return None
    return plan, {**training, "activation_checkpointing": True}


def _half_precision(plan: Plan, training: dict) -> tuple[Plan, dict] | None:
    return (
        None if training.get("bf16") or training.get("fp16") else (plan, {**training, "bf16": True})
    )


def _few_bits(plan: Plan, training: dict) -> tuple[Plan, dict] | None:
    is_whole = plan.recipe.to is not None and plan.recipe.teacher_bits is None
    return _planned(plan, training, teacher_bits=4) if is_whole else None


def _lora(plan: Plan, training: dict) -> tuple[Plan, dict] | None:
    if plan.recipe.to is None:
        return None if plan.recipe.lora_rank else _planned(plan, training, lora_rank=8)
    return (
        _planned(plan, training, train="lora:8")
        if lora_rank_of(plan.recipe.train) is None
        else None
    )


def _planned(plan: Plan, training: dict, **options) -> tuple[Plan, dict]:
    """The plan of a recipe with other options, for the same text."""
    recipe = replace(plan.given, **options)
    return resolve(recipe, plan.teacher, plan.text), training


MEASURES: dict[str, Callable[[Plan, dict], tuple[Plan, dict] | None]] = {
    "-t activation_checkpointing=true": _checkpointing,
    "-t bf16=true": _half_precision,
    "--teacher-bits 4": _few_bits,
    "LoRA of rank 8": _lora,
}


def settings(plan: Plan, training: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that had an effect on the student, by name."""
    recipe = plan.recipe
    parts = [stage.cross_entropy for stage in plan.stages if stage.slot == "distillation"]
    named: dict[str, Any] = {"student": recipe.to}
    named |= {stage.name: str(stage.schedule) for stage in plan.stages}
    named |= {
        "temperature": recipe.temperature if parts and parts[0] < 1 else None,
        "lora_rank": recipe.lora_rank,
    }
    named |= {"train": recipe.train if parts else None}
    named |= {"cross_entropy": parts[0] if parts else None, "teacher_bits": recipe.teacher_bits}
    named |= {"keeps_everything": _kept(plan) if recipe.to else None, "seed": recipe.seed}
    named |= {"kept_by_head": recipe.kept_by_head or None}
    named |= {"goal": plan.given.goal, "servable": recipe.servable or None}
    return {name: x for name, x in named.items() if x is not None} | {**recipe.options, **training}


def story(plan: Plan) -> list[str]:
    """How a student was made, one sentence for each step."""
    told = ["It was fine-tuned on the text."]
    if plan.recipe.to is not None:
        told = ["The student started with the teacher's weights."]
        if plan.is_exact:
            told += [
                "Its new parts started with no effect, so that it equalled its teacher before any training."
            ]
        if plan.choice.tried:
            told += [goal_sentence(plan.given.goal, plan.choice.tried)]
        if plan.choice.scores:
            told += [
                f"Heads that keep everything were chosen by their {HEAD_SCORES[plan.keep.ranking]}."
            ]
        told += [_stage_sentence(stage, plan) for stage in plan.stages] or [
            "It was not trained after that."
        ]
    if plan.recipe.lora_rank:
        told += ["Fine-tuning used LoRA, which is merged into the weights."]
    return told if plan.text.share == 1 else [*told, "Losses are of the assistant's turns only."]


def goal_sentence(goal: float | None, tried: Sequence[Tried]) -> str:
    """What was measured for a goal, and what was chosen."""
    *_, chosen = tried
    return (
        f"For a KL of at most {goal:g} before training, {counted(len(tried), 'untrained student')} with more and more "
        f"cache were measured; the last one, {chosen.keep} with a window of {chosen.window} and {chosen.kept_tokens} "
        f"kept tokens in the other heads, had {chosen.kl:.3f} and {chosen.cache:.1%} of the teacher's cache at "
        f"{CONTEXT:,} tokens."
    )


def past(student: PreTrainedConfig, teacher: PreTrainedConfig) -> str:
    """A clause about the size of a student's cache in 16 bits, compared with its teacher's."""
    ours, teachers = _growth(student, teacher)
    first, last = (cache_bytes(in_16_bits(student), context) for context in (CONTEXTS[0], FAR))
    if not ours and first == last:
        return f"its cache has a fixed size of {_megabytes(last)}, however long the text is"
    if not ours:
        return f"its cache grows with the text up to {_megabytes(last)}, and no further"
    share = ours / teachers if teachers else float("inf")
    how = (
        "as fast as its teacher's"
        if f"{share:.0%}" == "100%"
        else f"at {share:.0%} of the rate of its teacher's"
    )
    return f"its cache grows with the text {how}, by {ours:,} bytes per token"


def limits(student: PreTrainedConfig, teacher: PreTrainedConfig) -> str:
    """A sentence about what a student cannot recall as its teacher does; empty if it keeps as much of each token."""
    ours, teachers = _growth(student, teacher)
    if not ours:
        return "Its past has a size that does not grow, so it recalls less of a long text than attention does."
    if ours < teachers:
        return "It keeps less of older tokens than its teacher does, so it recalls less of a long text."
    return ""


def _growth(student: PreTrainedConfig, teacher: PreTrainedConfig) -> tuple[int, int]:
    """Bytes by which the caches of both grow with each token of a long text, in 16 bits."""
    ours, teachers = (bytes_per_token(in_16_bits(x)) for x in (student, teacher))
    return ours, teachers


def ways_to_serve(config: PreTrainedConfig) -> Iterator[str]:
    """Sentences that say how a model with this config is served, and by what it is not."""
    if not isinstance(config, MemoryConfig):
        yield f"Engines that have the architecture `{config.model_type}` serve it."
        return
    try:
        target = find_target(config)
        found = target.engines(config)
        gguf = " --gguf served.gguf" if found.get("llama.cpp") == "" else ""
        commands = ", ".join(
            f"`{command}`" for name, command in COMMANDS.items() if found.get(name) == ""
        )
        yield (
            f"`hf-memory export FOLDER --output served{gguf}` writes it as `{target.model_type}` with the same logits; "
            f"then one of these serves it: {commands}."
        )
    except NotExportable:
        yield "It cannot be exported: no architecture of the engines represents it exactly."
    try:
        placement.check(config)
        yield (
            "vLLM runs it without an export, by `vllm serve FOLDER`, if hf_memory is installed in vLLM's environment, "
            "with `pip install --no-deps`."
        )
    except ValueError:
        yield "vLLM does not run it without an export."
    yield "`transformers serve FOLDER --trust-remote-code` serves it, where hf_memory is installed."


def _stage_sentence(stage: Stage, plan: Plan) -> str:
    if stage.name == TRANSFER:
        return (
            "Then each memory layer was trained to give the output of the attention layer that it replaces, on the "
            "teacher's hidden states (attention transfer)."
        )
    rank = lora_rank_of(plan.recipe.train)
    learner = (
        f"the parts that its teacher does not have, and LoRA of rank {rank} of the others, were"
    )
    learner = TRAINED.get(str(plan.recipe.train), learner)
    if stage.name == TRAINING:
        return f"Then {learner} trained on the text, without its teacher."
    if stage.name == FINE_TUNING:
        return "Finally it was fine-tuned on the text."
    mix = (
        f", and cross-entropy with the text with a weight of {stage.cross_entropy:g}"
        if stage.cross_entropy
        else ""
    )
    return (
        f"Then {learner} trained to predict what the teacher predicts "
        f"(distillation: KL divergence of the logits{mix})."
    )


def _kept(plan: Plan) -> str:
    if heads := getattr(plan.student, "full_attention_heads", None):
        named = (f"{i}/{head}" for i, kept in enumerate(heads) for head in kept)
        longest = getattr(plan.student, "full_attention_window", None)
        reach = f", of the last {longest:,} tokens" if longest else ""
        return f"key-value heads {', '.join(named)} (layer/head){reach}"
    layers = ", ".join(map(str, plan.kept_layers)) or "none"
    return layers if plan.keep.kind == "layers" else f"{layers} ({plan.keep})"


def _option_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    """The options of the student, first those that were given."""
    given = plan.given.options
    usual = [name for name in plan.recipe.options if name not in given]
    for title, names in (("options given", given), ("options by default", usual)):
        options = plan.recipe.options
        if named := [f"{name}={options[name]}" for name in names if name in options]:
            yield title, ", ".join(named)


def _attention_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    if plan.num_layers_to_rank:
        yield "attention kept", f"in {counted(plan.num_layers_to_rank, 'layer')}"
        yield "", f"ranked by their heads' {HEAD_SCORES[plan.keep.ranking]}"
    elif plan.num_heads_to_rank:
        yield "attention kept", f"in {counted(plan.num_heads_to_rank, 'key-value head')}"
        yield "", f"ranked by their {HEAD_SCORES[plan.keep.ranking]}"
    elif plan.recipe.to is not None:
        layers = ", ".join(map(str, plan.kept_layers)) or "in no layer"
        yield (
            "attention kept",
            _kept(plan) if getattr(plan.student, "full_attention_heads", None) else layers,
        )
        if plan.is_exact:
            yield "start", "equal to the teacher, so that there is no attention transfer"
    if kept := _kept_tokens(plan.student):
        mean = round(sum(kept) / len(kept))
        is_mean = plan.recipe.kept_by_head or len(set(kept)) > 1
        more = " in the mean, more where predictions need them" if is_mean else ""
        yield (
            "older tokens kept",
            f"{mean} of each head{more}, beside a window of {plan.student.sliding_window}",
        )
    if bits := getattr(plan.student, "cache_bits", None):
        given = bits if isinstance(bits, dict) else {"all keys and values": bits}
        yield "bits of the cache", ", ".join(f"{kind}: {x}" for kind, x in given.items())


def _kept_tokens(student: Any) -> list[int]:
    """The number of older tokens that each key-value head with a window keeps, if it keeps some."""
    full = getattr(student, "full_attention_heads", None) or [[]] * student.num_hidden_layers
    kinds = getattr(student, "layer_types", None) or ()
    layers = zip(kinds, getattr(student, "kept_tokens", ()), full)
    return [
        number
        for kind, numbers, heads in layers
        for head, number in enumerate(numbers)
        if kind == "sliding_heads" and head not in heads and number
    ]


def _stage_rows(stage: Stage, plan: Plan) -> Iterator[tuple[str, str]]:
    """The tokens that a stage reads, and the bytes of all models, gradients and both moments of AdamW."""
    schedule = stage.schedule
    held = BYTES * plan.student_parameters + plan.teacher_bytes
    read = schedule.tokens
    yield (
        stage.name,
        str(schedule) + (f", LoRA of rank {stage.lora_rank}" if stage.lora_rank else ""),
    )
    if 0 < stage.cross_entropy < 1:
        yield "", f"cross-entropy with the text has a weight of {stage.cross_entropy:g} in the loss"
    times = read / plan.num_tokens
    rounded = f"{times:,.0f}" if times >= 10 else f"{times:.2g}"
    yield "", f"{read:,} tokens, {rounded} times the text"
    yield "", f"{_megabytes(held + 3 * BYTES * stage.learned)} of weights, gradients and optimizer"


def _cache_row(plan: Plan, context: int) -> tuple[str, str]:
    name = f"cache of {context:,} tokens"
    ours = _megabytes(cache_bytes(in_16_bits(plan.student), context))
    if plan.recipe.to is None:
        return name, ours
    share = cache_share(plan.student, plan.teacher, context)
    theirs = _megabytes(cache_bytes(in_16_bits(plan.teacher), context))
    return name, f"{ours}, {share:.1%} of the teacher's {theirs} in 16 bits"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.2f} MB"
