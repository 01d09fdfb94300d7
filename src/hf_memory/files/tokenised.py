"""Texts of files and data sets as tokens on a disk, tokenised in several threads, and mapped into memory."""

import hashlib
import json
import math
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_memory.files.chat_template import apply_template, tokens_and_targets
from hf_memory.files.documents import Document, documents, files_of
from hf_memory.files.fingerprints import tokenizer_fingerprint
from hf_memory.files.folders import replaced, written
from hf_memory.files.text import MappedFile, Text, check_weights, start_of
from hf_memory.progress import Progress, silent

BATCH = 2**20  # characters that a thread tokenises at once, for which it needs about 150 MB
THREADS = 16  # at most
IN_MEMORY = 2**28  # largest number of bytes of a column that is read at once
CHECKSUMS = "checksums.json"  # SHA-256 of each of the files beside it, by name
FILES = {"tokens": torch.int32, "documents": torch.long, "targets": torch.bool}


class Tokens(NamedTuple):
    """Documents as tokens: [T] of int32, where documents begin [D], and [T] of bool, which tokens are targets."""

    tokens: np.ndarray
    documents: np.ndarray
    targets: np.ndarray


def read_tokens(
    sources: Iterable[Path | str],
    tokenizer,
    *,
    weights: Sequence[float] | None = None,
    limit: int | None = None,
    assistant_only: bool = False,
    cache: Path | None = None,
    report: Callable[[Progress], None] = silent,
) -> Text:
    """Tokenise texts into one, with the tokenizer's end-of-text token after each document.

    Args:
        sources: each of them a text file, which is one document, or one for every four million characters; a `.jsonl`
            or `.parquet` file with a field `text`, or with a field `messages`, which goes through the chat template; a
            folder of such files; or a folder or a name on the Hub that `datasets` can load, as `name` or `name:config`,
            whose split `train` is streamed.
        tokenizer: the teacher's tokenizer.
        weights: of each source in a mixture; default: texts follow each other, and their lengths are their weights.
        limit: largest number of tokens to read, of sources with weights in proportion to these; default: all.
        assistant_only: whether only the assistant's turns are targets in conversations. All of a text is.
        cache: folder for the tokens, of which then only what is read is in memory, except for a mixture. Later calls
            with the same arguments find them there; files are the same if their sizes and times are, data sets on the
            Hub if their names are. Damaged tokens are read again, with a warning. Default: tokens are in memory.
        report: is called with the progress.

    Raises:
        ValueError: if a source is not text, all sources are empty, or a weight is not above 0.
        OSError: if a source cannot be read, or the tokens cannot be written.
    """
    if isinstance(sources, str | Path):
        raise ValueError(f"sources must be a list of texts, got one: {sources}")
    if limit is not None and not (type(limit) is int and limit > 0):
        raise ValueError(f"limit must be a number of tokens above 0, got {limit!r}")
    sources = list(sources)
    how: dict = {"assistant_only": assistant_only, "cache": cache, "report": report}
    if weights is not None:
        check_weights(weights, len(sources))
        limits = [
            None if limit is None else math.ceil(limit * weight / sum(weights))
            for weight in weights
        ]
        return Text.mixed(
            [read_tokens([x], tokenizer, limit=part, **how) for x, part in zip(sources, limits)],
            weights,
        )
    files: tuple[MappedFile, ...] = ()
    if cache is None:
        columns = map(
            torch.from_numpy,
            map(np.concatenate, zip(*_read(sources, tokenizer, limit, assistant_only, report))),
        )
    else:
        folder = cache / _name(sources, tokenizer, limit, assistant_only)
        if not _is_whole(folder, tokenizer):
            cache.mkdir(parents=True, exist_ok=True)
            with replaced(folder) as new:
                _write(new, _read(sources, tokenizer, limit, assistant_only, report))
        mapped = [folder / name for name in FILES if _is_mapped(folder / name)]
        files = tuple(map(MappedFile.of, mapped))
        columns = map(partial(_column, folder), FILES)
    tokens, begins, targets = columns
    if len(tokens) != len(targets):
        raise OSError(
            f"{folder} must not change while it is read, got {len(tokens)} tokens and {len(targets)} targets; "
            "start again, which reads the text again"
        )
    start = torch.tensor(start_of(tokenizer), dtype=torch.long)
    return Text(
        tokens,
        start,
        targets if assistant_only else None,
        begins if len(begins) > 1 else None,
        files=files,
    )


def _name(sources: Sequence[Path | str], tokenizer, limit: int | None, assistant_only: bool) -> str:
    """A name of tokens that differs if a text, the tokenizer, or what is read of them does."""
    files = [(str(source), files_of(Path(source))) for source in sources]
    seen = [
        (name, [(str(x), x.stat().st_size, x.stat().st_mtime_ns) for x in found if x.exists()])
        for name, found in files
    ]
    about = [seen, tokenizer_fingerprint(tokenizer), limit, assistant_only]
    return f"tokens-{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]}"


def _write(folder: Path, found: Iterator[Tokens]) -> None:
    """Write tokens to a new folder."""
    folder.mkdir()
    digests = {name: hashlib.sha256() for name in FILES}
    with ExitStack() as stack:
        files = [stack.enter_context((folder / name).open("wb")) for name in FILES]
        for part in found:
            with written("tokens", folder, "the next call reads the text again"):
                for x, file, digest in zip(part, files, digests.values()):
                    digest.update(x.tobytes())
                    file.write(x.tobytes())
    checksums = {name: digest.hexdigest() for name, digest in digests.items()}
    (folder / CHECKSUMS).write_text(json.dumps(checksums), encoding="utf-8")


def _is_whole(folder: Path, tokenizer) -> bool:
    """Whether a folder has the tokens that were written to it; warns if it has others.

    This reads all of them, at about a second for 10^9 bytes; 10^8 tokens are 5 * 10^8.
    """
    if not folder.exists():
        return False
    fault = _fault(folder, tokenizer)
    if fault is not None:
        warnings.warn(
            f"tokens in {folder} are damaged, so the text is read again: {fault}", stacklevel=3
        )
    return fault is None


def _fault(folder: Path, tokenizer) -> str | None:
    for name in (CHECKSUMS, *FILES):
        if not (folder / name).is_file():
            return f"there is no file {name}"
    try:
        checksums = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        checksums = None
    if not isinstance(checksums, dict):
        return f"{CHECKSUMS} has no checksums"
    for name in FILES:
        with (folder / name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != checksums.get(name):
                return f"{name} was changed after it was written"
    least, most = (int(x) for x in _column(folder, "tokens").aminmax())
    largest = max(tokenizer.get_vocab().values())
    return (
        None
        if least >= 0 and most <= largest
        else f"tokens must be from 0 to {largest}, got {least} to {most}"
    )


def _is_mapped(file: Path) -> bool:
    return file.stat().st_size > IN_MEMORY


def _column(folder: Path, name: str) -> torch.Tensor:
    """A column of tokens. Of a large file only what is read is in memory.

    Reading a mapped file that has become shorter ends the process, however soon it was checked before; so small files
    are read at once.
    """
    file = folder / name
    dtype = FILES[name]
    if not _is_mapped(file):
        content = file.read_bytes()
        if not content or len(content) % dtype.itemsize:
            raise OSError(
                f"{file} must have at least one number of {dtype.itemsize} bytes, got {len(content)} bytes"
            )
        return torch.frombuffer(bytearray(content), dtype=dtype)
    return torch.from_file(
        str(file), shared=False, size=file.stat().st_size // dtype.itemsize, dtype=dtype
    )


def _read(
    sources: Sequence[Path | str],
    tokenizer,
    limit: int | None,
    assistant_only: bool,
    report: Callable[[Progress], None],
) -> Iterator[Tokens]:
    """The tokens of sources, part by part, up to a limit; places are those among all tokens."""
    found = chain.from_iterable([documents(source) for source in sources])
    count = 0  # fails first if one is missing
    for part in _tokenised(found, partial(_encoded, tokenizer, assistant_only)):
        room = len(part.tokens) if limit is None else min(len(part.tokens), limit - count)
        yield Tokens(
            part.tokens[:room], part.documents[part.documents < room] + count, part.targets[:room]
        )
        count += room
        report(Progress("reading the text", count, limit or 0, 1))
        if count == limit:
            break
    if not count:
        raise ValueError(
            f"text must not be empty, got no tokens from {', '.join(map(str, sources))}"
        )


def _tokenised(
    found: Iterator[Document], encode: Callable[[list[Document]], Tokens]
) -> Iterator[Tokens]:
    """Documents as tokens in their order. What is more than one batch is given to several threads.

    Fast tokenizers, which are in Rust, run in parallel in them, and all conversations go to one process that renders
    their templates. The first batch is encoded alone, as this may set options of the tokenizer.
    """
    batches = _batches(found)
    number = min(THREADS, os.cpu_count() or 1)
    yield from map(encode, batches if number == 1 else islice(batches, 1))
    pool = ThreadPoolExecutor(number)
    waiting = deque[Any]()
    try:
        for batch in batches:
            waiting.append(pool.submit(encode, batch))
            if len(waiting) > 2 * number:
                yield waiting.popleft().result()
        yield from (x.result() for x in waiting)
    finally:
        pool.shutdown(cancel_futures=True)


def _batches(found: Iterator[Document]) -> Iterator[list[Document]]:
    """Documents in groups of at least BATCH characters."""
    batch: list[Document] = []
    size = 0
    for document in found:
        batch.append(document)
        size += len(str(document))
        if size >= BATCH:
            yield batch
            batch = []
            size = 0
    yield batch


def _encoded(tokenizer, assistant_only: bool, batch: list[Document]) -> Tokens:
    """A batch of documents as tokens."""
    start = start_of(tokenizer)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    tokens = [np.empty(0, np.int32)]
    targets = [np.empty(0, bool)]
    for document, (ids, chosen) in zip(batch, _ids(tokenizer, assistant_only, batch)):
        # templates write it, but windows begin with it
        first = len(start) if ids[: len(start)] == start else 0
        ids = ids[first:] + (end if ids and isinstance(document, str) else [])
        tokens.append(np.array(ids, np.int32))
        targets.append(np.ones(len(ids), bool) if chosen is None else chosen[first:].numpy())
    sizes = np.array([len(x) for x in tokens])
    return Tokens(
        np.concatenate(tokens), (sizes.cumsum() - sizes)[sizes > 0], np.concatenate(targets)
    )


def _ids(
    tokenizer, assistant_only: bool, batch: list[Document]
) -> Iterator[tuple[list[int], torch.Tensor | None]]:
    """The tokens of each document, and which are targets; None for all."""
    if tokenizer.chat_template is None and not all(isinstance(document, str) for document in batch):
        raise ValueError("messages need a tokenizer with a chat template, got one without")
    apart = [assistant_only and not isinstance(document, str) for document in batch]
    texts = [
        x if isinstance(x, str) else apply_template(tokenizer, x)
        for x, own in zip(batch, apart)
        if not own
    ]
    options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    whole = iter(tokenizer(texts, **options)["input_ids"] if texts else ())
    for document, own in zip(batch, apart):
        yield tokens_and_targets(tokenizer, document) if own else (next(whole), None)  # type: ignore[arg-type]
