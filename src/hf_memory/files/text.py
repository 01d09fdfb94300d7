"""Text as tokens, and windows of it that begin as a tokenizer begins a text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig

MINIMUM = 2560  # tokens of a text, so that the last tenth has a window to compare models on
MAXIMUM = 2**18  # largest number of held-out tokens


class MappedFile(NamedTuple):
    """A file that a tensor is mapped from, as it was then."""

    path: Path
    inode: int
    size: int  # bytes

    @classmethod
    def of(cls, path: Path) -> "MappedFile":
        """A file as it is now."""
        now = path.stat()
        return cls(path, now.st_ino, now.st_size)

    def check(self) -> None:
        """Raise OSError if the file is shorter now. One that was replaced or removed is whole where it is mapped."""
        try:
            now = self.path.stat()
        except FileNotFoundError:
            return
        if now.st_ino == self.inode and now.st_size < self.size:
            raise OSError(
                f"{self.path} must keep its {self.size} bytes while its tokens are read, got {now.st_size}; "
                "start again, which reads the text again"
            )


@dataclass(frozen=True)
class Text:
    """A text as tokens. Windows that are cut from it begin as the tokenizer begins a text.

    Models with a beginning-of-text token have seen it in every text, and their heads attend to it.

    Attributes:
        tokens: [T], the tokens of the text.
        start: [P], what the tokenizer writes before a text, such as a beginning-of-text token; often nothing.
        targets: [T] of bool, the tokens that a model is to predict; default: all.
        documents: [D], where documents begin, in order; default: there is one.
        mixture: number of tokens, and weight, of each of the texts of which this is a mixture. A part of it has none.
        files: files that tokens, targets and documents are mapped from, which no one may shorten while they are read.
    """

    tokens: Tensor
    start: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    targets: Tensor | None = None
    documents: Tensor | None = None
    mixture: tuple[tuple[int, float], ...] = ()
    files: "tuple[MappedFile, ...]" = ()

    @classmethod
    def of(cls, tokens: "Text | Tensor") -> "Text":
        """The text itself, or that of tokens [T] before which nothing is written."""
        check_text(tokens)
        return tokens if isinstance(tokens, Text) else cls(tokens)

    @classmethod
    def mixed(cls, texts: "Sequence[Text]", weights: Sequence[float]) -> "Text":
        """A mixture of texts of one tokenizer: training windows are drawn from each in proportion to its weight.

        Raises:
            ValueError: if there is no text, or not a weight above 0 for each.
        """
        if (
            not isinstance(texts, list | tuple)
            or not texts
            or not all(isinstance(x, Text) for x in texts)
        ):
            raise ValueError(f"texts must be a list of at least one Text, got {texts!r}")
        check_weights(weights, len(texts))
        targets = [
            torch.ones(len(x), dtype=torch.bool) if x.targets is None else x.targets for x in texts
        ]
        chosen = None if all(x.targets is None for x in texts) else torch.cat(targets)
        sizes = list(map(len, texts))
        first = torch.zeros(1, dtype=torch.long)
        begins = [first if x.documents is None else x.documents for x in texts]
        begins = [start + x for start, x in zip(accumulate(sizes, initial=0), begins)]
        tokens = torch.cat([x.tokens for x in texts])
        mixture = zip(sizes, weights, strict=True)
        return cls(tokens, texts[0].start, chosen, torch.cat(begins), tuple(mixture))

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

    def check_files(self) -> None:
        """Raise OSError if a file that the text is mapped from has become shorter: reading it would end the process."""
        for file in self.files:
            file.check()

    def __getitem__(self, part: slice) -> "Text":
        self.check_files()
        targets = self.targets
        begins = self.documents
        ends = part.indices(len(self))[:2]
        if begins is not None:
            first, last = torch.searchsorted(begins, torch.tensor(ends)).tolist()
            begins = begins[first:last] - ends[0]
        return Text(
            self.tokens[part],
            self.start,
            None if targets is None else targets[part],
            begins,
            files=self.files,
        )

    @property
    def share(self) -> float:
        """The share of the tokens that are targets."""
        return 1.0 if self.targets is None else self.targets.count_nonzero().item() / len(self)

    def windows(self, places: Tensor, length: int) -> Tensor:
        """[N, length]: the text from each of N places on, after what begins a text."""
        self.check_files()
        return self.begun(self.tokens[places[:, None] + torch.arange(length - len(self.start))])

    def row(self, place: int, length: int, *, whole: bool = False) -> dict[str, Tensor]:
        """A window to learn from: the text from a place on, in which each document begins as a text does.

        Args:
            place: where the window begins.
            length: its tokens.
            whole: whether documents that follow each other are one.

        Returns:
            input_ids, labels and position_ids, [length] each. Labels are -100 where there is nothing to predict.
            Positions begin again in each document.
        """
        part = self[place : place + length]
        targets = (
            torch.ones_like(part.tokens, dtype=torch.bool) if part.targets is None else part.targets
        )
        begins = () if whole or part.documents is None else part.documents[part.documents > 0]
        begun = self.start if self.targets is None else torch.full_like(self.start, -100)
        rows = []
        for tokens, chosen in zip(*(torch.tensor_split(x, begins) for x in (part.tokens, targets))):
            ids = torch.cat([self.start, tokens])
            labels = torch.cat([begun, tokens.where(chosen, -100)])
            rows.append(torch.stack([ids, labels, torch.arange(len(ids))]))
        ids, labels, positions = torch.cat(rows, dim=1)[:, :length]
        labels[1:][positions[1:] == 0] = -100
        return {"input_ids": ids, "labels": labels, "position_ids": positions}

    def predicts(self, places: Tensor, length: int) -> Tensor:
        """[N] of bool: whether windows from N places on have a target that they predict."""
        if self.targets is None:
            return torch.ones_like(places, dtype=torch.bool)
        self.check_files()
        first = int(len(self.start) == 0)  # a token before which there is nothing is not predicted
        return self.targets[places[:, None] + torch.arange(first, length - len(self.start))].any(1)

    def begun(self, rows: Tensor) -> Tensor:
        """[N, P + T]: rows [N, T] of tokens after what begins a text."""
        return torch.cat([self.start.expand(len(rows), -1), rows], dim=1)


@dataclass(frozen=True)
class TextFacts:
    """What a plan needs to know of a text; its length is the number of tokens.

    Attributes:
        num_tokens: number of tokens.
        largest: the largest token.
        share: the share of the tokens that are targets.
        smallest: the smallest token.
    """

    num_tokens: int
    largest: int = 0
    share: float = 1.0
    smallest: int = 0

    @classmethod
    def of(cls, tokens: "Text | Tensor | TextFacts") -> "TextFacts":
        """The facts of a text or of tokens [T]."""
        if isinstance(tokens, cls):
            return tokens
        text = Text.of(tokens)  # type: ignore[arg-type]
        text.check_files()
        if not len(text):
            return cls(0)
        smallest, largest = map(int, text.tokens.aminmax())
        return cls(len(text), largest, text.share, smallest)

    def __len__(self) -> int:
        return self.num_tokens


ANY_TEXT = TextFacts(2**31 - 1)  # one that is not read yet, and long enough


def start_of(tokenizer) -> list[int]:
    """The tokens that a tokenizer writes before a text."""
    whole, alone = (
        tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False)
    )
    for i in range(len(whole) + 1):
        if whole[i : i + len(alone)] == alone:
            return whole[:i]
    # A word may have other tokens where it is the first of all.
    return list(takewhile(set(tokenizer.all_special_ids).__contains__, whole))


def check_tokens(
    tokens: Text | Tensor | TextFacts,
    config: PreTrainedConfig,
    *lengths: int,
    name: str = "length",
) -> None:
    """Check that a model can read windows of a text.

    Args:
        tokens: the text, or what is known of it.
        config: the model's config.
        *lengths: lengths of the windows in tokens.
        name: the argument that gives the lengths.

    Raises:
        ValueError: if a token has no embedding, a window is longer than the model's positions, or the text is shorter
            than a window.
    """
    facts = TextFacts.of(tokens)
    last = config.vocab_size - 1
    if not 0 <= facts.smallest <= facts.largest <= last:
        given = facts.smallest if facts.smallest < 0 else facts.largest
        raise ValueError(
            f"tokens of the text must be from 0 to {last}, as the model's tokenizer has them, got {given}"
        )
    longest = max(lengths, default=1)
    positions = getattr(config, "max_position_embeddings", None)
    if positions and longest > positions:
        raise ValueError(f"{name} must be at most the model's {positions} positions, got {longest}")
    check_length(facts, longest)


def check_text(tokens: Any, name: str = "tokens", otherwise: str = "") -> None:
    """Raise ValueError unless a text is a Text, or a tensor [T] of whole numbers; `otherwise` says what else it is."""
    is_text = isinstance(tokens, Text | TextFacts)
    is_tensor = isinstance(tokens, Tensor) and tokens.ndim == 1 and not tokens.is_floating_point()
    if not (is_text or is_tensor):
        given = (
            f"{tuple(tokens.shape)} of {tokens.dtype}"
            if isinstance(tokens, Tensor)
            else type(tokens).__name__
        )
        raise ValueError(
            f"{name} must be {otherwise}a Text or a tensor [T] of whole numbers, got {given}"
        )


def check_weights(weights: Any, count: int) -> None:
    """Raise ValueError unless there is a weight above 0 for each of some texts."""
    are_numbers = isinstance(weights, list | tuple) and all(
        type(x) in (int, float) for x in weights
    )
    if not are_numbers or len(weights) != count or not all(0 < x < math.inf for x in weights):
        raise ValueError(
            f"weights must be numbers above 0, one for each of {count} texts, got {weights!r}"
        )


def check_length(tokens: Text | Tensor | TextFacts, length: int) -> None:
    """Raise ValueError if a text is none, or shorter than a window."""
    check_text(tokens)
    if len(tokens) < length:
        raise ValueError(
            f"tokens must be at least one window of {length} tokens, got {len(tokens)}"
        )


def hold_out(tokens: Text) -> tuple[Text, Text]:
    """The training text, and the held-out text: the last tenth of each part, or less if that is enough.

    Raises:
        ValueError: if the text is too short.
    """
    if len(tokens) < MINIMUM:
        raise ValueError(
            f"text must have at least {MINIMUM} tokens, of which a tenth is held out, got {len(tokens)}"
        )
    most = MAXIMUM // len(tokens.parts)
    training = list[Text]()
    held_out = list[Text]()
    for part in tokens.parts:
        end = len(part) - max(1, min(len(part) // 10, most))
        training.append(part[:end])
        held_out.append(part[end:])
    if not tokens.mixture:
        return training[0], held_out[0]
    return Text.mixed(training, tokens.weights), Text.mixed(held_out, tokens.weights)
