"""What a plan costs: memory by part, operations, and time on a device.

No formulas of layers: a layer of each kind runs on tensors without data (FakeTensorMode), and what it saves for its
backward pass and what it multiplies is counted. Other layers of its kind cost the same. What is saved is that of the
weights that learn, and with LoRA that of all. Operations are counted as if all weights learned, a little more than are
needed. Full attention counts with a mask, which real tensors may not need.
"""

import copy
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from hf_memory.conversion.plan import BYTES, Plan, Stage
from hf_memory.conversion.recipe import lora_rank_of
from hf_memory.conversion.run import Run
from hf_memory.conversion.stages.divergence import SLICE
from hf_memory.conversion.stages.fine_tuning import own_learners
from hf_memory.conversion.stages.sharding import is_sharded, processes
from hf_memory.conversion.stages.trainer import only_these_learn
from hf_memory.conversion.stages.transfer import AttentionTransfer
from hf_memory.files.ram import memory_for

TINY = 1000  # times its weights is more than a student needs
# assumed part of a device's peak that matrix products reach, all other work included
UTILISATION = 0.35
BLOCKS = 8  # of kept tokens that are counted, at least
COUNTED = "counted"  # transformers' name of the experts here
# attention of the CPU, where layers are traced
FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class Device(NamedTuple):
    """A kind of accelerator, as its data sheet describes it."""

    memory: int  # bytes
    flops: float  # operations a second in bfloat16, without sparsity


DEVICES = {
    "a100": Device(80 * 10**9, 312e12),
    "h100": Device(80 * 10**9, 989e12),
    "h200": Device(141 * 10**9, 989e12),
    "l40s": Device(48 * 10**9, 362e12),
    "rtx4090": Device(24 * 10**9, 165e12),
}


def read_device(words: str) -> tuple[int, Device]:
    """The number and the kind of devices in words such as `h100` or `8xh200`.

    Raises:
        ValueError: if the kind is not one of DEVICES.
    """
    match = re.fullmatch(r"(?:([1-9]\d*)x)?(\w+)", words.lower())
    if match is None or match[2] not in DEVICES:
        raise ValueError(
            f"gpu must be one of {', '.join(DEVICES)}, or several such as 8xh200, got {words}"
        )
    return int(match[1] or 1), DEVICES[match[2]]


class Work(NamedTuple):
    """What a forward pass does."""

    saved: float  # bytes that it saves for the backward pass
    flops: float

    def plus(self, other: "Work", times: int = 1) -> "Work":
        """The sum of this work and a multiple of another."""
        return Work(self.saved + times * other.saved, self.flops + times * other.flops)


class Cost(NamedTuple):
    """What a stage costs a process.

    Attributes:
        stage: the stage.
        parts: bytes by part of what its memory holds.
        peak: bytes at the moment when most is held. Gradients replace what was saved for them, one after the other.
        tokens: tokens that the stage reads, in all processes together.
        flops: operations of the stage, in all processes together.
    """

    stage: Stage
    parts: dict[str, int]
    peak: int
    tokens: int
    flops: float

    def seconds(
        self, device: Device, processes: int = 1, utilisation: float = UTILISATION
    ) -> float:
        """The time of the stage on so many devices."""
        return self.flops / (processes * utilisation * device.flops)


def costs(plan: Plan, training: Mapping[str, Any] = {}, *, processes: int = 1) -> list[Cost]:
    """The cost of each stage of a plan.

    Args:
        plan: the plan.
        training: training arguments of the run; `bf16`, `activation_checkpointing` and `gradient_accumulation_steps`
            change the cost.
        processes: number of processes that share rows and shard models, as with FSDP2.
    """
    return [_cost(stage, plan, training, processes) for stage in plan.stages]


def check_memory(plan: Plan, run: Run, device: torch.device) -> None:
    """Raise ValueError if a stage needs more memory than a device has for this process; other models hold theirs."""
    free = memory_for(device)
    number = processes().num_processes
    if (
        TINY * BYTES * plan.student_parameters < free
        or os.environ.get("FSDP_OFFLOAD_PARAMS", "").lower() == "true"
    ):
        return
    for cost in costs(plan, run.training, processes=number if is_sharded() else 1):
        held = sum(
            size for name, size in cost.parts.items() if name not in ("activations", "logits")
        )
        is_counted = number == 1 and not cost.stage.schedule.chunk_length  # or else needs less
        if (cost.peak if is_counted else held) > free:
            parts = ", ".join(f"{name} {size / 1e9:,.1f}" for name, size in cost.parts.items())
            raise ValueError(
                f"memory for {cost.stage.name} must be {cost.peak / 1e9:,.1f} GB ({parts}), got {free / 1e9:,.1f} GB "
                f"of {device.type}; less is needed with a smaller batch_size, length or chunk_length, with "
                "activation_checkpointing of training, a train of lora:8, or teacher_bits"
            )


def _cost(stage: Stage, plan: Plan, training: Mapping[str, Any], processes: int) -> Cost:
    half = bool(training.get("bf16"))
    again = bool(training.get("activation_checkpointing"))
    rows = max(
        1, stage.schedule.batch_size // (processes * training.get("gradient_accumulation_steps", 1))
    )
    shape = rows, stage.schedule.length
    learner = _learner(stage, plan, shape, half, again)
    teacher = Work(0, 0)
    if stage.slot == "distillation" and stage.cross_entropy < 1:
        teacher = _over_layers([plan.teacher], partial(_of_model, shape=shape, half=half))
    logits = _logits(stage, plan, shape, half)
    reads_teacher = teacher.flops > 0 or stage.slot == "transfer"
    parts = {
        "student": BYTES * plan.student_parameters // processes,
        "teacher": plan.teacher_bytes // processes if reads_teacher else 0,
        "optimizer": 2 * BYTES * stage.learned // processes,
        "gradients": BYTES * stage.learned // processes,
        "activations": round(learner.saved),
        "logits": round(logits.saved),
    }
    held = parts["student"] + parts["teacher"] + parts["optimizer"]
    peak = held + max(parts["gradients"], parts["activations"] + parts["logits"])
    read = stage.schedule.tokens
    flops = (4 if again else 3) * learner.flops + teacher.flops + logits.flops
    return Cost(stage, parts, peak, read, read / (rows * stage.schedule.length) * flops)


def _learner(stage: Stage, plan: Plan, shape: tuple[int, int], half: bool, again: bool) -> Work:
    """What learns, without a head; with activation checkpointing the inputs of its layers, and one layer."""
    student = _keeping_alike(plan.student, shape[1])
    configs = [student]
    run = partial(_of_model, shape=shape, half=half)
    if stage.slot == "transfer":
        configs = [student, plan.teacher]
        run = partial(_of_transfer, shape=shape, half=half)
    elif stage.slot == "distillation" and lora_rank_of(plan.recipe.train) is None:
        run = partial(run, train=plan.recipe.train)
    whole = _over_layers(configs, run)
    if not again:
        return whole
    inputs = _over_layers(configs, partial(run, again=True))
    return Work(
        inputs.saved + (whole.saved - inputs.saved) / plan.student.num_hidden_layers, whole.flops
    )


def _keeping_alike(config: PreTrainedConfig, length: int) -> PreTrainedConfig:
    """The config with the mean of all layers' numbers of kept tokens in each, and fewer and larger blocks.

    So layers are of fewer kinds, and are counted sooner. Queries see as many entries as before: as many tokens fewer
    are kept as there are more in a block.
    """
    kept_tokens = [x for numbers in getattr(config, "kept_tokens", ()) for x in numbers]
    if not any(kept_tokens):
        return config
    kept = round(sum(kept_tokens) / len(kept_tokens))
    config = copy.deepcopy(config)
    block = config.kept_block_size  # type: ignore[attr-defined]
    more = max(0, min(length // BLOCKS - block, kept) // block * block)  # tokens of a block
    config.num_kept_tokens = kept - more  # type: ignore[attr-defined]
    config.kept_block_size = block + more  # type: ignore[attr-defined]
    return config


def _logits(stage: Stage, plan: Plan, shape: tuple[int, int], half: bool) -> Work:
    """The head and the loss of all models that a stage runs: both logits, and gradients twice, of a slice of tokens."""
    if stage.slot == "transfer":
        return Work(0, 0)
    size = BYTES // 2 if half else BYTES
    tokens = shape[0] * shape[1]
    vocabulary = plan.student.vocab_size
    product = 2 * tokens * vocabulary * plan.student.hidden_size
    if stage.slot == "fine_tuning":  # the logits of all tokens, in float32 for the loss
        return Work(tokens * vocabulary * (2 * BYTES + size), 3 * product)
    models = 2 if stage.cross_entropy < 1 else 1
    head = BYTES * vocabulary * plan.student.hidden_size  # its gradient, summed over slices
    return Work(
        min(SLICE, tokens * vocabulary) * size * (2 + models) + head, (2 + models) * product
    )


def _over_layers(configs: Sequence[PreTrainedConfig], run: Callable[..., Work]) -> Work:
    """The work of models that are run together, from models with one layer of each kind, and with one of them twice."""
    lists = [
        # of full heads, only their number matters
        [len(x) if isinstance(x, list) else x for x in values]
        for config in configs
        for values in _per_layer(config).values()
    ]
    kinds = [tuple(values[i] for values in lists) for i in range(configs[0].num_hidden_layers)]
    places = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    once = total = run(*(_with_layers(config, places) for config in configs))
    for place in places:
        if others := kinds.count(kinds[place]) - 1:
            twice = run(*(_with_layers(config, [*places, place]) for config in configs))
            total = total.plus(twice.plus(once, -1), others)
    return total


def _per_layer(config: PreTrainedConfig) -> dict[str, list]:
    """The fields of a config that have a value for each layer."""
    return {
        name: x
        for name, x in vars(config).items()
        if isinstance(x, list) and len(x) == config.num_hidden_layers
    }


def _with_layers(config: PreTrainedConfig, layers: list[int]) -> PreTrainedConfig:
    """A config with some of the layers."""
    lists = {name: [values[i] for i in layers] for name, values in _per_layer(config).items()}
    config = copy.deepcopy(config)
    config.num_hidden_layers = len(layers)
    config.dtype = torch.float32
    for name, values in lists.items():
        setattr(config, name, values)
    return config


def _of_model(
    config: PreTrainedConfig,
    *,
    shape: tuple[int, int],
    half: bool,
    again: bool = False,
    train: str = "all",
) -> Work:
    """A model without its head, of which learns what `train` of a recipe says."""
    with FakeTensorMode():
        model = _counted(config)
        with only_these_learn(model, own_learners(model, train)):
            return _traced(model, lambda ids: model.model(ids, use_cache=False), shape, half, again)


def _counted(config: PreTrainedConfig) -> PreTrainedModel:
    """A model that can run without data, since the choice of experts does not depend on it."""
    model = AutoModelForCausalLM.from_config(config)
    model.config._experts_implementation = COUNTED
    return model


def _first_expert(experts: nn.Module, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Experts as in Qwen3-MoE, if all tokens choose the first one each time: as much work as with any other choice."""
    rows = x.repeat_interleave(chosen.shape[-1], 0)
    gate, up = F.linear(rows, experts.gate_up_proj[0]).chunk(2, -1)  # type: ignore[index]
    o = F.linear(experts.act_fn(gate) * up, experts.down_proj[0]) * weights.reshape(-1, 1)  # type: ignore[index,operator]
    return o.unflatten(0, chosen.shape).sum(1).to(x.dtype)


ALL_EXPERTS_FUNCTIONS.register(COUNTED, _first_expert)


def _of_transfer(
    student: PreTrainedConfig,
    teacher: PreTrainedConfig,
    *,
    shape: tuple[int, int],
    half: bool,
    again: bool = False,
) -> Work:
    """The mixers of a student, and its teacher without its head, whose forward pass counts as a third of one here."""
    with FakeTensorMode():
        models = [_counted(config) for config in (student, teacher)]
        transfer = AttentionTransfer(*models)  # type: ignore[arg-type]

        def errors(ids: Tensor) -> list[Tensor]:
            return [F.mse_loss(output, target) for _, output, target in transfer.outputs(ids)]

        both = _traced(transfer, errors, shape, half, again)
        alone = _traced(
            models[1], lambda ids: models[1].model(ids, use_cache=False), shape, half, False
        )
    return Work(both.saved, both.flops - alone.flops * 2 / 3)


def _traced(
    model: nn.Module, run: Callable[[Tensor], Any], shape: tuple[int, int], half: bool, again: bool
) -> Work:
    """The work of one forward pass of a model for tokens of this shape."""
    weights = {x.untyped_storage()._cdata for x in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def save(x: Tensor) -> Tensor:
        saved[x.untyped_storage()._cdata] = x.untyped_storage()
        return x

    model.train()
    if again:
        model.activation_checkpointing_enable()  # type: ignore[operator]
    ids = torch.zeros(shape, dtype=torch.long)
    fused = {FUSED: lambda query, key, value, *args, **kwargs: sdpa_flop_count(query, key, value)}
    rounded = torch.autocast("cpu", torch.bfloat16, enabled=half)
    with (
        rounded,
        saved_tensors_hooks(save, lambda x: x),
        FlopCounterMode(display=False, custom_mapping=fused) as count,
    ):
        run(ids)
    size = sum(storage.nbytes() for key, storage in saved.items() if key not in weights)
    return Work(size, count.get_total_flops())
