"""What the reference has from the code: families and their configs, states with their shapes, and commands."""

import re
from collections.abc import Iterator

from hf_memory import FAMILIES
from hf_memory.cli import load
from hf_memory.modeling.gate_registration import TABLES
from hf_memory_cli import COMMANDS

OPTIONS = "options: {members: false, heading_level: 4}"  # of a section


def families() -> str:
    """A section for each family: its model classes, and the options of its config."""
    sections = []
    for family in FAMILIES:
        name = family.config.__name__
        classes = (family.model, family.causal_lm, *family[3:5])
        models = ", ".join(f"`{model.__name__}`" for model in classes)
        title = name.removesuffix("Config")
        sections.append(f"## {title}\n\n{models}\n\n::: hf_memory.{name}\n    {OPTIONS}")
    return "\n\n".join(sections)


def states() -> str:
    """A table for each family: the states of one of its layers, for each gate that has others."""
    tables = []
    for family in FAMILIES:
        gates = TABLES.get(family.config, {})
        layers = {f'gate="{gate}"': family.config(num_hidden_layers=1, gate=gate) for gate in gates}
        layers = layers or {"": family.config(num_hidden_layers=1)}
        held: dict[tuple[str, ...], list[str]] = {}
        for name, config in layers.items():
            rows = tuple(row(state, spec) for state, spec in config.state_specs[0].items())
            held.setdefault(rows, []).append(f"`{name}`" if name else "")
        tables.append(f"### {family.config.__name__.removesuffix('Config')}")
        for rows, names in held.items():
            head = "| state | shape | dtype | grows |\n|---|---|---|---|\n"
            tables.append(", ".join(filter(None, names)))
            tables.append(head + "\n".join(rows))
    return "\n\n".join(filter(None, tables))


def row(name: str, state) -> str:
    """A state in a line of a table."""
    dtype = "" if state.dtype is None else str(state.dtype).removeprefix("torch.")
    grows = "with each token" if state.growth == "token" else "no"
    shape = "[" + ", ".join(map(str, state.shape)) + "]"
    return f"| `{name}` | {shape} | {dtype} | {grows} |"


def commands() -> str:
    """A table of the commands."""
    lines = [f"| [`{name}`](commands/{name}.md) | {line} |" for name, line in COMMANDS.items()]
    return "\n".join(["| command | what it does |", "|---|---|", *lines])


def command_pages() -> Iterator[tuple[str, str]]:
    """The name of each command, and its page: its help, then its arguments and options by panel."""
    for name in COMMANDS:
        command = load(name)
        context = command.make_context(name, [], resilient_parsing=True)
        usage = " ".join(["hf-memory", name, *command.collect_usage_pieces(context)])
        panels: dict[str, list[str]] = {}
        for option in command.in_groups():
            kind = "Arguments" if option.param_type_name == "argument" else "Options"
            panel = panels.setdefault(option.rich_help_panel or kind, [])
            written, text = option.get_help_record(context)
            panel.append(f"- `{written}`: {plain(text)}")
        parts = [f"# {name}", plain(command.help), f"```text\n{usage}\n```"]
        for panel, options in panels.items():
            parts += [f"## {panel}", "\n".join(options)]
        if command.epilog:
            parts.append(plain(command.epilog))
        yield name, "\n\n".join(parts) + "\n"


def plain(text: str) -> str:
    """A text of a terminal, of which Markdown takes no character for a mark; flags and the example are code."""
    parts = re.split(r"(^Example: .*$|(?<![\w-])--?[a-z][\w-]*)", text, flags=re.MULTILINE)
    words = [re.sub(r"([<*_])", r"\\\1", part) for part in parts[::2]]
    code = [re.sub(r"^(Example: )?(.*)", r"\1`\2`", part) for part in parts[1::2]]
    return "".join(part for pair in zip(words, [*code, ""]) for part in pair)


PLACES = {"<!-- families -->": families, "<!-- states -->": states, "<!-- commands -->": commands}
