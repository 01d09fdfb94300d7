"""Text as tokens, read from files, folders and data sets, and windows of it."""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from hf_memory.files.chat_template import apply_template
from hf_memory.progress import Progress, silent

FIELDS = ("text", "messages")  # the first of these fields that a row has is read
Document = str | list[dict]  # a text or a conversation


@dataclass(frozen=True)
class Text:
    """A text as tokens. Windows that are cut from it begin as the tokenizer begins a text.

    Models with a beginning-of-text token have seen it in every text, and their heads attend to it.

    Attributes:
        tokens: [T], the tokens of the text.
        start: [P], what the tokenizer writes before a text, such as a beginning-of-text token; often nothing.
    """

    tokens: Tensor
    start: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))

    @classmethod
    def of(cls, tokens: "Text | Tensor") -> "Text":
        """The text itself, or that of tokens [T] before which nothing is written."""
        return tokens if isinstance(tokens, Text) else cls(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, part: slice) -> "Text":
        return Text(self.tokens[part], self.start)

    def windows(self, places: Tensor, length: int) -> Tensor:
        """[N, length]: the text from each of N places on, after what begins a text."""
        return self.begun(self.tokens[places[:, None] + torch.arange(length - len(self.start))])

    def begun(self, rows: Tensor) -> Tensor:
        """[N, P + T]: rows [N, T] of tokens after what begins a text."""
        return torch.cat([self.start.expand(len(rows), -1), rows], dim=1)


def start_of(tokenizer) -> list[int]:
    """The tokens that a tokenizer writes before a text."""
    whole, alone = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
    return whole[: next(i for i in range(len(whole) + 1) if whole[i : i + len(alone)] == alone)]


def read_tokens(
    sources: Iterable[Path | str],
    tokenizer,
    *,
    limit: int | None = None,
    report: Callable[[Progress], None] = silent,
) -> Text:
    """Tokenise texts into one, with the tokenizer's end-of-text token after each document.

    Args:
        sources: each of them a text file, which is one document; a `.jsonl` or `.parquet` file with a field `text`, or
            with a field `messages`, which goes through the chat template; a folder of text files; or a folder or a name
            on the Hub that `datasets` can load, as `name` or `name:config`, whose split `train` is streamed.
        tokenizer: the teacher's tokenizer.
        limit: largest number of tokens to read; default: all.
        report: is called with the progress.

    Raises:
        ValueError: if a source is not text, or all sources are empty.
        OSError: if a source cannot be read.
    """
    sources, tokens, count, start = list(sources), [], 0, start_of(tokenizer)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for document in chain.from_iterable([documents(source) for source in sources]):  # fails first if one is missing
        if count >= (limit or math.inf):
            break
        ids = _ids(document, tokenizer)
        ids = ids[len(start) :] if ids[: len(start)] == start else ids  # templates write it, but windows begin with it
        tokens.append(torch.tensor(ids + end if ids and isinstance(document, str) else ids, dtype=torch.long))
        count += len(tokens[-1])
        report(Progress("reading the text", count, limit or 0, 1))
    if not count:
        raise ValueError(f"text must not be empty, got no tokens from {', '.join(map(str, sources))}")
    return Text(torch.cat(tokens)[:limit], torch.tensor(start, dtype=torch.long))


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


def check_tokens(tokens: Text | Tensor, config: PreTrainedConfig, *lengths: int) -> None:
    """Check that a model can read windows of a text.

    Args:
        tokens: the text.
        config: the model's config.
        *lengths: lengths of the windows in tokens.

    Raises:
        ValueError: if a token has no embedding, a window is longer than the model's positions, or the text is shorter
            than a window.
    """
    largest = int(Text.of(tokens).tokens.max()) if len(tokens) else 0
    if largest >= config.vocab_size:
        raise ValueError(f"tokenizer must be the teacher's, which has {config.vocab_size} tokens, got token {largest}")
    longest, positions = max(lengths, default=1), getattr(config, "max_position_embeddings", None)
    if positions and longest > positions:
        raise ValueError(f"length must be at most the teacher's {positions} positions, got {longest}")
    check_length(tokens, longest)


def check_length(tokens: Text | Tensor, length: int) -> None:
    """Raise ValueError if a text is shorter than a window."""
    if len(tokens) < length:
        raise ValueError(f"tokens must be at least one window of {length} tokens, got {len(tokens)}")


def documents(source: Path | str) -> Iterator[Document]:
    """The texts and conversations of one source; see `read_tokens`."""
    path = Path(source)
    if not str(source):
        raise ValueError("text must be a file, a folder or the name of a data set, got ''")
    if path.is_file():
        return READERS.get(path.suffix, _text)(path)
    if path.is_dir() and (files := _plain_files(path)):
        return chain.from_iterable(map(_text, files))
    if path.is_dir() or _may_be_on_the_hub(str(source)):
        return _data_set(str(source))
    raise FileNotFoundError(f"No such file or directory, and no name of a data set: {source}")


def _may_be_on_the_hub(name: str) -> bool:
    return (
        re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?(:[\w.-]+)?", name) is not None and Path(name).suffix not in SUFFIXES
    )


def _plain_files(folder: Path) -> list[Path]:
    """The files of a folder of text files, sorted; none if the folder is a data set."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return [] if any(path.suffix in DATA for path in files) else files


def _text(file: Path) -> Iterator[str]:
    if file.suffix in DATA:
        raise ValueError(f"text must be a plain file, .jsonl or .parquet, got {file}, which is {file.suffix}")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} must be text in UTF-8, got byte {error.object[error.start]:#x}") from error
    if "\0" in text:
        raise ValueError(f"{file} must be text, got a binary file (it has a zero byte)")
    yield text


def _jsonl(file: Path) -> Iterator[Document]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line) if line.strip() else {"text": ""}
            except ValueError as error:
                raise ValueError(f"{file} must have JSON in each line, got none in line {number}") from error
            yield _text_of(row, f"line {number} of {file}")


def _parquet(file: Path) -> Iterator[Document]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError as error:
        raise ValueError("parquet files need pyarrow: pip install datasets") from error
    try:
        table = parquet.ParquetFile(file)
    except ArrowInvalid as error:
        raise ValueError(f"{file} must be a parquet file, got something else or a part of one") from error
    with table:
        names = [name for name in FIELDS if name in table.schema_arrow.names]
        if not names:
            raise ValueError(f"{file} must have a column text or messages, got {', '.join(table.schema_arrow.names)}")
        for batch in table.iter_batches(columns=names[:1]):
            yield from (_text_of(row, str(file)) for row in batch.to_pylist())


def _data_set(name: str) -> Iterator[Document]:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"data sets such as {name} need datasets: pip install datasets") from error
    path, _, config = (name, "", "") if Path(name).is_dir() else name.partition(":")
    for row in datasets.load_dataset(path, config or None, split="train", streaming=True):
        yield _text_of(row, f"each row of {name}")


def _text_of(row, where: str) -> Document:
    text, talk = (row.get(name) if isinstance(row, dict) else None for name in FIELDS)
    if isinstance(text, str):
        return text
    if isinstance(talk, list) and talk and all(isinstance(x, dict) and {"role", "content"} <= set(x) for x in talk):
        return talk
    given = ", ".join(row) if isinstance(row, dict) else type(row).__name__
    raise ValueError(f"{where} must have a text in its field text, or roles and contents in messages, got {given}")


def _ids(document: Document, tokenizer) -> list[int]:
    if not isinstance(document, str):
        if tokenizer.chat_template is None:
            raise ValueError("messages need a tokenizer with a chat template, got one without")
        document = apply_template(tokenizer, document)
    return tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]


READERS = {".jsonl": _jsonl, ".parquet": _parquet}
DATA = {".json", ".csv", ".tsv", ".arrow", ".gz", ".zip", ".zst", ".xz", ".bz2", *READERS}
SUFFIXES = {".txt", ".md", *DATA}  # of files; a misspelt file name is thus not looked for on the Hub
