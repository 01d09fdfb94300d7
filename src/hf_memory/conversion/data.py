"""Training data: windows of a text. Which windows a step reads depends only on the seed and the step."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hf_memory.conversion.recipe import Schedule
from hf_memory.files.text import Text, check_length
from hf_memory.modeling.checks import check_type

EVALUATED = 32  # windows in an evaluation
DRAWN = 1024
TRIES = 64  # places that are drawn at once, and how often, to find one before a target


class TokenWindows(Dataset):
    """A data set of all windows of one long text that a stage reads, at random places, which depend only on the seed.

    A share `repeats` of them, evenly spread, end with the passage with which they begin. This teaches recall: ordinary
    text rarely needs what has left a window of attention. Labels are -100 where a token is no target of the text.
    Windows of a text with documents have `position_ids`, which begin again in each, so that models read them apart.
    Windows that repeat a passage are one document, and so are all if they are read in chunks.
    """

    def __init__(self, tokens: Text | Tensor, schedule: Schedule, seed: int = 0):
        check_type("schedule", schedule, Schedule)
        schedule.check("schedule")
        self.text = Text.of(tokens)
        self.schedule = schedule
        self.seed = seed
        parts = self.text.parts
        generator = torch.Generator().manual_seed(seed)
        self.starts = torch.zeros(schedule.steps * schedule.batch_size, dtype=torch.long)
        weights = torch.tensor(self.text.weights, dtype=torch.float64)
        sources = (
            weights.multinomial(len(self.starts), True, generator=generator)
            if len(parts) > 1
            else self.starts
        )
        offset = 0
        for i, part in enumerate(parts):
            check_length(part, schedule.length)
            mine = sources == i
            self.starts[mine] = offset + self._places(part, int(mine.sum()), generator)
            offset += len(part)

    def _places(self, text: Text, count: int, generator: torch.Generator) -> Tensor:
        """[count], where windows of one text begin that have a target also if they are the shortest."""
        number = len(text) - self.schedule.length + 1
        found = torch.empty(0, dtype=torch.long)
        if text.targets is None:
            return torch.randint(number, (count,), generator=generator)
        tries = 0
        while len(found) < count:
            places = torch.randint(number, (DRAWN,), generator=generator)
            tries = tries + 1
            found = torch.cat([found, places[text.predicts(places, self.schedule.lengths[0])]])
            if tries == TRIES and not len(found):
                raise ValueError(
                    "text must have messages of an assistant if the loss is of these only, got none"
                )
        return found[:count]

    def for_evaluation(self, text: Text | Tensor) -> "TokenWindows":
        """Windows of another text, of the same length, on which a loss is evaluated."""
        schedule = self.schedule._replace(
            steps=1, batch_size=EVALUATED, repeats=0.0, start_length=0
        )
        return TokenWindows(text, schedule, self.seed)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        schedule = self.schedule
        start = int(self.starts[index])
        step = index // self.schedule.batch_size
        length = schedule.length_in(step)
        repeats = schedule.repeats
        is_apart = self.is_apart
        repeated = int((index + 1) * repeats) > int(index * repeats)
        row = self.text.row(start, length, whole=repeated or not is_apart)
        if (row["labels"][1:] == -100).all():  # of the documents apart
            row = self.text.row(start, length, whole=True)
        if repeated:
            size = length // 4
            first = len(self.text.start)
            for name in ("input_ids", "labels"):
                row[name][length - size :] = row["input_ids"][first : first + size].clone()
        return row if is_apart else {name: row[name] for name in ("input_ids", "labels")}

    @property
    def is_apart(self) -> bool:
        """Whether no token of a row sees another document, except in windows that repeat a passage."""
        return self.text.documents is not None and not self.schedule.chunk_length
