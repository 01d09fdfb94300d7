"""A command whose hidden options are no arguments, but settings of the YAML file that --config names."""

from copy import copy

from typer.core import TyperCommand

WHAT = "What"
LONG = "How long"
WHERE = "Where"
ADVANCED = "Advanced"
IN_FILE = "Settings in the file of --config only"
GROUPS = None, WHAT, LONG, WHERE, ADVANCED, IN_FILE  # titles of parts of the help, in this order


class Command(TyperCommand):
    """A command; `in_file` are the parameters that only a file gives, under the names of flags without dashes."""

    def __init__(self, *args, **how):
        super().__init__(*args, **how)
        self.in_file = [x for x in self.params if getattr(x, "hidden", False)]
        self.params = [x for x in self.params if x not in self.in_file]
        for setting in self.in_file:
            setting.hidden = False
            setting.opts = [name.lstrip("-") for name in setting.opts]

    def parse_args(self, ctx, args):
        """Read the arguments, and then the settings, which are those of the file or defaults."""
        names = {f"--{name}": name for setting in self.in_file for name in setting.opts}
        for word in args:
            flag = word.partition("=")[0]
            if flag in names:
                raise ValueError(
                    f'{flag} must be given in a file: --config FILE, with the line "{names[flag]}: VALUE"'
                )
        rest = super().parse_args(ctx, args)
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
        super(Command, whole).format_help(ctx, formatter)
