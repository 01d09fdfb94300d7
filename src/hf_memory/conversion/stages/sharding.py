"""Stages in several processes. Models are whole between stages; within a stage FSDP2 shards copies of them.

`accelerate launch` configures FSDP by environment variables. Without FSDP, or in one process, nothing is copied.
"""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from accelerate import PartialState
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

Model = TypeVar("Model", bound=nn.Module)


def processes() -> PartialState:
    """The processes of this run; the first call connects them. Without a launcher there is only one."""
    return PartialState(cpu=not torch.cuda.is_available())


def is_sharded() -> bool:
    """Whether models are sharded over several processes within a stage."""
    return (
        os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
        and processes().num_processes > 1
    )


def whole(x: Tensor) -> Tensor:
    """The whole of a tensor. If it is sharded, all processes must call this."""
    return x.full_tensor() if isinstance(x, DTensor) else x


@contextmanager
def sharded_teacher(teacher: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """The teacher, sharded over the processes; each holds its share and one layer. A quantised one stays whole."""
    if not is_sharded() or getattr(teacher, "is_quantized", False):
        yield teacher
        return
    state = processes()
    mixed = os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16"
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if mixed else MixedPrecisionPolicy()
    mesh = init_device_mesh(state.device.type, (state.num_processes,))
    with _on_cpu(teacher):
        twin = _twin(teacher)
        for part in (*twin.model.layers, twin):
            fully_shard(part, mesh=mesh, mp_policy=policy)
        yield twin


@contextmanager
def sharded_learner(model: nn.Module) -> Iterator[nn.Module]:
    """A copy of `model` for the Trainer to shard, as a context; in the end, trained weights are copied to `model`."""
    if not is_sharded():
        yield model
        return
    with _on_cpu(model):
        learner = _twin(model)
        yield learner
        with torch.no_grad():
            for x, learned in zip(model.parameters(), learner.parameters(), strict=True):
                x.copy_(whole(learned))


@contextmanager
def _on_cpu(model: nn.Module) -> Iterator[None]:
    device = next(model.parameters()).device
    model.cpu()
    yield
    model.to(device)


def _twin(model: Model) -> Model:
    """A second model with the same weights; the first stays whole when the second is sharded."""
    same = {id(x): nn.Parameter(x.data, requires_grad=x.requires_grad) for x in model.parameters()}
    return copy.deepcopy(model, same)
