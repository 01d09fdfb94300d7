"""Documents of text files, folders and data sets."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from hf_memory.files.folders import check_regular

FIELDS = ("text", "messages")  # the first of these fields that a row has is read
PART = 2**22  # characters of a document of a text file; a longer file has several
# of a data set on the Hub, with its config
NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?(:[\w.-]+)?")
SPLITS = re.compile("train|test|valid|dev|eval")  # in names of files, as `datasets` finds them
ABOUT = ("readme", "license", "licence")  # files that describe a data set
SURROGATES = re.compile("[\ud800-\udfff]")  # which JSON can write, but which are no characters
Document = str | list[dict]  # a text or a conversation


def documents(source: Path | str) -> Iterator[Document]:
    """The texts and conversations of one source; see `read_tokens`."""
    path = Path(source)
    if not str(source):
        raise ValueError("text must be a file, a folder or the name of a data set, got ''")
    check_regular("text", path)
    if path.is_file():
        return _reader(path)(path)
    if path.is_dir():
        return _folder(path)
    if NAME.fullmatch(str(source)) and path.suffix.lower() not in SUFFIXES:
        return _data_set(str(source))
    raise FileNotFoundError(f"No such file or directory, and no name of a data set: {source}")


def read_prompts(file: Path) -> list[str]:
    """The lines of a text file, without empty ones.

    Raises:
        ValueError: if there are none, or the file is not text.
        OSError: if the file cannot be read.
    """
    check_regular("prompts", file)
    prompts = [line for text in _text(file) for line in text.splitlines() if line.strip()]
    if not prompts:
        raise ValueError(
            f"prompts must be a file with a prompt in each line, got {file}, which is empty"
        )
    return prompts


def files_of(source: Path) -> list[Path]:
    """The files of a source, sorted: itself, or those of a folder that are not hidden, nor in a hidden folder of it."""
    if not source.is_dir():
        return [source]
    files = (path for path in source.rglob("*") if path.is_file())
    return sorted(
        path for path in files if not any(x.startswith(".") for x in path.relative_to(source).parts)
    )


def _folder(folder: Path) -> Iterator[Document]:
    """The documents of all files of a folder, sorted, unless it is a data set of other formats or with splits."""
    files = files_of(folder)
    data = [file for file in files if file.suffix.lower() in DATA]
    if all(file in data or file.stem.lower() in ABOUT for file in files):
        names = {file: str(file.relative_to(folder)).lower() for file in data}
        if any(_reader(file) is _text or SPLITS.search(name) for file, name in names.items()):
            return _data_set(str(folder))
        files = data
    return chain.from_iterable(_reader(file)(file) for file in files)


def _reader(file: Path) -> Callable[[Path], Iterator[Document]]:
    return READERS.get(file.suffix.lower(), _text)


def _text(file: Path) -> Iterator[str]:
    if file.suffix.lower() in (*DATA, *STRUCTURED):
        raise ValueError(
            f"text must be a plain file, .jsonl or .parquet, got {file}, which is {file.suffix}"
        )
    try:
        with file.open(encoding="utf-8-sig") as lines:
            if _is_row(lines.readline(PART)):
                raise ValueError(
                    f"text must be a plain file, .jsonl or .parquet, got {file}, whose first line is JSON"
                )
            lines.seek(0)
            while text := lines.read(PART):
                text += lines.readline(PART)
                if "\0" in text:
                    raise ValueError(f"{file} must be text, got a binary file (it has a zero byte)")
                yield text
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} must be text in UTF-8, got byte {error.object[error.start]:#x}"
        ) from error


def _is_row(line: str) -> bool:
    """Whether a line is an object in JSON, as in files of data whose name does not say so."""
    with suppress(ValueError, RecursionError):
        return line.lstrip().startswith("{") and bool(json.loads(line))
    return False


def _jsonl(file: Path) -> Iterator[Document]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line) if line.strip() else {"text": ""}
            except (ValueError, RecursionError) as error:  # the latter if it is nested deeply
                raise ValueError(
                    f"{file} must have JSON in each line, got none in line {number}"
                ) from error
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
        raise ValueError(
            f"{file} must be a parquet file, got something else or a damaged one: {error}"
        ) from error


def _data_set(name: str) -> Iterator[Document]:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"data sets such as {name} need datasets: pip install datasets") from error
    path, _, config = (name, "", "") if Path(name).is_dir() else name.partition(":")

    def rows() -> Iterator[Any]:
        try:
            yield from datasets.load_dataset(path, config or None, split="train", streaming=True)
        # whatever `datasets` and what it is built on raise, often without a name
        except Exception as error:
            raise ValueError(f"{name} must be a data set that can be loaded: {error}") from error

    return (_text_of(row, f"each row of {name}") for row in rows())


def _text_of(row, where: str) -> Document:
    text, talk = (row.get(name) if isinstance(row, dict) else None for name in FIELDS)
    messages = talk if isinstance(talk, list) else []
    if isinstance(text, str):
        found: Document = text
    elif messages and all(isinstance(x, dict) and {"role", "content"} <= set(x) for x in messages):
        found = [
            message | {"content": _content_of(message["content"], where)} for message in messages
        ]
    else:
        given = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(
            f"{where} must have a text in its field text, or roles and contents in messages, got {given}"
        )
    if SURROGATES.search(json.dumps(found, ensure_ascii=False, default=str)):
        raise ValueError(f"{where} must be text in Unicode, got half of a pair of surrogates")
    return found


def _content_of(content: Any, where: str) -> str | None:
    """The text of a message, whose parts are joined if it has several; None for one without, such as a tool's call."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(
            f"{where} must have messages whose content is text, got {type(content).__name__}"
        )
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                f"{where} must have messages whose content is text, or parts of type text, got type {kind}"
            )
    return "".join(part["text"] for part in content)


READERS = {".jsonl": _jsonl, ".ndjson": _jsonl, ".jsonlines": _jsonl, ".parquet": _parquet}
DATA = {".json", ".csv", ".tsv", ".arrow", ".gz", ".zip", ".zst", ".xz", ".bz2", *READERS}
TABLES = {
    ".json5",
    ".geojson",
    ".psv",
    ".feather",
    ".orc",
    ".avro",
    ".msgpack",
    ".tfrecord",
    ".db",
    ".sqlite",
}
ARRAYS = {".npy", ".npz", ".pkl", ".pickle", ".pt", ".pth", ".safetensors", ".gguf", ".h5", ".hdf5"}
PAGES = {".ipynb", ".pdf", ".epub", ".doc", ".docx", ".odt", ".rtf", ".xls", ".xlsx", ".ods"}
ARCHIVES = {".tar", ".tgz", ".7z", ".rar", ".lz4", ".lzma"}
# formats that are not read, and whose syntax is no text
STRUCTURED = TABLES | ARRAYS | PAGES | ARCHIVES
SUFFIXES = {
    ".txt",
    ".md",
    *DATA,
    *STRUCTURED,
}  # of files; a misspelt file name is thus not looked for on the Hub
