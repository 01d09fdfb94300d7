"""A command whose hidden options are no arguments, but settings of the YAML file that --config names."""

from copy import copy

import typer
from typer.core import TyperCommand

WHAT = "What"
LONG = "How long"
WHERE = "Where"
ADVANCED = "Advanced"
IN_FILE = "Settings in the file of --config only"
GROUPS = None, WHAT, LONG, WHERE, ADVANCED, IN_FILE  # titles of parts of the help, in this order
VALUES = {  # what the help calls the value of an argument, by its name; others are called by their type
    "teacher": "TEACHER",
    "student": "STUDENT",
    "model": "MODEL",
    "against": "MODEL",
    "text": "FILE",
    "config": "FILE",
    "output": "FOLDER",
    "checkpoints": "FOLDER",
    "to": "MEMORY",
    "keep": "WHAT",
    "train": "WHAT",
    "goal": "kl=NUMBER",
    "option": "NAME=VALUE",
    "training": "NAME=VALUE",
    "transfer": "NAME=VALUE,...",
    "distillation": "NAME=VALUE,...",
    "fine_tuning": "NAME=VALUE,...",
    "gpu": "NAME",
    "device": "NAME",
    "tasks": "NAME,...",
    "lengths": "NUMBER,...",
}


class Command(TyperCommand):
    """A command; `in_file` are the parameters that only a file gives, under the names of flags without dashes."""

    def __init__(self, *args, **how):
        super().__init__(*args, **how)
        self.in_file = [x for x in self.params if getattr(x, "hidden", False)]
        self.params = [x for x in self.params if x not in self.in_file]
        for setting in self.in_file:
            setting.hidden = False
            setting.opts = [name.lstrip("-") for name in setting.opts]
        for parameter in (*self.params, *self.in_file):
            parameter.metavar = parameter.metavar or VALUES.get(parameter.name)

    def parse_args(self, ctx, args):
        """Read the arguments, and then the settings, which are those of the file or defaults."""
        names = {f"--{name}": name for setting in self.in_file for name in setting.opts}
        for word in args:
            flag = word.partition("=")[0]
            if flag in names:
                raise ValueError(
                    f'{flag} must be given in a file: --config FILE, with the line "{names[flag]}: VALUE"'
                )
        try:
            rest = super().parse_args(ctx, args)
        except typer.BadParameter as error:
            if not error.message:  # something is missing, of which the error says the name alone
                error.message = getattr(error.param, "help", "")
            raise
        for setting in self.in_file:
            setting.handle_parse_result(ctx, {}, [])
        return rest

    def in_groups(self):
        """All arguments, flags and settings, in the order of their groups."""
        parameters = [*self.params, *self.in_file]
        return sorted(parameters, key=lambda x: GROUPS.index(x.rich_help_panel))

    def format_help(self, ctx, formatter):
        """Write the help in groups, the last of which has the settings."""
        whole = copy(self)
        whole.params = self.in_groups()
        # not in a group of its own, before all others
        self.get_help_option(ctx).rich_help_panel = ADVANCED
        super(Command, whole).format_help(ctx, formatter)
