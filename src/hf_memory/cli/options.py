"""Flags that several commands have, and how their values are read."""

from pathlib import Path
from typing import Annotated

import typer
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.constants import CONFIG_NAME

from hf_memory.conversion.run_file import RUN, read_flags

SOURCES = (
    "folder of text, text file, .jsonl or .parquet with a field text or messages, name[:config] of a Hub data set, "
    "or teacher:500k[:prompts.txt], which the teacher writes"
)


def _flags_of_file(context: typer.Context, file: Path | None) -> Path | None:
    """Let a YAML file give what the command line does not; the names are those of the flags."""
    if file is not None:
        context.default_map = read_flags(file, context.command.params)
    return file


Option = Annotated[
    list[str] | None, typer.Option("--option", "-o", help="name=value of the student's config; may be repeated.")
]
Texts = Annotated[list[str], typer.Option("--text", help=f"To learn on: {SOURCES}; may be repeated.")]
MaxTokens = Annotated[int | None, typer.Option(help="Tokens of the text to read; default: all.", min=1)]
MeasureTokens = Annotated[int, typer.Option(help="Held-out tokens that each model reads to be compared.", min=1024)]
Checkpoints = Annotated[Path | None, typer.Option(help="Folder to resume from when a run was stopped.")]
LoraRank = Annotated[
    int | None, typer.Option(help="Of low-rank updates that fine-tuning learns; default: all weights.")
]
Training = Annotated[
    list[str] | None,
    typer.Option("--training", "-t", help="name=value of transformers' TrainingArguments; may be repeated."),
]
Overwrite = Annotated[bool, typer.Option(help="Replace the result of an earlier run.")]
DryRun = Annotated[bool, typer.Option(help="Show the plan, and whether all fits together; write nothing.")]
Seed = Annotated[int, typer.Option(help="Of new weights, the order of the text, and sampling.")]
Config = Annotated[
    Path | None,
    typer.Option(is_eager=True, callback=_flags_of_file, help=f"YAML file with flags, such as {RUN} of a result."),
]


def read_pairs(pairs: list[str] | None) -> dict:
    """name=value of a config, the value read as a number, true or false where it is one."""
    options = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"option must look like name=value, got {pair!r}")
        options[name] = _value(value)
    return options


def _value(text: str) -> bool | int | float | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def found(model: str) -> str:
    """A folder that exists, or the name of a model in the cache or on the Hub, which is asked once and not for long."""
    if Path(model).is_dir():
        return model
    wanted = f"model must be a folder that exists or the name of a repository on the Hub, got {model}"
    if model.startswith(("/", ".", "~")):
        raise ValueError(wanted)
    if not isinstance(try_to_load_from_cache(model, CONFIG_NAME), str):
        try:
            HfApi().model_info(model, timeout=10)
        except Exception as error:  # whatever the Hub's client raises, the name leads to no model
            raise ValueError(f"{wanted}: {error}") from error
    return model
