"""Text as tokens, and windows of it that begin as a tokenizer begins a text."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedConfig

from hf_memory.files.chat_template import apply_template, tokens_and_targets
from hf_memory.files.documents import Document, documents
from hf_memory.progress import Progress, silent


@dataclass(frozen=True)
class Text:
    """A text as tokens. Windows that are cut from it begin as the tokenizer begins a text.

    Models with a beginning-of-text token have seen it in every text, and their heads attend to it.

    Attributes:
        tokens: [T], the tokens of the text.
        start: [P], what the tokenizer writes before a text, such as a beginning-of-text token; often nothing.
        targets: [T] of bool, the tokens that a model is to predict; default: all.
        mixture: number of tokens, and weight, of each of the texts of which this is a mixture. A part of it has none.
    """

    tokens: Tensor
    start: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    targets: Tensor | None = None
    mixture: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, tokens: "Text | Tensor") -> "Text":
        """The text itself, or that of tokens [T] before which nothing is written."""
        return tokens if isinstance(tokens, Text) else cls(tokens)

    @classmethod
    def mixed(cls, texts: "Sequence[Text]", weights: Sequence[float]) -> "Text":
        """A mixture of texts of one tokenizer: training windows are drawn from each in proportion to its weight."""
        targets = [torch.ones(len(x), dtype=torch.bool) if x.targets is None else x.targets for x in texts]
        chosen = None if all(x.targets is None for x in texts) else torch.cat(targets)
        tokens, mixture = torch.cat([x.tokens for x in texts]), zip(map(len, texts), weights, strict=True)
        return cls(tokens, texts[0].start, chosen, tuple(mixture))

    @property
    def parts(self) -> "list[Text]":
        """The texts of a mixture, or this text alone."""
        ends = list(accumulate((size for size, _ in self.mixture), initial=0))
        return [self[start:end] for start, end in pairwise(ends)] or [self]

    @property
    def weights(self) -> list[float]:
        """The weights of the parts."""
        return [weight for _, weight in self.mixture] or [1.0]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, part: slice) -> "Text":
        return Text(self.tokens[part], self.start, None if self.targets is None else self.targets[part])

    @property
    def share(self) -> float:
        """The share of the tokens that are targets."""
        return 1.0 if self.targets is None else self.targets.float().mean().item()

    def windows(self, places: Tensor, length: int) -> Tensor:
        """[N, length]: the text from each of N places on, after what begins a text."""
        return self.begun(self.tokens[places[:, None] + torch.arange(length - len(self.start))])

    def labels(self, places: Tensor, length: int) -> Tensor:
        """[N, length]: windows with -100 in place of what is no target."""
        windows = self.windows(places, length)
        if self.targets is not None:
            chosen = Text(self.targets, torch.zeros_like(self.start, dtype=torch.bool)).windows(places, length)
            windows[~chosen] = -100
        return windows

    def places(self, length: int) -> Tensor | None:
        """[N], where windows may begin, such that they predict a target; None for everywhere.

        Raises:
            ValueError: if there is none.
        """
        if self.targets is None:
            return None
        starts, read = torch.arange(len(self) - length + 1), length - len(self.start)
        before = F.pad(self.targets.cumsum(0), (1, 0))
        first = starts + (len(self.start) == 0)  # a token before which there is nothing is not predicted
        places = starts[before[starts + read] > before[first]]
        if not len(places):
            raise ValueError("text must have messages of an assistant if the loss is of these only, got none")
        return places

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
    weights: Sequence[float] | None = None,
    limit: int | None = None,
    assistant_only: bool = False,
    report: Callable[[Progress], None] = silent,
) -> Text:
    """Tokenise texts into one, with the tokenizer's end-of-text token after each document.

    Args:
        sources: each of them a text file, which is one document; a `.jsonl` or `.parquet` file with a field `text`, or
            with a field `messages`, which goes through the chat template; a folder of such files; or a folder or a name
            on the Hub that `datasets` can load, as `name` or `name:config`, whose split `train` is streamed.
        tokenizer: the teacher's tokenizer.
        weights: of each source in a mixture; default: texts follow each other, and their lengths are their weights.
        limit: largest number of tokens to read, of sources with weights in proportion to these; default: all.
        assistant_only: whether only the assistant's turns are targets in conversations. All of a text is.
        report: is called with the progress.

    Raises:
        ValueError: if a source is not text, all sources are empty, or a weight is not above 0.
        OSError: if a source cannot be read.
    """
    sources, tokens, targets, count, start = list(sources), [], [], 0, start_of(tokenizer)
    if weights is not None:
        if len(weights) != len(sources) or not all(0 < weight < math.inf for weight in weights):
            raise ValueError(f"weights must be above 0, one for each of {len(sources)} texts, got {list(weights)}")
        limits = [None if limit is None else math.ceil(limit * weight / sum(weights)) for weight in weights]
        how: dict = {"assistant_only": assistant_only, "report": report}
        texts = [read_tokens([source], tokenizer, limit=part, **how) for source, part in zip(sources, limits)]
        return Text.mixed(texts, weights)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for document in chain.from_iterable([documents(source) for source in sources]):  # fails first if one is missing
        if count >= (limit or math.inf):
            break
        ids, chosen = _ids(document, tokenizer, assistant_only)
        first = len(start) if ids[: len(start)] == start else 0  # templates write it, but windows begin with it
        ids = ids[first:] + (end if ids and isinstance(document, str) else [])
        tokens.append(torch.tensor(ids, dtype=torch.long))
        targets.append(torch.ones(len(ids), dtype=torch.bool) if chosen is None else chosen[first:])
        count += len(ids)
        report(Progress("reading the text", count, limit or 0, 1))
    if not count:
        raise ValueError(f"text must not be empty, got no tokens from {', '.join(map(str, sources))}")
    chosen = torch.cat(targets) if assistant_only else None
    return Text(torch.cat(tokens), torch.tensor(start, dtype=torch.long), chosen)[:limit]


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


def _ids(document: Document, tokenizer, assistant_only: bool) -> tuple[list[int], Tensor | None]:
    """The tokens of a document, and which are targets; None for all."""
    if not isinstance(document, str):
        if tokenizer.chat_template is None:
            raise ValueError("messages need a tokenizer with a chat template, got one without")
        if assistant_only:
            return tokens_and_targets(tokenizer, document)
        document = apply_template(tokenizer, document)
    return tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"], None
