"""Text as windows of tokens. Which window comes when is a function of (seed, step) alone."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset


class TokenWindows(Dataset):
    """Windows of one long text at random places, the same at each call with the same seed."""

    def __init__(self, tokens: Tensor, length: int, count: int, seed: int = 0):
        if len(tokens) < length:
            raise ValueError(f"tokens must be at least one window of {length} tokens, got {len(tokens)}")
        self.tokens, self.length = tokens, length
        places = len(tokens) - length + 1
        self.starts = torch.randint(places, (count,), generator=torch.Generator().manual_seed(seed)).tolist()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.tokens[self.starts[index] : self.starts[index] + self.length]
        return {"input_ids": window, "labels": window}


def read_tokens(files: Iterable[Path], tokenizer) -> Tensor:
    """The tokens of text files [T], one after the other, each followed by the end-of-text token if there is one.

    Raises:
        ValueError: if a file is not text in UTF-8.
    """
    tokens: list[int] = []
    for file in files:
        try:
            text = Path(file).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} must be text in UTF-8, got byte {error.object[error.start]:#x}") from error
        tokens += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        tokens += [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return torch.tensor(tokens, dtype=torch.long)
