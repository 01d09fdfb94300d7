"""Recipes: the choices of a user for a conversion."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, get_type_hints

import torch

from hf_memory.conversion.keep import Keep
from hf_memory.files.ram import memory_for
from hf_memory.modeling.checks import LARGEST, check, check_type

COLUMNS = 3  # of a window: tokens, labels and positions
MAX_SEED = 2**32 - 4  # NumPy's largest seed, minus one for each stage


def counted(number: int, noun: str) -> str:
    """A number with its noun, which is in the plural unless there is one."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


class Schedule(NamedTuple):
    """The training schedule of a stage.

    In a recipe, fields that are None have the defaults of the stage, see `with_some`.

    Attributes:
        steps: number of training steps.
        learning_rate: peak learning rate, reached after the warmup; it then falls as a cosine.
        batch_size: windows in each step, of all processes together.
        length: tokens in each window.
        warmup: fraction of the steps in which the learning rate rises.
        memory_factor: multiplies the learning rate of the parts that the teacher does not have.
        repeats: fraction of the windows whose last quarter repeats the first, which teaches recall.
        start_length: tokens in each of the first windows, which grow from there to `length`, twice as long each time
            and in equal shares of the steps; 0: all have `length`.
        chunk_length: tokens of a window that are read at once. Longer windows are read in chunks, with the gradients of
            whole windows in little more memory than those of a chunk, and with a second forward pass; 0: all.
    """

    steps: int
    learning_rate: float
    batch_size: int = 8
    length: int = 256
    warmup: float = 0.05
    memory_factor: float = 1.0
    repeats: float = 0.0
    start_length: int = 0
    chunk_length: int = 0

    @classmethod
    def with_some(cls, **given) -> "Schedule":
        """A schedule with some of its fields, for a recipe; the others are None."""
        return cls(**{**dict.fromkeys(cls._fields), **given})  # type: ignore[arg-type]

    @property
    def given(self) -> dict[str, Any]:
        """The fields that are not None."""
        return {name: x for name, x in self._asdict().items() if x is not None}

    @property
    def lengths(self) -> list[int]:
        """The lengths of windows, in turn."""
        lengths = [self.length]
        shorter = self.start_length
        while 0 < shorter < self.length:
            lengths.insert(-1, shorter)
            shorter *= 2
        return lengths

    def length_in(self, step: int) -> int:
        """The tokens of each window of a step, counted from 0."""
        return self.lengths[step * len(self.lengths) // self.steps]

    @property
    def tokens(self) -> int:
        """The tokens of all windows."""
        number = len(self.lengths)
        firsts = [-(-i * self.steps // number) for i in range(number + 1)]  # steps of each length
        steps = [last - first for first, last in pairwise(firsts)]
        return self.batch_size * sum(x * length for x, length in zip(steps, self.lengths))

    def __str__(self) -> str:
        factor = (
            f", times {self.memory_factor:g} for parts that the teacher does not have"
            if self.memory_factor != 1
            else ""
        )
        repeats = f"; {self.repeats:.0%} of the windows repeat a passage" if self.repeats else ""
        lengths = f"{', then '.join(map(str, self.lengths))} tokens"
        chunks = f" in chunks of {self.chunk_length}" if 0 < self.chunk_length < self.length else ""
        return (
            f"{counted(self.steps, 'step')} of {counted(self.batch_size, 'window')} of {lengths}{chunks}, "
            f"learning rate {self.learning_rate:g}{factor} falling as a cosine{repeats}"
        )

    def check(self, stage: str) -> None:
        """Raise ValueError if a field is of another type or out of its range."""
        for name, kind in get_type_hints(Schedule).items():
            check_type(f"{name} of {stage}", getattr(self, name), kind)
        least = {
            "steps": 0,
            "batch_size": 1,
            "length": 2,
            "learning_rate": 0,
            "warmup": 0,
            "memory_factor": 0,
        }
        least |= {"start_length": 2 if self.start_length else 0, "chunk_length": 0}
        for name, smallest in least.items():
            value = getattr(self, name)
            check(smallest <= value < math.inf, f"{name} of {stage}", f"at least {smallest}", value)
            check(value <= LARGEST, f"{name} of {stage}", f"at most {LARGEST}", value)
        self._check_size(stage)
        start = self.start_length
        longest = self.length
        check(start <= longest, f"start_length of {stage}", f"at most its length {longest}", start)
        check(0 <= self.repeats <= 1, f"repeats of {stage}", "from 0 to 1", self.repeats)

    def _check_size(self, stage: str) -> None:
        """Raise ValueError if the windows of a step, or the places of all, need more memory than there is."""
        if not self.steps:
            return
        free = memory_for(torch.device("cpu"))
        numbers = {  # of int64 that are in memory at once, by the fields that they are products of
            ("steps", "batch_size"): self.steps * self.batch_size,
            ("batch_size", "length"): COLUMNS * self.batch_size * self.length,
        }
        for names, number in numbers.items():
            largest = max(names, key=lambda name: getattr(self, name))
            needed = 8 * number
            expected = f"less, since its windows need {needed / 1e9:,.1f} GB of {free / 1e9:,.1f} GB of memory"
            check(needed <= free, f"{largest} of {stage}", expected, getattr(self, largest))


TRAINED = {  # what learns in distillation, in words
    "all": "the whole student was",
    "attention": "the student without its embeddings and feed-forward layers was",
    "new": "the parts that its teacher does not have were",
}
# fields of a recipe with the schedules of its stages, in order
STAGES = ("transfer", "distillation", "fine_tuning")
BY_DEFAULT = Schedule.with_some()


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a student, together with its teacher and the text.

    What is None has a default that depends on the teacher, see `defaults`. `Plan.recipe` has a value for each.

    Args:
        to: the student's memory, a name in STUDENTS; `"attention"` for a student without one, whose layers have
            attention over a window; None to fine-tune a model and leave its architecture as it is.
        keep: what keeps the teacher's attention; default: `"heads:1/11"`, `"heads:2/3"` of a teacher in which few
            layers see everything, or `"none"` for families whose layers cannot have windows. Layer numbers, counted
            from 0, or words; it becomes a `Keep`. `"heads:1/10"` keeps no layer; instead a tenth of the key-value heads
            in replaced layers keep all keys and values, those that predictions of the teacher need most, see
            `rank_heads_by_predictions`. The other heads have what options say: by default a window of 64 tokens, four
            first ones and 371 others in the mean, in 8 bits; or with a memory of another kind a window of
            256 tokens and what left it. `"auto"` keeps the quarter of the layers that matter most (an eighth with
            `"auto:1/8"`), those whose heads' scores of the same ranking have the largest sum. `"retrieval:1/10"` ranks
            heads by their retrieval, see `rank_heads_by_retrieval`, which needs no gradients.
        options: fields of the family's config, such as `gate`. Other fields have the teacher's value or a preset.
        servable: whether the student gets the options that inference engines have, and is refused if none can run it.
        size: how much students without another memory hold, a name in SIZES; default: what `keep` and `options` say.
        kept_by_head: whether heads keep different numbers of older tokens, as many in total as with `num_kept_tokens`
            each, by what their errors do to the teacher's predictions, see `students.kept_tokens`. Default: yes, unless
            `options` say how many each head or layer keeps.
        transfer: schedule of attention transfer. `Schedule.with_some(steps=20)` gives some of its fields; others have
            defaults, here and in the next two. Windows of the default length are shortened for a teacher or a text that
            has fewer tokens. A stage with 0 steps is left out. Attention transfer is also left out if the student
            equals its teacher before any training, or has no parts to train in it.
        distillation: schedule of distillation, in which what `train` says learns from the teacher's predictions;
            default: 20 careful steps for a student whose heads keep older tokens, which begins near its teacher, and
            250 for others.
        fine_tuning: schedule of fine-tuning; default: no steps. Its windows may be longer than the teacher's largest
            position.
        train: what distillation trains. `"all"` weights; with `"attention"` all but embeddings and feed-forward layers,
            which stay the teacher's; the parts that are `"new"`, so that what equals the teacher stays so; or with
            `"lora:8"` these parts, and the other linear layers with LoRA of rank 8. Default: all weights of a student
            with a memory that its teacher does not have, `"attention"` of others, also with sinks.
        lora_rank: rank of LoRA in fine-tuning; default: all weights are trained.
        temperature: divides the logits of teacher and student in distillation; above 1, unlikely tokens count more.
        cross_entropy: weight of the cross-entropy with the text in the distillation loss, from 0 to 1; default: 0, or
            1 for a student that equals its teacher before any training.
        teacher_bits: 8 or 4: quantise the teacher to learn from; default: no quantisation.
        seed: seed for new weights and for the order of the text.
        goal: largest KL divergence from the teacher before training, in nats per token. In place of `keep`, it decides
            which share of the heads keeps all keys and values, and the others' windows; see `smallest_student`.
    """

    to: str | None = "attention"
    keep: Keep | str | Collection[int] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    servable: bool = False
    size: str | None = None
    kept_by_head: bool | None = None
    transfer: Schedule = BY_DEFAULT
    distillation: Schedule = BY_DEFAULT
    fine_tuning: Schedule = BY_DEFAULT
    train: str | None = None
    lora_rank: int | None = None
    temperature: float = 1.0
    cross_entropy: float | None = None
    teacher_bits: int | None = None
    seed: int = 0
    goal: float | None = None

    def __post_init__(self) -> None:
        if self.keep is not None:
            object.__setattr__(self, "keep", Keep.parse(self.keep))

    @property
    def schedules(self) -> dict[str, Schedule]:
        """The schedules of the stages by name, in order."""
        return {name: getattr(self, name) for name in STAGES}

    def check(self) -> None:
        """Raise ValueError if a value is wrong for every teacher and text."""
        check(isinstance(self.options, Mapping), "options", "names with values", self.options)
        for name, kind in get_type_hints(Recipe).items():
            if name not in ("options", "keep"):
                check_type(name, getattr(self, name), kind)
        for stage, schedule in self.schedules.items():
            if None not in schedule:
                schedule.check(stage)
        if self.goal is not None:
            others = {"keep": self.keep, "servable": self.servable, "size": self.size}
            given = [f"{name}={x}" for name, x in others.items() if x]
            wanted = "given without keep, servable and size"
            check(not given, "goal", wanted, f"{self.goal:g} with {' and '.join(given)}")
        self._check_transfer()
        check_loss(self.temperature, self.cross_entropy or 0)
        if self.train is not None:
            lora_rank_of(self.train)
        check(0 <= self.seed <= MAX_SEED, "seed", f"from 0 to {MAX_SEED}", self.seed)
        if self.lora_rank is not None:
            check(self.lora_rank >= 1, "lora_rank", "at least 1", self.lora_rank)
            has_steps = (self.fine_tuning.steps or 0) > 0
            check(has_steps, "lora_rank", "None without steps of fine_tuning", self.lora_rank)

    def _check_transfer(self) -> None:
        given = self.transfer.given
        for name, only, reason in (
            ("memory_factor", 1, "that stage trains memory layers only"),
            ("chunk_length", 0, "that stage trains each layer for itself"),
        ):
            value = given.get(name, only)
            check(value == only, f"{name} of transfer", f"{only}, since {reason}", value)


def check_loss(temperature: float, cross_entropy: float) -> None:
    """Raise ValueError if the temperature or the weight of a distillation loss is out of its range."""
    check(0 < temperature < math.inf, "temperature", "above 0", temperature)
    check(0 <= cross_entropy <= 1, "cross_entropy", "from 0 to 1", cross_entropy)


def lora_rank_of(train: str | None) -> int | None:
    """The rank of `lora:RANK`, or None for `all`, `attention` and `new`, and without anything that is trained.

    Raises:
        ValueError: for other words.
    """
    if train is None or train in TRAINED:
        return None
    kind, _, rank = train.partition(":")
    has_rank = kind == "lora" and rank.isdecimal() and int(rank) > 0
    check(has_rank, "train", "all, attention, new, or lora:RANK such as lora:8", train)
    return int(rank)
