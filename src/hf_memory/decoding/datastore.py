"""A datastore: what a model made of each place of a text, and the token that came next. It is a folder on disk.

`keys.bin` has the keys [N, D], `tokens.bin` the tokens [N], `datastore.json` says what they are, and `index.faiss`, if
it is there, is searched instead of all keys. Nothing is read before it is needed: files are mapped into memory.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_memory.decoding.parts import decoder_layers, feed_forward
from hf_memory.progress import Progress, silent
from hf_memory.serving.memory_file import fingerprint

FORMAT = "hf_memory datastore 1"
KEYS, TOKENS, HEADER, INDEX = "keys.bin", "tokens.bin", "datastore.json", "index.faiss"
SLICE = 2**24  # numbers that a search holds at a time
SAMPLE = 2**18  # keys from which an index learns
PROBES = 32  # lists of an inverted file that are searched


class Neighbours(NamedTuple):
    """What is nearest to each query, nearest first; where an index finds fewer than k, the distance is infinite."""

    distances: Tensor  # [n, k], squared Euclidean
    tokens: Tensor  # [n, k], that came next


class Datastore:
    """Keys and tokens of a folder that `build_datastore` has made.

    Raises:
        ValueError: if the folder is none or is damaged.
        OSError: if it cannot be read.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        header = self._header()
        self.module, self.fingerprint = header["module"], header["fingerprint"]
        size, width = header["shape"]
        self.keys = self._mapped(KEYS, (size, width), getattr(torch, header["dtype"]))  # [N, D]
        self.tokens = self._mapped(TOKENS, (size,), torch.int32)  # [N]
        self.index = self._read_index()

    def __len__(self) -> int:
        return len(self.tokens)

    @torch.no_grad()
    def nearest(self, queries: Tensor, k: int) -> Neighbours:
        """The k nearest keys of each query [n, D]; distances are exact, whatever found them."""
        find = self._search if self.index is None else self._ask_index
        found = find(queries, min(k, len(self)))
        places = found.clamp(min=0).cpu()
        distances = [
            (query[:, None] - self.keys[near].to(query)).square().sum(-1)
            for query, near in zip(*(x.split(_rows(k * self.keys.shape[1])) for x in (queries, places)))
        ]
        tokens = self.tokens[places].long().to(queries.device)
        return Neighbours(torch.cat(distances).masked_fill(found < 0, torch.inf), tokens)

    def _search(self, queries: Tensor, k: int) -> Tensor:
        """[n, k] places of the nearest keys, found by looking at all of them."""
        best = queries.new_empty(len(queries), 0)
        places = best.long()
        for start, keys in zip(*self._slices(max(queries.shape))):
            keys = keys.to(queries)
            far = keys.square().sum(-1) - 2 * queries @ keys.T  # less the query's own square
            near = far.topk(min(k, len(keys)), largest=False)
            both = torch.cat([best, near.values], dim=1), torch.cat([places, near.indices + start], dim=1)
            best, order = both[0].topk(min(k, both[0].shape[1]), largest=False)
            places = both[1].gather(1, order)
        return places

    def _slices(self, width: int) -> tuple[range, tuple[Tensor, ...]]:
        rows = _rows(width)
        return range(0, len(self), rows), self.keys.split(rows)

    def _ask_index(self, queries: Tensor, k: int) -> Tensor:
        _, places = self.index.search(queries.float().cpu().numpy(), k)
        return torch.from_numpy(places).to(queries.device)

    def _header(self) -> dict[str, Any]:
        try:
            header = json.loads((self.folder / HEADER).read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{self.folder / HEADER} is damaged: {error}") from error
        if header.get("format") != FORMAT:
            raise ValueError(f"{self.folder} must have the format {FORMAT!r}, got {header.get('format')!r}")
        return header

    def _mapped(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        file, count = self.folder / name, torch.Size(shape).numel()
        if file.stat().st_size != count * dtype.itemsize:
            raise ValueError(f"{file} must have {count * dtype.itemsize} bytes, got {file.stat().st_size}")
        return torch.from_file(str(file), shared=False, size=count, dtype=dtype).view(shape)

    def _read_index(self):
        file = self.folder / INDEX
        if not file.exists():
            return None
        faiss = _faiss()
        index = faiss.read_index(str(file), faiss.IO_FLAG_MMAP)
        lists = faiss.try_extract_index_ivf(index)
        if lists is not None:
            lists.nprobe = min(PROBES, lists.nlist)
        return index

    def add_index(self, description: str) -> None:
        """Let faiss make an index of the keys; see `build_datastore`."""
        faiss = _faiss()
        try:
            index = faiss.index_factory(self.keys.shape[1], description)
        except RuntimeError as error:
            raise ValueError(f"index must be a description for faiss.index_factory, got {description!r}") from error
        some = torch.randperm(len(self), generator=torch.Generator().manual_seed(0))[:SAMPLE].sort().values
        index.train(self.keys[some].float().numpy())
        for _, keys in zip(*self._slices(self.keys.shape[1])):
            index.add(keys.float().numpy())
        faiss.write_index(index, str(self.folder / INDEX))
        self.index = self._read_index()


@torch.no_grad()
def build_datastore(
    model: PreTrainedModel,
    tokens: Tensor,
    folder: str | Path,
    *,
    length: int = 1024,
    dtype: torch.dtype = torch.float16,
    module: str | None = None,
    index: str | None = None,
    report: Callable[[Progress], None] = silent,
) -> Datastore:
    """Let a model read a text, and keep a key for each token and the token that comes next.

    The key is the input of the last layer's feed-forward network, after its norm, as in https://arxiv.org/abs/1911.00172.

    Args:
        model: any causal language model of transformers.
        tokens: [T] of the text, at least two.
        folder: a new folder. It is written under another name, and gets its own when it is complete.
        length: tokens of the windows that the model reads, which overlap by half, so that each key knows at least half
            a window of text before it, except those at the beginning.
        dtype: of the keys.
        module: the name of the module whose input is the key; default: the last layer's feed-forward network.
        index: a description for `faiss.index_factory`, such as "IVF4096,PQ64"; it needs faiss (extra `retrieval`). By
            default there is no index, and a search looks at all keys.
        report: is called with the progress.

    Raises:
        ValueError: if there are too few tokens, the folder is in use, or the model has no such module.
    """
    folder = Path(folder)
    if tokens.ndim != 1 or len(tokens) < 2:
        raise ValueError(f"tokens must be [T] with at least two tokens, got shape {tuple(tokens.shape)}")
    if length < 2:
        raise ValueError(f"length must be at least 2 tokens, got {length}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"folder must be a new one, got {folder}, which is in use")
    if index is not None:
        _faiss()
    module = key_module(model) if module is None else module
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    unfinished.mkdir(parents=True)
    try:
        shape = _write_keys(model, tokens, unfinished, length, dtype, module, report)
        header = {"format": FORMAT, "module": module, "shape": shape, "dtype": str(dtype).removeprefix("torch.")}
        header |= {
            "fingerprint": fingerprint(model.base_model),
            "model": model.config.name_or_path or type(model).__name__,
        }
        (unfinished / HEADER).write_text(json.dumps(header, indent=1), encoding="utf-8")
        if index is not None:
            Datastore(unfinished).add_index(index)
        os.replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return Datastore(folder)


def key_module(model: PreTrainedModel) -> str:
    """The name of the module whose input is a key by default: the last layer's feed-forward network."""
    wanted = feed_forward(decoder_layers(model)[-1])
    if wanted is None:
        raise ValueError(
            f"module must be given for {type(model).__name__}, whose last layer has no feed-forward network; its norm "
            "before the head is a choice"
        )
    return next(name for name, module in model.named_modules() if module is wanted)


@contextmanager
def inputs_of(model: PreTrainedModel, module: str) -> Iterator[list[Tensor]]:
    """A list that holds the latest input [B, T, D] of a module while the context lasts.

    Raises:
        ValueError: if the model has no such module.
    """
    seen: list[Tensor] = []

    def keep(_: nn.Module, arguments: tuple, named: dict) -> None:
        seen[:] = [(arguments or tuple(named.values()))[0].detach()]

    modules = dict(model.named_modules())
    if module not in modules:
        raise ValueError(f"module must be the name of a module of {type(model).__name__}, got {module!r}")
    with modules[module].register_forward_pre_hook(keep, with_kwargs=True):
        yield seen


def _write_keys(model, tokens, folder: Path, length: int, dtype: torch.dtype, module: str, report) -> list[int]:
    """Write all keys and tokens; returns the shape of the keys."""
    width, last, was_training = 0, len(tokens) - 1, model.training
    model.eval()
    try:
        with open(folder / KEYS, "wb") as keys_file, inputs_of(model, module) as seen:
            for window, scored in windows(last, length):
                model.base_model(tokens[None, window].to(model.device), use_cache=False)
                keys = seen[0][0, -scored:].to("cpu", dtype).contiguous()
                if not keys.isfinite().all():
                    raise ValueError(f"dtype must be able to hold the keys, got {dtype}, which cannot")
                width = keys.shape[-1]
                keys.view(torch.uint8).numpy().tofile(keys_file)
                report(Progress("reading into the datastore", window.stop, last, 1))
    finally:
        model.train(was_training)
    tokens[1:].to("cpu", torch.int32).contiguous().numpy().tofile(folder / TOKENS)
    return [last, width]


def windows(last: int, length: int) -> Iterator[tuple[slice, int]]:
    """Windows of at most `length` of the first tokens, each with how many at its end have not been in one before."""
    stride = length // 2
    for start in range(0, last, stride):
        stop = min(start + stride, last)
        yield slice(max(0, start + stride - length), stop), stop - start


def _rows(width: int) -> int:
    """How many rows of this width a search may hold."""
    return max(1, SLICE // width)


def _faiss():
    try:
        import faiss
    except ImportError as error:
        raise ValueError("an index needs faiss: pip install hf-memory[retrieval]") from error
    return faiss
