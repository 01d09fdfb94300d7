"""A memory as a file: read a long text once, keep what the model remembers of it, and ask in another process.

The file is safetensors. Its header says which model made it, how many tokens it has read, and a checksum of the rest.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from hf_memory.cache import MemoryLayer

FORMAT = "hf_memory memory 1"


def save_memory(cache: Cache, path: str | Path, model: PreTrainedModel) -> None:
    """Write what a model has read so far; an older file at that place is replaced once the new one is complete.

    Args:
        cache: a DynamicCache of the model's.
        path: of the file to write, by habit `*.safetensors`.
        model: that made the cache; the file can only be loaded for one that is the same.

    Raises:
        ValueError: if the cache is not a DynamicCache of the model's, or has read nothing.
        OSError: if the file cannot be written.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"path must be a file, got the directory {path}")
    if len(cache.layers) != model.config.num_hidden_layers or not all(layer.is_initialized for layer in cache.layers):
        raise ValueError("cache must have read something with this model: a layer of it is empty or missing")
    tensors = {f"{i}.{name}": x.contiguous() for i, layer in enumerate(cache.layers) for name, x in _tensors(layer)}
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
    """The cache that `save_memory` wrote, on the device of the model.

    Args:
        path: of the file.
        model: the one that made it; its config and weights must be the same.

    Raises:
        ValueError: if the file is damaged, no memory, or another model's.
        OSError: if it cannot be read.
    """
    header, tensors = _read(Path(path))
    if header["fingerprint"] != fingerprint(model):
        raise ValueError(f"{path} is a memory of another model or of other weights: it was made by {header['model']}")
    cache = DynamicCache(config=model.config)
    kinds = [type(layer).__name__ for layer in cache.layers]
    if json.loads(header["layers"]) != kinds:
        raise ValueError(f"{path} must have layers {kinds}, got {header['layers']}")
    for i, layer in enumerate(cache.layers):
        prefix = f"{i}."
        own = {n.removeprefix(prefix): x.to(model.device) for n, x in tensors.items() if n.startswith(prefix)}
        _fill(layer, own, int(header["tokens_seen"]))
    return cache


def fingerprint(model: PreTrainedModel) -> str:
    """Of the config, all parameters' shapes and some numbers of each, the same in float32 and in bfloat16."""
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
        raise ValueError(f"{path} is damaged or no memory: {error}") from error
    if header.get("format") != FORMAT:
        raise ValueError(f"{path} must have the format {FORMAT!r}, got {header.get('format')!r}")
    if header.get("checksum") != _checksum(header, tensors):
        raise ValueError(f"{path} is damaged or was changed after it was written")
    return header, tensors


def _checksum(header: dict[str, str], tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps({n: x for n, x in header.items() if n != "checksum"}, sort_keys=True).encode())
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        digest.update(x.detach().cpu().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _tensors(layer) -> Iterable[tuple[str, Tensor]]:
    if isinstance(layer, MemoryLayer):
        return layer.states.items()
    if type(layer) is DynamicSlidingWindowLayer:  # holds more than it needs while it records
        kept = min(layer.keys.shape[-2], layer.sliding_window - 1)
        return [(name, getattr(layer, name)[..., -kept:, :]) for name in ("keys", "values")]
    if type(layer) is DynamicLayer:
        return (("keys", layer.keys), ("values", layer.values))
    raise ValueError(f"cache must be a DynamicCache of memories, keys and values, got a {type(layer).__name__}")


def _fill(layer, tensors: dict[str, Tensor], tokens_seen: int) -> None:
    if isinstance(layer, MemoryLayer):
        layer.states, layer.seen_tokens, layer.is_initialized = tensors, tokens_seen, True
        return
    layer.lazy_initialization(tensors["keys"], tensors["values"])
    layer.keys, layer.values = tensors["keys"], tensors["values"]
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = tokens_seen
