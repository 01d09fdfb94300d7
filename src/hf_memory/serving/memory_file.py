"""Memories as files: read a long text once, save its memory, and load it in another process.

The format is safetensors. The header has a fingerprint of the model, the number of tokens read, and a checksum.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer

from hf_memory.cache import MemoryLayer, Spec, memory_layer
from hf_memory.mixers.base import MemoryMixer
from hf_memory.modeling.base import MemoryDecoderLayer
from hf_memory.serving.rows import check_layers, held

FORMAT = "hf_memory memory 1"
HEADER = {"format", "model", "fingerprint", "tokens_seen", "layers", "checksum"}


def save_memory(cache: Cache, path: str | Path, model: PreTrainedModel) -> None:
    """Save the memory of what a model has read. An existing file is replaced once the new one is complete.

    Args:
        cache: a DynamicCache of the model.
        path: the file to write, by convention `*.safetensors`.
        model: the model that has filled the cache; the file can only be loaded for the same model.

    Raises:
        ValueError: if the cache is not a DynamicCache of the model, or is empty.
        OSError: if the file cannot be written.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"path must be a file, got the directory {path}")
    check_layers(cache, model)
    _catch_up(cache, model)
    if not all(layer.is_initialized for layer in cache.layers):
        raise ValueError("cache must have read tokens with this model, got one with an empty layer")
    tensors = {name: x.contiguous() for name, x in _states(cache)}
    header = {
        "format": FORMAT,
        "model": model.config.name_or_path or type(model).__name__,
        "fingerprint": fingerprint(model),
        "tokens_seen": str(cache.get_seq_length()),
        "layers": json.dumps([type(layer).__name__ for layer in cache.layers]),
    }
    header["checksum"] = _checksum(header, tensors)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(tensors, unfinished, metadata=header)
        os.replace(unfinished, path)
    except SafetensorError as error:
        raise OSError(f"could not write {path}: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def load_memory(path: str | Path, model: PreTrainedModel) -> DynamicCache:
    """Load a cache that `save_memory` has written, onto the device of the model.

    Args:
        path: the file to read.
        model: the model that made the file; its config and weights must be the same.

    Raises:
        ValueError: if the file is damaged, is not a memory, or belongs to another model.
        OSError: if it cannot be read.
    """
    header, tensors = _read(Path(path))
    if header["fingerprint"] != fingerprint(model):
        raise ValueError(f"{path} is a memory of another model or of other weights: it was made by {header['model']}")
    cache = DynamicCache(config=model.config)
    kinds = json.dumps([type(layer).__name__ for layer in cache.layers])
    if header["layers"] != kinds:
        raise ValueError(f"{path} must have layers {kinds}, got {header['layers']}")
    tokens_seen = int(header["tokens_seen"]) if header["tokens_seen"].isdecimal() else 0
    expected = _expected(model)
    if tokens_seen < 1 or tensors.keys() != expected.keys():
        raise ValueError(
            f"{path} must have read tokens into the states {', '.join(expected)}, got {header['tokens_seen']} tokens "
            f"in {', '.join(tensors) or 'none'}"
        )
    texts = next(iter(tensors.values())).shape[:1]
    for name, x in tensors.items():
        fault = _fault(x, [*texts, *expected[name].shape[1:]], expected[name].dtype, tokens_seen)
        if fault:
            raise ValueError(f"{path} has a state {name} that {fault}")
        tensors[name] = x.to(model.device, expected[name].dtype)
    for i, layer in enumerate(cache.layers):
        own = {n.removeprefix(f"{i}."): x for n, x in tensors.items() if n.startswith(f"{i}.")}
        if not isinstance(layer, MemoryLayer) and own["keys"].shape[-2] != held(layer, tokens_seen):
            raise ValueError(f"{path} must have the keys of {tokens_seen} tokens, got {own['keys'].shape[-2]}")
        _fill(layer, own, tokens_seen, model.config.state_specs[i])
    return cache


class _State(NamedTuple):
    """Shape and dtype of a state of one text."""

    shape: list[int | None]  # None for a size that grows with the text
    dtype: torch.dtype


@torch.no_grad()
def _expected(model: PreTrainedModel) -> dict[str, _State]:
    """The states of a model, found by reading one token and then another one."""
    cache, seen = DynamicCache(config=model.config), []
    for _ in range(2):
        model(torch.zeros(1, 1, dtype=torch.long, device=model.device), past_key_values=cache)
        seen.append({name: (x.shape, x.dtype) for name, x in _states(cache)})
    one, two = seen
    return {
        name: _State([m if m == n else None for m, n in zip(shape, two[name][0], strict=True)], dtype)
        for name, (shape, dtype) in one.items()
    }


def _fault(x: Tensor, shape: list[int | None], dtype: torch.dtype, tokens_seen: int) -> str | None:
    fits = len(x.shape) == len(shape) and all(
        n == m or (m is None and 0 < n <= tokens_seen) for n, m in zip(x.shape, shape)
    )
    if not fits:
        return f"must have the shape {shape} after {tokens_seen} tokens, got {list(x.shape)}"
    if x.is_floating_point() != dtype.is_floating_point:
        return f"must be of {dtype}, got {x.dtype}"
    return "must not be NaN" if x.isnan().any() else None


def fingerprint(model: PreTrainedModel) -> str:
    """A fingerprint of config, parameter shapes and some numbers of each parameter; equal in float32 and bfloat16."""
    config = {n: x for n, x in model.config.to_diff_dict().items() if n not in ("dtype", "transformers_version")}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        flat = parameter.detach().flatten()
        some = flat[:: max(1, flat.numel() // 16)][:16]
        digest.update(some.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    if path.is_dir():
        raise IsADirectoryError(f"path must be a file, got the directory {path}")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or is not a memory: {error}") from error
    if header.get("format") != FORMAT:
        raise ValueError(f"{path} must have the format {FORMAT!r}, got {header.get('format')!r}")
    if not header.keys() >= HEADER or header["checksum"] != _checksum(header, tensors):
        raise ValueError(f"{path} is damaged or was changed after it was written")
    return header, tensors


def _checksum(header: dict[str, str], tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps({n: x for n, x in header.items() if n != "checksum"}, sort_keys=True).encode())
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        digest.update(x.detach().cpu().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _catch_up(cache: Cache, model: PreTrainedModel) -> None:
    """Replay the remaining inputs after tokens were undone now, instead of at the next call of the model."""
    layers = [module for module in model.modules() if isinstance(module, MemoryDecoderLayer)]
    for i in range(model.config.num_hidden_layers):
        mixer = layers[i % len(layers)].mixer  # one layer may run several times
        if isinstance(mixer, MemoryMixer):
            mixer.catch_up(memory_layer(cache, i))


def _states(cache: Cache) -> Iterator[tuple[str, Tensor]]:
    for i, layer in enumerate(cache.layers):
        for name, x in _tensors(layer):
            yield f"{i}.{name}", x


def _tensors(layer) -> Iterable[tuple[str, Tensor]]:
    if isinstance(layer, MemoryLayer):
        return layer.states.items()
    both = (("keys", layer.keys), ("values", layer.values))
    if isinstance(layer, DynamicSlidingWindowLayer):  # may hold more than its window
        kept = min(layer.keys.shape[-2], layer.sliding_window - 1)
        return [(name, x[..., -kept:, :]) for name, x in both]
    return both


def _fill(layer, tensors: dict[str, Tensor], tokens_seen: int, spec: Spec) -> None:
    if isinstance(layer, MemoryLayer):
        layer.spec = spec
        layer.fill(tensors, tokens_seen)
        return
    layer.lazy_initialization(tensors["keys"], tensors["values"])
    layer.keys, layer.values = tensors["keys"], tensors["values"]
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = tokens_seen
