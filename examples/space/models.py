"""The models of the page: a teacher, and students of it whose heads keep more or fewer tokens."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_memory import MemoryTransformerConfig, shrink_cache
from hf_memory.conversion import load_teacher, load_tokenizer

DEMO = Path("demo_output")  # where `hf-memory demo` puts its models
SMOLLM2 = Path(__file__).with_name(
    "smollm2"
)  # what was found for SmolLM2-135M: recipes/smollm2.yaml
PARTS = (1, 2, 4, 8)  # budgets to choose from: what was found, a half of it ...


class Models(NamedTuple):
    """What answers."""

    name: str
    teacher: PreTrainedModel
    students: dict[int, PreTrainedModel]  # by the mean number of older tokens that a head keeps
    tokenizer: PreTrainedTokenizerBase


def load(name: str | None, config: str | None = None) -> Models:
    """Load a teacher and make its students; each step is printed.

    Args:
        name: the teacher: a folder, a name on the Hub, or a GGUF file. None for that of the demo, which is made if it
            is not there.
        config: a folder, or a name on the Hub, with the config of a student of this teacher. Default: that of the
            demo's student, or that of SmolLM2-135M if it fits; otherwise it is found, which takes minutes.
    """
    title = Path(name or "").name.removesuffix(".gguf")
    if name is None:
        make_demo()
        name, config = str(DEMO / "teacher"), str(DEMO / "student")
        title = "a small Llama that has read Python's documentation"
    with said(f"Loading {name}"):
        teacher = load_teacher(name).eval()
        tokenizer = load_tokenizer(name)
    with said("Making its students"):
        found = student_config(teacher, tokenizer, config)
        students = dict(make_students(teacher, found))
    return Models(title, teacher, students, tokenizer)


def make_demo() -> None:
    """Run `hf-memory demo` unless its models are there."""
    if (DEMO / "student").is_dir():
        return
    print(
        f"There is no {DEMO}: hf-memory demo makes it, in four minutes on two idle cores",
        flush=True,
    )
    command = [sys.executable, "-m", "hf_memory", "demo", "--output", str(DEMO)]
    subprocess.run(command, check=True)


@contextmanager
def said(what: str) -> Iterator[None]:
    """Print what is being done, and how long it took."""
    print(f"{what} ...", flush=True)
    start = time.perf_counter()
    yield
    print(f"... took {time.perf_counter() - start:.0f} seconds", flush=True)


def student_config(
    teacher: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str | None
) -> MemoryTransformerConfig:
    """The config with a name, or that of SmolLM2-135M if the teacher has its sizes, or one that is found now."""
    if name is not None:
        return MemoryTransformerConfig.from_pretrained(name)
    try:
        return shrink_cache(teacher, SMOLLM2).config
    except ValueError:  # it has other sizes
        return shrink_cache(teacher, tokenizer=tokenizer).config


def make_students(
    teacher: PreTrainedModel, config: MemoryTransformerConfig
) -> Iterator[tuple[int, PreTrainedModel]]:
    """Students whose heads keep parts of the budgets of a config, by the mean of these; all have the same weights."""
    for part in PARTS:
        budgets = [[number // part for number in of_layer] for of_layer in config.kept_tokens]
        student = shrink_cache(teacher, config, num_kept_tokens=budgets)
        yield round(mean(budgets_of(student.config))), student


def budgets_of(config: MemoryTransformerConfig) -> list[int]:
    """The number of older tokens of each key-value head that does not keep everything."""
    whole = config.full_attention_heads or [()] * config.num_hidden_layers
    return [
        number
        for of_layer, excepted in zip(config.kept_tokens, whole)
        for head, number in enumerate(of_layer)
        if head not in excepted
    ]


def count_heads(config: MemoryTransformerConfig) -> tuple[int, int]:
    """How many key-value heads do not keep everything, and how many there are."""
    return len(budgets_of(config)), config.num_hidden_layers * config.num_key_value_heads
