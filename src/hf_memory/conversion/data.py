"""Training data: windows of a text. Which windows a step reads depends only on the seed and the step."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hf_memory.conversion.recipe import Schedule
from hf_memory.files.text import Text, check_length


class TokenWindows(Dataset):
    """A data set of windows of one long text at random places, which depend only on the seed.

    A share `repeats` of them, evenly spread, end with the passage with which they begin. This teaches recall: ordinary
    text rarely needs what has left a window of attention.
    """

    def __init__(self, tokens: Text | Tensor, length: int, count: int, seed: int = 0, repeats: float = 0.0):
        check_length(tokens, length)
        self.text, self.length, self.seed, self.repeats = Text.of(tokens), length, seed, repeats
        places = len(tokens) - length + 1
        self.starts = torch.randint(places, (count,), generator=torch.Generator().manual_seed(seed))

    @classmethod
    def of(cls, tokens: Text | Tensor, schedule: Schedule, seed: int) -> "TokenWindows":
        """All windows that a stage with this schedule reads."""
        return cls(tokens, schedule.length, schedule.steps * schedule.batch_size, seed, schedule.repeats)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        (window,) = self.text.windows(self.starts[index].view(1), self.length)
        if int((index + 1) * self.repeats) > int(index * self.repeats):
            size, first = self.length // 4, len(self.text.start)
            window[self.length - size :] = window[first : first + size].clone()
        return {"input_ids": window, "labels": window}
