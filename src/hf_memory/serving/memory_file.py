"""Memories as files: read a long text once, save its memory, and load it in another process.

The format is safetensors. The header has the model's config, a fingerprint of its weights, the bits of states that are
packed, the number of tokens read, and a checksum.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer

from hf_memory.cache import (
    PACKED,
    MemoryLayer,
    Spec,
    State,
    check_has_layers,
    held_bits,
    hold_a_memory,
    memory_layer,
    set_bits,
)
from hf_memory.cache_argument import CACHE
from hf_memory.cache_bits import ALL_BITS, CacheBits
from hf_memory.files.fingerprints import OF_LOADING, weights_fingerprint
from hf_memory.files.folders import as_path, check_regular, replaced
from hf_memory.files.running_weights import without_wrappers
from hf_memory.mixers.base import MemoryMixer
from hf_memory.modeling.any_model import check_model
from hf_memory.modeling.base import MemoryDecoderLayer
from hf_memory.modeling.configuration import MemoryConfig
from hf_memory.ops.bits import BITS, scales

FORMAT = "hf_memory memory 3"
MOST_TOKENS = 2**31 - 1  # positions are 32-bit numbers
LARGEST = 1e19  # numbers whose squares overflow in float32 are no state
FLOATS = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)  # dtypes of states of numbers
HEADER = {"format", "model", "config", "weights", "cache_bits", "tokens_read", "layers", "checksum"}
# Fields of a config that do not change what a text leaves in a cache, apart from the bits, which the file says itself.
NOT_OF_MEMORIES = OF_LOADING | {"architectures", "cache_bits", "mixer_backend"}


def save_memory(cache: Cache, path: str | Path, model: PreTrainedModel) -> None:
    """Save the memory of what a model has read. An existing file is replaced once the new one is complete.

    Args:
        cache: a DynamicCache of the model.
        path: the file to write, by convention `*.safetensors`.
        model: the model that has filled the cache, with the adapters that were active; the file can only be loaded for
            the same model.

    Raises:
        ValueError: if the cache is not a DynamicCache of the model, or is empty, or has numbers that are not finite, or
            the model is neither of this package nor a hybrid of transformers after `use_memory_ops`.
        OSError: if the file cannot be written.
    """
    check_model("model", model)
    path = as_path("path", path)
    model = without_wrappers(model)
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
    bits = held_bits(cache)
    tokens_read = int(cache.get_seq_length())
    expected = Expected(cache, _specs(model, bits), tokens_read, bits)
    expected.check_shapes("cache", {name: list(x.shape) for name, x in tensors.items()})
    expected.check_numbers("cache", tensors)
    header = {
        "format": FORMAT,
        "model": model.config.name_or_path or type(model).__name__,
        "config": json.dumps(_fields(model.config), sort_keys=True),
        "weights": weights_fingerprint(model, torch.bfloat16),
        "cache_bits": json.dumps(dict(bits.by_kind)),
        "tokens_read": str(tokens_read),
        "layers": json.dumps(_kinds(cache)),
    }
    header["checksum"] = _checksum(header, tensors)
    try:
        with replaced(path) as partial:
            save_file(tensors, partial, metadata=header)
    except SafetensorError as error:
        raise OSError(f"could not write {path}: {error}") from error


def load_memory(path: str | Path, model: PreTrainedModel) -> DynamicCache:
    """Load a cache that `save_memory` has written, in the bits in which it was, onto the devices of the model's layers.

    Args:
        path: the file to read.
        model: the model that made the file; its config, weights and active adapters must be the same. Fields of the
            config that a later version has added must have their defaults.

    Raises:
        ValueError: if the file is damaged, is not a memory, or belongs to another model.
        OSError: if it cannot be read.
    """
    check_model("model", model)
    path = Path(path)
    model = without_wrappers(model)
    cache = _empty_cache(model)
    tensors, expected = _read(path, cache, model)
    set_bits(cache, expected.bits)
    mixers = _mixers(model)
    devices = _devices(model)
    for i, (layer, spec) in enumerate(zip(cache.layers, expected.specs, strict=True)):
        states = {
            name: tensors[f"{i}.{name}"].to(devices[i], _loaded_dtype(state, model.dtype))
            for name, state in spec.items()
        }
        if isinstance(layer, MemoryLayer):
            layer.read(spec=spec, mixer=type(mixers[i]).__name__)
            layer.fill(states, expected.tokens_read)
        else:
            _fill(layer, states, expected.tokens_read)
    return cache


def _fill(layer: Any, rows: dict[str, Tensor], tokens_read: int) -> None:
    """Give keys and values to a layer of transformers."""
    layer.lazy_initialization(rows["keys"], rows["values"])
    layer.keys = rows["keys"]
    layer.values = rows["values"]
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = tokens_read


def _loaded_dtype(state: State, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a state in a cache of a model of a dtype: float64 models have float64 where float32 is declared."""
    if state.dtype is None:
        return dtype
    is_stored_as_declared = state.bits is not None or not state.dtype.is_floating_point
    return state.dtype if is_stored_as_declared else torch.promote_types(state.dtype, dtype)


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(f"path must be a file, got the directory {path}")
    check_regular("path", path)


class Expected:
    """The states that a file or a cache must have."""

    def __init__(self, cache: Cache, specs: list[Spec], tokens_read: int, bits: CacheBits):
        self.specs = specs
        self.bits = bits
        self.tokens_read = tokens_read
        self.states = {f"{i}.{name}": x for i, spec in enumerate(specs) for name, x in spec.items()}
        self.shapes: dict[str, list[int]] = {}  # of one text
        for i, (layer, spec) in enumerate(zip(cache.layers, specs, strict=True)):
            # transformers has heads before tokens
            before = 0 if isinstance(layer, MemoryLayer) else 1
            for name, state in spec.items():
                grown = state.grown_shape(tokens_read)
                self.shapes[f"{i}.{name}"] = [*state.shape[:before], *grown, *state.shape[before:]]

    def check_shapes(self, where: Any, found: dict[str, list[int]]) -> None:
        """Raise ValueError unless states have these names, and shapes [texts, ...]."""
        if found.keys() != self.shapes.keys():
            raise ValueError(
                f"{where} must have the states {', '.join(self.shapes)}, got {', '.join(found) or 'none'}"
            )
        texts = max([1], next(iter(found.values()))[:1])
        for name, shape in found.items():
            if shape != (whole := texts + self.shapes[name]):
                raise ValueError(
                    f"{where} must have a state {name} of the shape {whole}, got {shape}"
                )

    def check_numbers(self, where: Any, tensors: dict[str, Tensor]) -> None:
        """Raise ValueError if states have numbers that reading cannot have led to."""
        for name, x in tensors.items():
            if fault := state_fault(x, self.states[name], self.tokens_read):
                raise ValueError(f"{where} must have a state {name} {fault}")


def _read(path: Path, cache: Cache, model: PreTrainedModel) -> tuple[dict[str, Tensor], Expected]:
    """The tensors of a file, and what they are; nothing is read before the metadata and all shapes are as expected."""
    _check_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            names = list(file.keys())
            _check_header(path, header, cache, model)
            bits = _bits_of(path, header)
            expected = Expected(cache, _specs(model, bits), int(header["tokens_read"]), bits)
            expected.check_shapes(path, {name: file.get_slice(name).get_shape() for name in names})
            tensors = {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or is not a memory: {error}") from error
    if header["checksum"] != _checksum(header, tensors):
        raise ValueError(f"{path} is damaged or was changed after it was written")
    expected.check_numbers(path, tensors)
    return tensors, expected


def _check_header(path: Path, header: dict[str, str], cache: Cache, model: PreTrainedModel) -> None:
    if header.get("format") != FORMAT:
        raise ValueError(
            f"{path} must have the format {FORMAT!r}, got {header.get('format')!r}; of a memory in an earlier format, "
            "read the text again"
        )
    if not header.keys() >= HEADER:
        raise ValueError(f"{path} is damaged or was changed after it was written")
    _check_model(path, header, model)
    if header["layers"] != json.dumps(_kinds(cache)):
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


def _check_model(path: Path, header: dict[str, str], model: PreTrainedModel) -> None:
    """Raise ValueError unless a file was made by a model of the same config and weights."""
    of_another = (
        f"{path} is a memory of another model or of other weights: it was made by {header['model']}"
    )
    config = _json_of(path, header, "config")
    if differing := _differing(config, model.config):
        raise ValueError(f"{of_another}, whose config has other {', '.join(differing)}")
    if header["weights"] != weights_fingerprint(model, torch.bfloat16):
        raise ValueError(f"{of_another}, or with other adapters")


def _json_of(path: Path, header: dict[str, str], name: str) -> dict[str, Any]:
    try:
        value = json.loads(header[name])
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged or was changed after it was written")
    return value


def _bits_of(path: Path, header: dict[str, str]) -> CacheBits:
    """The bits by kind in which a file has states."""
    given = _json_of(path, header, "cache_bits")
    if not all(type(bits) is int for bits in given.values()):
        raise ValueError(f"{path} is damaged or was changed after it was written")
    return CacheBits(tuple(sorted(given.items())))


def _fields(config: Any) -> dict[str, Any]:
    """The fields of a config by which memories of models differ, as JSON gives them back."""
    fields = {name: x for name, x in config.to_dict().items() if name not in NOT_OF_MEMORIES}
    return json.loads(json.dumps(fields, default=str))


def _differing(written: dict[str, Any], config: Any) -> list[str]:
    """The fields of a model's config that are others in the config that a file has.

    An earlier version had fewer fields, also within a dict: what it lacks must be a default. What this one lacks is
    left out.
    """
    fields = _fields(config)
    common = {name: written[name] for name in fields if name in written}
    if common == fields:
        return []
    other = [name for name, x in common.items() if x != fields[name] and not isinstance(x, dict)]
    if other:
        return other
    with_defaults = _fields(type(config).from_dict(common))
    return [name for name, x in fields.items() if with_defaults.get(name) != x]


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


def _devices(model: PreTrainedModel) -> dict[int, torch.device]:
    """Where the layer of a cache is computed, which accelerate may decide."""
    own = {x.layer_idx: _device(x) for x in model.modules() if hasattr(x, "layer_idx")}
    number = model.config.get_text_config(decoder=True).num_hidden_layers
    return {i: own.get(i, own[0]) for i in range(number)}  # one of our layers may run several times


def _device(module: nn.Module) -> torch.device:
    hooks = [getattr(x, "_hf_hook", None) for x in module.modules()]
    given = [getattr(hook, "execution_device", None) for hook in hooks]
    known = [torch.device(device) for device in given if device is not None]
    return known[0] if known else next(module.parameters()).device


def _empty_cache(model: PreTrainedModel) -> DynamicCache:
    """A cache whose layers are of the types that they will be of when the model has read something."""
    cache = DynamicCache(config=model.config)
    for i in _mixers(model):
        hold_a_memory(cache, i)
    return cache


def _specs(model: PreTrainedModel, bits: CacheBits) -> list[Spec]:
    """The states of each layer by name, as a cache of these bits stores them."""
    if isinstance(model.config, MemoryConfig):
        return model.config.state_specs_in(bits)
    return _specs_of_a_hybrid(model, bits)


def _specs_of_a_hybrid(model: PreTrainedModel, bits: CacheBits) -> list[Spec]:
    """The same for a hybrid of transformers, which must read a token to say its keys and values."""
    mixers: Any = _mixers(model)
    cache = _empty_cache(model)
    set_bits(cache, ALL_BITS)
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.long, device=model.device), **{CACHE: cache})
    return [
        mixers[i].spec_in(bits) if i in mixers else _seen(layer, bits)
        for i, layer in enumerate(cache.layers)
    ]


def _seen(layer: Any, bits: CacheBits) -> Spec:
    """The states of a layer of keys and values, which has read a token."""
    return {
        name: State(
            (x.shape[1], x.shape[3]), None, growth="token", kind=f"attention.{name}"
        ).stored(bits)
        for name, x in _tensors(layer)
    }


def _kinds(cache: Cache) -> list[str]:
    """The types of the layers of a cache, whatever their bits."""
    plain = {packed: kind for kind, packed in PACKED.items()}
    kinds = (type(layer) for layer in cache.layers)
    return [plain.get(kind, kind).__name__ for kind in kinds]


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
        held = layer.keys.shape[-2]
        kept = min(held, layer.sliding_window - 1)
        return [(name, x[..., held - kept :, :]) for name, x in both]
    return both


def check_layers(cache: Cache, model: PreTrainedModel) -> None:
    """Raise ValueError unless a cache has the layers that this model's DynamicCache has."""
    check_has_layers(cache, model.config.get_text_config(decoder=True).num_hidden_layers)
    kinds = _kinds(_empty_cache(model))
    given = _kinds(cache)
    if given != kinds:
        raise ValueError(
            f"cache must be a DynamicCache(config=model.config), with layers {kinds}, got {given}"
        )
