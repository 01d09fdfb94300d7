"""Documents of text files, folders and data sets."""

import json
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

FIELDS = ("text", "messages")  # the first of these fields that a row has is read
PART = 2**22  # characters of a document of a text file; a longer file has several
NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?(:[\w.-]+)?")  # of a data set on the Hub, with its config
SPLITS = re.compile("train|test|valid|dev|eval")  # in names of files, as `datasets` finds them
ABOUT = ("readme", "license", "licence")  # files that describe a data set
SURROGATES = re.compile("[\ud800-\udfff]")  # which JSON can write, but which are no characters
Document = str | list[dict]  # a text or a conversation


def documents(source: Path | str) -> Iterator[Document]:
    """The texts and conversations of one source; see `read_tokens`."""
    path = Path(source)
    if not str(source):
        raise ValueError("text must be a file, a folder or the name of a data set, got ''")
    if path.is_file() or path.is_fifo():
        return READERS.get(path.suffix, _text)(path)
    if path.is_dir():
        return _folder(path)
    if path.exists():
        raise ValueError(f"text must be a file, a folder or the name of a data set, got the device {source}")
    if NAME.fullmatch(str(source)) and path.suffix not in SUFFIXES:
        return _data_set(str(source))
    raise FileNotFoundError(f"No such file or directory, and no name of a data set: {source}")


def read_prompts(file: Path) -> list[str]:
    """The lines of a text file, without empty ones.

    Raises:
        ValueError: if there are none, or the file is not text.
        OSError: if the file cannot be read.
    """
    prompts = [line for text in _text(file) for line in text.splitlines() if line.strip()]
    if not prompts:
        raise ValueError(f"prompts must be a file with a prompt in each line, got {file}, which is empty")
    return prompts


def _folder(folder: Path) -> Iterator[Document]:
    """The documents of all files of a folder, sorted, unless it is a data set of other formats or with splits."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    data = [file for file in files if file.suffix in DATA]
    if all(file in data or file.stem.lower() in ABOUT for file in files):
        if any(file.suffix not in READERS or SPLITS.search(str(file.relative_to(folder)).lower()) for file in data):
            return _data_set(str(folder))
        files = data
    return chain.from_iterable(READERS.get(file.suffix, _text)(file) for file in files)


def _text(file: Path) -> Iterator[str]:
    if file.suffix in DATA:
        raise ValueError(f"text must be a plain file, .jsonl or .parquet, got {file}, which is {file.suffix}")
    try:
        with file.open(encoding="utf-8-sig") as lines:
            while text := lines.read(PART):
                text += lines.readline(PART)
                if "\0" in text:
                    raise ValueError(f"{file} must be text, got a binary file (it has a zero byte)")
                yield text
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} must be text in UTF-8, got byte {error.object[error.start]:#x}") from error


def _jsonl(file: Path) -> Iterator[Document]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line) if line.strip() else {"text": ""}
            except (ValueError, RecursionError) as error:  # the latter if it is nested deeply
                raise ValueError(f"{file} must have JSON in each line, got none in line {number}") from error
            yield _text_of(row, f"line {number} of {file}")


def _parquet(file: Path) -> Iterator[Document]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ValueError("parquet files need pyarrow: pip install datasets") from error
    try:
        with parquet.ParquetFile(file) as table:
            names = [name for name in FIELDS if name in table.schema_arrow.names]
            if not names:
                columns = ", ".join(table.schema_arrow.names)
                raise ValueError(f"{file} must have a column text or messages, got {columns}")
            for batch in table.iter_batches(columns=names[:1]):
                yield from (_text_of(row, str(file)) for row in batch.to_pylist())
    except (ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} must be a parquet file, got something else or a damaged one: {error}") from error


def _data_set(name: str) -> Iterator[Document]:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"data sets such as {name} need datasets: pip install datasets") from error
    path, _, config = (name, "", "") if Path(name).is_dir() else name.partition(":")

    def rows() -> Iterator[Any]:
        try:
            yield from datasets.load_dataset(path, config or None, split="train", streaming=True)
        except Exception as error:  # whatever `datasets` and what it is built on raise, often without a name
            raise ValueError(f"{name} must be a data set that can be loaded: {error}") from error

    return (_text_of(row, f"each row of {name}") for row in rows())


def _text_of(row, where: str) -> Document:
    text, talk = (row.get(name) if isinstance(row, dict) else None for name in FIELDS)
    messages = talk if isinstance(talk, list) else []
    if isinstance(text, str):
        found: Document = text
    elif messages and all(isinstance(x, dict) and {"role", "content"} <= set(x) for x in messages):
        found = messages
    else:
        given = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"{where} must have a text in its field text, or roles and contents in messages, got {given}")
    if SURROGATES.search(json.dumps(found, ensure_ascii=False, default=str)):
        raise ValueError(f"{where} must be text in Unicode, got half of a pair of surrogates")
    return found


READERS = {".jsonl": _jsonl, ".parquet": _parquet}
DATA = {".json", ".csv", ".tsv", ".arrow", ".gz", ".zip", ".zst", ".xz", ".bz2", *READERS}
SUFFIXES = {".txt", ".md", *DATA}  # of files; a misspelt file name is thus not looked for on the Hub
