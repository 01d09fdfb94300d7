"""A loaded model becomes a student with a small cache, in memory: nothing is trained, copied or written."""

import copy
import os
from collections.abc import Callable
from os import PathLike, fspath
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from hf_memory.conversion.choosing import final_plan
from hf_memory.conversion.defaults import SIZES, shortest_text
from hf_memory.conversion.keep import Keep
from hf_memory.conversion.plan import resolve
from hf_memory.conversion.recipe import Recipe, Schedule
from hf_memory.conversion.run import Run
from hf_memory.conversion.students import student_config
from hf_memory.conversion.students.weights import share
from hf_memory.conversion.teachers import check_teacher, has_two_ropes
from hf_memory.conversion.teachers.loading import load_tokenizer
from hf_memory.files.manual import sections
from hf_memory.files.names import is_file_name
from hf_memory.files.text import Text, check_text, start_of
from hf_memory.modeling.any_model import evaluating, head_dim
from hf_memory.modeling.card import is_on_hub
from hf_memory.modeling.checks import check
from hf_memory.modeling.options import AttentionWindow
from hf_memory.modeling.transformer import MemoryTransformerConfig, MemoryTransformerForCausalLM
from hf_memory.progress import Progress

# options of a student that its teacher does not have: what heads see, and in how many bits
FOUND = (*(x for x in AttentionWindow.__annotations__ if x != "num_memory_slots"), "cache_bits")
# by which heads of two models correspond; a fine-tuned one may have more tokens
SAME_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


@torch.inference_mode(False)  # in which there would be no gradients, by which heads are chosen
def shrink_cache(
    model: PreTrainedModel,
    config: MemoryTransformerConfig | str | PathLike | None = None,
    *,
    text: str | Text | Tensor | None = None,
    tokenizer: Any = None,
    size: str | None = None,
    keep: Keep | str | None = None,
    kept_by_head: bool | None = None,
    seed: int = 0,
    report: Callable[[Progress], None] | None = None,
    **options,
) -> MemoryTransformerForCausalLM:
    """Make a student of a loaded model: with the model's weights, and with a cache that is small.

    A few key-value heads keep everything, those that the model's predictions need most; each other head keeps a window
    and some older tokens, more where predictions need them. Without `config`, this is found now, as a conversion finds
    it (docs/convert.md): for 135 million parameters in minutes of one core, for the price of some forward and backward
    passes over 2,048 tokens. `student.config.save_pretrained(folder)` saves what was found as a file of some kB,
    `student.config.push_to_hub(name)` publishes it, and with `config` it is applied again without reading anything.

    The student's parameters share the memory of the model's, and nothing is trained. So training the student in place
    changes the model, too; adapters such as LoRA do not until they are merged, and `copy.deepcopy(student)` has weights
    of its own. What `.to()` moves to another device or dtype is shared no longer.

    Args:
        model: a causal language model of a type in TEACHERS, as `AutoModelForCausalLM` loads it; it is not changed.
        config: what was found before for this model, or for one of its sizes: the config of a student, or the folder
            or Hub name of one.
        text: the text on which heads are chosen, best of the kind that the student will read: 60,000 tokens are
            plenty. A string, or tokens [T], 128 at least. Default: Python's language reference, in English.
        tokenizer: the model's tokenizer. Default: the one in the folder or repository that the model was loaded from.
        size: how much the student holds: `"near"`, `"small"`, `"smallest"` or `"constant"`. Default: see
            docs/convert.md.
        keep: the share of the heads that keeps everything, such as `"heads:1/8"`, in the words of `Keep.parse`.
        kept_by_head: whether a `num_kept_tokens` that is given is the mean of heads, which keep more or fewer; default:
            a number that is given is that of each head.
        seed: seed of the choice.
        report: is called with the progress; default: a bar for each task.
        **options: fields of `MemoryTransformerConfig`, such as `cache_bits` and `num_kept_tokens`, in place of what
            would be found, or of what `config` says.

    Returns:
        The student, on the model's device, in its dtype and ready to evaluate.

    Raises:
        ValueError: if the model cannot have a student, has changed parts (adapters, hooks, quantised weights), or an
            argument does not fit it.
        OSError: if a config or a tokenizer cannot be loaded.
    """
    _check_model(model)
    check(report is None or callable(report), "report", "None or a function", report)
    if config is not None:
        for name, given in {"text": text, "size": size, "keep": keep}.items():
            check(given is None, name, "None with a config, which says what was found", given)
        options = _found(config, model.config) | options
    recipe = Recipe(
        keep=keep,
        options=options,
        size=size,
        kept_by_head=kept_by_head,
        distillation=Schedule.with_some(steps=0),
        seed=seed,
    )
    plan = resolve(recipe, model.config)
    if not plan.is_final:
        read = _read(text, model, tokenizer)
        least = shortest_text(plan.student)
        check(len(read) >= least, "text", f"at least {least} tokens long", len(read))
        plan = plan.with_text(read)
        with evaluating(model):
            plan = final_plan(model, read, plan, Run(report=report or Bars()))
    return _sharing(plan.student, model)


class Bars:
    """Shows progress reports as bars of tqdm, as transformers does and as long as it does."""

    def __init__(self) -> None:
        self.task = ""
        self.done = 0
        self.bar: Any = None

    def __call__(self, now: Progress) -> None:
        """Advance the bar of a task, or begin one."""
        if now.task != self.task:
            self.task = now.task
            self.done = 0
            self.bar = logging.tqdm(total=now.total, desc=now.task)
        self.bar.update(now.done - self.done)
        self.done = now.done
        if now.done == now.total:
            self.bar.close()
            self.task = ""


def _check_model(model: Any) -> None:
    """Raise ValueError unless a model is what transformers computes for its config, and nothing else."""
    check_teacher("model", model)
    name = type(model).__name__
    own_class: Any = AutoModelForCausalLM._model_mapping[type(model.config)]
    is_own = type(model) is own_class
    check(is_own, "model", f"a {own_class.__name__}, which the student computes as it does", name)
    others = sorted({type(x.data).__name__ for x in model.parameters()} - {"Tensor"})
    check(not others, "model", "one whose weights are neither quantised nor sharded", others)
    is_plain = not any(x.is_inference() for x in model.parameters())
    check(
        is_plain, "model", "loaded outside torch.inference_mode(), which allows no gradients", name
    )
    is_loaded = all(x.device.type != "meta" for x in model.parameters())
    check(is_loaded, "model", "loaded whole, without weights on the meta device", name)
    devices = {str(x.device) for x in model.parameters()}
    check(len(devices) == 1, "model", "on one device", sorted(devices))
    with init_empty_weights():
        built = own_class(copy.deepcopy(model.config))
    classes = {name: type(x) for name, x in built.named_modules()}
    parts = model.named_modules()
    if changed := [name for name, x in parts if _is_changed(x) or type(x) is not classes.get(name)]:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise ValueError(
            "model must have no hooks and no replaced parts or forward, which its student would not have: remove them, "
            "or load it without device_map; got some in "
            f"{', '.join(x or 'the model itself' for x in changed[:3])}{more}"
        )


def _is_changed(module: torch.nn.Module) -> bool:
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(hooks) or "forward" in vars(module) or hasattr(module, "parametrizations")


def _found(config: PreTrainedConfig | str | PathLike, teacher: PreTrainedConfig) -> dict[str, Any]:
    """The options of a student that were found for a teacher of these sizes."""
    name = type(config).__name__
    if isinstance(config, str | PathLike):
        name = fspath(config)
        is_size = name in SIZES and not os.path.isdir(name)
        wanted = f"a folder that exists or a name on the Hub, unlike size={name!r}"
        check(not is_size, "config", wanted, name)
        config = AutoConfig.from_pretrained(name)
    is_student = isinstance(config, MemoryTransformerConfig)
    check(is_student, "config", "the config of a student, a folder or a name on the Hub", name)
    _check_sizes(config, teacher, SAME_SIZES)
    fields = (*FOUND, "max_position_embeddings") if has_two_ropes(teacher) else FOUND
    options = {x: copy.deepcopy(getattr(config, x)) for x in fields}
    _check_sizes(config, student_config(teacher, "attention", (), options), ("layer_types",))
    return options


def _check_sizes(config: Any, other: PreTrainedConfig, fields: tuple[str, ...]) -> None:
    """Raise ValueError unless a config has the same fields as one that the model has, or its student would have."""
    for field in fields:
        ours = head_dim(other) if field == "head_dim" else getattr(other, field)
        theirs = getattr(config, field)
        check(theirs == ours, f"{field} of config", f"{ours}, as in the model", theirs)


def _read(text: str | Text | Tensor | None, model: PreTrainedModel, tokenizer: Any) -> Text:
    """The text as tokens."""
    if text is not None and not isinstance(text, str):
        check_text(text, "text", "a string, ")
        return Text.of(text)
    if text is not None and is_file_name(text):
        raise ValueError(
            f"text must be the text itself, got {text!r}: is this a file? Then give Path({text!r}).read_text()"
        )
    if tokenizer is None:
        name = model.name_or_path or ""
        where = "given, or text as tokens, for a model that was not loaded from a folder or the Hub"
        check(bool(name), "tokenizer", where, None)
        tokenizer = load_tokenizer(name)
    check(callable(tokenizer), "tokenizer", "a tokenizer of transformers", tokenizer)
    words = "".join(sections()) if text is None else text
    ids = tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"]
    return Text(torch.tensor(ids), torch.tensor(start_of(tokenizer), dtype=torch.long))


def _sharing(found: PreTrainedConfig, model: PreTrainedModel) -> MemoryTransformerForCausalLM:
    """A student of this config whose parameters share the memory of a model's."""
    config: Any = copy.deepcopy(found)
    name = model.name_or_path or ""
    if is_on_hub(name):
        config.teacher_name_or_path = name
    with init_empty_weights(include_buffers=False):
        student = MemoryTransformerForCausalLM(config)
    weights = share(student, model)
    wanted = "options that add no weights, which would have to be learnt: hf-memory convert trains"
    check(not weights.new, "options", wanted, weights.new[:3])
    student.generation_config = copy.deepcopy(model.generation_config)
    return student.to(model.device).eval()  # type: ignore[arg-type]
