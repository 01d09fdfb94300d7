"""Memories as files: read a long text once, save its memory, and load it in another process.

The format is safetensors. The header has a fingerprint of the model, the number of tokens read, and a checksum.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from hf_memory.cache import (
    DynamicLayerInBits as LayerInBits,
)
from hf_memory.cache import (
    MemoryLayer,
    Spec,
    State,
    hold_a_memory,
    memory_layer,
)
from hf_memory.cache_argument import CACHE
from hf_memory.files.fingerprints import model_fingerprint
from hf_memory.files.folders import check_regular, replaced
from hf_memory.mixers.base import MemoryMixer
from hf_memory.modeling.base import MemoryDecoderLayer

bits_by_kind = None
from hf_memory.modeling.configuration import MemoryConfig
from hf_memory.ops.bits import BITS, scales

FORMAT = "hf_memory memory 2"
MOST_TOKENS = 2**31 - 1  # positions are 32-bit numbers
LARGEST = 1e19  # numbers whose squares overflow in float32 are no state
FLOATS = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)  # dtypes of states of numbers
HEADER = {"format", "model", "fingerprint", "tokens_read", "layers", "checksum"}


def save_memory(cache: Cache, path: str | Path, model: PreTrainedModel) -> None:
    """Save the memory of what a model has read. An existing file is replaced once the new one is complete.

    Args:
        cache: a DynamicCache of the model.
        path: the file to write, by convention `*.safetensors`.
        model: the model that has filled the cache; the file can only be loaded for the same model.

    Raises:
        ValueError: if the cache is not a DynamicCache of the model, or is empty, or the model is neither of this
            package nor a hybrid of transformers after `use_memory_ops`.
        OSError: if the file cannot be written.
    """
    path = Path(path)
    _check_file(path)
    check_layers(cache, model)
    for i, mixer in _mixers(model).items():  # replay what stays after tokens were undone
        memory = memory_layer(cache, i)
        if memory.is_behind:
            mixer.catch_up(memory)
    if not all(layer.is_initialized for layer in cache.layers):
        raise ValueError("cache must have read tokens with this model, got one with an empty layer")
    tensors = {
        f"{i}.{name}": x.contiguous()
        for i, layer in enumerate(cache.layers)
        for name, x in _tensors(layer)
    }
    header = {
        "format": FORMAT,
        "model": model.config.name_or_path or type(model).__name__,
        "fingerprint": _fingerprint(model),
        "bits": json.dumps(_bits(model)),
        "tokens_read": str(cache.get_seq_length()),
        "layers": _kinds(cache),
    }
    header["checksum"] = _checksum(header, tensors)
    try:
        with replaced(path) as partial:
            save_file(tensors, partial, metadata=header)
    except SafetensorError as error:
        raise OSError(f"could not write {path}: {error}") from error


def load_memory(path: str | Path, model: PreTrainedModel) -> DynamicCache:
    """Load a cache that `save_memory` has written, onto the device of the model.

    Args:
        path: the file to read.
        model: the model that made the file; its config and weights must be the same.

    Raises:
        ValueError: if the file is damaged, is not a memory, or belongs to another model.
        OSError: if it cannot be read.
    """
    path = Path(path)
    cache = _empty_cache(model)
    specs = _specs(model)
    header, tensors = _read(path, cache, specs, model)
    tokens_read = int(header["tokens_read"])
    for i, (layer, spec) in enumerate(zip(cache.layers, specs, strict=True)):
        own = {name: tensors[f"{i}.{name}"] for name in spec}
        for name, x in own.items():
            if fault := state_fault(x, spec[name], tokens_read):
                raise ValueError(f"{path} must have a state {i}.{name} {fault}")
            own[name] = x.to(model.device, spec[name].dtype or model.dtype)
        if isinstance(layer, MemoryLayer):
            layer.spec = spec
            layer.fill(own, tokens_read)
        else:
            layer.lazy_initialization(own["keys"], own["values"])
            layer.keys = own["keys"]
            layer.values = own["values"]
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = tokens_read
    return cache


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(f"path must be a file, got the directory {path}")
    check_regular("path", path)


def _read(
    path: Path, cache: Cache, specs: list[Spec], model: PreTrainedModel
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and the tensors of a file; nothing is read before the metadata and all shapes are those expected."""
    _check_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            names = list(file.keys())
            _check_header(path, header, cache, model)
            found = {name: file.get_slice(name).get_shape() for name in names}
            expected = _expected(cache, specs, int(header["tokens_read"]))
            if found.keys() != expected.keys():
                raise ValueError(
                    f"{path} must have the states {', '.join(expected)}, got {', '.join(found) or 'none'}"
                )
            texts = max([1], next(iter(found.values()))[:1])
            for name, shape in found.items():
                if shape != (whole := texts + expected[name]):
                    raise ValueError(
                        f"{path} must have a state {name} of the shape {whole}, got {shape}"
                    )
            tensors = {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or is not a memory: {error}") from error
    if header["checksum"] != _checksum(header, tensors):
        raise ValueError(f"{path} is damaged or was changed after it was written")
    return header, tensors


def _check_header(path: Path, header: dict[str, str], cache: Cache, model: PreTrainedModel) -> None:
    if header.get("format") != FORMAT:
        raise ValueError(f"{path} must have the format {FORMAT!r}, got {header.get('format')!r}")
    if not header.keys() >= HEADER:
        raise ValueError(f"{path} is damaged or was changed after it was written")
    if header["fingerprint"] != _fingerprint(model):
        raise ValueError(
            f"{path} is a memory of another model or of other weights: it was made by {header['model']}"
        )
    bits = header.get("bits", "null")
    if bits != json.dumps(_bits(model)):
        raise ValueError(
            f"{path} holds a memory of cache_bits={bits}, got a model of cache_bits={_bits(model)}: set "
            "cache_bits of the model's config to that of the file, or read the text again"
        )
    if header["layers"] != _kinds(cache):
        raise ValueError(f"{path} must have layers {_kinds(cache)}, got {header['layers']}")
    given = header["tokens_read"]
    if (
        not given.isdecimal()
        or len(given) > len(str(MOST_TOKENS))
        or not 0 < int(given) <= MOST_TOKENS
    ):
        raise ValueError(
            f"{path} must have read from 1 to {MOST_TOKENS} tokens, got {given[:40]} tokens"
        )


def _expected(cache: Cache, specs: list[Spec], tokens_read: int) -> dict[str, list[int]]:
    """The shape of each state of a text; keys and values of transformers' own layers have tokens after heads."""
    shapes = {}
    for i, (layer, spec) in enumerate(zip(cache.layers, specs, strict=True)):
        for name, state in spec.items():
            before = 0 if isinstance(layer, MemoryLayer) else 1
            shapes[f"{i}.{name}"] = [
                *state.shape[:before],
                *state.grown_shape(tokens_read),
                *state.shape[before:],
            ]
    return shapes


def state_fault(x: Tensor, state: State, tokens_read: int) -> str | None:
    """What a state must be, if its numbers are none that reading can have led to."""
    if state.bits in BITS and x.dtype == state.dtype:
        is_finite = scales(x.contiguous(), state.bits).isfinite().all()
        return None if is_finite else "with finite scales, got others"
    declared = state.dtype or torch.float32
    if x.dtype not in (FLOATS if declared.is_floating_point else (declared,)):
        return f"of {declared}, got {x.dtype}"
    if x.is_floating_point():
        return (
            None
            if (x.abs() <= LARGEST).all()
            else f"of finite numbers, at most {LARGEST:.0e}, got others"
        )
    largest = tokens_read if state.largest is None else state.largest
    is_possible = ((x >= state.absent) & (x <= largest)).all()
    return (
        None
        if is_possible
        else f"of numbers from {state.absent} to {largest}, got {x.min()} to {x.max()}"
    )


def _mixers(model: PreTrainedModel) -> dict[int, MemoryMixer]:
    """The mixers whose states are memories, by the layer of a cache; one of our layers may run several times."""
    layers = [module for module in model.modules() if isinstance(module, MemoryDecoderLayer)]
    if not layers:
        return _mixers_of_a_hybrid(model)
    number = model.config.num_hidden_layers
    mixers = {i: layers[i % len(layers)].mixer for i in range(number)}
    return {i: mixer for i, mixer in mixers.items() if isinstance(mixer, MemoryMixer)}


def _mixers_of_a_hybrid(model: PreTrainedModel) -> dict[int, MemoryMixer]:
    mixers = {x.layer_idx: x for x in model.modules() if isinstance(x, MemoryMixer)}
    if not mixers:
        raise ValueError(
            "model must be of this package, or a hybrid of transformers after use_memory_ops(model), got "
            f"{type(model).__name__}"
        )
    return mixers


def _empty_cache(model: PreTrainedModel) -> DynamicCache:
    """A cache whose layers are of the types that they will be of when the model has read something."""
    cache = DynamicCache(config=model.config)
    for i in _mixers(model):
        hold_a_memory(cache, i)
    bits = bits_by_kind(_bits(model), "attention")
    if bits is not None and not isinstance(model.config, MemoryConfig):
        for i, layer in enumerate(cache.layers):
            if isinstance(layer, DynamicLayer):
                hold_in_bits(cache, i, bits)
    return cache


def _specs(model: PreTrainedModel) -> list[Spec]:
    """The states of each layer by name; a hybrid of transformers, whose config does not say it, reads a token."""
    if isinstance(model.config, MemoryConfig):
        return model.config.state_specs
    cache = _empty_cache(model)
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.long, device=model.device), **{CACHE: cache})
    return [
        layer.spec if isinstance(layer, MemoryLayer) else _seen(layer) for layer in cache.layers
    ]


def _seen(layer: Any) -> Spec:
    """The states of a layer of keys and values, which has read a token."""
    if isinstance(layer, LayerInBits):
        what = {"dtype": torch.uint8, "largest": 255, "bits": layer.bits}
    else:
        what = {"dtype": None}
    return {
        name: State((x.shape[1], x.shape[3]), growth="token", **what) for name, x in _tensors(layer)
    }


def _bits(model: PreTrainedModel) -> Any:
    if isinstance(model.config, MemoryConfig):
        return model.config.cache_bits
    return next(iter(_mixers(model).values())).cache_bits


def _fingerprint(model: PreTrainedModel) -> str:
    """A fingerprint of what made a file, without the bits of its numbers, which the file says itself."""
    return model_fingerprint(model, torch.bfloat16, without={"cache_bits"})


def _kinds(cache: Cache) -> str:
    return json.dumps([type(layer).__name__ for layer in cache.layers])


def _checksum(header: dict[str, str], tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(
        json.dumps({n: x for n, x in header.items() if n != "checksum"}, sort_keys=True).encode()
    )
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        digest.update(x.detach().cpu().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _tensors(layer) -> Iterable[tuple[str, Tensor]]:
    if isinstance(layer, MemoryLayer):
        return layer.states.items()
    both = (("keys", layer.keys), ("values", layer.values))
    if isinstance(layer, DynamicSlidingWindowLayer):  # may hold more than its window
        kept = min(layer.keys.shape[-2], layer.sliding_window - 1)
        return [(name, x[..., -kept:, :]) for name, x in both]
    return both


def check_layers(cache: Cache, model: PreTrainedModel) -> None:
    """Raise ValueError unless a cache has the layers that this model's DynamicCache has."""
    kinds = [type(layer).__name__ for layer in _empty_cache(model).layers]
    given = [type(layer).__name__ for layer in cache.layers]
    if given != kinds:
        raise ValueError(
            f"cache must be a DynamicCache(config=model.config), with layers {kinds}, got {given}"
        )
