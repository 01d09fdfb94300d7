"""The weights that a model computes with now, whatever adapters of peft and hooks of accelerate it has."""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

WRAPPERS = re.compile(r"\.(modules_to_save|original_module|base_layer)(?=\.)")


def without_wrappers(model: Any) -> Any:
    """The model of transformers in a model of peft, or in one that `torch.compile` has made."""
    model = getattr(model, "_orig_mod", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def running_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights that a model computes with, by name: of adapters those that are active, and their scales.

    Names are the same whether a weight has an adapter beside it or not, and whatever adapters are called. Weights that
    accelerate keeps elsewhere until they are needed are read from there.
    """
    adapted = {
        name: module
        for name, module in model.named_modules()
        if getattr(module, "adapter_layer_names", ())
    }
    kinds = {kind for module in adapted.values() for kind in module.adapter_layer_names}
    of_adapter = re.compile(rf"\.({'|'.join(sorted(kinds)) or '$^'})\.[^.]+(?=\.|$)")
    idle = tuple(f"{x}." for name, module in adapted.items() for x in _idle(name, module))
    for name, weight in model.state_dict().items():
        if not f"{name}.".startswith(idle):
            plain = WRAPPERS.sub("", of_adapter.sub(r".\1", name))
            yield plain, _read(model, name) if weight.is_meta else weight
    for name, module in adapted.items():
        given = getattr(module, "scaling", None)
        scales: dict[str, float] = given if isinstance(given, dict) else {}
        for adapter in _running(module):
            if adapter in scales:
                yield f"{WRAPPERS.sub('', name)}.scaling", torch.tensor(float(scales[adapter]))


def _running(module: Any) -> list[str]:
    """The adapters that a module of peft adds to its weights as it computes."""
    is_without = module.disable_adapters or module.merged_adapters
    return [] if is_without else list(module.active_adapters)


def _idle(name: str, module: Any) -> list[str]:
    """What of a module of peft has no part in its output, by the beginning of its name."""
    running = _running(module)
    held = [(kind, x) for kind in module.adapter_layer_names for x in getattr(module, kind, ())]
    idle = [f"{name}.{kind}.{x}" for kind, x in held if x not in running]
    is_replaced = hasattr(module, "original_module") and any(x in running for _, x in held)
    return [*idle, f"{name}.original_module"] if is_replaced else idle


def _read(model: nn.Module, name: str) -> Tensor:
    """A weight that accelerate keeps on the CPU or on the disk."""
    from accelerate.utils import align_module_device  # which vLLM's environment does not have

    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    with align_module_device(module, torch.device("cpu")):
        return getattr(module, leaf).detach().clone()
