"""The models of the page: a teacher, and students of it that keep more or fewer tokens."""

import copy
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

import hf_memory
from hf_memory.conversion import load_teacher, load_tokenizer

HERE = Path(__file__).parent
DEMO = Path("demo_output")  # where `hf-memory demo` puts its models
SMOLLM2 = HERE / "smollm2"  # the config of a student of SmolLM2-135M
PARTS = (1, 2, 4, 8)  # budgets to choose from: that of the config, a half of it ...


class Models(NamedTuple):
    """What answers."""

    name: str
    teacher: PreTrainedModel
    students: dict[int, PreTrainedModel]  # by the mean number of older tokens that a head keeps
    tokenizer: PreTrainedTokenizerBase


def load(teacher: str | None, config: str | None) -> Models:
    """Load a teacher and make its students; each step is printed.

    Args:
        teacher: a folder, a name on the Hub, or a GGUF file; None for that of the demo, which is made if it is not
            there.
        config: a folder or name on the Hub with the config of a student of this teacher. Default: that of the demo's
            student, or that of SmolLM2-135M if it fits; otherwise heads and budgets are found, which takes minutes.
    """
    if teacher is None:
        if not (DEMO / "student").is_dir():
            print(f"There is no {DEMO}: hf-memory demo trains its models, in four minutes on two cores.", flush=True)
            subprocess.run([sys.executable, "-m", "hf_memory", "demo", "--output", DEMO], check=True)
        teacher, config = str(DEMO / "teacher"), str(DEMO / "student")
    with said(f"Loading {teacher}"):
        loaded = load_teacher(teacher).eval()
        tokenizer = load_tokenizer(teacher)
    if config is None and _fits(AutoConfig.from_pretrained(SMOLLM2), loaded.config):
        config = str(SMOLLM2)
    with said("Making its students" if config else "Finding what heads of a student must keep"):
        found = _config(loaded, tokenizer, config)
        students = dict(_students(loaded, found))
    return Models(loaded.config.name_or_path or teacher, loaded, students, tokenizer)


@contextmanager
def said(what: str) -> Iterator[None]:
    """Print what is being done, and how long it took."""
    print(f"{what} ...", end=" ", flush=True)
    start = time.perf_counter()
    yield
    print(f"{time.perf_counter() - start:.1f} s", flush=True)


def _fits(config: Any, teacher: Any) -> bool:
    """Whether a student's config has the sizes of a teacher."""
    sizes = "hidden_size", "num_hidden_layers", "num_key_value_heads", "head_dim", "vocab_size"
    return all(getattr(config, name) == getattr(teacher, name, None) for name in sizes)


def _config(teacher: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str | None) -> Any:
    """The config of a student: the one with a name, or one that is found with the standard library's topics."""
    if name is not None:
        return AutoConfig.from_pretrained(name)
    text = "\n\n".join(topics.values())
    return hf_memory.shrink_cache(teacher, text=text, tokenizer=tokenizer).config


def _students(teacher: PreTrainedModel, config: Any) -> Iterator[tuple[int, PreTrainedModel]]:
    """Students whose heads keep parts of the budgets of a config, by the mean of these; all share one set of weights."""
    for part in PARTS:
        scaled = copy.deepcopy(config)
        scaled.num_kept_tokens = [[n // part for n in layer] for layer in config.kept_tokens]
        yield mean_kept(scaled), hf_memory.shrink_cache(teacher, scaled)


def mean_kept(config: Any) -> int:
    """The mean number of older tokens of the heads that do not keep everything."""
    full = config.full_attention_heads or [()] * config.num_hidden_layers
    numbers = [
        number
        for of_layer, whole in zip(config.kept_tokens, full)
        for head, number in enumerate(of_layer)
        if head not in whole
    ]
    return round(sum(numbers) / len(numbers))
