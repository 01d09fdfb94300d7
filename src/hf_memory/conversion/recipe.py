"""What is wanted of a conversion."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Keep = Collection[int] | str
TOP_K = 64  # of a teacher's likely tokens, where they are saved
MAX_SEED = 2**32 - 4  # NumPy's largest, less one for each stage


class Schedule(NamedTuple):
    """How long and how fast a stage learns."""

    steps: int
    learning_rate: float
    batch_size: int = 8
    length: int = 256  # tokens of a window
    warmup: float = 0.05  # part of the steps
    memory_factor: float = 1.0  # of the learning rate, for what replaces attention and learns first in transfer
    repeats: float = 0.0  # part of the windows, in which the last quarter says the first again

    def __str__(self) -> str:
        factor = f", times {self.memory_factor:g} for memories" if self.memory_factor != 1 else ""
        repeats = f"; {self.repeats:.0%} of the windows repeat a passage" if self.repeats else ""
        return (
            f"{self.steps} steps of {self.batch_size} windows of {self.length} tokens, "
            f"learning rate {self.learning_rate:g}{factor} falling as a cosine{repeats}"
        )

    def check(self, stage: str) -> None:
        """Raise ValueError if a stage cannot be like this."""
        least = {"steps": 0, "batch_size": 1, "length": 2, "learning_rate": 0, "warmup": 0, "memory_factor": 0}
        for name, smallest in least.items():
            if not smallest <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} of {stage} must be at least {smallest}, got {getattr(self, name)}")
        if not 0 <= self.repeats <= 1:
            raise ValueError(f"repeats of {stage} must be from 0 to 1, got {self.repeats}")


TRANSFER_SCHEDULE = Schedule(steps=100, learning_rate=3e-3)
DISTILLATION_SCHEDULE = Schedule(steps=250, learning_rate=1e-3)
NO_FINE_TUNING = Schedule(steps=0, learning_rate=1e-4, length=1024)


@dataclass(frozen=True)
class Recipe:
    """All that decides what a student becomes, but for its teacher and the text: the same recipe, the same student.

    Args:
        to: the family, a name in STUDENTS; None for fine-tuning alone, after which a model is what it was.
        keep: the layers that keep the teacher's attention: numbers, counted from 0, or words, see KEEP_WORDS. With
            `"auto"` these are the quarter of the layers that recall needs most, an eighth with `"auto:1/8"`. To find
            them, a student without attention goes through attention transfer first; see `rank_layers`. With
            `"heads:1/10"` no layer keeps its attention, but a tenth of all key-value heads keep all their keys and
            values, those that retrieve most in the teacher; see `rank_heads`. The others have a window of 128 tokens,
            or what `options` say: another window, and with `window_memory=True` a memory of what has left it.
        options: fields of the family's config, such as `gate`; what they leave open is the teacher's or a preset.
        transfer: the schedule of attention transfer. A schedule of no steps leaves a stage out. So does a student that
            is its teacher before any training: it has nothing to learn from attention.
        distillation: the schedule of the stage in which the whole student learns.
        fine_tuning: the schedule of fine-tuning; its windows may be longer than the teacher's positions.
        lora_rank: rank of the low-rank updates that fine-tuning learns in place of all weights.
        temperature: divides the logits of teacher and student in distillation; above 1, unlikely tokens count more.
        cross_entropy: part of the distillation's loss that is the text's own, from 0 to 1; default: 0, or 1 for a
            student that is its teacher before any training.
        top_k: how many of the teacher's likely tokens are saved at each place, for the distillation to learn from;
            default: none are, and the teacher runs.
        teacher_bits: 8 or 4: learn from the teacher in so many bits.
        seed: seed for new weights and for the order of the text.
    """

    to: str | None = "linear"
    keep: Keep = "none"
    options: Mapping[str, Any] = field(default_factory=dict)
    transfer: Schedule = TRANSFER_SCHEDULE
    distillation: Schedule = DISTILLATION_SCHEDULE
    fine_tuning: Schedule = NO_FINE_TUNING
    lora_rank: int | None = None
    temperature: float = 1.0
    cross_entropy: float | None = None
    top_k: int | None = None
    teacher_bits: int | None = None
    seed: int = 0

    @property
    def schedules(self) -> dict[str, Schedule]:
        """Of the stages, in order."""
        return {"transfer": self.transfer, "distillation": self.distillation, "fine_tuning": self.fine_tuning}

    def check(self) -> None:
        """Raise ValueError if no teacher and no text could be converted like this."""
        for name, schedule in self.schedules.items():
            schedule.check(name)
        if self.transfer.memory_factor != 1:
            raise ValueError(
                f"memory_factor of transfer must be 1, since memories alone learn, got {self.transfer.memory_factor}"
            )
        check_loss(self.temperature, self.cross_entropy or 0)
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed must be from 0 to {MAX_SEED}, got {self.seed}")
        if self.lora_rank is not None and self.lora_rank < 1:
            raise ValueError(f"lora_rank must be at least 1, got {self.lora_rank}")
        if self.lora_rank is not None and not self.fine_tuning.steps:
            raise ValueError(f"lora_rank must not be given without steps of fine_tuning, got {self.lora_rank}")


def check_loss(temperature: float, cross_entropy: float) -> None:
    """Raise ValueError if a distillation cannot have such a loss."""
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    if not 0 <= cross_entropy <= 1:
        raise ValueError(f"cross_entropy must be from 0 to 1, got {cross_entropy}")
