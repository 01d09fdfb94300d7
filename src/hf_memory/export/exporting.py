"""Writes a model as one of the targets, loads the result, and checks that both models compute the same logits."""

import copy
import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import CONFIG_NAME, cached_file

from hf_memory.evaluation.efficiency import empty_cache
from hf_memory.export.gguf import LAYOUTS, TOKENIZER, check_gguf, write_gguf
from hf_memory.export.parts import kept_layers
from hf_memory.export.target import Target
from hf_memory.export.targets import find_target
from hf_memory.files.folders import as_path, folder_lock, replaced, written
from hf_memory.modeling.any_model import in_eval_mode
from hf_memory.modeling.base import MemoryForCausalLM
from hf_memory.modeling.configuration import MemoryConfig
from hf_memory.modeling.loading import load_model, load_tokenizer

TOKENS = 24  # tokens of the two rows that both models read for the comparison
TOLERANCE = 1e-4  # relative to the largest logit, in float32: rounding gives 1e-5 in small models, a real fault 1e-2
TIMES_ROUNDING = 10  # deep models may differ by so many times the difference between their prefill and their decoding
IN_16_BITS = 4e-3  # tolerance if weights are rounded to 16 bits once more
MOST = 5e-3  # the largest tolerance, whatever the model's own rounding


class Export(NamedTuple):
    """The result of an export.

    Attributes:
        folder: the folder that was written.
        target: the architecture.
        engines: for each engine that has the architecture, an empty string, or the reason why it cannot run this model.
        error: largest difference between the logits of both models, relative to the largest logit.
    """

    folder: Path
    target: Target
    engines: dict[str, str]
    error: float


def export_model(
    model: MemoryForCausalLM | str | Path,
    folder: str | Path,
    target: str = "auto",
    *,
    gguf: str | Path | None = None,
) -> Export:
    """Write a model as an architecture that vLLM, SGLang, llama.cpp, MLX and transformers have.

    The result is loaded with transformers, and its logits are compared with the model's.

    Args:
        model: a causal language model of this package, or its folder or Hub name, from which the tokenizer and the chat
            template are exported too.
        folder: the folder to write to; it must not exist yet.
        target: a name in TARGETS, or `"auto"`: the first that represents the model exactly.
        gguf: a new GGUF file to write as well, for llama.cpp, with the tokenizer and in the precision of the model.

    Raises:
        NotExportable: if no target represents the model exactly; the message says which fields of its config differ.
        ValueError: if the logits differ, in a prefill or token by token; with `gguf` also if llama.cpp does not support
            the model or its tokenizer.
        OSError: if it cannot be written.
    """
    folder = as_path("folder", folder)
    file = None if gguf is None else as_path("gguf", gguf)
    _check_places(folder, file)
    with ExitStack() as claims:
        claims.enter_context(folder_lock(folder, "folder"))
        if file is not None:
            claims.enter_context(folder_lock(file, "gguf"))
        _check_places(folder, file)  # once more, now that nobody else writes there
        return _export(model, folder, target, file)


def _export(
    model: MemoryForCausalLM | str | Path, folder: Path, target: str, gguf: Path | None
) -> Export:
    """Export to places that are locked."""
    tokenizer = None
    if not isinstance(model, PreTrainedModel):
        if cached_file(str(model), TOKENIZER, _raise_exceptions_for_missing_entries=False):
            tokenizer = load_tokenizer(model)
        model = load_model(model)
    if not isinstance(model, MemoryForCausalLM):
        raise ValueError(
            f"model must be a causal language model of hf_memory, got {type(model).__name__}"
        )
    found = find_target(model.config, target)
    if gguf is not None:
        check_gguf(found, model.config, tokenizer)
    with ExitStack() as stack:
        work = stack.enter_context(
            tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent)
        )
        partial = Path(work) / folder.name
        with written("export", folder, "nothing is left there"):
            save(rewrite(model, found), partial, found, model.config)
            if tokenizer is not None:
                tokenizer.save_pretrained(partial)
            if gguf is not None:
                padded = LAYOUTS[found.name].target
                write_gguf(
                    rewrite(model, padded), padded, partial, stack.enter_context(replaced(gguf))
                )
        error = compare(model, partial)
        partial.rename(folder)
    return Export(folder, found, found.engines(model.config), error)


def _check_places(folder: Path, gguf: Path | None) -> None:
    if folder.exists():
        raise ValueError(f"folder must not exist yet, got {folder}")
    if gguf is None:
        return
    if gguf.exists() or gguf.absolute() == folder.absolute():
        raise ValueError(f"gguf must be a new file, got {gguf}")
    if not os.access(gguf.parent, os.W_OK):
        raise ValueError(
            f"gguf must be a file in a folder that exists and can be written to, got {gguf}"
        )


@torch.no_grad()
def rewrite(model: MemoryForCausalLM, target: Target) -> PreTrainedModel:
    """A model of the target's class in transformers that has our weights, on the CPU."""
    config = model.config
    layers = model.config.num_hidden_layers
    kinds = [target.layer_types[kind] for kind in config.layer_types]
    if target.needs_attention and not kept_layers(config):
        kinds.append("full_attention")
    shape = {"num_hidden_layers": len(kinds)} | (
        {"layer_types": kinds} if target.needs_attention else {}
    )
    their_config = AutoConfig.for_model(target.model_type, **target.options(config), **shape)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(their_config)
    weights = _renamed(_weights(model, target), target.names)
    for name, x in theirs.state_dict().items():
        if f".layers.{layers}." in name:  # the additional attention layer, which adds zero
            weights[name] = torch.zeros(x.shape, dtype=model.dtype)
    theirs.load_state_dict(weights, assign=True)
    theirs.tie_weights()
    theirs.generation_config = copy.deepcopy(model.generation_config)
    return theirs


def _weights(model: MemoryForCausalLM, target: Target) -> dict[str, Tensor]:
    config = model.config
    ours = {name: x.cpu() for name, x in model.state_dict().items()}
    weights = dict(target.top({name: x for name, x in ours.items() if ".layers." not in name}))
    for i, kind in enumerate(config.layer_types):
        prefix = f"model.layers.{i}."
        layer = {
            name.removeprefix(prefix): x for name, x in ours.items() if name.startswith(prefix)
        }
        mixer = {
            name.removeprefix("mixer."): layer.pop(name)
            for name in list(layer)
            if name.startswith("mixer.")
        }
        name = "self_attn"
        made = target.attention
        if kind == "memory":
            name = target.memory_name
            made = target.memory
        layer |= {f"{name}.{part}": x for part, x in made(config, mixer).items()}
        weights |= {
            prefix + name: x.contiguous() for name, x in target.block(config, layer).items()
        }
    return weights


def _renamed(weights: dict[str, Tensor], parts: Mapping[str, str]) -> dict[str, Tensor]:
    for before, after in parts.items():
        weights = {name.replace(before, after): x for name, x in weights.items()}
    return weights


def save(theirs: PreTrainedModel, folder: Path, target: Target, config: MemoryConfig) -> None:
    """Write the target's files; config.json gets additional fields that some engines need."""
    saved = {
        name: x for name, x in theirs.state_dict().items() if not name.endswith(target.unsaved)
    }
    # names of published checkpoints
    saved = _renamed(revert_weight_conversion(theirs, saved), target.file_names)
    theirs.save_pretrained(folder, state_dict=saved, save_original_format=False)
    file = folder / CONFIG_NAME
    fields = json.loads(file.read_text(encoding="utf-8"))
    fields |= target.fields(config, theirs.config)
    file.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    for name, text in target.files.items():
        (folder / name).write_text(text, encoding="utf-8")


@torch.no_grad()
@in_eval_mode
def compare(model: MemoryForCausalLM, folder: Path) -> float:
    """Largest difference of the logits relative to the largest logit, in float32, in a prefill and token by token.

    The model is evaluated, without dropout, whatever mode it is in.

    Raises:
        ValueError: if it is larger than rounding errors. Their size is estimated by the difference between a prefill
            and token-by-token decoding of our own model.
    """
    tokens = torch.randint(
        model.config.vocab_size, (2, TOKENS), generator=torch.Generator().manual_seed(0)
    )
    expected, repeated = _logits(
        model if model.dtype == torch.float32 else copy.deepcopy(model).float(), tokens
    )
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    largest = float(expected.abs().max())
    noise = float((repeated - expected).abs().max()) / largest
    error = max(float((x - expected).abs().max()) for x in _logits(theirs, tokens)) / largest
    usual = TOLERANCE if model.dtype == torch.float32 else IN_16_BITS
    rounding = min(max(usual, TIMES_ROUNDING * noise), MOST)
    if not error < rounding:
        expected = f"the model's logits up to {rounding:.0e} of the largest"
        raise ValueError(
            f"the exported model must have {expected}, got a difference of {error:.0e}"
        )
    return error


def _logits(model: PreTrainedModel, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of a prefill of all tokens, and of a prefill of one half with the other half decoded token by token."""
    tokens = tokens.to(model.device)
    parts = (tokens[:, : TOKENS // 2], *tokens[:, TOKENS // 2 :].split(1, dim=1))
    _, past = empty_cache(model)
    steps = [model(part, **past).logits for part in parts]
    return model(tokens, use_cache=False).logits.cpu(), torch.cat(steps, 1).cpu()
