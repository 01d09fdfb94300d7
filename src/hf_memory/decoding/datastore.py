"""A datastore: a folder with a hidden state for each position of a text (the key), and the token that came next.

`keys.bin` has the keys [N, D], `tokens.bin` the tokens [N], `datastore.json` their description. If there is an
`index.faiss`, it is searched instead of all keys. Files are memory-mapped, so nothing is read before it is needed.
"""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_memory.decoding.parts import decoder_layers, feed_forward
from hf_memory.files.fingerprints import model_fingerprint
from hf_memory.files.folders import as_path, check_regular, folder_lock, replaced
from hf_memory.files.text import Text
from hf_memory.modeling.any_model import check_model, in_eval_mode
from hf_memory.modeling.checks import check
from hf_memory.progress import Progress, silent

FORMAT = "hf_memory datastore 1"
KEYS = "keys.bin"
TOKENS = "tokens.bin"
HEADER = "datastore.json"
INDEX = "index.faiss"
KEY_DTYPES = ("float16", "bfloat16", "float32", "float64")
SLICE = 2**24  # numbers that a search holds in memory at once
SAMPLE = 2**18  # keys on which an index is trained
PROBES = 32  # lists of an inverted file index that are searched


class Neighbours(NamedTuple):
    """The nearest keys of each query, nearest first; if an index finds fewer than k, other distances are infinite."""

    distances: Tensor  # [n, k], squared Euclidean
    tokens: Tensor  # [n, k], the tokens that came next


def _fault(header) -> str | None:
    """What is wrong with a datastore's description, or None."""
    if not isinstance(header, dict):
        return f"it must be an object, got {type(header).__name__}"
    for name in ("format", "module", "fingerprint", "dtype"):
        if not isinstance(header.get(name), str):
            return f"{name} must be a word, got {header.get(name)!r}"
    if header["dtype"] not in KEY_DTYPES:
        return f"dtype must be one of {', '.join(KEY_DTYPES)}, got {header['dtype']!r}"
    shape = header.get("shape")
    if (
        not isinstance(shape, list)
        or len(shape) != 2
        or not all(type(x) is int and x > 0 for x in shape)
    ):
        return f"shape must be the numbers of keys and of their channels, got {shape!r}"
    mixture = header.get("mixture", {})
    if not isinstance(mixture, dict) or not mixture.keys() <= {"weight", "temperature"}:
        return f"mixture must have a weight and a temperature, got {mixture!r}"
    if (
        not all(type(x) in (int, float) and 0 < x < math.inf for x in mixture.values())
        or mixture.get("weight", 0) >= 1
    ):
        return f"mixture must have a weight between 0 and 1 and a positive temperature, got {mixture!r}"
    return None


class Datastore:
    """A datastore in a folder that `build_datastore` has written.

    Args:
        folder: the folder.

    Raises:
        ValueError: if it is not the folder of a datastore, or is damaged.
        OSError: if it cannot be read.
    """

    def __init__(self, folder: str | Path):
        self.folder = as_path("folder", folder)
        file = self.folder / HEADER
        check_regular("datastore", file)
        if not file.exists():
            raise ValueError(
                "datastore must be a folder that build_datastore or hf-memory datastore has written, got "
                f"{folder}, which has no {HEADER}"
            )
        try:
            header = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file} is damaged; build the datastore again: {error}") from error
        if fault := _fault(header):
            raise ValueError(f"{file} is damaged; build the datastore again: {fault}")
        if header["format"] != FORMAT:
            raise ValueError(
                f"{self.folder} must have the format {FORMAT!r}, got {header['format']!r}"
            )
        self._description = header
        self.module = header["module"]
        self.fingerprint = header["fingerprint"]
        # the weight and temperature that suit it
        self.mixture: dict[str, float] = header.get("mixture", {})
        size, width = header["shape"]
        self.keys = self._mapped(KEYS, (size, width), getattr(torch, header["dtype"]))  # [N, D]
        self.tokens = self._mapped(TOKENS, (size,), torch.int32)  # [N]
        if (least := int(self.tokens.min())) < 0:
            raise ValueError(
                f"{self.folder / TOKENS} is damaged; build the datastore again: it has the token {least}"
            )
        self.index = self._read_index()

    def __len__(self) -> int:
        return len(self.tokens)

    @torch.no_grad()
    def nearest(self, queries: Tensor, k: int) -> Neighbours:
        """The k nearest keys of each query [n, D]; distances are exact also if an index is searched."""
        k = min(k, len(self))
        if self.index is None:
            found = self._search(queries, k)
        else:
            found = torch.from_numpy(self.index.search(queries.float().cpu().numpy(), k)[1]).to(
                queries.device
            )
        places = found.clamp(min=0).cpu()
        distances = [
            (query[:, None] - self.keys[near].to(query)).square().sum(-1)
            for query, near in zip(
                *(x.split(_rows(k * self.keys.shape[1])) for x in (queries, places))
            )
        ]
        tokens = self.tokens[places].long().to(queries.device)
        found_distances = torch.cat(distances).masked_fill(found < 0, torch.inf)
        if found_distances.isnan().any() and queries.isfinite().all():
            raise ValueError(
                f"{self.folder / KEYS} is damaged; build the datastore again: a key is not finite"
            )
        return Neighbours(found_distances, tokens)

    def _search(self, queries: Tensor, k: int) -> Tensor:
        """[n, k], positions of the nearest keys, by an exact search."""
        best = queries.new_empty(len(queries), 0)
        places = best.long()
        for start, keys in zip(*self._slices(max(queries.shape))):
            keys = keys.to(queries)
            far = keys.square().sum(-1) - 2 * queries @ keys.T  # without the square of the query
            near = far.topk(min(k, len(keys)), largest=False)
            both = (
                torch.cat([best, near.values], dim=1),
                torch.cat([places, near.indices + start], dim=1),
            )
            best, order = both[0].topk(min(k, both[0].shape[1]), largest=False)
            places = both[1].gather(1, order)
        return places

    def _slices(self, width: int) -> tuple[range, tuple[Tensor, ...]]:
        rows = _rows(width)
        return range(0, len(self), rows), self.keys.split(rows)

    def _mapped(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        file = self.folder / name
        count = math.prod(shape)
        check_regular(name, file)
        if file.stat().st_size != count * dtype.itemsize:
            raise ValueError(
                f"{file} must have {count * dtype.itemsize} bytes, got {file.stat().st_size}"
            )
        return torch.from_file(str(file), shared=False, size=count, dtype=dtype).view(shape)

    def _read_index(self):
        file = self.folder / INDEX
        if not file.exists():
            return None
        faiss = _faiss()
        check_regular(INDEX, file)
        try:
            index = faiss.read_index(str(file), faiss.IO_FLAG_MMAP)
        except (RuntimeError, MemoryError) as error:
            raise ValueError(
                f"{file} is damaged; delete it, or build the datastore again"
            ) from error
        if (index.ntotal, index.d) != tuple(self.keys.shape):
            given = f"of {index.ntotal} keys of {index.d} channels for {len(self)} of {self.keys.shape[1]}"
            raise ValueError(
                f"{file} is of another datastore; delete it, or build the datastore again: it is {given}"
            )
        lists = faiss.try_extract_index_ivf(index)
        if lists is not None:
            lists.nprobe = min(PROBES, lists.nlist)
        return index

    def keep_mixture(self, mixture: dict[str, float]) -> None:
        """Keep the weight and temperature that `tune` has found; `NearestNeighbours` then uses them by default."""
        self.mixture = mixture
        with replaced(self.folder / HEADER) as partial:
            partial.write_text(
                json.dumps(self._description | {"mixture": mixture}, indent=1), encoding="utf-8"
            )

    def add_index(self, description: str) -> None:
        """Add an index of faiss for the keys; see `build_datastore`."""
        faiss = _faiss()
        some = (
            torch.randperm(len(self), generator=torch.Generator().manual_seed(0))[:SAMPLE]
            .sort()
            .values
        )
        with _suits(description):
            index = faiss.index_factory(self.keys.shape[1], description)
            index.train(self.keys[some].float().numpy())
        for _, keys in zip(*self._slices(self.keys.shape[1])):
            index.add(keys.float().numpy())
        with replaced(self.folder / INDEX) as partial:
            faiss.write_index(index, str(partial))
        self.index = self._read_index()


def check_datastore(datastore: Any) -> None:
    """Raise ValueError unless an argument is a datastore, and not the name of its folder."""
    is_one = isinstance(datastore, Datastore)
    check(is_one, "datastore", "a Datastore, such as Datastore(folder)", datastore)


@torch.no_grad()
def build_datastore(
    model: PreTrainedModel,
    tokens: Text | Tensor,
    folder: str | Path,
    *,
    length: int = 1024,
    dtype: torch.dtype = torch.float16,
    module: str | None = None,
    index: str | None = None,
    report: Callable[[Progress], None] = silent,
) -> Datastore:
    """Read a text with a model, and store a key for each token together with the token that comes next.

    The key is the input of the last layer's feed-forward network, after its norm, as in https://arxiv.org/abs/1911.00172.

    Args:
        model: any causal language model of transformers.
        tokens: the text, at least two tokens.
        folder: a new folder. It has a temporary name until it is complete.
        length: tokens of the windows that the model reads. They overlap by half, so that the model has read at least
            half a window before each key, except at the beginning of the text.
        dtype: dtype of the keys.
        module: the name of the module whose input is the key; default: the last layer's feed-forward network.
        index: a description for `faiss.index_factory`, such as "IVF4096,PQ64", which needs faiss (extra `retrieval`).
            By default there is no index, and a search compares with all keys.
        report: is called with the progress.

    Raises:
        ValueError: if there are too few tokens, the folder is in use, or the model has no such module.
    """
    check_model("model", model)
    folder = as_path("folder", folder)
    text = Text.of(tokens)
    if text.tokens.ndim != 1 or len(text) < 2:
        raise ValueError(
            f"tokens must be [T] with at least two tokens, got shape {tuple(text.tokens.shape)}"
        )
    check(length >= 2, "length", "at least 2 tokens", length)
    with folder_lock(folder, "folder"):
        return _build(model, text, folder, length, dtype, module, index, report)


def _build(
    model, text: Text, folder: Path, length: int, dtype: torch.dtype, module, index, report
) -> Datastore:
    """Build a datastore in a folder that is locked."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"folder must be a new one, got {folder}, which is in use")
    module = key_module(model) if module is None else module
    width = _width(model, module)
    if index is not None:
        with _suits(index):  # before the text is read
            _faiss().index_factory(width, index)
    header = {
        "format": FORMAT,
        "module": module,
        "shape": [len(text) - 1, width],
        "dtype": str(dtype).removeprefix("torch."),
        "fingerprint": model_fingerprint(model.base_model, torch.bfloat16),
        "model": model.config.name_or_path or type(model).__name__,
    }
    with replaced(folder) as unfinished:
        unfinished.mkdir(parents=True)
        (unfinished / HEADER).write_text(json.dumps(header, indent=1), encoding="utf-8")
        _write_keys(model, text, unfinished, length, dtype, module, report)
        if index is not None:
            Datastore(unfinished).add_index(index)
    return Datastore(folder)


def key_module(model: PreTrainedModel) -> str:
    """The name of the module whose input is the key by default: the last layer's feed-forward network."""
    wanted = feed_forward(decoder_layers(model)[-1])
    if wanted is None:
        raise ValueError(
            f"module must be given for {type(model).__name__}, whose last layer has no feed-forward network; "
            "the norm before the head is a good choice"
        )
    return next(name for name, module in model.named_modules() if module is wanted)


@contextmanager
def inputs_of(model: PreTrainedModel, module: str) -> Iterator[list[Tensor]]:
    """A context with a list that holds the latest input [B, T, D] of a module.

    Raises:
        ValueError: if the model has no such module.
    """
    seen: list[Tensor] = []

    def keep(_: nn.Module, arguments: tuple, named: dict) -> None:
        seen[:] = [(arguments or tuple(named.values()))[0].detach()]

    modules = dict(model.named_modules())
    check(module in modules, "module", f"the name of a module of {type(model).__name__}", module)
    with modules[module].register_forward_pre_hook(keep, with_kwargs=True):
        yield seen


def _width(model: PreTrainedModel, module: str) -> int:
    """Channels of the input of a module, found by reading one token."""
    with inputs_of(model, module) as seen:
        model.base_model(torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)
    is_inside = bool(seen) and seen[0].ndim == 3
    check(is_inside, "module", "one that hidden states go through, inside the base model", module)
    return seen[0].shape[-1]


@in_eval_mode
def _write_keys(
    model, text: Text, folder: Path, length: int, dtype: torch.dtype, module: str, report
) -> None:
    last = len(text) - 1
    with open(folder / KEYS, "wb") as keys_file, inputs_of(model, module) as seen:
        for window, scored in windows(last, length - len(text.start)):
            read = text.begun(text.tokens[None, window]).to(model.device)
            model.base_model(read, use_cache=False)
            keys = seen[0][0, -scored:].to("cpu", dtype).contiguous()
            if not keys.isfinite().all():
                raise ValueError(
                    f"dtype must have the range of the keys, got {dtype}, in which some are infinite"
                )
            keys.view(torch.uint8).numpy().tofile(keys_file)
            report(Progress("reading into the datastore", window.stop, last, 1))
    text.tokens[1:].to("cpu", torch.int32).contiguous().numpy().tofile(folder / TOKENS)


def windows(last: int, length: int) -> Iterator[tuple[slice, int]]:
    """Windows of at most `length` of the first `last` tokens, each with the number of its tokens that are new."""
    stride = length // 2
    for start in range(0, last, stride):
        stop = min(start + stride, last)
        yield slice(max(0, start + stride - length), stop), stop - start


def _rows(width: int) -> int:
    """The number of rows of this width that a search may hold in memory."""
    return max(1, SLICE // width)


@contextmanager
def _suits(description: str) -> Iterator[None]:
    """Errors of faiss about an index as a ValueError."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).rpartition(": ")[2]
        wanted = "a description for faiss.index_factory that suits the keys"
        raise ValueError(f"index must be {wanted}, got {description!r}: {reason}") from error


def _faiss():
    try:
        import faiss
    except ImportError as error:
        raise ValueError("an index needs faiss: pip install faiss-cpu") from error
    return faiss
