"""A run of the command line as a YAML file: the names of its flags and their values."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import typer
import yaml

from hf_memory.conversion.plan import Plan
from hf_memory.conversion.recipe import Schedule
from hf_memory.files.folders import check_regular

RUN = "run.yaml"
REMOVED = {  # names in files of earlier versions: the value with which they had no effect, and what to do otherwise
    "spread_kept": (False, "leave it out: kept-by-head, the default, gives each head a number"),
    "scored_by": (
        None,
        "use hf_memory.conversion.distill, which takes a larger model as the teacher",
    ),
}
LONGEST = 2**16  # bytes of a file; usual ones have 2,000
# flags that do not change a result
OF_ONE_CALL = {
    "config",
    "gpu",
    "dry_run",
    "goal",
    "overwrite",
    "help",
}
# parameters whose words name models or files, as those that are a Path do
OF_FILES = {"teacher", "model", "text"}


def parameters_of(context: typer.Context) -> Sequence:
    """What a file may give to the command that runs: its flags and its settings."""
    command = context.command
    return [*command.params, *command.in_file]  # type: ignore[attr-defined]


def read_flags(file: Path, parameters: Sequence) -> dict[str, Any]:
    """The values in a file, by the names of a command's parameters.

    A flag that may be repeated takes a list, one value, or names with values for name=value.

    Args:
        file: YAML of names, as on the command line or with underscores, and values.
        parameters: the command's parameters.

    Raises:
        ValueError: if the file is not YAML of names and values, has aliases, or has a name that is no flag.
        OSError: if the file cannot be read.
    """
    check_regular("config", file)
    if (size := file.stat().st_size) > LONGEST:
        raise ValueError(
            f"config must be a file of at most {LONGEST:,} bytes, got {file} of {size:,} bytes"
        )
    try:
        text = file.read_text(encoding="utf-8")
        # few of them can stand for very much
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            raise ValueError("it has an alias (*name)")
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(
            f"config must be a YAML file, got {file}: {' '.join(str(error).split())}"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(
            f"config must be a YAML file of names and values, got other content in {file}"
        )
    by_name = {name: x for x in parameters if x.name not in OF_ONE_CALL for name in _names(x)}
    given = {
        str(name).replace("-", "_"): value for name, value in content.items() if value is not None
    }
    for name, (unused, advice) in REMOVED.items():
        if (value := given.pop(name, unused)) != unused:
            removed = name.replace("_", "-")
            raise ValueError(f"config must not have {removed} since 0.2.0: {advice}; got {value!r}")
    if unknown := sorted(set(given) - set(by_name)):
        flags = ", ".join(dict.fromkeys(_names(x)[0].replace("_", "-") for x in by_name.values()))
        raise ValueError(f"config must have names from {flags}, got {', '.join(unknown)}")
    return {by_name[name].name: _value(by_name[name], value) for name, value in given.items()}


class Flags(NamedTuple):
    """The flags of a call: the parameters of its command, and their values by name."""

    parameters: Sequence
    values: Mapping[str, Any]

    @classmethod
    def of(cls, context: typer.Context, **chosen) -> Self:
        """The flags of the command that runs, with those that were chosen for the user."""
        return cls(parameters_of(context), {**context.params, **chosen})

    def files(self, plan: Plan) -> dict[str, str]:
        """The run file by its name: all settings with defaults and those of a plan, so that a run can be repeated."""
        recipe = plan.recipe
        option = [f"{name}={_word(x)}" for name, x in recipe.options.items()]
        values = {**self.values, **vars(recipe), "option": option or None}
        values["keep"] = None if recipe.keep is None else str(recipe.keep)
        values |= {name: x._asdict() for name, x in recipe.schedules.items() if None not in x}
        described = {
            _names(x)[0].replace("_", "-"): _described(x.name, values[x.name])
            for x in self.parameters
            if x.name not in OF_ONE_CALL and values.get(x.name) not in (None, [], ())
        }
        return {RUN: yaml.safe_dump(described, sort_keys=False, allow_unicode=True)}


def _described(name: str, value: Any) -> Any:
    """The value of a parameter for a file, in which paths begin at the root, so that they hold in other folders."""
    if isinstance(value, list | tuple):
        return [_described(name, x) for x in value]
    if isinstance(value, Path):
        return str(value.absolute())
    return _from_anywhere(value) if name in OF_FILES else value


def _from_anywhere(value: str) -> str:
    """The name of a model or a text, which begins at the root if it is a path of this folder."""
    before, _, prompts = value.rpartition(":")
    file, equals, weight = value.rpartition("=")
    # which is False for what is too long for a path
    if value and os.path.exists(value):
        return str(Path(value).absolute())
    if equals and os.path.exists(file):
        return f"{Path(file).absolute()}={weight}"
    if before.startswith("teacher:") and os.path.exists(prompts):
        return f"{before}:{Path(prompts).absolute()}"
    return value


def read_schedule(stage: str, pairs: Sequence[str] | None) -> Schedule:
    """A schedule of which some fields are given as name=value.

    Args:
        stage: the name of the stage in error messages.
        pairs: words of the form name=value, or several of these with commas between them; the last value counts.

    Raises:
        ValueError: if one is not name=value, a name is not a field, or a value is not a number.
    """
    given = {}
    for pair in ",".join(pairs).split(",") if pairs else ():
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or name not in Schedule._fields:
            fields = ", ".join(Schedule._fields)
            raise ValueError(f"{stage} must have name=value with names from {fields}, got {pair!r}")
        kind = Schedule.__annotations__[name]
        try:
            number = float(value)
            given[name] = kind(number)
        except (ValueError, OverflowError) as error:
            raise ValueError(f"{name} of {stage} must be a number, got {value!r}") from error
        if given[name] != number and not math.isnan(number):
            raise ValueError(f"{name} of {stage} must be a whole number, got {value!r}")
    return Schedule.with_some(**given)


def _names(parameter) -> list[str]:
    """The names that a parameter may have in a file; the first is the one that is written."""
    return [name.lstrip("-").replace("-", "_") for name in [*parameter.opts, parameter.name]]


def _value(parameter, value):
    if parameter.multiple and isinstance(value, dict):
        return [f"{name}={_word(x)}" for name, x in value.items()]
    words = [_word(x) for x in value] if isinstance(value, list) else [_word(value)]
    return words if parameter.multiple else ",".join(words)


def _word(value) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_word, value))}]"
    if isinstance(value, dict):
        return json.dumps(value)
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
