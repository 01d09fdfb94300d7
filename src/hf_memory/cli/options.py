"""Flags that several commands have, and how their values are read."""

import json
import math
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.constants import CONFIG_NAME
from transformers import PreTrainedConfig

from hf_memory.cli.command import ADVANCED, IN_FILE, LONG, WHAT, WHERE
from hf_memory.cli.run_file import RUN, parameters_of, read_flags
from hf_memory.cli.terminal import console
from hf_memory.conversion import find_gguf
from hf_memory.conversion.costs import DEVICES
from hf_memory.evaluation import ITEMS
from hf_memory.modeling.checks import check, check_type
from hf_memory.modeling.configuration import MemoryConfig

SOURCES = "folder of text, text file, .jsonl or .parquet with a field text or messages, or name[:config] on the Hub"
WORDS = {"true": True, "false": False, "null": None}
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", re.IGNORECASE)
GENERATED = "teacher:500k[:prompts.txt] is text that the teacher writes"


def _flags_of_file(context: typer.Context, file: Path | None) -> Path | None:
    """Take values from a YAML file for flags that are not on the command line; names are those of the flags."""
    if file is not None:
        context.default_map = read_flags(file, parameters_of(context))
    return file


def after_file(
    context: typer.Context, parameter: typer.CallbackParam, words: list[str] | None
) -> list[str]:
    """Words of the command line after those of the file: each adds to them, and the last value of a name counts."""
    name = str(parameter.name)
    source: Any = context.get_parameter_source(name)
    of_file = (context.default_map or {}).get(name, ()) if source.name == "COMMANDLINE" else ()
    return [*of_file, *(words or ())]


def in_file(help: str, *names: str, **how):
    """A setting that is no flag, since few need it: it is given in the file of --config."""
    return typer.Option(*names, help=help, hidden=True, rich_help_panel=IN_FILE, **how)


Option = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        callback=after_file,
        help="An option of the student's config, such as cache_bits=null; may be repeated.",
        rich_help_panel=WHAT,
    ),
]
MIXED = "a.txt=0.7 and b.jsonl=0.3 are mixed by these weights"
Texts = Annotated[
    list[str],
    typer.Option(
        "--text",
        help=f"Training text: {SOURCES}; may be repeated: {MIXED}. {GENERATED}.",
        rich_help_panel=WHAT,
    ),
]
TOKENS_READ = "Number of tokens of the text to read; default: all."
QUESTIONS = "Questions of each kind on which answers are scored; 0: none."
MaxTokens = Annotated[int | None, typer.Option(help=TOKENS_READ, min=1, rich_help_panel=LONG)]
Items = Annotated[int, typer.Option(help=QUESTIONS, min=0, rich_help_panel=LONG)]
MeasureTokens = Annotated[
    int, in_file("Number of held-out tokens on which models are compared.", min=1024)
]
Checkpoints = Annotated[
    Path | None,
    typer.Option(
        help="Folder from which the same command goes on after it was stopped.",
        rich_help_panel=WHERE,
    ),
]
LORA = "Fine-tune with LoRA of this rank; default: train all weights."
SEED = "Random seed."
Seed = Annotated[int, typer.Option(help=SEED, rich_help_panel=ADVANCED)]
CacheBits = Annotated[
    str | None,
    typer.Option(
        help="Bits of each number of keys and values in the cache: 8, 4, or full_attention_heads=4,window=8; "
        "of matrices: recurrent_states=16 or 8; "
        "default: as the model's config says.",
        rich_help_panel=ADVANCED,
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        is_eager=True,
        callback=_flags_of_file,
        help="YAML file with values of options and of the settings below; what is typed wins. convert and fine-tune "
        f"write one, {RUN}.",
        rich_help_panel=ADVANCED,
    ),
]


@dataclass(frozen=True)
class TrainingFlags:
    """Flags of the commands that train a model."""

    max_tokens: MaxTokens = None
    measure_tokens: MeasureTokens = 2**16
    assistant_only_loss: Annotated[
        bool,
        in_file(
            "Of conversations, learn to predict the assistant's turns only.",
            "--assistant-only-loss",
        ),
    ] = False
    items: Items = ITEMS
    checkpoints: Checkpoints = None
    training: Annotated[
        list[str] | None,
        typer.Option(
            "--training",
            "-t",
            callback=after_file,
            help="One of transformers' TrainingArguments, such as bf16=true; may be repeated.",
            rich_help_panel=ADVANCED,
        ),
    ] = None
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="Replace the result of an earlier run.", rich_help_panel=WHERE
        ),
    ] = False
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print the plan and check that all of it fits together; train and write nothing. Heads are ranked as "
            "in the run, which takes minutes, unless --gpu is given.",
            rich_help_panel=LONG,
        ),
    ] = False
    gpu: Annotated[
        str | None,
        typer.Option(
            help=f"With --dry-run: memory and time on {', '.join(DEVICES)}, or 8xh200.",
            rich_help_panel=LONG,
        ),
    ] = None
    config: Config = None


def read_pairs(pairs: list[str] | None, flag: str = "option") -> dict:
    """Parse the name=value pairs of a flag.

    A value is a number, true, false, null, a list as [a, b], JSON in braces, or a string.
    """
    options = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"{flag} must look like name=value, got {pair!r}")
        options[name] = _value(value)
    return options


def _value(text: str) -> bool | int | float | str | list | dict | None:
    if text.startswith("{") and text.endswith("}"):
        with suppress(ValueError):  # of what is no JSON
            return json.loads(text)
    if text.startswith("[") and text.endswith("]"):
        with suppress(ValueError):  # of words that are not quoted
            return json.loads(text)
        return [_value(part.strip()) for part in text[1:-1].split(",")]
    if text == "None":  # as Python writes it; "none" is a value of some options
        return None
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    if not NUMBER.fullmatch(text):
        return text
    return int(text) if text.lstrip("+-").isdecimal() else float(text)


def set_cache_bits(config: PreTrainedConfig, words: str | None) -> None:
    """Set `cache_bits` of a config as a flag says: 8, 4, NAME=BITS with commas between several, or JSON; None: as is.

    Raises:
        ValueError: if the config is not of this package, or the bits are none that it can have.
    """
    if words is None:
        return
    if not isinstance(config, MemoryConfig):
        raise ValueError(
            f"cache_bits must not be given for a model of another package, got {words} for {config.model_type}"
        )
    is_pairs = "=" in words and not words.startswith("{")
    bits = read_pairs(words.split(","), "cache_bits") if is_pairs else _value(words)
    check_type("cache_bits", bits, int | dict[str, int | dict[str, int]])
    config.cache_bits = bits  # type: ignore[assignment]
    config.validate_architecture()


def read_weights(texts: list[str]) -> tuple[list[str], list[float] | None]:
    """Sources of text without the weights that they may have, and these weights."""
    sources = []
    weights = []
    for text in texts:
        source, weight = _weighted(text)
        sources.append(source)
        weights += [] if weight is None else [weight]
    if weights and len(weights) < len(texts):
        raise ValueError(
            f"all texts or none must have a weight, as a.txt=0.7, got {', '.join(texts)}"
        )
    return sources, weights or None


def _weighted(text: str) -> tuple[str, float | None]:
    """A source of text without its weight, and the weight; None if it has none."""
    source, equals, word = text.rpartition("=")
    weight = _number(word)
    is_source = weight is None and not os.path.exists(source)
    if not equals or is_source or os.path.exists(text):
        return text, None
    is_right = weight is not None and 0 < weight < math.inf
    check(is_right, f"weight of {source}", "a number above 0, as in a.txt=0.7", word)
    return source, weight


def read_goal(words: str) -> float:
    """The KL of a goal such as kl=0.05."""
    name, _, value = words.partition("=")
    kl = _number(value)
    if name != "kl" or kl is None or not 0 <= kl < math.inf:
        raise ValueError(f"goal must be kl=NUMBER such as kl=0.05, got {words}")
    return kl


def _number(word: str) -> float | None:
    """The number that a word is, also nan or inf; None if it is none."""
    with suppress(ValueError):
        return float(word)
    return None


def named_after(model: str, what: str) -> Path:
    """A folder here that is named after a model, without where it is, and after what is made of it."""
    file = find_gguf(model)
    name = Path(os.path.abspath(model)).name if file is None else file.stem
    return Path(f"{name}-{what}")


def say_output(folder: Path) -> None:
    """Print where the result will be, if the user has not said it."""
    console.print(
        f"The result will be in {folder}; --output FOLDER puts it elsewhere.", soft_wrap=True
    )


def found(model: str) -> str:
    """Check that a model is a folder, a GGUF file, or a name in the Hub's cache or on the Hub, with a short timeout."""
    if Path(model).is_dir() or find_gguf(model):
        return model
    wanted = (
        f"model must be a folder that exists or the name of a repository on the Hub, got {model}"
    )
    if model.startswith(("/", ".", "~")):
        raise ValueError(wanted)
    if not isinstance(try_to_load_from_cache(model, CONFIG_NAME), str):
        try:
            HfApi().model_info(model, timeout=10)
        except Exception as error:  # whatever the Hub's client raises, the name leads to no model
            raise ValueError(f"{wanted}: {error}") from error
        console.print(f"{model} is downloaded from the Hub first.", soft_wrap=True)
    return model
